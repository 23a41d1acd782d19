"""The order of the update's writes after the step's reads.

Two kinds of writes do not wait for the reads by themselves; both are found in the finished step.

- An optimizer may write a variable without waiting for its gradient: AdamW decays a weight first, a
  counter goes up first. Meanwhile a backward pass may still read the memory of a reference
  variable, or the weights once more in a recomputation; on parameter servers, other workers read
  (`hold_update`).
- Update ops, such as batch norm's, may write a variable on a parameter server that other workers'
  forward passes of the same step read. In a worker whose data have ended they must not run at all
  (`hold_back`).
"""

import collections
import functools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.gradients.gradient_pairs import Pairs, tensors_of
from towers.graph.graph_walk import (
    by_name,
    inputs_of,
    names_of,
    operation_names,
    operation_of,
    reachable_from,
    step_operations,
    without_names,
)
from towers.graph.op_types import READS
from towers.graph.order import Frames
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes, variable_op
from towers.graph.waits import Precedence, Wait, Waits, operations_to_hold
from towers.placement.variable_device import only_device
from towers.roles.writes import Write, writes_among, writes_to


def hold_update(train_op: tf.Operation, gradients: Pairs, fetched: list, awaited: typing.Sequence,
                fetchable: typing.Sequence, conditions: typing.Sequence) -> typing.List[Wait]:
    """Makes the writes of an update wait until all that reads their variables has been computed.

    A write waits

    - for all gradients, unless it is certain to come after the gradients that read its variable;
    - for all that a step fetches, if its variable is a reference variable, whose memory may be read
      late;
    - for the `conditions` of a cluster;
    - for the reads of its variable that only predictions need.

    Args:
      train_op: the operation that updates the variables.
      gradients: list of `(gradient, variable)`, the sums over all towers and machines. The gradient
        is None where no loss depends on the variable. The variable is None where the gradient is
        the sum that a tower has for its replica.
      fetched: list of tensors: losses, and the gradients for the optimizer.
      awaited: the losses and update ops that the optimizer waits for. Writes of update ops are not
        looked at: `hold_back` has made them wait.
      fetchable: tensors that a program can have without a step: nothing upstream of them gets a new
        wait.
      conditions: operations of the cluster, after which a step may write; see `EngineGradients`. []
        without a cluster.

    Returns:
      What waits for what.
    """
    pairs = [pair for pair in gradients if pair[0] is not None]
    sums = list(map(operation_of, tensors_of(pairs)))
    # The operations of the update come after the gradients, and after what the optimizer waits for:
    # the search for them ends there.
    names_before_update = operation_names(sums + list(awaited))
    operations = step_operations([train_op], ends=names_before_update)
    writes = writes_among(without_names(operations, names_before_update))
    if not writes:
        return []
    holder = _Holder(operations, fetchable)
    reads = _GradientReads(pairs, step_operations(sums))
    _hold_for_gradients(writes, reads, sums, holder)
    _hold_for_fetched(writes, reads, fetched, holder)
    if conditions:
        holder.make_wait(writes, conditions, _REASON_OF_CONDITIONS)
    _hold_for_predictions(writes, _reads_beside_step(fetchable, train_op), holder)
    return holder.waits


def _hold_for_gradients(writes: typing.Iterable[Write], reads: '_GradientReads',
                        sums: typing.Sequence[tf.Operation], holder: '_Holder') -> None:
    """Makes the writes that do not come after the gradients' reads wait for all gradients.

    Args:
      writes: the writes of the update.
      reads: the reads by which gradients are computed.
      sums: the operations of all gradients.
      holder: makes writes wait.
    """
    early_writes = [write for write in writes if not reads.are_before(write)]
    if early_writes:
        all_gradients = _group(sums, 'all_gradients')
        holder.make_wait(early_writes, [all_gradients],
                         'gradients read variable %s before this write')


