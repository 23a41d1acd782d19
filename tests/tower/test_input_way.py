"""The way from an iterator to the inputs: which ones cannot be read ahead, and why."""

import pytest
import tensorflow
import tensorflow.compat.v1 as tf

import towers
from towers.tower.input_way import inputs_from, way_of

DEVICES = ['/cpu:0', '/cpu:1']


def numbers():
    return tf.data.Dataset.range(20).batch(4, drop_remainder=True)


def initializable():
    return tf.data.make_initializable_iterator(numbers())


def one_shot():
    return tf.data.make_one_shot_iterator(numbers()).get_next()


def static_table():
    keys = tf.range(20, dtype=tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys), -1)


def checked(batch):
    with tf.control_dependencies([tf.Assert(tf.reduce_all(batch >= 0), [batch])]):
        return tf.identity(batch)


def counter():
    return tf.get_variable('count', [], tf.int64, tf.zeros_initializer(), trainable=False)


def counted(batch):
    """Counts the batches that have come: one more than those that were trained on, if ahead."""
    with tf.control_dependencies([tf.assign_add(counter(), tf.reduce_sum(batch))]):
        return tf.identity(batch)


def get_next_after_a_count():
    iterator = tf.data.make_one_shot_iterator(numbers())
    with tf.control_dependencies([tf.assign_add(counter(), 1)]):
        return iterator.get_next()


def inner_reader(batch):
    """A function that reads a variable."""
    scale = tf.get_variable('scale', [], tf.int64, tf.ones_initializer(), use_resource=True)
    return tensorflow.function(lambda each: each * scale)(batch)


def looped(batch):
    return tf.while_loop(lambda turn, each: turn < 3, lambda turn, each: (turn + 1, each + 1),
                         [0, batch])[1]


def with_control_flow_v2(way):
    before = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    try:
        return way(one_shot())
    finally:
        if not before:
            tf.disable_control_flow_v2()


@pytest.mark.parametrize('inputs, text', [
    (lambda: tf.zeros([4]), 'they come from no iterator'),
    (lambda: tf.placeholder(tf.float32, [4]), 'they come from no iterator'),
    (lambda: tf.FIFOQueue(3, tf.float32, []).dequeue_many(4), 'reads them by QueueDequeueMany'),
    (lambda: (one_shot(), tf.placeholder(tf.float32, [4])), "does not come from the iterator"),
    (lambda: tf.cast(one_shot(), tf.float32) + tf.random_uniform([4]), 'draws random numbers'),
    (lambda: tf.data.Iterator.from_string_handle(
        tf.placeholder(tf.string, []), tf.int64, [4]).get_next(), 'depends on what is fed'),
    (lambda: tf.data.Iterator.from_string_handle(
        tf.as_string(7), tf.int64, [4]).get_next(), 'does not stand in the graph'),
    (lambda: (one_shot(), initializable().get_next()),
     r'several iterators \(IteratorV2, OneShotIterator\), of which one could be initialized again'),
    (lambda: one_shot() * tf.placeholder_with_default(tf.constant(1, tf.int64), []),
     r"'PlaceholderWithDefault' \(PlaceholderWithDefault\), on the way from the iterator"),
    (lambda: one_shot() * tf.placeholder(tf.int64, []),
     'another value in another step. Do that within the model function'),
    (lambda: one_shot() * tf.train.get_or_create_global_step(), "'global_step' .* another value"),
    (lambda: one_shot() * tf.get_variable('v', [], tf.int64, tf.ones_initializer(),
                                          use_resource=True), 'another value in another step'),
    (lambda: counted(one_shot()), r'another value in another step'),
    (lambda: get_next_after_a_count(), 'another value in another step'),
    (lambda: inner_reader(one_shot()), 'another value in another step'),
    (lambda: one_shot() + tf.cast(tf.timestamp(), tf.int64), r'\(Timestamp\)'),
    (lambda: tf.map_fn(lambda number: number + 1, one_shot()), 'is a tf.while_loop or holds one'),
    (lambda: with_control_flow_v2(looped), r"\(\w*While\), .* is a tf.while_loop or holds one"),
    (lambda: with_control_flow_v2(lambda batch: tf.cond(
        batch[0] > 4, lambda: looped(batch), lambda: batch)), r"\(\w*While\), .* or holds one"),
    (lambda: tensorflow.function(looped)(one_shot()), 'is a tf.while_loop or holds one'),
])
def test_inputs_that_cannot_be_read_ahead(inputs, text):
    with pytest.raises(towers.InputError, match=text):
        towers.build_towers(lambda *parts: 0., inputs(), tf.train.GradientDescentOptimizer(0.1),
                            DEVICES, stage_inputs=True)


@pytest.mark.parametrize('way', [
    lambda batch: static_table().lookup(batch), lambda batch: tf.py_func(abs, [batch], tf.int64),
    lambda batch: tf.cond(tf.reduce_sum(batch) > 9, lambda: 2 * batch, lambda: batch),
    lambda batch: tensorflow.function(lambda each: each * 2)(batch), checked,
    lambda batch: batch * looped(tf.constant(1, tf.int64)),  # it does not read the batch
    lambda batch: with_control_flow_v2(lambda batch: tf.cond(
        tf.reduce_sum(batch) > 9, lambda: 2 * batch, lambda: batch))])
def test_what_is_the_same_whenever_it_runs_may_be_on_the_way(way):
    [read], region = way_of(way(one_shot()))
    assert read.type == 'IteratorGetNext' and region


def test_the_way_goes_once_more_on_other_values():
    """By hand: twice a number and 1, of 5 instead of what the iterator gives."""
    batch = one_shot()
    inputs = (2 * batch + 1, tf.constant(7))
    [read], region = way_of(inputs)
    assert read.type == 'IteratorGetNext' and batch.op not in region
    twice, constant = inputs_from({read: [tf.fill([4], tf.constant(5, tf.int64))]}, inputs, region,
                                  tf.constant(0), 'again')
    assert constant is inputs[1] and twice.shape == [4]
    with tf.Session() as session:
        assert session.run(twice).tolist() == [11] * 4
        assert session.run(inputs[0]).tolist() == [1, 3, 5, 7]  # the first batch: none was read
