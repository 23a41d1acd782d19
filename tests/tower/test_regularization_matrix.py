"""N towers against a plain TF1 program on one device, for losses with terms of the weights.

Shapes of the finished loss x ways to register L2 x sources inside of the model x control flow, each
built by clones and by calls, with reference and resource variables; and models that are put
together from these parts at random.
"""

import itertools
import random

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

import sample_models as samples
import towers

X = np.arange(24, dtype=np.float64).reshape(8, 3) / 10. - 1.
KEY = tf.GraphKeys.REGULARIZATION_LOSSES
COPIES = ('auto', 'reuse')
KINDS = (False, True)  # reference and resource variables

keras = tf.keras


# ---- ways to have a registered L2 loss of a kernel [3, 1] ----------------------------------------

def l2(w):
    return 0.3 * tf.reduce_sum(tf.square(w))


def by_get_variable(x):
    return tf.matmul(x, tf.get_variable('w', [3, 1], x.dtype, regularizer=l2))


def by_scope(x):
    with tf.variable_scope('scope', regularizer=l2):
        return tf.matmul(x, tf.get_variable('w', [3, 1], x.dtype))


def by_slim(x):
    return slim.fully_connected(x, 1, activation_fn=None, weights_regularizer=l2)


def by_slim_variable(x):
    return tf.matmul(x, slim.model_variable('w', [3, 1], x.dtype, regularizer=l2))


def by_hand(x):
    w = tf.get_variable('w', [3, 1], x.dtype)
    tf.add_to_collection(KEY, l2(w))
    return tf.matmul(x, w)


def by_add_loss(x):
    w = tf.get_variable('w', [3, 1], x.dtype)
    tf.losses.add_loss(l2(w), KEY)
    return tf.matmul(x, w)


