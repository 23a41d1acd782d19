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
from towers.graph.graph_walk import operation_named
from towers.model.outputs import to_model_output
from trainer.flags import FLAGS

# TensorFlow's errors of a step in which an operation of the model fails.
_OF_STEPS = (tf.errors.InvalidArgumentError, tf.errors.UnknownError, tf.errors.NotFoundError,
             tf.errors.InternalError, tf.errors.UnimplementedError)


def is_own_model() -> bool:
    """Whether --model names a function of the user's own."""
    return ':' in FLAGS.model


class OwnModel:
    """The user's model function, with the interface of `Classifier`.

    Attributes:
      image_format: `channels` and `image_size`, keyword arguments for the batches of a data set of
        images; {} where examples are no images.
      regularization: 'none': the loss is what the function returns.
      unit: the name of an example.
    """

    regularization = 'none'
    unit = 'example'

    def __init__(self, name: str, dataset: typing.Any, image_size: typing.Optional[int] = None):
        """
        Args:
          name: `module:function`.
          dataset: the data set whose examples the function gets.
          image_size: height and width in pixels; None for the size of the data set's images.

        Raises:
          InvalidArgumentError: there is no such function; or an `image_size` is missing, or has no
            effect.
          OwnModelError: the module raised an error.
        """
        self._name = name
        self._dataset = dataset
        self._function = own_function(
            name, 'model', OwnModelError,
            example='reviews:model for the function model of reviews.py')
        if not takes(self._function, None, None, 'train'):
            raise towers.InvalidArgumentError(
                '--model=%s cannot be called with three arguments: expected a function of '
                "(features, labels, mode), where mode is 'train', 'eval' or 'infer'." % name)
        self.image_format: typing.Dict[str, int] = {}
        has_images = dataset.num_classes is not None  # only such data sets say `num_classes`
        if has_images:
            self.image_format = self._format_of_images(image_size)
        elif image_size:
            raise towers.InvalidArgumentError(
                '--image_size is of no use with --dataset=%s, which says no num_classes, so '
                'that its examples are no images.' % FLAGS.dataset)

    def _format_of_images(self, image_size: typing.Optional[int]) -> dict:
        """The `image_format` for a data set of images; `image_size` is the argument of `OwnModel`.

        With a data set of the user's own `image_size` may stay None: the function of the data set
        then chooses the size of the images.
        """
        # A side is None if the images differ in it, or if it may have any length.
        height, width, channels = self._dataset.image_shape
        if image_size is None and height == width:
            image_size = height  # None if both are None
        is_own_dataset = ':' in FLAGS.dataset  # module:function
        if image_size is None and not is_own_dataset:
            raise towers.InvalidArgumentError(
                'The images of this data set have no one size: give --image_size=224, or '
                'another that --model=%s takes.' % self._name)
        if channels is None:
            channels = 3  # image files are read with 3 channels
        return {'channels': channels, 'image_size': image_size}

    def model_fn(self, mode: str) -> typing.Callable:
        """The model function of a mode: a function of the features and labels of a shard; without
        labels where the data set has none. For 'infer' see `_labels_and_predictions`."""
        def model_fn(features: typing.Any, labels: typing.Any = None) -> typing.Any:
            """Calls the user's function for a shard, in this mode."""
            if mode == 'infer':
                return self._labels_and_predictions(features, labels)
            return self._called(features, labels, mode)
        return model_fn

    def _labels_and_predictions(self, features: typing.Any,
                                labels: typing.Any) -> towers.ModelOutput:
        """The output for the mode 'infer': as predictions the list `[labels, predictions]`.

        The user's function gets no labels in this mode, as in TensorFlow's Estimators. The labels
        go past the function to the table of --predictions, which has a column for them if there are
        labels.

        Args:
          features: the shard's features.
          labels: the shard's labels; None if the data set has none.

        Raises:
          ModelFunctionError: the function returned no predictions.
        """
        output = to_model_output(self._called(features, None, 'infer'), needs_loss=False)
        if output.predictions is None:
            raise towers.ModelFunctionError(
                "--model=%s returned no predictions for the mode 'infer': expected a dict of "
                "tensors [batch, …], as in {'predictions': {'class': classes}}." % self._name)
        labels_by_name = {}
        if labels is not None:
            labels_by_name['label'] = labels
        return towers.ModelOutput(predictions=[labels_by_name, output.predictions])

    def serving(self) -> typing.Tuple[dict, dict]:
        """Builds the model for a SavedModel.

        Returns:
          `(inputs, outputs)`: {name of a feature: tensor}, {name of a prediction: tensor}.
        """
        # Only types and shapes are taken from the batches, so that any size will do.
        batch_size = 1 if FLAGS.batch_size == 'auto' else FLAGS.batch_size
        with tf.Graph().as_default():  # keeps the constants of the data set out of the SavedModel
            batches = self._dataset.eval_batches(batch_size=batch_size, **self.image_format)
            spec_of_batch = tf.data.experimental.get_structure(batches)
        has_labels = type(spec_of_batch) is tuple  # (features, labels); a namedtuple is features
        spec_of_features = spec_of_batch[0] if has_labels else spec_of_batch
        features = tf.nest.map_structure(_placeholder, spec_of_features)
        output = self._labels_and_predictions(features, labels=None)
        _, predictions = output.predictions
        return dict(named(features, 'features')), dict(named(predictions, 'predictions'))

    def _called(self, features: typing.Any, labels: typing.Any, mode: str) -> typing.Any:
        """Calls the user's function for a shard; returns its output.

        Args:
          features: the shard's features.
          labels: the shard's labels; None if there are none, and for the mode 'infer'.
          mode: 'train', 'eval' or 'infer'.

        Raises:
          OwnModelError: the function raised an error.
        """
        what = 'the model function'
        if mode == 'infer':
            what += ', without labels for the mode %r,' % mode
        with calling(self._name, what, 'model', OwnModelError):
            return self._function(features, labels, mode)


