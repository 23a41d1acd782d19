"""The variables of a build, each with its role, its device, its bytes, and who writes it."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.graph.graph_walk import bytes_of
from towers.graph.variable_access import Writes
from towers.model.objectives import all_pairs
from towers.placement.devices import short_name
from towers.placement.tower_device import operation_device
from towers.report.parts import OF_TOWERS, StepParts


class VariableRow(typing.NamedTuple):
    """A row of the table.

    Attributes:
      name: the variable's.
      role: 'trained', 'slot', 'state of a tower', 'replica', 'global step', or 'shared'.
      device: its short name, or 'any' where the runtime chooses.
      shape: as a text.
      bytes: its size.
      writers: the parts, or towers, whose operations may write it in a step; as a text.
    """
    name: str
    role: str
    device: str
    shape: str
    bytes: int
    writers: str


def variable_rows(built: BuiltTowers, parts: StepParts) -> typing.List[VariableRow]:
    """The rows of all variables of a build: trained ones first, by their bytes."""
    writers = _writers(parts)
    rows = []
    for role, variables in _by_role(built):
        of_role = []
        for variable in variables:
            of_role.append(VariableRow(
                variable.op.name, role, short_name(operation_device(variable.op)) or 'any',
                str(variable.get_shape()), bytes_of(variable),
                ', '.join(sorted(writers.get(variable.op.name, ['nobody in a step'])))))
        rows += sorted(of_role, key=lambda row: -row.bytes)
    return rows


def _by_role(built: BuiltTowers):
    """Yields `(role, variables)`, each variable once."""
    trained = [variable for _, variable in all_pairs(built.gradients)]
    replicas: typing.List[tf.Variable] = []
    if built.replicas is not None:
        replicas = list(built.replicas.variables) + list(built.replicas.slots)
    global_step = [] if built.global_step is None else [built.global_step]
    seen: typing.Set[str] = set()
    for role, variables in (('trained', trained), ('slot', built.slots), ('replica', replicas),
                            ('state of a tower', built.own_state), ('global step', global_step),
                            ('shared', built.variables)):
        of_role = []
        for variable in variables:
            if variable.op.name not in seen:
                seen.add(variable.op.name)
                of_role.append(variable)
        yield role, of_role


def _writers(parts: StepParts) -> typing.Dict[str, typing.Set[str]]:
    """Who may write each variable in a step: dict from its name to towers and parts."""
    found: typing.Dict[str, typing.Set[str]] = {}
    writes = Writes(parts.graph)
    for op in parts.operations:
        for name in writes.of(op):
            found.setdefault(name, set()).add(_named(parts.places[op.name]))
    return found


def _named(place):
    """`'tower 1'`, or the name of a part."""
    if place.part in OF_TOWERS:
        return 'tower %d' % place.tower
    return place.part