def by_keras(x):
    """A layer whose losses the program registers, as it has those of its other layers."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_regularizer=l2, dtype=x.dtype.name,
                               name='keras')
    out = layer(x)
    for loss in layer.losses:
        tf.add_to_collection(KEY, loss)
    return out


def by_tf_layers(x):
    return tf.layers.dense(x, 1, kernel_regularizer=l2)


WAYS = {
    'get_variable': by_get_variable, 'scope': by_scope, 'slim': by_slim,
    'slim.model_variable': by_slim_variable, 'hand': by_hand, 'add_loss': by_add_loss,
    'keras': by_keras}
if samples.HAS_TF_LAYERS:
    WAYS['tf.layers'] = by_tf_layers


# ---- shapes of the finished loss, of the data's d and the regularization's r ---------------------

def not_nan(total):
    return tf.where(tf.is_nan(total), tf.zeros_like(total), total)


SHAPES = {
    'sum': lambda d, r: d + r,
    'reduce_mean': lambda d, r: tf.reduce_mean(d + r),
    'reduce_mean of a vector': lambda d, r: tf.reduce_mean([d + r, d + r]),
    'Print': lambda d, r: tf.Print(d + r, [d], first_n=0),
    'check_numerics': lambda d, r: tf.check_numerics(d + r, 'total'),
    'where': lambda d, r: not_nan(d + r),
    'clip_by_value': lambda d, r: tf.clip_by_value(d + r, -1e6, 1e6),
    'reshape': lambda d, r: tf.reshape(tf.reshape(d + r, [1]), []),
    'squeeze': lambda d, r: tf.squeeze(tf.expand_dims(d + r, 0)),
    'maximum': lambda d, r: tf.maximum(d + r, -1e6),
    'twice': lambda d, r: tf.add_n([d, r, d, r]),
    'half': lambda d, r: (d + r) / 2.,
    'minus': lambda d, r: d - r,
    'stop_gradient of a part': lambda d, r: d + tf.stop_gradient(r) + r,
    'after an assertion': lambda d, r: after_assertion(d, r),
    'rank 1 sum': lambda d, r: tf.reduce_sum(tf.concat([[d], [r]], 0)),
    'einsum': lambda d, r: tf.tensordot(tf.stack([d, r]), tf.ones([2], d.dtype), 1),
    'identity n': lambda d, r: tf.identity_n([d + r, r])[0],
    'float32': lambda d, r: tf.cast(tf.cast(d, tf.float64) + tf.cast(r, tf.float64), tf.float64),
    'loop v1': lambda d, r: tf.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t + r),
                                          (tf.constant(0), d))[1],
    'cond v1': lambda d, r: tf.cond(d > -1e6, lambda: d + r, lambda: d),
    'cond on data': lambda d, r: tf.cond(d > 0., lambda: tf.constant(2., d.dtype),
                                         lambda: tf.constant(2., d.dtype)) * r + d,
    'case': lambda d, r: tf.case([(d < -1e6, lambda: d)], default=lambda: d + r),
    'map_fn': lambda d, r: tf.reduce_sum(tf.map_fn(lambda part: part * 1., tf.stack([d, r]))),
    'not used': lambda d, r: d,
}


def after_assertion(d, r):
    with tf.control_dependencies([tf.Assert(d > -1e6, [d])]):
        return tf.identity(d) + tf.identity(r)


def model_of(way, shape):
    def model_fn(x):
        out = way(x)
        d = tf.reduce_mean(tf.square(out - 1.))
        return shape(d, tf.losses.get_regularization_loss())
    return model_fn


def check(model_fn, arrays=(X,), num_towers=2, reduction='mean', plain=None, tolerance=1e-12,
          **options):
    """Asserts that towers train as plain TF1 does; `plain` is the model of one device."""
    ours = samples.on_towers(model_fn, arrays, samples.momentum, num_towers, steps=2,
                             reduction=reduction, **options)
    theirs = samples.one_device(plain or model_fn, arrays, samples.momentum, ours.initial,
                                steps=2, factor=num_towers if reduction == 'sum' else 1)
    samples.assert_equal_runs(ours, theirs, tolerance)
    return ours


@pytest.mark.slow
def test_one_shape_for_each_way_to_register():
    """A diagonal of what the slow tests go through whole."""
    pairs = list(itertools.product(COPIES, KINDS))
    for number, shape in enumerate(sorted(SHAPES)[::2]):
        copies, use_resource = pairs[number % 4]
        way = sorted(WAYS)[(number * 5 + number // len(WAYS)) % len(WAYS)]
        model_fn = _with_resource(model_of(WAYS[way], SHAPES[shape]), use_resource)
        _check_said(model_fn, '%s by %s, %s' % (shape, way, copies), copies=copies)


def _check_said(model_fn, text, **options):
    try:
        check(model_fn, **options)
    except AssertionError as error:
        raise AssertionError('%s: %s' % (text, error))


@pytest.mark.slow
@pytest.mark.parametrize('way', sorted(WAYS))
def test_every_shape_of_a_loss_with_registered_terms(way):
    """Each shape by each way; by clones and by calls, with each kind of variables, by turns.

    So each shape meets each of these with two ways, and each way with six shapes.
    """
    pairs = list(itertools.product(COPIES, KINDS))
    for number, name in enumerate(sorted(SHAPES)):
        copies, use_resource = pairs[(number + sorted(WAYS).index(way)) % 4]
        _check_said(_with_resource(model_of(WAYS[way], SHAPES[name]), use_resource),
                    '%s, %s, %s' % (name, copies, use_resource), copies=copies)


def _with_resource(model_fn, use_resource):
    def with_resource(*inputs):
        with tf.variable_scope(tf.get_variable_scope(), use_resource=use_resource):
            return model_fn(*inputs)
    return with_resource


@pytest.mark.slow
@pytest.mark.parametrize('num_towers, count, reduction', [(4, 8, 'sum'), (3, 8, 'mean'),
                                                          (3, 7, 'sum')])
@pytest.mark.parametrize('variable_device', [None, 'replicated'])
def test_uneven_shards_and_copies_of_the_variables(num_towers, count, reduction, variable_device):
    for way, shape in (('get_variable', 'where'), ('slim', 'reduce_mean'), ('hand', 'cond v1')):
        check(model_of(WAYS[way], SHAPES[shape]), (X[:count],), num_towers, reduction,
              remainder='weight', variables=towers.VariablePlacement(variable_device))


@pytest.mark.slow
@pytest.mark.parametrize('copies, variable_device', [
    ('auto', None), ('reuse', None), ('reuse', 'replicated')])
@pytest.mark.parametrize('way', sorted(WAYS))
def test_registered_losses_are_added_once(way, copies, variable_device):
    def model_fn(x):
        return tf.reduce_mean(tf.square(WAYS[way](x) - 1.))

    def plain(x):
        return model_fn(x) + tf.losses.get_regularization_loss()
    for num_towers, count in ((2, 8), (3, 8)):
        ours = check(model_fn, (X[:count],), num_towers, plain=plain, regularization='add',
                     copies=copies, remainder='weight',
                     variables=towers.VariablePlacement(variable_device))
        assert ours.built.plan.regularization == (
            '1 registered loss added, counted once' + (
                ', computed once a step' if copies == 'auto' and count % num_towers == 0 else ''))


@pytest.mark.slow
def test_what_the_loss_has_already_is_not_added_again():
    for way, shape in zip(sorted(WAYS), itertools.cycle(('sum', 'where', 'cond v1'))):
        check(model_of(WAYS[way], SHAPES[shape]), regularization='add')


@pytest.mark.slow
def test_keras_losses_are_added_or_left():
    def model_fn(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        return tf.reduce_mean(tf.square(layer(x) - 1.))

    def plain(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        return tf.reduce_mean(tf.square(layer(x) - 1.)) + tf.add_n(layer.losses)
    for copies in COPIES:
        check(model_fn, copies=copies, plain=plain, regularization='add')
        check(model_fn, copies=copies)
        for shape in ('sum', 'where'):
            check(_keras_model(SHAPES[shape]), copies=copies)


@pytest.mark.parametrize('shape, as_model', [('sum', True)] + [
    pytest.param(shape, as_model, marks=pytest.mark.slow) for as_model in (True, False)
    for shape in (sorted(set(SHAPES) - {'not used', 'sum'}) if as_model else ['sum', 'where'])])
def test_keras_losses_that_the_loss_has_already_are_not_added_again(shape, as_model):
    """Keras makes them anew each time that it is asked for them."""
    def model_fn(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        net = keras.Sequential([layer], name='net') if as_model else layer
        outputs = tf.cast(net(tf.cast(x, tf.float64)), tf.float64)
        return SHAPES[shape](tf.reduce_mean(tf.square(outputs - 1.)), tf.add_n(net.losses))
    for copies in COPIES:
        ours = check(model_fn, copies=copies, regularization='add')
        assert "in the model's own loss" in ours.built.plan.regularization
        assert 'added' not in ours.built.plan.regularization


def test_a_loss_of_activations_that_is_computed_as_the_models_own_is_added():
    """It is another loss, that happens to have the same formula."""
    def model_fn(x):
        layer = keras.layers.Dense(1, dtype='float64', name='dense',
                                   activity_regularizer=lambda out: tf.reduce_sum(out * out))
        out = layer(tf.cast(x, tf.float64))
        return tf.reduce_sum(out * out) / tf.cast(tf.shape(out)[0], tf.float64)

    def once(x):
        return 2. * model_fn(x)  # Keras divides by the size of the batch, too
    check(model_fn, plain=once, regularization='add')


def test_the_plan_tells_of_keras_losses_that_nobody_adds():
    def model_fn(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        return tf.reduce_mean(tf.square(layer(x) - 1.))
    assert check(model_fn).built.plan.regularization == (
        "1 registered loss is not part of the loss: regularization='add' adds it")


def _keras_model(shape):
    def model_fn(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        return shape(tf.reduce_mean(tf.square(layer(x) - 1.)), tf.add_n(layer.losses))
    return model_fn


# ---- what a model function draws itself ----------------------------------------------------------

def from_an_iterator():
    return tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(np.float64(2.)).repeat()).get_next()


def from_a_queue():
    queue = tf.FIFOQueue(8, [tf.float64], [[]])
    with tf.control_dependencies([queue.enqueue(np.float64(2.))]):
        return queue.dequeue()


def from_py_func():
    return tf.reshape(tf.py_func(lambda: np.float64(2.), [], tf.float64), [])


def from_a_random_op():
    return 2. + 0. * tf.random.uniform([], dtype=tf.float64)


def from_a_function():
    @tf.function
    def draw():
        return 2. + 0. * tf.random.uniform([], dtype=tf.float64)
    return draw()


def from_a_loop():
    return tf.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t + 0. * tf.random.uniform(
        [], dtype=tf.float64)), (tf.constant(0), tf.constant(2., tf.float64)))[1]


def from_a_counter():
    """What a variable holds that this very step counts up."""
    count = tf.get_variable('count', [], tf.float64, tf.constant_initializer(2.), trainable=False)
    with tf.control_dependencies([tf.assign_add(count, 0.)]):
        return count.read_value()


SOURCES = {'iterator': from_an_iterator, 'queue': from_a_queue, 'py_func': from_py_func,
           'random': from_a_random_op, 'function': from_a_function, 'loop': from_a_loop,
           'counter': from_a_counter}


@pytest.mark.slow
@pytest.mark.parametrize('v2', [False, True], ids=['v1', 'v2'])
@pytest.mark.parametrize('source', sorted(SOURCES))
def test_what_the_model_draws_itself_is_each_towers_own(source, v2, control_flow):
    control_flow(v2)

    def model_fn(x):
        w = tf.get_variable('w', [3, 1], x.dtype)
        return tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.)) + SOURCES[source]() * l2(w)
    for copies in COPIES:
        ours = check(model_fn, copies=copies, num_towers=4)
        # Left in every tower: nothing proves that it is the same in all of them.
        assert ours.built.regularization_loss is None
        squares = [op for op in samples.step_operations([ours.built.train_op])
                   if op.type == 'Square' and op.inputs[0].shape.as_list() == [3, 1]]
        assert {op.name.split('/')[0] for op in squares} == {'tower_%d' % k for k in range(4)}


@pytest.mark.parametrize('source', ['iterator', 'py_func'])
@pytest.mark.parametrize('use_resource', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_towers_draw_counts_for_itself(source, use_resource):
    """Whichever tower draws which: 1, 2, 3 and 4."""
    drawn = itertools.count(1)
    iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1, 100))

    def draw():
        if source == 'iterator':
            return tf.cast(iterator.get_next(), tf.float64)
        return tf.reshape(tf.py_func(lambda: np.float64(next(drawn)), [], tf.float64), [])

    def model_fn(x):
        w = tf.get_variable('w', [], x.dtype, tf.constant_initializer(2.),
                            use_resource=use_resource)
        return tf.reduce_mean(w * x) + draw() * w * w
    built = towers.build_towers(model_fn, np.zeros(8), samples.sgd(), 4, 'mean')
    # d/dw of mean(draw) w^2 at w = 2.
    assert samples.run(built, built.gradients[0][0]) == (1 + 2 + 3 + 4) / 4. * 2 * 2.


@pytest.mark.slow
@pytest.mark.skipif(tf.version.VERSION < '2', reason='reads of another device within branches')
@pytest.mark.parametrize('way', sorted(WAYS))
def test_shapes_with_branches_and_loops_under_control_flow_v2(way, control_flow):
    control_flow(True)
    for name in ('loop v1', 'cond v1', 'cond on data', 'case', 'map_fn'):
        for copies in COPIES:
            _check_said(_with_resource(model_of(WAYS[way], SHAPES[name]), True), name,
                        copies=copies)


@pytest.fixture
def control_flow():
    """Switches control flow v2 on or off, for the test."""
    before = tf.control_flow_v2_enabled()

    def switch(v2):
        (tf.enable_control_flow_v2 if v2 else tf.disable_control_flow_v2)()
    yield switch
    switch(before)


@pytest.mark.parametrize('v2', [False, pytest.param(True, marks=pytest.mark.slow)],
                         ids=['v1', 'v2'])
def test_terms_that_depend_on_the_data_by_control_alone(v2, control_flow):
    """Each shard takes a branch of its own: 2 l2 here, 1 l2 there."""
    control_flow(v2)
    x = np.float64([1., 1., -1., -1.])

    def model_fn(x):
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        factor = tf.cond(tf.reduce_mean(x) > 0., lambda: tf.constant(2., tf.float64),
                         lambda: tf.constant(1., tf.float64))
        return tf.reduce_mean(w * x) + factor * 0.5 * w * w
    for copies in COPIES:
        with tf.Graph().as_default():
            built = towers.build_towers(model_fn, x, samples.sgd(), 2, 'mean', copies=copies)
            # (1 + 2 w) / 2 + (-1 + w) / 2 with w = 2; loss (2 + 4) / 2 + (-2 + 2) / 2
            assert samples.run(built, [built.gradients[0][0], built.loss]) == [3., 3.]


@pytest.mark.parametrize('copies', COPIES)
def test_a_gradient_that_is_overridden_around_the_total(copies):
    name = 'NegatedTotal%s' % copies
    tf.RegisterGradient(name)(lambda op, gradient: -gradient)

    def model_fn(x):
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        with tf.get_default_graph().gradient_override_map({'Identity': name}):
            return tf.identity(tf.reduce_mean(w * x) + w * w)
    built = towers.build_towers(model_fn, np.zeros(4), samples.sgd(), 2, 'mean', copies=copies)
    assert samples.run(built, built.gradients[0][0]) == -4.


@pytest.mark.slow
@pytest.mark.parametrize('copies', COPIES)
def test_a_regularizer_with_a_loop(copies):
    """A power iteration, say, is proven to be nothing; it counts once all the same."""
    def spectral(w):
        return tf.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t + l2(w)),
                             (tf.constant(0), tf.constant(0., tf.float64)))[1]

    def model_fn(x):
        w = tf.get_variable('w', [3, 1], x.dtype, regularizer=spectral)
        return tf.reduce_mean(tf.square(tf.matmul(x, w) - 1.))

    def total(x):
        return model_fn(x) + tf.losses.get_regularization_loss()
    check(total, copies=copies)
    check(model_fn, plain=total, copies=copies, regularization='add')


@pytest.mark.parametrize('copies', ['auto', pytest.param('reuse', marks=pytest.mark.slow)])
def test_an_optimizer_that_clips_the_gradient(copies):
    """It would clip the data's gradient alone if the regularization were taken out."""
    class Clipping(tf.train.GradientDescentOptimizer):
        def compute_gradients(self, *args, **kwargs):
            pairs = super(Clipping, self).compute_gradients(*args, **kwargs)
            return [(tf.clip_by_value(gradient, -1., 1.), v) for gradient, v in pairs]

    def model_fn(x):
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        return tf.reduce_mean(w * x) + w * w
    for devices in (1, 2):
        with tf.Graph().as_default():
            built = towers.build_towers(model_fn, np.full(4, -4.), Clipping(0.1), devices, 'sum',
                                        copies=copies)
            assert samples.run(built, built.gradients[0][0]) == 0.  # of -4 + 4, not -1 + 4


