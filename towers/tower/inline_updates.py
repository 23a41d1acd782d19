"""Writes of shared variables in the forward pass: one tower writes, as on one device.

Batch norm with `updates_collections=None` writes its moving averages in the forward pass: the loss
waits for these writes. On one device that is one update a step. In towers each would write the same
variable, at the same time. So with `update_ops='first'` the towers after the first leave out a
write whose value is not used, as they leave out their `UPDATE_OPS`; where the new value is used (a
counter of steps), they use the value that the first tower has written. With `update_ops='all'`
every tower writes, with `'none'` no tower does.

Workers of synchronous parameter servers have their variables in common, too: the chief's first
tower writes, and no other worker's. There a value that is read by training as well is refused: a
worker may read it before or after the chief has written.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.frames import left_branches, waited_instead
from towers.graph.nests import fetches_in
from towers.graph.op_types import CONTROL_FLOW_V2
from towers.graph.variable_access import (Writes, initializers, is_variable, variable_op,
                                          without_writes)
from towers.tower.write_order import write_after_reads

Write = collections.namedtuple('Write', 'op variables')
"""An operation that writes, and the names of the variables that it writes."""


class InlineUpdates(collections.namedtuple('InlineUpdates', [
        'writes', 'left_out', 'shared', 'in_functions', 'with_all_towers'],
        defaults=((), frozenset(), frozenset(), {}, ()))):
    """The writes of the first tower that the towers after it leave out, or share.

    Attributes:
      writes: list of `Write`: all of the first tower.
      left_out: names of the first tower's operations that the other towers do without.
      shared: names of the first tower's operations whose value all towers use.
      in_functions: dict from the names of the first tower's operations that write in a function to
        the positions, from the last (-1), of the variables that the other towers' leave alone.
      with_all_towers: names of the variables that every tower writes, with `update_ops='all'`.
    """
    __slots__ = ()

    def variables(self):
        """`(left out, used)`: names of the variables that the first tower writes for all."""
        used = {name for write in self.writes if write.op.name in self.shared
                for name in write.variables}
        others = {name for write in self.writes for name in write.variables
                  if write.op.name in self.left_out or write.op.name in self.in_functions}
        return sorted(others - used), sorted(used)


def inline_updates(operations, fetches, ignored, request, replicated=()):
    """Leaves out or shares the first tower's writes, before gradients are taken: `InlineUpdates`.

    Args:
      operations: the operations that the call of the model function made.
      fetches: the tensors that a step needs: loss, predictions, metrics; not the updates.
      ignored: names of variables that are each tower's own, or counters of metrics.
      request: `Request`.
      replicated: names of the variables that have replicas.

    Raises:
      SharedVariableError: a write that can neither be left out nor be shared, or that would not
        reach the replicas of a variable; or one of a variable that other workers read.
    """
    writes = _writes(operations, fetches, ignored)
    found, served, update_ops = InlineUpdates(writes), request.served_rank, request.update_ops
    alone = request.parts_a_call == 1 and served is None
    if not writes or alone and update_ops != 'none':
        return found
    used = writes_used(writes, fetches, {op.name for op in operations})
    replicated = frozenset(replicated)
    for write in writes:
        if replicated.intersection(write.variables) and (
                update_ops != 'none' or write.op.name in used):
            _refuse_replicated(write, sorted(replicated.intersection(write.variables))[0])
    if update_ops == 'all':
        return found._replace(
            with_all_towers=sorted({name for write in writes for name in write.variables}))
    finder, in_functions, others = Writes(tf.get_default_graph()), {}, []
    for write in writes:
        positions = _left_alone(write, finder) if update_ops == 'first' and served is None else []
        if positions:
            in_functions[write.op.name] = positions
        else:
            _check(write, write.op.name in used, finder)
            others.append(write)
    if served is not None and update_ops == 'first':
        _refuse_served(others, fetches)
    unused = [write for write in others if write.op.name not in used]
    if update_ops == 'none' or served is not None and served > 0:  # the chief writes
        _unhook(operations, unused)
    return found._replace(
        left_out={write.op.name for write in unused}, in_functions=in_functions,
        shared={write.op.name for write in others if write.op.name in used})


def _writes(operations, fetches, ignored):
    left_out, finder, candidates = initializers(), Writes(tf.get_default_graph()), []
    for op in operations:
        if op.name in left_out or graph_walk.is_random(op):
            continue  # the state of a random generator: each tower draws for itself
        names = [name for name in finder.of(op) if name not in ignored]
        if names:
            candidates.append(Write(op, names))
    step = {op.name for op in graph_walk.step_operations(fetches)} if candidates else ()
    return [write for write in candidates if write.op.name in step]


LateWrites = collections.namedtuple('LateWrites', 'loss predictions metrics gradients',
                                    defaults=((), (), (), ()))
"""Lists of the operations for which these wait when they are merged or added up, since the first
micro-batch's do not, see `wait_for_readers`."""


