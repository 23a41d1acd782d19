"""The order of a step's writes after its reads: of the towers' forward passes, and of the update.

Variables that a model reads and then writes, in its forward pass or by `UPDATE_OPS`, by role:
`'first'`: tower 0 alone writes, when all towers have read. Tower 0 keeps the model's control
dependencies; without one, each read that the loss or a gradient needs comes first. `'every'`: each
tower writes when all have read, after the tower before. `'metric'`: see `metric_counters`. With
`update_ops='all'` towers write one after the other: see `write_in_turn`.

In the update, two kinds of writes do not wait by themselves. An optimizer may write beside the
gradients: AdamW decays a weight before it applies the gradient, a counter goes up first, while a
backward pass may still read: the memory of a reference variable, the weights once more in what is
recomputed, and on parameter servers all that the other workers compute from. And updates such as
batch norm's write, on a parameter server, a variable that other workers' forward passes of the same
step read; where all data have ended they must not run at all. Both are found in the finished step.
"""

import collections
import functools
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.gradients.gradient_pairs import tensors_of
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in
from towers.graph.op_types import READS, VARIABLE_OPS, is_fused_batch_norm
from towers.graph.order import Frames, Precedence, Waits, to_hold, to_wait_for
from towers.graph.variable_access import (
    REFERENCE_VARIABLES,
    Writes,
    is_variable,
    read_from,
    variable_op,
)
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.roles.ownership import EVERY, FIRST, METRIC


class _Write(typing.NamedTuple):
    """A write of a tower before the update."""
    tower: int  # number
    op: tf.Operation
    variable: str  # name
    is_every: bool  # whether every tower writes the variable


class _Hold(typing.NamedTuple):
    """A write, and a read that it is to wait for."""
    held: tf.Operation  # what has to wait, see `to_hold`
    ends: typing.List[tf.Operation]  # each comes after the read, see `Frames.ends`
    write: _Write
    is_certain: bool  # that it reads: a reference variable's memory may be read by what follows


# ---- of the towers -------------------------------------------------------------------------------

def write_after_reads(towers, roles):
    """Makes each write of the first tower, or of every tower, wait for all towers' reads.

    A read that already waits for the write of tower 0, in any tower, is left as it is; where every
    tower writes, outside of control flow, it is refused.

    No wait closes a circle. Copies have tower 0's order, and a read that waits for a write does so
    in all towers: what would be a circle over several towers is one in tower 0 alone, which `Waits`
    leaves out, but for the turns of the towers, which only go up.
    """
    graph = tf.get_default_graph()
    finder = Writes(graph)
    takers = {name: finder.takers(graph.get_operation_by_name(name), memory=True)
              for name, role in roles.written.items() if role != METRIC}
    if not takers:
        return
    writing_towers = towers if roles.names(EVERY) else towers[:1]
    read_fetches = _fetches(towers[0]._replace(predictions=None))
    for tower in towers[1:]:
        read_fetches += _fetches(tower)
    reads = {op.name: op for op in graph_walk.step_operations(read_fetches)}
    write_fetches = []
    for tower in writing_towers:
        write_fetches += _fetches(tower) + list(tower.updates)
    step = {op.name: op for op in graph_walk.step_operations(write_fetches, reads)}
    step.update(reads)
    writes = _writes(writing_towers, takers, roles, step, finder)
    holds = _holds(towers, reads, writes, takers, Frames(list(step.values())), finder)
    _add_waits(holds, [write for write in writes if write.is_every], finder)


