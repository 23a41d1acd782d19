"""`update_ops='all'`: the towers write shared variables one after the other.

So N towers' moving averages are N steps of the average, as one device would take them with N
batches. In the forward pass, where some tower writes a variable, a tower takes it when the tower
before has done with it. An update does so, too, when all forward passes have read. Micro-batches
come before towers.

Its test is `tests/roles/test_write_order.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    ancestors,
    by_name,
    in_order_of_names,
    names_of,
    step_operations,
    variables_by_name,
)
from towers.graph.op_types import is_fused_batch_norm
from towers.graph.order import Frames, Wait, Waits
from towers.graph.variable_access import Writes, is_variable
from towers.roles.ownership import FIRST, Roles
from towers.roles.turns import Turn, take_turns, takes_from_outside
from towers.roles.write_order import (
    Operations,
    Takers,
    TowerWrite,
    add_waits,
    fetches_without_updates,
    find_holds,
    held_by,
)

Variables = typing.Dict[str, tf.Variable]
"""{name of a variable: the variable}."""


def write_in_turn(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[Wait]:
    """Makes the writes of shared variables by all towers come one tower after the other.

    It makes three kinds of waits. A tower's forward pass takes a variable that forward passes write
    after the tower before. Update ops write after all forward passes have read. And update ops take
    turns, too.

    Args:
      towers: all towers.
      roles: the roles of the variables: where tower 0 alone would write by `update_ops='first'`
        (the role `FIRST`), all towers write here.

    Returns:
      What waits for what.

    Raises:
      SharedVariableError: an update cannot come after the tower before, since its value and the
        loss share a read.
    """
    finder = Writes(tf.get_default_graph())
    written = _variables_named(roles.names(FIRST))
    towers = sorted(towers, key=lambda tower: (tower.micro_batch, tower.index))
    forward: Operations = {}
    for tower in towers:
        forward.update(by_name(step_operations(fetches_without_updates(tower))))
    made_waits = _take_turns_in_forward_pass(towers, written, forward, finder)
    turns_of_towers = []
    writes = []
    for index, tower in enumerate(towers):
        turns: typing.List[Turn] = []
        for operations in _operations_by_update(tower, towers, forward):
            turns += _turns(tower, operations, written, finder)
            for op in operations:
                variables = _written_by(op, written, finder)
                if variables:
                    _check_reads_anew(op, variables, tower, forward)
                for name in variables:  # `take_turns` orders them, so none counts as every tower's
                    writes.append(TowerWrite(index, op, name, is_every=False))
        turns_of_towers.append(turns)
    made_waits += _make_wait_for_forward_passes(towers, writes, forward, finder)
    made_waits += take_turns(turns_of_towers, finder)
    return made_waits


def _variables_named(names: typing.Sequence[str]) -> Variables:
    """{name: variable} of the graph's variables that have these names."""
    variables = variables_by_name(tf.global_variables() + tf.local_variables())
    return {name: variables[name] for name in names if name in variables}