def _hold_for_fetched(writes: typing.Iterable[Write], reads: '_GradientReads', fetched: list,
                      holder: '_Holder') -> None:
    """Makes the writes of reference variables wait for all that a step fetches.

    Args:
      writes: the writes of the update.
      reads: the reads by which gradients are computed.
      fetched: the tensors that a step fetches.
      holder: makes writes wait.
    """
    reference_writes = [write for write in writes if reads.are_of_memory(write)]
    if reference_writes:
        all_fetched = _group(fetched, 'all_fetched')
        holder.make_wait(reference_writes, [all_fetched],
                         'what a step fetches reads the memory of variable %s before this write')


def _hold_for_predictions(writes: typing.Iterable[Write],
                          reads_by_variable: typing.Dict[str, typing.List[tf.Operation]],
                          holder: '_Holder') -> None:
    """Makes the writes of variables wait for the reads that only predictions need.

    Args:
      writes: the writes of the update.
      reads_by_variable: {name of a variable: the reads of it that only predictions need}.
      holder: makes writes wait.
    """
    for variable, reads in reads_by_variable.items():
        holder.make_wait(writes_to(writes, {variable}), reads,
                         'predictions read variable %s before this write')


_REASON_OF_CONDITIONS = (
    'the other workers of the cluster are done with variable %s before this write')


def _group(awaited: typing.Sequence, name: str) -> tf.Operation:
    """Makes an operation of this name, on the CPU, that waits for others, and for nothing that the
    caller's scopes name."""
    with tf.control_dependencies(None), only_device('/cpu:0'):
        return tf.group(*awaited, name=name)


class _GradientReads:
    """Tells which writes come after the reads by which gradients are computed."""

    def __init__(self, pairs: typing.Iterable[tuple], operations: typing.Iterable[tf.Operation]):
        """
        Args:
          pairs: `(gradient, variable)` pairs; the variable may be None.
          operations: the operations that compute the gradients.
        """
        self._gradients = []
        self._gradient_of = {}  # name of a trained variable: the operation of its gradient
        for gradient, variable in pairs:
            # A sparse gradient counts as its values, which are computed after their indices.
            op = getattr(gradient, 'values', gradient).op
            self._gradients.append(op)
            if variable is not None:
                self._gradient_of[variable.op.name] = op
        self._operations = by_name(operations)
        self._order = Precedence(self._gradients)

    def are_before(self, write: Write) -> bool:
        """Whether a write comes after all gradients that read its variables."""
        return all(self._is_after_reads(write.op, variable) for variable in write.variables)

    def are_of_memory(self, write: Write) -> bool:
        """Whether gradients read the memory of one of the variables of a write."""
        return any(map(self._is_memory_read, write.variables))

    def _is_after_reads(self, op: tf.Operation, variable: str) -> bool:
        """Whether an operation certainly comes after all gradients that read the variable of that
        name."""
        if self._is_memory_read(variable):
            return False  # the variable's memory may be read at any time
        is_trained = variable in self._gradient_of
        if is_trained:  # the variable's own gradient is computed from all reads of the variable
            return self._order.waits_for(op, self._gradient_of[variable])
        waits_for_gradients = [self._order.waits_for(op, each) for each in self._gradients]
        is_read_by_gradients = variable in self._operations
        if is_read_by_gradients:  # which of the gradients read it is not known
            return all(waits_for_gradients)
        # No gradient reads the variable: it is a slot, say. A write of a slot that waits for any
        # gradient belongs to the update by this gradient, and is late enough.
        return any(waits_for_gradients)

    def _is_memory_read(self, variable: str) -> bool:
        """Whether gradients read the variable of that name, and it is a reference variable."""
        op = self._operations.get(variable)
        return op is not None and op.type in REFERENCE_VARIABLES


def _reads_beside_step(fetchable: typing.Sequence,
                       train_op: tf.Operation) -> typing.Dict[str, typing.List[tf.Operation]]:
    """Finds the reads of resource variables that a step does not run, but a program may fetch with
    the step: for predictions, say.

    The update will wait for these reads, and so every step will run them. To keep that cheap, only
    reads are found whose inputs (handle, indices) the step runs anyway.

    Args:
      fetchable: tensors that a program may fetch.
      train_op: the operation of the step.

    Returns:
      {name of a variable: the reads}.
    """
    step = names_of(step_operations([train_op]))
    reads_by_variable = collections.defaultdict(list)
    for op in step_operations(fetchable):
        is_read_beside_step = op.type in READS and op.name not in step
        # An operation outside of a loop or a branch cannot wait for a read inside.
        if not is_read_beside_step or compat.in_control_flow(op):
            continue
        variable = variable_op(op.inputs[0])
        if variable is None:  # a handle that a function or a loop gives
            continue
        are_inputs_in_step = names_of(inputs_of(op)) <= step
        if are_inputs_in_step:
            reads_by_variable[variable.name].append(op)
    return reads_by_variable


