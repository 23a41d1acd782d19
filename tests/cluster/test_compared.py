"""What workers compare before they train together: one case for each kind of difference that is
found, by name, and for each that there may be."""

import copy
import json

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint, fingerprint_of_all
from sample_models import switched

slow = pytest.mark.slow
OWN = {'kind': 'ring', 'workers': ['a:1', 'b:1'], 'ps': [], 'synchronous': True,
       'backup_workers': 0, 'tensorflow': '2.21.0', 'towers': 2, 'reduction': 'sum',
       'examples': 8, 'optimizer': 'AdamOptimizer', 'settings': {'seed': 1},
       'variables': [['w', 'float32', '(2, 3)'], ['b', 'float32', '(3,)']],
       'gradients': [['w', 'dense float32'], ['b', 'dense float32']], 'state': ['s']}


@pytest.mark.parametrize('key, value, text', [
    ('kind', 'ps', 'its kind of cluster is ps, and that of worker 0 ring'),
    ('tensorflow', '1.15.5', 'its TensorFlow is 1.15.5, and that of worker 0 2.21.0'),
    ('examples', None, 'its number of examples a step is not given, and that of worker 0 8'),
    ('settings', {'seed': 2}, 'its seed is 2, and that of worker 0 1'),
    ('variables', OWN['variables'][:1], "its model is another one: variable 'b' is missing, and "
     'that of worker 0 float32 (3,)'),
    ('state', [], 'its state that training reads is empty, and that of worker 0 s')])
def test_what_differs_is_named(key, value, text):
    assert difference(OWN, copy.deepcopy(OWN)) is None
    assert difference(OWN, dict(OWN, **{key: value})) == text


def test_a_variable_that_a_worker_of_parameter_servers_alone_has_is_named():
    """The chief may have more: it gives them their values."""
    fewer, more = [dict(OWN, servers=dict.fromkeys(names, 0)) for names in ('w', ['w', 'mine'])]
    assert difference(more, fewer) is None
    assert difference(fewer, more).startswith("it has the variable 'mine', and worker 0")


def squares(x):
    return tf.square(x * tf.get_variable('w', [3]))


def mean_of_squares(x):
    return tf.reduce_mean(squares(x))


def of_worker(rank, model_fn=mean_of_squares, optimizer=None, batch=8, transform=None,
              num_towers=1, **fields):
    """What a worker says of its build; of its batch only the size is known."""
    with tf.Graph().as_default():
        cluster = towers.Cluster(**dict(dict(workers=['a:1', 'b:1'], kind='ring', rank=rank),
                                        **fields))
        built = towers.build_towers(
            model_fn, tf.placeholder(tf.float32, [batch, 3]),
            towers.Objective(optimizer() if optimizer else tf.train.GradientDescentOptimizer(.5),
                             transform_gradients=transform), num_towers, 'mean',
            cluster=cluster, global_step=tf.train.get_or_create_global_step(), remainder='weight')
        return json.loads(json.dumps(fingerprint(cluster, built, built.machines.same_examples)))


def why_apart(one, other, **options):
    """How worker 1, with the options `other`, differs from worker 0, with the options `one`."""
    return difference(of_worker(0, **dict(options, **one)), of_worker(1, **dict(options, **other)))


SERVED = dict(kind='ps', ps=['c:1', 'd:1'])
ASYNCHRONOUS = dict(SERVED, synchronous=False)


# ---- the loss -----------------------------------------------------------------------------------


def times(factor):
    return lambda x: factor * mean_of_squares(x)


def by_branch(factor):
    return lambda x: tf.cond(tf.reduce_sum(x) > 0., lambda: factor * mean_of_squares(x),
                             lambda: 0.)


def by_loop(factor):
    def model_fn(x):
        y = squares(x)
        return tf.reduce_mean(tf.while_loop(
            lambda i, z: i < 3, lambda i, z: (i + 1, z * factor + y), [0, y])[1])
    return model_fn


def heads(names, weights):
    """A weighted sum of heads of one structure, each with variables of its own."""
    def model_fn(x):
        losses = {}
        for name in 'ab':
            with tf.variable_scope(name):
                losses[name] = tf.reduce_mean(tf.tanh(tf.matmul(x, tf.get_variable('k', [3, 3]))))
        return sum(weight * losses[name] for name, weight in zip(names, weights))
    return model_fn


