"""Batches of a data set that fits in memory, in an order that can be taken up anywhere.

The order of training is one endless stream of examples: epoch 0 in an order of its own, then epoch
1 in another, and so on. The order of epoch e is

    keys  = stateless_uniform([n], seed=[seed, e], 0 <= key < 2^62)      (Philox 4x32-10)
    order = the indices of `keys`, largest first; of equal keys the lower index first

and depends on nothing but n, the seed and e. (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3". `shuffle(seed).repeat()` depends on ids of graph ops, hence on the rest of the program
and on TensorFlow's version.) Example i of the stream is therefore the same image whatever the batch
size and the number of towers, in every version of TensorFlow, and in a run that starts at example i
because the one before it was stopped there.
"""

import numbers

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.epochs import of_workers, plain_python
from towers.errors import InvalidArgumentError

_KEY_RANGE = 2 ** 62  # a power of two: the modulo in stateless_uniform favours no key
_MOST_CONSTANT_BYTES = 2 ** 24  # of images in the graph; more stay outside of it
_PREFETCHED = 2  # batches: one for the step that comes next, one in the making
_INT64_MAX = 2 ** 63 - 1


def epoch_order(num_examples, seed):
    """The function from an epoch, an int64 scalar, to its order: int64 [n], see above.

    Args:
      num_examples: n, at least 1.
      seed: an int, -2^63 <= seed < 2^63. Two seeds share no epoch's order, except by chance.

    Raises:
      InvalidArgumentError: an argument out of its range.
    """
    _check_int('num_examples', num_examples, 1)
    _check_int('seed', seed, -2 ** 63)

    def order(epoch):
        keys = tf.random.stateless_uniform(
            [num_examples], seed=tf.stack([tf.constant(seed, tf.int64), epoch]), minval=0,
            maxval=_KEY_RANGE, dtype=tf.int64)
        return tf.cast(tf.math.top_k(keys, k=num_examples).indices, tf.int64)
    return order


def epoch_shifts(num_examples, seed, largest):
    """The function from an epoch, an int64 scalar, to its shifts: int64 [n, 2], pixels down and to
    the right, in [-largest, largest].

        shift = stateless_uniform([n, 2], seed=[seed, -1 - e], 0 <= shift <= 2 * largest) - largest
    """
    def shifts(epoch):
        # Epochs of the order are counted up from 0: no seed pair serves both.
        return tf.random.stateless_uniform(
            [num_examples, 2], seed=tf.stack([tf.constant(seed, tf.int64), -1 - epoch]), minval=0,
            maxval=2 * largest + 1, dtype=tf.int64) - largest
    return shifts


def train_batches(images, labels, batch_size, seed, image_size=None, channels=None,
                  first_example=0, shift=0, remainder='carry', share=(0, 1)):
    """Batches for ever, in the order of `epoch_order`.

    Batch k holds the stream's elements first_example + k * batch_size and the batch_size - 1 after
    it. A batch may hold the end of one epoch and the start of the next: that way every batch is
    full, and every example is seen once an epoch, none dropped. `remainder` says otherwise.

    Arrays of up to 16 MB become constants of the graph, hence of every checkpoint's meta graph
    (0.4 MB for the digits, twice that with a one-shot iterator). Larger ones stay in the process.

    Args:
      images: array [n, h, w, c], any numeric type.
      labels: array [n, ...].
      batch_size: examples a batch, over all towers together. May be larger than n.
      seed: see `epoch_order`.
      image_size: None to keep h x w, or (height, width), or one int for both, in pixels. Resized
        by bilinear interpolation with half-pixel centres; the images become float32.
      channels: None to keep c, or a count that gray images (c = 1) are repeated to.
      first_example: where in the stream to start: 0, or how many examples a stopped run has seen;
        an int, or a scalar integer tensor (then the dataset needs an initializable iterator).
      shift: pixels by which images are moved at random, at most, before they are resized; see
        `epoch_shifts`. What moves in from outside is 0.
      remainder: what becomes of the last batch of an epoch, see `epochs`; the place in the stream
        is then that of `Epochs`.
      share: `(w, W)`: the batches of worker w of W, see `epochs.dealt`; not with 'weight'.

    Returns:
      A `tf.data.Dataset` of `(images [batch_size, height, width, channels], labels [batch_size,
      ...])` with static shapes, but for the batch with remainder='weight'; types as given (images
      float32 when resized).

    Raises:
      InvalidArgumentError: an argument makes no sense.
    """
    images, labels = _check_arrays(images, labels)
    _check_int('batch_size', batch_size, 1)
    _check_int('shift', shift, 0)
    if shift and shift >= min(images.shape[1:3]):
        raise InvalidArgumentError(
            '--augment_shift=%d moves images of %d x %d pixels out of sight: give less' % (
                (shift,) + images.shape[1:3]))
    prepare = _image_preparation(images.shape, image_size, channels)
    with tf.device('/cpu:0'):
        if not tf.is_tensor(first_example):
            _check_int('first_example', first_example, 0)
        order, shifts = epoch_order(len(images), seed), epoch_shifts(len(images), seed, shift)
        of_epoch = (lambda epoch: (order(epoch), shifts(epoch))) if shift else order
        batches = of_workers(len(images), batch_size, remainder, share).batches(
            of_epoch, first_example)
        return _examples(images, labels, batches, prepare, shift)


