"""State that the update reads and that each worker would write from its own batch.

A learning rate that falls with the loss, a running size that `transform_gradients` divides by: on
one machine the first tower writes it, and the one update reads it. In a ring each worker makes the
update itself, so that in each step all have to read one value. Worker 0's goes to the others

    right after its write, and what the update reads waits for that.

What has to be read before the write, since the new value is computed from it, gets what worker 0
had written in the step before. A reference variable has no such copies of its value: the update
reads it anew, after the write.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.common_state import (counts_of_model, read_by_training,
                                         read_from_state)
from towers.errors import ClusterError
from towers.graph.frames import Frames
from towers.graph.graph_walk import is_random, reachable_from, step_operations
from towers.graph.variable_access import VARIABLE_OPS, is_variable, read_from, variable_op
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.tower.objectives import tensors_of
from towers.tower.write_order import gates, to_wait_for

_ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers."""

Shared = collections.namedtuple('Shared', 'train_op state counts')
"""A step in which all workers have the same state.

Fields:
  train_op: operation of the step.
  state: list of the variables that worker 0 gives to the others in it.
  counts: dict from names of counters of the model to what it adds; has to be the same on all
    workers.
"""


def share_state(update, before, own, combined, same_batches, broadcast):
    """Gives worker 0's state to the other workers: `Shared`.

    Args:
      update: the operation that updates the weights.
      before: list of the tensors and operations of the model that the optimizer waits for.
      own: list of `(gradient, variable)` of this machine.
      combined: such a list, the sums over the workers, before `transform_gradients`.
      same_batches: see `read_by_training`.
      broadcast: function that makes the operation by which all workers get worker 0's value of a
        variable.

    Raises:
      ClusterError: a read can be put neither before nor after a write.
    """
    trained, gradients = [variable for _, variable in own], [gradient for gradient, _ in own]
    step = _Step(update, before, trained, combined, same_batches)
    early = step.read_by_update()
    names = {variable.op.name for variable in early}
    late = sorted((variable for variable in read_by_training(
        gradients, update, trained, before, same_batches)
                   if variable.op.name not in names), key=lambda variable: variable.op.name)
    counts = counts_of_model(read_from_state(gradients, trained) + step.read, update,
                             before) if same_batches else {}
    last = [step.share(early, broadcast)] if early else []
    for variable in late:
        with tf.control_dependencies([update] + last):
            last = [broadcast(variable)]
    if last:
        with tf.control_dependencies([update] + last):
            update = tf.group(*last)
    return Shared(update, early + late, counts)


