"""Where the batch enters a finished model.

Its tests are `tests/api/test_finished_models.py` and `tests/capture/test_finished_model.py`.
"""

import dataclasses
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_instance
from towers.errors import InputError
from towers.shards.batch_inputs import Inputs, checked_inputs

WAYS_OUT = (
    'Build the model for any batch size (placeholders [None, …], tf.shape(x)[0] for the size); or '
    'for the size of a part, and pass {x: batch} as inputs, a tensor of all parts for each x.')


@dataclasses.dataclass(frozen=True, eq=False)
class BatchAxis:
    """A tensor of a finished model whose examples are along another dimension than the first.

    In `build_towers(model.loss, (BatchAxis(model.words, 1), model.labels), …)` the placeholder
    `model.words` [time, examples] is fed as before. The batch is cut along that dimension, and each
    tower gets its part in the same order of dimensions.

    Attributes:
      tensor: a dense tensor of known rank, where the batch enters the model.
      axis: the dimension of its examples, an int from 0 to the rank - 1.

    Raises:
      InputError: a tensor that has no such dimension.
      InvalidArgumentError: `tensor` is no dense tensor.
    """
    tensor: tf.Tensor
    axis: int

    def __post_init__(self) -> None:
        check_instance('tensor', self.tensor, tf.Tensor, 'a dense tensor of a finished model')
        rank = self.tensor.shape.ndims
        has_axis = type(self.axis) is int and rank is not None and 0 <= self.axis < rank
        if not has_axis:
            raise InputError(
                'BatchAxis(%s, %.80r): the tensor has the shape %s, and expected is the number of '
                'one of its dimensions, from 0 on.' % (
                    self.tensor.name, self.axis, self.tensor.shape))

    def order(self) -> typing.List[int]:
        """The numbers of the tensor's dimensions, the examples' dimension first."""
        others = [axis for axis in range(self.tensor.shape.ndims) if axis != self.axis]
        return [self.axis] + others

    def by_example(self) -> tf.Tensor:
        """Makes the tensor with the examples along the first dimension."""
        return tf.transpose(self.tensor, self.order())

    def as_in_model(self, by_example: tf.Tensor) -> tf.Tensor:
        """Makes a tensor with the model's order of dimensions, from a tensor with the examples
        along the first dimension."""
        order = self.order()
        # For each dimension of the model's tensor, its number in `by_example`.
        places = list(map(order.index, range(len(order))))
        return tf.transpose(by_example, places)


class Entries(typing.NamedTuple):
    """Where the batch enters a finished model, and the batch: three nests of one structure.

    For the inputs `{BatchAxis(words, 1): batch}` the three nests are `words` [time, examples]; the
    transpose of `words` [examples, time]; and `batch`, whose parts the towers take in the place of
    that transpose.

    Attributes:
      of_model: the tensors of the model that hold the batch.
      by_example: the same tensors, transposed so that the examples are along the first dimension.
      batch: the batch itself with the examples along the first dimension. These are the tensors of
        `by_example`, unless the build was given a dict from tensors of the model to others.
      axes: {name of a tensor: its `BatchAxis`}, for the tensors that the build was given with one.
      fed: {name of a dense tensor of the model: the tensor of the batch that takes its place}, as
        the build was given them; without a tensor that takes its own place, as with `{x: x}`.
    """
    of_model: typing.Any
    by_example: typing.Any
    batch: typing.Any
    axes: typing.Dict[str, BatchAxis]
    fed: typing.Dict[str, tf.Tensor]


