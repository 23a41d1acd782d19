"""The order of the towers' writes of shared variables after their reads, before the update.

A model may read variables and then write them, in its forward pass or by `UPDATE_OPS`. On one
device its control dependencies say which comes first. Over several towers the order depends on the
role of the variable:

    FIRST    only tower 0 writes, when all towers have read. Tower 0 keeps the model's control
             dependencies; where there is none, the reads that the loss or a gradient needs come
             first
    EVERY    each tower writes when all towers have read, and after the tower before; see
             `_write_in_order`
    METRIC   see `metric_counters`

With `update_ops='all'` towers write one after the other: see `write_in_turn`.
"""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    by_name,
    in_order_of_names,
    step_operations,
)
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.order import Frames, topological_order
from towers.graph.variable_access import Writes
from towers.graph.waits import Precedence, Wait, Waits
from towers.placement.tower_device import stages_of
from towers.roles.reads_before_writes import (
    Hold,
    Operations,
    Takers,
    TowerWrite,
    fetches_without_updates,
    find_holds,
    held_by,
    steps_of_losses,
    takers_of,
)
from towers.roles.step_updates import all_of_step, updates_of_step
from towers.roles.variable_roles import EVERY, METRIC, Roles


def write_after_reads(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[Wait]:
    """Makes tower 0's writes, and every tower's writes of variables with the role `EVERY`, wait for
    all towers' reads of these variables; returns what waits for what.

    The model may want to read the new value: then a read waits for a write by the model's own
    control dependencies. Where tower 0 writes for all, such a read is left as it is: `Waits` adds
    no wait of the write for it, which would close a circle. Where tower 0 waits for its write, the
    copies also wait for this write, so that all towers read the new value, or none does. Where
    every tower writes, a read that waits for a write is refused: it would see the writes of some
    towers, and not of the others.
    """
    finder = Writes(tf.get_default_graph())
    # `role_of` has the variables that a step writes before the update. `metric_counters` orders the
    # writes of metrics.
    names = [name for name, role in roles.role_of.items() if role != METRIC]
    if not names:
        return []
    takers = takers_of(names, finder)
    reads = _forward_reads(towers)
    does_every_tower_write = bool(roles.names(EVERY))
    writing_towers = towers if does_every_tower_write else towers[:1]
    # Each tower may also write state of its own, by values that it reads from shared variables.
    updates = all_of_step(updates_of_step(towers, roles))
    operations_of_updates = by_name(step_operations(updates))
    step = _operations_of_step(writing_towers, updates, reads)
    writes = _find_writes(towers, takers, roles, step, finder)
    frames = Frames(list(step.values()))
    holds = find_holds(towers, reads, writes, takers, frames, operations_of_updates)
    writes_of_every_tower = [write for write in writes if write.has_role_every]
    waits = Waits(held_by(holds) + [write.op for write in writes_of_every_tower])
    _write_in_order(writes_of_every_tower, towers, reads, waits)
    add_waits(holds, waits)
    return waits.put_into_graph(finder)


def _forward_reads(towers: typing.Sequence[Tower]) -> Operations:
    """The operations whose reads have to come before the writes: all operations that losses and
    gradients need. In the towers after the first also the operations that predictions alone need.

    On one device nothing says whether a prediction reads before or after a write. Tower 0 leaves
    this open, as the program does. In the other towers a prediction reads before the write.
    """
    tower_0 = towers[0]._replace(predictions=None)
    return by_name(step_operations(fetches_without_updates([tower_0, *towers[1:]])))


def _operations_of_step(writing_towers: typing.Sequence[Tower], updates: list,
                        reads: Operations) -> Operations:
    """The operations of a step: the `reads`, all operations that the forward and backward passes of
    the towers that write run, and all that the `updates` run."""
    fetches = fetches_without_updates(writing_towers) + updates
    # The search ends at the reads: all operations that `reads` need are themselves among `reads`.
    operations = by_name(step_operations(fetches, ends=reads))
    operations.update(reads)
    return operations


def check_references_in_loops(towers: typing.Sequence[Tower]) -> None:
    """Refuses a loop (v1) of a tower that takes a reference variable of another device: the step
    would never end, as in a hand-written tower loop (measured on 1.15.5 and 2.21)."""
    device_of_tower_0 = stages_of(towers[0].device)[0]
    # A `RefEnter` leads the memory of a reference variable into a loop: from the variable, or from
    # a write of it, whose result is the same memory.
    entering = [op for op in tf.get_default_graph().get_operations() if op.type == 'RefEnter']
    for tower in towers:
        for op in tower.own(entering):
            variable = _reference_variable(op)
            # A variable without a device is from before the build. TensorFlow puts it on the device
            # that it prefers, the first GPU or else the CPU, which is taken to be tower 0's. It
            # puts a taker without a device ('') beside the variable.
            devices_beside_variable = {'', variable.device or device_of_tower_0}
            taker_devices = {taker.device for taker in op.outputs[0].consumers()}
            is_taken_elsewhere = not taker_devices <= devices_beside_variable
            if is_taken_elsewhere:
                raise SharedVariableError(
                    'a loop of tower %d (operation %s) takes the reference variable %s, which is '
                    'on another device, or waits for a write of it, and would never end: make it '
                    'with use_resource=True.' % (tower.index, op.name, variable.name))


def _reference_variable(op: tf.Operation) -> tf.Operation:
    """The operation of the reference variable that an operation hands on or writes. (An `Assign`
    gives the variable that it writes as its result.)"""
    while op.type not in VARIABLE_OPS:
        op = op.inputs[0].op
    return op


def _find_writes(towers: typing.Sequence[Tower], takers: Takers, roles: Roles, step: Operations,
                 finder: Writes) -> typing.List[TowerWrite]:
    """Finds the writes in a step that are to wait: every tower's writes of the variables with the
    role `EVERY`, and tower 0's writes of all other variables.

    Args:
      towers: all towers.
      takers: {name of a variable: the operations that take it}.
      roles: the roles of the variables.
      step: the operations of the step.
      finder: finds the writes of the graph.
    """
    writes = []
    for variable, operations in takers.items():
        has_role_every = roles.role_of[variable] == EVERY
        writing_towers = towers if has_role_every else towers[:1]
        for op in operations:
            is_write = op.name in step and variable in finder.written_by(op)
            if not is_write:
                continue
            for index, tower in enumerate(writing_towers):
                if tower.has(op.name):
                    writes.append(TowerWrite(index, op, variable, has_role_every))
    return writes


def _write_in_order(writes: typing.List[TowerWrite], towers: typing.Sequence[Tower],
                    reads: Operations, waits: Waits) -> None:
    """Makes the writes of a variable by every tower come one after the other; adds this to the
    waits.

    All towers make the program's first write of the variable, then all of them the second one: what
    is between the two in the program, as a counter of tower 0, then comes between them everywhere.

    Args:
      writes: the writes.
      towers: all towers.
      reads: the operations of the forward and backward passes.
      waits: the waits.
    """
    by_variable: typing.Dict[str, typing.List[TowerWrite]] = collections.OrderedDict()
    for write in writes:
        by_variable.setdefault(write.variable, []).append(write)
    for writes_of_variable in by_variable.values():
        turns = _TurnsToWrite(writes_of_variable, towers, reads)
        for former, later in turns.neighbours():
            reason = 'tower %d writes variable %s before it' % (former.tower, former.variable)
            if not waits.add(later.op, former.op, reason):
                raise SharedVariableError(
                    'every tower writes variable %s in its turn, and tower %d does so before tower '
                    '%d (operations %s, %s): let no tower wait for another one.' % (
                        later.variable, later.tower, former.tower, later.op.name, former.op.name))


class _TurnsToWrite:
    """The order in which all towers write one variable."""

    def __init__(self, writes: typing.List[TowerWrite], towers: typing.Sequence[Tower],
                 reads: Operations):
        """
        Args:
          writes: the writes of the variable by all towers.
          towers: all towers.
          reads: the operations of the forward and backward passes.
        """
        self._towers = towers
        self._reads = reads
        self._has_micro_batches = any(tower.micro_batch for tower in towers)
        self._steps_of_losses = steps_of_losses(towers[0])
        of_tower_0 = by_name(write.op for write in writes if write.tower == 0)
        self._in_program = Precedence(in_order_of_names(of_tower_0))
        # {name of a write in a copy, without its scope: the write of tower 0}
        self._original: typing.Dict[str, tf.Operation] = {}
        # {name of a write of tower 0: its number among these, in the order of the program}
        self._number: typing.Dict[str, int] = {}
        in_order = topological_order(in_order_of_names(of_tower_0), self._writes_before)
        for number, op in enumerate(in_order):
            self._number[op.name] = number
            scope = towers[0].name_scope
            name_in_copy = 'outside/' + op.name  # of an operation that has left the scope
            if op.name.startswith(scope):
                name_in_copy = op.name[len(scope):]
            self._original[name_in_copy] = op
        self._writes = sorted(writes, key=self._turn)

    def neighbours(self) -> typing.List[typing.Tuple[TowerWrite, TowerWrite]]:
        """List of `(a write, the write that comes next)`."""
        pairs = list(zip(self._writes, self._writes[1:]))
        if not self._steps_of_losses:
            return pairs
        # With several losses, each loss has a step of its own, and a step must not run a write of
        # another loss's update. So different writes of the program are ordered where it orders
        # them: then both are in one step.
        ordered = [pair for pair in pairs if self._of_tower_0(pair[0]) is self._of_tower_0(pair[1])]
        for former, later in itertools.permutations(self._writes, 2):
            op = self._of_tower_0(later)
            earlier_op = self._of_tower_0(former)
            if op is not earlier_op and self._in_program.waits_for(op, earlier_op):
                ordered.append((former, later))
        return ordered

    def _of_tower_0(self, write: TowerWrite) -> tf.Operation:
        """The write of tower 0 that a write is a copy of; of a write of tower 0, itself."""
        if write.tower == 0:
            return write.op
        return self._original[write.op.name[len(self._towers[write.tower].name_scope):]]

    def _writes_before(self, op: tf.Operation) -> typing.Set[str]:
        """Set of the names of tower 0's other writes that a write of tower 0 waits for."""
        return {other.name for other in self._in_program.tracked
                if other is not op and self._in_program.waits_for(op, other)}

    def _turn(self, write: TowerWrite) -> tuple:
        """The key by which the writes are sorted: those of forward passes come before updates."""
        number = self._number[self._of_tower_0(write).name]
        is_in_forward_pass = write.op.name in self._reads
        if is_in_forward_pass and self._has_micro_batches:
            # The forward pass of a micro-batch begins when that of the one before has ended.
            return (0, write.tower, number)
        return (0 if is_in_forward_pass else 1, number, write.tower)


def add_waits(holds: typing.List[Hold], waits: Waits) -> None:
    """Makes writes come after the reads that they are held for; adds this to the waits.

    A hold whose read waits for the write already adds none: the model wants to read the new value.

    Raises:
      SharedVariableError: a read that waits for a write which every tower does; or a read that can
        not come before the write, though the program does not say that it comes after.
    """
    def comes_after_a_write(hold: Hold) -> bool:
        """Whether the read of a hold waits for some write already."""
        return all(map(waits.follows_any, hold.ends))

    # Say that a read of v waits for a write of w. If the write of v waits for this read, it also
    # waits for the write of w. Then the write of w can wait for nothing that comes after the write
    # of v. So the holds of such reads come last (False is before True): if they were added first,
    # the waits of other holds would close a circle, and would be left out.
    program: typing.Optional[_Program] = None  # made when it is needed
    for hold in sorted(holds, key=comes_after_a_write):
        if _add_wait(hold, waits) or not hold.certainly_reads:
            continue
        program = program or _Program(holds)
        if not program.wants_new_value(hold):
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) before this step writes it (operation '
                '%s), but the write comes before what the read waits for in another tower: let '
                'the read wait for less, by tf.control_dependencies.' % (
                    hold.write.variable, hold.ends[0].name, hold.held.name))
        if hold.write.has_role_every:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (hold.write.variable, hold.ends[0].name, hold.held.name))