def check_references_in_loops(towers):
    """Refuses a loop (v1) of a tower that takes a reference variable of another device, such as one
    that waits for a write of it: TensorFlow never ends it, in a hand-written tower loop either
    (measured on 1.15.5 and 2.21)."""
    for op in tf.get_default_graph().get_operations():
        of_tower = [tower for tower in towers if tower.has(op.name)]
        if op.type != 'RefEnter' or not of_tower:
            continue
        variable = op.inputs[0].op
        while variable.type not in VARIABLE_OPS:
            variable = variable.inputs[0].op
        device = variable.device or stages_of(towers[0].device)[0]
        if any(taker.device and taker.device != device for taker in op.outputs[0].consumers()):
            raise SharedVariableError(
                'a loop of tower %d (operation %s) takes the reference variable %s, which is on '
                'another device, or waits for a write of it, and would never end: make it with '
                'use_resource=True.' % (of_tower[0].index, op.name, variable.name))


def _writes(towers, takers, roles, step, finder):
    """The `_Write`s of some towers among the operations `step`, {name: operation}: a list."""
    writes = []
    for variable, operations in takers.items():
        is_every = roles.written[variable] == EVERY
        writing_towers = towers if is_every else towers[:1]
        for op in operations:
            if op.name not in step or variable not in finder.of(op):
                continue
            writes += [_Write(number, op, variable, is_every)
                       for number, tower in enumerate(writing_towers) if tower.has(op.name)]
    return writes


def _add_waits(holds, every, finder):
    """Has writes wait for reads, and each tower's of the writes `every` for those of the tower
    before."""
    waits = Waits([hold.held for hold in holds] + [write.op for write in every])
    for former, later in itertools.permutations(every, 2):
        if former.tower + 1 == later.tower and former.variable == later.variable:
            if not waits.add(later.op, former.op):
                raise SharedVariableError(
                    'every tower writes variable %s in its turn, and tower %d does so before tower '
                    '%d (operations %s, %s): let no tower wait for another one.' % (
                        later.variable, later.tower, former.tower, later.op.name, former.op.name))
    # Those that follow some write are the last: each of them rules out more others.
    holds.sort(key=lambda hold: all(waits.follows_any(end) for end in hold.ends))
    for held, ends, write, is_certain in holds:
        is_added = any(waits.add(held, end) for end in ends)
        if not is_added and write.is_every and is_certain:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (write.variable, ends[0].name, held.name))
    waits.put_into_graph(finder)


def _holds(towers, reads, writes, takers, frames, finder):
    """The `_Hold`s of the writes, a list. `reads` are the operations that the towers' fetches need,
    {name: operation}; `takers` are those that take each variable."""
    writes_by_name = {write.op.name: write for write in writes}
    steps = _steps_of_one_loss(towers[0])
    find_ends = _Ends(towers, frames)
    holds = []
    for write in writes:
        certain = {op.name for op in finder.readers(write.op.graph.get_operation_by_name(
            write.variable))}
        held = to_hold(write.op, [write.variable], frames)
        for reader in takers[write.variable] if held else ():
            if reader.name not in reads or reader is write.op:
                continue
            other = writes_by_name.get(reader.name)
            if other is not None and other.is_every and write.is_every:
                continue  # they are in turn
            if other is not None and _is_of_another_loss(reader, write.op, steps):
                continue
            ends = find_ends(reader)
            if ends:
                is_certain = reader.name in certain
                holds += [_Hold(each, ends, write, is_certain) for each in held]
    return holds


def _is_of_another_loss(reader, writer, steps):
    """Whether the step of some loss runs an operation that writes, and not the one that reads."""
    return any(writer.name in step and reader.name not in step for step in steps)


class _Ends:
    """Finds the operations that come after a read, those of the forward pass first."""

    def __init__(self, towers, frames):
        self._towers, self._frames = towers, frames
        self._trained = None

    def __call__(self, reader):
        ends = self._frames.ends(reader)
        if ends == [reader]:
            return ends
        # Not operations that only predictions need: a training step does not run them.
        ends = [end for end in ends if end.name in self._in_training()]
        return sorted(ends, key=self._is_backward)

    def _in_training(self):
        if self._trained is None:
            fetches = []
            for tower in self._towers:
                fetches += _fetches(tower._replace(predictions=None))
            self._trained = {op.name for op in graph_walk.step_operations(fetches)}
        return self._trained

    def _is_backward(self, op):
        return any(op.name in tower.backward for tower in self._towers)


