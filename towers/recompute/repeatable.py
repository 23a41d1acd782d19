"""The operations of a forward pass that can be computed again in the backward pass.

A repeated operation has to give the same result. So it draws no random numbers, keeps no state,
and reads nothing that the step writes. Its test is `tests/recompute/test_rewrite.py`.

Words of other rooms used here: an operation `is_random` if it draws by a generator, and has a
`seed_position` if it draws from a seed that it takes; it `is_control_flow` if it is in a loop or a
branch (v1), or leads into or out of a loop or a branch; `functions_of` a node are the functions
that it may call.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.edit import functions_of
from towers.graph.graph_walk import (
    names_of,
    of_types,
    operation_of,
    producers_of,
    without_names,
)
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes, is_variable
from towers.recompute.segments import SMALL, size_of

# Types of operations that may give another result when they are copied, though they are not
# stateful: Python functions, which may draw or count; and what a program may feed by hand (a shard,
# a value of the whole batch), since its copy would not be fed.
_NOT_REPEATED = frozenset(['PyFunc', 'PyFuncStateless', 'EagerPyFunc', 'PlaceholderWithDefault'])


def repeatable_operations(forward: typing.List[tf.Operation], taken: typing.Set[str],
                          keeps_small: bool) -> typing.List[tf.Operation]:
    """Finds the operations of a forward pass that can be computed again, and are worth it.

    Each of them gives the same result when it runs again, and the backward pass takes its result,
    or a tensor that is computed from it.

    Args:
      forward: the operations of the forward pass, in the order in which they were made.
      taken: names of the tensors that the backward pass takes.
      keeps_small: whether small floating tensors are kept. Small integer tensors are kept in any
        case.

    Returns:
      List of the operations, in the order of `forward`.

    Raises:
      InvalidArgumentError: the model writes a trained reference variable.
    """
    trained_names = names_of(trained_references(forward))
    _check_no_writes(forward, trained_names)
    names_from_random = graph_walk.reachable_from(filter(_draws, forward), forward)
    repeatable = []
    for op in _with_same_results(forward, trained_names):
        # Random numbers are kept, since they cannot be drawn again. Where the mask of a dropout is
        # made from them, the mask is kept in their place: it has one byte an entry, and random
        # numbers have four.
        is_random_mask = op.name in names_from_random and _is_mask(op)
        are_results_kept = is_random_mask or _gives_small_tensors(op, keeps_small)
        if not are_results_kept:
            repeatable.append(op)
    return operations_behind(taken, repeatable)


def _with_same_results(forward: typing.List[tf.Operation],
                       trained_names: typing.Set[str]) -> typing.List[tf.Operation]:
    """List of the operations of a forward pass whose copies, in the backward pass, would give the
    same results.

    Args:
      forward: the operations of the forward pass, in the order in which they were made.
      trained_names: the names of the trained reference variables.
    """
    index_by_name = graph_walk.indices_by_name(forward)
    names_from_references = _computed_from_references(forward, trained_names)
    candidates = filter(_may_run_twice, without_names(forward, names_from_references))
    return [op for op in candidates if not _takes_a_later_result(op, index_by_name)]


def _may_run_twice(op: tf.Operation) -> bool:
    """Whether an operation gives the same results each time that it runs in a step, and can be
    copied by itself."""
    if not op.inputs or not op.outputs:
        return False  # a constant, a placeholder, a variable, or a group: nothing to repeat
    if op.op_def.is_stateful or _draws(op) or op.type in _NOT_REPEATED:
        return False
    if graph_walk.is_control_flow(op):
        return False  # a copy would have to be in the same iteration of the loop (v1)
    if functions_of(op.node_def):
        return False  # a function (control flow v2, `tf.function`) may draw, write or count
    tensors = list(op.inputs) + list(op.outputs)
    return all(map(_is_plain_value, tensors))


def _draws(op: tf.Operation) -> bool:
    """Whether an operation draws random numbers, by a generator or from a seed that it takes."""
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def _is_plain_value(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a value, and not a handle or a reference, whose content may change."""
    return tensor.dtype != tf.variant and not is_variable(tensor)


