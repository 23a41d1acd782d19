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
      axis: the dimension of its examples, an int from 0 to the rank, without that.

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
        """The dimensions of the tensor with that of the examples as the first."""
        others = [axis for axis in range(self.tensor.shape.ndims) if axis != self.axis]
        return [self.axis] + others

    def by_example(self) -> tf.Tensor:
        """Makes the tensor with the examples along the first dimension."""
        return tf.transpose(self.tensor, self.order())

    def as_in_model(self, by_example: tf.Tensor) -> tf.Tensor:
        """Makes a tensor with the model's order of dimensions, from one by example."""
        order = self.order()
        inverse = [order.index(axis) for axis in range(len(order))]
        return tf.transpose(by_example, inverse)


class Entries(typing.NamedTuple):
    """Where the batch enters a finished model: three nests of one structure.

    Attributes:
      of_model: the tensors of the model that hold the batch.
      by_example: the same with the examples along the first dimension.
      batch: the batch itself with the examples along the first dimension, mostly the same tensors.
      axes: {name of a tensor of the model: its axis}, where that is not the first.
      fed: {name of a tensor of the model: the tensor of the batch that takes its place}, as given;
        of a dense one that takes its own place nothing.
    """
    of_model: typing.Any
    by_example: typing.Any
    batch: typing.Any
    axes: typing.Dict[str, BatchAxis]
    fed: typing.Dict[str, tf.Tensor]


def entries_of(inputs: typing.Any) -> Entries:
    """The `Entries` of the inputs of a build: a nest of tensors of the model, or a dict from these
    to the tensors of the batch that take their places. A `BatchAxis` makes a transposition."""
    if is_by_tensor(inputs):
        given = tuple(inputs.keys())
        batch = tuple(inputs.values())
    else:
        given = batch = inputs
    axes = _axes_in([given, batch])
    fed = _fed_elsewhere(inputs) if is_by_tensor(inputs) else {}
    if not axes:
        return Entries(given, given, batch, axes, fed)
    with tf.name_scope('batch_axis'), tf.device('/cpu:0'):
        turned = {name: leaf.by_example() for name, leaf in axes.items()}

    def by_example(leaf: typing.Any) -> typing.Any:
        return turned[leaf.tensor.name] if isinstance(leaf, BatchAxis) else leaf

    def of_model(leaf: typing.Any) -> typing.Any:
        return leaf.tensor if isinstance(leaf, BatchAxis) else leaf

    return Entries(
        of_model=tf.nest.map_structure(of_model, given),
        by_example=tf.nest.map_structure(by_example, given),
        batch=tf.nest.map_structure(by_example, batch), axes=axes, fed=fed)


def _fed_elsewhere(inputs: dict) -> typing.Dict[str, tf.Tensor]:
    """`Entries.fed` of a dict from tensors of the model to those of the batch."""
    fed = {}
    for of_model, of_batch in inputs.items():
        pair = []
        for leaf in (of_model, of_batch):
            pair.append(leaf.tensor if isinstance(leaf, BatchAxis) else leaf)
        if all(isinstance(leaf, tf.Tensor) for leaf in pair) and pair[0] is not pair[1]:
            fed[pair[0].name] = pair[1]
    return fed


def _axes_in(nest: typing.Any) -> typing.Dict[str, BatchAxis]:
    """The `BatchAxis` leaves of a nest by the names of their tensors; `InputError` for one of
    another graph."""
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
    """Whether inputs are a dict from tensors of the model to those that take their places."""
    if not isinstance(inputs, dict) or not inputs:
        return False
    return all(isinstance(key, (tf.Tensor, tf.SparseTensor, BatchAxis)) for key in inputs)


def checked_entries(entries: Entries, num_parts: int) -> Inputs:
    """The `Inputs` of the model, by example.

    Raises:
      InputError: a leaf that is no tensor; or the model is for a batch of a static size, which
        none of `num_parts` parts of the batch has.
    """
    of_model = checked_inputs(entries.by_example)
    for path, leaf in of_model.leaves:
        if leaf is not None and not isinstance(leaf, (tf.Tensor, tf.SparseTensor)):
            raise InputError(
                '%s is a %s: the inputs of a finished model are the tensors of its graph at which '
                'the batch enters, such as its placeholders.' % (path, type(leaf).__name__))
    size_of_batch = checked_inputs(entries.batch).size
    if of_model.size is None or num_parts == 1 or size_of_batch == num_parts * of_model.size:
        return of_model
    path = next(path for path, _ in of_model.leaves if path not in of_model.unknown)
    raise InputError(
        '%s has the static size %d, which may be in constants of the finished model, and a part of '
        'the batch has another one. %s' % (path, of_model.size, WAYS_OUT))
