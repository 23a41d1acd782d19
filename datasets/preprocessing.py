"""Images from JPEG and PNG files to what a network takes, as the Inception recipe of slim does it.

Training: a crop of 10 to 100 % of the area with an aspect of 3:4 to 4:3, scaled to the size,
mirrored every other time, its colours distorted; evaluation: the central 87.5 % of height and
width, scaled. Values are in -1..1. (slim's `inception_preprocessing`. Its crop is TensorFlow's
`sample_distorted_bounding_box` of 5 to 100 % of the area with the whole image as the box, of which
a tenth has to be covered: so no crop is smaller than that. Its central part is that of
`tf.image.central_crop`.)

Nothing draws a number here: what is random is given as numbers in [0, 1), `TRAIN_DRAWS` an image,
so that augmentation is a function of the seed, the epoch and the example. Only what a crop needs of
a JPEG is decoded, at a half, a quarter or an eighth of its size where the crop is that much larger
than the target.
"""

import tensorflow.compat.v1 as tf

from datasets.colors import distorted_colors

AUGMENTS = ('inception', 'crop', 'none')

# At a crop, as in slim. Ten do for all but one in a million photographs, but leave an image that is
# ten times as wide as high as it is one time in four.
ATTEMPTS = 100
# Four of each of the first ten attempts; mirrored; order of the colour's distortions; four factors;
# then the other attempts, so that what the first ten are enough for is drawn by the same numbers as
# when there were no more.
MIRRORED = 40
_COLORS, _MORE = slice(41, 46), 46
TRAIN_DRAWS = 4 * ATTEMPTS + _MORE - MIRRORED
_LEAST_AREA, _LEAST_COVERED = 0.05, 0.1
_ASPECTS = (3. / 4., 4. / 3.)  # width / height; slim has 0.75 .. 1.33
_CENTRAL_SHARE = 0.875
_RATIOS = (1, 2, 4, 8)  # what libjpeg can scale an image down by while it decodes


def random_image(encoded, draws, image_size, channels=3, augment='inception'):
    """A training image: a random part of an encoded one, scaled, mirrored, its colours distorted.

    Args:
      encoded: string scalar, a JPEG or PNG.
      draws: float32 [TRAIN_DRAWS] in [0, 1).
      image_size: height and width in pixels.
      channels: 1 or 3.
      augment: `'inception'`; `'crop'` leaves the colours; `'none'` takes the central part.

    Returns:
      float32 [image_size, image_size, channels] in -1..1.
    """
    if augment == 'none':
        return central_image(encoded, image_size, channels)
    colors = augment == 'inception'
    image = decoded_part(encoded, lambda height, width: random_window(draws, height, width),
                         image_size, channels, 1. if colors else 2.,
                         draws[MIRRORED] >= 0.5)
    return (distorted_colors(image, draws[_COLORS]) * 2. if colors else image) - 1.


def central_image(encoded, image_size, channels=3):
    """A test image: the central part, scaled; see `random_image`."""
    return decoded_part(encoded, central_window, image_size, channels, 2.) - 1.


def random_window(draws, height, width):
    """The crop: top, left, height and width, float32 [4], whole numbers of pixels.

    The first of `ATTEMPTS` windows that is inside the image, has an area within the bounds and
    covers enough of the image; the whole image where there is none.

    Args:
      draws: float32 [TRAIN_DRAWS]: aspect, height, top, left of each, at their places.
      height, width: of the image, float32 scalars.
    """
    draws = tf.reshape(tf.concat([draws[:MIRRORED], draws[_MORE:]], 0), [ATTEMPTS, 4])
    aspect = _ASPECTS[0] + (_ASPECTS[1] - _ASPECTS[0]) * draws[:, 0]
    area = height * width
    least = tf.round(tf.sqrt(_LEAST_AREA * area / aspect))
    most = tf.minimum(tf.round(tf.sqrt(area / aspect)), height)
    most = tf.minimum(most, tf.floor((width + 0.5 - 1e-4) / aspect))
    least = tf.minimum(least, most)
    heights = tf.minimum(least + tf.floor(draws[:, 1] * (most - least + 1.)), most)
    widths = tf.round(heights * aspect)
    fits = tf.reduce_all(tf.stack([
        heights >= 1., widths >= 1., heights <= height, widths <= width,
        heights * widths >= max(_LEAST_AREA, _LEAST_COVERED) * area], axis=1), axis=1)
    tops = tf.floor(draws[:, 2] * tf.maximum(height - heights, 1.))
    lefts = tf.floor(draws[:, 3] * tf.maximum(width - widths, 1.))
    whole = tf.stack([0., 0., height, width])
    # The whole image comes last, and fits.
    windows = tf.concat([tf.stack([tops, lefts, heights, widths], axis=1), whole[tf.newaxis]], 0)
    fits = tf.concat([tf.cast(fits, tf.int32), [1]], 0)
    return windows[tf.argmax(fits)]  # the first of those that fit


