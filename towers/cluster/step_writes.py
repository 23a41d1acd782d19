"""Which operations of a step write a variable, and whether all workers write the same there.

A step writes in two places: in the model, before the optimizer (its forward pass, `UPDATE_OPS`,
`updates`), where what is written may come from this worker's own batch; and after the sums over the
workers, where the optimizer writes. What a worker has written in the model is not the same on all
of them until it was sent.
"""

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import is_random, step_operations
from towers.graph.variable_access import VARIABLE_OPS
from towers.graph.variable_writes import Writes

ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers."""


class StepWrites:
    """The writes of one step.

    Attributes:
      finder: `Writes` of the graph.
      models: names of the operations of the model: those that the optimizer waits for.
    """

    def __init__(self, update, before, trained, same_batches):
        """
        Args:
          update: the operation that updates the weights.
          before: list of the tensors and operations of the model that the optimizer waits for.
          trained: list of the variables that the update trains.
          same_batches: see `common_state.read_by_training`.
        """
        self.finder = Writes(tf.get_default_graph())
        self.models = {op.name for op in step_operations(before)}
        self._step = {op.name for op in step_operations([update])}
        self._trained = {variable.op.name for variable in trained}
        self._known = {variable.op.name: variable for variable in
                       list(trained) + tf.local_variables() + tf.global_variables()}
        self._same_batches = same_batches
        self._writes = {}

    def of(self, variable):
        """The operations of the step that write a variable: a list."""
        name = variable.op.name
        if name not in self._writes:
            self._writes[name] = [op for op in self.finder.to(variable) if op.name in self._step]
        return self._writes[name]

    def of_model(self, variable):
        """Those of the model."""
        return [op for op in self.of(variable) if op.name in self.models]

    def after_sum(self, variable):
        """Those after the sums over the workers."""
        return [op for op in self.of(variable) if op.name not in self.models]

    def differ(self, writes, shared=()):
        """Whether writes may give a variable other values on other workers.

        They do not where the value is computed from sums over the workers, from constants, and from
        variables of which the same holds. What else comes in beside the model, such as a learning
        rate that is fed, counts as the same.

        Args:
          writes: list of operations.
          shared: names of the variables of which all workers have what worker 0's model has
            written, when these operations run.
        """
        return not all(self._is_common(write, shared) for write in writes)

    def _is_common(self, write, shared):
        stack, seen = [write], {write.name}
        while stack:
            op = stack.pop()
            more = [tensor.op for tensor in op.inputs]
            if op.type in VARIABLE_OPS:
                more = self._followed(op.name, shared)
                if not self._same_batches and any(each.name in self.models for each in more):
                    return False
            elif op.name in self.models and _is_source(op):
                return False
            for other in more:
                if other.name not in seen and not other.type.startswith(ADDED_UP):
                    seen.add(other.name)
                    stack.append(other)
        return True

    def _followed(self, name, shared):
        """The writes on which the value of a variable depends."""
        variable = self._known.get(name)
        if variable is None:
            return []
        found = [] if name in shared else self.of_model(variable)
        return found + ([] if name in self._trained else self.after_sum(variable))


def _is_source(op):
    """Whether an operation of the model brings in what differs from worker to worker.

    The towers' shards are placeholders with defaults.
    """
    return op.type == 'PlaceholderWithDefault' or is_random(op) or (
        not op.inputs and op.type != 'Const')
