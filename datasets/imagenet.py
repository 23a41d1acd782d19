"""ImageNet (ILSVRC 2012) from TFRecords as slim's and TPU's conversion scripts write them.

A folder holds train-* and validation-*, with the features `image/encoded` (JPEG) and
`image/class/label` (1 .. 1000; 0 is the background class of the 1001). Training images are cut out
at random, scaled and mirrored as for the inceptions; all that is random depends on the seed and on
the place in the stream of examples alone, as does their order, which is `pipeline.example_order`'s:
a run that is taken up at example i goes on as if it had never stopped.

A read is at a random place of a file: keep the files on an SSD, or in memory.
"""

import math
import os

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from datasets.pipeline import example_draws, example_order
from datasets.tfrecords import Records
from towers.errors import InvalidArgumentError

NUM_CLASSES = 1001
_PATTERNS = {'train': 'train-*', 'test': 'validation-*'}
_LEAST_AREA = 0.08  # of a training image that a crop may have
_MOST_ASPECT = 4. / 3.  # width / height of a crop, or the other way round
_CENTRAL_SHARE = 0.875  # of height and width of a test image
_DRAWS = 5  # random numbers an example: area, aspect, row, column, mirrored
_PREFETCHED = 2  # batches


class ImageNet:
    """The data set in a folder. Made in seconds (warm) to minutes (cold disk) for all 1.28 million
    images, since the places of all records are looked up.

    Attributes:
      name, num_classes: 'imagenet', 1001.
      image_shape: (None, None, 3): images differ in size.
      num_examples: a dict from 'train' and 'test' to how many records the files hold.
    """

    name = 'imagenet'
    num_classes = NUM_CLASSES
    image_shape = (None, None, 3)

    def __init__(self, data_dir):
        """
        Args:
          data_dir: the folder with the files train-* and validation-*.

        Raises:
          DatasetError: the folder is missing, or its files are missing, damaged or empty.
        """
        if not os.path.isdir(data_dir):
            raise DatasetError('There is no folder %s: expected one with the ImageNet TFRecords '
                               'train-* and validation-*.' % data_dir)
        self._records = {split: Records(os.path.join(data_dir, pattern))
                         for split, pattern in _PATTERNS.items()}
        self.num_examples = {split: len(records) for split, records in self._records.items()}

    def train_batches(self, batch_size, seed, image_size, channels=3, first_example=0, shift=0):
        """Full batches for ever, in the order of `pipeline.example_order`.

        Each image is cut out at random (8 to 100 % of its area, 3:4 to 4:3), scaled to
        `image_size` and mirrored every other time.

        Args:
          batch_size, seed, first_example: as for `pipeline.train_batches`.
          image_size: height and width in pixels.
          channels: 3.
          shift: 0; images are cut out at random instead.

        Returns:
          A `tf.data.Dataset` of `(images, labels)`: float32 [batch_size, image_size, image_size, 3]
          in -1..1, as the inceptions want them, and int64 [batch_size], 1 .. 1000.

        Raises:
          InvalidArgumentError: an argument makes no sense.
        """
        _check(channels, shift)
        records = self._records['train']

        def example(index, draws):
            encoded, label = _parsed(records, index)
            return _random_crop(encoded, draws, image_size), label

        with tf.device('/cpu:0'):
            stream = tf.data.Dataset.zip((
                example_order(len(records), seed, first_example),
                example_draws(len(records), seed, _DRAWS, first_example)))
            return _batched(stream.map(example, tf.data.experimental.AUTOTUNE), batch_size,
                            drop_remainder=True)

    def eval_batches(self, batch_size, image_size, channels=3):
        """The validation images once, in order: the central 87.5 % of each, scaled.

        Args and raised errors: as for `train_batches`. The last batch may be short.
        """
        _check(channels, shift=0)
        records = self._records['test']

        def example(index):
            encoded, label = _parsed(records, index)
            return _central_crop(encoded, image_size), label

        with tf.device('/cpu:0'):
            examples = tf.data.Dataset.range(len(records)).map(
                example, tf.data.experimental.AUTOTUNE)
            return _batched(examples, batch_size, drop_remainder=len(records) % batch_size == 0)


def _check(channels, shift):
    if channels != 3:
        raise InvalidArgumentError('ImageNet has images of 3 channels, not %r: choose a network '
                                   'for 3.' % channels)
    if shift:
        raise InvalidArgumentError('ImageNet images are cut out at random already: leave '
                                   '--augment_shift=%r out.' % shift)


def _batched(examples, batch_size, drop_remainder):
    return examples.batch(batch_size, drop_remainder=drop_remainder).prefetch(_PREFETCHED)


def _parsed(records, index):
    """The JPEG and the label of a record."""
    data = tf.numpy_function(records.read, [index], tf.string, name='read_record')
    features = tf.parse_single_example(tf.reshape(data, []), {
        'image/encoded': tf.FixedLenFeature([], tf.string),
        'image/class/label': tf.FixedLenFeature([], tf.int64)})
    label = features['image/class/label']
    valid = tf.Assert(tf.logical_and(label >= 0, label < NUM_CLASSES),
                      ['image/class/label is not in 0 .. %d:' % (NUM_CLASSES - 1), label])
    with tf.control_dependencies([valid]):
        return features['image/encoded'], tf.identity(label)


def _random_crop(encoded, draws, image_size):
    """A part of the image, chosen by the draws [5] in [0, 1), scaled and perhaps mirrored."""
    height, width = _size(encoded)
    area = (_LEAST_AREA + (1. - _LEAST_AREA) * draws[0]) * height * width
    aspect = tf.exp((2. * draws[1] - 1.) * math.log(_MOST_ASPECT))
    # What sticks out of the image is cut off: the crop stays one, of another aspect.
    crop_height = tf.clip_by_value(tf.round(tf.sqrt(area / aspect)), 1., height)
    crop_width = tf.clip_by_value(tf.round(tf.sqrt(area * aspect)), 1., width)
    image = _cut_and_scaled(
        encoded, tf.floor(draws[2] * (height - crop_height + 1.)),
        tf.floor(draws[3] * (width - crop_width + 1.)), crop_height, crop_width, image_size)
    return tf.where(tf.fill(tf.shape(image), draws[4] < 0.5), image, image[:, ::-1])


def _central_crop(encoded, image_size):
    height, width = _size(encoded)
    crop_height = tf.maximum(tf.round(height * _CENTRAL_SHARE), 1.)
    crop_width = tf.maximum(tf.round(width * _CENTRAL_SHARE), 1.)
    return _cut_and_scaled(encoded, tf.floor((height - crop_height) / 2.),
                           tf.floor((width - crop_width) / 2.), crop_height, crop_width, image_size)


def _size(encoded):
    """Height and width of a JPEG, as floats; only its header is read."""
    shape = tf.cast(tf.image.extract_jpeg_shape(encoded), tf.float32)
    return shape[0], shape[1]


def _cut_and_scaled(encoded, top, left, height, width, image_size):
    """The part of a JPEG, float32 [image_size, image_size, 3] in -1..1."""
    window = tf.cast(tf.stack([top, left, height, width]), tf.int32)
    pixels = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
    # The op itself: TF 1's and TF 2's tf.image.resize differ in where pixel centres lie.
    scaled = tf.raw_ops.ResizeBilinear(images=pixels[tf.newaxis], size=[image_size, image_size],
                                       half_pixel_centers=True)[0]
    return tf.ensure_shape(scaled, [image_size, image_size, 3]) / np.float32(127.5) - 1.