class _Program:
    """The order that the program itself gives: new waits are no edges of the graph yet."""

    def __init__(self, holds: typing.Iterable[Hold]):
        """`holds` have the writes of the variables."""
        self._held_by_variable: typing.Dict[str, Operations] = collections.defaultdict(dict)
        held: Operations = {}
        for hold in holds:
            held[hold.held.name] = hold.held
            self._held_by_variable[hold.write.variable][hold.held.name] = hold.held
        self._order = Precedence(in_order_of_names(held))

    def wants_new_value(self, hold: Hold) -> bool:
        """Whether the read of a hold waits for a write of its variable, by any tower."""
        writes = self._held_by_variable[hold.write.variable].values()

        def comes_after_a_write(end: tf.Operation) -> bool:
            """Whether an end of the read waits for a write."""
            return any(self._order.waits_for(end, op) for op in writes)
        return all(map(comes_after_a_write, hold.ends))


def _add_wait(hold: Hold, waits: Waits) -> bool:
    """Adds the wait of a hold for one of its ends: the first end for which the wait closes no
    circle. Returns whether there is such an end."""
    for end in hold.ends:
        reader = 'it' if end is hold.reader else hold.reader.name
        reason = '%s reads variable %s before this write' % (reader, hold.write.variable)
        if waits.add(hold.held, end, reason):
            return True
    return False