OTHERS_BY_3 = ("Const float32 3 ('mul_1/x'), and that of worker 0 by Const float32 2 ('mul_1/x'). "
               'Have')


@pytest.mark.parametrize('own, other, v2, text', [
    pytest.param(mean_of_squares, times(2.), True, "its loss is computed by Mul T=float32 "
                 "('mul_1'), and that of worker 0 by Mean", marks=slow),
    (times(2.), times(3.), True, 'its model is another one: its loss is computed by ' +
     OTHERS_BY_3),
    pytest.param(by_branch(2.), by_branch(3.), True, 'If ', marks=slow),
    (by_loop(2.), by_loop(3.), False, 'by Const float32 3'),
    pytest.param(heads('ab', [.9, .1]), heads('ba', [.9, .1]), True,
                 "by variable ('a/k'), and that of worker 0 by variable ('b/k'). Have", marks=slow),
    (heads('ab', [.9, .1]), heads('ba', [.1, .9]), True, 'such as that of sorted(names), and not')])
def test_another_loss_is_named(own, other, v2, text):
    with switched('control_flow_v2', v2):
        assert text in why_apart(dict(model_fn=own), dict(model_fn=other))


def looked_at(x):
    """As `mean_of_squares`, with all that looks at numbers and changes none."""
    x = tf.Print(tf.identity(x, 'named'), [x, tf.reduce_sum(x)], 'seen', first_n=3)
    with tf.control_dependencies([tf.debugging.assert_less(x, 7.), tf.print('x', x)]):
        y = tf.identity(tf.check_numerics(squares(x), 'y'))
    tf.summary.scalar('mean', tf.reduce_mean(y))
    with tf.device('/cpu:0'), tf.name_scope('last'):
        return tf.reduce_mean(y, name='of_this_worker')


def rows_of(rank):
    """A model that has a worker's data within it."""
    return lambda x: mean_of_squares(x) + tf.reduce_sum(
        tf.gather(tf.constant([1., 2. + rank]), [rank]))


def normalized(x):
    mean, gamma = tf.get_variable('mean', [3], trainable=False), tf.get_variable('gamma', [3])
    moments, variance = tf.nn.moments(x, [0])
    with tf.control_dependencies([tf.assign_sub(mean, 0.1 * (mean - moments))]):
        return mean_of_squares(tf.nn.dropout(tf.nn.batch_normalization(
            x, moments, variance, None, gamma, 1e-3), rate=.5))


@pytest.mark.parametrize('own, other, options', [
    (mean_of_squares, looked_at, {}), (rows_of(0), rows_of(1), {}),
    pytest.param(normalized, normalized, dict(SERVED, batch=None), marks=slow)])
@pytest.mark.slow
def test_what_may_differ_of_a_loss(own, other, options):
    assert why_apart(dict(model_fn=own), dict(model_fn=other), **options) is None


# ---- the variables that have a gradient ---------------------------------------------------------


def of_variables(names, trained=None, sparse=()):
    def model_fn(x):
        variables = {name: tf.get_variable(name, [3]) for name in names}
        return sum(tf.reduce_mean(tf.gather(variables[name], [0, 2]) if name in sparse
                                  else x * variables[name])
                   for name in names if name in (trained or names))
    return model_fn


@pytest.mark.parametrize('own, other, fields, text', [
    (of_variables('uvw'), of_variables('wuv'), {},
     "its variables are in another order: 'w' is before 'u', and on worker 0 behind it"),
    pytest.param(of_variables('uvw'), of_variables('wuv'), SERVED, None, marks=slow),
    (of_variables('wab', 'wa'), of_variables('wab', 'wb'), {},
     "it trains other variables, or trains them otherwise: the gradient of 'a' is missing, and "
     'that of worker 0 dense float32.'),
    (of_variables('wa', sparse='a'), of_variables('wa'), SERVED,
     "of 'a' is dense float32, and that of worker 0 sparse float32.")])
def test_variables_whose_gradients_would_meet_those_of_others_are_named(own, other, fields, text):
    one, two = of_worker(0, own, **fields), of_worker(1, other, **fields)
    why = difference(one, dict(two, loss=one['loss']))  # which may be another one, too
    assert why is None if text is None else text in why


