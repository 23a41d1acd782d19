"""Inline updates: writes of shared variables in the forward pass, and which tower makes them.

Batch norm with `updates_collections=None` writes its moving averages in the forward pass: the loss
waits for these writes. What becomes of a write depends on the build:

    update_ops='first'   the first tower writes, as on one device. The other towers leave the write
                         out, as they leave out their `UPDATE_OPS`. If the new value is used (a
                         counter of steps), they use the value that the first tower has written
    update_ops='all'     every tower writes, one after the other: see `write_in_turn`
    update_ops='none'    no tower writes. If the new value is used, the first tower writes and all
                         towers use its value, as with 'first'

On synchronous parameter servers all workers share the variables: worker 0, the chief, writes with
its first tower, and the other workers leave the write out.

A write by an update op is treated alike if other towers would make it as well: what every tower
runs may wait for it, such as an update op that stores rows of each example, the update_op of a
metric, or a tower's part of a sum over all towers.

With accumulation the first tower's write becomes one of its update ops. In the forward pass it
would close a circle: the gradients of the first micro-batch wait for the write; the write waits for
all reads, those of later micro-batches among them; and a later micro-batch begins when the
gradients of the first are there.

Its test is `tests/roles/test_inline_updates.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph.function_variables import without_writes
from towers.graph.graph_walk import ancestors, names_of, operation_names
from towers.graph.op_types import CONTROL_FLOW_V2
from towers.graph.order import awaited_without, end_of_branches
from towers.graph.variable_access import Writes, variable_taken
from towers.model.request import Request
from towers.roles.used_writes import used_writes
from towers.roles.writes import Write, after_kept_writes, writes_by, writes_not_by


class SharedWrites(typing.NamedTuple):
    """The writes of shared variables that the first tower is to make for all towers.

    Attributes:
      forward: the writes of the forward pass.
      update_ops: writes of update ops that the other towers would make as well, since what every
        tower runs waits for them or uses what they write.
    """
    forward: typing.List[Write]
    update_ops: typing.List[Write]


class InlineUpdates(typing.NamedTuple):
    """What the copies of the first tower do in the place of its writes.

    Attributes:
      left_out: names of the first tower's writes that the copies do without.
      shared: names of the first tower's writes whose value all towers use, so that the copies have
        no such write of their own.
      in_functions: {name of an operation of the first tower that writes in a function: the
        positions, among its inputs and counted from the last (-1), of the variables that its copies
        do not write}.
      update_ops: list of the first tower's operations that its step has to run as update ops, since
        its forward pass does not wait for them any more.
    """
    left_out: typing.AbstractSet[str] = frozenset()
    shared: typing.AbstractSet[str] = frozenset()
    in_functions: typing.Dict[str, typing.List[int]] = {}
    update_ops: typing.List[tf.Operation] = []


def inline_updates(writes: SharedWrites, operations: typing.Sequence[tf.Operation],
                   fetches: list, request: Request,
                   replicated: typing.AbstractSet[str] = frozenset()) -> InlineUpdates:
    """Decides which of the first tower's writes the other towers leave out, and which value they
    share; takes the writes that become update ops out of the first tower's forward pass.

    It comes before gradients are taken: the backward pass then follows the changed forward pass.

    Args:
      writes: the writes that the first tower is to make.
      operations: all operations of the call of the model function.
      fetches: what a step runs in every tower.
      request: `Request` of the build.
      replicated: names of the variables that have replicas.

    Raises:
      SharedVariableError: a write that cannot be left to the first tower.
    """
    all_writes = writes.forward + writes.update_ops
    if not all_writes or _writes_stay(request):
        return InlineUpdates()
    update_ops = request.training.update_ops
    if update_ops == 'none':
        used = used_writes(all_writes, fetches, operations)
        _check_replicated(writes_by(all_writes, used), replicated)  # nothing runs the other writes
        return _written_by_none(all_writes, used, operations)
    # Replicas get new values from update ops alone (`follow_updates`). So a write in the forward
    # pass is refused, whether its value is used or not.
    _check_replicated(writes.forward, replicated)
    if update_ops == 'all':
        return InlineUpdates()  # every tower has its writes: there is nothing to leave out
    used = used_writes(all_writes, fetches, operations)
    # The replicas follow what an update op writes, but only when the step is done.
    _check_replicated(writes_by(writes.update_ops, used), replicated)
    if _do_workers_share_variables(request):
        return _written_by_chief(writes, used, operations, fetches, request)
    return _written_by_first(writes, used, operations, fetches, request)


def _do_workers_share_variables(request: Request) -> bool:
    """Whether several workers make one step on parameter servers, in the build of a `Request`."""
    return request.served_rank is not None


def _written_by_none(writes: typing.Sequence[Write], used: typing.Set[str],
                     operations: typing.Sequence[tf.Operation]) -> InlineUpdates:
    """The `InlineUpdates` of `update_ops='none'`: nothing runs the writes whose value is not used.
    The first tower makes the writes whose value is used, and all towers share this value.

    Args:
      writes: the writes of shared variables that the first tower's forward pass and the update_ops
        of its metrics run.
      used: names of the writes whose new value is used.
      operations: all operations of the call of the model function.
    """
    # Two kinds of writes are refused. A write in a function: only copies can call the function
    # without its write, and tower 0 would write. A used write in a loop or a branch of tower 0: no
    # other tower can take a value from within it.
    _check_can_be_left(writes, used, Writes(tf.get_default_graph()))
    unused = _unused(writes, used)
    _unhook(operations, unused)
    return InlineUpdates(left_out=names_of(unused), shared=used)


def _written_by_first(writes: SharedWrites, used: typing.Set[str],
                      operations: typing.Sequence[tf.Operation], fetches: list,
                      request: Request) -> InlineUpdates:
    """The `InlineUpdates` of `update_ops='first'`, where the variables are not on parameter servers
    that several workers share.

    Args:
      writes: the writes that the first tower is to make.
      used: names of the writes whose new value is used.
      operations: all operations of the call of the model function.
      fetches: what a step runs in every tower.
      request: `Request` of the build.
    """
    finder = Writes(tf.get_default_graph())
    all_writes = writes.forward + writes.update_ops
    # Tower 0 calls a function that writes as it is, and a copy calls it without its writes; but not
    # if the variable is read after the call. A copy's read would wait for the copy's own call,
    # which writes nothing, and not for tower 0's. `_check_can_be_left` refuses such a write.
    read_after_write = used_writes(all_writes, fetches, operations, counts_results=False)
    in_functions = _removable_in_functions(writes_not_by(all_writes, read_after_write), finder)
    in_forward = writes_not_by(writes.forward, in_functions)
    in_update_ops = writes_not_by(writes.update_ops, in_functions)
    _check_can_be_left(in_forward + in_update_ops, used, finder)
    unused_in_forward = _unused(in_forward, used)
    update_ops: typing.List[tf.Operation] = []
    if request.split.accumulate > 1:
        update_ops = _turned_into_update_ops(unused_in_forward, operations)
    left_out = names_of(unused_in_forward + _unused(in_update_ops, used))
    # A copy shares no result of a call that writes in a function: the copy makes a call of its own
    # and takes what that returns.
    shared = used - in_functions.keys()
    return InlineUpdates(left_out=left_out, shared=shared, in_functions=in_functions,
                         update_ops=update_ops)


def _written_by_chief(writes: SharedWrites, used: typing.Set[str],
                      operations: typing.Sequence[tf.Operation], fetches: list,
                      request: Request) -> InlineUpdates:
    """The `InlineUpdates` of `update_ops='first'` on parameter servers that several workers share:
    the first tower of the chief writes, and the chief is another process for all other workers.

    Args:
      writes, used, operations, fetches, request: see `_written_by_first`.
    """
    # Writes in functions are refused here. A copy can call a function without its writes; but the
    # first tower of another worker is no copy, and would write.
    _check_can_be_left(writes.forward + writes.update_ops, used, Writes(tf.get_default_graph()))
    _check_served(writes.forward, fetches)
    unused_in_forward = _unused(writes.forward, used)
    update_ops: typing.List[tf.Operation] = []
    is_chief = request.served_rank == 0
    if not is_chief:
        _unhook(operations, unused_in_forward)  # this worker does not write
    elif request.split.accumulate > 1:
        update_ops = _turned_into_update_ops(unused_in_forward, operations)
    left_out = names_of(unused_in_forward + _unused(writes.update_ops, used))
    return InlineUpdates(left_out=left_out, shared=used, update_ops=update_ops)


def _unused(writes: typing.Iterable[Write],
            used: typing.Container[str]) -> typing.List[tf.Operation]:
    """List of the operations of the writes whose names are not in `used`."""
    return [write.op for write in writes if write.op.name not in used]


def _writes_stay(request: Request) -> bool:
    """Whether the forward pass keeps its writes as they are, in the build of a `Request`: if no
    other tower is made from it, no other worker writes the variables, and `update_ops` is not
    `'none'`."""
    has_no_copies = request.num_parts_of_call == 1
    writes_alone = has_no_copies and not _do_workers_share_variables(request)
    return writes_alone and request.training.update_ops != 'none'


def _turned_into_update_ops(
        unused: typing.Sequence[tf.Operation],
        operations: typing.Sequence[tf.Operation]) -> typing.List[tf.Operation]:
    """Takes writes out of the forward pass of the first tower, which is to run them as update ops.
    Accumulation needs this; the module's docstring has the reason.

    Args:
      unused: the writes, whose values are not used.
      operations: all operations of this forward pass.

    Returns:
      List of the operations that the tower is to run as update ops.
    """
    # Writes in loops stay in the forward pass: TensorFlow lets no operation outside of a loop wait
    # for an operation inside.
    outside_of_loops = [op for op in unused if not compat.in_loop(op)]
    # An update op in a branch would not run if the branch is not taken; the end of the branch
    # always runs.
    update_ops = list(map(end_of_branches, outside_of_loops))
    _unhook(operations, outside_of_loops)
    return update_ops


def _removable_in_functions(writes: typing.Iterable[Write],
                            finder: Writes) -> typing.Dict[str, typing.List[int]]:
    """Finds the writes in functions (control flow v2, `tf.function`) without which the functions
    can be copied, as `InlineUpdates.in_functions`."""
    in_functions = {}
    for write in writes:
        # The writes of a loop stay: an iteration may read what the one before has written.
        is_loop = 'While' in write.op.type
        if not finder.calls_functions(write.op) or is_loop:
            continue
        positions = _positions_of_variables(write)
        if _can_do_without_writes(finder.functions(write.op), positions):
            in_functions[write.op.name] = positions
    return in_functions


def _can_do_without_writes(functions: typing.Iterable, positions: typing.List[int]) -> bool:
    """Whether each function can be copied without its writes of variables, see `without_writes`.

    Args:
      functions: `FunctionDef`s.
      positions: the positions of the variables among their arguments.
    """
    return all(without_writes(function, positions) is not None for function in functions)


def _positions_of_variables(write: Write) -> typing.List[int]:
    """List of the positions at which a write takes its variables, counted from its last input, -1.

    Counted from the last, they are also the positions among the arguments of the functions that the
    operation calls: an `If` has its condition before these arguments.
    """
    op = write.op
    positions = []
    for index, tensor in enumerate(op.inputs):
        variable = variable_taken(tensor)
        if variable is not None and variable.name in write.variables:
            positions.append(index - len(op.inputs))
    return positions


def _unhook(operations: typing.Sequence[tf.Operation],
            writes: typing.Iterable[tf.Operation]) -> None:
    """Removes all waits of the operations for the writes, so that nothing runs the writes. What
    waited for a write then waits for what the write waits for, and for what computes the written
    value after another write, one that stays: see `awaited_without`."""
    names = names_of(writes)
    after_kept = after_kept_writes(operations, left_out=names)
    for op in operations:
        if not names.isdisjoint(names_of(op.control_inputs)):
            compat.set_control_inputs(op, awaited_without(op.control_inputs, names, after_kept))


# ---- what is refused -----------------------------------------------------------------------------

class _RefusedPlace(typing.NamedTuple):
    """Where a write is that cannot be left to the first tower, for the text of the error."""
    where: str
    or_else: str = ''  # what else a program can do there


_CONTROL_FLOW_V2_PLACE = _RefusedPlace('within a branch or a loop of control flow v2',
                                       ', or call tf.disable_control_flow_v2()')
_FUNCTION_PLACE = _RefusedPlace('within a function (tf.function, Defun)')
_USED_IN_CONTROL_FLOW_PLACE = _RefusedPlace(
    'within a branch or a loop, and uses what it has written there')


def _check_can_be_left(writes: typing.Iterable[Write], used: typing.Container[str],
                       finder: Writes) -> None:
    """Refuses writes that cannot be left to the first tower.

    Args:
      writes: the writes.
      used: names of the writes whose new value is used.
      finder: finds the functions that operations call.
    """
    for write in writes:
        place = _refused_place(write.op, used, finder)
        if place is None:
            continue
        raise SharedVariableError(
            'every tower would write variable %s (operation %s) %s, where it cannot be left to the '
            'first tower: put the update into the collection UPDATE_OPS '
            "(slim's updates_collections, by default) or return it in 'updates', and let neither "
            'the loss nor another update wait for it by tf.control_dependencies; or pass '
            "update_ops='all' to have every tower write%s." % (
                write.variables[0], write.op.name, place.where, place.or_else))


def _refused_place(op: tf.Operation, used: typing.Container[str],
                   finder: Writes) -> typing.Optional[_RefusedPlace]:
    """Where an operation writes, if a write there cannot be left to the first tower; else None.

    Args:
      op: the operation that writes.
      used: names of the writes whose new value is used.
      finder: finds the functions that operations call.
    """
    if finder.calls_functions(op):
        return _CONTROL_FLOW_V2_PLACE if op.type in CONTROL_FLOW_V2 else _FUNCTION_PLACE
    if op.name in used and compat.in_control_flow(op):
        return _USED_IN_CONTROL_FLOW_PLACE
    return None


def _check_replicated(writes: typing.Iterable[Write],
                      replicated: typing.AbstractSet[str]) -> None:
    """Refuses writes of variables that have replicas; `replicated` are their names."""
    for write in writes:
        for variable in sorted(replicated & set(write.variables)):
            raise SharedVariableError(
                "VariablePlacement('replicated'), and the first tower writes the trainable "
                'variable %s (operation %s) for what other towers compute, but their replicas '
                'would not get the new value: put the update into the collection UPDATE_OPS or '
                "return it in 'updates', which every replica follows when the step is done, and "
                'let neither the loss nor another update wait for it; make '
                'the variable with trainable=False, which has no replicas; or use another '
                'VariablePlacement.' % (variable, write.op.name))


def _check_served(writes: typing.Iterable[Write], fetches: list) -> None:
    """Refuses variables on parameter servers that the forward pass writes and uses: all workers
    share them, so that each would write them, or read them before or after the chief has written.

    Args:
      writes: the writes of the forward pass.
      fetches: what a step fetches, for which variables are read.
    """
    served = operation_names(tf.global_variables())  # local variables are each worker's own
    # Of a fetched operation nobody takes a value: what it reads is used by none.
    read = ancestors([fetch for fetch in fetches if isinstance(fetch, tf.Tensor)])
    served_and_read = served & read
    for write in writes:
        for name in write.variables:
            if name in served_and_read:
                raise SharedVariableError(
                    'the forward pass writes variable %s (operation %s) and uses its value; on '
                    'parameter servers all workers have this variable, and each would write it, or '
                    'read it before or after the chief has: put the update into the collection '
                    'UPDATE_OPS, or use a ring.' % (name, write.op.name))
