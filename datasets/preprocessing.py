"""Images from JPEG and PNG files to what a network takes, as the Inception recipe of slim does it.

Training: a crop of 10 to 100 % of the area with an aspect of 3:4 to 4:3, scaled to the size,
mirrored every other time, its colours distorted; evaluation: the central 87.5 % of height and
width, scaled. Values are in -1..1. (slim's `inception_preprocessing`. Its crop is TensorFlow's
`sample_distorted_bounding_box` of 5 to 100 % of the area. The box is the whole image, and a tenth
of the box has to be covered: so no crop is smaller than a tenth. Its central part is what
`tf.image.central_crop` gives.)

Nothing draws a random number here: the caller gives random numbers in [0, 1), `TRAIN_DRAWS` for
each image, so that augmentation is a function of the seed, the epoch and the example.
"""

import typing

import tensorflow.compat.v1 as tf

AUGMENTS = ('inception', 'crop', 'none')

# Attempts at a crop, as many as in slim. Ten attempts do for all but one in a million photographs.
# But for an image that is ten times as wide as high, ten attempts find no crop one time in four.
ATTEMPTS = 100
# The draws: mirrored; order of the colours' distortions; four factors; four of each attempt.
MIRRORED = 0
_COLORS = slice(1, 6)
_WINDOWS = 6
TRAIN_DRAWS = _WINDOWS + 4 * ATTEMPTS
_LEAST_AREA = 0.05
_LEAST_COVERED = 0.1
_LEAST_ASPECT = 3. / 4.  # width / height; slim has 0.75 .. 1.33
_MOST_ASPECT = 4. / 3.
_CENTRAL_SHARE = 0.875


