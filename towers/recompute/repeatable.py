"""The operations of a forward pass that can be computed again in the backward pass.

A repeated operation has to give the same result. So it draws no random numbers, keeps no state,
and reads nothing that the step writes. Its test is `tests/recompute/test_rewrite.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.edit import functions_of
from towers.graph.graph_walk import names_of, producers_of
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes
from towers.recompute.segments import SMALL, size_of

# Calls of Python functions, which may draw or count even if their type is not stateful.
_PYTHON = frozenset(['PyFunc', 'PyFuncStateless', 'EagerPyFunc'])


def repeatable_operations(forward: typing.List[tf.Operation], taken: typing.Set[str],
                          keeps_small: bool) -> typing.List[tf.Operation]:
    """Finds the operations of a forward pass that can be computed again, and are worth it.

    Each of them gives the same result when it runs again, and the backward pass takes its result,
    or a tensor that is computed from it.

    Args:
      forward: the operations of the forward pass, in the order in which they were made.
      taken: names of the tensors that the backward pass takes.
      keeps_small: whether small floating tensors are kept. Small integers are in any case.

    Returns:
      List of the operations, in the order of `forward`.

    Raises:
      InvalidArgumentError: the model writes a trained reference variable.
    """
    index_by_name = graph_walk.indices_by_name(forward)
    names_from_references = _computed_from_references(forward)
    names_from_random = graph_walk.reachable_from(filter(_draws, forward), forward)
    repeatable: typing.Dict[str, tf.Operation] = collections.OrderedDict()
    for op in forward:
        if not _may_run_twice(op) or op.name in names_from_references:
            continue
        if _takes_a_later_result(op, index_by_name):
            continue
        if all(_is_kept_for_its_size(tensor, keeps_small) for tensor in op.outputs):
            continue
        # Random numbers are kept, since they cannot be drawn again. Where the mask of a dropout is
        # made from them, it is kept in their place: it has one byte an entry, and they have four.
        is_random_mask = op.name in names_from_random and _is_mask(op)
        if is_random_mask:
            continue
        repeatable[op.name] = op
    return _needed_for(repeatable, taken)


def _may_run_twice(op: tf.Operation) -> bool:
    """Whether an operation gives the same results each time that it runs in a step, and can be
    copied by itself."""
    if not op.inputs or not op.outputs:
        return False  # a constant, a placeholder or a variable; a group
    if op.op_def.is_stateful or _draws(op) or op.type in _PYTHON:
        return False
    # A copy in a loop or a branch (v1) would have to be within the same turn of it; a function
    # (control flow v2, `tf.function`) may draw, write or count.
    if graph_walk.is_control_flow(op) or functions_of(op.node_def):
        return False
    # A shard, which may be fed by hand, and its copy would not be; or a value of the whole batch.
    if op.type == 'PlaceholderWithDefault':
        return False
    tensors = list(op.inputs) + list(op.outputs)
    return all(map(_is_plain_value, tensors))


def _draws(op: tf.Operation) -> bool:
    """Whether an operation draws random numbers, by a generator or from a seed that it takes."""
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def _is_plain_value(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a value, and not a handle or a reference, whose content may change."""
    is_handle = tensor.dtype in (tf.resource, tf.variant)
    is_reference = tensor.dtype != tensor.dtype.base_dtype
    return not is_handle and not is_reference


def _takes_a_later_result(op: tf.Operation, index_by_name: typing.Dict[str, int]) -> bool:
    """Whether an operation takes the result of an operation that was made after it, as happens in a
    loop. A segment, which is a piece of the order of making, could not be computed then.

    Args:
      op: the operation.
      index_by_name: {name of an operation of the forward pass: its index in the order of making};
        operations that are not in it were made before.
    """
    producer_names = names_of(producers_of(op))
    latest_producer = max(index_by_name.get(name, -1) for name in producer_names)
    return latest_producer > index_by_name[op.name]


def _is_mask(op: tf.Operation) -> bool:
    """Whether all results of an operation are of type bool."""
    return all(tensor.dtype == tf.bool for tensor in op.outputs)


def _is_kept_for_its_size(tensor: tf.Tensor, keeps_small: bool) -> bool:
    """Whether a tensor is kept because it is small.

    Args:
      tensor: the tensor.
      keeps_small: whether small floating tensors are kept. Small integers are in any case: most of
        them are shapes and axes.
    """
    if size_of(tensor) > SMALL:
        return False
    return keeps_small or not tensor.dtype.is_floating


def _needed_for(repeatable: typing.Dict[str, tf.Operation],
                taken: typing.Set[str]) -> typing.List[tf.Operation]:
    """List of the operations whose results the backward pass takes, and of those from which these
    are computed.

    Args:
      repeatable: {name: operation}, in the order in which they were made.
      taken: names of the tensors that the backward pass takes.

    Returns:
      The operations, in the order of `repeatable`.
    """
    needed_names = set()
    # From the last to the first: an operation comes after those that take its results.
    for name, op in reversed(list(repeatable.items())):
        is_taken = not taken.isdisjoint(names_of(op.outputs))
        if is_taken or name in needed_names:
            needed_names.add(name)
            needed_names |= names_of(producers_of(op))
    return [op for name, op in repeatable.items() if name in needed_names]


def trained_references(forward: typing.List[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations of the trained reference variables that a forward pass computes with.

    The memory of such a variable may hold another value when it is read again. Variables that a
    build makes are resource variables; those made before it, on TF 1, may be reference variables.
    """
    operations = forward[0].graph.get_operations()
    forward_names = names_of(forward)
    read = []
    for variable in tf.trainable_variables():
        if variable.op.type not in REFERENCE_VARIABLES:
            continue
        dependents = graph_walk.reachable_from([variable.op], operations)
        if not forward_names.isdisjoint(dependents):
            read.append(variable.op)
    return read


def _computed_from_references(forward: typing.List[tf.Operation]) -> typing.Set[str]:
    """Finds the operations that must not be computed again, since they are computed from reference
    variables that are not trained: the step may have written these by then.

    What is computed from trained reference variables may be computed again: their update waits for
    the recomputation (see `Recomputed.reads_references`), and a model that writes one is refused.

    Returns:
      Set of the names of the operations.

    Raises:
      InvalidArgumentError: the forward pass writes a trained reference variable.
    """
    trained_names = names_of(trained_references(forward))
    if trained_names:
        _check_no_writes(forward, trained_names)
    operations = forward[0].graph.get_operations()
    not_trained = []
    for op in operations:
        is_reference = op.type in REFERENCE_VARIABLES
        if is_reference and op.name not in trained_names:
            not_trained.append(op)
    if not not_trained:
        return set()
    return graph_walk.reachable_from(not_trained, operations)


def _check_no_writes(forward: typing.List[tf.Operation], trained: typing.Set[str]) -> None:
    """Raises `InvalidArgumentError` if a forward pass writes a reference variable whose name is in
    `trained`."""
    writes = Writes(forward[0].graph)
    for op in forward:
        for name in trained.intersection(writes.written_by(op)):
            raise InvalidArgumentError(
                'recompute=, and the model computes with the reference variable %s, which %s '
                'writes before it is read again: make it with use_resource=True, or in a model '
                'function.' % (name, op.name))
