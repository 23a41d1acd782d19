"""Cuts a finished forward pass into stages, where the model names none."""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.stage_costs import (
    Pieces,
    StageCost,
    VariableBytes,
    cut_evenly,
    kept_bytes,
    pieces_of,
    variable_bytes,
)
from towers.errors import ModelFunctionError
from towers.graph.edit import Library, colocated_names, colocation_group
from towers.graph.graph_walk import names_of, operation_names, variables_by_name
from towers.graph.op_types import HAND_ON, VARIABLE_OPS
from towers.graph.variable_access import read_from
from towers.placement.stages import may_move, move
from towers.placement.tower_device import stages_of


class StageCuts(typing.NamedTuple):
    """How a forward pass was cut.

    Attributes:
      memory: for each stage, its part of the sum of all stages' estimated peaks.
      crossing: for each cut, bytes of the tensors that later stages take from earlier ones; where
        the batch is not static, for 16 examples.
      names: for each cut, the last operation before it.
    """
    memory: typing.List[float]
    crossing: typing.List[int]
    names: typing.List[str]


class Cutting(typing.NamedTuple):
    """How to cut.

    Attributes:
      copies: for each stage, micro-batches whose activations it keeps at the same time.
      trains: whether there is a backward pass.
      slots: how many variables the optimizer keeps beside each trained one, see `number_of_slots`;
        None where stages have no variables that are trained.
    """
    copies: typing.List[int]
    trains: bool
    slots: typing.Optional[int]


def cut_into_stages(recorded: typing.Any, device: str, movable: typing.Container[str],
                    cutting: Cutting) -> StageCuts:
    """Puts the operations of a recorded call, in order, on a tower's devices.

    Args:
      recorded: `Recorded`.
      device: the tower's devices.
      movable: names of the variables that go to the stage that reads them first.
      cutting: how to cut.

    Raises:
      ModelFunctionError: the operations are too few.
    """
    stages = stages_of(device)
    own = [op for op in recorded.operations if op.name not in recorded.owned]
    moving = [op for op in own if may_move(op, stages)]
    goes_with = _goes_with(own, moving)
    leaders = _leaders(recorded.variables)
    readers = _first_readers(own, goes_with, leaders)
    kept: typing.Counter[str] = collections.Counter()
    if cutting.trains:
        kept = _kept_by_moving(recorded.operations, own, goes_with, stages[0])
    bytes_of_leaders = _bytes_by_leader(recorded.variables, leaders, cutting.slots)
    variables_of = {}
    for reader, names in readers.items():
        variables_of[reader] = sum([bytes_of_leaders[name] for name in names], [])
    pieces = pieces_of(moving, kept, variables_of)
    if len(pieces.pieces) < len(stages):
        raise ModelFunctionError(
            "stages='auto', and there are %d devices a tower for %d operations of the model that "
            'may be put anywhere: name fewer devices, or leave out towers.stage and tf.device in '
            'the model function (or stages=).' % (len(stages), len(pieces.pieces)))
    cuts = cut_evenly(pieces.pieces, cutting.copies)
    ends = [pieces.ends[cut] for cut in cuts]
    variables = [each for each in recorded.variables if each.op.name in movable]
    _move_to_stages(moving, stages, ends, readers, variables)
    _bring_along(recorded.operations, moving, stages[0])
    return StageCuts(
        memory=_shares_of_memory(pieces, cuts, cutting.copies),
        crossing=[pieces.pieces[cut].crossing for cut in cuts],
        names=[moving[end].name for end in ends])


# ---- what is of which stage ----------------------------------------------------------------------

def _goes_with(operations: typing.Iterable[tf.Operation],
               moving: typing.Sequence[tf.Operation]) -> typing.Dict[str, str]:
    """{name of an operation: name of the operation with which it goes to a stage}.

    This is itself, if it may be put anywhere (`moving`); else the next one in order that may. Those
    after the last go with the last.

    An operation that may not be put anywhere is one that is kept with a variable, such as an
    embedding's lookup.
    """
    movable = names_of(moving)
    found = {}
    waiting: typing.List[str] = []
    for op in operations:
        waiting.append(op.name)
        if op.name in movable:
            found.update(dict.fromkeys(waiting, op.name))
            waiting = []
    if moving:
        found.update(dict.fromkeys(waiting, moving[-1].name))
    return found


def _leaders(variables: typing.Iterable[tf.Variable]) -> typing.Dict[str, str]:
    """{variable's name: name of the variable that it is kept with}, a moving average's, say; or its
    own name."""
    names = operation_names(variables)
    leaders = {}
    for variable in variables:
        beside = [name for name in colocation_group(variable.op) if name in names]
        leaders[variable.op.name] = beside[0] if beside else variable.op.name
    return leaders


def _first_readers(operations: typing.Iterable[tf.Operation],
                   goes_with: typing.Dict[str, str],
                   leaders: typing.Dict[str, str]) -> typing.Dict[str, typing.List[str]]:
    """{operation's name: names of the variables, but for companions of others, it reads first}.

    Args:
      operations: in the order of making.
      goes_with: as `_goes_with` returns it.
      leaders: as `_leaders` returns it.
    """
    found = collections.defaultdict(list)
    seen = set()
    for op in operations:
        mover = goes_with.get(op.name, '')
        for name in _variables_read(op, is_moving=mover == op.name):
            if leaders.get(name) == name and name not in seen:
                seen.add(name)
                found[mover].append(name)
    return found


