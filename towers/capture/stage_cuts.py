"""Cuts a finished forward pass into stages, where the model names none; and the plan's lines."""

import collections
import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.stage_costs import StageCost, cut_evenly, kept_bytes, pieces_of, variable_bytes
from towers.errors import ModelFunctionError
from towers.graph.edit import Library, group_of, names_beside
from towers.graph.op_types import HAND_ON, VARIABLE_OPS
from towers.graph.variable_access import read_from
from towers.placement.devices import short_name
from towers.placement.stages import may_move, move, says_stages
from towers.placement.tower_device import stages_of

StageCuts = collections.namedtuple('StageCuts', 'memory crossing names')
"""How a forward pass was cut.

Fields:
  memory: for each stage, its part of the sum of all stages' estimated peaks.
  crossing: for each cut, bytes of the tensors that later stages take from earlier ones; where the
    batch is not static, for 16 examples.
  names: for each cut, the last operation before it.
"""

Cutting = collections.namedtuple('Cutting', 'copies trains slots')
"""How to cut.

Fields:
  copies: for each stage, micro-batches whose activations it keeps at the same time.
  trains: whether there is a backward pass.
  slots: as of `number_of_slots`; None where stages have no variables that are trained.
"""


def cut_into_stages(recorded, device, movable, cutting):
    """Puts the operations of a `Recorded` call, in order, on a tower's devices: `StageCuts`;
    `ModelFunctionError` where they are too few. `movable` are names of variables that go to the
    stage that reads them first."""
    stages, operations, variables = stages_of(device), recorded.operations, recorded.variables
    own = [op for op in operations if op.name not in recorded.owned]
    mine = [op for op in own if may_move(op, stages)]
    next_to_move = _next_to_move(own, mine)
    leaders, by_name = _leaders(variables), {each.op.name: each for each in variables}
    first_reader = _first_readers(own, next_to_move, leaders)
    sizes, kept = collections.defaultdict(list), collections.Counter()
    for name, leader in leaders.items():
        sizes[leader].append(variable_bytes(by_name[name], cutting.slots))
    if cutting.trains:
        of_results = kept_bytes(operations)
        for op in own:
            kept[next_to_move[op.name]] += of_results[op.name] * (op.device == stages[0])
    pieces, ends = pieces_of(mine, kept, {
        reader: [size for name in names for size in sizes[name]]
        for reader, names in first_reader.items()})
    if len(pieces) < len(stages):
        raise ModelFunctionError(
            "stages='auto', and there are %d devices a tower for %d operations of the model that "
            'may be put anywhere: name fewer devices, or leave out towers.stage and tf.device in '
            'the model function (or stages=).' % (len(stages), len(pieces)))
    cuts = cut_evenly(pieces, cutting.copies)
    bounds = [-1] + [ends[cut] for cut in cuts] + [len(mine) - 1]
    library = Library(mine[0].graph)
    companions = _companions(mine[0].graph) if movable else {}
    for stage, before, last in zip(stages, bounds, bounds[1:]):
        for op in mine[before + 1:last + 1]:
            move(op, stage, library)
            for name in first_reader.get(op.name, ()):
                if name in movable:
                    _move_variable(library, companions, name, by_name[name].device, stage)
    _bring_along(operations, mine, stages[0])
    memory = [StageCost(copies, pieces[first:last]).memory for copies, first, last in zip(
        cutting.copies, [0] + [cut + 1 for cut in cuts], [cut + 1 for cut in cuts] + [None])]
    return StageCuts([each / (sum(memory) or 1.) for each in memory],
                     [pieces[cut].crossing for cut in cuts],
                     [mine[ends[cut]].name for cut in cuts])


def _next_to_move(operations, mine):
    """{operation's name: the operation, itself or a later one, whose stage it is of}. An operation
    kept with a variable, an embedding's lookup, say, is of the stage of the next operation that
    may be put anywhere."""
    found, waiting, movable = {}, [], {op.name for op in mine if op.type != 'Const'}
    for op in operations:
        waiting.append(op.name)
        if op.name in movable:
            found.update(dict.fromkeys(waiting, op.name))
            waiting = []
    found.update(dict.fromkeys(waiting, mine[-1].name if mine else None))
    return found


