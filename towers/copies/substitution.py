"""What a copy reads in the place of tower 0's inputs from outside of its graph.

Its test is `tests/copies/test_copy.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph.edit import producer_name
from towers.graph.variable_access import read_from, variable_op


class Substitution:
    """The substitute in tower k of each input that tower 0 reads from outside of its graph:

        shard 0, and its weight    ->  shard k, and its weight
        a variable                 ->  the tower's replica, or the tower's own state, or itself
        anything else              ->  itself: tables, queues, iterators, placeholders are shared
    """

    def __init__(self, number: int, tensors: typing.Dict[str, tf.Tensor],
                 variables: typing.Dict[str, tf.Variable]):
        """
        Args:
          number: k, the index of the part of the batch among the parts of all towers.
          tensors: {name of a tensor: its substitute}.
          variables: {name of a variable: its substitute}.
        """
        self.number = number
        self._tensors = tensors
        self._variables = variables
        # {name of an operation from outside: its substitute}, for copies that wait for it or are
        # colocated with it.
        self._operations = {}
        for name, tensor in tensors.items():
            self._operations[producer_name(name)] = tensor.op
        for name, variable in variables.items():
            self._operations[name] = variable.op

    def operation(self, op: tf.Operation) -> tf.Operation:
        """The operation that tower k waits for, or is colocated with, in place of tower 0's."""
        return self._operations.get(op.name, op)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that tower k reads in the place of a tensor from outside of tower 0.

        Raises:
          SharedVariableError: the tensor was computed, outside of the model function, from a
            variable of which each tower has its own.
        """
        if tensor.name in self._tensors:
            return self._tensors[tensor.name]
        # Names of the variables whose values are in the tensor, and that have a substitute.
        replaced_names = [op.name for op in read_from(tensor) if op.name in self._variables]
        if not replaced_names:
            return tensor
        substitute = self._variables[replaced_names[0]]
        is_handle_or_reference = variable_op(tensor) is not None  # of one variable, not its value
        if is_handle_or_reference:
            return substitute.op.outputs[0]
        # The tensor may hold more than the value of one variable: the concatenated values of
        # several variables, or one value beside other numbers. Then the shape of the tensor is not
        # the variable's.
        has_shape_of_variable = tensor.shape.is_compatible_with(substitute.shape)
        is_value_of_variable = len(replaced_names) == 1 and has_shape_of_variable
        if is_value_of_variable:
            with tf.device(substitute.device):
                return substitute.value()
        raise SharedVariableError(
            'variable %s is of each tower, and %s, made from it outside of the model function, is '
            'of the first: read the variable within the model function.' % (
                replaced_names[0], tensor.name))