def _steps_of_one_loss(tower):
    """Sets of the names of the operations that a step of one loss runs; [] of a single loss."""
    if not isinstance(tower.loss, dict):
        return []
    return [{op.name for op in graph_walk.step_operations(fetches_in(
        [tower.data_loss[name], [gradient for gradient, _ in tower.gradients.get(name, ())]]))}
            for name in tower.loss]


def write_in_turn(towers, roles):
    """Makes the writes of shared variables by all towers come one tower after the other, so that N
    towers' moving averages are N steps of the average: the order of `update_ops='all'`.

    In the forward pass, where some tower writes a variable, a tower takes it when the tower before
    has done with it. An update does so, too, when all forward passes have read. Where it cannot,
    since its value and the loss share a read, it is refused. Micro-batches come before towers.
    """
    finder = Writes(tf.get_default_graph())
    written = _variables_named(roles.names(FIRST))
    towers = sorted(towers, key=lambda tower: (tower.micro_batch, tower.index))
    forward = {}
    for tower in towers:
        forward.update((op.name, op) for op in graph_walk.step_operations(_fetches(tower)))
    inline = {name: variable for name, variable in written.items()
              if any(name in finder.of(op) for op in finder.takers(variable.op)
                     if op.name in forward)}
    if inline:
        take_turns([_turns(tower, forward.values(), inline, finder) for tower in towers], finder)
    writes, turns = [], []
    for number, tower in enumerate(towers):
        turns.append([])
        for operations in _updates_alone(tower, towers, forward):
            turns[-1] += _turns(tower, operations, written, finder)
            for op, variables in _writes_among(operations, ()):
                variables = {name: written[name] for name in variables if name in written}
                _check_reads_anew(op, variables, tower, forward)
                writes += [_Write(number, op, name, False) for name in variables]
    takers = {write.variable: finder.takers(written[write.variable].op, memory=True)
              for write in writes}
    frames = Frames(list(forward.values()) + [write.op for write in writes])
    _add_waits(_holds(towers, forward, writes, takers, frames, finder), [], finder)
    take_turns(turns, finder)


def _variables_named(names):
    """{name: variable} of the graph's variables of some names."""
    return {variable.op.name: variable for variable in tf.global_variables() + tf.local_variables()
            if variable.op.name in names}


def _updates_alone(tower, towers, forward):
    """Yields for each update of a tower the tower's operations that the forward passes, whose
    operations are `forward`, do not run; for all updates at once where towers have not the same."""
    updates = [[update] for update in tower.updates]
    if len({len(each.updates) for each in towers}) > 1:
        updates = [list(tower.updates)]
    for fetches in updates:
        yield [op for op in graph_walk.step_operations(fetches)
               if tower.has(op.name) and op.name not in forward]


def _check_reads_anew(op, variables, tower, forward):
    """Refuses an update whose new value is computed from a value of its variable that the forward
    pass has read: all towers' updates would start from that one."""
    behind = graph_walk.ancestors([tensor for tensor in op.inputs if not is_variable(tensor)])
    shared = [each for each in forward.values() if each.name in behind]
    for take in takes_from_outside(tower, shared, variables):
        takers = [each for output in take.op.outputs for each in output.consumers()]
        used = [each for each in takers if each.name in behind and not _ignores_averages(each)]
        if used and not _ignores_averages(take.op):
            raise SharedVariableError(
                "update_ops='all', and the update of variable %s (operation %s) starts from a "
                'value that the forward pass has read (operation %s), so that it would be the last '
                "tower's alone: read the variable in the update, or pass update_ops='first'." % (
                    take.variable.op.name, op.name, take.op.name))


