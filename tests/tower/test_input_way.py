"""The way from an iterator to the inputs: which ones cannot be read ahead, and why."""

import pytest
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
])
def test_inputs_that_cannot_be_read_ahead(inputs, text):
    with pytest.raises(towers.InputError, match=text):
        towers.build_towers(lambda *parts: 0., inputs(), tf.train.GradientDescentOptimizer(0.1),
                            DEVICES, stage_inputs=True)


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
