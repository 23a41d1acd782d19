"""What a tower reads in the place of what tower 0 reads from outside of its graph."""

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph.variable_access import read_from, variable_op


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
