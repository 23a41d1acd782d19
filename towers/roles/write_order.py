"""The order of the towers' writes of shared variables after their reads, before the update.

A model may read variables and then write them, in its forward pass or by `UPDATE_OPS`. On one
device its control dependencies say which comes first. Over several towers the order depends on the
role of the variable:

    FIRST    only tower 0 writes, when all towers have read. Tower 0 keeps the model's control
             dependencies; where there is none, the reads that the loss or a gradient needs come
             first
    OWN      each tower writes its own variable, when it has read it, as tower 0 does with FIRST
    EVERY    each tower writes when all towers have read, and after the tower before; see
             `_write_in_order`
    METRIC   see `metric_counters`

With `update_ops='all'` towers write one after the other: see `write_in_turn`. With
`update_ops='none'` no waits are needed: of the writes, only those are left whose new value the loss
uses, and this use waits for the write.

Its test is `tests/roles/test_write_order.py`.
"""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.tower import Tower, name_in_copy
from towers.graph.graph_walk import by_name, in_order_of_names, step_operations
from towers.graph.order import Frames, topological_order
from towers.graph.variable_access import Writes
from towers.graph.waits import Precedence, Wait, Waits
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
from towers.roles.variable_roles import EVERY, FIRST, METRIC, OWN, Roles


