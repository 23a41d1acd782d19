"""What a tower's forward pass writes of local variables is that tower's own.

The reference is the same model on the whole batch on one device, whose state has a row for each
example: the towers' states, one below the other, are that one's rows.
"""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import keras, sgd, switched
from case_marks import first_fast

slow = pytest.mark.slow
LOCAL = [tf.GraphKeys.LOCAL_VARIABLES]
ZEROS = tf.zeros_initializer()
BATCH = np.float32([1, 2, 3, 6, 2, 4, 1, 9])
WAYS = [{}, dict(variables=towers.VariablePlacement('replicated'))]


def by_get_variable(size):
    return tf.get_variable('state', [size], initializer=ZEROS, collections=LOCAL, trainable=False)


def by_variable(size):
    with tf.name_scope('rnn'):
        return tf.Variable(tf.zeros([size]), name='state', collections=LOCAL, trainable=False)


def goes_on(make, rides='loss', branch=False):
    """A model whose state is half of what it was and the input; it rides on the loss or updates."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        state = make(int(x.shape[0]))
        new = 0.5 * state.read_value() + w * x
        kept = tf.stop_gradient(new)
        if branch:
            write = tf.cond(tf.reduce_mean(x) > -100., lambda: tf.group(tf.assign(state, kept)),
                            tf.no_op)
        else:
            write = tf.assign(state, kept)
        if rides == 'updates':
            return {'loss': tf.reduce_mean(tf.square(new)), 'updates': [write]}
        with tf.control_dependencies([write]):
            return tf.reduce_mean(tf.square(new))
    return model_fn


def on_one_device(model_fn, batch=BATCH, steps=3):
    """(losses, global variables, state) after some steps of momentum."""
    with tf.Graph().as_default():
        returned = model_fn(tf.constant(batch))
        if not isinstance(returned, dict):
            returned = {'loss': returned, 'updates': []}
        loss, optimizer = returned['loss'], tf.train.MomentumOptimizer(0.01, 0.9)
        pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
        with tf.control_dependencies([loss] + returned['updates']):
            train_op = optimizer.apply_gradients(pairs)
        return trained(tf.Session(), loss, train_op, steps)


def on_towers(model_fn, count, batch=BATCH, steps=3, **options):
    with tf.Graph().as_default():
        built = towers.build_towers(model_fn, tf.constant(batch),
                                    tf.train.MomentumOptimizer(0.01, 0.9), count, reduction='mean',
                                    **options)
        session = tf.Session(config=towers.session_config(built.devices))
        return trained(session, built.loss, built.train_op, steps) + (built,)


def trained(session, loss, train_op, steps):
    with session:
        session.run(tf.global_variables_initializer())
        session.run(tf.local_variables_initializer())
        losses = [session.run([loss, train_op])[0] for _ in range(steps)]
        weights = session.run({v.op.name: v for v in tf.global_variables()
                               if not v.op.name.startswith('state/')})  # a slot of tower 0's rows
        state = [session.run(v) for v in tf.local_variables()
                 if 'state' in v.op.name and not v.op.name.endswith('Momentum')]
        return losses, weights, np.concatenate(state) if state else None


def assert_equal(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], 1e-4)
    assert sorted(ours[1]) == sorted(theirs[1])
    for name in theirs[1]:
        np.testing.assert_allclose(ours[1][name], theirs[1][name], 1e-5, 1e-6, err_msg=name)
    if theirs[2] is not None:
        np.testing.assert_allclose(ours[2], theirs[2], 1e-5)


@pytest.mark.parametrize('make, rides, way', first_fast(1, [
    (lambda size: tf.get_local_variable('state', [size], initializer=ZEROS), 'updates', WAYS[1]),
    (lambda size: slim.local_variable(tf.zeros([size]), name='state'), 'loss', {})]),
                         ids=['get_local_variable', 'slim'])
def test_the_numbers_are_those_of_one_device(make, rides, way):
    model_fn = goes_on(make, rides)
    assert_equal(on_towers(model_fn, 2, **way), on_one_device(model_fn))


def reads_late(in_order):
    """The loss reads the state, in every tower but the first after a while, so that a race is lost.
    An update op writes the state; if `in_order`, the program says that it comes after the read."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        with tf.variable_scope('', use_resource=True):  # a gradient would read a reference late
            state = by_get_variable(int(x.shape[0]))
        wait = tf.py_func(lambda first: time.sleep(.1 * (first != BATCH[0])), [x[0]], [])
        with tf.control_dependencies([wait]):
            before = state.read_value()
        with tf.control_dependencies([before] if in_order else []):
            write = tf.assign(state, 2. * x)
        return {'loss': tf.reduce_mean(tf.square(w * x - before)), 'updates': [write]}
    return model_fn


@pytest.mark.parametrize('options', first_fast(1, [
    {}, dict(copies='clone', memory=towers.Memory(accumulate=2))]))
def test_every_tower_reads_its_state_before_its_update_ops_write_it(options):
    assert_equal(on_towers(reads_late(in_order=False), 2, **options),
                 on_one_device(reads_late(in_order=True)))


def test_state_that_a_branch_writes():
    model_fn = goes_on(by_get_variable, branch=True)
    with switched('control_flow_v2', True), switched('resource_variables', True):
        assert_equal(on_towers(model_fn, 2), on_one_device(model_fn))


