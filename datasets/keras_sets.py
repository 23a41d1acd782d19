"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 as `tf.keras.datasets` has them.

Keras fetches a set once and keeps it in `~/.keras/datasets` (of Keras 3: below `KERAS_HOME`).
"""

import functools

import numpy as np

from datasets.arrays import ArraySet
from datasets.errors import DatasetError

_GOOGLE = 'https://storage.googleapis.com/tensorflow/tf-keras-datasets/'
_TORONTO = 'https://www.cs.toronto.edu/~kriz/'
# Classes, shape of an image, numbers of them, and where the files come from and go to.
_SETS = {
    'mnist': (10, (28, 28, 1), 60000, _GOOGLE + 'mnist.npz', 'mnist.npz'),
    'fashion_mnist': (10, (28, 28, 1), 60000, _GOOGLE + '{train,t10k}-{images-idx3,labels-idx1}'
                      '-ubyte.gz', 'fashion-mnist/'),
    'cifar10': (10, (32, 32, 3), 50000, _TORONTO + 'cifar-10-python.tar.gz',
                'cifar-10-batches-py.tar.gz'),
    'cifar100': (100, (32, 32, 3), 50000, _TORONTO + 'cifar-100-python.tar.gz',
                 'cifar-100-python.tar.gz')}
NAMES = sorted(_SETS)


def keras_set(name):
    """The `ArraySet` of a name of `NAMES`."""
    num_classes, image_shape, count, _, _ = _SETS[name]
    return ArraySet(name, num_classes, image_shape, {'train': count, 'test': 10000},
                    functools.partial(load_keras_set, name))


def load_keras_set(name, split):
    """`(images, labels)` of a split: float32 [n, height, width, channels] in 0..1; int64 [n].

    Raises:
      DatasetError: the set is not in the cache and cannot be fetched, or is damaged; says what to
        fetch and where to put it.
    """
    from tensorflow import keras  # pylint: disable=import-outside-toplevel
    _, _, _, url, path = _SETS[name]
    try:
        parts = dict(zip(('train', 'test'), getattr(keras.datasets, name).load_data()))
    except Exception as error:  # of the network, the archive, the pickle or the zip file
        text = ' '.join(str(error).split())[:200].rstrip('.') or type(error).__name__
        raise DatasetError('Cannot load %s: %s. Without a network, fetch %s to %s in '
                           '~/.keras/datasets; a file there that is damaged has to be removed.' % (
                               name, text, url, path)) from None
    images, labels = parts[split]
    images = images.reshape(images.shape[:3] + (-1,))  # gray ones have no channels
    return images.astype(np.float32) / np.float32(255), labels.reshape(-1).astype(np.int64)
