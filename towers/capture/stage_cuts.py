"""Cuts a recorded forward pass into stages, where the model names none.

Most operations may be put on any device of the tower: these *move*. The other operations, such as
the lookup in an embedding, are kept with a variable, and go to a stage with an operation that
moves. A variable goes to the stage that reads it first. Its *companions* go with it: its initial
value, its slots, its moving average.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.stage_costs import (
    Piece,
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
from towers.graph.graph_walk import names_of, operation_names, without_names
from towers.graph.op_types import HAND_ON, VARIABLE_OPS
from towers.graph.variable_access import read_from
from towers.placement.stages import may_move, move
from towers.placement.tower_device import stages_of


class StageCuts(typing.NamedTuple):
    """How a forward pass was cut.

    Attributes:
      memory: for each stage, its part of the sum of all stages' estimated peaks.
      crossing: for each cut, bytes of the tensors that later stages take from earlier stages; where
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
    groups = _groups_of(recorded, stages)
    moving = groups.moving
    found = _pieces(recorded, groups, cutting, stages[0])
    pieces = found.pieces
    if len(pieces) < len(stages):
        raise ModelFunctionError(
            "stages='auto', and there are %d devices a tower for %d operations of the model that "
            'may be put anywhere: name fewer devices, or leave out towers.stage and tf.device in '
            'the model function (or stages=).' % (len(stages), len(pieces)))
    cuts = cut_evenly(pieces, cutting.copies)  # for each cut, the index of the piece before it
    ends = [found.ends[cut] for cut in cuts]  # and the index in `moving` of the last operation
    variables = [variable for variable in recorded.variables if variable.op.name in movable]
    _move_to_stages(_divided(moving, ends), stages, groups.variables_by_reader, variables)
    _bring_along(recorded.operations, moving, stages[0])
    return StageCuts(
        memory=_shares_of_memory(pieces, cuts, cutting.copies),
        crossing=[pieces[cut].crossing for cut in cuts],
        names=[moving[end].name for end in ends])


# ---- which operation goes with which -------------------------------------------------------------

class _Groups(typing.NamedTuple):
    """What goes to a stage together.

    Attributes:
      operations: the operations of the forward pass that belong to no variable, in order.
      moving: the operations among them that move.
      mover_of: {name of one of `operations`: name of the moving operation with which it goes}.
      leader_of: {name of a variable: name of the variable that it is kept with}.
      variables_by_reader: {name of an operation that moves: names of the variables that it reads
        first}, see `_first_readers`.
    """
    operations: typing.List[tf.Operation]
    moving: typing.List[tf.Operation]
    mover_of: typing.Dict[str, str]
    leader_of: typing.Dict[str, str]
    variables_by_reader: typing.Dict[str, typing.List[str]]


def _groups_of(recorded: typing.Any, stages: typing.Sequence[str]) -> _Groups:
    """Finds what goes to a stage together.

    Args:
      recorded: `Recorded`.
      stages: the devices of the stages.
    """
    # Operations of variables, such as initial values, go where their variable goes.
    operations = without_names(recorded.operations, recorded.owned)
    moving = [op for op in operations if may_move(op, stages)]
    mover_of = _movers(operations, moving)
    leader_of = _leaders(recorded.variables)
    variables_by_reader = _first_readers(operations, mover_of, leader_of)
    return _Groups(operations, moving, mover_of, leader_of, variables_by_reader)