def _take_turns_in_forward_pass(towers: typing.Sequence[Tower], written: Variables,
                                forward: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes towers take variables in turn that their forward passes write; returns what waits for
    what.

    Args:
      towers: the towers, in the order of their turns.
      written: the variables that towers write.
      forward: the operations of the forward passes.
      finder: finds the writes of the graph.
    """
    inline = {}
    for name, variable in written.items():
        writers = names_of(finder.to(variable))
        if not writers.isdisjoint(forward):
            inline[name] = variable
    if not inline:
        return []
    turns_of_towers = [_turns(tower, forward.values(), inline, finder) for tower in towers]
    return take_turns(turns_of_towers, finder)


def _written_by(op: tf.Operation, variables: Variables, finder: Writes) -> Variables:
    """{name: variable} of those of the variables that an operation writes."""
    return {name: variables[name] for name in finder.of(op) if name in variables}


def _make_wait_for_forward_passes(towers: typing.Sequence[Tower], writes: typing.List[TowerWrite],
                                  forward: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes the writes of updates wait for what the forward passes read; returns what waits for
    what.

    Args:
      towers: the towers, in the order of their turns.
      writes: the writes of the towers.
      forward: the operations of the forward passes.
      finder: finds the writes of the graph.
    """
    takers: Takers = {}
    for write in writes:
        variable = write.op.graph.get_operation_by_name(write.variable)
        takers[write.variable] = finder.takers(variable, memory=True)
    frames = Frames(list(forward.values()) + [write.op for write in writes])
    holds = find_holds(towers, forward, writes, takers, frames)
    waits = Waits(held_by(holds))
    add_waits(holds, waits)
    return waits.put_into_graph(finder)


def _operations_by_update(tower: Tower, towers: typing.Sequence[Tower],
                          forward: Operations) -> typing.Iterator[typing.List[tf.Operation]]:
    """Yields for each update of a tower the operations that it runs beside the forward passes.

    `take_turns` puts an update after the update of the same place in the tower before. So where
    `towers` have not the same number of updates, all updates of a tower count as one.

    Args:
      tower: the tower.
      towers: all towers.
      forward: the operations of the forward passes.
    """
    numbers_of_updates = {len(each.updates) for each in towers}
    if len(numbers_of_updates) == 1:
        fetches_of_updates = [[update] for update in tower.updates]
    else:
        fetches_of_updates = [list(tower.updates)]
    for fetches in fetches_of_updates:
        yield [op for op in tower.own(step_operations(fetches)) if op.name not in forward]


def _check_reads_anew(op: tf.Operation, variables: Variables, tower: Tower,
                      forward: Operations) -> None:
    """Refuses an update whose new value is computed from a value of its variable that the forward
    pass has read: all towers' updates would start from that one.

    Args:
      op: the operation of the update that writes.
      variables: the variables that it writes.
      tower: the tower that it belongs to.
      forward: the operations of the forward passes.
    """
    upstream = ancestors([tensor for tensor in op.inputs if not is_variable(tensor)])
    shared = [forward[name] for name in forward if name in upstream]
    for take in takes_from_outside(tower, shared, variables):
        if _ignores_averages(take.op):
            continue
        takers: typing.List[tf.Operation] = []
        for output in take.op.outputs:
            takers += output.consumers()
        if all(each.name not in upstream or _ignores_averages(each) for each in takers):
            continue
        raise SharedVariableError(
            "update_ops='all', and the update of variable %s (operation %s) starts from a value "
            'that the forward pass has read (operation %s), so that it would be the last '
            "tower's alone: read the variable in the update, or pass update_ops='first'." % (
                take.variable.op.name, op.name, take.op.name))


def _ignores_averages(op: tf.Operation) -> bool:
    """Whether an operation is a fused batch norm in training that does not use the averages which
    it takes."""
    if not is_fused_batch_norm(op.type) or not op.get_attr('is_training'):
        return False
    attributes = op.node_def.attr
    return 'exponential_avg_factor' not in attributes or (
        attributes['exponential_avg_factor'].f == 1.)


def _turns(tower: Tower, operations: typing.Iterable[tf.Operation], variables: Variables,
           finder: Writes) -> typing.List[Turn]:
    """List of the turns of a tower: one for each variable, in the order of their names.

    Args:
      tower: the tower.
      operations: operations, in no order, of which only the tower's own count.
      variables: {name: variable}.
      finder: finds the writes of the graph.
    """
    own = by_name(tower.own(operations))
    frames = Frames(list(own.values()))
    takes = collections.defaultdict(list)
    for take in takes_from_outside(tower, own.values(), variables):
        takes[take.variable.op.name].append(take)
    turns = []
    for name, variable in sorted(variables.items()):
        ends = {}
        for op in finder.readers(variable.op) + finder.takers(variable.op):
            if op.name in own:
                # Any end comes after `op`; one of the forward pass comes early.
                candidates = frames.ends(op)
                candidates.sort(key=lambda end: end.name in tower.backward)
                ends.update(by_name(candidates[:1]))
        turns.append(Turn(tower.name_scope, takes[name], in_order_of_names(ends)))
    return turns
