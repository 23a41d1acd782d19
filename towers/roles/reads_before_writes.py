"""The reads that a write of a shared variable has to come after.

A *hold* is such a read beside the write: the write is to wait for an operation that comes after the
read. `write_order` and `write_in_turn` put these waits into the graph.

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
    tower: int  # index of the tower
    op: tf.Operation
    variable: str  # name of the variable
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
    no updates."""
    fetches = []
    for tower in towers:
        fetches += fetches_in(
            [tower.loss, tower.data_loss, tower.predictions, gradients_of(tower.pairs)])
    return fetches


def find_holds(towers: typing.Sequence[Tower], reads: Operations,
               writes: typing.List[TowerWrite], takers: Takers, frames: Frames,
               operations_of_updates: typing.Optional[Operations] = None) -> typing.List[Hold]:
    """Finds the reads that each write has to wait for.

    Args:
      towers: all towers.
      reads: the operations of the forward and backward passes, among which the reads are.
      writes: the writes.
      takers: {name of a variable: the operations that take it}.
      frames: the loops and branches around all these operations.
      operations_of_updates: the operations that a step runs for the towers' updates. A write that
        every tower makes also waits for the reads among these: where an update computes rows from
        the variable, all towers compute them from the values before the step. A write that tower 0
        makes for all waits for these reads of the other towers, whose updates may write other
        variables. Where the updates of tower 0 read, the program says.
    """
    reads_before = _ReadsBefore(writes, takers, reads, operations_of_updates or {}, towers[0])
    read_ends = _ReadEnds(towers, frames)
    holds = []
    for write in writes:
        all_held = operations_to_hold(write.op, [write.variable], frames)
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
                 operations_of_updates: Operations, tower_0: Tower):
        """
        Args:
          writes: the writes of the towers.
          takers: {name of a variable: the operations that take it}.
          reads: the operations of the forward and backward passes.
          operations_of_updates: the operations that a step runs for the towers' updates.
          tower_0: the tower that makes the writes of the role `FIRST`.
        """
        self._writes = {write.op.name: write for write in writes}
        self._takers = takers
        self._reads = reads
        self._operations_of_updates = operations_of_updates
        self._tower_0 = tower_0
        self._steps_of_losses = steps_of_losses(tower_0)
        self._finder = Writes(tf.get_default_graph())
        # Names of the operations by which updates decide what they write. Where tower 0 alone
        # writes, every read can be ordered, and they are not asked for.
        self._decide_writes: typing.Set[str] = set()
        if any(write.has_role_every for write in writes):
            self._decide_writes = _deciding_writes(operations_of_updates.values(), self._finder)

    def of(self, write: TowerWrite) -> typing.List[tf.Operation]:
        """List of the operations that take the variable of a write, and have to do so before it."""
        return [taker for taker in self._takers[write.variable]
                if self._is_read_in_time(taker, write) and not self._may_come_later(taker, write)]

    def _is_read_in_time(self, taker: tf.Operation, write: TowerWrite) -> bool:
        """Whether an operation belongs to a pass whose reads have to come before a write: to the
        forward or backward pass; or to the updates, those of tower 0 only if every tower makes the
        write."""
        if taker.name in self._reads:
            return True
        if taker.name not in self._operations_of_updates:
            return False
        return write.has_role_every or not self._tower_0.has(taker.name)

    def certain_readers(self, write: TowerWrite) -> typing.Set[str]:
        """Set of the names of the operations that certainly read the variable of a write for a
        loss, a gradient, a prediction, or a write of an update. See `Hold.certainly_reads`."""
        variable = write.op.graph.get_operation_by_name(write.variable)
        readers = names_of(self._finder.readers(variable))
        return readers & (self._reads.keys() | self._decide_writes)

    def _may_come_later(self, taker: tf.Operation, write: TowerWrite) -> bool:
        """Whether an operation that takes the variable of a write is itself a write, for which this
        write need not wait."""
        other = self._writes.get(taker.name)
        if other is None:  # it reads
            return False
        if taker is write.op:  # the write takes its variable itself
            return True
        if other.has_role_every and write.has_role_every:  # ordered by `_write_in_order`
            return True
        # With several losses, each loss has a step of its own. Say that the step of one loss runs
        # this write, but not the other write. If this write waited for the other one, that step
        # would have to run both.
        return any(write.op.name in step and taker.name not in step
                   for step in self._steps_of_losses)


def _deciding_writes(operations: typing.Iterable[tf.Operation],
                     finder: Writes) -> typing.Set[str]:
    """Set of the names of the operations from which the writes among `operations` are computed:
    what they write, and under which conditions. An update op may also read what nobody uses."""
    deciding: typing.List[tf.Tensor] = []
    for op in operations:
        if finder.written_by(op):
            deciding += op.inputs
            deciding += map(op.graph.get_tensor_by_name, compat.conditions_around(op))
    return ancestors(deciding)


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
