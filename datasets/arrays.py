"""Batches of a data set that fits in memory, in the order of `epochs`."""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.epochs import Epochs, epoch_order, plain_python
from datasets.errors import BadExampleError
from towers.errors import InvalidArgumentError

_PREFETCHED = 2  # batches: one for the step that comes next, one in the making


class ArraySet(typing.NamedTuple):
    """A data set that fits in memory.

    Fields:
      name: the name for `get_dataset`.
      num_classes: labels are 0 .. num_classes - 1.
      image_shape: (height, width, channels) as stored.
      num_examples: a dict from split ('train', 'test') to its number of images.
      load: `load(split)` gives `(images, labels)` as arrays, float32 [n, height, width, channels]
        with values in 0..1 and int64 [n].
    """
    name: str
    num_classes: int
    image_shape: typing.Tuple[int, int, int]
    num_examples: typing.Dict[str, int]
    load: typing.Callable[[str], typing.Tuple[np.ndarray, np.ndarray]]

    def train_batches(self, batch_size: int, seed: int, image_size: typing.Optional[int] = None,
                      channels: typing.Optional[int] = None, first_example: typing.Any = 0,
                      shift: int = 0, remainder: str = 'carry',
                      share: typing.Tuple[int, int] = (0, 1)) -> tf.data.Dataset:
        """Batches of the training images, for ever.

        Args:
          batch_size: examples a batch, over all towers together. May be larger than n.
          seed: see `epoch_order`.
          image_size: height and width in pixels; None keeps the images' own. Images are resized by
            bilinear interpolation with half-pixel centres.
          channels: the number of channels, to which gray images are repeated; None keeps the
            images' own number.
          first_example: the place in the stream at which to start: 0, or the number of examples
            that a stopped run has seen; an int, or a scalar integer tensor (then an initializable
            iterator is needed).
          shift: pixels by which images are moved at random, at most, before they are resized; see
            `shifts_of_epoch`. What moves in from outside is 0.
          remainder: the treatment of the last batch of an epoch, see `epochs`.
          share: `(w, W)`: the batches of worker w of W, see `Epochs.batches`.

        Returns:
          A `tf.data.Dataset` of `(images [batch_size, height, width, channels], labels
          [batch_size])` with static shapes.

        Raises:
          InvalidArgumentError: an argument makes no sense for these images.
          BadExampleError: a label is no class.
        """
        images, labels = self._checked('train')
        prepare = _preparation(images.shape, image_size, channels)
        height, width = images.shape[1:3]
        if shift and shift >= min(height, width):
            raise InvalidArgumentError(
                '--augment_shift=%d moves images of %d x %d pixels out of sight: give less' % (
                    shift, height, width))
        _, workers = share
        epochs = Epochs(len(images), batch_size * workers, remainder)
        with tf.device('/cpu:0'):
            order = epoch_order(len(images), seed)
            shifts = shifts_of_epoch(len(images), seed, shift)

            def order_and_shifts(epoch: tf.Tensor) -> tuple:
                """The order of an epoch, and the shift of each of its examples."""
                return order(epoch), shifts(epoch)
            if shift:
                batches = epochs.batches(order_and_shifts, first_example, share)
            else:
                batches = epochs.batches(order, first_example, share)
            return _examples(images, labels, batches, prepare, shift)

    def eval_batches(self, batch_size: int, image_size: typing.Optional[int] = None,
                     channels: typing.Optional[int] = None) -> tf.data.Dataset:
        """All test examples once, in order; the last batch is short if `batch_size` does not divide
        their number.

        Args:
          batch_size: examples in a batch.
          image_size: height and width to which images are scaled; None for their own.
          channels: the number of channels; None for the images' own number.
        """
        images, labels = self._checked('test')
        with tf.device('/cpu:0'):
            # If no batch is short, `drop_remainder` drops none, and makes the batch's shape static.
            is_even = len(images) % batch_size == 0
            indices = tf.data.Dataset.range(len(images)).batch(batch_size, drop_remainder=is_even)
            return _examples(images, labels, indices,
                             _preparation(images.shape, image_size, channels))

    def _checked(self, split: str) -> typing.Tuple[np.ndarray, np.ndarray]:
        """`(images, labels)` of a split; raises `BadExampleError` for a label that is no class."""
        images, labels = self.load(split)
        wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(wrong):
            others = '' if len(wrong) == 1 else ', and %d more have such labels' % (len(wrong) - 1)
            raise BadExampleError(
                'Example %d of the %s set of %s has the label %d, which is not in 0 .. %d%s: its '
                'files are damaged. Remove them, and fetch them again; --mode=check_data lists all '
                'such examples.' % (wrong[0], split, self.name, labels[wrong[0]],
                                    self.num_classes - 1, others))
        return images, labels