def central_window(height, width):
    """The central part: top, left, height, width; as much is left out on either side."""
    begin = tf.floor(tf.stack([height, width]) * ((1. - _CENTRAL_SHARE) / 2.))
    return tf.concat([begin, tf.stack([height, width]) - 2. * begin], 0)


def decoded_part(encoded, window_of, image_size, channels, white=1.,
                 mirrored=None):
    """A part of an encoded image, scaled.

    Images with other channels become these as the decoders convert them, as slim's do: gray as
    equal red, green and blue, CMYK as RGB, transparency left out.

    Args:
      encoded: string scalar: a JPEG, of which only the part is decoded; or a PNG.
      window_of: function from height and width (float32 scalars) to top, left, height, width.
      image_size: height and width of the result.
      channels: 1 or 3.
      white: the value of white.
      mirrored: bool scalar tensor: whether left and right change places; None: they do not.

    Returns:
      float32 [image_size, image_size, channels] in 0..white.
    """
    # Switch and Merge themselves: tf.cond and tf.switch_case took some hundredths of an image's
    # time more.
    png, jpeg = tf.raw_ops.Switch(data=encoded, pred=is_jpeg(encoded))
    pixels = tf.image.decode_png(png, channels=channels)
    shape = the_one([tf.shape(pixels), tf.image.extract_jpeg_shape(jpeg)])
    size = tf.cast(shape[:2], tf.float32)
    window = window_of(size[0], size[1])
    begin, extent = tf.cast(window[:2], tf.int32), tf.cast(window[2:], tf.int32)
    parts = [tf.slice(pixels, tf.concat([begin, [0]], 0), tf.concat([extent, [channels]], 0))]

    larger = tf.reduce_min(window[2:]) / float(image_size)
    by = tf.reduce_sum(tf.cast(larger >= _RATIOS[1:], tf.int32))
    ratio = tf.gather(tf.constant(_RATIOS, tf.float32), by)
    begin = tf.floor(window[:2] / ratio)
    whole = tf.math.ceil(size / ratio)  # libjpeg rounds the size up
    scaled = tf.cast(tf.concat([begin, tf.clip_by_value(
        tf.round(window[2:] / ratio), 1., whole - begin)], 0), tf.int32)
    for place, each in enumerate(_RATIOS):  # an attribute of the decoder, so one for each
        parts.append(tf.image.decode_and_crop_jpeg(
            only_if(tf.equal(by, place), jpeg), scaled, channels=channels, ratio=each))
    part = the_one(parts)
    if mirrored is not None:  # before it is scaled: a pixel has one byte a channel, and not four
        # A slice with a step of -1 gives the same and takes as long as the decoding.
        straight, turned = tf.raw_ops.Switch(data=part, pred=mirrored)
        part = the_one([straight, tf.reverse(turned, [1])])
    return _resized(part, image_size, channels, white)


def only_if(condition, tensor):
    """A tensor that is there only if a bool scalar is True; else nothing of it is computed."""
    return tf.raw_ops.Switch(data=tensor, pred=condition)[1]


def the_one(tensors):
    """That one of some tensors which is there."""
    return tf.raw_ops.Merge(inputs=tensors)[0]


def is_jpeg(encoded):
    """Whether a string begins as a JPEG does."""
    return tf.equal(tf.strings.substr(encoded, 0, tf.minimum(tf.strings.length(encoded), 3)),
                    b'\xff\xd8\xff')


def _resized(pixels, image_size, channels, white):
    """uint8 [h, w, channels] as float32 [image_size, image_size, channels] in 0..white."""
    # The op itself: TF 1's and TF 2's tf.image.resize differ in where pixel centres lie.
    scaled = tf.raw_ops.ResizeBilinear(images=pixels[tf.newaxis], size=[image_size, image_size],
                                       half_pixel_centers=True)[0]
    return tf.ensure_shape(scaled, [image_size, image_size, channels]) * (white / 255.)
