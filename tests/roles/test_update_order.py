"""What an update's writes wait for: decays, counters, slots; and updates that ride on the train op,
which wait for all machines, and are left out where there is no batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import objective, sgd, slowly
from towers import build_towers, session_config
from towers.graph.graph_walk import reachable_from, step_operations
from towers.graph.variable_access import Writes
from towers.roles.update_order import hold_back


class Decayed(tf.train.MomentumOptimizer):
    """As AdamW of `tf.contrib.opt`: the decay waits for nothing, and the gradient for the decay."""

    def __init__(self, rate=.03125, decay=.5, momentum=0.):
        super(Decayed, self).__init__(rate, momentum)
        self.decay = decay

    def decayed(self, variable):
        return tf.assign_sub(variable, self.decay * variable)

    def _apply_dense(self, grad, var):
        with tf.control_dependencies([self.decayed(var)]):
            return super(Decayed, self)._apply_dense(grad, var)

    def _resource_apply_dense(self, grad, handle):
        with tf.control_dependencies([self.decayed(handle)]):
            return super(Decayed, self)._resource_apply_dense(grad, handle)


class DecayedBeyond(Decayed):
    """The decay waits for nothing whatever it is made under."""

    def decayed(self, variable):
        with tf.control_dependencies(None):
            return super(DecayedBeyond, self).decayed(variable)


class DecayedInBranch(Decayed):
    def decayed(self, variable):
        return tf.cond(tf.train.get_global_step() < 5,
                       lambda: super(DecayedInBranch, self).decayed(variable),
                       lambda: tf.identity(variable))


class MadeBefore(tf.train.AdagradOptimizer):
    """It counts by an operation that is there before the build."""

    def __init__(self):
        super(MadeBefore, self).__init__(.1)
        step = tf.train.get_or_create_global_step()
        self._counted = tf.assign_add(step, tf.ones_like(step)).op

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return tf.group(self._counted, super(MadeBefore, self).apply_gradients(
            grads_and_vars, name=name))


def counting(pairs):
    """A `transform_gradients` that counts its calls, and passes gradients on that wait for it."""
    with tf.variable_scope('transform', reuse=tf.AUTO_REUSE):
        count = tf.get_variable('count', [], tf.float64, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(count, 1.)]):
        return [(tf.identity(gradient), variable) for gradient, variable in pairs]


def two_weights(x):
    """A dense and a sparse gradient, and a moving average."""
    w = tf.get_variable('w', [2], tf.float64, tf.ones_initializer())
    table = tf.get_variable('table', [3, 2], tf.float64, tf.ones_initializer())
    mean = tf.get_variable('mean', [2], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, tf.reduce_mean(x, 0)))
    return tf.reduce_mean(tf.square(x * w) * tf.gather(table, [0, 2, 0, 1]))


@pytest.fixture
def kind(request, graph):
    """Of variables; with control flow v2, which takes resource variables alone."""
    tf.get_variable_scope().set_use_resource(request.param != 'reference')
    was_v2 = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if request.param == 'v2' else tf.disable_control_flow_v2)()
    yield request.param
    (tf.enable_control_flow_v2 if was_v2 else tf.disable_control_flow_v2)()


def built_on(machines, make_optimizer, **options):
    """The step of worker 0 of two, and the operations that all of its writes have to wait for."""
    step = tf.train.get_or_create_global_step()
    workers, fields = ['localhost:1', 'localhost:2'], {}
    if machines.startswith('ps'):
        fields = dict(ps=['localhost:3', 'localhost:4'], job='worker')
    if machines.endswith('uneven'):
        fields['uneven'] = True
    if machines.endswith('fed'):
        fields['active'] = tf.placeholder_with_default(1., [])
    cluster = towers.Cluster(machines.split('_')[0], workers, rank=0, **fields)
    built = build_towers(two_weights, tf.ones([8 * (2 if 'memory' in options else 1), 2],
                                              tf.float64),
                         objective(make_optimizer(), options), 2, 'mean', global_step=step,
                         cluster=cluster, **options)
    operations = step_operations([built.train_op])
    # The last one raises where no worker has data.
    return operations, [op for op in operations if 'TakeGradient' in op.type
                        or op.type in (
                            'CollectiveReduce', 'CollectiveGather', 'QueueDequeueV2')]


def not_waiting(operations, waited):
    """Names of the global variables whose writes do not wait for all of some operations."""
    finder, found = Writes(operations[0].graph), set()
    known = {variable.op.name for variable in tf.global_variables()}
    after = [reachable_from([each], operations, control=True) for each in waited]
    for op in operations:
        if not all(op.name in each for each in after):
            found.update(known.intersection(finder.written_by(op)))
    return found


@pytest.mark.parametrize('kind, machines, make_optimizer', [
    ('resource', 'ring', DecayedBeyond), ('resource', 'ring_uneven', MadeBefore),
    ('v2', 'ps', DecayedInBranch)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('resource', 'ps', lambda: tf.train.AdamOptimizer(.1)),
            ('reference', 'ps_uneven', Decayed), ('resource', 'ps_fed', Decayed)]],
                         indirect=['kind'])
def test_what_every_write_waits_for(kind, machines, make_optimizer):
    """On the chief of parameter servers for all gradients of all workers; in a ring for all sums of
    the step, and for that it is a step of all."""
    operations, waited = built_on(machines, make_optimizer, transform_gradients=counting)
    assert len(waited) >= 2
    # In a ring a moving average that training does not read is this worker's own.
    own = {'mean'} if machines in ('ring', 'ring_uneven') else set()
    assert not_waiting(operations, waited) <= own


def late_gradient(value):
    """The same value, whose gradient comes later."""
    @tf.custom_gradient
    def same(number):
        return tf.identity(number), slowly
    return same(value)


def test_a_backward_pass_reads_the_memory_of_a_reference_variable(graph):
    """By hand: of mean(x) v w with w = 8, v = 1 and mean(x) = 2 the gradients are 2 and 16, and the
    decays 4 and 1 / 2. A decay that does not wait makes the second gradient 8.
    """
    def model_fn(x):
        v, w = [tf.get_variable(name, [], tf.float64, tf.constant_initializer(value),
                                use_resource=False) for name, value in (('v', 1.), ('w', 8.))]
        return late_gradient(tf.reduce_mean(x) * v * w)
    built = build_towers(model_fn, tf.constant([1., 3.], tf.float64), Decayed(.25, .5), 2, 'mean')
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run([each for _, each in built.gradients]) == [-3.5, 3.5]


def test_what_waits_for_its_gradient_waits_for_no_other(graph):
    """Else all gradients of a large model would be kept until the backward pass is over."""
    built = build_towers(two_weights, tf.ones([8, 2], tf.float64),
                         tf.train.MomentumOptimizer(.1, .9), 2, 'mean')
    assert not [op for op in step_operations([built.train_op]) if 'all_gradients' in op.name]


@pytest.mark.parametrize('is_read, waits', [(True, True), (False, False)])
def test_what_gradients_are_computed_from_and_is_not_trained_waits_for_all(
        graph, is_read, waits):
    """A weight of one loss that is computed from the gradient of another, as by GradNorm."""
    def model_fn(x):
        share = tf.get_variable('share', [], tf.float64, tf.ones_initializer(), trainable=False)
        v, w = [tf.get_variable(name, [], tf.float64, tf.ones_initializer()) for name in 'vw']
        return tf.reduce_mean(x) * v * (share if is_read else 1.) + w * w

    def balance(pairs):
        (of_v, v), (of_w, w) = pairs
        share = [each for each in tf.global_variables() if each.op.name == 'share'][0]
        with tf.control_dependencies([tf.assign(share, of_w, name='balanced')]):
            return [(tf.identity(of_v), v), (of_w, w)]
    built = build_towers(model_fn, tf.constant([1., 3.], tf.float64),
                         towers.Objective(tf.train.GradientDescentOptimizer(.1),
                                          transform_gradients=balance), 2, 'mean')
    writes = [op for op in step_operations([built.train_op])
              if 'share' in Writes(graph).written_by(op)]
    assert len(writes) == 1
    held = [op for op in step_operations(writes) if 'all_gradients' in op.name]
    assert bool(held) == waits


# ---- updates that ride on the train op -----------------------------------------------------------

def variable(name, resource=True):
    return tf.get_variable(name, [], tf.float32, tf.zeros_initializer(), use_resource=resource)


def in_a_branch(one):
    return tf.cond(tf.constant(True), lambda: tf.assign_add(one, 1.), lambda: tf.constant(0.))


def in_a_loop(one):
    def add(turn):
        with tf.control_dependencies([tf.assign_add(one, 0.5)]):
            return turn + 1
    return tf.while_loop(lambda turn: turn < 2, add, [tf.constant(0)])


@pytest.mark.parametrize('make, resource, is_v1', [
    (in_a_branch, True, True), (in_a_branch, True, False), (in_a_loop, False, True),
    (in_a_loop, True, False)])
def test_an_update_waits_and_is_left_out(make, resource, is_v1):
    """Each adds 1 to a variable where there is a batch, after another variable has got its value.

    Control flow v2, which a TF1 program turns off, takes no reference variables."""
    was_v2 = tf.control_flow_v2_enabled()
    (tf.disable_control_flow_v2 if is_v1 else tf.enable_control_flow_v2)()
    try:
        one = variable('one', resource)
        update = make(one)
    finally:
        (tf.enable_control_flow_v2 if was_v2 else tf.disable_control_flow_v2)()
    seen, fail = variable('seen'), tf.placeholder(tf.float32, [])
    active = tf.placeholder(tf.float32, [])
    with tf.control_dependencies([tf.check_numerics(fail, 'awaited')]):
        awaited = tf.assign(seen, one + 10.).op  # before the update
    [end] = hold_back([update], [awaited], active, []).update_ops
    with tf.control_dependencies([end]):
        goes_on = tf.constant(5)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for has_batch, value in ((1., 1.), (0., 1.), (1., 2.)):
            assert session.run(goes_on, {active: has_batch, fail: 0.}) == 5
            assert session.run(one) == value
        assert session.run(seen) == 11.
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(goes_on, {active: 1., fail: np.inf})
        assert session.run(one) == 2.


def test_what_the_loss_takes_along_is_left_as_it_is():
    """A loss that is fetched without a step must not wait for all machines."""
    one = variable('one')
    update = tf.assign_add(one, 1.)
    with tf.control_dependencies([update]):
        loss = tf.identity(one)
    awaited = tf.check_numerics(tf.constant(np.inf), 'awaited').op
    hold_back([update], [awaited], None, [loss])
    assert awaited not in update.op.control_inputs
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(loss) == 1.


# ---- what a run fetches of a step is of before the update ----------------------------------------

X = np.array([1., 2., 4., 8.], 'float32')
ONES = tf.ones_initializer()


def penalty(x, v, u):
    return tf.nn.l2_loss(v) + tf.nn.l2_loss(u) + 0. * tf.reduce_mean(x)


def read_by_another_gradient(x, v, u):
    """The gradient of u needs the value of v, long after the gradient of v is there."""
    return tf.reduce_sum(v) + tf.reduce_sum(tf.stop_gradient(v) * late_gradient(u)) + (
        0. * tf.reduce_mean(x))


@pytest.mark.parametrize('loss_fn', [penalty, read_by_another_gradient])
@pytest.mark.parametrize('count', first_fast(1, [2, 1]))
def test_fetched_gradients_are_of_before_the_update(loss_fn, count, graph):
    values = np.arange(1., 7.).reshape([2, 3]).astype('float32')
    v, u = [tf.get_variable(name, [2, 3], initializer=tf.constant_initializer(values * scale),
                            use_resource=False) for name, scale in (('v', 1.), ('u', 2.))]
    built = towers.build_towers(lambda x: loss_fn(x, v, u), tf.constant(X), sgd(.5), count, 'mean')
    of_v, of_u = {'penalty': (values, 2. * values)}.get(loss_fn.__name__, (1., values))
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        found_v, found_u, _ = session.run(
            [gradient for gradient, _ in built.gradients] + [built.train_op])
        np.testing.assert_allclose(found_v, of_v * np.ones_like(values), 1e-6)
        np.testing.assert_allclose(found_u, of_u, 1e-6)
        np.testing.assert_allclose(session.run(v), values - .5 * of_v, 1e-6)
        np.testing.assert_allclose(session.run(u), 2. * values - .5 * of_u, 1e-6)


def test_a_transformed_gradient_that_reads_another_variable_is_of_before_the_update(graph):
    v, u = [tf.get_variable(name, [2], initializer=ONES, use_resource=False) for name in 'vu']

    def transform(pairs):
        (of_v, _), (of_u, _) = pairs
        return [(of_v, v), (slowly(of_u) + v, u)]
    built = towers.build_towers(
        lambda x: tf.reduce_sum(v) + tf.reduce_sum(u) + 0. * tf.reduce_mean(x), tf.constant(X),
        towers.Objective(sgd(.5), transform_gradients=transform), 2, 'mean')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        of_u, _ = session.run([built.gradients[1][0], built.train_op])
        np.testing.assert_array_equal(of_u, [2., 2.])
        np.testing.assert_array_equal(session.run(u), [0., 0.])


def test_the_update_waits_for_what_predictions_read_by_themselves(graph):
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        return {'loss': tf.reduce_mean(x) * w, 'predictions': x * w.read_value()}
    built = towers.build_towers(model_fn, tf.constant(X), sgd(.01), 2)
    step = step_operations([built.train_op])
    reads = [op for op in step_operations([built.predictions]) if op.type == 'ReadVariableOp']
    [update] = [op for op in step if op.type == 'ResourceApplyGradientDescent']
    assert len(reads) == 2 and all(
        update.name in reachable_from([read], step, control=True) for read in reads)
    assert built.predictions.op not in step
