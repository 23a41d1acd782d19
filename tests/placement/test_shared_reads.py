"""One read of each variable for all operations of a tower: what is sent, and the numbers."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from case_marks import first_fast
from sample_models import check_against_one_device, mean_squared_error, sgd, switched

BATCH = 8
HALF = {'x': 4 * 6 * 8, 'y': 4 * 3 * 8}  # bytes of a shard of `vectors`
KERNEL = 6 * 3 * 8


@pytest.fixture(autouse=True)
def control_flow_v1():
    with switched('control_flow_v2', False), switched('resource_variables', True):
        yield


def decayed(x, y):
    """A kernel that three operations read."""
    kernel = tf.get_variable('kernel', [6, 3], tf.float64)
    loss = mean_squared_error(tf.matmul(x, kernel), y)
    return loss + .1 * tf.nn.l2_loss(kernel) + .1 * tf.reduce_mean(tf.abs(kernel))


def with_registered_loss(x, y):
    """A kernel with an L2 loss, which a layer reads before that."""
    kernel = tf.get_variable('kernel', [6, 3], tf.float64,
                             regularizer=lambda weights: .1 * tf.nn.l2_loss(weights))
    return mean_squared_error(tf.matmul(x, kernel), y)


def in_loops(x, y):
    """A kernel that is read in a loop, in a loop in it, and before both."""
    kernel = tf.get_variable('kernel', [3, 3], tf.float64)
    start = tf.matmul(x[:, :3], kernel)

    def inner(j, state):
        return j + 1, tf.tanh(tf.matmul(state, kernel))

    def outer(i, state):
        _, state = tf.while_loop(lambda j, _: j < 2, inner, (0, state))
        return i + 1, state + tf.matmul(state, kernel)
    _, state = tf.while_loop(lambda i, _: i < 3, outer, (0, start))
    return mean_squared_error(state, y)


def before_a_layer(x, y):
    """A kernel that is read in a loop, and after it."""
    kernel = tf.get_variable('kernel', [6, 6], tf.float64)
    _, state = tf.while_loop(lambda i, _: i < 2,
                             lambda i, h: (i + 1, tf.tanh(tf.matmul(h, kernel))), (0, x))
    return mean_squared_error(tf.matmul(state, kernel)[:, :3], y)


def in_branch(x, y):
    """A kernel that is read in a branch, and outside of it."""
    kernel = tf.get_variable('kernel', [6, 3], tf.float64)
    more = tf.cond(tf.reduce_mean(tf.abs(x)) > 0., lambda: tf.matmul(2. * x, kernel),
                   lambda: tf.zeros_like(y))
    return mean_squared_error(tf.matmul(x, kernel) + more, y) + tf.nn.l2_loss(kernel)


def written_in_loop(x, y):
    """A factor that each iteration of a loop reads, and then writes."""
    kernel = tf.get_variable('kernel', [6, 3], tf.float64)
    factor = tf.get_variable('factor', [], tf.float64, tf.ones_initializer(), trainable=False)

    def step(i, state):
        state += factor.read_value() * tf.matmul(x, kernel)
        with tf.control_dependencies([state]):
            written = tf.assign_add(factor, 1.)
        with tf.control_dependencies([written]):
            return i + 1, tf.identity(state)
    _, state = tf.while_loop(lambda i, _: i < 3, step, (0, tf.zeros_like(y)), parallel_iterations=1)
    return mean_squared_error(state, y)


def sent_to_second(model_fn, data, **options):
    """The bytes that the CPU sends to the second of two GPUs in a step, and the build."""
    with tf.Graph().as_default():
        built = towers.build_towers(
            model_fn, tuple(map(tf.constant, data)), sgd(),
            towers.resolve_devices(['/gpu:0', '/gpu:1'], check=False), reduction='mean', **options)
        audited = towers.audit(built)
        assert audited.broken == []
    return sum(pair.bytes for pair in audited.transfers
               if 'CPU' in pair.source and 'GPU:1' in pair.target), built


@pytest.mark.parametrize('copies', first_fast(1, ['clone', 'reuse']))
def test_a_weight_is_sent_once_however_often_it_is_read(copies):
    sent, _ = sent_to_second(decayed, samples.vectors(BATCH), copies=copies)
    assert sent == sum(HALF.values()) + KERNEL


@pytest.mark.parametrize('copies', first_fast(1, ['reuse', 'clone']))
def test_a_weight_with_an_l2_loss_is_sent_once(copies):
    sent, _ = sent_to_second(with_registered_loss, samples.vectors(BATCH), copies=copies,
                             regularization='add')
    # Beside the shard and the kernel there are scalars, of the loss and of its gradient.
    assert sum(HALF.values()) + KERNEL <= sent < sum(HALF.values()) + 2 * KERNEL


def test_micro_batches_of_a_tower_get_a_weight_once():
    data = samples.vectors(BATCH)
    sent, _ = sent_to_second(decayed, data, memory=towers.Memory(accumulate=2))
    assert sent == sum(HALF.values()) + KERNEL


def test_a_loop_gets_a_weight_once_a_step():
    sent, built = sent_to_second(in_loops, samples.vectors(BATCH))
    # Beside the shard, and the scalars that count iterations, a kernel of 9 numbers.
    assert sum(HALF.values()) + 9 * 8 <= sent < sum(HALF.values()) + 2 * 9 * 8
    reads = [op for op in samples.step_operations([built.train_op])
             if op.type == 'ReadVariableOp']
    # One for each tower; the handle comes from the variable, and not through an `Enter`.
    assert len(reads) == 2
    assert {read.inputs[0].op.name for read in reads} == {'kernel'}


@pytest.mark.parametrize('options', first_fast(1, [
    {}, {'memory': towers.Memory(accumulate=2)}, {'copies': 'reuse'},
    {'memory': towers.Memory(recompute='auto')}]))
@pytest.mark.parametrize('model_fn', first_fast(1, [
    before_a_layer, decayed, in_loops, in_branch, samples.while_loop_rnn]))
def test_the_numbers_are_those_of_one_device(model_fn, options):
    data = samples.sequences if model_fn is samples.while_loop_rnn else samples.vectors
    check_against_one_device(model_fn, data(BATCH), reduction='mean', **options)


@pytest.mark.slow
def test_a_finished_model():
    data = samples.vectors(BATCH)
    losses = []
    for has_towers in (True, False):
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            x, y = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.float64, [None, 3])
            loss = in_loops(x, y)
            if has_towers:
                built = towers.build_towers(loss, (x, y), sgd(), 2, 'mean')
                loss, train_op = built.loss, built.train_op
            else:
                train_op = sgd().minimize(loss)
            with tf.Session(config=tf.ConfigProto(device_count={'CPU': 2})) as session:
                session.run(tf.global_variables_initializer())
                [kernel] = tf.trainable_variables()
                kernel.load(np.linspace(-1, 1, 9).reshape(3, 3), session)
                feed = {x: data[0], y: data[1]}
                losses.append([session.run([loss, train_op], feed)[0] for _ in range(3)])
    assert samples.relative_difference(*losses) < 1e-12


def test_a_variable_that_the_model_writes_keeps_its_reads():
    check_against_one_device(
        written_in_loop, samples.vectors(BATCH), num_towers=['/cpu:1'], reduction='mean',
        variables=towers.VariablePlacement('/cpu:0'))