def _takes_a_later_result(op: tf.Operation, index_by_name: typing.Dict[str, int]) -> bool:
    """Whether an operation takes the result of an operation that was made after it, as happens in a
    loop. A segment, which is a piece of the order of making, could not be computed then.

    Args:
      op: the operation.
      index_by_name: {name of an operation of the forward pass: its index in the order of making};
        operations that are not in it were made before.
    """
    latest_producer = max(index_by_name.get(producer.name, -1) for producer in producers_of(op))
    return latest_producer > index_by_name[op.name]


def _is_mask(op: tf.Operation) -> bool:
    """Whether all results of an operation are of type bool."""
    return all(tensor.dtype == tf.bool for tensor in op.outputs)


def _gives_small_tensors(op: tf.Operation, keeps_small: bool) -> bool:
    """Whether all results of an operation are so small that they are kept.

    Args:
      op: the operation.
      keeps_small: whether small floating tensors are kept. Small integer tensors are kept in any
        case: most of these are shapes and axes.
    """
    for tensor in op.outputs:
        may_be_kept = keeps_small or not tensor.dtype.is_floating
        if not may_be_kept or size_of(tensor) > SMALL:
            return False
    return True


def operations_behind(wanted: typing.Set[str], operations: typing.Sequence[tf.Operation],
                      kept: typing.AbstractSet[str] = frozenset()) -> typing.List[tf.Operation]:
    """List of the operations that compute the wanted tensors, directly or through other operations
    of the list.

    Args:
      wanted: names of the tensors.
      operations: the operations to choose from, in the order in which they were made.
      kept: names of tensors that are kept: nothing has to compute these for another operation.

    Returns:
      The operations, in the order of `operations`.
    """
    needed_tensors = set(wanted)
    needed: typing.Deque[tf.Operation] = collections.deque()
    # From the last to the first: so the operations that take a result are seen before the operation
    # that computes the result.
    for op in reversed(operations):
        if not needed_tensors.isdisjoint(names_of(op.outputs)):
            needed.appendleft(op)
            needed_tensors |= names_of(op.inputs) - kept
    return list(needed)


def trained_references(forward: typing.List[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations of the trained reference variables that a forward pass computes with.

    The memory of such a variable may hold another value when it is read again. Variables that a
    build makes are resource variables; those made before it, on TF 1, may be reference variables.
    """
    graph_operations = forward[0].graph.get_operations()
    forward_names = names_of(forward)
    trained = map(operation_of, tf.trainable_variables())
    read = []
    for variable in of_types(trained, REFERENCE_VARIABLES):
        # In the whole graph: the operation that reads it may have been made before the model.
        dependents = graph_walk.reachable_from([variable], graph_operations)
        if not forward_names.isdisjoint(dependents):
            read.append(variable)
    return read


def _computed_from_references(forward: typing.List[tf.Operation],
                              trained_names: typing.Set[str]) -> typing.Set[str]:
    """Finds the operations that must not be computed again, since they are computed from reference
    variables that are not trained: the step may have written these by then.

    What is computed from trained reference variables may be computed again: their update waits for
    the recomputation (see `Recomputed.reads_references`), and a model that writes one is refused.

    Args:
      forward: the operations of the forward pass.
      trained_names: the names of the trained reference variables.

    Returns:
      Set of the names of the operations.
    """
    graph_operations = forward[0].graph.get_operations()
    references = of_types(graph_operations, REFERENCE_VARIABLES)
    not_trained = without_names(references, trained_names)
    return graph_walk.reachable_from(not_trained, graph_operations)


def _check_no_writes(forward: typing.List[tf.Operation], trained_names: typing.Set[str]) -> None:
    """Raises `InvalidArgumentError` if a forward pass writes a trained reference variable, whose
    name is in `trained_names`."""
    if not trained_names:  # to find the writes of a large graph takes long
        return
    writes = Writes(forward[0].graph)
    for op in forward:
        for name in trained_names.intersection(writes.written_by(op)):
            raise InvalidArgumentError(
                'recompute=, and the model computes with the reference variable %s, which %s '
                'writes before it is read again: make it with use_resource=True, or in a model '
                'function.' % (name, op.name))
