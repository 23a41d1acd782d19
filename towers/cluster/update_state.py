"""State that the update reads and that each worker would write in its own way: by its batch, say.

A learning rate that falls with the loss, a running size that `transform_gradients` divides by: on
one machine the first tower writes it, and the one update reads it. In a ring each worker makes the
update itself, so that in each step all have to read one value. Worker 0's goes to the others

    right after its write, and what the update reads waits for that.

The same holds for a trained variable that the model writes from its batch besides (centers of
classes that follow their examples), and for a slot of an optimizer: worker 0's goes to the others
after the model's write and before the optimizer's. What has to be read before the write, since the
new value is computed from it, gets what worker 0 had written in the step before. A reference
variable has no such copies of its value: the update reads it anew, after the write.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.state_from_worker_0 import (counts_of_model, read_by_training,
                                         read_from_state)
from towers.cluster.step_writes import ADDED_UP, StepWrites
from towers.errors import ClusterError
from towers.graph.operation_copies import copied_operations, take_instead
from towers.graph.frames import Frames
from towers.graph.graph_walk import Recording, is_control_flow, reachable_from, step_operations
from towers.graph.variable_access import VARIABLE_OPS, is_variable, read_from, variable_op
from towers.placement.variable_device import only_device
from towers.tower.inline_updates import Write, writes_used
from towers.tower.objectives import tensors_of
from towers.tower.write_order import gates, to_wait_for

Shared = collections.namedtuple('Shared', 'train_op state counts compared made')
"""A step in which all workers have the same state.

Fields:
  train_op: operation of the step.
  state: list of the variables that worker 0 gives to the others in it.
  counts: dict from names of counters of the model to what it adds; has to be the same on all
    workers.
  compared: names of the other variables of which that holds for all that writes them, besides the
    trained ones, see `StepWrites`.
  made: names of the operations that send, get and write this state.
