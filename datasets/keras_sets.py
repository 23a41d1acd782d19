"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 as `tf.keras.datasets` has them.

Keras fetches a set once and keeps it in its cache, `~/.keras/datasets` (of Keras 3: below
`KERAS_HOME`, if that is set). Where there is no network, the same files can be put there by hand;
their names differ between versions of Keras, so that the error takes the place from Keras itself.
"""

import collections
import gzip
import os
import zlib

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
    before = _cached()
    try:
        parts = dict(zip(('train', 'test'), getattr(keras.datasets, name).load_data()))
    except Exception as error:  # of the network, the archive, the pickle or the zip file
        why = ' '.join(str(error).split())[:200].rstrip('.') or type(error).__name__
        place = compat.place_of_download(error)
        removed = sorted(before - _cached())
        raise DatasetError('Cannot load %s: %s' % (
            name, (_damaged(name, error, why) if place is None else None)
            or '%s%s. Without a network, fetch %s and put %s.' % (
                '%s had another checksum than the file that Keras knows, which removed it to fetch '
                'it again; ' % ', '.join(removed) if removed else '',
                why, ', '.join(url for url, _ in SETS[name].files), _where_to(name, place))
            )) from None
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


def _cached():
    """Paths of what is in the cache's own folder, where all files with checksums are: a set."""
    folder = cache_folder()
    return ({os.path.join(folder, name) for name in os.listdir(folder)}
            if os.path.isdir(folder) else set())


def _damaged(name, error, why):
    """The end of the error about a file that is in the cache and damaged; None if none is.

    Keras compares most files with a checksum, and fetches them again; not those of Fashion-MNIST,
    and not what it has unpacked.

    Args:
      name: one of `SETS`.
      error: what `load_data` raised after all files were there.
      why: its text.
    """
    for url, file in SETS[name].files:
        path = os.path.join(cache_folder(), file)
        try:
            if path.endswith('.gz') and os.path.isfile(path):
                with gzip.open(path) as packed:
                    while packed.read(2 ** 20):
                        pass
        except (OSError, EOFError, zlib.error):
            return ('%s is damaged: %s. Remove it, and start again, which fetches it; without a '
                    'network, put the file of %s there.' % (path, why, url))
    return None if isinstance(error, OSError) else (  # which may be one of the network
        '%s. Remove its files from %s, and start again, which fetches them.' % (
            why, cache_folder()))


def _where_to(name, place):
    """Where the files of a set have to be put, as text.

    Args:
      name: one of `SETS`.
      place: path at which Keras looked for one of them; or None.
    """
    files = SETS[name].files
    if place is None:
        return '%s into %s as %s' % ('it' if len(files) == 1 else 'them', cache_folder(),
                                     ', '.join(path for _, path in files))
    if len(files) == 1:
        return 'it at %s, under this name' % place
    return 'them into %s' % os.path.dirname(place)


def cache_folder():
    """Where Keras mostly keeps data sets."""
    from tensorflow import keras  # pylint: disable=import-outside-toplevel
    home = os.path.join(os.path.expanduser('~'), '.keras')
    if compat.is_keras_3_package(keras):  # Keras 2 does not know the variable
        home = os.environ.get('KERAS_HOME') or home
    return os.path.join(home, 'datasets')
