"""State that the model writes and training reads: all workers of a ring, or of Horovod, have worker
0's.

A running mean of features, a codebook, a learning rate that falls with the loss, a running size
that `transform_gradients` divides by, centers of classes that are trained as well: on one machine
the first tower writes them, and all read that. In a ring every worker has a copy, and writes it
from its own batch: the copies would drift apart, and a run that resumes would go on with worker
0's. So worker 0's value goes to the others

    right after its write, and what the update reads waits for that.

What has to be read before the write, since the new value is computed from it, gets what worker 0
had written in the step before. A reference variable has no such copies of its value: the update
reads it anew, after the write. What training only writes, such as the moving averages of batch
norm, needs no message: worker 0 saves its own. Nor does what the update writes: it is the same on
all workers, see `drift_check`.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.signature import ADDED_UP
from towers.errors import ClusterError
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.edit import copied_operations, take_instead
from towers.graph.frames import Frames
from towers.graph.graph_walk import ancestors, is_control_flow, reachable_from, step_operations
from towers.graph.variable_access import is_variable, read_from, variable_op
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.tower.inline_updates import Write, writes_used
from towers.tower.objectives import tensors_of
from towers.tower.write_order import gates, to_wait_for


def share_state(update, before, own, combined, broadcast, replicated=()):
    """Gives worker 0's state to the other workers.

    Args:
      update: the operation that updates the weights.
      before: list of the tensors and operations of the model that the optimizer waits for.
      own: list of `(gradient, variable)` of this machine.
      combined: such a list, the sums over the workers, before `transform_gradients`.
      broadcast: function that makes the operation by which all workers get worker 0's value of a
        variable.
      replicated: names of the variables of which this worker's towers have replicas.

    Returns:
      `(operation of the step, list of the variables that worker 0 gives to the others in it)`.

    Raises:
      ClusterError: a read can be put neither before nor after a write; or the model writes a
        trained variable, and its value is used or passed on before it was sent.
    """
    step = _Step(update, before, own, combined)
    written = step.written_by_model()
    _check_trained(written, own, replicated)
    if not written:
        return update, []
    state = [variable for variable, _ in written]
    step.take_copies(state)
    return tf.group(update, step.share(written, broadcast)), state


def _check_trained(written, own, replicated):
    """Raises for a trained variable whose new value comes to be used before worker 0's is there.

    Args:
      written: as `_Step.written_by_model` returns them.
      own, replicated: as for `share_state`.
    """
    trained, gradients = {variable.op.name for _, variable in own}, tensors_of(own)
    for variable, writes in written:
        name = variable.op.name
        if name not in trained:
            continue
        if name in replicated:
            raise ClusterError(
                "VariablePlacement('replicated'), and the model writes the trained variable %r "
                "(%r): the replicas would get what this worker has written, and not worker 0's. "
                'Use another placement.' % (name, writes[0].name))
        step = {op.name for op in step_operations(gradients)}
        inline = [Write(op, [name]) for op in writes if op.name in step]
        if writes_used(inline, gradients, step):
            raise ClusterError(
                'the forward pass writes the trained variable %r (%r) and computes with the new '
                'value: each worker would compute with its own, where on one machine all towers '
                "have the first one's. Put the update into the collection UPDATE_OPS, or return it "
                "in 'updates'." % (name, inline[0].op.name))


class _Step:
    """The operations of a step, and which of them compute the update of the weights."""

    def __init__(self, update, before, own, combined):
        """See `share_state`."""
        self._update, self._before, self._combined = update, list(before), tensors_of(combined)
        self._finder = Writes(tf.get_default_graph())
        self._models = {op.name for op in step_operations(before)}
        self._step = {op.name for op in step_operations([update])}
        self._own = tensors_of(own)
        self._read = collections.OrderedDict()  # variables that training reads, by name
        self._operations = self._of_update([variable for _, variable in own])

    def _of_update(self, trained):
        """The operations after the sums that the new weights, or those of later steps, depend on.

        Notes the variables that they, or the gradients, read. The model's operations are not
        followed.
        """
        known = {variable.op.name: variable for variable in tf.global_variables() + trained}
        ends = {tensor.op.name for tensor in self._combined}
        stack, seen = [], {}

        def follow(name):
            if name in known and name not in self._read:
                self._read[name] = known[name]
                stack.extend(self._writes(known[name], of_model=False))
        for name in [variable.op.name for variable in trained] + sorted(ancestors(self._own)):
            follow(name)
        while stack:
            op = stack.pop()
            if op.name in seen:
                continue
            seen[op.name] = op
            # `tf.Print` returns its first input, and shows the others.
            for tensor in op.inputs[:1] if op.type == 'Print' else op.inputs:
                if tensor.op.name in ends or tensor.op.type.startswith(ADDED_UP):
                    continue
                if tensor.op.name not in self._models or tensor.op.type in VARIABLE_OPS:
                    follow(tensor.op.name)
                    stack.append(tensor.op)
                    continue
                for source in read_from(tensor) + self._written_by(tensor):
                    follow(source.name)
        return list(seen.values())

    def _writes(self, variable, of_model):
        """The operations of the step that write a variable: the model's, or those after the sums.
        """
        return [op for op in self._finder.to(variable)
                if op.name in self._step and (op.name in self._models) == of_model]

    def _written_by(self, tensor):
        """The variables that a tensor is a reference to, as the result of a write."""
        if tensor.dtype == tf.resource or not is_variable(tensor):
            return []
        return [tensor.graph.get_operation_by_name(name) for name in self._finder.of(tensor.op)]

    def written_by_model(self):
        """The variables that the model writes, and training reads.

        Returns:
          List of `(variable, the operations of the model that write it)`, sorted by name.
        """
        found = [(variable, self._writes(variable, of_model=True))
                 for _, variable in sorted(self._read.items())]
        return [(variable, writes) for variable, writes in found if writes]

    def take_copies(self, variables):
        """Has the update compute with copies of what the program computes from some variables.

        What was made before the gradients (`rate = base * decay`, given to the optimizer) the
        program may fetch at any time. If it waited for the write and the message, a look at it
        would make both.
        """
        copies = copied_operations(self._made_before(variables))
        for op in self._operations:
            if op.name not in copies:
                take_instead(op, copies)
        self._operations = [op for op in self._operations if op.name not in copies] + list(
            copies.values())

    def _made_before(self, variables):
        """The operations of the update that were made before it, and take some variables: a list
        in the order in which they were made."""
        before, own = [], {tensor.op.name for tensor in self._own}
        for op in tf.get_default_graph().get_operations():
            if op.name in own:
                break
            before.append(op)
        takes = reachable_from([variable.op for variable in variables], before)
        takes &= {op.name for op in self._operations if op.type not in VARIABLE_OPS}
        found = [op for op in before if op.name in takes]
        # In loops and branches (v1) there is no copy of one operation without the others.
        is_copied = not any(is_control_flow(op) or self._finder.of(op) for op in found)
        return found if is_copied else []

    # ---- the order of writes, messages and reads ------------------------------------------------

    def share(self, written, broadcast):
        """Makes the messages, and what reads these variables wait for them.

        Args:
          written: as `written_by_model` returns them.
          broadcast: see `share_state`.

        Returns:
          The operation of the last message.
        """
        operations = step_operations([self._update])
        frames = Frames(operations)
        last = []
        for variable, writes in written:
            before_write = {op.name for op in step_operations(writes)}
            holders, takers = self._readers(
                variable, {op.name for op in writes}, frames, before_write)
            waits_for = self._after(writes, operations)
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

    def _readers(self, variable, writes, frames, before_write):
        """Where the update takes a variable: its own writes of trained ones among them.

        Args:
          variable: the variable.
          writes: names of the operations that come before the message.
          frames: `Frames` of the step.
          before_write: names of the operations that these writes wait for.

        Returns:
          `(holders, takers)`: the operations that take the variable itself and can wait; and
          `(operation, position of its input)` of those that take a value that is not to be used.
        """
        name, holders, takers = variable.op.name, collections.OrderedDict(), []
        # TensorFlow's own read of a reference variable is the whole graph's: if it waited, whoever
        # looks at the variable between two steps would write it, and take a batch.
        snapshot = None if variable.op.type == 'VarHandleOp' else variable.value().op
        for op in self._operations:
            if op.name in writes or op is snapshot:
                continue
            for position, tensor in enumerate(op.inputs):
                source = variable_op(tensor) if is_variable(tensor) else None
                if source is not None and source.name == name:
                    for each in gates(op, [name], frames):
                        holders[each.name] = each
                elif op.name not in before_write and (tensor.op is snapshot or self._is_no_copy(
                        op, tensor, variable, before_write, writes)):
                    takers.append((op, position))
        return list(holders.values()), takers

    def _is_no_copy(self, op, tensor, variable, before_write, writes):
        """Whether a tensor that `op` takes is a variable's value at a time that cannot be told.

        The model's own read of it, unless it is the copy from before the write; or a reference.
        """
        if tensor.op.name in writes:
            return tensor.dtype != tf.resource
        sources = read_from(tensor)
        if len(sources) != 1 or sources[0].name != variable.op.name:
            return False
        if variable.op.type == 'VarHandleOp':
            if tensor.op.name in before_write:
                self._check_order(op, variable, writes.intersection(
                    each.name for each in step_operations([tensor])))
                return False
            return tensor.op.name in self._models
        return tensor.op.name in self._models or tensor.op.name in before_write

    def _after(self, writes, operations):
        """The operations to wait for after writes, which may be within loops and branches."""
        reached = reachable_from(writes, operations, control=True)
        return list({each.name: each for op in (getattr(each, 'op', each) for each in self._before)
                     if op.name in reached for each in to_wait_for(op, self._finder)}.values())

    def _check_order(self, op, variable, against):
        """Raises for an operation that reads a variable between two writes of a step.

        Args:
          op: the operation.
          variable: the variable.
          against: names of operations that contradict the order; empty if there is none.
        """
        if against:
            raise ClusterError(
                'variable %r is written by the model of each worker and read by %r, for the '
                'update of the weights, before another write of the step: the workers would read '
                'different values, and their weights would drift apart. Read it before all of its '
                'writes, or after them.' % (variable.op.name, op.name))
