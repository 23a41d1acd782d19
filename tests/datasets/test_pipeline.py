"""Batches: the order is the documented one, whatever the batch size, the version or the start."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from datasets import pipeline
from philox import philox_4x32_10
from towers.errors import InvalidArgumentError

IMAGES = np.arange(7 * 2 * 2, dtype=np.float32).reshape([7, 2, 2, 1])
LABELS = np.arange(7, dtype=np.int64) * 10


def take(dataset, count):
    """The first `count` elements, or all of them where there are fewer."""
    element = tf.data.make_one_shot_iterator(dataset).get_next()
    elements = []
    with tf.Session() as session:
        for _ in range(count):
            try:
                elements.append(session.run(element))
            except tf.errors.OutOfRangeError:
                break
    return elements


def train_labels(batch_size, batches, seed=5, **kwargs):
    dataset = pipeline.train_batches(IMAGES, LABELS, batch_size, seed, **kwargs)
    return np.concatenate([labels for _, labels in take(dataset, batches)]).tolist()


def expected_order(num_examples, seed, epoch):
    """The order of an epoch, in plain Python: TensorFlow's use of Philox for a seed of two ints."""
    def halves(number):
        return [number % 2 ** 32, (number >> 32) % 2 ** 32]

    mixed = philox_4x32_10(halves(seed) + halves(epoch), [0x3ec8f720, 0x02461e29])
    keys = []
    for block in itertools.count():
        words = philox_4x32_10(halves(block) + mixed[2:], mixed[:2])
        keys += [words[0] + (words[1] << 32), words[2] + (words[3] << 32)]
        if len(keys) >= num_examples:
            break
    return sorted(range(num_examples), key=lambda i: -(keys[i] % 2 ** 62))


def test_order_is_the_same_in_every_version():
    # The same numbers from TF 1.15.5, 2.15.1 and 2.21.0.
    assert train_labels(7, 2) == [30, 10, 0, 40, 60, 50, 20, 50, 10, 20, 30, 60, 40, 0]


@pytest.mark.parametrize('first_example', [7, 23])
def test_starts_anywhere(first_example):
    stream = train_labels(1, 50)
    resumed = train_labels(3, 5, first_example=first_example)
    assert resumed == stream[first_example:first_example + 15]


def test_start_far_out_costs_nothing():
    assert train_labels(7, 1, first_example=7 * 10 ** 12) == [
        10 * index for index in expected_order(7, 5, 10 ** 12)]


def test_eval_is_one_pass_in_order_with_a_short_end():
    batches = take(pipeline.eval_batches(IMAGES, LABELS, 3), 10)
    assert [labels.tolist() for _, labels in batches] == [[0, 10, 20], [30, 40, 50], [60]]
    assert (np.concatenate([images for images, _ in batches]) == IMAGES).all()


def test_resize_is_bilinear_with_half_pixel_centres():
    # From two pixels 0 and 8 to four: centres at -1/4 (clipped), 1/4, 3/4 and 5/4 (clipped) of
    # the way between the old ones: 0, 2, 6, 8.
    images = np.array([[0, 8], [0, 8]], np.float32).reshape([1, 2, 2, 1])
    (got, _), = take(pipeline.eval_batches(images, [1], 1, image_size=4), 2)
    assert got.shape == (1, 4, 4, 1)
    assert got[0, :, :, 0].tolist() == [[0, 2, 6, 8]] * 4


@pytest.mark.parametrize('arguments, text', [
    (dict(batch_size=0), 'batch_size=0, expected a whole number of at least 1'),
    (dict(seed=2 ** 63), 'seed=9223372036854775808'),
    (dict(first_example=-1), 'first_example=-1'),
    (dict(image_size=(8, 8, 3)), 'expected one int or .height, width.'),
    (dict(channels=0), 'channels=0'),
    (dict(images=np.zeros([7, 2, 2, 3]), channels=1), 'channels=1 for images with 3 channels'),
    (dict(images=np.zeros([7, 2, 2])), r'shape \[7, 2, 2\], expected \[n, height, width, channels'),
    (dict(labels=LABELS[:6]), r'7 images and labels of shape \[6\]'),
    (dict(images=IMAGES[:0], labels=[]), 'no images'),
    (dict(shift=1.5), 'shift=1.5, expected a whole number of at least 0'),
    (dict(share=(3, 3)), 'expected .number of the worker'),
    (dict(share=(0, 2), remainder='weight'), 'may not do for all 2 workers')])
def test_bad_arguments_are_named_before_any_op_is_made(graph, arguments, text):
    good = dict(images=IMAGES, labels=LABELS, batch_size=2, seed=1)
    with pytest.raises(InvalidArgumentError, match=text):
        pipeline.train_batches(**dict(good, **arguments))
    assert not graph.get_operations()


# ---- shifts --------------------------------------------------------------------------------------

def expected_shifts(num_examples, seed, epoch, largest):
    """The shifts of an epoch by the documented formula, in plain Python."""
    def halves(number):
        return [number % 2 ** 32, (number >> 32) % 2 ** 32]

    mixed = philox_4x32_10(halves(seed) + halves(-1 - epoch), [0x3ec8f720, 0x02461e29])
    drawn = []
    for block in range(num_examples):  # four words, hence two int64, a block
        words = philox_4x32_10(halves(block) + mixed[2:], mixed[:2])
        drawn.append([(words[i] + (words[i + 1] << 32)) % (2 * largest + 1) - largest
                      for i in (0, 2)])
    return drawn


def moved(image, down, right):
    """An image [h, w, c] moved, with 0 for what moves in: the slow way."""
    result = np.zeros_like(image)
    height, width = image.shape[:2]
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                result[row, column] = image[row - down, column - right]
    return result


IMAGES_TO_MOVE = np.arange(1, 1 + 7 * 4 * 3 * 2, dtype=np.float32).reshape([7, 4, 3, 2])


@pytest.mark.parametrize('first_example, shift', [(0, 2), (9, 1)])
@pytest.mark.slow
def test_images_are_moved_by_the_shifts_of_their_place_in_the_stream(shift, first_example):
    order = [i for epoch in range(4) for i in expected_order(7, 5, epoch)][first_example:]
    shifts = [s for epoch in range(4) for s in expected_shifts(7, 5, epoch, shift)][first_example:]
    place = 0
    for images, labels in take(pipeline.train_batches(
            IMAGES_TO_MOVE, LABELS, 4, seed=5, first_example=first_example, shift=shift), 4):
        assert images.shape == (4, 4, 3, 2) and images.dtype == np.float32
        for image, label in zip(images, labels):
            assert label == 10 * order[place]
            assert np.array_equal(image, moved(IMAGES_TO_MOVE[order[place]], *shifts[place]))
            place += 1


# ---- shares of workers ---------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('shift, remainder', [(1, 'carry'), (0, 'drop')])
def test_workers_share_out_the_batches_of_one_machine(shift, remainder):
    common = dict(seed=5, first_example=6, shift=shift, remainder=remainder)
    whole = take(pipeline.train_batches(IMAGES, LABELS, 6, **common), 5)
    parts = [take(pipeline.train_batches(IMAGES, LABELS, 2, share=(worker, 3), **common), 5)
             for worker in range(3)]
    for step, (images, labels) in enumerate(whole):
        np.testing.assert_array_equal(images, np.concatenate([part[step][0] for part in parts]))
        np.testing.assert_array_equal(labels, np.concatenate([part[step][1] for part in parts]))
