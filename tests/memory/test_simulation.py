"""A step gone through by hand: what is alive when."""

import tensorflow.compat.v1 as tf

from towers.memory.simulation import simulate
from towers.memory.step_graph import StepGraph

KB = 1024


def vector(name='x'):
    """A kilobyte."""
    return tf.random_uniform([256], name=name)


def peak(fetches, device=None, **options):
    return simulate(StepGraph(fetches), **options).peaks[device][0]


def test_a_chain_writes_over_its_input():
    assert peak([tf.nn.relu(tf.exp(vector()))]) == KB


def test_an_input_that_is_needed_later_is_not_written_over():
    x = vector()
    # exp cannot write into x, which the product takes as well; the product can.
    assert peak([tf.exp(x) * x]) == 2 * KB


def test_a_tensor_is_let_go_after_its_last_taker():
    x = vector()
    one = tf.reduce_sum(tf.concat([x, x], 0))  # 1 + 2 KB
    with tf.control_dependencies([one]):
        two = tf.reduce_sum(tf.concat([vector('y')] * 4, 0))
    assert peak([one, two]) == 5 * KB


def test_aliases_keep_their_memory_alive():
    x = vector()
    view = tf.reshape(x, [16, 16])
    with tf.control_dependencies([view]):
        other = tf.reduce_sum(tf.concat([vector('y')] * 4, 0))
    with tf.control_dependencies([other]):
        later = tf.exp(view)
    assert peak([later, other]) == (1 + 1 + 4) * KB  # x, y, and y four times


def variable(kilobytes):
    return tf.get_variable('v', [256 * kilobytes], use_resource=True)


def test_a_variable_that_nobody_reads_is_written_in_place():
    v = variable(4)
    assert peak([tf.assign_add(v, tf.random_uniform([1024])).op]) == 8 * KB


def test_a_variable_that_is_being_read_goes_on_in_new_memory():
    v = variable(4)
    read = v.read_value()
    with tf.control_dependencies([read]):
        update = tf.assign_add(v, tf.random_uniform([1024])).op
    with tf.control_dependencies([update]):
        later = tf.concat([read, read], 0)
    run = simulate(StepGraph([tf.reduce_sum(later)]))
    assert [buffer.size for buffer in run.buffers if buffer.what == 'update'] == [4 * KB]
    # The variable twice and the random numbers; then it twice and the concatenation.
    assert run.peaks[None][0] == 16 * KB


def test_reference_variables_are_written_in_place():
    v = tf.get_variable('v', [1024], use_resource=False)
    assert peak([tf.assign_add(v, tf.random_uniform([1024])).op]) == 8 * KB


def test_a_tensor_is_copied_to_another_memory_once():
    with tf.device('/device:GPU:0'):
        x = vector()
    with tf.device('/device:GPU:1'):
        taken = [tf.concat([x, x], 0), tf.concat([x, x, x], 0)]
    run = simulate(StepGraph(taken))
    transfers = [(buffer.device, buffer.size) for buffer in run.buffers
                 if buffer.what == 'transfer']
    assert transfers == [('/device:GPU:1', KB)]
    assert run.peaks['/device:GPU:0'][0] == KB
    assert run.peaks['/device:GPU:1'][0] == (1 + 3) * KB  # first come first served: 2, then 3


def test_cpus_of_a_process_share_one_memory():
    with tf.device('/device:CPU:0'):
        x = vector()
    with tf.device('/device:CPU:1'):
        y = tf.concat([x, x], 0)
    run = simulate(StepGraph([y]))
    assert not [buffer for buffer in run.buffers if buffer.what == 'transfer']
    assert run.peaks[None][0] == 3 * KB


def test_ready_operations_run_first_come_first_served():
    branches = []
    for number in range(2):
        x = tf.random_uniform([256], name='start%d' % number)
        branches.append(tf.reduce_sum(tf.concat([x, x], 0)))
    assert peak(branches) == 5 * KB + 0  # both numbers, then a concatenation that frees one


def test_what_takes_a_constant_waits_for_what_the_constant_waits_for():
    first = tf.reduce_sum(tf.concat([vector()] * 4, 0))
    with tf.control_dependencies([first]):  # of the constant shape; not of the operation itself
        second = tf.reduce_sum(tf.concat([vector('y')] * 4, 0))
    assert peak([first, second]) == 5 * KB


def test_everything_that_is_allocated_is_freed_but_variables():
    v = variable(1)
    loss = tf.reduce_sum(tf.square(tf.exp(v) * vector()))
    train = tf.train.AdamOptimizer().minimize(loss)
    run = simulate(StepGraph([train]))
    left = {buffer.variable.name for buffer in run.buffers if buffer.until is None}
    assert left == {'v', 'v/Adam', 'v/Adam_1', 'beta1_power', 'beta2_power'}


def test_a_loop_ends():
    x = tf.placeholder(tf.float32, [256])
    result = tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.exp(y) + 1.),
                           (tf.constant(0), x))
    assert peak([result[1]]) >= KB