# ---- update ops ----------------------------------------------------------------------------------

class HeldBack(typing.NamedTuple):
    """Update ops that wait for the other workers, and that a step may skip.

    Attributes:
      update_ops: what the optimizer has to wait for in the place of the update ops.
      redirect: a function that makes operations which wait for update ops wait for an operation
        that always runs; None where update ops are never skipped. It is called twice: for the
        optimizer's operations, before their order is found; and by `join`, for the operations that
        a program makes after the build.
      waits: what waits for what.
    """
    update_ops: list
    redirect: typing.Optional[typing.Callable]
    waits: typing.List[Wait]


def hold_back(update_ops: list, conditions: typing.Sequence, active: typing.Optional[tf.Tensor],
              fetchable: typing.Sequence) -> HeldBack:
    """Makes update ops wait until the other workers of a cluster have read the variables that the
    update ops write. In a worker whose data have ended, update ops are skipped.

    An operation is skipped if it waits for an output of a `Switch` that has no value in this step.
    A `Merge` gives the first of its inputs that has a value, so that it always runs, and what waits
    for it, the optimizer, runs too:

        active -> Switch -> taken   -> update ops -> done -> Merge -> optimizer
                         -> skipped -----------------------> Merge

    Args:
      update_ops: list of the update ops, operations or tensors.
      conditions: operations of the cluster, after which a step may write; see `EngineGradients`.
      active: float scalar, 0 in a worker whose own data have ended and else 1; None if the data of
        no worker end.
      fetchable: tensors that a program can have without a step: the operations that they need get
        no wait, not even a write of the forward pass.
    """
    has_nothing_to_wait_for = not conditions and active is None
    if not update_ops or has_nothing_to_wait_for:
        return HeldBack(update_ops, redirect=None, waits=[])
    operations = step_operations(update_ops)
    holder = _Holder(operations, fetchable)
    writes = _update_ops_and_writes(update_ops, operations)
    if active is None:  # update ops are never skipped
        holder.make_wait(writes, conditions, _REASON_OF_CONDITIONS)
        return HeldBack(update_ops, redirect=None, waits=holder.waits)
    branches = _branches_after(conditions, active)
    held = holder.make_wait(writes, [branches.taken.op], _REASON_OF_CONDITIONS)
    with only_device('/cpu:0'), tf.name_scope('riding'):
        with tf.control_dependencies(update_ops):
            done = tf.identity(branches.taken)
        merged = tf.raw_ops.Merge(inputs=[done, branches.skipped]).output
    # `control` is set: TensorFlow also skips an operation that waits for a skipped one by a control
    # edge alone.
    names_of_skippable = reachable_from(held, operations, control=True)
    names_before_merge = names_of(operations) | {done.op.name}
    redirect = functools.partial(_redirect_waits, skippable=names_of_skippable,
                                 before_merge=names_before_merge, merged=merged.op)
    return HeldBack([merged], redirect, holder.waits)


class _Branches(typing.NamedTuple):
    """The outputs of a `Switch`: in a step, exactly one of them has a value."""
    taken: tf.Tensor  # has a value in a worker that has data
    skipped: tf.Tensor  # has a value in a worker whose data have ended


def _branches_after(conditions: typing.Sequence, active: tf.Tensor) -> _Branches:
    """Makes the `Switch` of `hold_back`, which waits for its `conditions`."""
    with only_device('/cpu:0'), tf.name_scope('riding'), tf.control_dependencies(list(conditions)):
        has_batch = tf.identity(active >= .5)  # `active` is 0. or 1.
        outputs = tf.raw_ops.Switch(data=has_batch, pred=has_batch)
        # An operation is to wait for one output of the `Switch`. The `Switch` itself always runs;
        # an identity of an output runs only if the output has a value.
        skipped = tf.identity(outputs.output_false)
        taken = tf.identity(outputs.output_true)
    return _Branches(taken, skipped)


