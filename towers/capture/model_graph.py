"""The program's graph around a finished model: what depends on the batch, and what the model needs.

The model ends at two kinds of operations. At an input of the build a shard takes the place of the
batch. An operation that keeps state, or is fed, is shared by all towers: variables, placeholders,
tables, queues, iterators. All that the model needs up to there is imported.

Its test is `tests/capture/test_finished_model.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.graph_walk import names_of, operation_names, operation_of
from towers.graph.import_again import defining_operations
from towers.graph.op_types import PLACEHOLDERS, VARIABLE_OPS, keeps_state


class ModelGraph:
    """The program's graph around a finished model, as it is before the build.

    Attributes:
      graph: the `tf.Graph`.
      inputs: list of the tensors of the model at which the batch enters.
      operations: list of all operations that the program has made, in order.
      from_inputs: names of the operations that depend on the inputs, by data or by control edges.
    """

    def __init__(self, inputs: typing.List[tf.Tensor]):
        """`inputs` are the tensors of the default graph at which the batch enters."""
        self.graph = tf.get_default_graph()
        self.inputs = inputs
        self.operations = self.graph.get_operations()
        self._input_names = names_of(inputs)
        self._input_operations = operation_names(inputs)
        self.from_inputs = self.reachable_from_inputs(self.operations)

    def reachable_from_inputs(self, operations: typing.Iterable[tf.Operation],
                              control: bool = True) -> typing.Set[str]:
        """Set of the names of those operations that depend on the inputs, by data and, unless
        `control` is False, by control edges."""
        sources = list(map(operation_of, self.inputs))
        return graph_walk.reachable_from(sources, operations, control=control)

    def inputs_upstream(self, tensor: tf.Tensor) -> typing.Set[str]:
        """Set of the names of the inputs' operations from which an input itself is computed."""
        return graph_walk.ancestors(tensor.op.inputs) & self._input_operations

    def is_shared(self, op: tf.Operation) -> bool:
        """Whether an operation keeps state, or is fed, so that all towers share it."""
        if op.type == 'PlaceholderWithDefault':
            # Its default may be computed from the batch: then each tower has another default.
            return op.name not in self.from_inputs
        return op.type in PLACEHOLDERS or keeps_state(op)

    def needed(self, fetches: typing.Iterable,
               is_end: typing.Optional[typing.Callable] = None
               ) -> typing.Dict[str, tf.Operation]:
        """Finds all that tensors and operations need, up to the inputs and to what is shared.

        Args:
          fetches: the tensors and operations.
          is_end: function of an operation: whether the search stops there; None for `is_shared`.

        Returns:
          {name: operation}, with the operations at which the search has stopped; without the
          operations of the inputs.
        """
        if is_end is None:
            is_end = self.is_shared
        seen_contexts: typing.Set[str] = set()  # names of loops and branches

        def needed_directly(op: tf.Operation) -> typing.List[tf.Operation]:
            """What an operation takes and waits for, and what defines the loops around it."""
            if is_end(op):
                return []
            return self._inputs_of(op) + _operations_around(op, seen_contexts)

        fetches_beside_inputs = graph_walk.without_names(fetches, self._input_names)
        return graph_walk.reached(map(operation_of, fetches_beside_inputs), needed_directly)

    def _inputs_of(self, op: tf.Operation) -> typing.List[tf.Operation]:
        """List of the operations that an operation takes tensors from, or waits for, without the
        operations that give the inputs of the model: a shard takes their place."""
        tensors = graph_walk.without_names(op.inputs, self._input_names)
        awaited = graph_walk.without_names(op.control_inputs, self._input_operations)
        return list(map(operation_of, tensors)) + awaited

    def variables_needed(self, fetches: typing.Iterable) -> typing.Set[str]:
        """Set of the names of the variables that tensors and operations need."""
        return {name for name, op in self.needed(fetches).items() if op.type in VARIABLE_OPS}


def _operations_around(op: tf.Operation,
                       seen_contexts: typing.Set[str]) -> typing.List[tf.Operation]:
    """List of the operations that define the loops and branches (v1) around an operation, such as
    their conditions: what is in a loop is imported with the whole loop.

    Args:
      op: the operation.
      seen_contexts: names of the loops and branches whose operations were listed before, and are
        not listed again. This function adds the names of those that it lists.
    """
    operations = []
    for context in compat.contexts_around(op):
        if context.name not in seen_contexts:
            seen_contexts.add(context.name)
            operations += defining_operations(context)
    return operations