def updates_that_write(towers, names):
    """The operations among the updates of the towers after the first that write some variables.

    Updates of batch norm and the like come from one tower; updates of counters come from all.
    """
    found, names, finder = {}, set(names), Writes(tf.get_default_graph())
    for tower in towers[1:] if names else ():
        step = graph_walk.step_operations(tower.updates)
        writing = [op for op in step if tower.has(op.name) and names.intersection(finder.of(op))]
        frames = Frames(step) if writing else None
        for op in writing:
            found.update((end.name, end) for end in frames.ends(op) or [op])
    return [found[name] for name in sorted(found)]


def _fetches(tower):
    """The tensors that a step needs of a tower besides its updates."""
    return fetches_in([tower.loss, tower.data_loss, tower.predictions,
                       [gradient for gradient, _ in tower.pairs]])


def _ignores_averages(op):
    """Whether an operation is a fused batch norm in training, which takes averages in vain."""
    if not is_fused_batch_norm(op.type) or not op.get_attr('is_training'):
        return False
    attributes = op.node_def.attr
    return 'exponential_avg_factor' not in attributes or (
        attributes['exponential_avg_factor'].f == 1.)


# ---- in turn -------------------------------------------------------------------------------------

class Take(typing.NamedTuple):
    """An operation of a tower that gets a variable, or its value, from outside of the tower."""
    op: tf.Operation
    position: int  # of the input
    variable: tf.Variable


class Turn(typing.NamedTuple):
    """What a tower does with some variables."""
    scope: str  # of the tower
    takes: typing.List[Take]
    ends: typing.List[tf.Operation]  # what comes after all that it does with them


def take_turns(turns, finder):
    """Has towers take their variables one after the other.

    `turns` are lists of `Turn`s, one list a tower. Turns of the same place, an update's say, come
    after each other; a step that runs one in a tower runs it in the tower before.
    """
    waits = Waits([take.op for of_tower in turns for turn in of_tower for take in turn.takes])
    for turns_before, turns_after in zip(turns, turns[1:]):
        for former, later in zip(turns_before, turns_after):
            for take in later.takes if former.ends else ():
                _take_after(take, former.ends, later.scope, waits, finder)
    waits.put_into_graph(finder)


def _take_after(take, ends, scope, waits, finder):
    """Has an operation take a variable, or its value, after others."""
    for end in ends:
        if not waits.add(take.op, end):
            raise SharedVariableError(
                'the towers take variable %s one after the other, and operation %s of the one '
                'before waits for %s of the next: let no tower wait for a later one.' % (
                    take.variable.op.name, end.name, take.op.name))
    if take.op.inputs[take.position].op is take.variable.op:
        return
    # Its value, which was read once for all towers.
    awaited = []
    for end in ends:
        awaited += to_wait_for(end, finder)
    with tf.control_dependencies(awaited), tf.name_scope(scope), only_device(
            take.variable.device or None):
        compat.replace_input(take.op, take.position, take.variable.read_value())


def takes_from_outside(tower, operations, variables):
    """The `Take`s of some variables, {name: variable}, by a tower's `operations`: a list."""
    inside = {op.name for op in operations if tower.has(op.name)} - variables.keys()
    takes = []
    for op in operations:
        for position, tensor in enumerate(op.inputs if op.name in inside else ()):
            if tensor.op.name not in inside:
                takes += [Take(op, position, variables[source.name])
                          for source in read_from(tensor) if source.name in variables]
    return takes


def _turns(tower, operations, variables, finder):
    """The `Turn`s of a tower among some operations, which are in no order: one for each variable,
    in the order of their names."""
    operations = [op for op in operations if tower.has(op.name)]
    names = {op.name for op in operations}
    frames = Frames(operations)
    takes = collections.defaultdict(list)
    for take in takes_from_outside(tower, operations, variables):
        takes[take.variable.op.name].append(take)
    turns = []
    for name, variable in sorted(variables.items()):
        ends = {}
        for op in finder.readers(variable.op) + finder.takers(variable.op):
            found = frames.ends(op) if op.name in names else []
            # Any of them comes after `op`; one of the forward pass comes early.
            for end in sorted(found, key=lambda each: each.name in tower.backward)[:1]:
                ends[end.name] = end
        turns.append(Turn(tower.name_scope, takes[name], [ends[end] for end in sorted(ends)]))
    return turns