def _bring_along(operations, moved, first):
    """Moves operations that are colocated with moved ones (a loop's `Switch`es) along with them."""
    places = {op.name: op.device for op in moved}
    for op in operations:
        beside = group_of(op)
        if op.name not in places and op.device == first and all(
                name in places for name in beside):
            places[op.name] = places[beside[0]]
            compat.set_device(op, places[op.name])


def _leaders(variables):
    """{variable's name: name of the variable that it is kept with}, a moving average's, say."""
    names = {variable.op.name for variable in variables}
    return {variable.op.name: next((name for name in group_of(variable.op) if name in names),
                                   variable.op.name) for variable in variables}


def _first_readers(operations, next_to_move, leaders):
    """{operation's name: names of the variables, but for companions of others, it reads first}."""
    found, seen = collections.defaultdict(list), set()
    for op in operations:
        moves = next_to_move[op.name] == op.name
        kept_with = set() if moves else set(names_beside(op))
        for tensor in op.inputs if moves or kept_with else ():
            for source in read_from(tensor):
                if leaders.get(source.name) == source.name and source.name not in seen and (
                        moves or source.name in kept_with and op.type not in HAND_ON):
                    seen.add(source.name)
                    found[next_to_move[op.name]].append(source.name)
    return found


def _companions(graph):
    """{variable's name: operations that go with it}: it, its parts, its colocated operations."""
    operations = graph.get_operations()
    found = {op.name: [] for op in operations if op.type in VARIABLE_OPS}
    for op in operations:
        beside = set(names_beside(op))
        # An initial value that another variable is read for has parts that are with that one.
        for name in (beside & found.keys()) or set.intersection(
                *(set(itertools.accumulate(each.split('/'), '{}/{}'.format))
                  for each in beside | {op.name})):
            if name in found:
                found[name].append(op)
    return found


def _move_variable(library, companions, name, there, device):
    """Puts a variable, with its parts and the operations colocated with it, on another device."""
    moved = [op for op in companions[name] if op.device == there]
    for op in moved:
        move(op, device, library)
    for op in moved:  # a moving average's initial value is with that
        if op.type in VARIABLE_OPS and op.name != name:
            _move_variable(library, companions, op.name, there, device)


# ---- the plan's lines ----------------------------------------------------------------------------

def stages_line(towers, cuts):
    """How the model is spread over the devices of a tower; None for one device."""
    devices = stages_of(towers[0].device)
    if len(devices) == 1:
        return None
    operations, names = _operations_of_first(towers), list(map(short_name, devices))
    if cuts is not None and not says_stages(operations):
        shares = ['%.0f%%' % (100 * share) for share in cuts.memory]
        return '%s %s' % (names[0], shares[0]) + ''.join(
            ', after %s (%.1f MB cross) %s %s' % (operation, size / 1e6, name, share)
            for operation, size, name, share in zip(
                cuts.names, cuts.crossing, names[1:], shares[1:]))
    count = collections.Counter(op.device for op in operations)
    text = ', '.join('%s: %s' % (
        short_name(name), '%d operations' % count[name] if count[name] else
        'no stage of the model is there') for name in devices)
    if cuts is not None:
        return text + '; only what the model has put in no towers.stage is cut by itself'
    return text + (" (stages='auto' cuts a model that names no towers.stage)"
                   if sum(count[name] > 0 for name in devices) == 1 else '')


def _operations_of_first(towers):
    """The operations of the first tower, or of its first micro-batch."""
    return [op for op in tf.get_default_graph().get_operations() if towers[0].has(op.name)]


def accumulation_line(towers, micro_batches, schedule):
    """How each tower's micro-batches run, and how long a pipeline's stages wait; None for one.
    Stages in which the model has nothing do not count."""
    if micro_batches == 1:
        return None
    sizes = sorted({tower.size for tower in towers if isinstance(tower.size, int)})
    text = '%d micro-batches%s a tower' % (
        micro_batches, '' if not sizes else ' of ' + ' or '.join(map(str, sizes[::-1])))
    if schedule is None:
        return text + ', one after the other, for one update'
    stages = len({op.device for op in _operations_of_first(towers)}.intersection(
        stages_of(towers[0].device)))
    schedule = schedule.replace('_', ' ')
    if stages == 1:
        return '%s through one stage, %s' % (text, schedule)
    return '%s through %d stages, %s; of equal stages each waits %.0f%% of the time' % (
        text, stages, schedule, 100 * (stages - 1.) / (micro_batches + stages - 1))
