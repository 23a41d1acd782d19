"""The table of a build's variables: role, device, bytes, and who writes each in a step."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.graph.graph_walk import bytes_of
from towers.graph.variable_access import Writes
from towers.model.objectives import all_pairs
from towers.placement.devices import short_name
from towers.placement.tower_device import operation_device
from towers.report.parts import Place, StepParts


class VariableRow(typing.NamedTuple):
    """A row of the table.

    Attributes:
      name: the name of the variable.
      role: 'trained', 'slot', 'state of a tower', 'replica', 'global step', or 'shared'.
      device: the short name of its device, or 'any' where the runtime chooses.
      shape: the shape, as a text.
      bytes: the size in bytes.
      writers: the parts and towers whose operations may write it in a step, as a text.
    """
    name: str
    role: str
    device: str
    shape: str
    bytes: int
    writers: str


def variable_rows(built: BuiltTowers, parts: StepParts) -> typing.List[VariableRow]:
    """The rows of all variables of a build, by role, trained ones first; of a role the largest
    first."""
    writers = _writers(parts)
    rows = []
    for role, variables in _by_role(built):
        rows_of_role = []
        for variable in variables:
            names_of_writers = sorted(writers.get(variable.op.name, ['nobody in a step']))
            rows_of_role.append(VariableRow(
                variable.op.name, role, short_name(operation_device(variable.op)) or 'any',
                str(variable.get_shape()), bytes_of(variable), ', '.join(names_of_writers)))
        rows += sorted(rows_of_role, key=lambda row: -row.bytes)
    return rows


def _by_role(built: BuiltTowers
             ) -> typing.Iterator[typing.Tuple[str, typing.List[tf.Variable]]]:
    """Yields `(role, variables)`; a variable that has several of the roles comes with the first."""
    trained = [variable for _, variable in all_pairs(built.gradients)]
    replicas: typing.List[tf.Variable] = []
    if built.replicas is not None:
        replicas = list(built.replicas.variables) + list(built.replicas.slots)
    global_step = []
    if built.global_step is not None:
        global_step.append(built.global_step)
    variables_by_role = {
        'trained': trained,
        'slot': built.slots,
        'replica': replicas,
        'state of a tower': built.own_state,
        'global step': global_step,
        'shared': built.variables,
    }
    seen: typing.Set[str] = set()
    for role, variables in variables_by_role.items():
        new_variables = []
        for variable in variables:
            if variable.op.name not in seen:
                seen.add(variable.op.name)
                new_variables.append(variable)
        yield role, new_variables


def _writers(parts: StepParts) -> typing.Dict[str, typing.Set[str]]:
    """{name of a variable: the towers and parts whose operations may write it in a step}."""
    writers: typing.Dict[str, typing.Set[str]] = {}
    writes = Writes(parts.graph)
    for op in parts.operations:
        for name in writes.written_by(op):
            writers.setdefault(name, set()).add(_named(parts.places[op.name]))
    return writers


def _named(place: Place) -> str:
    """The text for a writer: `'tower 1'`, or the name of a part."""
    if place.tower is not None:
        return 'tower %d' % place.tower
    return place.part
