"""Which variable a tensor stands for, or has the value of, told by the graph and never by names.

A variable is an operation (`VariableV2`, or `VarHandleOp` for resource variables). An operation
that takes the output of this operation takes the variable itself; an operation that takes the
output of an `Identity` named `read`, or of a `ReadVariableOp`, takes the variable's value.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import HAND_ON, VARIABLE_OPS

# Operations whose output is the value, or a part of the value, of the variable that they take.
_READ = frozenset(['ReadVariableOp', 'ConcatV2', 'Concat'])

# What follows is about the memory of reference variables. The value of a reference variable is its
# memory, and many kernels pass on the memory that they read, at least where there is nothing to
# compute: `Identity`, `StopGradient`, `Reshape`, `StridedSlice`, `Tile` by 1, `Sum` over no axis.
# What takes it from them reads the variable when it computes, and not when they did. So every
# operation counts as passing memory on, but for those of a list. (The value of a resource variable
# stays as it is: a write takes new memory where a reader holds it.)
# Kernels whose result has memory of its own, or that of an input which nothing else holds; never
# that of a variable, which the variable holds. The tests write to a variable after each of them
# has read it.
COMPUTES = frozenset([
    'MatMul', 'BatchMatMulV2', 'Conv2D', 'BiasAdd', 'Add', 'AddV2', 'Sub', 'Mul', 'RealDiv', 'Relu',
    'ReluGrad', 'Tanh', 'TanhGrad', 'Sigmoid', 'SigmoidGrad', 'Softmax', 'MaxPool', 'AvgPool',
    'Gather', 'GatherV2', 'Square', 'SquaredDifference', 'Sqrt', 'Rsqrt', 'Exp', 'Log', 'Neg',
    'Abs', 'Maximum', 'Minimum', 'Greater', 'GreaterEqual', 'Less', 'LessEqual', 'Equal',
    'Shape', 'Size', 'Rank', 'ZerosLike', 'OnesLike'])
REFERENCE_VARIABLES = frozenset(['Variable', 'VariableV2', 'TemporaryVariable'])


def variable_op(tensor):
    """The operation of the variable whose handle or reference a tensor is; else None."""
    seen = set()
    while tensor.op.name not in seen:
        op = tensor.op
        if op.type in VARIABLE_OPS:
            return op
        if op.type not in HAND_ON or not is_variable(tensor):
            return None
        seen.add(op.name)
        tensor = op.inputs[tensor.value_index if op.type == 'IdentityN' else 0]
    return None


def read_from(tensor):
    """The operations of the variables whose values a tensor consists of; an empty list if none.

    The tensor may be a value that was passed on or cached, or the joined parts of a partitioned
    variable; it may not be the result of a computation.
    """
    found, stack, seen = [], [tensor], set()
    while stack:
        tensor = stack.pop()
        if tensor.op.name in seen:
            continue
        seen.add(tensor.op.name)
        if tensor.op.type in VARIABLE_OPS:
            found.append(tensor.op)
        elif tensor.op.type in HAND_ON or tensor.op.type in _READ:
            stack.extend(tensor.op.inputs)
    return found


def variables_read(operations, owned=(), others=()):
    """The variables that any of some operations takes, itself or by its value.

    They are looked for among the global, local and trainable variables, and in `others`.

    Args:
      operations: list of operations.
      owned: names of operations that do not count, since they belong to the variables (initial
        values, and reads that were made with the variables).
      others: list of variables that may be in none of these collections.

    Returns:
      List of variables.
    """
    names = count_reads(operations, owned)
    known = collections.OrderedDict()
    for variable in (tf.global_variables() + tf.local_variables() + tf.trainable_variables()
                     + list(others)):
        known.setdefault(variable.op.name, variable)
    return [variable for name, variable in known.items() if name in names]


def count_reads(operations, owned=()):
    """How often some operations take each variable or its value: a `Counter` by variables' names.

    Args:
      operations: list of operations.
      owned: names of operations that belong to the variables, see `variables_read`.
    """
    made = {op.name for op in operations}
    count = collections.Counter()
    for op in operations:
        if op.name in owned:
            continue
        for tensor in op.inputs:
            if tensor.op.name not in made or tensor.op.name in owned or (
                    tensor.op.type in VARIABLE_OPS):
                count.update(source.name for source in read_from(tensor))
    return count


def is_variable(tensor):
    """Whether a tensor may be a variable itself: its type is a resource or a reference."""
    return tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype


def metric_variables():
    """{name: variable} of the counters of metrics, which all towers share."""
    return {variable.op.name: variable
            for variable in tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)}


def initializers():
    """The names of the operations that give the graph's variables their initial values: a set."""
    return {compat.initializer_of(variable).name
            for variable in tf.global_variables() + tf.local_variables()
            if variable.initializer is not None}


def may_be_of_reference_variable(tensor):
    """Whether a tensor may be the memory of a reference variable."""
    stack, seen = [tensor.op], set()
    while stack:
        op = stack.pop()
        if op.type in REFERENCE_VARIABLES:
            return True
        if op.type not in COMPUTES and op.name not in seen:
            seen.add(op.name)
            stack += [each.op for each in op.inputs]
    return False
