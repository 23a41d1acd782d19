"""A model function of the user's own, `--model=module:function`; see docs/own_model.md."""

import os
import re
import sys
import typing

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from datasets.errors import OwnModelError
from datasets.own import calling, own_function, takes
from towers.errors import is_of_input, reason_of
from towers.model.outputs import to_model_output
from trainer.flags import FLAGS

# TensorFlow's errors of a step that computes what the model does not allow.
_OF_STEPS = (tf.errors.InvalidArgumentError, tf.errors.UnknownError, tf.errors.NotFoundError,
             tf.errors.InternalError, tf.errors.UnimplementedError)


def is_own_model() -> bool:
    """Whether --model names a function of the user's own."""
    return ':' in FLAGS.model


class OwnModel:
    """The user's model function with what train.py takes of a model; see `Classifier`. Of data that
    are no images, `image_format` is empty."""

    regularization = 'none'  # the loss is what the function returns
    unit = 'example'

    def __init__(self, name, dataset, image_size=None):
        """The function `module:function` for a data set; an `image_size` of None is that of its
        images."""
        self._name, self._dataset = name, dataset
        self._function = own_function(name, 'model', OwnModelError,
                                      'reviews:model for the function model of reviews.py')
        if not takes(self._function, None, None, 'train'):
            raise towers.InvalidArgumentError(
                '--model=%s cannot be called with three arguments: expected a function of '
                "(features, labels, mode), where mode is 'train', 'eval' or 'infer'." % name)
        self.image_format = {}
        if dataset.num_classes is not None:
            height, width, channels = dataset.image_shape
            self.image_format = {'channels': channels or 3, 'image_size': image_size or (
                height if height == width else None)}
            if self.image_format['image_size'] is None and ':' not in FLAGS.dataset:
                raise towers.InvalidArgumentError(
                    'The images of this data set have no one size: give --image_size=224, or '
                    'another that --model=%s takes.' % name)
        elif image_size:
            raise towers.InvalidArgumentError(
                '--image_size is of no use with --dataset=%s, which says no num_classes, so '
                'that its examples are no images.' % FLAGS.dataset)

    def model_fn(self, mode: str) -> typing.Callable:
        """The model function of a mode, which is called with a shard: features, and labels where
        there are any."""
        def model_fn(features, labels=None):
            if mode != 'infer':
                return self._called(features, labels, mode)
            output = to_model_output(self._called(features, None, mode), needs_loss=False)
            if output.predictions is None:
                raise towers.ModelFunctionError(
                    "--model=%s returned no predictions for the mode 'infer': expected a dict of "
                    "tensors [batch, …], as in {'predictions': {'class': classes}}." % self._name)
            told = {} if labels is None else {'label': labels}
            return towers.ModelOutput(predictions=[told, output.predictions])
        return model_fn

    def serving(self) -> typing.Tuple[dict, dict]:
        """Builds the model for a SavedModel: `(inputs, outputs)`, dicts of tensors by the names
        of features and predictions."""
        with tf.Graph().as_default():  # whose constants do not belong into the SavedModel
            structure = tf.data.experimental.get_structure(self._dataset.eval_batches(
                batch_size=FLAGS.batch_size if FLAGS.batch_size != 'auto' else 1,
                **self.image_format))
        features = tf.nest.map_structure(
            _placeholder, structure[0] if type(structure) is tuple else structure)
        _, predictions = self.model_fn('infer')(features).predictions
        return dict(named(features, 'features')), dict(named(predictions, 'predictions'))

    def _called(self, features, labels, mode):
        what = 'the model function' + ', without labels for the mode %r,' % mode * (mode == 'infer')
        with calling(self._name, what, 'model', OwnModelError):
            return self._function(features, labels, mode)


def _placeholder(spec):
    """A placeholder for batches of any number of examples."""
    if isinstance(spec, tf.TensorSpec):
        return tf.placeholder(spec.dtype, [None] + spec.shape.as_list()[1:] if (
            spec.shape.ndims) else None)
    return tf.sparse_placeholder(spec.dtype, [None] + spec.shape.as_list()[1:])


def named(nest, name, inside=''):
    """The leaves of a nest as a list of pairs of a name, keys with dots, and a leaf; `name` is that
    of a leaf that has no key."""
    if isinstance(nest, (tuple, list)) and not hasattr(nest, 'dense_shape'):
        nest = getattr(nest, '_asdict', lambda: {str(at): each for at, each in enumerate(nest)})()
    if not isinstance(nest, dict):
        return [(inside or name, nest)]
    return [pair for key, each in nest.items()
            for pair in named(each, name, '%s.%s' % (inside, key) if inside else str(key))]


def rows(values):
    """The values of a batch of predictions by example: a list."""
    if hasattr(values, 'dense_shape'):
        dense = np.zeros(values.dense_shape, values.values.dtype)
        dense[tuple(values.indices.T)] = values.values
        values = dense
    return list(values)


def step_failure(error: tf.errors.OpError) -> typing.Optional[Exception]:
    """The `OwnModelError` of a step that failed with a `tf.errors.OpError`; None where the model is
    not the reason."""
    if not is_own_model() or is_of_input(error) or not isinstance(error, _OF_STEPS):
        return None
    failure = OwnModelError('--model=%s: a step failed%s: %s' % (
        FLAGS.model, _where(getattr(error, 'op', None)), reason_of(error)))
    failure.__cause__ = error
    return failure


def _where(op):
    """' at reviews.py:12', the line of the user's module that made an operation; '' of no other."""
    if op is None:
        return ''
    first = re.sub(r'^(eval_)?tower_\d+(_micro_\d+)?/', '', op.name)  # a later tower's is a copy
    if any(each.name == first for each in op.graph.get_operations()):
        op = op.graph.get_operation_by_name(first)
    path = sys.modules[FLAGS.model.partition(':')[0]].__file__
    lines = [frame[1] for frame in op.traceback if frame[0] == path]
    return ' at %s:%d' % (os.path.basename(path), lines[-1]) if lines else ''