def write_after_reads(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[Wait]:
    """Makes the writes of variables wait for all towers' reads of these variables; returns what
    waits for what.

    The model may want to read the new value: then a read waits for a write by the model's own
    control dependencies. Where tower 0 writes for all, or a tower writes its own state, such a read
    is left as it is: `Waits` adds no wait of the write for it, which would close a circle. Where an
    operation of tower 0 waits for a write for all, its copies wait for this same write, so that all
    towers read the new value, or none does. Where every tower writes, a read that waits for a write
    is refused: it would see the writes of some towers, and not of the others.

    Args:
      towers: all towers; with accumulation a `Tower` for each micro-batch of each.
      roles: the roles of the variables.
    """
    finder = Writes(tf.get_default_graph())
    role_of = _roles_to_order(roles)
    if not role_of:
        return []
    takers = takers_of(role_of, finder)
    reads = _reads_of_passes(towers)
    # Each tower may also write state of its own, by values that it reads from shared variables.
    update_ops = all_of_step(updates_of_step(towers, roles))
    run_by_update_ops = by_name(step_operations(update_ops))
    step = _operations_of_step(towers[0], update_ops, reads)
    writes = _find_writes(towers, takers, role_of, step, finder)
    frames = Frames(list(step.values()))
    holds = find_holds(towers, reads, writes, takers, frames, run_by_update_ops)
    writes_of_every_tower = [write for write in writes if write.has_role_every]
    waits = Waits(held_by(holds) + [write.op for write in writes_of_every_tower])
    _write_in_order(writes_of_every_tower, towers, reads, waits)
    add_waits(holds, waits)
    return waits.put_into_graph(finder)


def _roles_to_order(roles: Roles) -> typing.Dict[str, str]:
    """{name of a variable whose writes are ordered here: its role}. It also has the variables in
    which the copies keep their own state, and which `Roles.role_of` lacks, as the model has not
    made them."""
    role_of = {}
    for name, role in roles.role_of.items():
        if role != METRIC:  # `metric_counters` orders the writes of metrics
            role_of[name] = role
    for variable in roles.own_variables(first=1):
        role_of[variable.op.name] = OWN
    return role_of


def _reads_of_passes(towers: typing.Sequence[Tower]) -> Operations:
    """The operations of the forward and backward passes whose reads have to come before the writes:
    all operations that losses and gradients need. In the towers after the first also the operations
    that predictions alone need.

    On one device nothing says whether a prediction reads before or after a write. Tower 0 leaves
    this open, as the program does. In the other towers a prediction reads before the write.
    """
    tower_0 = towers[0]._replace(predictions=None)
    return by_name(step_operations(fetches_without_updates([tower_0, *towers[1:]])))


def _operations_of_step(tower_0: Tower, update_ops: list, reads: Operations) -> Operations:
    """The operations of a step: the `reads`, all that the predictions of tower 0 run, and all that
    the update ops run."""
    fetches = fetches_without_updates([tower_0]) + update_ops
    # The search ends at the reads: all operations that `reads` need are themselves among `reads`.
    operations = by_name(step_operations(fetches, ends=reads))
    operations.update(reads)
    return operations


def _find_writes(towers: typing.Sequence[Tower], takers: Takers, role_of: typing.Dict[str, str],
                 step: Operations, finder: Writes) -> typing.List[TowerWrite]:
    """Finds the writes in a step that are to wait: tower 0's writes of the variables with the role
    `FIRST`, and every tower's writes of the others.

    Args:
      towers: all towers.
      takers: {name of a variable: the operations that take it}.
      role_of: {name of a variable: its role}.
      step: the operations of the step.
      finder: finds the writes of the graph.
    """
    writes = []
    for variable_name, operations in takers.items():
        role = role_of[variable_name]
        writing_towers = towers[:1] if role == FIRST else towers
        for op in operations:
            is_write = op.name in step and variable_name in finder.written_by(op)
            if not is_write:
                continue
            for index, tower in enumerate(writing_towers):
                if tower.has(op.name):
                    writes.append(TowerWrite(index, op, variable_name, role == EVERY))
    return writes


def _write_in_order(writes: typing.List[TowerWrite], towers: typing.Sequence[Tower],
                    reads: Operations, waits: Waits) -> None:
    """Makes the writes of a variable by every tower come one after the other; adds this to the
    waits.

    All towers make the program's first write of the variable, then all of them the second one. So
    what the program does between the two writes, for instance tower 0's count of steps, happens
    between all first and all second writes.

    Args:
      writes: the writes.
      towers: all towers.
      reads: the operations of the forward and backward passes.
      waits: the waits.
    """
    by_variable: typing.Dict[str, typing.List[TowerWrite]] = collections.OrderedDict()
    for write in writes:
        by_variable.setdefault(write.variable_name, []).append(write)
    for writes_of_variable in by_variable.values():
        turns = _TurnsToWrite(writes_of_variable, towers, reads)
        for former, later in turns.pairs_in_order():
            reason = 'tower %d writes variable %s before it' % (former.tower, former.variable_name)
            if not waits.add(later.op, former.op, reason):
                raise SharedVariableError(
                    'every tower writes variable %s in its turn, and tower %d does so before tower '
                    '%d (operations %s, %s): let no tower wait for another one.' % (
                        later.variable_name, later.tower, former.tower, later.op.name,
                        former.op.name))


class _TurnsToWrite:
    """The order in which all towers write one variable."""

    def __init__(self, writes: typing.List[TowerWrite], towers: typing.Sequence[Tower],
                 reads: Operations):
        """
        Args:
          writes: the writes of the variable by all towers.
          towers: all towers; with accumulation a `Tower` for each micro-batch of each.
          reads: the operations of the forward and backward passes.
        """
        self._towers = towers
        self._reads = reads
        self._has_micro_batches = any(tower.micro_batch for tower in towers)
        self._steps_of_losses = steps_of_losses(towers[0])
        of_tower_0 = by_name(write.op for write in writes if write.tower == 0)
        self._in_program = Precedence(in_order_of_names(of_tower_0))
        # {name of a write in a copy, see `name_in_copy`: the write of tower 0}
        self._original: typing.Dict[str, tf.Operation] = {}
        # {name of a write of tower 0: its number among these, in the order of the program}
        self._number: typing.Dict[str, int] = {}
        in_order = topological_order(in_order_of_names(of_tower_0), self._writes_before)
        for number, op in enumerate(in_order):
            self._number[op.name] = number
            self._original[name_in_copy(op.name, towers[0].name_scope)] = op
        self._writes = sorted(writes, key=self._turn)

    def pairs_in_order(self) -> typing.List[typing.Tuple[TowerWrite, TowerWrite]]:
        """List of `(a write, a write that has to come after it)`."""
        pairs = list(zip(self._writes, self._writes[1:]))
        if not self._steps_of_losses:
            return pairs
        # With several losses, each loss has a step of its own, and a step must not run the update
        # ops of another loss. So two different writes of the program are ordered only where the
        # program orders them: a step that runs the later one then runs the earlier one anyway.
        # (Micro-batches go with one loss, so that all copies of a write come one after the other.)
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
        """The key by which the writes are sorted: those of forward passes come before those of
        update ops."""
        number = self._number[self._of_tower_0(write).name]
        is_in_forward_pass = write.op.name in self._reads
        if is_in_forward_pass and self._has_micro_batches:
            # A micro-batch begins when the one before has ended. So it makes all of its writes when
            # the one before has made its own; and towers are in the order of their examples.
            return (0, write.tower, number)
        return (0 if is_in_forward_pass else 1, number, write.tower)


def add_waits(holds: typing.List[Hold], waits: Waits) -> None:
    """Makes writes come after the reads that they are held for; adds this to the waits.

    A hold whose read waits for the write already adds none: the model wants to read the new value.

    Raises:
      SharedVariableError: a read that waits for a write which every tower does; or a read that can
        not come before the write, though the program does not say that it comes after.
    """
    def is_after_any_write(hold: Hold) -> bool:
        """Whether the read of a hold waits for some write already, of whichever variable."""
        return all(map(waits.follows_any, hold.ends))

    # Say that a read of v waits for a write of w. A hold of this read makes a chain:
    #     write of w  <-  read of v  <-  write of v         (`<-`: is waited for by)
    # Then the write of w can no longer wait for what comes after the write of v, though another
    # hold may ask for that: its wait would close a circle, and would be left out. So the other
    # holds are added first, and the holds of such reads last (False is sorted before True).
    program: typing.Optional[_Program] = None  # made when it is needed
    for hold in sorted(holds, key=is_after_any_write):
        if _add_wait(hold, waits) or not hold.certainly_reads:
            continue
        program = program or _Program(holds)
        if not program.wants_new_value(hold):
            # The program does not order the read after the write: waits of another tower do.
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) before this step writes it (operation '
                '%s), but the write comes before what the read waits for in another tower: let '
                'the read wait for less, by tf.control_dependencies.' % (
                    hold.write.variable_name, hold.ends[0].name, hold.held.name))
        if hold.write.has_role_every:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (hold.write.variable_name, hold.ends[0].name, hold.held.name))


