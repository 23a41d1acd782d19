"""One tower, the model on one device; the towers of a build; substitutes of a tower's inputs."""

import collections

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph.variable_access import read_from, variable_op
from towers.placement.tower_device import stages_of
from towers.tower.objectives import all_pairs


class Tower(collections.namedtuple('Tower', [
        'index', 'device', 'name_scope', 'inputs', 'size', 'loss', 'predictions', 'metrics',
        'gradients', 'of_shard', 'updates', 'variables', 'data_loss', 'micro_batch', 'forward',
        'backward'])):
    """The model on one device.

    Attributes:
      index: the tower's number, from 0.
      device: the device of its operations and of its gradient operations.
      name_scope: the scope of its operations, such as `'tower_1/'`; of tower 0 it is the scope
        that `build_towers` was called in, `''` mostly.
      inputs: its shard: a nest of `placeholder_with_default`s, which can be fed by hand.
      size: examples in the shard: an int, or an int32 scalar.
      loss: scalar, as the model function returned it: the mean over the shard. In a build with
        several losses it is a dict of scalars by name; `data_loss` and `gradients` are dicts, too.
      predictions: as the model function returned them; [shard, …].
      metrics: as the model function returned them.
      gradients: list of `(gradient, variable)`: this tower's share of the combined gradient, which
        is the plain sum of all towers' shares. The tower's weight is in its share already.
      of_shard: lists of the gradients of tensors of the shard behind which trained variables are,
        shaped as the losses are, see `VariablesBehindInputs`.
      updates: operations of this tower for batch-norm statistics and the like.
      variables: the model's variables that its operations read, directly or as a replica.
      data_loss: scalar, the loss that is differentiated: with the registered losses that
        `regularization='add'` adds.
      micro_batch: the number of this micro-batch in its tower, from 0; 0 where there is only one.
      forward: frozenset of the names of the operations of its forward pass.
      backward: frozenset of the names of the operations of its backward pass.
    """
    __slots__ = ()

    @property
    def pairs(self) -> list:
        """The `(gradient, variable)` pairs of all losses, one after the other."""
        return all_pairs(self.gradients)

    def has(self, name: str) -> bool:
        """Whether the operation of this name belongs to the tower."""
        return name in self.forward or name in self.backward

    def __repr__(self):
        return '<Tower %d%s on %s>' % (
            self.index, ', micro-batch %d' % self.micro_batch if self.micro_batch else '',
            '+'.join(stages_of(self.device)))


class TowerSet(collections.namedtuple('TowerSet', [
        'request', 'batch', 'towers', 'recorded', 'losses', 'gradients', 'roles', 'recomputed',
        'how_built', 'cuts', 'slots', 'copies'], defaults=(None, (), ()))):
    """The towers of a build, one for each of the request's parts, and what they were made of: the
    `Request` and the `CutBatch`; the `Recorded` call, the `Losses` and a list of `Recomputed` of
    tower 0; `TowerGradients`, `Roles`.

    `how_built` is the plan's line about calls and copies, `cuts` are `StageCuts` or None, `slots`
    a list of the variables that the model function's own optimizers have made, `copies` a list of
    the functions from a tensor of tower 0 to its copy in each further tower.
    """
    __slots__ = ()


class Substitution:
    """The substitute in tower k of each input that tower 0 reads from outside of its graph:

        shard 0, and its weight    ->  shard k, and its weight
        a variable                 ->  the tower's replica, or the tower's own state, or itself
        anything else              ->  itself: tables, queues, iterators, placeholders are shared
    """

    def __init__(self, number: int, tensors: dict, variables: dict):
        """`number` is k, of the tower, or of its micro-batch among those of all towers. `tensors`
        and `variables` are dicts from names to their substitutes."""
        self.number, self._tensors, self._variables = number, tensors, variables
        self._operations = {name.split(':')[0]: tensor.op for name, tensor in tensors.items()}
        self._operations.update((name, variable.op) for name, variable in variables.items())

    def operation(self, op: tf.Operation) -> tf.Operation:
        """The operation that tower k waits for, or is colocated with, in place of tower 0's."""
        return self._operations.get(op.name, op)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that tower k reads in place of a tensor from outside of tower 0."""
        if tensor.name in self._tensors:
            return self._tensors[tensor.name]
        sources = [op.name for op in read_from(tensor) if op.name in self._variables]
        if not sources:
            return tensor
        other = self._variables[sources[0]]
        if variable_op(tensor) is not None:
            return other.op.outputs[0]
        if len(sources) == 1 and tensor.shape.is_compatible_with(other.shape):
            with tf.device(other.device):
                return other.value()
        raise SharedVariableError(
            'variable %s is of each tower, and %s, made from it outside of the model function, is '
            'of the first: read the variable within the model function.' % (
                sources[0], tensor.name))
