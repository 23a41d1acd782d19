"""Colours distorted at random: against Python's and TensorFlow's own."""

import colorsys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from datasets import colors


def run(*tensors):
    with tf.Session() as session:
        return session.run(tensors)


@pytest.mark.parametrize('order', [0, pytest.param(3, marks=pytest.mark.slow)])
def test_colors_by_hand(order):
    rng = np.random.RandomState(order)
    image = rng.uniform(.3, .7, size=[2, 3, 3])
    draws = np.array([(order + .5) / 4, .6, .7, .4, .55])
    found, = run(colors.distorted_colors(tf.constant(image, tf.float32),
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


def test_gray_images_get_brightness_and_contrast_alone():
    draws = tf.constant([.1, 1. - 1e-6, .5 - 1e-6, .9, .9])
    found, = run(colors.distorted_colors(tf.constant([[[.2], [.4]]]), draws))
    np.testing.assert_allclose(found, [[[.2 + 32. / 255.], [.4 + 32. / 255.]]], atol=1e-5)
