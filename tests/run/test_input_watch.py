"""How long steps wait for input: iterators, queues, placeholders. The watch reads no batch."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run.input_watch import InputWatch, InputWatchHook, describe_share
from towers.run.step_loop import LoopSession
from trainer.progress import ProgressHook
from sample_models import switched

SLOW = 0.05  # seconds; what is fast beside it takes microseconds


def slow(value):
    def wait(number):
        time.sleep(SLOW)
        return number
    return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


def numbers(slow_input, count=20):
    dataset = tf.data.Dataset.range(count)
    if slow_input:
        dataset = dataset.map(slow)
    return tf.data.make_one_shot_iterator(dataset).get_next()


def training(value, slow_step):
    """A train op that counts steps and adds up what it read."""
    if slow_step:
        value = slow(value)
    total = tf.get_variable('total', [], tf.int64, tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
    with tf.control_dependencies([tf.assign_add(total, value)]):
        return tf.assign_add(step, 1).op, total


def watched(train_op, steps, feed=None, before=lambda: None):
    watch = InputWatch(train_op)
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), watch.initializer])
        for _ in range(steps):
            before()
            session.run(train_op, feed)
        return watch.span(watch.read(session)), watch


@pytest.mark.parametrize('slow_input, slow_step', [
    pytest.param(True, False, marks=pytest.mark.slow), (False, True)])
def test_time_for_the_input_and_for_the_rest_of_a_step(slow_input, slow_step):
    train_op, _ = training(numbers(slow_input), slow_step)
    span, watch = watched(train_op, 4)
    assert span.steps == 4 and watch.reads == ['IteratorGetNext']
    assert span.seconds >= 4 * SLOW
    if slow_input:
        assert span.waited >= 4 * SLOW
    else:
        assert span.waited <= span.seconds / 2  # a thousandth of it, where nothing else runs


@pytest.mark.slow
def test_a_reading_ends_when_it_is_done_and_not_when_a_thread_is_free():
    """On 1.15 a run of digits that waited for 2 % of its time said 16 to 45."""
    value = numbers(False)
    parts = [slow(value + number) for number in range(4)]
    train_op, _ = training(tf.add_n(parts) + slow(value), False)
    watch = InputWatch(train_op)
    with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=1,
                                          use_per_session_threads=True)) as session:
        session.run([tf.global_variables_initializer(), watch.initializer])
        for _ in range(2):
            session.run(train_op)
        span = watch.span(watch.read(session))
    assert span.seconds >= 2 * 5 * SLOW and span.waited <= span.seconds / 4


@pytest.mark.slow
def test_an_input_that_is_made_ahead_hides_behind_a_step():
    dataset = tf.data.Dataset.range(20).map(slow).map(slow).map(slow)
    value = tf.data.make_one_shot_iterator(dataset.prefetch(1)).get_next()
    span, _ = watched(training(value, slow_step=True)[0], 4)
    # A step takes one part of three.
    assert 3 * SLOW + 3 * 2 * SLOW * 0.9 - SLOW <= span.waited <= span.seconds - 3 * SLOW


@pytest.mark.slow
def test_a_reading_and_a_later_one_that_waits_for_work_between_them():
    first, total = numbers(False), tf.get_variable('sum', [], tf.int64, tf.zeros_initializer())
    with tf.control_dependencies([tf.assign_add(total, slow(slow(first)))]):
        second = numbers(True)
    span, watch = watched(training(second, False)[0], 3)
    assert len(watch.reads) == 2
    # 2.21 makes the input ahead of its own accord: the first one alone is waited for.
    assert SLOW * 0.9 <= span.waited <= span.seconds - 3 * 2 * SLOW * 0.9


@pytest.mark.parametrize('reads, dtype, shape, fed, waits', [
    pytest.param(False, tf.int64, [], 1, True, marks=pytest.mark.slow),
    (True, tf.int64, [2], [1, 1], True),
    (True, tf.int64, [], 1, False),  # a number, such as a learning rate, which no loop makes long
    pytest.param(True, tf.float64, None, 1, False, marks=pytest.mark.slow),
    pytest.param(False, tf.bool, [], True, False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_steps_that_are_fed_wait_between_them_for_examples_alone(reads, dtype, shape, fed, waits):
    value = tf.placeholder(dtype, shape)
    total = tf.reduce_sum(tf.cast(value, tf.int64))
    if reads or not waits:
        total += numbers(False) if reads else tf.random_uniform([], 0, 9, tf.int64)
    train_op, _ = training(total, slow_step=True)
    span, watch = watched(train_op, 3, {value: fed}, lambda: time.sleep(SLOW))
    assert len(watch.reads) == reads
    if waits:
        # The first has none before it. Sleeps and the graph's timestamps are of two clocks.
        assert 2 * SLOW * 0.9 <= span.waited <= span.seconds - 3 * SLOW * 0.9
    else:
        assert span.waited <= SLOW / 2


@pytest.mark.parametrize('where', [
    pytest.param('random', marks=pytest.mark.slow), 'towers'])
def test_a_step_that_neither_reads_nor_is_fed_waits_for_nothing(where):
    if where == 'towers':
        train_op = towers.build_towers(
            lambda numbers: tf.reduce_mean(numbers) * tf.get_variable('w', []), tf.ones([4]),
            tf.train.GradientDescentOptimizer(0.1), 2).train_op
    else:
        train_op, _ = training(tf.random_uniform([], 0, 9, tf.int64), slow_step=True)
    watch = InputWatch(train_op)
    with tf.Session(config=towers.session_config(2)) as session:
        session.run([tf.global_variables_initializer(), watch.initializer])
        for _ in range(3):
            time.sleep(SLOW)
            session.run(train_op)
        assert watch.reads == [] and watch.span(watch.read(session)).waited == 0.


@pytest.mark.slow
def test_a_fed_step_begins_before_its_first_work():
    """Its begin was noted after it, and the step seemed to wait for what it worked."""
    value = tf.placeholder(tf.float32, [2])
    learning_rate = tf.placeholder_with_default(0.1, [])

    def model_fn(numbers):
        weight = tf.get_variable('w', [], initializer=tf.zeros_initializer())
        return tf.reduce_mean(tf.stop_gradient(slow(numbers)) * weight)
    train_op = towers.build_towers(model_fn, value, tf.train.GradientDescentOptimizer(
        learning_rate), ['/cpu:0']).train_op
    watch = InputWatch(train_op)
    with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=1,
                                          use_per_session_threads=True)) as session:
        session.run([tf.global_variables_initializer(), watch.initializer])
        for _ in range(4):
            session.run(train_op, {value: np.ones(2)})
        span = watch.span(watch.read(session))
    assert span.steps == 4 and span.waited <= span.seconds / 4
    assert span.seconds >= 4 * SLOW * 0.9


def test_a_queue_and_not_the_tokens_of_one(graph):
    queue = tf.FIFOQueue(100, [tf.int64], [[]])
    tokens = tf.FIFOQueue(100, [tf.int64], [[]])
    put = [queue.enqueue_many([list(range(50))]), tokens.enqueue_many([list(range(50))])]
    total = tf.get_variable('total', [], tf.int64, tf.zeros_initializer())
    with tf.control_dependencies([tf.assign_add(total, tf.reduce_sum(queue.dequeue_many(2))),
                                  tokens.dequeue(name='sync_token')]):
        train_op = tf.no_op()
    watch = InputWatch(train_op)
    assert [graph.get_operation_by_name(name).type for name in watch.reads] == [
        'QueueDequeueManyV2']
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), watch.initializer, put])
        for _ in range(3):
            session.run(train_op)
        assert session.run(total) == sum(range(6)) and watch.read(session).steps == 3


def test_a_run_that_trains_nothing_is_no_step():
    value, other = numbers(False), numbers(False)
    train_op, total = training(value, False)
    watch = InputWatchHook(train_op, every_steps=1, say=None)
    with LoopSession(tf.train.ChiefSessionCreator(), [watch]) as session:
        session.run_steps(train_op, 3)
        assert session.run(other) == 0
        session.run(train_op)
        seen = session.run_step_fn(lambda step_context: (
            step_context.session.run(total), watch.watch.read(step_context.session).steps))
    assert seen == (0 + 1 + 2 + 3, 4)


@pytest.mark.slow
def test_lines_of_the_hook_and_the_share_in_the_progress(capsys):
    said = []
    train_op, _ = training(numbers(True), False)
    hook = InputWatchHook(train_op, every_steps=2, say=said.append)
    progress = ProgressHook({}, towers.StepCounts(tf.train.get_global_step(), 1, 5, 5), log_every=1,
                            input_watch=hook)
    with tf.train.MonitoredSession(hooks=[hook, progress]) as session:
        for _ in range(5):
            session.run(train_op)
    assert len(said) == 3
    assert said[0].startswith('input          ')
    assert ' of 2 steps was waiting for input (' in said[0]
    assert ' of 1 step was ' in said[2] and said[2].endswith(describe_share(hook.latest_share))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all('input wait ' in line for line in lines)


def test_evaluations_and_checkpoints_are_no_waiting():
    value = tf.placeholder(tf.int64, [])
    train_op, _ = training(value, False)
    hook = InputWatchHook(train_op)
    hook.evaluated(3, {}, 2.)
    hook.listener.before_save(None, 3)
    time.sleep(0.01)
    hook.listener.after_save(None, 3)
    assert 2.01 <= hook.away_seconds < 3


def test_levels_are_those_of_the_profiler():
    # Of the percentage that is printed beside them: 4.6 is 5 %, and not "5 % … not input-bound".
    assert [describe_share(share) for share in (0., .044, .046, .194, .196, 1.)] == [
        'not input-bound'] * 2 + ['moderately input-bound'] * 2 + ['highly input-bound'] * 2


def test_what_cannot_be_watched():
    with pytest.raises(towers.InvalidArgumentError, match='expected the operation of a step'):
        InputWatch('train')
    with tf.Graph().as_default():
        other = tf.no_op()
    with pytest.raises(towers.InvalidArgumentError, match='another graph'):
        InputWatch(other)
    with switched('control_flow_v2', False):
        value = tf.cond(tf.constant(True), lambda: numbers(False), lambda: tf.constant(
            0, tf.int64))
    with pytest.raises(towers.InvalidArgumentError, match='within a tf.cond'):
        InputWatch(training(value, False)[0])
    with pytest.raises(towers.InvalidArgumentError, match='every_steps=0'):
        InputWatchHook(tf.no_op(), every_steps=0)


@pytest.mark.parametrize('fed', [
    'default', pytest.param('towers', marks=pytest.mark.slow)])
def test_a_step_that_is_fed_its_batch_reads_none(fed):
    """The watch waited for the reading: each batch that was fed cost one of the iterator's."""
    dataset = tf.data.Dataset.range(20).map(lambda each: tf.cast(each, tf.float32)).batch(
        2, drop_remainder=True)
    iterator = tf.data.make_initializable_iterator(dataset)
    batch = iterator.get_next()
    value = tf.placeholder_with_default(batch, [2]) if fed == 'default' else batch
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.get_variable('w', [], initializer=tf.zeros_initializer()),
        value, tf.train.GradientDescentOptimizer(1.), 2, 'mean')
    by_hand = ({tower.inputs: [-1.] for tower in built.towers} if fed == 'towers' else
               {value: [-1., -1.]})
    watch = InputWatch(built.train_op)
    fetches = [built.train_op, built.gradients[0][0]]
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), watch.initializer])
        assert session.run(fetches, by_hand)[1] == -1.  # the iterator is not initialized
        session.run(iterator.initializer)
        seen = [session.run(fetches, by_hand if turn % 2 else {})[1] for turn in range(6)]
        assert seen == [.5, -1., 2.5, -1., 4.5, -1.]
        begun, read = watch.read_marks(session)
        assert read >= begun  # it has its input
        assert watch.span(watch.read(session)).steps == 7


def test_a_step_that_takes_the_batch_itself_is_watched_and_a_reading_is_none():
    batch = numbers(True)
    with pytest.raises(towers.InvalidArgumentError, match='which reads the input itself'):
        InputWatch(batch)
    span, _ = watched(tf.identity(batch).op, 2)
    assert span.waited >= SLOW * 0.9
