"""Cuts a recorded forward pass into stages, where the model names none.

Most operations may be put on any device of the tower; here they *move*. The others, such as the
lookup in an embedding, are kept with a variable, and go to a stage with an operation that moves. A
variable goes to the stage that reads it first, and with it go its *companions*: its initial value,
its slots, its moving average.
"""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.stage_costs import (
    Piece,
    StageCost,
    VariableBytes,
    cut_evenly,
    kept_bytes,
    pieces_of,
    variable_bytes,
)
from towers.errors import ModelFunctionError
from towers.graph.edit import Library, colocated_names, colocation_group
from towers.graph.graph_walk import names_of, operation_names
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
      copies: for each stage, how many micro-batches' activations it keeps at the same time.
      trains: whether there is a backward pass.
      slots: how many slots the optimizer keeps beside each trained variable, see `number_of_slots`;
        None where trained variables are not in the stages.
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
    # Operations of variables, such as initial values, go where their variable goes.
    not_of_variables = [op for op in recorded.operations if op.name not in recorded.owned]
    moving = [op for op in not_of_variables if may_move(op, stages)]
    mover_of = _movers(not_of_variables, moving)
    leader_of = _leaders(recorded.variables)
    variables_by_reader = _first_readers(not_of_variables, mover_of, leader_of)
    kept: typing.Counter[str] = collections.Counter()
    if cutting.trains:
        kept = _kept_by_movers(recorded.operations, not_of_variables, mover_of, stages[0])
    bytes_of_leader = _bytes_by_leader(recorded.variables, leader_of, cutting.slots)
    bytes_by_reader = _bytes_by_reader(variables_by_reader, bytes_of_leader)
    found = pieces_of(moving, kept, bytes_by_reader)
    pieces = found.pieces
    if len(pieces) < len(stages):
        raise ModelFunctionError(
            "stages='auto', and there are %d devices a tower for %d operations of the model that "
            'may be put anywhere: name fewer devices, or leave out towers.stage and tf.device in '
            'the model function (or stages=).' % (len(stages), len(pieces)))
    cuts = cut_evenly(pieces, cutting.copies)  # for each cut, the index of the piece before it
    ends = [found.ends[cut] for cut in cuts]  # and of the operation before it, in `moving`
    variables = [variable for variable in recorded.variables if variable.op.name in movable]
    _move_to_stages(_divided(moving, ends), stages, variables_by_reader, variables)
    _bring_along(recorded.operations, moving, stages[0])
    return StageCuts(
        memory=_shares_of_memory(pieces, cuts, cutting.copies),
        crossing=[pieces[cut].crossing for cut in cuts],
        names=[moving[end].name for end in ends])


# ---- which operation goes with which -------------------------------------------------------------

def _movers(operations: typing.Iterable[tf.Operation],
            moving: typing.Sequence[tf.Operation]) -> typing.Dict[str, str]:
    """Finds the operation with which each operation goes to a stage.

    An operation that moves goes by itself. Any other operation goes with the next one in order that
    moves, which is likely to take its result. The operations after the last one that moves go with
    that last one.

    Args:
      operations: the operations, in the order in which they were made.
      moving: the operations that move.

    Returns:
      {name of an operation: name of the operation with which it goes}; {} if none moves.
    """
    names_moving = names_of(moving)
    mover_of = {}
    waiting: typing.List[str] = []  # names of operations since the last one that moves
    for op in operations:
        waiting.append(op.name)
        if op.name in names_moving:
            mover_of.update(dict.fromkeys(waiting, op.name))
            waiting = []
    if moving:
        mover_of.update(dict.fromkeys(waiting, moving[-1].name))
    return mover_of


def _leaders(variables: typing.Iterable[tf.Variable]) -> typing.Dict[str, str]:
    """{name of a variable: name of the variable that it is kept with}.

    Most variables are kept with themselves. A moving average is kept with the variable that it
    averages, since it is colocated with that one.
    """
    names = operation_names(variables)
    leader_of = {}
    for variable in variables:
        own_name = variable.op.name
        # The group of a variable may name operations that are no variables, and nothing else.
        variables_in_group = [name for name in colocation_group(variable.op) if name in names]
        leader_of[own_name] = variables_in_group[0] if variables_in_group else own_name
    return leader_of


