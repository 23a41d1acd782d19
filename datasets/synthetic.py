"""Images made of random numbers, to measure by: one batch over and over.

Nothing is read or decoded; a step cuts the batch among the towers and copies it as any other batch.

Its test is tests/datasets/test_sets.py.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

NUM_EXAMPLES = {'train': 100000, 'test': 1000}


class Synthetic:
    """Images of any size, as many classes as are wanted.

    Attributes:
      name: 'synthetic'.
      image_shape: height, width and channels, None each: the images have any size.
      num_examples: dict from 'train' and 'test' to numbers of examples.
      num_classes: the number of classes.
    """

    name = 'synthetic'
    image_shape = (None, None, None)
    num_examples = NUM_EXAMPLES

    def __init__(self, num_classes: int = 1000):
        self.num_classes = num_classes

    def train_batches(self, batch_size: int, seed: int, image_size: int, channels: int = 3,
                      first_example: typing.Any = 0, shift: int = 0, remainder: str = 'carry',
                      share: typing.Tuple[int, int] = (0, 1)) -> tf.data.Dataset:
        """One batch, over and over: float32 in -1..1 and int64, of static shapes.

        Worker w of a `share` has a batch of its own, made with the seed `seed` + w.
        """
        del first_example, shift, remainder
        worker, _ = share
        return self._batch(batch_size, seed + worker, image_size, channels).repeat()

    def eval_batches(self, batch_size: int, image_size: int, channels: int = 3) -> tf.data.Dataset:
        """One batch, repeated until it gives the number of test images, or a few more.

        Args:
          batch_size: examples in a batch.
          image_size, channels: height and width, and the number of channels, of the images.
        """
        count = -(-NUM_EXAMPLES['test'] // batch_size)
        return self._batch(batch_size, 0, image_size, channels).repeat(count)

    def _batch(self, size: int, seed: int, image_size: int, channels: int) -> tf.data.Dataset:
        """A data set of one batch.

        Args:
          size: the number of examples in the batch.
          seed: the seed of images and labels.
          image_size, channels: height and width, and the number of channels, of the images.
        """
        with tf.device('/cpu:0'):
            images = tf.random.stateless_uniform([size, image_size, image_size, channels],
                                                 [seed, 1], minval=-1., maxval=1.)
            labels = np.random.RandomState(seed % 2 ** 32).randint(self.num_classes, size=size)
            return tf.data.Dataset.from_tensors((images, tf.constant(labels, tf.int64)))
