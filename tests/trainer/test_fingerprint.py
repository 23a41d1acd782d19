"""Checksums of weights and of the stream of examples: what changes them, and what must not."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from trainer.fingerprint import ExamplesChecksum, FingerprintHook, weights_checksum
from trainer.metrics_log import MetricsLog

IMAGES = np.arange(24, dtype=np.float32).reshape([12, 2, 1, 1]) / 24
LABELS = np.arange(12) % 3


def checksum_of(images, labels, batch_size):
    """The checksum after all batches of that size."""
    with tf.Graph().as_default(), tf.Session() as session:
        batch = tf.placeholder(tf.float32, (batch_size,) + images.shape[1:])
        of_batch = tf.placeholder(tf.int64, [batch_size])
        checksum = ExamplesChecksum()
        update = checksum.update(batch, of_batch)
        session.run(tf.global_variables_initializer())
        for begin in range(0, len(images), batch_size):
            value = session.run(update, {batch: images[begin:begin + batch_size],
                                         of_batch: labels[begin:begin + batch_size]})
            assert value == session.run(checksum.variable)
        return int(value)


def test_examples_checksum_is_the_polynomial_that_it_says():
    prime, expected = 2 ** 31 - 1, 0
    for image, label in zip(IMAGES, LABELS):
        digest = 0
        for pixel in image.ravel():
            digest = (digest * 69621 + int(pixel * np.float32(16384))) % prime
        expected = (expected * 1000003 + digest * 1000003 + int(label) + 1) % prime
    assert checksum_of(IMAGES, LABELS, 12) == expected


def test_examples_checksum_depends_on_order_pixels_and_labels():
    swapped = np.arange(12)
    swapped[[4, 5]] = 5, 4
    relabelled = LABELS.copy()
    relabelled[11] = 0
    darker = IMAGES.copy()
    darker[0, 0, 0, 0] = 1
    sums = [checksum_of(IMAGES, LABELS, 4), checksum_of(IMAGES[swapped], LABELS[swapped], 4),
            checksum_of(IMAGES, relabelled, 4), checksum_of(darker, LABELS, 4)]
    assert len(set(sums)) == 4


def test_large_images_are_looked_at_in_part():
    images = np.random.RandomState(1).rand(4, 40, 60, 1).astype(np.float32)
    # 2,400 numbers: every third one.
    seen, unseen = images.copy(), images.copy()
    seen[2, 0, 3, 0] += 0.5
    unseen[2, 0, 4, 0] += 0.5
    labels = np.zeros(4)
    assert checksum_of(images, labels, 2) == checksum_of(unseen, labels, 4)
    assert checksum_of(images, labels, 2) != checksum_of(seen, labels, 2)


def test_unknown_shape_is_refused():
    images = tf.placeholder(tf.float32, [None, 2, 1, 1])
    with pytest.raises(InvalidArgumentError, match='cannot be checksummed'):
        ExamplesChecksum().update(images, tf.zeros([3], tf.int64))


def test_weights_checksum():
    values = {'a': np.array([1, 2], np.float32), 'b': np.float32(3)}
    same = {'b': np.float32(3), 'a': np.array([1, 2], np.float32)}
    assert weights_checksum(values) == weights_checksum(same)
    assert len(weights_checksum(values)) == 16
    others = [dict(values, a=np.array([2, 1], np.float32)), dict(values, b=np.float64(3)),
              dict(values, c=np.float32(0)), {'a': values['b'], 'b': values['a']},
              dict(values, a=np.array([[1, 2]], np.float32))]
    assert len({weights_checksum(each) for each in [values] + others}) == 6


@pytest.mark.parametrize('step, lines', [(0, 1), (3, 0)])
def test_hook_writes_a_new_runs_weights_once(tmp_path, step, lines):
    global_step = tf.train.get_or_create_global_step()
    weights = tf.get_variable('w', initializer=[1., 2.])
    log = MetricsLog(str(tmp_path / 'metrics.jsonl'))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(tf.assign(global_step, step))
        for _ in range(2):  # the second time as after a kill at the same step
            log.resume(step)
            FingerprintHook([weights], global_step, log).after_create_session(session, None)
            log.sync()
    with open(log.path) as opened:
        written = [json.loads(line) for line in opened]
    expected = {'step': 0, 'examples': 0,
                'initial_weights': weights_checksum({'w': np.array([1, 2], np.float32)})}
    assert written == [expected] * lines