def random_image(encoded: tf.Tensor, draws: tf.Tensor, image_size: int,
                 augment: str = 'inception') -> tf.Tensor:
    """A training image: a random part of an encoded image, scaled, mirrored, its colours changed.

    Args:
      encoded: string scalar, a JPEG or PNG.
      draws: float32 [TRAIN_DRAWS] in [0, 1).
      image_size: height and width in pixels.
      augment: `'inception'`; `'crop'` leaves the colours; `'none'` takes the central part.

    Returns:
      float32 [image_size, image_size, 3] in -1..1.
    """
    if augment == 'none':
        return central_image(encoded, image_size)

    def window(height: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
        """The part of an image of this size that is cut out."""
        return random_window(draws, height, width)
    image = decoded_part(encoded, window, image_size, mirrored=draws[MIRRORED] >= 0.5)
    if augment == 'inception':
        image = distorted_colors(image, draws[_COLORS])
    return image * 2. - 1.


def central_image(encoded: tf.Tensor, image_size: int) -> tf.Tensor:
    """A test image: the central part, scaled; see `random_image`."""
    return decoded_part(encoded, central_window, image_size) * 2. - 1.


def random_window(draws: tf.Tensor, height: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
    """The crop: top, left, height and width, float32 [4], whole numbers of pixels.

    It is the first of `ATTEMPTS` windows that is inside the image, has an area within the bounds
    and covers enough of the image; the whole image where no window does.

    Args:
      draws: float32 [TRAIN_DRAWS]; from `_WINDOWS` on aspect, height, top and left of each window.
      height, width: of the image, float32 scalars.
    """
    draws = tf.reshape(draws[_WINDOWS:], [ATTEMPTS, 4])
    aspects = _LEAST_ASPECT + (_MOST_ASPECT - _LEAST_ASPECT) * draws[:, 0]
    heights = _heights_of_windows(aspects, draws[:, 1], height, width)
    widths = tf.round(heights * aspects)
    tops = tf.floor(draws[:, 2] * tf.maximum(height - heights, 1.))
    lefts = tf.floor(draws[:, 3] * tf.maximum(width - widths, 1.))
    is_large = heights * widths >= max(_LEAST_AREA, _LEAST_COVERED) * (height * width)
    fits = tf.reduce_all(tf.stack([
        heights >= 1., widths >= 1., heights <= height, widths <= width, is_large], axis=1), axis=1)
    # The whole image comes last, and fits.
    whole = tf.stack([0., 0., height, width])
    windows = tf.concat([tf.stack([tops, lefts, heights, widths], axis=1), whole[tf.newaxis]], 0)
    fits = tf.concat([tf.cast(fits, tf.int32), [1]], 0)
    first_that_fits = tf.argmax(fits)  # of equal values it takes the first
    return windows[first_that_fits]


def _heights_of_windows(aspects: tf.Tensor, draws: tf.Tensor, height: tf.Tensor,
                        width: tf.Tensor) -> tf.Tensor:
    """The heights of windows, each drawn evenly from all whole numbers that its aspect allows.

    A window of the aspect a (width over height) and the area A has the height sqrt(A / a). The area
    is at least `_LEAST_AREA` of the image's; the window is at most as high and as wide as the
    image.

    Args:
      aspects: float32 [ATTEMPTS].
      draws: float32 [ATTEMPTS] in [0, 1).
      height, width: of the image, float32 scalars.
    """
    area = height * width
    least = tf.round(tf.sqrt(_LEAST_AREA * area / aspects))
    most = tf.minimum(tf.round(tf.sqrt(area / aspects)), height)
    # The largest height whose width, height * aspect, is still rounded to `width`.
    most = tf.minimum(most, tf.floor((width + 0.5 - 1e-4) / aspects))
    least = tf.minimum(least, most)
    return tf.minimum(least + tf.floor(draws * (most - least + 1.)), most)


def central_window(height: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
    """The central part: top, left, height, width; opposite sides lose the same."""
    begin = tf.floor(tf.stack([height, width]) * ((1. - _CENTRAL_SHARE) / 2.))
    return tf.concat([begin, tf.stack([height, width]) - 2. * begin], 0)


def decoded_part(encoded: tf.Tensor, window_of: typing.Callable, image_size: int,
                 mirrored: typing.Optional[tf.Tensor] = None) -> tf.Tensor:
    """A part of an encoded image, scaled.

    Images of other colours are converted as the decoders do it, as slim's are: gray as equal red,
    green and blue, CMYK as RGB, transparency left out.

    Args:
      encoded: string scalar: a JPEG, of which only the part is decoded; or a PNG.
      window_of: function from height and width (float32 scalars) to top, left, height, width.
      image_size: height and width of the result.
      mirrored: bool scalar tensor: whether left and right change places; None: they do not.

    Returns:
      float32 [image_size, image_size, 3] in 0..1.
    """
    def window_in(shape: tf.Tensor) -> tf.Tensor:
        """Top, left, height and width of the part of an image of a shape [3]."""
        size = tf.cast(shape[:2], tf.float32)
        return tf.cast(window_of(size[0], size[1]), tf.int32)

    def of_jpeg() -> tf.Tensor:
        """The part of a JPEG: only this part is decoded."""
        return tf.image.decode_and_crop_jpeg(
            encoded, window_in(tf.image.extract_jpeg_shape(encoded)), channels=3)

    def of_png() -> tf.Tensor:
        """The part of a PNG, which is decoded as a whole."""
        pixels = tf.image.decode_png(encoded, channels=3)
        window = window_in(tf.shape(pixels))
        return tf.slice(pixels, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))
    begin = tf.strings.substr(encoded, 0, tf.minimum(tf.strings.length(encoded), 3))
    is_jpeg = tf.equal(begin, b'\xff\xd8\xff')  # the first bytes of each JPEG
    part = tf.cond(is_jpeg, of_jpeg, of_png)
    if mirrored is not None:  # before it is scaled: a pixel has one byte a channel, and not four
        part = tf.cond(mirrored, lambda: tf.reverse(part, [1]), lambda: part)
    # The op itself: TF 1's and TF 2's tf.image.resize differ in where pixel centres lie.
    scaled = tf.raw_ops.ResizeBilinear(images=part[tf.newaxis], size=[image_size, image_size],
                                       half_pixel_centers=True)[0]
    return tf.ensure_shape(scaled, [image_size, image_size, 3]) / 255.


def distorted_colors(image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    """Brightness, saturation, hue and contrast changed at random, in one of four orders.

    The ranges and orders are those of slim's `inception_preprocessing`.

    Args:
      image: float32 [height, width, 3] in 0..1.
      draws: float32 [5] in [0, 1): order, brightness, contrast, saturation, hue.

    Returns:
      The changed image: float32 [height, width, 3] in 0..1.
    """
    def brightness(pixels: tf.Tensor) -> tf.Tensor:
        """Adds -32/255 to 32/255."""
        return tf.image.adjust_brightness(pixels, (draws[1] * 2. - 1.) * 32. / 255.)

    def contrast(pixels: tf.Tensor) -> tf.Tensor:
        """Multiplies the contrast by 0.5 to 1.5."""
        return tf.image.adjust_contrast(pixels, 0.5 + draws[2])

    def saturation(pixels: tf.Tensor) -> tf.Tensor:
        """Multiplies the saturation by 0.5 to 1.5."""
        return tf.image.adjust_saturation(pixels, 0.5 + draws[3])

    def hue(pixels: tf.Tensor) -> tf.Tensor:
        """Turns the hue by -0.2 to 0.2 of the circle of colours."""
        return tf.image.adjust_hue(pixels, draws[4] * 0.4 - 0.2)

    def applied(order: typing.Sequence[typing.Callable]) -> typing.Callable[[], tf.Tensor]:
        """A function without arguments, as `tf.switch_case` takes it, for one of the orders."""
        def apply() -> tf.Tensor:
            """The image with all four changes, one after the other."""
            changed = image
            for change in order:
                changed = change(changed)
            return tf.clip_by_value(changed, 0., 1.)
        return apply
    orders = [(brightness, saturation, hue, contrast), (saturation, brightness, contrast, hue),
              (contrast, hue, brightness, saturation), (hue, saturation, contrast, brightness)]
    chosen = tf.cast(draws[0] * len(orders), tf.int32)
    return tf.ensure_shape(tf.switch_case(chosen, [applied(order) for order in orders]),
                           image.shape)