def wait_for_readers(updates, towers, request, of_every_tower=()):
    """Makes the first tower's writes wait for all towers' reads: `(towers, LateWrites)`.

    See `write_order`. So they do with one tower where each of several workers has the variables:
    but for worker 0, it stands for another tower of one machine.

    A later micro-batch reads when the gradients of the first one are there. So in micro-batches
    nothing of the first one waits for a write: the write becomes one of the tower's updates.

    Args:
      updates: `InlineUpdates`.
      towers: list of all `Tower`s.
      request: `Request`.
      of_every_tower: names of the variables that every tower writes, see `example_writes`.
    """
    late = LateWrites()
    if request.update_ops != 'first' or len(towers) < 2 and not request.has_copies:
        return towers, late
    if any(tower.micro_batch for tower in towers):
        first, late = _without_late(towers[0], [
            write.op for write in updates.writes if write.op.name in updates.left_out
            and compat.in_branches_alone(write.op)])
        towers = [first] + towers[1:]
    write_after_reads(towers, tf.get_default_graph(), of_every_tower)
    return towers, late


def _without_late(tower, writes):
    """`(tower, LateWrites)`: some writes are among its updates, and nothing in it waits for them.
    """
    names, updates = {op.name for op in writes}, [left_branches(op) for op in writes]
    fetches = [[tower.loss, tower.data_loss], tower.predictions, tower.metrics,
               [gradient for gradient, _ in tower.pairs]]
    late = []
    for nest in fetches:
        needed = {op.name for op in graph_walk.step_operations(fetches_in(nest))}
        late.append([update for op, update in zip(writes, updates) if op.name in needed])
    for op in graph_walk.step_operations(fetches_in(fetches)):
        if any(other.name in names for other in op.control_inputs):
            compat.set_control_inputs(op, waited_instead(op.control_inputs, names))
    return tower._replace(updates=tower.updates + updates), LateWrites(*late)


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
    reason, or_else = None, ''
    if finder.within_function(write.op):
        reason = 'within a function (tf.function, Defun)'
        if write.op.type in CONTROL_FLOW_V2:
            reason = 'within a branch or a loop of control flow v2'
            or_else = ', or call tf.disable_control_flow_v2()'
    elif is_used and compat.in_control_flow(write.op):
        reason = 'within a branch or a loop, and uses what it has written there'
    if reason is not None:
        raise SharedVariableError(
            'the forward pass of every tower writes variable %s (operation %s) %s, where it '
            'cannot be left to the first tower: put the update into the collection UPDATE_OPS '
            "(slim's updates_collections, by default), return it in 'updates', pass "
            "update_ops='all' to have every tower write%s." % (
                write.variables[0], write.op.name, reason, or_else))


def _refuse_replicated(write, variable):
    raise SharedVariableError(
        "VariablePlacement('replicated'), and the forward pass of the first tower writes the "
        'trainable variable %s (operation %s), which the replicas of the other towers would not '
        'get: put the update into the collection UPDATE_OPS (and let the loss not wait for it), or '
        "return it in 'updates', which every replica follows; make the variable with "
        'trainable=False, which has no replicas; or use another VariablePlacement.' % (
            variable, write.op.name))


def _refuse_served(writes, fetches):
    """Raises `SharedVariableError` for a variable that the forward pass writes and reads.

    Workers of parameter servers would each write it, or read it at any time.
    """
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


def writes_used(writes, fetches, made):
    """Names of the writes whose new value the fetches are computed from.

    Args:
      writes: list of `Write`.
      fetches: tensors.
      made: names of the tower's operations.
    """
    dropped = {write.op.name: write for write in writes}
    used = set()
    while True:
        found = _used_by(fetches, dropped, made)
        if not found:
            return used
        used |= found
        fetches = list(fetches) + [dropped.pop(name).op for name in sorted(found)]


def _used_by(fetches, dropped, made):
    """Names of the `dropped` writes whose value a fetch is computed from.

    A control edge from a write does not use its value.
    """
    found, by_variable = set(), collections.defaultdict(set)
    for name, write in dropped.items():
        for variable in write.variables:
            by_variable[variable].add(name)
    stack = [getattr(fetch, 'op', fetch) for fetch in fetches]
    seen = {op.name for op in stack}
    while stack:
        op = stack.pop()
        if op.name in dropped:  # of the fetches
            found.add(op.name)
            continue
        takes = [tensor.op for tensor in op.inputs]
        found.update(other.name for other in takes if other.name in dropped)
        written = set()
        for tensor in op.inputs:
            source = variable_op(tensor)  # None where the tensor is a value, read elsewhere
            if source is not None:
                written |= by_variable.get(source.name, set())
        if written:  # it reads a variable that is written: before or after the write?
            found |= written.intersection(
                each.name for each in graph_walk.step_operations([op]))
        for other in takes + waited_instead(op.control_inputs, dropped):
            if other.name not in seen and other.name not in dropped:
                seen.add(other.name)
                stack.append(other)
    return found


def _unhook(operations, writes):
    """Removes all control edges from these writes, so that nothing runs them."""
    names = {write.op.name for write in writes}
    if not names:
        return
    for op in operations:
        if any(other.name in names for other in op.control_inputs):
            compat.set_control_inputs(op, waited_instead(op.control_inputs, names))
