"""Cuts a model's finished forward pass into stages, where the model itself names none."""

import collections

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.graph_walk import is_control_flow
from towers.graph.variable_access import HAND_ON, VARIABLE_OPS, read_from
from towers.placement.devices import short_name
from towers.placement.tower_device import StageDevice, TowerDevice, stages_of
from towers.recomputation.segments import ALIASES, size_of

StageCuts = collections.namedtuple('StageCuts', 'shares crossing names')
"""How a forward pass was cut.

Fields:
  shares: for each stage, its part of the bytes of activations and parameters.
  crossing: for each cut, bytes of the tensors that later stages take from earlier ones; where the
    batch is not static, for 16 examples.
  names: for each cut, the last operation before it.
"""


def describe(cuts, device):
    """One line for the plan."""
    names = [short_name(name) for name in stages_of(device)]
    text = '%s %.0f%%' % (names[0], 100 * cuts.shares[0])
    for name, share, size, operation in zip(names[1:], cuts.shares[1:], cuts.crossing, cuts.names):
        text += ', after %s (%.1f MB cross) %s %.0f%%' % (operation, size / 1e6, name, 100 * share)
    return text


def cut_into_stages(operations, variables, owned, device, root, move_variables):
    """Puts the operations of a forward pass, made for one device, on the devices of their tower.

    The operations are cut in the order in which they were made. Each cut is near the place where
    the stages before it have their even share of the bytes of activations and parameters: within
    7 % of a stage's share, where the fewest bytes cross.

    Args:
      operations: the operations of the model function's call, in order.
      variables: the model's variables.
      owned: names of the operations that were made with these, as parts of them.
      device: `StagedDevices`.
      root: the tower's name scope.
      move_variables: whether variables go to the stage that reads them first.

    Returns:
      `StageCuts`.

    Raises:
      ModelFunctionError: there are too few operations to cut.
    """
    stages = stages_of(device)
    mine = [op for op in operations if op.name.startswith(root) and _may_move(op, stages)]
    computing = [place for place, op in enumerate(mine) if op.type != 'Const']
    if len(computing) < len(stages):
        raise ModelFunctionError(
            "stages='auto', and there are %d devices a tower for %d operations of the model that "
            'may be put anywhere: name fewer devices, or leave out towers.stage and tf.device in '
            'the model function (or stages=).' % (len(stages), len(computing)))
    leaders = _leaders(variables)
    first_reader, parameters = _first_readers(
        [op for op in operations if op.name not in owned], mine, variables, leaders)
    costs = [_bytes(op) + sum(parameters[name] for name in first_reader.get(op.name, ()))
             for op in mine]
    crossing = _crossing(mine)
    total, sums = sum(costs), []
    for cost in costs:
        sums.append((sums[-1] if sums else 0) + cost)
    cuts = []
    for number in range(1, len(stages)):
        target, width = total * number / len(stages), .07 * total / len(stages)
        # Each stage has something to compute. Loops and branches (v1) stay in one piece.
        left = [place for place in computing if not cuts or place > cuts[-1]]
        places = [place for place in range(left[0], left[number - len(stages)])
                  if not is_control_flow(mine[place]) and not is_control_flow(mine[place + 1])]
        near = [place for place in places if abs(sums[place] - target) <= width]
        if not near:
            near = [min(places or [left[number - len(stages)] - 1],
                        key=lambda place: abs(sums[place] - target))]
        cuts.append(min(near, key=lambda place: (crossing[place], abs(sums[place] - target))))
    bounds = [-1] + cuts + [len(mine) - 1]
    by_name = {variable.op.name: variable for variable in variables}
    for stage, (before, last) in enumerate(zip(bounds, bounds[1:])):
        for op in mine[before + 1:last + 1]:
            compat.set_device(op, stages[stage])
            for name in first_reader.get(op.name, ()) if move_variables else ():
                _move_variable(mine[0].graph, name, by_name[name].device, stages[stage])
    _bring_along(operations, mine, stages[0])
    shares = [sum(costs[before + 1:last + 1]) / max(total, 1)
              for before, last in zip(bounds, bounds[1:])]
    return StageCuts(shares, [crossing[cut] for cut in cuts],
                     [mine[cut].name[len(root):] for cut in cuts])