def _placeholder(spec: typing.Any) -> typing.Any:
    """A placeholder for batches of any number of examples: the first dimension is left open.

    Where a tensor is a scalar, or of unknown rank, there is no such dimension; any shape may then
    be fed.

    Args:
      spec: the `TensorSpec` or `SparseTensorSpec` of a batch.
    """
    shape = None  # any
    has_dimensions = bool(spec.shape.ndims)  # `ndims` is None where the rank is unknown
    if has_dimensions:
        shape = [None] + spec.shape.as_list()[1:]
    if isinstance(spec, tf.TensorSpec):
        return tf.placeholder(spec.dtype, shape)
    return tf.sparse_placeholder(spec.dtype, shape)


def named(nest: typing.Any, name: str, inside: str = '') -> typing.List[tuple]:
    """The leaves of a nest with names: the keys that lead to a leaf, joined by dots.

        {'boxes': {'x': a, 'y': b}, 'class': c}    [('boxes.x', a), ('boxes.y', b), ('class', c)]
        a                                          [(name, a)]

    Args:
      nest: a nest of dicts, tuples and lists.
      name: the name for a nest that is a leaf itself, and so has no key.
      inside: the keys that lead to this nest, joined by dots; '' for none.

    Returns:
      List of `(name, leaf)`.
    """
    items = _items(nest)
    if items is None:
        return [(inside or name, nest)]
    pairs = []
    for key, value in items.items():
        path = '%s.%s' % (inside, key) if inside else str(key)
        pairs += named(value, name, path)
    return pairs


def _items(nest: typing.Any) -> typing.Optional[dict]:
    """The members of a nest by key, field or index; None for a leaf."""
    if isinstance(nest, dict):
        return nest
    is_sparse = hasattr(nest, 'dense_shape')  # a `SparseTensorValue` is a namedtuple, and a leaf
    if is_sparse or not isinstance(nest, (tuple, list)):
        return None
    if hasattr(nest, '_asdict'):  # a namedtuple
        return nest._asdict()
    return {str(index): member for index, member in enumerate(nest)}


def rows(values: typing.Any) -> list:
    """A batch of predictions as a list with an entry for each example.

    Args:
      values: array [batch, …]; or a `SparseTensorValue` of that shape, which becomes dense.

    Returns:
      List of `batch` arrays.
    """
    if hasattr(values, 'dense_shape'):  # a `SparseTensorValue`
        dense = np.zeros(values.dense_shape, values.values.dtype)
        # `indices` has a row for each value; numpy takes an array for each dimension.
        dense[tuple(values.indices.T)] = values.values
        values = dense
    return list(values)


def step_failure(error: tf.errors.OpError) -> typing.Optional[Exception]:
    """The error for a step that failed in a model of the user's own.

    Args:
      error: the error that the step raised.

    Returns:
      An `OwnModelError` with the line of the user's module; None if the model is not the reason.
    """
    if not is_own_model():
        return None
    if is_of_input(error) or not isinstance(error, _OF_STEPS):  # of the pipeline or machine
        return None
    failed_op = getattr(error, 'op', None)  # TensorFlow may not name it
    place = _place_in_own_module(failed_op)
    failure = OwnModelError('--model=%s: a step failed%s: %s' % (
        FLAGS.model, place, reason_of(error)))
    failure.__cause__ = error  # for `show_cause`
    return failure


def _place_in_own_module(op: typing.Optional[tf.Operation]) -> str:
    """The text about the line of the user's module that made an operation, ' at reviews.py:12'; ''
    if no line did, or the operation is not known."""
    if op is None:
        return ''
    # An operation of another tower is a copy, made by this program. Its original in tower 0, which
    # has the same name without the copy's scope, was made by a line of the user's: 'Mul' for
    # 'tower_1/Mul', for 'tower_1_micro_3/Mul', and in an evaluation beside a training for
    # 'build_2/tower_1/Mul'.
    name_in_tower_0 = re.sub(r'^(build_\d+/)?tower_\d+(_micro_\d+)?/', '', op.name)
    op = operation_named(op.graph, name_in_tower_0) or op
    module = FLAGS.model.partition(':')[0]
    path = sys.modules[module].__file__
    if path is None:  # a module without a file
        return ''
    # A frame is (path, line, …), the innermost one last. An operation that was imported, and has no
    # original, has no frames.
    lines = [frame[1] for frame in op.traceback or () if frame[0] == path]
    if not lines:
        return ''
    return ' at %s:%d' % (os.path.basename(path), lines[-1])