class _Step:
    """The operations of a step, and which of them compute the update of the weights."""

    def __init__(self, update, before, trained, combined, same_batches):
        """See `share_state`."""
        self._update, self._before, self._combined = update, list(before), tensors_of(combined)
        self._same_batches = same_batches
        self._finder = Writes(tf.get_default_graph())
        self._step = {op.name for op in step_operations([update])}
        self._models = {op.name for op in step_operations(before)}
        self._trained = {variable.op.name for variable in trained}
        self._writes, self._common = {}, {}
        self._read = collections.OrderedDict()  # variables, by name
        self._operations = self._of_update(trained)

    def _of_update(self, trained):
        """The operations after the sums that the new weights, or those of later steps, depend on.

        Notes the variables they read. The model's operations are not followed.
        """
        known = {variable.op.name: variable for variable in tf.global_variables()}
        ends = {tensor.op.name for tensor in self._combined}
        stack, seen = [op for variable in trained for op in self._writes_after_sum(variable)], {}
        while stack:
            op = stack.pop()
            if op.name in seen:
                continue
            seen[op.name] = op
            for tensor in op.inputs:
                of_models = tensor.op.name in self._models and tensor.op.type not in VARIABLE_OPS
                for source in read_from(tensor) + self._written_by(tensor) if of_models else (
                        [tensor.op] if tensor.op.type in VARIABLE_OPS else []):
                    variable = known.get(source.name)
                    if variable is not None and source.name not in self._read:
                        self._read[source.name] = variable
                        stack.extend(self._writes_after_sum(variable))
                if not (of_models or tensor.op.name in ends
                        or tensor.op.type.startswith(_ADDED_UP)):
                    stack.append(tensor.op)
        return list(seen.values())

    def _written_by(self, tensor):
        """The variables that a tensor is a reference to, as the result of a write."""
        if tensor.dtype == tf.resource or not is_variable(tensor):
            return []
        names = self._finder.of(tensor.op)
        return [tensor.graph.get_operation_by_name(name) for name in names]

    def _writes_of(self, variable):
        """The operations of the step that write a variable."""
        name = variable.op.name
        if name not in self._writes:
            self._writes[name] = [op for op in self._finder.to(variable) if op.name in self._step]
        return self._writes[name]

    def _writes_after_sum(self, variable):
        return [op for op in self._writes_of(variable) if op.name not in self._models]

    @property
    def read(self):
        """List of the global variables that the update reads, the trained ones among them."""
        return list(self._read.values())

    def read_by_update(self):
        """The variables that the update reads and that each worker writes in its own way: a list.

        Sorted by name, those first whose writes are the model's alone.
        """
        found = [variable for name, variable in self._read.items() if name not in self._trained
                 and not all(self._is_common(op) for op in self._writes_of(variable))]
        return sorted(found, key=lambda variable: (
            bool(self._writes_after_sum(variable)), variable.op.name))

    def _is_common(self, write):
        """Whether a write gives a variable the same value on all workers.

        It does where the value is computed from sums over the workers, from constants, and from
        variables of which the same holds. What else comes in beside the model, such as a learning
        rate that is fed, counts as the same.
        """
        known = {variable.op.name: variable
                 for variable in tf.global_variables() + tf.local_variables()}
        stack, seen = [write], {write.name}
        while stack:
            op = stack.pop()
            more = [tensor.op for tensor in op.inputs]
            if op.type in VARIABLE_OPS:
                more = [] if op.name in self._trained or op.name not in known else (
                    self._writes_of(known[op.name]))
                if not self._same_batches and any(each.name in self._models for each in more):
                    return False
            elif op.name in self._models and _is_source(op):
                return False
            for other in more:
                if other.name not in seen and not other.type.startswith(_ADDED_UP):
                    seen.add(other.name)
                    stack.append(other)
        return True

    # ---- the order of writes, messages and reads ------------------------------------------------

    def share(self, variables, broadcast):
        """Makes the messages, and what reads these variables wait for them; an operation."""
        operations = step_operations([self._update])
        frames = Frames(operations)
        last = []
        for variable in variables:
            writes = self._writes_of(variable)
            before_write = {op.name for op in step_operations(writes)}
            holders, takers = self._readers(variable, frames, before_write)
            waits_for = self._after(writes, operations, frames)
            for op in holders:
                if op.name in before_write:
                    self._check_order(op, variable, {each.name for each in writes}.intersection(
                        each.name for each in step_operations([op])))
                    waits_for += [op] if frames.always_runs(op) else []
            with only_device('/cpu:0'), tf.name_scope('shared_state'), tf.control_dependencies(
                    last + [tensor.op for tensor in self._combined] + waits_for):
                last = [broadcast(variable)]
            done = {op.name for op in step_operations(last)}
            for op in holders:
                if op.name not in before_write:
                    self._check_order(op, variable, done.intersection([op.name]))
                    compat.add_control_inputs(op, last)
            if takers:
                with only_device(variable.device or None), tf.name_scope('shared_state'), \
                        tf.control_dependencies(last):
                    value = variable.read_value()
                for op, position in takers:
                    self._check_order(op, variable, done.intersection([op.name]))
                    compat.replace_input(op, position, value)
        return last[0]

    def _readers(self, variable, frames, before_write):
        """Where the update takes a variable.

        Returns:
          `(holders, takers)`: the operations that take the variable itself and can wait; and
          `(operation, position of its input)` of those that take a value that is not to be used.
        """
        name, holders, takers = variable.op.name, collections.OrderedDict(), []
        writes = {op.name for op in self._writes_of(variable)}
        for op in self._operations:
            if op.name in writes:
                continue
            for position, tensor in enumerate(op.inputs):
                source = variable_op(tensor) if is_variable(tensor) else None
                if source is not None and source.name == name:
                    for each in gates(op, [name], frames):
                        holders[each.name] = each
                elif op.name not in before_write and self._is_no_copy(
                        tensor, variable, before_write, writes):
                    takers.append((op, position))
        return list(holders.values()), takers

    def _is_no_copy(self, tensor, variable, before_write, writes):
        """Whether a tensor is the value of a variable at a time that cannot be told.

        The model's own read of it, unless it is the copy from before the write; or a reference.
        """
        if tensor.op.name in writes:
            return tensor.dtype != tf.resource
        sources = read_from(tensor)
        if len(sources) != 1 or sources[0].name != variable.op.name:
            return False
        if variable.op.type == 'VarHandleOp':
            return tensor.op.name in self._models and tensor.op.name not in before_write
        return tensor.op.name in self._models or tensor.op.name in before_write

    def _after(self, writes, operations, frames):
        """The operations to wait for after writes, which may be within loops and branches."""
        found = []
        of_models = [op for op in writes if op.name in self._models]
        if of_models:
            reached = reachable_from(of_models, operations, control=True)
            found += [op for op in (getattr(each, 'op', each) for each in self._before)
                      if op.name in reached]
        for op in writes:
            if op.name not in self._models:
                found += frames.ends(op)
        return list({each.name: each for op in found
                     for each in to_wait_for(op, self._finder)}.values())

    def _check_order(self, op, variable, against):
        """Raises for an operation that reads a variable between two writes of a step.

        Args:
          op: the operation.
          variable: the variable.
          against: names of operations that contradict the order; empty if there is none.
        """
        if against:
            raise ClusterError(
                'variable %r is written from the batch of each worker and read by %r, for the '
                'update of the weights, before another write of the step: the workers would read '
                'different values, and their weights would drift apart. Read it before all of its '
                'writes, or after them.' % (variable.op.name, op.name))


def _is_source(op):
    """Whether an operation of the model brings in what differs from worker to worker.

    The towers' shards are placeholders with defaults.
    """
    return op.type == 'PlaceholderWithDefault' or is_random(op) or (
        not op.inputs and op.type != 'Const')
