"""Colours distorted at random, plane by plane.

TensorFlow's `adjust_saturation` and `adjust_hue` go through HSV pixel by pixel, and its contrast is
an image less a value for each channel: each takes 0.7 to 1 ms for 224 x 224 pixels. The same
numbers (within 1e-5) follow from red, green and blue as planes, by operations on whole planes. With
M and m the largest and the smallest of a pixel's three, and R = M - m:

    saturation times k:  M - (M - c) min(k, M / R)                      (HSV's S = R / M <= 1)
    hue plus d:          m + R clip(| |h + d - h_c| - 3 | - 1, 0, 1)    h in sixths of the circle,
                                                                        h_c = 0, 2, 4
"""

import tensorflow.compat.v1 as tf

_LEAST_RANGE = 1e-30  # of gray pixels, so that nothing is divided by 0
_MOST_BRIGHTER = 32. / 255.
_CONTRASTS = _SATURATIONS = (0.5, 1.5)
_MOST_HUE = 0.2  # of the circle


def distorted_colors(image, draws):
    """Brightness, saturation, hue and contrast changed at random, in one of four orders.

    The ranges and orders are those of slim's `inception_preprocessing`.

    Args:
      image: float32 [height, width, channels] in 0..1; of one channel, only brightness and
          contrast.
      draws: float32 [5] in [0, 1): order, brightness, contrast, saturation, hue.

    Returns:
      The same, in 0..1.
    """
    count = image.shape.as_list()[-1]

    def brightness(planes):
        return brighter(planes, _between(-_MOST_BRIGHTER, _MOST_BRIGHTER, draws[1]))

    def contrast(planes):
        return contrasted(planes, _between(*_CONTRASTS, draws[2]))

    def saturation(planes):
        return saturated(planes, _between(*_SATURATIONS, draws[3])) if count == 3 else planes

    def hue(planes):
        return turned(planes, _between(-_MOST_HUE, _MOST_HUE, draws[4])) if count == 3 else planes

    orders = [(brightness, saturation, hue, contrast), (saturation, brightness, contrast, hue),
              (contrast, hue, brightness, saturation), (hue, saturation, contrast, brightness)]

    def applied(order):
        def apply():
            planes = planes_of(image)
            for change in order:
                planes = change(planes)
            return tf.clip_by_value(image_of(planes, tf.shape(image)), 0., 1.)
        return apply
    # Functions, unlike the branches around the decoder: the operations of the other orders would
    # otherwise be looked at, too.
    chosen = tf.cast(draws[0] * len(orders), tf.int32)
    return tf.ensure_shape(tf.switch_case(chosen, [applied(order) for order in orders]),
                           image.shape)


def planes_of(image):
    """[height, width, channels] as a list of planes [height * width]."""
    return [tf.reshape(image[..., channel], [-1]) for channel in range(image.shape.as_list()[-1])]


def image_of(planes, shape):
    """The image of a shape, from its planes."""
    return tf.reshape(tf.transpose(tf.stack(planes)), shape)


def brighter(planes, by):
    """Every value plus a number."""
    return [plane + by for plane in planes]


def contrasted(planes, factor):
    """Every value's distance from the mean of its plane times a number."""
    return [plane * factor + (1. - factor) * tf.reduce_mean(plane) for plane in planes]


def saturated(planes, factor):
    """The saturation of every pixel times a number above 0; see the top of this file."""
    largest = _reduced(tf.maximum, planes)
    span = largest - _reduced(tf.minimum, planes)
    factor = tf.minimum(tf.maximum(largest, 0.) / tf.maximum(span, _LEAST_RANGE), factor)
    return [largest - (largest - plane) * factor for plane in planes]


def turned(planes, by):
    """The hue of every pixel plus `by`, -1/6 .. 1/6 of the circle or a little more; see the top."""
    red, green, blue = planes
    largest, smallest = _reduced(tf.maximum, planes), _reduced(tf.minimum, planes)
    span = largest - smallest
    sixths = tf.where(
        tf.equal(largest, red), green - blue,
        tf.where(tf.equal(largest, green), blue - red + 2. * span, red - green + 4. * span)
    ) / tf.maximum(span, _LEAST_RANGE) + 6. * by
    return [smallest + span * tf.clip_by_value(
        tf.abs(tf.abs(sixths - place) - 3.) - 1., 0., 1.) for place in (0., 2., 4.)]


def _reduced(function, planes):
    return function(function(planes[0], planes[1]), planes[2])


def _between(low, high, draw):
    return low + (high - low) * draw
