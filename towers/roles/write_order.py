"""The order of the towers' writes of shared variables after their reads, before the update.

Variables that a model reads and then writes, in its forward pass or by `UPDATE_OPS`, by role:
`'first'`: only tower 0 writes, when all towers have read. Tower 0 keeps the model's control
dependencies; without one, each read that the loss or a gradient needs comes first. `'every'`: each
tower writes when all have read, after the tower before. `'metric'`: see `metric_counters`. With
`update_ops='all'` towers write one after the other: see `write_in_turn`.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.gradient_pairs import gradients_of
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    by_name,
    fetches_in,
    in_order_of_names,
    names_of,
    step_operations,
)
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.order import Frames, Wait, Waits, operations_to_hold
from towers.graph.variable_access import Writes
from towers.placement.tower_device import stages_of
from towers.roles.ownership import EVERY, METRIC, Roles

Operations = typing.Dict[str, tf.Operation]
"""{name of an operation: the operation}."""

Takers = typing.Dict[str, typing.List[tf.Operation]]
"""{name of a variable: the operations that take it, or the memory of a reference variable}."""


class TowerWrite(typing.NamedTuple):
    """A write by a tower, in its forward pass or its update ops; not by the optimizer."""
    tower: int  # index
    op: tf.Operation
    variable: str  # name
    is_every: bool  # whether every tower writes the variable


class Hold(typing.NamedTuple):
    """A write, and a read that it is to wait for.

    Attributes:
      held: what has to wait, see `operations_to_hold`.
      reader: the operation that reads.
      ends: operations each of which comes after the read, see `Frames.ends`.
      write: the write.
      is_certain: whether it is a read: the memory of a reference variable may be read by what
        follows.
    """
    held: tf.Operation
    reader: tf.Operation
    ends: typing.List[tf.Operation]
    write: TowerWrite
    is_certain: bool


def write_after_reads(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[Wait]:
    """Makes each write of the first tower, or of every tower, wait for all towers' reads; returns
    what waits for what.

    A read that already waits for the write of tower 0, in any tower, is left as it is; where every
    tower writes, outside of control flow, it is refused.

    No wait closes a circle. Copies have tower 0's order, and a read that waits for a write does so
    in all towers: what would be a circle over several towers is one within tower 0, which `Waits`
    leaves out, but for the turns of the towers, which only go up.
    """
    graph = tf.get_default_graph()
    finder = Writes(graph)
    takers = {}
    for name, role in roles.written.items():
        if role != METRIC:
            takers[name] = finder.takers(graph.get_operation_by_name(name), memory=True)
    if not takers:
        return []
    writing_towers = towers if roles.names(EVERY) else towers[:1]
    read_fetches = fetches_without_updates(towers[0]._replace(predictions=None))
    for tower in towers[1:]:
        read_fetches += fetches_without_updates(tower)
    reads = by_name(step_operations(read_fetches))
    write_fetches = []
    for tower in writing_towers:
        write_fetches += fetches_without_updates(tower) + list(tower.updates)
    step = by_name(step_operations(write_fetches, reads))
    step.update(reads)
    writes = _writes(writing_towers, takers, roles, step, finder)
    reads_of_updates: Operations = {}
    if roles.names(EVERY):
        updates = [update for tower in towers for update in tower.updates]
        reads_of_updates = by_name(step_operations(updates))
    holds = find_holds(towers, reads, writes, takers, Frames(list(step.values())),
                       reads_of_updates)
    of_every_tower = [write for write in writes if write.is_every]
    waits = Waits(held_by(holds) + [write.op for write in of_every_tower])
    _write_in_order_of_towers(of_every_tower, waits)
    add_waits(holds, waits)
    return waits.put_into_graph(finder)


def held_by(holds: typing.Iterable[Hold]) -> typing.List[tf.Operation]:
    """List of the operations that have to wait."""
    return [hold.held for hold in holds]


def check_references_in_loops(towers: typing.Sequence[Tower]) -> None:
    """Refuses a loop (v1) of a tower that takes a reference variable of another device, such as one
    that waits for a write of it: TensorFlow never ends it, in a hand-written tower loop either
    (measured on 1.15.5 and 2.21)."""
    first_device = stages_of(towers[0].device)[0]
    entering = [op for op in tf.get_default_graph().get_operations() if op.type == 'RefEnter']
    for tower in towers:
        for op in tower.own(entering):
            variable = _reference_variable(op)
            devices = {'', variable.device or first_device}
            if any(taker.device not in devices for taker in op.outputs[0].consumers()):
                raise SharedVariableError(
                    'a loop of tower %d (operation %s) takes the reference variable %s, which is '
                    'on another device, or waits for a write of it, and would never end: make it '
                    'with use_resource=True.' % (tower.index, op.name, variable.name))


def _reference_variable(op: tf.Operation) -> tf.Operation:
    """The operation of the reference variable that an operation hands on, or has written."""
    while op.type not in VARIABLE_OPS:
        op = op.inputs[0].op
    return op


def fetches_without_updates(tower: Tower) -> list:
    """List of the tensors of a tower that a step needs, besides its updates."""
    return fetches_in([tower.loss, tower.data_loss, tower.predictions, gradients_of(tower.pairs)])


def _writes(towers: typing.Sequence[Tower], takers: Takers, roles: Roles, step: Operations,
            finder: Writes) -> typing.List[TowerWrite]:
    """Finds the writes in a step that are to wait.

    Args:
      towers: the towers that write.
      takers: {name of a variable: the operations that take it}.
      roles: the roles of the variables.
      step: the operations of the step.
      finder: finds the writes of the graph.
    """
    writes = []
    for variable, operations in takers.items():
        is_every = roles.written[variable] == EVERY
        writing_towers = towers if is_every else towers[:1]
        for op in operations:
            if op.name not in step or variable not in finder.of(op):
                continue
            for index, tower in enumerate(writing_towers):
                if tower.has(op.name):
                    writes.append(TowerWrite(index, op, variable, is_every))
    return writes


def _write_in_order_of_towers(writes: typing.List[TowerWrite], waits: Waits) -> None:
    """Makes each tower's writes come after those of the tower before; adds this to the waits."""
    for former, later in itertools.permutations(writes, 2):
        if former.variable != later.variable or former.tower + 1 != later.tower:
            continue
        reason = 'tower %d writes variable %s before it' % (former.tower, former.variable)
        if not waits.add(later.op, former.op, reason):
            raise SharedVariableError(
                'every tower writes variable %s in its turn, and tower %d does so before tower %d '
                '(operations %s, %s): let no tower wait for another one.' % (
                    later.variable, later.tower, former.tower, later.op.name, former.op.name))


