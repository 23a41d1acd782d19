"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 as `tf.keras.datasets` has them.

Keras fetches a set once and keeps it in `~/.keras/datasets` (of Keras 3: below `KERAS_HOME`).

Its test is tests/datasets/test_sets.py.
"""

import functools
import typing

import numpy as np

from datasets.arrays import ArraySet
from datasets.errors import DatasetError

_GOOGLE = 'https://storage.googleapis.com/tensorflow/tf-keras-datasets/'
_TORONTO = 'https://www.cs.toronto.edu/~kriz/'
_NUM_TEST = 10000


class _Source(typing.NamedTuple):
    """What a set is like, and where its files come from."""
    num_classes: int
    image_shape: typing.Tuple[int, int, int]
    num_train: int  # of images
    url: str
    path: str  # in Keras' cache


_SETS = {
    'mnist': _Source(10, (28, 28, 1), 60000, _GOOGLE + 'mnist.npz', 'mnist.npz'),
    'fashion_mnist': _Source(
        10, (28, 28, 1), 60000, _GOOGLE + '{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz',
        'fashion-mnist/'),
    'cifar10': _Source(10, (32, 32, 3), 50000, _TORONTO + 'cifar-10-python.tar.gz',
                       'cifar-10-batches-py.tar.gz'),
    'cifar100': _Source(100, (32, 32, 3), 50000, _TORONTO + 'cifar-100-python.tar.gz',
                        'cifar-100-python.tar.gz')}
NAMES = sorted(_SETS)


def keras_set(name: str) -> ArraySet:
    """The data set of a name of `NAMES`."""
    source = _SETS[name]
    num_examples = {'train': source.num_train, 'test': _NUM_TEST}
    return ArraySet(name, source.num_classes, source.image_shape, num_examples,
                    functools.partial(load_keras_set, name))


def load_keras_set(name: str, split: str) -> typing.Tuple[np.ndarray, np.ndarray]:
    """`(images, labels)` of a split: float32 [n, height, width, channels] in 0..1; int64 [n].

    Raises:
      DatasetError: the set is not in the cache and cannot be fetched, or is damaged; says what to
        fetch and where to put it.
    """
    from tensorflow import keras  # pylint: disable=import-outside-toplevel
    source = _SETS[name]
    try:
        train, test = getattr(keras.datasets, name).load_data()
    except Exception as error:  # of the network, the archive, the pickle or the zip file
        text = ' '.join(str(error).split())[:200].rstrip('.') or type(error).__name__
        raise DatasetError('Cannot load %s: %s. Without a network, fetch %s to %s in '
                           '~/.keras/datasets; a file there that is damaged has to be removed.' % (
                               name, text, source.url, source.path)) from None
    images, labels = train if split == 'train' else test
    images = images.reshape(images.shape[:3] + (-1,))  # gray: without channels
    return images.astype(np.float32) / np.float32(255), labels.reshape(-1).astype(np.int64)
