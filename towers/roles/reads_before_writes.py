"""The reads that a write of a shared variable has to come after.

A *hold* is a write together with one such read: the write is to wait for an operation that comes
after the read. `write_order` and `write_in_turn` put these waits into the graph.

Words of other modules used here: `Writes.takers_of_memory` are the operations that take a variable
itself, or may read the memory of a reference variable late; `Writes.readers` are the operations
that certainly compute with the variable. `Frames.ends` are operations outside of the loops and
branches of a read that come after it.

Its test is `tests/roles/test_write_order.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.gradients.gradient_pairs import gradients_of
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    ancestors,
    fetches_in,
    names_of,
    step_operations,
    with_names,
)
from towers.graph.order import Frames
from towers.graph.variable_access import Writes
from towers.graph.waits import operations_to_hold

Operations = typing.Dict[str, tf.Operation]
"""{name of an operation: the operation}."""

Takers = typing.Dict[str, typing.List[tf.Operation]]
"""{name of a variable: the operations that take it, or the memory of a reference variable}."""


class TowerWrite(typing.NamedTuple):
    """A write by a tower, in its forward pass or its update ops; not by the optimizer."""
    tower: int  # index in the list of all towers, with accumulation of all micro-batches
    op: tf.Operation
    variable_name: str
    has_role_every: bool  # whether the variable has the role `EVERY`


class Hold(typing.NamedTuple):
    """A write, and a read that it is to wait for.

    Attributes:
      held: the operation that has to wait so that the write comes later: the write itself, or what
        leads its variable into a loop.
      reader: the operation that reads.
      ends: operations each of which comes after the read; to wait for one of them is enough.
      write: the write.
      certainly_reads: whether `reader` certainly reads the variable itself. An operation that hands
        on the memory of a reference variable may leave the read to what takes its result.
    """
    held: tf.Operation
    reader: tf.Operation
    ends: typing.List[tf.Operation]
    write: TowerWrite
    certainly_reads: bool


def takers_of(names: typing.Iterable[str], finder: Writes) -> Takers:
    """{name of a variable: the operations that a write of it may have to wait for}, for the
    variables of these names.

    These operations take the variable itself, or the memory of a reference variable: an operation
    may read this memory late, after an `Identity` has handed it on.
    """
    graph = tf.get_default_graph()
    return {name: finder.takers_of_memory(graph.get_operation_by_name(name)) for name in names}


def fetches_without_updates(towers: typing.Iterable[Tower]) -> list:
    """List of the tensors of towers that a step may fetch: losses, predictions and gradients, but
    no update ops."""
    fetches = []
    for tower in towers:
        fetches += fetches_in(
            [tower.loss, tower.data_loss, tower.predictions, gradients_of(tower.pairs)])
    return fetches


def find_holds(towers: typing.Sequence[Tower], reads: Operations,
               writes: typing.List[TowerWrite], takers: Takers, frames: Frames,
               run_by_update_ops: typing.Optional[Operations] = None) -> typing.List[Hold]:
    """Finds the reads that each write has to wait for.

    Args:
      towers: all towers, in the order of `TowerWrite.tower`.
      reads: the operations of the forward and backward passes, among which the reads are.
      writes: the writes.
      takers: {name of a variable: the operations that take it}.
      frames: the loops and branches around all these operations.
      run_by_update_ops: the operations that a step runs for the towers' update ops. A write with
        the role `EVERY` also waits for the reads among these: where an update op computes rows from
        the variable, all towers compute them from the values before the step. A write that tower 0
        makes for all waits for these reads of the other towers, whose update ops may write other
        variables. Whether the update ops of a tower read before or after a write of the tower's
        own, the program says.
    """
    reads_before = _ReadsBefore(writes, takers, reads, run_by_update_ops or {}, towers)
    read_ends = _ReadEnds(towers, frames)
    holds = []
    for write in writes:
        all_held = operations_to_hold(write.op, [write.variable_name], frames)
        if not all_held:  # nothing outside of the loop around the write can be made to wait
            continue
        names_of_certain_readers = reads_before.certain_readers(write)
        for reader in reads_before.of(write):
            ends = read_ends.of(reader)
            if not ends:  # nothing that always runs comes after the read
                continue
            certainly_reads = reader.name in names_of_certain_readers
            holds += [Hold(held, reader, ends, write, certainly_reads) for held in all_held]
    return holds


def held_by(holds: typing.Iterable[Hold]) -> typing.List[tf.Operation]:
    """List of the operations that have to wait."""
    return [hold.held for hold in holds]


class _ReadsBefore:
    """Finds the reads of a variable that a write of it has to come after."""

    def __init__(self, writes: typing.List[TowerWrite], takers: Takers, reads: Operations,
                 run_by_update_ops: Operations, towers: typing.Sequence[Tower]):
        """
        Args:
          writes: the writes of the towers.
          takers: {name of a variable: the operations that take it}.
          reads: the operations of the forward and backward passes.
          run_by_update_ops: the operations that a step runs for the towers' update ops.
          towers: all towers.
        """
        self._writes = {write.op.name: write for write in writes}
        self._takers = takers
        self._reads = reads
        self._run_by_update_ops = run_by_update_ops
        self._towers = towers
        # {index of a tower: the steps of its losses}, found when they are needed
        self._steps_of_losses: typing.Dict[int, typing.List[typing.Set[str]]] = {}
        self._finder = Writes(tf.get_default_graph())
        # Names of the operations from which update ops compute what they write. The reads among
        # these are certain readers, for which `add_waits` refuses a write that cannot wait for them
        # though the program does not order it before them. Only the turns of writes by every tower
        # lead to this: else no tower waits for another one but as the program says.
        self._upstream_of_writes: typing.Set[str] = set()
        if any(write.has_role_every for write in writes):
            self._upstream_of_writes = _upstream_of_writes(
                run_by_update_ops.values(), self._finder)

    def of(self, write: TowerWrite) -> typing.List[tf.Operation]:
        """List of the operations that take the variable of a write, and have to do so before it."""
        return [taker for taker in self._takers[write.variable_name]
                if self._has_to_come_before(taker, write)
                and not self._may_come_later(taker, write)]

    def _has_to_come_before(self, taker: tf.Operation, write: TowerWrite) -> bool:
        """Whether an operation belongs to what has to read before a write: to a forward or backward
        pass; or to update ops, those of the tower that writes only if the role is `EVERY`."""
        if taker.name in self._reads:
            return True
        if taker.name not in self._run_by_update_ops:
            return False
        return write.has_role_every or not self._towers[write.tower].has(taker.name)

    def certain_readers(self, write: TowerWrite) -> typing.Set[str]:
        """Set of the names of the operations that certainly read the variable of a write for a
        loss, a gradient, a prediction, or a write of an update op. See `Hold.certainly_reads`."""
        variable = write.op.graph.get_operation_by_name(write.variable_name)
        readers = names_of(self._finder.readers(variable))
        return readers & (self._reads.keys() | self._upstream_of_writes)

    def _may_come_later(self, taker: tf.Operation, write: TowerWrite) -> bool:
        """Whether an operation that takes the variable of a write is itself a write, for which this
        write need not wait."""
        other = self._writes.get(taker.name)
        if other is None:  # it reads
            return False
        if taker is write.op:  # the write takes its variable itself
            return True
        if other.has_role_every and write.has_role_every:
            return True  # `write_order._write_in_order` orders both
        # With several losses, each loss has a step of its own. Say that the step of one loss runs
        # this write, but not the other write. If this write waited for the other one, that step
        # would have to run both.
        return any(write.op.name in step and taker.name not in step
                   for step in self._steps_of_tower(write.tower))

    def _steps_of_tower(self, index: int) -> typing.List[typing.Set[str]]:
        """The steps of the losses of a tower, see `steps_of_losses`."""
        if index not in self._steps_of_losses:
            self._steps_of_losses[index] = steps_of_losses(self._towers[index])
        return self._steps_of_losses[index]


def _upstream_of_writes(operations: typing.Iterable[tf.Operation],
                        finder: Writes) -> typing.Set[str]:
    """Set of the names of the operations from which the writes among `operations` are computed, or
    the conditions under which they run. It lacks a read of an update op whose value no write uses.
    """
    inputs_and_conditions: typing.List[tf.Tensor] = []
    for op in operations:
        if finder.written_by(op):
            inputs_and_conditions += op.inputs
            inputs_and_conditions += map(
                op.graph.get_tensor_by_name, compat.conditions_around(op))
    return ancestors(inputs_and_conditions)


class _ReadEnds:
    """Finds operations that come after a read, so that a write can wait for one of them."""

    def __init__(self, towers: typing.Sequence[Tower], frames: Frames):
        """
        Args:
          towers: all towers.
          frames: the loops and branches around their operations.
        """
        self._towers = towers
        self._frames = frames
        self._in_training: typing.Optional[typing.Set[str]] = None  # found when it is needed
        # {name of a read: its ends}. One operation may be a read of many variables, and is asked
        # for each: whatever is computed from a reference variable may read its memory.
        self._ends: typing.Dict[str, typing.List[tf.Operation]] = {}

    def of(self, reader: tf.Operation) -> typing.List[tf.Operation]:
        """The operations of a `Hold` for a read: to wait for any of them is to wait for the read.

        Returns:
          The read itself. For a read in a loop or a branch, the operations outside that come after
          it; first the operations of the forward pass, since a write that waits for the forward
          pass alone can come early.
        """
        if reader.name not in self._ends:
            self._ends[reader.name] = self._find(reader)
        return self._ends[reader.name]

    def _find(self, reader: tf.Operation) -> typing.List[tf.Operation]:
        """The operations that `of` gives for a read."""
        ends = self._frames.ends(reader)
        is_outside_of_loops_and_branches = ends == [reader]
        if is_outside_of_loops_and_branches:
            return ends
        # Operations that only predictions need are left out: a training step does not run them.
        ends_in_training = with_names(ends, self._names_in_training())
        return sorted(ends_in_training, key=self._is_backward)

    def _names_in_training(self) -> typing.Set[str]:
        """Set of the names of the operations that a training step runs: for losses and gradients,
        not for predictions."""
        if self._in_training is None:
            towers = [tower._replace(predictions=None) for tower in self._towers]
            self._in_training = names_of(step_operations(fetches_without_updates(towers)))
        return self._in_training

    def _is_backward(self, op: tf.Operation) -> bool:
        """Whether an operation is of the backward pass of a tower."""
        return any(op.name in tower.backward for tower in self._towers)


def steps_of_losses(tower: Tower) -> typing.List[typing.Set[str]]:
    """For each loss of a build with several losses, the names of the operations that its step runs:
    each loss may have a step of its own. [] for a build with one loss, and so with one step."""
    has_several_losses = isinstance(tower.loss, dict)
    if not has_several_losses:
        return []
    steps = []
    for name in tower.loss:
        pairs = tower.gradients.get(name, ())  # none for a loss that no optimizer minimizes
        fetches = fetches_in([tower.data_loss[name], gradients_of(pairs)])
        steps.append(names_of(step_operations(fetches)))
    return steps