# ---- of the update -------------------------------------------------------------------------------

def hold_update(train_op, gradients, fetched, after, computed, waited=()):
    """Makes the writes of an update wait until all that reads their variables has been computed.

    They wait for all gradients, and for `waited`, see `Machines`; and for what the predictions read
    by operations of their own. Two writes need no new wait: one that waits for its variable's own
    gradient; and one of a variable that no gradient reads, such as a slot, if it waits for some
    gradient. Reference variables have no such exception: others read their memory late. Their
    writes wait for all that is `fetched` of a step, too.

    Args:
      gradients: list of `(gradient, variable)`, the sums over all towers and machines; `variable`
        is None for gradients of replicas.
      fetched: list of tensors: losses, and the gradients for the optimizer.
      after: operations before the optimizer, not looked at: updates wait by `hold_back`.
      computed: tensors that can be had without a step: nothing behind them gets a new wait.
    """
    pairs = [(gradient, variable) for gradient, variable in gradients if gradient is not None]
    sums = [tensor.op for tensor in tensors_of(pairs)]
    ends = {op.name for op in sums} | {getattr(each, 'op', each).name for each in after}
    operations = graph_walk.step_operations([train_op], ends)
    writes = _writes_among(operations, ends)
    if not writes:
        return
    gradient_reads = graph_walk.step_operations(sums)
    is_in_order = _InOrder(pairs, gradient_reads)
    early = [write for write in writes if not is_in_order(*write)]
    if early:
        with tf.control_dependencies(None), only_device('/cpu:0'):
            all_gradients = tf.group(*sums, name='all_gradients')
        _wait(early, [all_gradients], operations, computed)
    references = [(op, variables) for op, variables in writes
                  if any(is_in_order.is_read_memory(variable) for variable in variables)]
    if references:
        with tf.control_dependencies(None), only_device('/cpu:0'):
            all_fetched = tf.group(*fetched, name='all_fetched')
        _wait(references, [all_fetched], operations, computed)
    if waited:
        _wait(writes, waited, operations, computed)
    for variable, reads in _own_reads(computed, train_op).items():
        _wait([write for write in writes if variable in write[1]], reads, operations, computed)


def _writes_among(operations, left_out):
    """`[(operation, names of the variables that it writes)]`, without operations of the names
    `left_out`."""
    finder = Writes(tf.get_default_graph())
    writes = [(op, finder.of(op)) for op in operations if op.name not in left_out]
    return [(op, variables) for op, variables in writes if variables]


class _InOrder:
    """Whether a write of the update comes after all gradients that read its variables."""

    def __init__(self, pairs, gradient_reads):
        """`gradient_reads` are the operations that the gradients of `pairs` are computed by."""
        # Of rows the values, which the backward pass computes after their indices.
        self._gradients = [getattr(gradient, 'values', gradient).op for gradient, _ in pairs]
        self._own = {variable.op.name: op for op, (_, variable) in zip(self._gradients, pairs)
                     if variable is not None}
        self._read = {op.name: op for op in gradient_reads}
        self._order = Precedence(self._gradients)

    def __call__(self, op, variables):
        return all(self._of_variable(op, variable) for variable in variables)

    def _of_variable(self, op, variable):
        if self.is_read_memory(variable):
            return False
        if variable in self._own:
            return self._order.waits_for(op, self._own[variable])
        waits = [self._order.waits_for(op, gradient) for gradient in self._gradients]
        return all(waits) if variable in self._read else any(waits)

    def is_read_memory(self, variable):
        """Whether gradients read the variable of that name, and it is a reference variable."""
        return variable in self._read and self._read[variable].type in REFERENCE_VARIABLES