def _first_readers(operations: typing.Iterable[tf.Operation], mover_of: typing.Dict[str, str],
                   leader_of: typing.Dict[str, str]) -> typing.Dict[str, typing.List[str]]:
    """Finds the variables that each moving operation reads first, itself or by the operations that
    go with it.

    Args:
      operations: the operations, in the order in which they were made.
      mover_of: {name of an operation: name of the moving operation with which it goes}.
      leader_of: {name of a variable: name of the variable that it is kept with}.

    Returns:
      {name of a moving operation: names of the variables}, without variables that are kept with
      another one.
    """
    variables_by_reader = collections.defaultdict(list)
    seen = set()
    for op in operations:
        mover = mover_of.get(op.name, '')  # '' where no operation moves
        is_moving = mover == op.name
        for name in _variables_read(op, is_moving):
            is_leader = leader_of.get(name) == name
            if is_leader and name not in seen:
                seen.add(name)
                variables_by_reader[mover].append(name)
    return variables_by_reader


def _variables_read(op: tf.Operation, is_moving: bool) -> typing.List[str]:
    """Names of the variables that go to the stage of an operation, since it reads them.

    An operation that moves, as `is_moving` says, brings all variables that it reads. One that does
    not move is kept with a variable, as a lookup is with its embedding, and brings that one alone.
    """
    names_read = []
    for tensor in op.inputs:
        names_read += [source.name for source in read_from(tensor)]
    if is_moving:
        return names_read
    if op.type in HAND_ON:
        return []  # it reads nothing: it hands on the variable that it is kept with
    kept_with = colocated_names(op)
    return [name for name in names_read if name in kept_with]


def _bytes_by_leader(
        variables: typing.Iterable[tf.Variable], leader_of: typing.Dict[str, str],
        slots: typing.Optional[int]) -> typing.Dict[str, typing.List[VariableBytes]]:
    """{name of a variable: the bytes of the variables that are kept with it}.

    Args:
      variables: all variables.
      leader_of: {name of a variable: name of the variable that it is kept with}.
      slots: see `Cutting`.
    """
    bytes_of_leader = collections.defaultdict(list)
    for variable in variables:
        leader = leader_of[variable.op.name]
        bytes_of_leader[leader].append(variable_bytes(variable, slots))
    return bytes_of_leader


def _bytes_by_reader(variables_by_reader: typing.Dict[str, typing.List[str]],
                     bytes_of_leader: typing.Dict[str, typing.List[VariableBytes]]
                     ) -> typing.Dict[str, typing.List[VariableBytes]]:
    """{name of a moving operation: the bytes of all variables that go with it}, from the names of
    the variables that it reads first, and the bytes of all that is kept with each of these."""
    bytes_by_reader: typing.Dict[str, typing.List[VariableBytes]] = collections.defaultdict(list)
    for reader, leaders in variables_by_reader.items():
        for leader in leaders:
            bytes_by_reader[reader] += bytes_of_leader[leader]
    return bytes_by_reader


def _kept_by_movers(
        operations: typing.Sequence[tf.Operation],
        not_of_variables: typing.Iterable[tf.Operation], mover_of: typing.Dict[str, str],
        first_stage: str) -> typing.Counter[str]:
    """Bytes that the backward pass keeps, by the name of the operation with which they move.

    Args:
      operations: all operations of the forward pass.
      not_of_variables: those of them that do not belong to variables.
      mover_of: {name of an operation: name of the operation with which it goes}.
      first_stage: the device of what may move; results elsewhere stay there.
    """
    bytes_of_results = kept_bytes(operations)
    kept: typing.Counter[str] = collections.Counter()
    for op in not_of_variables:
        if op.device == first_stage and op.name in mover_of:
            kept[mover_of[op.name]] += bytes_of_results[op.name]
    return kept


def _divided(entries: typing.Sequence, ends: typing.Sequence[int]) -> typing.List[typing.Sequence]:
    """A list cut into a part for each stage.

    Args:
      entries: the list.
      ends: for each stage but the last one, the index of its last entry.
    """
    parts = []
    start = 0
    for end in ends:
        parts.append(entries[start:end + 1])
        start = end + 1
    return parts + [entries[start:]]


