"""Which operations of a step write a variable, and whether all workers write the same there.

A step writes in two places: in the model, before the optimizer (its forward pass, `UPDATE_OPS`,
`updates`), where what is written may be this worker's own; and after the sums over the workers,
where the optimizer writes. What a worker has written in the model is not the same on all of them
until it was sent, unless that is proven.
"""

import tensorflow.compat.v1 as tf

from towers.cluster.state_from_worker_0 import counted
from towers.cluster.may_differ_across_workers import CommonValues
from towers.graph.graph_walk import step_operations
from towers.graph.variable_access import VARIABLE_OPS
from towers.graph.variable_writes import Writes
from towers.tower.objectives import tensors_of

ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers."""

_CHEAP = 1 << 14  # bytes: a message of so many takes as long as one of a number
_BY_ELEMENT = VARIABLE_OPS | frozenset([
    'Const', 'Identity', 'StopGradient', 'ReadVariableOp', 'Cast', 'Add', 'AddV2', 'AddN', 'Sub',
    'Mul', 'RealDiv', 'Div', 'DivNoNan', 'Minimum', 'Maximum', 'Neg', 'Abs', 'Square', 'Sqrt',
    'Assign', 'AssignAdd', 'AssignSub', 'AssignVariableOp', 'AssignAddVariableOp',
    'AssignSubVariableOp'])
"""Types of operations that give the same bits from the same bits, on any number of threads."""


class StepWrites:
    """The writes of one step.

    Attributes:
      finder: `Writes` of the graph.
      models: names of the operations of the model: those that the optimizer waits for.
      compared: names of variables that are not trained, and whose writes in the model are the same
        on all workers if the constants and operations are, which have to be compared.
    """

    def __init__(self, update, before, trained, same_batches, combined=(), gradients=()):
        """
        Args:
          update: the operation that updates the weights.
          before: list of the tensors and operations of the model that the optimizer waits for.
          trained: list of the variables that the update trains.
          same_batches: see `common_state.read_by_training`.
          combined: list of `(gradient, variable)`, the sums over the workers, the same on all.
          gradients: list of this worker's gradients: tensors.
        """
        graph = tf.get_default_graph()
        self.finder, self.compared = Writes(graph), set()
        self.models = {op.name for op in step_operations(before)}
        self._step = {op.name for op in step_operations([update])}
        self._ends = {tensor.op.name for tensor in tensors_of(combined)}
        self._trained = {variable.op.name for variable in trained}
        # All workers begin with the same values of these.
        self._begun_alike = self._trained | {variable.op.name for variable in tf.global_variables()}
        self._known = {variable.op.name: variable for variable in
                       list(trained) + tf.local_variables() + tf.global_variables()}
        self._same_batches, self._values = same_batches, CommonValues(graph)
        # What a worker without data runs, too: its updates it leaves out.
        self._of_gradients = {op.name for op in step_operations(gradients)}
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

    def is_own(self, variable):
        """Whether the model may give a variable another value than on another worker.

        What writes a trained variable is compared, so that it is the same on all where nothing else
        comes in. Other variables are mostly small: a message is the rule, see `is_by_weights`.
        """
        writes = self.of_model(variable)
        if variable.op.name in self._trained:
            return self.differ(writes)
        return bool(writes) and not (self._is_counter(variable) or self.is_by_weights(variable))

    def is_by_weights(self, variable):
        """Whether the model writes a large variable from nothing but itself and trained weights.

        Moving averages of the weights, for example: to send them would cost as much as to send the
        weights. The constants and operations of these writes have to be compared.
        """
        name, size = variable.op.name, variable.get_shape().num_elements() or 0
        if not self._same_batches or self.after_sum(variable) or name in self._trained or (
                name not in self._begun_alike
                or size * variable.dtype.base_dtype.size <= _CHEAP):
            return False
        stack = self.of_model(variable)
        seen = {op.name for op in stack} | {name}
        while stack:
            op = stack.pop()
            if op.type not in _BY_ELEMENT or op.type in VARIABLE_OPS and not self._is_weight(op):
                return False
            for tensor in op.inputs:
                if tensor.op.name not in seen:
                    seen.add(tensor.op.name)
                    stack.append(tensor.op)
        self.compared.add(name)
        return True

    def _is_weight(self, op):
        """Whether a variable is trained, or counts steps, and the update alone writes it."""
        variable = self._known.get(op.name)
        return op.name in self._begun_alike and not self.of_model(variable) and (
            op.name in self._trained or _is_counted(self.after_sum(variable), variable))

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
        stack, seen, compared = [write], {write.name}, set()
        while stack:
            op = stack.pop()
            more = [tensor.op for tensor in op.inputs]
            if op.type in VARIABLE_OPS:
                more = self._followed(op.name, shared, compared)
                if more is None:
                    return False
            elif op.name in self.models and self._values.brings_in(op):
                return False
            for other in more:
                if not (other.name in seen or other.name in self._ends
                        or other.type.startswith(ADDED_UP)):
                    seen.add(other.name)
                    stack.append(other)
        self.compared |= compared
        return True

    def _followed(self, name, shared, compared):
        """The writes on which the value of a variable depends; None if it may be a worker's own.

        Adds to the names `compared`, see there.
        """
        variable = self._known.get(name)
        if name in self.models and name not in self._begun_alike:
            return None
        if variable is None:
            return []
        found = [] if name in shared else self.of_model(variable)
        if not self._same_batches and any(op.name not in self._of_gradients for op in found):
            return None
        if name in self._trained:
            return found
        if found:
            compared.add(name)
        return found + self.after_sum(variable)

    def _is_counter(self, variable):
        """Whether the model adds a constant to a variable, in the same steps on all workers."""
        return self._same_batches and _is_counted(self.of_model(variable), variable)



def _is_counted(writes, variable):
    return all(counted(op, variable) is not None for op in writes)
