"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 as `tf.keras.datasets` has them.

Keras fetches a set once and keeps it in its cache, `~/.keras/datasets` (of Keras 3: below
`KERAS_HOME`, if that is set). Without a network, the same files can be put there by hand.
"""

import collections
import os

import numpy as np

from datasets.errors import DatasetError
from towers import compat

KerasSet = collections.namedtuple('KerasSet', 'num_classes image_shape num_examples files')
"""A set: `files` are `(url, name in the cache)` pairs."""

_GOOGLE = 'https://storage.googleapis.com/tensorflow/tf-keras-datasets/'
_TORONTO = 'https://www.cs.toronto.edu/~kriz/'
_FASHION = ['%s-%s-ubyte.gz' % (split, part) for split in ('train', 't10k')
            for part in ('images-idx3', 'labels-idx1')]
SETS = {
    'mnist': KerasSet(10, (28, 28, 1), {'train': 60000, 'test': 10000},
                      [(_GOOGLE + 'mnist.npz', 'mnist.npz')]),
    'fashion_mnist': KerasSet(10, (28, 28, 1), {'train': 60000, 'test': 10000},
                              [(_GOOGLE + name, 'fashion-mnist/' + name) for name in _FASHION]),
    'cifar10': KerasSet(10, (32, 32, 3), {'train': 50000, 'test': 10000},
                        [(_TORONTO + 'cifar-10-python.tar.gz', 'cifar-10-batches-py.tar.gz')]),
    'cifar100': KerasSet(100, (32, 32, 3), {'train': 50000, 'test': 10000},
                         [(_TORONTO + 'cifar-100-python.tar.gz', 'cifar-100-python.tar.gz')])}


def load_keras_set(name, split):
    """One split of a set: `(images, labels)`.

    Args:
      name: one of `SETS`.
      split: 'train' or 'test'.

    Returns:
      float32 [n, height, width, channels] in 0..1; int64 [n].

    Raises:
      DatasetError: the set is not in the cache and cannot be fetched, or is damaged; says what to
        fetch and where to put it.
    """
    from tensorflow import keras  # pylint: disable=import-outside-toplevel
    try:
        parts = dict(zip(('train', 'test'), getattr(keras.datasets, name).load_data()))
    except Exception as error:  # of the network, the archive, the pickle or the zip file
        raise DatasetError(
            'Cannot load %s: %s. Without a network, fetch %s into %s as %s; a file there that is '
            'damaged has to be removed.' % (
                name, ' '.join(str(error).split())[:200].rstrip('.') or type(error).__name__,
                ', '.join(url for url, _ in SETS[name].files), cache_folder(),
                ', '.join(path for _, path in SETS[name].files))) from None
    images, labels = parts[split]
    if images.ndim == 3:
        images = images[..., np.newaxis]
    expected = SETS[name]
    if images.shape != (expected.num_examples[split],) + expected.image_shape:
        raise DatasetError('The %s images of %s have the shape %s, expected %s: remove its files '
                           'from %s, and fetch it again.' % (
                               split, name, list(images.shape),
                               [expected.num_examples[split]] + list(expected.image_shape),
                               cache_folder()))
    return images.astype(np.float32) / np.float32(255), labels.reshape(-1).astype(np.int64)


def cache_folder():
    """Where Keras mostly keeps data sets."""
    from tensorflow import keras  # pylint: disable=import-outside-toplevel
    home = os.path.join(os.path.expanduser('~'), '.keras')
    if compat.is_keras_3_package(keras):  # Keras 2 does not know the variable
        home = os.environ.get('KERAS_HOME') or home
    return os.path.join(home, 'datasets')