def test_a_term_of_the_first_call_alone():
    """The pattern `if not reuse: loss += l2`: that tower's loss has it, at that tower's weight."""
    calls = []

    def model_fn(x):
        calls.append(1)
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        loss = tf.reduce_mean(w * x)
        return loss + w * w if len(calls) == 1 else loss
    built = towers.build_towers(model_fn, np.ones(4), samples.sgd(), 2, 'mean', copies='reuse')
    assert samples.run(built, [built.gradients[0][0], built.loss]) == [3., 4.]


# ---- models put together at random ---------------------------------------------------------------

def random_model(seed):
    """A small model of the parts above; the same for the same seed."""
    choose = random.Random(seed)
    ways = [choose.choice(sorted(WAYS)) for _ in range(choose.randint(1, 3))]
    shapes = [choose.choice(sorted(SHAPES)) for _ in range(choose.randint(1, 3))]
    source = choose.choice(sorted(SOURCES) + [None] * 3)
    num_towers, count = choose.choice([(2, 8), (4, 8), (3, 7), (2, 5), (1, 4)])
    options = dict(copies=choose.choice(COPIES), reduction=choose.choice(['mean', 'sum']),
                   variables=towers.VariablePlacement(
                       choose.choice([None, None, 'balanced', 'replicated'])))
    if options['variables'].device == 'replicated':
        options['copies'] = 'reuse'
    use_resource = choose.random() < 0.5
    # TF 1.15's branches cannot read a variable of another device.
    v2 = use_resource and tf.version.VERSION >= '2' and choose.random() < 0.5
    if choose.random() < 0.3:  # the loss has all of them, so that nothing is added
        options['regularization'], shapes = 'add', [each for each in shapes if each != 'not used']

    def model_fn(x):
        total, out = 0., x
        for place, way in enumerate(ways):
            with tf.variable_scope('part_%d' % place, use_resource=use_resource):
                total += tf.reduce_mean(tf.square(WAYS[way](x) - place))
        r = tf.losses.get_regularization_loss()
        if 'regularization' in options and not shapes:
            total += r
        for shape in shapes:
            total = SHAPES[shape](total, 0.5 * r)
        if source is not None:
            with tf.variable_scope('source', use_resource=use_resource):
                total += SOURCES[source]() * l2(out[:1] * 0. + tf.trainable_variables()[0][0, 0])
        return total
    text = 'ways %s, shapes %s, source %s, %d towers, %d examples, %s, resource %s, v2 %s' % (
        ways, shapes, source, num_towers, count, options, use_resource, v2)
    return model_fn, (X[:count],), num_towers, dict(options, remainder='weight'), v2, text