def _variables_read(op: tf.Operation, is_moving: bool) -> typing.List[str]:
    """Names of the variables that an operation reads; if it may not be put anywhere, as `is_moving`
    says, of those that it is kept with."""
    kept_with = colocated_names(op)
    if not is_moving and not kept_with:
        return []
    names = []
    for tensor in op.inputs:
        for source in read_from(tensor):
            is_kept_with = source.name in kept_with and op.type not in HAND_ON
            if is_moving or is_kept_with:
                names.append(source.name)
    return names


def _bytes_by_leader(
        variables: typing.Iterable[tf.Variable], leaders: typing.Dict[str, str],
        slots: typing.Optional[int]) -> typing.Dict[str, typing.List[VariableBytes]]:
    """{name of a variable: the bytes of the variables that are kept with it}; `leaders` is what
    `_leaders` returns, `slots` that of `Cutting`."""
    by_leader = collections.defaultdict(list)
    for variable in variables:
        by_leader[leaders[variable.op.name]].append(variable_bytes(variable, slots))
    return by_leader


def _kept_by_moving(
        operations: typing.Sequence[tf.Operation], own: typing.Iterable[tf.Operation],
        goes_with: typing.Dict[str, str], first_stage: str) -> typing.Counter[str]:
    """Bytes that the backward pass keeps, by the name of the operation that moves with them.

    Args:
      operations: all operations of the forward pass.
      own: those that are no parts of variables.
      goes_with: as `_goes_with` returns it.
      first_stage: the device of what may move; results elsewhere stay there.
    """
    bytes_of_results = kept_bytes(operations)
    kept: typing.Counter[str] = collections.Counter()
    for op in own:
        if op.device == first_stage and op.name in goes_with:
            kept[goes_with[op.name]] += bytes_of_results[op.name]
    return kept


def _shares_of_memory(pieces: Pieces, cuts: typing.Sequence[int],
                      copies: typing.Sequence[int]) -> typing.List[float]:
    """For each stage its part of the sum of all stages' peaks."""
    starts = [0] + [cut + 1 for cut in cuts]
    ends = starts[1:] + [len(pieces.pieces)]
    memory = []
    for copies_of_stage, start, end in zip(copies, starts, ends):
        memory.append(StageCost(copies_of_stage, pieces.pieces[start:end]).memory)
    total = sum(memory) or 1.
    return [each / total for each in memory]


# ---- the moves -----------------------------------------------------------------------------------

def _move_to_stages(moving: typing.Sequence[tf.Operation], stages: typing.Sequence[str],
                    ends: typing.Sequence[int], readers: typing.Dict[str, typing.List[str]],
                    variables: typing.Sequence[tf.Variable]) -> None:
    """Puts operations, and the variables that they read first, on the devices of their stages.

    Args:
      moving: the operations, in the order of making.
      stages: the devices.
      ends: the place of the last operation of each stage but the last one.
      readers: as `_first_readers` returns it.
      variables: those that are moved.
    """
    graph = moving[0].graph
    library = Library(graph)
    companions = _companions(graph) if variables else {}
    by_name = variables_by_name(variables)
    starts = [0] + [end + 1 for end in ends]
    for stage, start, end in zip(stages, starts, starts[1:] + [len(moving)]):
        for op in moving[start:end]:
            move(op, stage, library)
            for name in readers.get(op.name, ()):
                if name in by_name:
                    _move_variable(library, companions, name, by_name[name].device, stage)


def _bring_along(operations: typing.Iterable[tf.Operation],
                 moved: typing.Iterable[tf.Operation], first_stage: str) -> None:
    """Moves operations of the first stage that are colocated with moved ones (a loop's `Switch`es)
    along with them."""
    places = {op.name: op.device for op in moved}
    for op in operations:
        if op.name in places or op.device != first_stage:
            continue
        beside = colocation_group(op)
        if all(name in places for name in beside):
            places[op.name] = places[beside[0]]
            compat.set_device(op, places[op.name])


def _companions(graph: tf.Graph) -> typing.Dict[str, typing.List[tf.Operation]]:
    """{variable's name: operations that go with it}: it, its parts, its colocated operations."""
    operations = graph.get_operations()
    companions: typing.Dict[str, list] = {
        op.name: [] for op in operations if op.type in VARIABLE_OPS}
    for op in operations:
        beside = set(colocated_names(op))
        owners = beside & companions.keys()
        if not owners:
            # Variables in whose name scope it is, as `w/Initializer/zeros` is in that of `w`, with
            # all that it is colocated with: the initial value of `w` may be computed from another
            # variable, and partly be with that one.
            owners = set.intersection(*map(_name_and_scopes, beside | {op.name}))
        for name in owners:
            if name in companions:
                companions[name].append(op)
    return companions


def _name_and_scopes(name: str) -> typing.Set[str]:
    """A name, and the name scopes that it is in: of 'a/b/c' these are 'a' and 'a/b'."""
    return set(itertools.accumulate(name.split('/'), '{}/{}'.format))


def _move_variable(library: Library, companions: typing.Dict[str, typing.List[tf.Operation]],
                   name: str, old_device: str, device: str) -> None:
    """Puts a variable, with its parts and the operations colocated with it, on another device.

    Args:
      library: the functions of the graph.
      companions: as `_companions` returns it.
      name: the variable's name.
      old_device: what is elsewhere stays there.
      device: the new one.
    """
    moved = [op for op in companions[name] if op.device == old_device]
    for op in moved:
        move(op, device, library)
    for op in moved:  # a moving average's initial value is with that
        if op.type in VARIABLE_OPS and op.name != name:
            _move_variable(library, companions, op.name, old_device, device)
