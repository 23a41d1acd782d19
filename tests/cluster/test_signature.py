"""What workers compare before they train together: one case for each kind of difference that is
found, by name, and for each that there may be."""

import copy
import json

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.signature import difference, signature
from sample_models import switched
from case_marks import first_fast

slow = pytest.mark.slow
BUILD = {'values': {'number of examples a step': 8}, 'state': {'s': 'sent'},
         'variables': {'w': 'float32 (2, 3)', 'b': 'float32 (3,)'},
         'gradients': {'w': 'dense float32', 'b': 'dense float32'},
         'shapes': [[8, 3]], 'loss': [], 'update': []}
VALUES = {'kind of cluster': 'ring', 'list of workers': 'a:1, b:1', 'wire': None}
OWN = {'values': VALUES, 'settings': {'seed': 1}, 'builds': [BUILD]}


@pytest.mark.parametrize('key, value, text', [
    ('values', dict(VALUES, **{'kind of cluster': 'ps'}),
     'its kind of cluster is ps, and that of worker 0 ring'),
    ('values', dict(VALUES, **{'list of workers': 'a:1'}),
     'its list of workers is a:1, and that of worker 0 a:1, b:1'),
    ('values', dict(VALUES, wire='float16'), 'its wire is float16, and that of worker 0 None'),
    ('settings', {'seed': 2}, 'its seed is 2, and that of worker 0 1'),
    ('settings', {'seed': 1, 'rate': 2}, 'its rate is 2, and that of worker 0 missing'),
    ('build', {'values': {'number of examples a step': 4}},
     'its number of examples a step is 4, and that of worker 0 8'),
    ('build', {'variables': {'w': 'float32 (2, 3)'}},
     "its model is another one: variable 'b' is missing, and that of worker 0 float32 (3,)"),
    ('build', {'state': {}}, "its state that training reads is another one: 's' is missing, and "
     'that of worker 0 sent')])
def test_what_differs_is_named(key, value, text):
    assert difference(OWN, copy.deepcopy(OWN)) is None
    other = {key: value} if key in OWN else {'builds': [dict(BUILD, **value)]}
    assert difference(OWN, dict(OWN, **other)) == text


def test_a_variable_that_a_worker_of_parameter_servers_alone_has_is_named():
    """The chief may have more: it gives them their values."""
    fewer, more = [dict(OWN, servers=dict.fromkeys(names, 0)) for names in ('w', ['w', 'mine'])]
    assert difference(more, fewer) is None
    assert difference(fewer, more).startswith(
        "it spreads other variables over the servers: 'mine' is on number 0, and that of worker 0")


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
        told = built._replace(plan=built.plan.with_line('learning rate', 'falls'))  # the same build
        return json.loads(json.dumps(signature(cluster, told)))


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


@pytest.mark.parametrize('own, other, v2, text', [
    pytest.param(mean_of_squares, times(2.), True, 'its loss is computed by Mul T=float32 (mul_1), '
                 'and that of worker 0 by Mean', marks=slow),
    (times(2.), times(3.), True, 'its program is another one: its loss is computed by Const '
     'float32 3 (mul_1/x), and that of worker 0 by Const float32 2 (mul_1/x). Run one program'),
    pytest.param(by_branch(2.), by_branch(3.), True, 'If ', marks=slow),
    pytest.param(by_loop(2.), by_loop(3.), False, 'by Const float32 3', marks=slow),
    pytest.param(heads('ab', [.9, .1]), heads('ba', [.9, .1]), True,
                 'by variable of other inputs (a/k), and that of worker 0 by variable of other '
                 'inputs (b/k)', marks=slow),
    (heads('ab', [.9, .1]), heads('ba', [.1, .9]), True, 'that of sorted(names)')])
def test_another_loss_is_named(own, other, v2, text):
    with switched('control_flow_v2', v2):
        assert text in why_apart(dict(model_fn=own), dict(model_fn=other))


def looked_at(x):
    """As `mean_of_squares`, with what looks at numbers beside the loss, devices and names."""
    with tf.control_dependencies([tf.debugging.assert_less(x, 7.), tf.print('x', x)]):
        y = squares(x)
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
    (times(2.), times(3.), dict(compare='variables')),
    pytest.param(by_branch(2.), by_branch(2.), {}, marks=slow),
    pytest.param(normalized, normalized, dict(SERVED, batch=None), marks=slow)])
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