def add_waits(holds: typing.List[Hold], waits: Waits) -> None:
    """Makes writes come after the reads that they are held for; adds this to the waits.

    Each hold adds one wait, for one of its ends: the first that closes no circle.

    Raises:
      SharedVariableError: a read that waits for a write which every tower does.
    """
    # Reads that follow a write come last, since waits for them rule out more others.
    holds = sorted(holds, key=lambda hold: all(map(waits.follows_any, hold.ends)))
    for hold in holds:
        is_added = any(waits.add(hold.held, end, _read_in_words(hold, end)) for end in hold.ends)
        if not is_added and hold.write.is_every and hold.is_certain:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (hold.write.variable, hold.ends[0].name, hold.held.name))


def _read_in_words(hold: Hold, end: tf.Operation) -> str:
    """Why a write waits for one of the `ends` of a hold: the read that it comes after, in words."""
    reader = 'it' if end is hold.reader else hold.reader.name
    return '%s reads variable %s before this write' % (reader, hold.write.variable)


# ---- the reads that a write waits for ------------------------------------------------------------

def find_holds(towers: typing.Sequence[Tower], reads: Operations,
               writes: typing.List[TowerWrite], takers: Takers, frames: Frames,
               reads_of_updates: typing.Container[str] = ()) -> typing.List[Hold]:
    """Finds the reads that each write has to wait for.

    Args:
      towers: all towers.
      reads: the operations that the towers' fetches need.
      writes: the writes.
      takers: {name of a variable: the operations that take it}.
      frames: the loops and branches around all these operations.
      reads_of_updates: names of the operations that the towers' updates need. What every tower
        writes waits for these reads, too: rows that an update computes from the variable are
        computed from what was there before the step, in all towers.
    """
    finder = Writes(tf.get_default_graph())
    read_ends = _ReadEnds(towers, frames)
    others = _OtherWrites(writes, _steps_of_one_loss(towers[0]))
    holds = []
    for write in writes:
        all_held = operations_to_hold(write.op, [write.variable], frames)
        if not all_held:
            continue
        variable = write.op.graph.get_operation_by_name(write.variable)
        certain = names_of(finder.readers(variable))
        for reader in takers[write.variable]:
            is_of_outputs = reader.name in reads
            if not is_of_outputs and not (write.is_every and reader.name in reads_of_updates):
                continue
            if others.is_write_that_need_not_be_first(reader, write):
                continue
            ends = read_ends.of(reader)
            if not ends:
                continue
            for held in all_held:
                is_certain = is_of_outputs and reader.name in certain
                holds.append(Hold(held, reader, ends, write, is_certain))
    return holds


