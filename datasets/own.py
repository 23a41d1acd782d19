"""A data set of the user's own: `--dataset=module:function`.

    def flowers(data_dir):                       # flowers.py, in the folder of the run or installed
        return {'num_classes': 5, 'num_examples': {'train': 3320, 'test': 350},
                'train_batches': train_batches, 'eval_batches': eval_batches}

`train_batches(batch_size, seed, image_size, channels, first_example)` returns a `tf.data.Dataset`
that does not end, of `(images, labels)`; `eval_batches(batch_size, image_size, channels)` one that
does. `first_example` is a scalar int64 tensor: how many examples a run that resumes has seen. A
pipeline that does not go by it resumes with other examples than it would have had. With `--cluster`
worker w of W takes every Wth batch, from the wth on: all make them all, so that a pipeline has to
give each machine the same.
"""

import importlib
import os
import sys

import tensorflow.compat.v1 as tf

from datasets.epochs import checked_share
from towers import compat
from towers.errors import InvalidArgumentError

_FIELDS = ('num_classes', 'num_examples', 'train_batches', 'eval_batches')


class Own:
    """What a user's function returned, as a data set.

    Attributes: as those of `ImageSet`.
    """

    image_shape = (None, None, None)

    def __init__(self, name, fields):
        self.name = name
        self.num_classes, self.num_examples = fields['num_classes'], dict(fields['num_examples'])
        self._train, self._eval = fields['train_batches'], fields['eval_batches']

    def train_batches(self, batch_size, seed, image_size, channels=3, first_example=0, shift=0,
                      remainder='carry', share=(0, 1)):
        """The user's batches; of several workers, every Wth of them.

        Raises:
          InvalidArgumentError: what was returned is no such data set; `shift` or `remainder`,
            which are the user's function's own matter.
        """
        if shift or remainder != 'carry':
            raise InvalidArgumentError(
                '--augment_shift and --remainder are for data sets of this program: %s makes its '
                'batches itself.' % self.name)
        with tf.device('/cpu:0'):
            worker, count = checked_share(share)
            batches = self._checked('train_batches', self._train(
                batch_size=batch_size, seed=seed, image_size=image_size, channels=channels,
                first_example=tf.cast(first_example, tf.int64)))
            return batches if count == 1 else batches.shard(count, worker)

    def eval_batches(self, batch_size, image_size, channels=3):
        """The user's test batches; raises as `train_batches`."""
        with tf.device('/cpu:0'):
            return self._checked('eval_batches', self._eval(
                batch_size=batch_size, image_size=image_size, channels=channels))

    def _checked(self, what, dataset):
        if not isinstance(dataset, compat.DATASET_TYPES):
            raise InvalidArgumentError('%s of %s returned a %s: expected a tf.data.Dataset.' % (
                what, self.name, type(dataset).__name__))
        shapes = tf.data.get_output_shapes(dataset)
        if not isinstance(shapes, tuple) or len(shapes) != 2 or shapes[0].ndims not in (4, None):
            raise InvalidArgumentError(
                '%s of %s gives elements of the shapes %s: expected (images [batch, height, width, '
                'channels], labels [batch]).' % (what, self.name, shapes))
        types = tf.data.get_output_types(dataset)
        if not types[0].is_floating or types[1] != tf.int64:
            raise InvalidArgumentError(
                '%s of %s gives elements of the types %s and %s: expected float32 images and int64 '
                'labels.' % (what, self.name, types[0].name, types[1].name))
        return dataset


def own_set(name, data_dir=None):
    """The data set that `module:function` stands for.

    Raises:
      InvalidArgumentError: there is no such module or function, or it returned something else.
    """
    module_name, _, function_name = name.partition(':')
    added = os.getcwd() not in sys.path
    if added:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidArgumentError('Cannot import the module of --dataset=%s: %s. It has to be in '
                                   'the working directory, or installed.' % (name, error)) from None
    finally:
        if added:
            sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidArgumentError('The module %s has no function %r, which --dataset=%s names.' % (
            module_name, function_name, name))
    fields = function(data_dir)
    if hasattr(fields, 'train_batches'):
        return fields
    missing = [field for field in _FIELDS if not isinstance(fields, dict) or field not in fields]
    if missing:
        raise InvalidArgumentError('%s returned %.80r: expected a dict with %s; %s %s missing.' % (
            name, fields, ', '.join(_FIELDS), ', '.join(missing),
            'is' if len(missing) == 1 else 'are'))
    return Own(name, fields)