def shifts_of_epoch(num_examples: int, seed: int,
                    largest: int) -> typing.Callable[[tf.Tensor], tf.Tensor]:
    """The function from an epoch, an int64 scalar, to its shifts: int64 [n, 2], pixels down and to
    the right, in [-largest, largest].

        shift = stateless_uniform([n, 2], seed=[seed, -1 - e], 0 <= shift <= 2 * largest) - largest

    Args:
      num_examples: n.
      seed: the seed of `epoch_order`.
      largest: pixels.
    """
    def shifts(epoch: tf.Tensor) -> tf.Tensor:
        """The shifts of an epoch."""
        # `epoch_order` uses the seeds [seed, 0], [seed, 1], …. The shifts use [seed, -1],
        # [seed, -2], …, so that they do not repeat its random numbers.
        seed_pair = tf.stack([tf.constant(seed, tf.int64), -1 - epoch])
        draws = tf.random.stateless_uniform(
            [num_examples, 2], seed=seed_pair, minval=0, maxval=2 * largest + 1, dtype=tf.int64)
        return draws - largest
    return shifts


def _examples(images: np.ndarray, labels: np.ndarray, batches: tf.data.Dataset,
              prepare: typing.Callable, largest_shift: int = 0) -> tf.data.Dataset:
    """The batches of images and labels for batches of indices.

    Args:
      images, labels: the arrays.
      batches: `tf.data.Dataset` of indices [batch]; or of pairs of indices and shifts [batch, 2].
      prepare: function from a batch of images to a batch of the wanted size and channels.
      largest_shift: the largest shift in pixels.

    Returns:
      `tf.data.Dataset` of `(images, labels)`.
    """
    def rows(indices: np.ndarray) -> tuple:
        """The images and the labels of these indices, as arrays."""
        return images[indices], labels[indices]

    @plain_python
    def gather(indices: tf.Tensor, shifts: typing.Optional[tf.Tensor] = None) -> tuple:
        """The batch of these indices: prepared images, and labels. If the elements of `batches` are
        pairs, `tf.data` calls this function with the `shifts` as well."""
        # `numpy_function` keeps the arrays out of the graph, which a checkpoint's .meta file holds;
        # its results have no static shape.
        batch_images, batch_labels = tf.numpy_function(
            rows, [indices], [tf.as_dtype(images.dtype), tf.as_dtype(labels.dtype)])
        batch_images = tf.ensure_shape(
            batch_images, indices.shape.concatenate(images.shape[1:]))
        batch_labels = tf.ensure_shape(
            batch_labels, indices.shape.concatenate(labels.shape[1:]))
        if shifts is not None:
            batch_images = _shifted(batch_images, shifts, largest_shift)
        return prepare(batch_images), batch_labels

    batches = batches.map(gather, num_parallel_calls=tf.data.experimental.AUTOTUNE)
    return batches.prefetch(_PREFETCHED)


def _shifted(images: tf.Tensor, shifts: tf.Tensor, largest: int):
    """Moves images, and fills what is moved in with 0.

    Each image gets a margin of `largest` zeros, and the result is cut out of the padded image: with
    `largest` 2, the result for an image that moves down by 1 begins in row 2 - 1 of the padded
    image.

    Args:
      images: [batch, h, w, c].
      shifts: pixels down and to the right, [batch, 2].
      largest: the largest shift in pixels.
    """
    height, width = images.shape.as_list()[1:3]
    padded = tf.pad(images, [[0, 0], [largest, largest], [largest, largest], [0, 0]])
    first_rows = largest - shifts[:, :1]  # [batch, 1]
    first_columns = largest - shifts[:, 1:]
    rows = first_rows + tf.range(height, dtype=tf.int64)  # [batch, h]
    columns = first_columns + tf.range(width, dtype=tf.int64)
    moved_rows = tf.gather(padded, rows, axis=1, batch_dims=1)
    moved = tf.gather(moved_rows, columns, axis=2, batch_dims=1)
    return tf.ensure_shape(moved, images.shape)


def _preparation(shape: typing.Sequence[int], image_size: typing.Optional[int],
                 channels: typing.Optional[int]) -> typing.Callable[[tf.Tensor], tf.Tensor]:
    """A function that brings a batch of images to a size and a number of channels.

    Args:
      shape: the shape of the images, [n, h, w, c].
      image_size: height and width; None for the images' own.
      channels: the number of channels; None for the images' own number.
    """
    if channels is not None and shape[3] not in (1, channels):
        raise InvalidArgumentError(
            'Got channels=%d for images with %d channels. Only gray images (1 channel) can be '
            "repeated: choose another network, such as model='inception_v3', or leave channels "
            'out to keep them as they are.' % (channels, shape[3]))

    def prepare(images: tf.Tensor) -> tf.Tensor:
        """A batch of images, scaled; gray images with equal red, green and blue."""
        if image_size is not None and (image_size, image_size) != tuple(shape[1:3]):
            # The op itself: TF 1's and TF 2's tf.image.resize differ in where pixel centres lie.
            images = tf.raw_ops.ResizeBilinear(
                images=images, size=[image_size, image_size], half_pixel_centers=True)
        if channels is None or channels == shape[3]:
            return images
        return tf.tile(images, [1, 1, 1, channels])  # they are gray, as was checked above
    return prepare
