"""The layers of a stage of a traced step, with the time that each takes: which of them to move."""

import collections
import typing

from towers.gradients.tower import Tower
from towers.report.parts import BACKWARD, FORWARD, OF_TOWERS, StepParts
from towers.report.trace import Trace, Traced

_MOST_LAYERS = 16  # rows of the table; the layers that take least are one row together
_LEAST_SHARE = 0.01  # of the stage's time: a layer that takes less is not a row of its own
_ENDING = '_grad'  # of the name scope of an operation's gradient
_NO_NAME = ''  # in the place of a name that an operation does not have in the model


class Layer(typing.NamedTuple):
    """The operations of a stage whose names begin with one name scope of the model.

    Attributes:
      name: the name scope, or the name of an operation that is in none; `''` for all operations
        that are in no other row.
      forward: the microseconds of its operations in the forward pass.
      backward: the microseconds of its operations in the backward pass.
      num_operations: the number of their runs.
    """
    name: str
    forward: int
    backward: int
    num_operations: int

    @property
    def micros(self) -> int:
        """The microseconds of both passes."""
        return self.forward + self.backward


def layers_of_stage(trace: Trace, parts: StepParts, towers: typing.Sequence[Tower], tower: int,
                    device: str) -> typing.List[Layer]:
    """The layers of a tower that ran on one device, in the order of the forward pass.

    Name scopes are divided into those that they contain, the longest first, until there are about
    `_MOST_LAYERS`; a scope that contains only operations is not divided. An operation of the
    backward pass belongs to the layer of the operation of the forward pass that is in its name, as
    it is in the name of a gradient. A sum of gradients has no such name.

    Args:
      trace: the step.
      parts: the operations of the step.
      towers: the towers of the build, one for each micro-batch.
      tower: the index of the tower.
      device: the short name of the stage's device.

    Returns:
      List of `Layer`, the one without a name last.
    """
    names = _ModelNames([each for each in towers if each.index == tower])
    runs = _runs_on_stage(trace, tower, device)
    least_micros = _LEAST_SHARE * _micros(runs)
    runs_by_name: typing.Dict[str, typing.List[Traced]] = collections.defaultdict(list)
    for run in runs:
        runs_by_name[names.of(run)].append(run)
    runs_without_row = runs_by_name.pop(_NO_NAME, [])
    shown: typing.List[_Row] = []
    for row in _rows(runs_by_name):
        if len(shown) < _MOST_LAYERS and _micros(row.runs) >= least_micros:
            shown.append(row)
        else:
            runs_without_row += row.runs
    places = names.places_in_forward_pass(parts)
    shown.sort(key=lambda row: _first_place(row, places))
    layers = [_layer(_common_scope(row.names), row.runs) for row in shown]
    if runs_without_row:
        layers.append(_layer(_NO_NAME, runs_without_row))
    return layers


class _Row(typing.NamedTuple):
    """The operations that make one row: their names in the model, and their runs."""
    names: typing.List[str]
    runs: typing.List[Traced]


def _runs_on_stage(trace: Trace, tower: int, device: str) -> typing.List[Traced]:
    """The operations of a tower's passes that ran on one device."""
    runs = []
    for operation in trace.operations:
        is_of_tower = operation.place.tower == tower and operation.place.part in OF_TOWERS
        if is_of_tower and operation.row == device:
            runs.append(operation)
    return runs


def _rows(runs_by_name: typing.Mapping[str, typing.List[Traced]]) -> typing.List[_Row]:
    """The rows of the table, the longest first, before any is left out.

    Args:
      runs_by_name: {name of an operation in the model: its runs}.
    """
    rows = []
    for names in _divided(runs_by_name):
        runs: typing.List[Traced] = []
        for name in names:
            runs += runs_by_name[name]
        rows.append(_Row(names, runs))
    return sorted(rows, key=lambda row: _micros(row.runs), reverse=True)


def _first_place(row: _Row, places: typing.Mapping[str, int]) -> int:
    """The place in the forward pass of the first operation of a row.

    An operation that the runtime has added has no place there, and counts as the last.

    Args:
      row: the row.
      places: {name of an operation in the model: its place}.
    """
    return min(places.get(name, len(places)) for name in row.names)


def _layer(name: str, runs: typing.Sequence[Traced]) -> Layer:
    """The `Layer` of some operations that ran."""
    forward = _micros(run for run in runs if run.place.part == FORWARD)
    backward = _micros(run for run in runs if run.place.part == BACKWARD)
    return Layer(name, forward, backward, len(runs))


def _micros(runs: typing.Iterable[Traced]) -> int:
    """The sum of the microseconds of operations that ran."""
    return sum(run.micros for run in runs)


# ---- the name that an operation has in the model -------------------------------------------------

