"""A step gone through by hand: what is alive when."""

import pytest
import tensorflow.compat.v1 as tf

from towers.memory.simulation import Run
from towers.memory.step_graph import StepGraph

KB = 1024


def vector(name='x'):
    """A kilobyte."""
    return tf.random_uniform([256], name=name)


def peak(fetches):
    return Run(StepGraph(fetches)).peaks[None][0]


def written_over():
    return [tf.nn.relu(tf.exp(vector()))]


def needed_later():
    x = vector()  # exp cannot write into x, which the product takes as well; the product can
    return [tf.exp(x) * x]


def let_go():
    x = vector()
    one = tf.reduce_sum(tf.concat([x, x], 0))  # 1 + 2 KB
    with tf.control_dependencies([one]):
        return [one, tf.reduce_sum(tf.concat([vector('y')] * 4, 0))]


def kept_by_a_view():
    view = tf.reshape(vector(), [16, 16])
    with tf.control_dependencies([view]):
        other = tf.reduce_sum(tf.concat([vector('y')] * 4, 0))
    with tf.control_dependencies([other]):
        return [tf.exp(view), other]  # x, y, and y four times


def first_come_first_served():
    branches = []
    for number in range(2):
        x = tf.random_uniform([256], name='start%d' % number)
        branches.append(tf.reduce_sum(tf.concat([x, x], 0)))
    return branches  # both numbers, then a concatenation that frees one


def behind_a_constant():
    first = tf.reduce_sum(tf.concat([vector()] * 4, 0))
    with tf.control_dependencies([first]):  # of the constant shape; not of the operation itself
        return [first, tf.reduce_sum(tf.concat([vector('y')] * 4, 0))]


def variable(use_resource=True):
    return tf.get_variable('v', [1024], use_resource=use_resource)


def in_place(use_resource=True):
    return [tf.assign_add(variable(use_resource), tf.random_uniform([1024])).op]


def being_read():
    v = variable()
    read = v.read_value()
    with tf.control_dependencies([read]):
        update = tf.assign_add(v, tf.random_uniform([1024])).op
    with tf.control_dependencies([update]):  # the variable twice, and a concatenation
        return [tf.reduce_sum(tf.concat([read, read], 0))]


@pytest.mark.parametrize('make, kilobytes', [
    (written_over, 1), (needed_later, 2), (let_go, 5), (kept_by_a_view, 6),
    (first_come_first_served, 5), (behind_a_constant, 5), (in_place, 8),
    (lambda: in_place(False), 8), (being_read, 16)])
def test_the_peak_by_hand(make, kilobytes):
    assert peak(make()) == kilobytes * KB


def test_a_tensor_is_copied_to_another_memory_once():
    with tf.device('/device:GPU:0'):
        x = vector()
    with tf.device('/device:GPU:1'):
        taken = [tf.concat([x, x], 0), tf.concat([x, x, x], 0)]
    run = Run(StepGraph(taken))
    assert [(buffer.device, buffer.size) for buffer in run.buffers
            if buffer.what == 'transfer'] == [('/device:GPU:1', KB)]
    assert run.peaks['/device:GPU:0'][0] == KB
    assert run.peaks['/device:GPU:1'][0] == (1 + 3) * KB  # first come first served: 2, then 3


def test_cpus_of_a_process_share_one_memory():
    with tf.device('/device:CPU:0'):
        x = vector()
    with tf.device('/device:CPU:1'):
        assert peak([tf.concat([x, x], 0)]) == 3 * KB


def test_everything_that_is_allocated_is_freed_but_variables():
    v = tf.get_variable('v', [256], use_resource=True)
    loss = tf.reduce_sum(tf.square(tf.exp(v) * vector()))
    run = Run(StepGraph([tf.train.AdamOptimizer().minimize(loss)]))
    left = {buffer.variable.name for buffer in run.buffers if buffer.until is None}
    assert left == {'v', 'v/Adam', 'v/Adam_1', 'beta1_power', 'beta2_power'}


def test_a_loop_ends():
    x = tf.placeholder(tf.float32, [256])
    result = tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.exp(y) + 1.),
                           (tf.constant(0), x))
    assert peak([result[1]]) >= KB