@pytest.mark.slow
@pytest.mark.parametrize('first', range(0, 60, 10))
def test_random_models(first, control_flow):
    for seed in range(first, first + (10 if first else 4)):
        model_fn, arrays, num_towers, options, v2, text = random_model(seed)
        control_flow(v2)
        try:
            with tf.Graph().as_default():
                check(model_fn, arrays, num_towers, tolerance=1e-11, **options)
        except Exception as error:
            raise AssertionError('seed %d, %s: %s' % (seed, text, error)) from error


def with_shared_layers(x):
    """Two calls of a layer register the loss of its kernel once, on one device."""
    def layer(x, name, reuse=None):
        return slim.fully_connected(x, 3, None, weights_regularizer=l2, scope=name, reuse=reuse)
    out = layer(layer(layer(layer(x, 'alone'), 'shared'), 'shared', True), 'shared', True)
    return tf.reduce_mean(tf.square(out - 1.))


@pytest.mark.parametrize('copies, variable_device, use_resource', [
    ('clone', None, True)] + [pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('reuse', None, False), ('reuse', 'replicated', True), ('reuse', 'replicated', False)]])
def test_the_loss_of_a_shared_layer_counts_once(copies, variable_device, use_resource):
    def plain(x):
        return with_shared_layers(x) + tf.add_n(tf.losses.get_regularization_losses())
    ours = check(_with_resource(with_shared_layers, use_resource), num_towers=4,
                 plain=_with_resource(plain, use_resource), copies=copies,
                 variables=towers.VariablePlacement(variable_device), regularization='add')
    assert str(ours.built.plan).count('2 registered losses added, counted once') == 1


@pytest.mark.slow
@pytest.mark.parametrize('use_resource', KINDS)
def test_the_loss_of_a_shared_layer_in_the_models_own_loss_of_copies(use_resource):
    """There the loss has the term of each further call already."""
    def model_fn(x):
        return with_shared_layers(x) + tf.losses.get_regularization_loss()
    check(_with_resource(model_fn, use_resource), num_towers=4,
          variables=towers.VariablePlacement('replicated'))