class _OtherWrites:
    """Tells writes, which take their variable as a read does, from other reads."""

    def __init__(self, writes: typing.List[TowerWrite],
                 steps_of_losses: typing.List[typing.Set[str]]):
        """
        Args:
          writes: the writes of the towers.
          steps_of_losses: for each loss with a name, the names of the operations that its step
            runs, see `_steps_of_one_loss`.
        """
        self._writes = {write.op.name: write for write in writes}
        self._steps_of_losses = steps_of_losses

    def is_write_that_need_not_be_first(self, op: tf.Operation, write: TowerWrite) -> bool:
        """Whether an operation is a write of the same variable that `write` need not wait for.

        There are three reasons: it is `write` itself; every tower writes the variable, and such
        writes are in the order of the towers already; or some loss has a step that runs `write` but
        not the operation, and a wait would make it run that, too.

        Args:
          op: an operation that takes the variable.
          write: the write.
        """
        other = self._writes.get(op.name)
        if other is None:
            return False
        if op is write.op:
            return True
        if other.is_every and write.is_every:
            return True
        return _is_of_another_loss(op, write.op, self._steps_of_losses)


def _is_of_another_loss(reader: tf.Operation, writer: tf.Operation,
                        steps: typing.List[typing.Set[str]]) -> bool:
    """Whether the step of some loss runs `writer`, but not `reader`.

    Args:
      reader, writer: operations.
      steps: for each loss with a name, the names of the operations that its step runs.
    """
    return any(writer.name in step and reader.name not in step for step in steps)


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
        self._training: typing.Optional[typing.Set[str]] = None

    def of(self, reader: tf.Operation) -> typing.List[tf.Operation]:
        """List of operations each of which comes after a read, those of the forward pass first."""
        ends = self._frames.ends(reader)
        if ends == [reader]:
            return ends
        # Not operations that only predictions need: a training step does not run them.
        training = self._in_training()
        ends = [end for end in ends if end.name in training]
        return sorted(ends, key=self._is_backward)

    def _in_training(self) -> typing.Set[str]:
        """Set of the names of the operations that a training step runs."""
        if self._training is None:
            fetches = []
            for tower in self._towers:
                fetches += fetches_without_updates(tower._replace(predictions=None))
            self._training = names_of(step_operations(fetches))
        return self._training

    def _is_backward(self, op: tf.Operation) -> bool:
        """Whether an operation is of the backward pass of a tower."""
        return any(op.name in tower.backward for tower in self._towers)


def _steps_of_one_loss(tower: Tower) -> typing.List[typing.Set[str]]:
    """For each loss with a name, the set of the names of the operations that its step runs; [] for
    a single loss."""
    if not isinstance(tower.loss, dict):
        return []
    steps = []
    for name in tower.loss:
        gradients = gradients_of(tower.gradients.get(name, ()))
        fetches = fetches_in([tower.data_loss[name], gradients])
        steps.append(names_of(step_operations(fetches)))
    return steps


# ---- the updates of every tower ------------------------------------------------------------------

def updates_that_write(towers: typing.Sequence[Tower],
                       names: typing.Iterable[str]) -> typing.List[tf.Operation]:
    """Finds the updates of counters in the towers after the first, which all towers run; updates of
    batch norm and the like come from the first tower only.

    Args:
      towers: all towers.
      names: names of the counters.

    Returns:
      List of the operations to run, in the order of their names.
    """
    variables = set(names)
    if not variables:
        return []
    finder = Writes(tf.get_default_graph())
    found: Operations = {}
    for tower in towers[1:]:
        step = step_operations(tower.updates)
        writing = [op for op in tower.own(step) if variables.intersection(finder.of(op))]
        if not writing:
            continue
        frames = Frames(step)
        for op in writing:
            found.update(by_name(frames.ends(op) or [op]))
    return in_order_of_names(found)