def _may_move(op, stages):
    """Whether an operation is on the first device because of the tower's scope alone."""
    scopes = compat.device_scopes(op)
    return (op.device == stages[0] and bool(scopes) and isinstance(scopes[0], TowerDevice)
            and not isinstance(scopes[0], StageDevice)
            and op.colocation_groups() == [b'loc:@' + op.name.encode()])


def _bring_along(operations, moved, first):
    """Moves operations that are colocated with moved ones (a loop's `Switch`es) along with them."""
    places = {op.name: op.device for op in moved}
    for op in operations:
        beside = [group.decode()[len('loc:@'):] for group in op.colocation_groups()]
        if op.name not in places and op.device == first and all(
                name in places for name in beside):
            places[op.name] = places[beside[0]]
            compat.set_device(op, places[op.name])


def _leaders(variables):
    """{variable's name: that of the variable that it is kept with}, such as a moving average's."""
    names = {variable.op.name for variable in variables}
    leaders = {}
    for variable in variables:
        beside = [group.decode()[len('loc:@'):] for group in variable.op.colocation_groups()]
        leaders[variable.op.name] = next((name for name in beside if name in names),
                                         variable.op.name)
    return leaders


def _first_readers(operations, mine, variables, leaders):
    """Where the variables are read first, each with those that are kept with it.

    What TensorFlow keeps with a variable, such as an embedding's lookup, reads it where the next
    operation is that may be put anywhere.

    Args:
      operations: all of the model function's call, in order, without the variables' own.
      mine: those that may be put anywhere, in order.
      variables: the model's variables.
      leaders: as `_leaders` returns.

    Returns:
      `({operation's name: names of the variables that it is the first to read}, {name: bytes})`.
    """
    sizes = collections.Counter()
    for variable in variables:
        sizes[leaders[variable.op.name]] += (variable.get_shape().num_elements() or 0
                                             ) * variable.dtype.base_dtype.size
    found, seen, waiting = {}, set(), []
    movable = {op.name for op in mine}
    for op in operations:
        moves = op.name in movable
        kept_with = set() if moves else {
            group.decode()[len('loc:@'):] for group in op.colocation_groups()} - {op.name}
        for tensor in op.inputs if moves or kept_with else ():
            for source in read_from(tensor):
                if leaders.get(source.name) == source.name and source.name not in seen and (
                        moves or source.name in kept_with and op.type not in HAND_ON):
                    seen.add(source.name)
                    waiting.append(source.name)
        if moves and op.type != 'Const' and waiting:
            found[op.name], waiting = waiting, []
    if waiting:
        found.setdefault(mine[-1].name, []).extend(waiting)
    return found, sizes


def _bytes(op):
    return 0 if op.type in ALIASES or op.type == 'Const' else sum(
        size_of(tensor) for tensor in op.outputs if tensor.dtype.is_floating)


def _crossing(operations):
    """For each operation, bytes of the tensors made up to it that later operations take."""
    place = {op.name: index for index, op in enumerate(operations)}
    change, last = [0] * (len(operations) + 1), {}
    for index, op in enumerate(operations):
        for tensor in op.inputs:
            if tensor.op.name in place:
                last[tensor.name] = index
    for index, op in enumerate(operations):
        for tensor in op.outputs:
            if last.get(tensor.name, index) > index and op.type != 'Const':
                change[index] += size_of(tensor)
                change[last[tensor.name]] -= size_of(tensor)
    found, now = [], 0
    for each in change[:-1]:
        now += each
        found.append(now)
    return found


def _move_variable(graph, name, there, device):
    """Puts a variable, with its parts and the operations colocated with it, on another device.

    Args:
      graph: the `tf.Graph`.
      name: the name of the variable's operation.
      there: the device that it is on.
      device: the device that it goes to.
    """
    own = ('loc:@' + name).encode()
    moved = [op for op in graph.get_operations() if op.device == there and (
        op.name == name or op.name.startswith(name + '/') or own in op.colocation_groups())]
    for op in moved:
        compat.set_device(op, device)
    for op in moved:  # a moving average's initial value is with that
        if op.type in VARIABLE_OPS and op.name != name:
            _move_variable(graph, op.name, there, device)