def _movers(operations: typing.Iterable[tf.Operation],
            moving: typing.Sequence[tf.Operation]) -> typing.Dict[str, str]:
    """Finds the operation with which each operation goes to a stage.

    An operation that moves goes by itself. Any other operation goes with the next moving operation
    in order, which is likely to take its result. Operations after the last moving operation go with
    that one.

    Args:
      operations: the operations, in the order in which they were made.
      moving: the operations that move.

    Returns:
      {name of an operation: name of the operation with which it goes}; {} if none moves.
    """
    names_moving = names_of(moving)
    mover_of = {}
    waiting: typing.List[str] = []  # names of the operations after the last moving operation
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
    averages, since TensorFlow colocates it with that variable.
    """
    names = operation_names(variables)
    leader_of = {}
    for variable in variables:
        leader = variable.op.name
        variables_in_group = [name for name in colocation_group(variable.op) if name in names]
        if variables_in_group:  # else all operations in the group are no variables
            leader = variables_in_group[0]
        leader_of[variable.op.name] = leader
    return leader_of


def _first_readers(operations: typing.Iterable[tf.Operation], mover_of: typing.Dict[str, str],
                   leader_of: typing.Dict[str, str]) -> typing.Dict[str, typing.List[str]]:
    """Finds, for each moving operation, the variables that go to its stage: the variables that it,
    or an operation that goes with it, is the first to read.

    Args:
      operations: the operations, in the order in which they were made.
      mover_of: {name of an operation: name of the moving operation with which it goes}.
      leader_of: {name of a variable: name of the variable that it is kept with}.

    Returns:
      {name of a moving operation: names of the variables}, without variables that are kept with
      another variable.
    """
    variables_by_reader = collections.defaultdict(list)
    seen = set()
    for op in operations:
        mover = mover_of.get(op.name, '')  # '' where no operation moves
        is_moving = mover == op.name
        for name in _variables_read(op, is_moving):
            is_leader = leader_of.get(name) == name  # else it goes where its leader goes
            if is_leader and name not in seen:
                seen.add(name)
                variables_by_reader[mover].append(name)
    return variables_by_reader


def _variables_read(op: tf.Operation, is_moving: bool) -> typing.List[str]:
    """Names of the variables that go to the stage of an operation, since it reads them.

    An operation that moves, as `is_moving` says, brings all variables that it reads. An operation
    that does not move is colocated with a variable, as a lookup is with its embedding, and brings
    that variable alone.
    """
    if op.type in HAND_ON and not is_moving:
        return []  # `v/read`, say: an operation that takes its result reads `v`, and brings `v`
    names_read = []
    for tensor in op.inputs:
        names_read += [source.name for source in read_from(tensor)]
    if is_moving:
        return names_read
    colocated_with = colocated_names(op)
    return [name for name in names_read if name in colocated_with]


# ---- the pieces ----------------------------------------------------------------------------------

def _pieces(recorded: typing.Any, groups: _Groups, cutting: Cutting, first_stage: str) -> Pieces:
    """Finds the pieces that the moving operations may be cut into, with the memory of the
    operations and variables that go with them.

    Args:
      recorded: `Recorded`.
      groups: what goes to a stage together.
      cutting: how to cut.
      first_stage: the device of the first stage, on which operations are until they move.
    """
    kept: typing.Counter[str] = collections.Counter()
    if cutting.trains:
        kept = _kept_by_movers(recorded.operations, groups, first_stage)
    bytes_of_leader = _bytes_by_leader(recorded.variables, groups.leader_of, cutting.slots)
    bytes_by_reader = _bytes_by_reader(groups.variables_by_reader, bytes_of_leader)
    return pieces_of(groups.moving, kept, bytes_by_reader)


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


def _kept_by_movers(operations: typing.Sequence[tf.Operation], groups: _Groups,
                    first_stage: str) -> typing.Counter[str]:
    """Bytes of the results kept for the backward pass, by the name of the operation with which the
    results move.

    Args:
      operations: all operations of the forward pass.
      groups: what goes to a stage together.
      first_stage: the device of the first stage, on which operations are until they move.
    """
    bytes_of_results = kept_bytes(operations)
    kept: typing.Counter[str] = collections.Counter()
    for op in groups.operations:
        is_elsewhere = op.device != first_stage  # where the program has put it; there it stays
        if not is_elsewhere and op.name in groups.mover_of:
            kept[groups.mover_of[op.name]] += bytes_of_results[op.name]
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
    """Moves operations of the first stage along with moved operations that they are colocated with:
    a loop's `Switch`es, say."""
    device_of_moved = {op.name: op.device for op in moved}
    for op in operations:
        has_moved = op.name in device_of_moved
        stays = op.device != first_stage  # where the program has put it
        if has_moved or stays:
            continue
        leaders = colocation_group(op)  # its own name, if it is colocated with no other
        have_leaders_moved = all(name in device_of_moved for name in leaders)
        if have_leaders_moved:
            device = device_of_moved[leaders[0]]
            compat.set_device(op, device)
            device_of_moved[op.name] = device


def _companions(graph: tf.Graph) -> typing.Dict[str, typing.List[tf.Operation]]:
    """{name of a variable: operations that go where it goes}: the operations of the variable, such
    as its initial value, and the operations that are colocated with it."""
    operations = graph.get_operations()
    companions: typing.Dict[str, list] = {
        op.name: [] for op in operations if op.type in VARIABLE_OPS}
    for op in operations:
        for name in _owners(op, companions):
            companions[name].append(op)
    return companions


def _owners(op: tf.Operation, variables: typing.Mapping[str, typing.Any]) -> typing.Set[str]:
    """Set of the names of the variables whose companion an operation is: the variables that it is
    colocated with. If there are none, it is the variable whose name is a name scope of the
    operation, as `w` is a scope of `w/Initializer/zeros`.

    If the operation is colocated with other operations, the variable's name has to be a scope of
    all of them. Say `w/Initializer/mul` computes the initial value `2. * v`, and is colocated with
    `v/read`: it is nobody's companion.

    Args:
      op: the operation.
      variables: has the names of all variables as its keys.
    """
    colocated = set(colocated_names(op))
    owners = colocated & variables.keys()
    if owners:
        return owners
    common_scopes = _name_and_scopes(op.name)
    for name in colocated:
        common_scopes &= _name_and_scopes(name)
    return common_scopes & variables.keys()


def _name_and_scopes(name: str) -> typing.Set[str]:
    """A name, and the name scopes that it is in: `{'a', 'a/b', 'a/b/c'}` of `'a/b/c'`."""
    parts = name.split('/')
    return {'/'.join(parts[:depth]) for depth in range(1, len(parts) + 1)}


def _move_variable(library: Library, companions: typing.Dict[str, typing.List[tf.Operation]],
                   name: str, old_device: str, device: str) -> None:
    """Puts a variable, with the operations that go with it, on another device.

    Args:
      library: the functions of the graph.
      companions: {name of a variable: operations that go with it}.
      name: the variable's name.
      old_device: the device of the variable so far; a companion on another device stays there.
      device: the new device.
    """
    moved = [op for op in companions[name] if op.device == old_device]
    for op in moved:
        move(op, device, library)
    for op in moved:
        is_other_variable = op.type in VARIABLE_OPS and op.name != name
        if is_other_variable:  # a moving average: it has companions, such as its initial value
            _move_variable(library, companions, op.name, old_device, device)