@pytest.mark.slow
def test_an_update_in_a_branch_of_control_flow_v1():
    """A step runs it in towers that take the branch, and no other update beside it."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        count = tf.get_variable('count', [], initializer=ZEROS, trainable=False)
        state, new = by_get_variable(1), tf.reduce_max(x, keepdims=True)
        return {'loss': tf.reduce_mean(tf.square(w * x)), 'updates': [
            tf.group(tf.assign_add(count, 1.), tf.cond(
                new[0] > state[0], lambda: tf.group(tf.assign(state, new)), tf.no_op))]}
    batch = np.float32([3, 1, 2, 3, -1, -2, -3, -1])  # the second tower's are below its state
    with switched('control_flow_v2', False):
        losses, weights, _ = on_one_device(model_fn, batch)
        assert_equal(on_towers(model_fn, 2, batch), (losses, weights, np.float32([3, 0])))


def test_every_tower_has_one_local_variable_beside_the_first():
    built = on_towers(goes_on(by_variable), 3, np.float32(range(6)), steps=1)[3]
    graph = built.loss.graph
    local = graph.get_collection('local_variables')
    assert [v.op.name for v in local] == [
        'rnn/state', 'rnn/state_tower_1', 'rnn/state_tower_2']
    assert {v.device for v in local} == {'/device:CPU:0'}
    assert [v.op.name for v in graph.get_collection('variables')] == ['w', 'w/Momentum']
    assert [v.op.name for v in built.own_state] == [v.op.name for v in local]
    assert ('of each tower    rnn/state; tf.variables_initializer(built.own_state) resets every '
            'tower') in str(built.plan).split('\n  ')
    assert not towers.audit(built).broken


def stateful(x):
    net = keras.layers.LSTM(3, stateful=True, name='rnn', kernel_initializer='ones',
                            recurrent_initializer='ones')(x)
    return tf.reduce_mean(tf.square(net))


@slow
@pytest.mark.skipif(tf.version.VERSION < '2', reason='its state is trainable there')
def test_a_stateful_layer_of_keras():
    def with_updates(x):
        with towers.model.keras_calls.record_keras_calls() as calls:
            loss = stateful(x)
        return {'loss': loss, 'updates': calls.updates()}
    batch = np.random.RandomState(3).randn(8, 4, 3).astype('float32')
    with switched('resource_variables', True), switched(
            'control_flow_v2', tf.version.VERSION > '2'):
        losses = on_one_device(with_updates, batch)[0]
        ours = on_towers(stateful, 4, batch)
    np.testing.assert_allclose(ours[0], losses, 1e-4)
    assert ours[3].plan.line('of each tower').count(', ') == 1  # two variables


def test_a_reset_reaches_every_tower():
    built = towers.build_towers(goes_on(by_get_variable), tf.constant(BATCH), sgd(0.), 2,
                                'mean')
    assert len(built.own_state) == 2
    resets = [tf.variables_initializer(built.own_state), tf.local_variables_initializer(),
              tf.group(*[tf.assign(each, tf.zeros_like(each)) for each in built.own_state])]
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])

        def step():
            session.run(built.train_op)
            return np.concatenate(session.run(built.own_state))
        np.testing.assert_allclose(step(), BATCH)
        np.testing.assert_allclose(step(), 1.5 * BATCH)
        for reset in resets:
            session.run(reset)
            np.testing.assert_allclose(step(), BATCH)


def test_a_count_of_steps_is_each_parts_and_what_a_metric_counts_is_shared():
    def model_fn(x):
        count, total = [tf.get_local_variable(name, [], initializer=ZEROS)
                        for name in ('count', 'total')]
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        return {'loss': tf.reduce_mean(x) * w * tf.identity(tf.assign_add(count, 1.)),
                'updates': [], 'metrics': {
                    'total': (total.read_value(), tf.assign_add(total, tf.reduce_sum(x)))}}
    ours = on_towers(model_fn, 2, memory=towers.Memory(accumulate=2))
    assert_equal(ours[:2] + (None,), on_one_device(model_fn)[:2] + (None,))
    assert ours[3].plan.line('updated by') == (
        'all towers together: 1 trained; each micro-batch its own: 1 state; '
        'every micro-batch adds to: 1 metrics')


def test_a_sum_that_waits_for_state_is_refused_where_each_tower_calls_the_model():
    """Every call would write the one variable."""
    def model_fn(x):
        counted = tf.assign_add(
            tf.get_local_variable('state', [], initializer=ZEROS), 1.)
        with tf.control_dependencies([counted]):
            total = towers.batch_sum(tf.reduce_sum(x))
        kept = tf.get_variable('kept', [], initializer=ZEROS, trainable=False)
        loss = tf.reduce_mean(x) * tf.get_variable('w', [], initializer=tf.ones_initializer())
        return {'loss': loss, 'updates': [counted, tf.assign(kept, total)]}
    with pytest.raises(towers.SharedVariableError, match=(
            'a value of the whole batch .* waits for a write of variable state')):
        on_towers(model_fn, 2, copies='reuse')


def test_state_that_the_step_does_not_write_is_refused():
    def model_fn(x):
        state = by_get_variable(int(x.shape[0]))
        tf.assign(state, x)
        return tf.reduce_mean(state.read_value() + x * tf.get_variable('w', []))
    with pytest.raises(towers.SharedVariableError, match=(
            'operation Assign.*, which the step does not run, writes state of a tower, and there '
            'are 2 towers: return it in updates, or put it into UPDATE_OPS')):
        towers.build_towers(model_fn, tf.constant(BATCH), sgd(), 2)
