"""The Inception recipe: windows, decoding and colours, against numpy's and TensorFlow's."""

import colorsys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
from datasets import preprocessing
from datasets.preprocessing import MIRRORED, TRAIN_DRAWS
from image_files import batches, jpeg, png, write_imagenet
from towers.errors import InvalidArgumentError


def run(*tensors):
    with tf.Session() as session:
        return session.run(tensors)


def windows(count, height, width):
    fed = tf.constant(np.random.RandomState(3).uniform(size=[count, TRAIN_DRAWS]), tf.float32)
    found = tf.map_fn(lambda each: preprocessing.random_window(
        each, tf.constant(float(height)), tf.constant(float(width))), fed)
    return run(found)[0]


@pytest.mark.slow
def test_windows_are_inside_and_as_large_and_wide_as_they_may_be():
    height, width = 375, 500
    found = windows(300, height, width)
    tops, lefts, heights, widths = found.T
    assert (found == np.round(found)).all()
    assert tops.min() >= 0 and lefts.min() >= 0
    assert (tops + heights).max() <= height and (lefts + widths).max() <= width
    whole = (heights == height) & (widths == width)
    part = found[~whole]
    assert (part[:, 2] * part[:, 3] >= 0.1 * height * width).all()
    assert whole.mean() < .02
    aspects = part[:, 3] / part[:, 2]
    assert aspects.min() > 0.73 and aspects.max() < 1.36
    # From a tenth of the area to all that such an aspect has room for.
    shares = part[:, 2] * part[:, 3] / (height * width)
    assert shares.min() < .15 and shares.max() > .85
    room = part[(part[:, 2] < height) & (part[:, 3] < width)]
    down, right = [room[:, side] / (whole_side - room[:, side + 2])
                   for side, whole_side in enumerate((height, width))]
    assert abs(np.corrcoef(down, right)[0, 1]) < .3  # of some 200 places, drawn each by itself


def test_mirrored_by_its_draw():
    draws = np.full([TRAIN_DRAWS], .5, np.float32)
    draws[MIRRORED] = .4
    plain = preprocessing.random_image(tf.constant(jpeg()), draws, 16, augment='crop')
    draws = draws.copy()
    draws[MIRRORED] = .6
    mirrored = preprocessing.random_image(tf.constant(jpeg()), draws, 16, augment='crop')
    plain, mirrored = run(plain, mirrored)
    np.testing.assert_array_equal(plain[:, ::-1], mirrored)
    assert plain[:, 0].mean() < plain[:, -1].mean()  # its left side is dark


def test_the_central_part_of_jpeg_and_png():
    for encoded in (jpeg(200, 64, 64), png(200, 64, 64)):
        found, whole = run(preprocessing.central_image(tf.constant(encoded), 56),
                           tf.image.decode_image(encoded))
        np.testing.assert_allclose(found, whole[4:60, 4:60] / 127.5 - 1, atol=1e-5)


def test_the_central_window_is_that_of_slim():
    image = tf.placeholder(tf.int32, [None, None, 1])
    theirs = tf.image.central_crop(image, 0.875)
    size = tf.placeholder(tf.float32, [2])
    ours = preprocessing.central_window(size[0], size[1])
    found = {}
    with tf.Session() as session:
        for height in [15, 16, 100] + list(range(1, 201, 5)):
            width = 201 - height
            places = np.arange(height)[:, None] * 1000 + np.arange(width)
            part, window = session.run([theirs, ours], {image: places[..., None],
                                                        size: [height, width]})
            found[height] = window.tolist()
            assert found[height] == list(divmod(part[0, 0, 0], 1000)) + list(part.shape[:2])
    # A sixteenth is left out on each side, in whole pixels.
    assert found[15] == [0., 11., 15., 164.] and found[16] == [1., 11., 14., 163.]
    assert found[100] == [6., 6., 88., 89.]


def test_a_part_of_a_jpeg_is_decoded():
    encoded = jpeg(200, 40, 60)
    window = tf.constant([8., 16., 16., 16.])
    found, exact = run(preprocessing.decoded_part(tf.constant(encoded), lambda *size: window, 16),
                       tf.image.decode_and_crop_jpeg(encoded, [8, 16, 16, 16], channels=3))
    np.testing.assert_allclose(found, exact / 255., atol=1e-5)
    assert found[:, 0].max() < .1 and found[:, -1].min() > .7  # its edge is in the middle


@pytest.mark.parametrize('order', [0, pytest.param(3, marks=pytest.mark.slow)])
def test_colors_by_hand(order):
    rng = np.random.RandomState(order)
    image = rng.uniform(.3, .7, size=[2, 3, 3])
    draws = np.array([(order + .5) / 4, .6, .7, .4, .55])
    found, = run(preprocessing.distorted_colors(tf.constant(image, tf.float32),
                                                tf.constant(draws, tf.float32)))

    def of_pixels(change):
        return lambda pixels: np.apply_along_axis(
            lambda rgb: colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*rgb))), 2, pixels)
    changes = {
        'b': lambda pixels: pixels + (draws[1] * 2 - 1) * 32 / 255,
        's': of_pixels(lambda h, s, v: (h, min(1, s * (.5 + draws[3])), v)),
        'h': of_pixels(lambda h, s, v: ((h + draws[4] * .4 - .2) % 1, s, v)),
        'c': lambda pixels: ((pixels - pixels.mean((0, 1))) * (.5 + draws[2])
                             + pixels.mean((0, 1)))}
    for change in ('bshc', 'sbch', 'chbs', 'hscb')[order]:
        image = changes[change](image)
    np.testing.assert_allclose(found, np.clip(image, 0, 1), atol=2e-5)


# ---- ImageNet's reader on a few tiny JPEGs: labels, order, crops, and a start anywhere -----------

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