def _update_ops_and_writes(update_ops: list,
                           operations: typing.Iterable[tf.Operation]) -> typing.List[Write]:
    """Finds what has to wait among the operations of update ops.

    Args:
      update_ops: the update ops.
      operations: all operations that the update ops run.

    Returns:
      List of `Write`: all writes, and the update ops themselves, which may write no variable.
    """
    finder = Writes(tf.get_default_graph())
    names_of_update_ops = operation_names(update_ops)
    found = []
    for op in operations:
        write = Write(op, finder.written_by(op))
        if write.variables or op.name in names_of_update_ops:
            found.append(write)
    return found


def _redirect_waits(skippable: typing.Container[str], before_merge: typing.Container[str],
                    merged: tf.Operation) -> None:
    """Makes operations that wait for skippable operations wait for `merged`, which always runs.

    Otherwise TensorFlow would also skip the operations that wait: `transform_gradients` may read a
    moving average after its update op, and a program may run averages of the weights after all
    `UPDATE_OPS`.

    Args:
      skippable: names of the operations that are skipped with the update ops.
      before_merge: names of the operations of the update ops themselves, which keep their waits, to
        be skipped together.
      merged: the operation that runs after the update ops, or without them.
    """
    for op in without_names(merged.graph.get_operations(), before_merge):
        kept = without_names(op.control_inputs, skippable)
        if len(kept) < len(op.control_inputs):
            compat.set_control_inputs(op, kept + [merged])


# ---- waits ---------------------------------------------------------------------------------------

class _Holder:
    """Makes writes of an update wait; but not a write that a program can run without a step, since
    the program would then run the whole step.

    Attributes:
      waits: what waits for what, of all calls.
    """

    def __init__(self, operations: typing.Sequence[tf.Operation], fetchable: typing.Sequence):
        """
        Args:
          operations: all operations of the update, with the loops around the writes.
          fetchable: tensors that a program can have without a step: what they need gets no wait.
        """
        self.waits: typing.List[Wait] = []
        self._operations = operations
        self._fetchable = fetchable
        self._graph = tf.get_default_graph()

    def make_wait(self, writes: typing.Iterable[Write], awaited: typing.Sequence[tf.Operation],
                  reason: str) -> typing.List[tf.Operation]:
        """Makes writes wait.

        Args:
          writes: the writes.
          awaited: the operations that they are to wait for.
          reason: why, with `%s` in the place of the variables' names.

        Returns:
          The operations that wait for all of `awaited` now.
        """
        reasons = self._reasons_by_held(writes, reason)
        held = list(map(self._graph.get_operation_by_name, reasons))
        waits = Waits(held)
        waiting = []
        for op in held:
            # A wait that would close a circle is not added.
            are_added = [waits.add(op, each, reasons[op.name]) for each in awaited]
            if all(are_added):
                waiting.append(op)
        self.waits += waits.put_into_graph(Writes(self._graph))
        return waiting

    def _reasons_by_held(self, writes: typing.Iterable[Write],
                         reason: str) -> typing.Dict[str, str]:
        """{name of an operation that has to wait so that a write comes later: why, in words}.

        Args:
          writes: the writes.
          reason: why, with `%s` in the place of the variables' names.
        """
        frames = Frames(self._operations)
        run_without_step = names_of(step_operations(self._fetchable))
        reasons: typing.Dict[str, str] = collections.OrderedDict()
        for write in writes:
            if write.op.name in run_without_step:
                continue
            # The write itself; of a write in a loop, the `Enter`s that lead its variables into the
            # loop. A prediction may need such an `Enter`, though it needs no write in the loop.
            for op in operations_to_hold(write.op, write.variables, frames):
                if op.name not in run_without_step:
                    reasons.setdefault(op.name, reason % ', '.join(write.variables))
        return reasons
