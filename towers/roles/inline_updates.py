"""Writes of shared variables in the forward pass: one tower writes, as on one device.

Batch norm with `updates_collections=None` writes its moving averages in the forward pass: the loss
waits for these writes. So with `update_ops='first'` the towers after the first leave out a write
whose value is not used, as they leave out their `UPDATE_OPS`; where the new value is used (a
counter of steps), they use the value that the first tower has written. With `update_ops='all'`
every tower writes, one after the other (`write_in_turn`), with `'none'` no tower does. Of the
workers of synchronous parameter servers, the chief's first tower writes.

A later micro-batch reads when the gradients of the first one are there, so that nothing of the
first one may wait for a write that waits for all reads: the write becomes one of its updates.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.op_types import CONTROL_FLOW_V2
from towers.graph.order import Precedence, left_branches, waited_instead
from towers.graph.variable_access import (
    Writes,
    initializers,
    is_variable,
    variable_op,
    without_writes,
)

Write = collections.namedtuple('Write', 'op variables')
"""An operation that writes, and the names of the variables that it writes."""


def writes_of(recorded):
    """The writes of a call of the model function: a list of `Write`, without initial values.

    The state of random generators is left out: each tower draws for itself.
    """
    left_out, finder = initializers() | recorded.owned, Writes(tf.get_default_graph())
    found = [Write(op, finder.of(op)) for op in recorded.operations
             if op.name not in left_out and not graph_walk.is_random(op)]
    return [write for write in found if write.variables]


class InlineUpdates(collections.namedtuple(
        'InlineUpdates', 'left_out shared in_functions updates',
        defaults=(frozenset(), frozenset(), {}, []))):
    """The writes of the first tower that the towers after it leave out, or share.

    Attributes:
      left_out: names of the first tower's operations that the other towers do without.
      shared: names of the first tower's operations whose value all towers use.
      in_functions: {name of an operation of the first tower that writes in a function: the
        positions, from the last (-1), of the variables that the other towers' leave alone}.
      updates: list of the writes that became updates of the first tower.
    """
    __slots__ = ()


def inline_updates(writes, operations, fetches, request, replicated=frozenset()):
    """Leaves out or shares the first tower's `writes` of shared variables, before gradients are
    taken: `InlineUpdates`. `fetches` are a step's fetches but for the updates; `replicated` are
    the names of variables that have replicas."""
    served, update_ops = request.served_rank, request.training.update_ops
    if not writes or request.parts_a_call == 1 and served is None and update_ops != 'none':
        return InlineUpdates()
    used = _writes_used(writes, fetches)
    _check_replicated(writes, replicated, used if update_ops == 'none' else None)
    if update_ops == 'all':
        return InlineUpdates()
    finder, in_functions, others = Writes(tf.get_default_graph()), {}, []
    for write in writes:
        positions = _left_alone(write, finder) if update_ops == 'first' and served is None else []
        if positions:
            in_functions[write.op.name] = positions
        else:
            _check(write, write.op.name in used, finder)
            others.append(write)
    if served is not None and update_ops == 'first':
        _check_served(others, fetches)
    unused, updates = [write.op for write in others if write.op.name not in used], []
    if update_ops == 'none' or served is not None and served > 0:  # the chief writes
        _unhook(operations, unused)
    elif request.split.accumulate > 1:
        late = [op for op in unused if compat.in_branches_alone(op)]
        updates = [left_branches(op) for op in late]
        _unhook(operations, late)
    return InlineUpdates(
        left_out={op.name for op in unused}, in_functions=in_functions, updates=updates,
        shared={write.op.name for write in others if write.op.name in used})


def _left_alone(write, finder):
    """Positions of the variables that the functions of an operation can leave alone; or []."""
    if not finder.within_function(write.op) or 'While' in write.op.type:
        return []
    inputs = list(write.op.inputs)
    positions = [place - len(inputs) for place, tensor in enumerate(inputs)
                 if is_variable(tensor) and variable_op(tensor) is not None
                 and variable_op(tensor).name in write.variables]
    return positions if all(without_writes(function, positions) is not None
                            for function in finder.functions(write.op)) else []


def _check(write, is_used, finder):
    """Refuses a write that cannot be left to the first tower."""
    reason = or_else = ''
    if finder.within_function(write.op):
        reason = 'within a function (tf.function, Defun)'
        if write.op.type in CONTROL_FLOW_V2:
            reason = 'within a branch or a loop of control flow v2'
            or_else = ', or call tf.disable_control_flow_v2()'
    elif is_used and compat.in_control_flow(write.op):
        reason = 'within a branch or a loop, and uses what it has written there'
    if reason:
        raise SharedVariableError(
            'the forward pass of every tower writes variable %s (operation %s) %s, where it '
            'cannot be left to the first tower: put the update into the collection UPDATE_OPS '
            "(slim's updates_collections, by default), return it in 'updates', pass "
            "update_ops='all' to have every tower write%s." % (
                write.variables[0], write.op.name, reason, or_else))


def _check_replicated(writes, replicated, names):
    """Refuses writes of variables that have replicas; of these names alone, if any are given."""
    for write in writes:
        for variable in sorted(replicated.intersection(write.variables)):
            if names is None or write.op.name in names:
                raise SharedVariableError(
                    "VariablePlacement('replicated'), and the forward pass of the first tower "
                    'writes the trainable variable %s (operation %s), which the replicas of the '
                    'other towers would not get: put the update into the collection UPDATE_OPS '
                    "(and let the loss not wait for it), or return it in 'updates', which every "
                    'replica follows; make the variable with trainable=False, which has no '
                    'replicas; or use another VariablePlacement.' % (variable, write.op.name))


def _check_served(writes, fetches):
    """Refuses variables that the forward pass writes and reads: workers of parameter servers would
    each write them, or read them at any time."""
    served, read = {each.op.name for each in tf.global_variables()}, graph_walk.ancestors(
        [tensor for tensor in fetches if isinstance(tensor, tf.Tensor)])
    for write in writes:
        for name in write.variables:
            if name in served and name in read:
                raise SharedVariableError(
                    'the forward pass writes variable %s (operation %s) and uses its value; on '
                    'parameter servers all workers have this variable, and each would write it, or '
                    'read it before or after the chief has: put the update into the collection '
                    "UPDATE_OPS, or use a ring." % (name, write.op.name))


def _writes_used(writes, fetches):
    """Names of the writes whose new value the fetches are computed from.

    A control edge from a write does not use its value; a read that waits for one does.
    """
    by_name = {write.op.name: write.op for write in writes}
    writes_by_reader = _writes_by_reader(writes)
    order = Precedence(list(by_name.values()))
    stack = [getattr(fetch, 'op', fetch) for fetch in fetches]
    used, seen = {op.name for op in stack if op.name in by_name}, set()
    while stack:
        op = stack.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        inputs = [tensor.op for tensor in op.inputs]
        found = {each.name for each in inputs if each.name in by_name}
        # It reads a variable that is written: before or after the write?
        found.update(name for name in writes_by_reader.get(op.name, ())
                     if name != op.name and order.waits_for(op, by_name[name]))
        stack += inputs + [by_name[name] for name in found - used]
        used |= found
        stack += waited_instead(op.control_inputs, by_name.keys() - used)
    return used


def _writes_by_reader(writes):
    """{name of an operation that reads a variable: names of the writes of this variable}."""
    graph, finder = tf.get_default_graph(), Writes(tf.get_default_graph())
    found = collections.defaultdict(set)
    for write in writes:
        for name in write.variables:
            variable = graph.get_operation_by_name(name)
            # Of a reference variable also what takes its memory, from an `Identity`, say.
            for reader in finder.takers(variable) + finder.readers(variable):
                found[reader.name].add(write.op.name)
    return found


def _unhook(operations, writes):
    """Removes all control edges from these operations, so that nothing runs them."""
    names = {op.name for op in writes}
    for op in operations if names else ():
        if any(other.name in names for other in op.control_inputs):
            compat.set_control_inputs(op, waited_instead(op.control_inputs, names))