def eval_batches(images, labels, batch_size, image_size=None, channels=None):
    """All examples once, in order. The last batch is short when batch_size does not divide n.

    Args and raised errors: as for `train_batches`.

    Returns:
      A `tf.data.Dataset` of `(images, labels)` as `train_batches` gives. The first dimension is
      static only when batch_size divides n.
    """
    images, labels = _check_arrays(images, labels)
    _check_int('batch_size', batch_size, 1)
    prepare = _image_preparation(images.shape, image_size, channels)
    with tf.device('/cpu:0'):
        # Where nothing is short there is nothing to drop, and the shape becomes static.
        indices = tf.data.Dataset.range(len(images)).batch(
            batch_size, drop_remainder=len(images) % batch_size == 0)
        return _examples(images, labels, indices, prepare)


def _examples(images, labels, batches, prepare, largest_shift=0):
    """From batches of indices, or of (indices, shifts), to batches of (images, labels)."""
    if images.nbytes <= _MOST_CONSTANT_BYTES:
        all_images, all_labels = tf.constant(images), tf.constant(labels)

        def rows(indices):
            return tf.gather(all_images, indices), tf.gather(all_labels, indices)
    else:
        def rows(indices):
            found = tf.numpy_function(lambda wanted: (images[wanted], labels[wanted]), [indices],
                                      [tf.as_dtype(images.dtype), tf.as_dtype(labels.dtype)])
            return [tf.ensure_shape(part, indices.shape.concatenate(array.shape[1:]))
                    for part, array in zip(found, (images, labels))]

    @plain_python
    def gather(indices, shifts=None):
        batch, its_labels = rows(indices)
        if shifts is not None:
            batch = _shifted(batch, shifts, largest_shift)
        return prepare(batch), its_labels

    batches = batches.map(gather, num_parallel_calls=tf.data.experimental.AUTOTUNE)
    return batches.prefetch(_PREFETCHED)


def _shifted(images, shifts, largest):
    """Images [batch, h, w, c] moved by [batch, 2] pixels down and to the right, 0 moving in."""
    height, width = images.shape.as_list()[1:3]
    padded = tf.pad(images, [[0, 0], [largest, largest], [largest, largest], [0, 0]])
    rows = largest - shifts[:, :1] + tf.range(height, dtype=tf.int64)
    columns = largest - shifts[:, 1:] + tf.range(width, dtype=tf.int64)
    padded = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.ensure_shape(tf.gather(padded, columns, axis=2, batch_dims=1), images.shape)


def _image_preparation(shape, image_size, channels):
    """The function that brings a batch of images of `shape` [n, h, w, c] to size and channels."""
    if image_size is not None:
        size = image_size
        if not isinstance(size, (tuple, list)):
            size = (size, size)
        if len(size) != 2:
            raise InvalidArgumentError(
                'Got image_size=%r, expected one int or (height, width), in pixels.'
                % (image_size,))
        for pixels in size:
            _check_int('image_size', pixels, 1)
        resize = tuple(size) != tuple(shape[1:3])
    else:
        resize = False
    if channels is not None:
        _check_int('channels', channels, 1)
        if shape[3] not in (1, channels):
            raise InvalidArgumentError(
                'Got channels=%d for images with %d channels. Only gray images (1 channel) can be '
                "repeated: choose another network, such as model='inception_v3', or leave channels "
                'out to keep them as they are.' % (channels, shape[3]))
    repeats = 1 if channels is None else channels // shape[3]

    def prepare(images):
        if resize:
            # The op itself: TF 1's and TF 2's tf.image.resize differ in where pixel centres lie.
            images = tf.raw_ops.ResizeBilinear(images=images, size=size, half_pixel_centers=True)
        if repeats > 1:
            images = tf.tile(images, [1, 1, 1, repeats])
        return images
    return prepare


def _check_arrays(images, labels):
    """Both as arrays, once they hold the same number of examples, and at least one."""
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim != 4:
        raise InvalidArgumentError(
            'Got images of shape %s, expected [n, height, width, channels]. Add the channel '
            'dimension of gray images with images[..., np.newaxis].' % (list(images.shape),))
    if labels.ndim < 1 or len(images) != len(labels):
        raise InvalidArgumentError(
            'Got %d images and labels of shape %s, expected one label an image.'
            % (len(images), list(labels.shape)))
    if not len(images):
        raise InvalidArgumentError('Got no images; expected at least one.')
    return images, labels


def _check_int(name, value, least):
    """Raises InvalidArgumentError unless `value` is an int in [least, 2^63)."""
    if (not isinstance(value, numbers.Integral) or isinstance(value, bool)
            or not least <= value <= _INT64_MAX):
        raise InvalidArgumentError(
            'Got %s=%r, expected a whole number of at least %d.' % (name, value, least))
