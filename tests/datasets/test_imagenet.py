"""ImageNet's reader on a few tiny JPEGs: labels, order, crops, and a start anywhere."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
from image_files import batches, write_imagenet
from towers.errors import InvalidArgumentError

SIZE = 16


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp('imagenet'))


def joined(found):
    return [np.concatenate(part) for part in zip(*found)]


@pytest.mark.slow
def test_a_start_anywhere_goes_on_bit_by_bit_whatever_the_batch(folder):
    found = datasets.get_dataset('imagenet', folder, augment='crop')
    whole = joined(batches(found.train_batches(batch_size=3, seed=5, image_size=SIZE), 8))
    later = joined(batches(found.train_batches(
        batch_size=2, seed=5, image_size=SIZE, first_example=tf.constant(10, tf.int64)), 7))
    for one, other in zip(whole, later):
        np.testing.assert_array_equal(one[10:], other)
    other_seed = joined(batches(found.train_batches(batch_size=3, seed=6, image_size=SIZE), 8))
    assert not np.array_equal(whole[0], other_seed[0])


@pytest.mark.slow
def test_a_bad_example_ends_its_own_batch_alone(tmp_path):
    """16 examples are read at once, the first eight batches of two; the seventh label is wrong."""
    found = datasets.get_dataset('imagenet', write_imagenet(
        tmp_path, test=8, label=lambda number: 1001 if number == 6 else 3))
    with tf.Graph().as_default(), tf.Session() as session:
        fetches = tf.data.make_one_shot_iterator(
            found.eval_batches(batch_size=2, image_size=SIZE)).get_next()
        for _ in range(3):
            assert session.run(fetches)[1].tolist() == [3, 3]
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match='has the label 1001, which is not in 0 .. 1000'):
            session.run(fetches)


def test_channels_and_shift_are_refused(folder):
    found = datasets.get_dataset('imagenet', folder, augment='crop')
    with pytest.raises(InvalidArgumentError, match='3 channels, and the network is for 1'):
        found.eval_batches(batch_size=1, image_size=SIZE, channels=1)
    with pytest.raises(InvalidArgumentError, match='--augment_shift=2 out'):
        found.train_batches(batch_size=1, seed=1, image_size=SIZE, shift=2)