"""


def share_state(update, before, own, combined, same_batches, broadcast, replicated=()):
    """Gives worker 0's state to the other workers: `Shared`.

    Args:
      update: the operation that updates the weights.
      before: list of the tensors and operations of the model that the optimizer waits for.
      own: list of `(gradient, variable)` of this machine.
      combined: such a list, the sums over the workers, before `transform_gradients`.
      same_batches: see `read_by_training`.
      broadcast: function that makes the operation by which all workers get worker 0's value of a
        variable.
      replicated: names of the variables of which this worker's towers have replicas.

    Raises:
      ClusterError: a read can be put neither before nor after a write; or a trained variable that
        the model writes from its batch, and whose value it uses or passes on before it was sent.
    """
    trained, gradients = [variable for _, variable in own], [gradient for gradient, _ in own]
    step = _Step(update, before, own, combined, same_batches)
    early = step.read_by_update()
    names = {variable.op.name for variable, _ in early}
    _check_trained(early, own, replicated)
    late = sorted((variable for variable in read_by_training(
        gradients, update, trained, before, same_batches)
                   if variable.op.name not in names and not step.writes.is_by_weights(variable)),
                  key=lambda variable: variable.op.name)
    counts = counts_of_model(read_from_state(gradients, trained) + step.read, update,
                             before) if same_batches else {}
    with Recording(tf.get_default_graph()) as made:
        step.take_copies([variable for variable, _ in early])
        last = [step.share(early, broadcast)] if early else []
        for variable in late:
            with tf.control_dependencies([update] + last):
                last = [broadcast(variable)]
        if last:
            with tf.control_dependencies([update] + last):
                update = tf.group(*last)
    return Shared(update, [variable for variable, _ in early] + late, counts,
                  step.writes.compared, {op.name for op in made.operations})


def _check_trained(early, own, replicated):
    """Raises for a trained variable whose new value comes to be used before worker 0's is there.

    Args:
      early: as `_Step.read_by_update` returns them.
      own, replicated: as for `share_state`.
    """
    trained, gradients = {variable.op.name for _, variable in own}, tensors_of(own)
    for variable, writes in early:
        name = variable.op.name
        if name not in trained:
            continue
        if name in replicated:
            raise ClusterError(
                "VariablePlacement('replicated'), and an update writes the trained variable %r "
                'from the batch of each worker (%r): the replicas would get what this worker has '
                "written, and not worker 0's. Use another VariablePlacement." % (
                    name, writes[0].name))
        step = {op.name for op in step_operations(gradients)}
        inline = [Write(op, [name]) for op in writes if op.name in step]
        if writes_used(inline, gradients, step):
            raise ClusterError(
                'the forward pass writes the trained variable %r from the batch of each worker '
                '(%r) and computes with the new value: each worker would compute with its own, '
                "where on one machine all towers have the first one's. Put the update into the "
                "collection UPDATE_OPS, or return it in 'updates'." % (name, inline[0].op.name))


class _Step:
    """The operations of a step, and which of them compute the update of the weights.

    Attributes:
      writes: `StepWrites`.
    """

    def __init__(self, update, before, own, combined, same_batches):
        """See `share_state`."""
        trained = [variable for _, variable in own]
        self._update, self._before, self._combined = update, list(before), tensors_of(combined)
        self.writes = StepWrites(update, before, trained, same_batches, combined,
                                 tensors_of(own))
        self._trained = {variable.op.name for variable in trained}
        self._own = {tensor.op.name for tensor in tensors_of(own)}
        self._read = collections.OrderedDict()  # variables, by name
        self._operations = self._of_update(trained)

    def _of_update(self, trained):
        """The operations after the sums that the new weights, or those of later steps, depend on.

        Notes the variables they read. The model's operations are not followed.
        """
        known = {variable.op.name: variable for variable in tf.global_variables() + list(trained)}
        ends = {tensor.op.name for tensor in self._combined}
        stack, seen = [op for variable in trained for op in self.writes.after_sum(variable)], {}
        while stack:
            op = stack.pop()
            if op.name in seen:
                continue
            seen[op.name] = op
            for tensor in op.inputs:
                of_models = (tensor.op.name in self.writes.models
                             and tensor.op.type not in VARIABLE_OPS)
                for source in read_from(tensor) + self._written_by(tensor) if of_models else (
                        [tensor.op] if tensor.op.type in VARIABLE_OPS else []):
                    variable = known.get(source.name)
                    if variable is not None and source.name not in self._read:
                        self._read[source.name] = variable
                        stack.extend(self.writes.after_sum(variable))
                if not (of_models or tensor.op.name in ends
                        or tensor.op.type.startswith(ADDED_UP)):
                    stack.append(tensor.op)
        return list(seen.values())

    def _written_by(self, tensor):
        """The variables that a tensor is a reference to, as the result of a write."""
        if tensor.dtype == tf.resource or not is_variable(tensor):
            return []
        names = self.writes.finder.of(tensor.op)
        return [tensor.graph.get_operation_by_name(name) for name in names]

    @property
    def read(self):
        """List of the global variables that the update reads, the trained ones among them."""
        return list(self._read.values())

    def read_by_update(self):
        """The variables that the update reads and that each worker writes in its own way.

        Returns:
          List of `(variable, writes)` in the order in which the variables are sent, with the writes
          that come before that: the model's; or all of the step, where those after the sums differ
          as well.
        """
        writes, read = self.writes, sorted(self._read.items())
        of_models = {name for name, variable in read if writes.is_own(variable)}
        late = {name for name, variable in read if name not in self._trained
                and writes.differ(writes.after_sum(variable), of_models)}
        return [(variable, writes.of_model(variable)) for name, variable in read
                if name in of_models - late] + [
                    (variable, writes.of(variable)) for name, variable in read if name in late]

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
        before = []
        for op in tf.get_default_graph().get_operations():
            if op.name in self._own:
                break
            before.append(op)
        takes = reachable_from([variable.op for variable in variables], before)
        takes &= {op.name for op in self._operations if op.type not in VARIABLE_OPS}
        found = [op for op in before if op.name in takes]
        # In loops and branches (v1) there is no copy of one operation without the others.
        return [] if any(is_control_flow(op) or self.writes.finder.of(op) for op in found) else found

    # ---- the order of writes, messages and reads ------------------------------------------------

    def share(self, early, broadcast):
        """Makes the messages, and what reads these variables wait for them.

        Args:
          early: as `read_by_update` returns them.
          broadcast: see `share_state`.

        Returns:
          The operation of the last message.
        """
        operations = step_operations([self._update])
        frames = Frames(operations)
        last = []
        for variable, writes in early:
            before_write = {op.name for op in step_operations(writes)}
            holders, takers = self._readers(
                variable, {op.name for op in writes}, frames, before_write)
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
                        tensor, variable, before_write, writes)):
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
            return tensor.op.name in self.writes.models and tensor.op.name not in before_write
        return tensor.op.name in self.writes.models or tensor.op.name in before_write

    def _after(self, writes, operations, frames):
        """The operations to wait for after writes, which may be within loops and branches."""
        found = []
        of_models = [op for op in writes if op.name in self.writes.models]
        if of_models:
            reached = reachable_from(of_models, operations, control=True)
            found += [op for op in (getattr(each, 'op', each) for each in self._before)
                      if op.name in reached]
        for op in writes:
            if op.name not in self.writes.models:
                found += frames.ends(op)
        return list({each.name: each for op in found
                     for each in to_wait_for(op, self.writes.finder)}.values())

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