class _Program:
    """The order that the graph gives without the waits that are being added, which are no edges of
    it yet: that of the program; with `update_ops='all'` also the turns of the passes, which are
    edges already."""

    def __init__(self, holds: typing.Iterable[Hold]):
        """`holds` have the writes of the variables."""
        self._held_by_variable: typing.Dict[str, Operations] = collections.defaultdict(dict)
        held: Operations = {}
        for hold in holds:
            held[hold.held.name] = hold.held
            self._held_by_variable[hold.write.variable_name][hold.held.name] = hold.held
        self._order = Precedence(in_order_of_names(held))

    def wants_new_value(self, hold: Hold) -> bool:
        """Whether the read of a hold waits for a write of its variable, by any tower."""
        writes_of_variable = self._held_by_variable[hold.write.variable_name].values()

        def waits_for_write_of_variable(end: tf.Operation) -> bool:
            """Whether an end of the read waits for a write of the variable that is read."""
            return any(self._order.waits_for(end, op) for op in writes_of_variable)
        return all(map(waits_for_write_of_variable, hold.ends))


def _add_wait(hold: Hold, waits: Waits) -> bool:
    """Adds the wait of a hold for one of its ends: the first end for which the wait closes no
    circle. Returns whether there is such an end."""
    for end in hold.ends:
        reader = 'it' if end is hold.reader else hold.reader.name
        reason = '%s reads variable %s before this write' % (reader, hold.write.variable_name)
        if waits.add(hold.held, end, reason):
            return True
    return False
