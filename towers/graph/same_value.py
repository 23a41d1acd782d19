"""Whether two tensors of a graph have the same value: the same operations on the same sources."""

import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import ancestors, operations_named, source_through
from towers.graph.op_types import LEAD_IN, VARIABLE_OPS

# Operations through which two tensors are compared: they hand a value on, or read a variable.
_HAND_ON_OR_READ = LEAD_IN | {'ReadVariableOp'}


def is_computed_from(tensors: typing.Iterable, term: tf.Tensor) -> bool:
    """Whether any of `tensors` is computed from `term`, or from a tensor that computes the same.

    Needed since Keras makes the loss of a weight anew each time that a program asks for a layer's
    losses: the total loss has one of these tensors, and the collection of losses another.
    """
    upstream = ancestors(tensors)
    if term.op.name in upstream:
        return True
    for op in operations_named(term.graph, sorted(upstream)):
        has_same_output = op.type == term.op.type and len(op.outputs) > term.value_index
        if not has_same_output:
            continue
        candidate = op.outputs[term.value_index]
        has_same_rank = candidate.shape.ndims == term.shape.ndims  # saves most long comparisons
        if has_same_rank and _is_same(term, candidate):
            return True
    return False


def _is_same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether the same operations compute two tensors from the same variables.

    Compares the operations behind both, pair by pair, up to the first pair that differs.
    """
    pairs = [(one, other)]  # of tensors that have to be the same
    compared = set()  # names of such pairs; a loop leads back to a pair
    while pairs:
        one, other = pairs.pop()
        one = source_through(one, _HAND_ON_OR_READ)
        other = source_through(other, _HAND_ON_OR_READ)
        names = (one.name, other.name)
        if one.name == other.name or names in compared:
            continue
        compared.add(names)
        # Two sources of different names, such as two variables, are never the same.
        if _is_source(one.op) or not _is_same_function(one, other):
            return False
        pairs.extend(zip(one.op.inputs, other.op.inputs))
    return True


def _is_source(op: tf.Operation) -> bool:
    """Whether the value of an operation is not computed from its inputs and attributes alone: a
    variable, a placeholder, a random number. Such a value counts as different from the value of any
    other operation."""
    if op.type in VARIABLE_OPS or op.op_def.is_stateful:
        return True
    return not op.inputs and op.type != 'Const'


def _is_same_function(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether two tensors are the same function of the inputs of their operations."""
    output_of_one = (one.op.type, one.value_index, len(one.op.inputs))
    output_of_other = (other.op.type, other.value_index, len(other.op.inputs))
    if output_of_one != output_of_other:
        return False  # before `_attributes`, which take long
    return _attributes(one.op) == _attributes(other.op)


def _attributes(op: tf.Operation) -> typing.Dict[str, tf.AttrValue]:
    """{name: value} of the attributes that the kernel computes by, without TensorFlow's own, such
    as `_class`."""
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith('_')}
