"""What stands in tower k for each thing that tower 0 reads from outside of its graph:

    shard 0, and its weight    ->  shard k, and its weight
    a variable                 ->  the tower's replica, or the tower's own state, or itself
    anything else              ->  itself: tables, queues, iterators, placeholders are shared
"""

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph.variable_access import read_from, variable_op


class Substitution:
    """The substitution of one tower."""

    def __init__(self, number, tensors, variables):
        """
        Args:
          number: k, of the tower (or of its micro-batch among those of all towers), from 1.
          tensors: {name of a tensor: the tensor of tower k}.
          variables: {name of a variable: the variable of tower k}.
        """
        self.number = number
        self._tensors, self._variables = tensors, variables
        # Each of these tensors is the only one of its operation.
        self._operations = {name.split(':')[0]: tensor.op for name, tensor in tensors.items()}
        self._operations.update((name, variable.op) for name, variable in variables.items())

    def operation(self, op):
        """The operation that tower k waits for, or is colocated with, in place of one of tower 0.
        """
        return self._operations.get(op.name, op)

    def tensor(self, tensor):
        """The tensor that tower k reads in place of one from outside of tower 0.

        Raises:
          SharedVariableError: the tensor was computed from a variable of tower 0 alone.
        """
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