def _shares_of_memory(pieces: typing.Sequence[Piece], cuts: typing.Sequence[int],
                      copies: typing.Sequence[int]) -> typing.List[float]:
    """For each stage its part of the sum of all stages' peaks.

    Args:
      pieces: all pieces.
      cuts: for each stage but the last one, the index of its last piece.
      copies: for each stage, how many micro-batches' activations it keeps at the same time.
    """
    memory = []
    for copies_of_stage, pieces_of_stage in zip(copies, _divided(pieces, cuts)):
        memory.append(StageCost(copies_of_stage, pieces_of_stage).memory)
    total = sum(memory) or 1.
    return [memory_of_stage / total for memory_of_stage in memory]


# ---- the moves -----------------------------------------------------------------------------------

def _move_to_stages(operations_of_stages: typing.Sequence[typing.Sequence[tf.Operation]],
                    stages: typing.Sequence[str],
                    variables_by_reader: typing.Dict[str, typing.List[str]],
                    variables: typing.Sequence[tf.Variable]) -> None:
    """Puts operations, and the variables that they read first, on the devices of their stages.

    Args:
      operations_of_stages: for each stage the operations that are put there.
      stages: the devices of the stages.
      variables_by_reader: {name of an operation: names of the variables that it reads first}.
      variables: the variables that are moved.
    """
    graph = tf.get_default_graph()
    library = Library(graph)
    companions = _companions(graph) if variables else {}
    old_device_of = {variable.op.name: variable.device for variable in variables}
    for stage, operations in zip(stages, operations_of_stages):
        for op in operations:
            move(op, stage, library)
            for name in variables_by_reader.get(op.name, ()):
                if name in old_device_of:  # else it stays where it is
                    _move_variable(library, companions, name, old_device_of[name], stage)


def _bring_along(operations: typing.Iterable[tf.Operation],
                 moved: typing.Iterable[tf.Operation], first_stage: str) -> None:
    """Moves operations of the first stage along with the moved ones that they are colocated with: a
    loop's `Switch`es, say."""
    device_of = {op.name: op.device for op in moved}
    for op in operations:
        if op.name in device_of or op.device != first_stage:
            continue
        group = colocation_group(op)
        has_moved = all(name in device_of for name in group)
        if has_moved:
            device_of[op.name] = device_of[group[0]]
            compat.set_device(op, device_of[op.name])


def _companions(graph: tf.Graph) -> typing.Dict[str, typing.List[tf.Operation]]:
    """{name of a variable: operations that go where it goes}: its own, such as its initial value,
    and those that are colocated with it."""
    operations = graph.get_operations()
    companions: typing.Dict[str, list] = {
        op.name: [] for op in operations if op.type in VARIABLE_OPS}
    for op in operations:
        for name in _owners(op, companions):
            companions[name].append(op)
    return companions


def _owners(op: tf.Operation, variables: typing.Mapping[str, typing.Any]) -> typing.Set[str]:
    """Set of the names of the variables whose companion an operation is; `variables` has the names
    of all variables."""
    colocated = set(colocated_names(op))
    owners = colocated & variables.keys()
    if owners:
        return owners
    # `w/Initializer/zeros` is in the name scope of its variable `w`. An initial value that is
    # computed from another variable may be colocated with an operation of that one. Then it is in
    # the name scopes of both, which have no variable in common, and goes with neither.
    names_and_scopes = map(_name_and_scopes, colocated | {op.name})
    return set.intersection(*names_and_scopes) & variables.keys()


def _name_and_scopes(name: str) -> typing.Set[str]:
    """A name, and the name scopes that it is in: of 'a/b/c' these are 'a' and 'a/b'."""
    return set(itertools.accumulate(name.split('/'), '{}/{}'.format))


def _move_variable(library: Library, companions: typing.Dict[str, typing.List[tf.Operation]],
                   name: str, old_device: str, device: str) -> None:
    """Puts a variable, with the operations that go with it, on another device.

    Args:
      library: the functions of the graph.
      companions: {name of a variable: operations that go with it}.
      name: the variable's name.
      old_device: the device of the variable so far; what is elsewhere stays there.
      device: the new device.
    """
    moved = [op for op in companions[name] if op.device == old_device]
    for op in moved:
        move(op, device, library)
    for op in moved:
        is_other_variable = op.type in VARIABLE_OPS and op.name != name
        if is_other_variable:  # a moving average: it has companions, such as its initial value
            _move_variable(library, companions, op.name, old_device, device)