def entries_of(inputs: typing.Any) -> Entries:
    """Finds where the batch enters a finished model.

    Args:
      inputs: the inputs of the build: a nest of tensors of the model, or a dict from tensors of the
        model to the tensors of the batch that take their places. A leaf may be a `BatchAxis`, which
        is transposed here.

    Raises:
      InputError: a `BatchAxis` of another graph.
    """
    # Two nests; any leaf may be a `BatchAxis`.
    of_model = inputs
    batch = inputs
    fed: typing.Dict[str, tf.Tensor] = {}
    if is_by_tensor(inputs):  # {x: batch}
        of_model = tuple(inputs.keys())
        batch = tuple(inputs.values())
        fed = _tensors_fed(inputs)
    axes = _axes_in([of_model, batch])
    if not axes:
        return Entries(of_model=of_model, by_example=of_model, batch=batch, axes=axes, fed=fed)
    with tf.name_scope('batch_axis'), tf.device('/cpu:0'):
        transposed = {name: leaf.by_example() for name, leaf in axes.items()}

    def by_example(leaf: typing.Any) -> typing.Any:
        """The transposed tensor of a `BatchAxis`; any other leaf as it is."""
        if isinstance(leaf, BatchAxis):
            return transposed[leaf.tensor.name]
        return leaf

    return Entries(
        of_model=tf.nest.map_structure(_tensor_of, of_model),
        by_example=tf.nest.map_structure(by_example, of_model),
        batch=tf.nest.map_structure(by_example, batch), axes=axes, fed=fed)


def _tensor_of(leaf: typing.Any) -> typing.Any:
    """The tensor of a `BatchAxis`; any other leaf as it is."""
    if isinstance(leaf, BatchAxis):
        return leaf.tensor
    return leaf


def _tensors_fed(inputs: dict) -> typing.Dict[str, tf.Tensor]:
    """{name of a dense tensor of the model: the tensor of the batch that takes its place}, of a
    dict from tensors of the model to tensors of the batch."""
    fed = {}
    for key, value in inputs.items():
        of_model = _tensor_of(key)
        of_batch = _tensor_of(value)
        are_dense = isinstance(of_model, tf.Tensor) and isinstance(of_batch, tf.Tensor)
        keeps_its_place = of_model is of_batch  # {x: x}
        if are_dense and not keeps_its_place:
            fed[of_model.name] = of_batch
    return fed


def _axes_in(nest: typing.Any) -> typing.Dict[str, BatchAxis]:
    """{name of a tensor: its `BatchAxis`} of the leaves of a nest; raises `InputError` for a tensor
    of another graph."""
    axes = {}
    for leaf in tf.nest.flatten(nest):
        if not isinstance(leaf, BatchAxis):
            continue
        if leaf.tensor.graph is not tf.get_default_graph():
            raise InputError('%s of a BatchAxis is of another graph than the default one.'
                             % leaf.tensor.name)
        axes[leaf.tensor.name] = leaf
    return axes


def is_by_tensor(inputs: typing.Any) -> bool:
    """Whether inputs are a dict from tensors of the model to the tensors that take their places,
    and not a dict by names."""
    if not isinstance(inputs, dict) or not inputs:
        return False
    return all(isinstance(key, (tf.Tensor, tf.SparseTensor, BatchAxis)) for key in inputs)


def checked_entries(entries: Entries, num_parts: int) -> Inputs:
    """The inputs of the model as leaves with their paths, the examples along the first dimension.

    Args:
      entries: where the batch enters the model.
      num_parts: how many parts the batch has.

    Raises:
      InputError: a leaf that is no tensor; or the model is for a batch of a static size, and a part
        of the batch has another size.
    """
    inputs = checked_inputs(entries.by_example)
    for path, leaf in inputs.leaves:
        if leaf is not None and not isinstance(leaf, (tf.Tensor, tf.SparseTensor)):
            raise InputError(
                '%s is a %s: the inputs of a finished model are the tensors of its graph at which '
                'the batch enters, such as its placeholders.' % (path, type(leaf).__name__))
    model_size = inputs.size
    batch_size = checked_inputs(entries.batch).size
    if model_size is None or num_parts == 1:
        return inputs  # the model takes a part of any size; or the one part is the batch
    if batch_size == num_parts * model_size:
        return inputs  # the model was built for the size of a part
    # `inputs.unknown` has the paths of the inputs whose number of examples is not static.
    paths_of_static_size = [path for path, _ in inputs.leaves if path not in inputs.unknown]
    raise InputError(
        '%s has the static size %d, which may be in constants of the finished model, and a part of '
        'the batch has another one. %s' % (paths_of_static_size[0], model_size, WAYS_OUT))