@pytest.mark.parametrize('own, other, fields, text', first_fast(1, [
    (of_variables('uvw'), of_variables('wuv'), {},
     "the gradient of 'u' is dense float32, number 1, and that of worker 0 dense float32, number "
     '0. Make the same loss on every worker'),
    (of_variables('wab', 'wa'), of_variables('wab', 'wb'), {},
     "it trains other variables, or trains them otherwise: the gradient of 'a' is missing, and "
     'that of worker 0 dense float32, number 1.'),
    (of_variables('wa', sparse='a'), of_variables('wa'), SERVED,
     "of 'a' is dense float32, number 1, and that of worker 0 sparse [2 rows] float32, number 1.")]))
def test_variables_whose_gradients_would_meet_those_of_others_are_named(own, other, fields, text):
    why = why_apart(dict(model_fn=own), dict(model_fn=other), compare='variables', **fields)
    assert text in why


# ---- the update ---------------------------------------------------------------------------------


class Own(tf.train.Optimizer):
    """An optimizer that writes by `assign`, as BERT's does: `update(variable, gradient)`."""

    def __init__(self, update):
        super(Own, self).__init__(False, 'Own')
        self._update = update

    def apply_gradients(self, pairs, global_step=None, name=None):
        return tf.group(*[self._update(variable, tf.convert_to_tensor(gradient))
                          for gradient, variable in pairs])


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


@pytest.mark.parametrize('one, other, fields, text', first_fast(1, [
    (by_moment(.25), by_moment(.125), {}, 'its update is computed by Const float32 0.125'),
    (momentum(.9), momentum(.8), ASYNCHRONOUS, 'its update is computed by Const float32 0.8'),
    (momentum(.9), momentum(.8), SERVED, 'its update is computed by Const float32 0.8'),
    (momentum(.9), momentum(.9, True), ASYNCHRONOUS, 'use_nesterov=b: true')]))
def test_another_update_is_named(one, other, fields, text):
    assert text in why_apart(dict(optimizer=one), dict(optimizer=other), **fields)


def clipped(pairs):
    gradients, variables = zip(*pairs)
    return list(zip(tf.clip_by_global_norm(gradients, 1.)[0], variables))


def by_shape(pairs):
    return [(tf.convert_to_tensor(each) / tf.cast(getattr(
        each, 'dense_shape', tf.shape(each))[0], tf.float32), variable)
        for each, variable in pairs]


@pytest.mark.parametrize('transform', first_fast(1, [by_shape, clipped]))
@pytest.mark.parametrize('fields', first_fast(1, [{}, dict(uneven=True)]))
def test_the_update_of_a_worker_of_servers_is_that_of_the_chief(fields, transform):
    """Though the chief's takes the servers' sums, and the worker's, which is not run, its own."""
    assert why_apart({}, {}, model_fn=of_variables('wa', sparse='a'), transform=transform,
                     optimizer=momentum(.9), **dict(SERVED, **fields)) is None


@slow
def test_another_transformation_of_the_sums_is_named():
    why = why_apart({}, dict(transform=lambda pairs: [
        (tf.sign(gradient), variable) for gradient, variable in pairs]))
    assert 'its update is computed by Sign T=float32 (' in why


@pytest.mark.parametrize('batch, fields, text', first_fast(1, [
    (4, dict(uneven=True), None), (7, dict(uneven=True, num_towers=2), None),
    (4, ASYNCHRONOUS, 'its number of examples a step is 4, and that of worker 0 8')]))
def test_batches_of_different_size_are_told_apart_but_for_uneven(batch, fields, text):
    """The chief of asynchronous workers counts the steps of all by its own batch."""
    assert why_apart(dict(batch=8), dict(batch=batch), **fields) == text


@pytest.mark.parametrize('rate, joined, text', [
    (.25, 0, 'in build 1 of the graph its program is another one: its update is computed by'),
    (.5, 1, 'its build that is given to join is 1, and that of worker 0 0')])
@pytest.mark.slow
def test_all_builds_of_a_graph_are_compared(rate, joined, text):
    def of_worker(rate, joined):
        with tf.Graph().as_default():
            cluster, w = towers.Cluster('ring', ['a:1', 'b:1']), tf.get_variable('w', [])
            builds = [towers.build_towers(
                lambda x: tf.reduce_mean(x * w), tf.ones([4]),
                tf.train.GradientDescentOptimizer(each), 1, 'mean', cluster=cluster)
                for name, each in (('first', .5), ('second', rate))]
            return signature(cluster, builds[joined])
    assert text in difference(of_worker(.5, 0), of_worker(rate, joined))