class _ModelNames:
    """The names that operations of a tower have in the model function: those of the forward pass,
    without the name scope of the tower or of its micro-batch."""

    def __init__(self, micro_batches: typing.Sequence[Tower]):
        """
        Args:
          micro_batches: the `Tower` of each micro-batch of one tower.
        """
        self._micro_batches = {each.micro_batch: each for each in micro_batches}
        self._forward: typing.Dict[int, typing.Set[str]] = {}
        for number, tower in self._micro_batches.items():
            self._forward[number] = {
                _without_scope(name, tower.name_scope) for name in tower.forward}

    def of(self, operation: Traced) -> str:
        """The name in the model of an operation that ran; `_NO_NAME` where its name does not tell.

        An operation of the backward pass has the name of the operation whose gradient it is a part
        of: `gradients/net/layer/MatMul_grad/MatMul_1` has that of `net/layer/MatMul`. What comes
        before that name, here `gradients`, may be any number of scopes.
        """
        tower = self._micro_batches[operation.place.micro_batch]
        name = _without_scope(operation.name, tower.name_scope)
        if operation.place.part == FORWARD:
            return name
        forward = self._forward[operation.place.micro_batch]
        pieces = _without_gradient(name.split('/'))
        for num_scopes_before in range(len(pieces)):
            candidate = '/'.join(pieces[num_scopes_before:])
            if candidate in forward:
                return candidate
        return _NO_NAME

    def places_in_forward_pass(self, parts: StepParts) -> typing.Dict[str, int]:
        """{name in the model: its place in the order in which the operations were made}."""
        first = self._micro_batches[min(self._micro_batches)]
        places: typing.Dict[str, int] = {}
        for op in parts.graph.get_operations():
            if op.name in first.forward:
                places[_without_scope(op.name, first.name_scope)] = len(places)
        return places


def _without_scope(name: str, scope: str) -> str:
    """A name without a name scope that it may begin with."""
    return name[len(scope):] if name.startswith(scope) else name


def _without_gradient(pieces: typing.List[str]) -> typing.List[str]:
    """The pieces of the name of a gradient's operation, as far as they name the operation whose
    gradient it is: `['gradients', 'layer', 'MatMul']` of `gradients/layer/MatMul_grad/MatMul_1`.
    Where no piece names a gradient, they are all pieces."""
    for place in range(len(pieces) - 1, -1, -1):
        if pieces[place].endswith(_ENDING):
            return pieces[:place] + [pieces[place][:-len(_ENDING)]]
    return pieces


# ---- name scopes ---------------------------------------------------------------------------------

def _divided(runs_by_name: typing.Mapping[str, typing.List[Traced]]
             ) -> typing.List[typing.List[str]]:
    """The names by the name scopes that are shown, a list of names for each.

    It begins with the outermost scopes. The longest one is divided into the scopes in it, as often
    as one can be divided and all of them are at most `_MOST_LAYERS`.

    Args:
      runs_by_name: {name of an operation in the model: its runs}.
    """
    micros_of_names = {name: _micros(runs) for name, runs in runs_by_name.items()}
    groups = list(_by_next_scope(list(micros_of_names), '').values())
    final: typing.List[typing.List[str]] = []
    while groups:
        groups.sort(key=lambda names: sum(micros_of_names[name] for name in names))
        longest = groups.pop()  # the last one
        scope = _common_scope(longest)
        smaller = _by_next_scope(longest, scope)
        num_groups_if_divided = len(groups) + len(final) + len(smaller)
        is_room = num_groups_if_divided <= _MOST_LAYERS
        if is_room and _contains_scopes(scope, smaller, micros_of_names):
            groups += smaller.values()
        else:
            final.append(longest)
    return final


def _contains_scopes(scope: str, next_parts: typing.Iterable[str],
                     operations: typing.Container[str]) -> bool:
    """Whether a name scope contains others, and not only operations.

    The scope `net` contains another one if an operation is called `net/layer/MatMul`, and none if
    the operations in it are `net/MatMul` and `net/Relu`.

    Args:
      scope: the name scope.
      next_parts: the parts of names that come right after it, `'layer'`, or `'MatMul'`; `''` for an
        operation that has the name of the scope itself.
      operations: the names of all operations.
    """
    for part in next_parts:
        is_operation = part == '' or '%s/%s' % (scope, part) in operations
        if not is_operation:
            return True
    return False


def _by_next_scope(names: typing.Sequence[str], scope: str
                   ) -> typing.Dict[str, typing.List[str]]:
    """{the next part of a name after `scope`: the names that have it there}.

    With the scope `net`, `'layer'` has `net/layer/MatMul` and `net/layer/Relu`; with `''`, which is
    outside of all scopes, `'net'` has them. A name that is the scope itself has the next part `''`.
    """
    start = len(scope) + 1 if scope else 0
    groups: typing.Dict[str, typing.List[str]] = collections.OrderedDict()
    for name in names:
        next_part = name[start:].partition('/')[0]
        groups.setdefault(next_part, []).append(name)
    return groups


def _common_scope(names: typing.Sequence[str]) -> str:
    """The longest name scope that all of the names are in; of one name, the name itself."""
    common = names[0].split('/')
    for name in names[1:]:
        pieces = name.split('/')
        num_equal = 0
        for piece, other in zip(common, pieces):
            if piece != other:
                break
            num_equal += 1
        common = common[:num_equal]
    return '/'.join(common)