def _own_reads(computed, train_op):
    """{name of a resource variable: the reads of it that `computed` tensors need and the step does
    not}. Only those that make no other operation run."""
    step = {op.name for op in graph_walk.step_operations([train_op])}
    reads = collections.defaultdict(list)
    for op in graph_walk.step_operations(computed):
        if op.name in step or op.type not in READS or compat.in_control_flow(op):
            continue
        variable = variable_op(op.inputs[0])
        others = {other.name for other in graph_walk.inputs_of(op)}
        if variable is not None and others <= step | {variable.name}:
            reads[variable.name].append(op)
    return reads


def hold_back(updates, waited, active, computed):
    """Makes updates wait for other operations, and leaves them out where there is no batch.

    Args:
      updates: list of operations or tensors.
      active: float scalar, 0 in a worker whose own data have ended; or None.
      computed: tensors that can be had without a step: what they need is left as it is, also a
        write of the forward pass.

    Returns:
      `(updates, redirect)`: what the optimizer has to wait for in place of `updates`; and, where
      they may be left out, a function by which operations that wait for updates wait for what runs
      in any case. It is called twice: for the optimizer's own, since the order of the update is
      found in these; and by `join`, for the operations that a program makes after the build.
    """
    if not updates or not waited and active is None:
        return updates, None
    waited, skipped = list(waited), None
    if active is not None:
        # As in a branch of control flow v1: no reader of the output that is not taken is run.
        with only_device('/cpu:0'), tf.name_scope('riding'), tf.control_dependencies(waited):
            has_batch = tf.identity(active >= .5)
            switch = tf.raw_ops.Switch(data=has_batch, pred=has_batch)
            skipped, taken = tf.identity(switch[0]), tf.identity(switch[1])
        waited = [taken.op]
    operations, finder = graph_walk.step_operations(updates), Writes(tf.get_default_graph())
    roots = {getattr(update, 'op', update).name for update in updates}
    written = [(op, finder.of(op)) for op in operations]
    held = _wait([(op, names) for op, names in written if op.name in roots or names], waited,
                 operations, computed)
    if skipped is None:
        return updates, None
    with only_device('/cpu:0'), tf.name_scope('riding'):
        with tf.control_dependencies(updates):
            done = tf.identity(taken)
        merged = tf.raw_ops.Merge(inputs=[done, skipped])[0]
    left_out = graph_walk.reachable_from(held, operations, control=True)
    return [merged], functools.partial(_wait_instead, left_out, operations, done.op, merged.op)


def _wait_instead(left_out, operations, done, merged):
    """Makes operations that wait for a skippable update wait for `merged`, which always runs.

    Else they would be skipped, too: `transform_gradients` may read a moving average after its
    update, and a program may run averages of the weights after all `UPDATE_OPS`. The `operations`
    of the updates themselves go on waiting.
    """
    own = {op.name for op in operations}
    for op in merged.graph.get_operations():
        if op.name in own or op is done:
            continue
        kept = [other for other in op.control_inputs if other.name not in left_out]
        if len(kept) < len(op.control_inputs):
            compat.set_control_inputs(op, kept + [merged])


def _wait(writes, awaited, operations, computed):
    """Makes `(operation, names of variables)`s wait, unless they run without a step, too: a list
    of the operations that do."""
    frames = Frames(operations)
    needed = {op.name for op in graph_walk.step_operations(computed)}
    held = [each for op, variables in writes if op.name not in needed
            for each in to_hold(op, variables, frames) if each.name not in needed]
    waits = Waits(held)
    waiting = [op for op in held if all([waits.add(op, each) for each in awaited])]
    waits.put_into_graph(Writes(tf.get_default_graph()))
    return waiting