# ---- the update ---------------------------------------------------------------------------------


class Own(tf.train.Optimizer):
    """An optimizer that writes by `assign`, as BERT's does: `update(variable, gradient)`."""

    def __init__(self, update):
        super(Own, self).__init__(False, 'Own')
        self._update = update

    def apply_gradients(self, pairs, global_step=None, name=None):
        return tf.group(*[self._update(variable, tf.convert_to_tensor(gradient))
                          for gradient, variable in pairs])


def by_rate(rate):
    return lambda: Own(lambda variable, gradient: variable.assign(variable - rate * gradient))


def by_moment(decay):
    """The decay is in the write of the moment alone."""
    def update(variable, gradient):
        moment = tf.get_variable(variable.op.name + '/m', variable.shape, trainable=False,
                                 initializer=tf.zeros_initializer())
        with tf.control_dependencies([moment.assign(decay * moment + gradient)]):
            return variable.assign_sub(0.5 * moment.read_value())
    return lambda: Own(update)


def momentum(rate, nesterov=False):
    return lambda: tf.train.MomentumOptimizer(.1, rate, use_nesterov=nesterov)


@pytest.mark.parametrize('one, other, fields, text', [
    (by_rate(.25), by_rate(.125), {},
     "'w' is computed by Const float32 0.125 ('mul_1/x'), and that of worker 0 by Const float32 "
     "0.25 ('mul_1/x'). Give the same optimizer, learning rate and transform_gradients on"),
    pytest.param(by_moment(.25), by_moment(.125), ASYNCHRONOUS,
                 "'w/m' is computed by Const float32 0.125", marks=slow),
    (momentum(.9), momentum(.9, True), ASYNCHRONOUS, 'use_nesterov=True')])
def test_another_update_is_named(one, other, fields, text):
    why = why_apart(dict(optimizer=one), dict(optimizer=other), **fields)
    assert why.startswith('its update of ') and text in why


@pytest.mark.parametrize('change, text', [
    (tf.sign, 'is computed by Sign T=float32 ('),
    (lambda gradient: tf.Print(gradient, [tf.norm(gradient)]), None)])
def test_another_transformation_of_the_sums_is_named_and_a_look_at_them_is_none(change, text):
    why = why_apart({}, dict(transform=lambda pairs: [
        (change(gradient), variable) for gradient, variable in pairs]))
    assert why is None if text is None else text in why


def test_a_build_with_another_plan_is_the_same_build():
    with tf.Graph().as_default():
        cluster = towers.Cluster('ring', ['a:1', 'b:1'], rank=0)
        built = towers.build_towers(mean_of_squares, tf.ones([8, 3]),
                                    tf.train.GradientDescentOptimizer(.5), 1, 'mean',
                                    cluster=cluster)
        told = built._replace(plan=built.plan._replace(learning_rate='falls'))
        assert fingerprint_of_all(cluster, told) == fingerprint_of_all(cluster, built)



@pytest.mark.parametrize('batch, fields, text', [
    (4, dict(uneven=True), None), (7, dict(uneven=True, num_towers=2), None),
    (4, ASYNCHRONOUS, 'its number of examples a step is 8, and that of worker 0 4')])
def test_batches_of_different_size_are_told_apart_but_for_uneven(batch, fields, text):
    """The chief of asynchronous workers counts the steps of all by its own batch."""
    assert why_apart(dict(batch=batch), dict(batch=8), **fields) == text


@pytest.mark.parametrize('rate, joined, text', [
    (.25, 0, "in build 1 of the graph its update of 'w' is computed by"),
    (.5, 1, 'it gives build 1 of the graph to join, and worker 0 build 0')])
@pytest.mark.slow
def test_all_builds_of_a_graph_are_compared(rate, joined, text):
    def of_worker(rate, joined):
        with tf.Graph().as_default():
            cluster, w = towers.Cluster('ring', ['a:1', 'b:1']), tf.get_variable('w', [])
            builds = [towers.build_towers(
                lambda x: tf.reduce_mean(x * w), tf.ones([4]),
                tf.train.GradientDescentOptimizer(each), 1, 'mean', cluster=cluster)
                for name, each in (('first', .5), ('second', rate))]
            return fingerprint_of_all(cluster, builds[joined])
    assert text in difference(of_worker(.5, 0), of_worker(rate, joined))
