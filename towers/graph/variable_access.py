"""Which variable a tensor is or holds the value of, told by the graph and never by names.

A variable is an operation (`VariableV2`, or `VarHandleOp` for resource variables). An operation
that takes its output takes the variable itself; one that takes the output of a `read` or a
`ReadVariableOp` takes its value.
"""

import collections

import tensorflow.compat.v1 as tf


VARIABLE_OPS = frozenset(['Variable', 'VariableV2', 'VarHandleOp'])

# Operations that pass on the variable itself, into a loop or a branch of control flow v1 say.
HAND_ON = frozenset([
    'Identity', 'IdentityN', 'Enter', 'Switch', 'Exit', 'Merge', 'NextIteration', 'RefIdentity',
    'RefEnter', 'RefSwitch', 'RefExit', 'RefMerge', 'RefNextIteration'])
# Operations whose output is (a part of) the value of the variable that they take.
_READ = frozenset(['ReadVariableOp', 'ConcatV2', 'Concat'])


def variable_op(tensor):
    """The operation of the variable that a tensor is: its handle or its reference; else None."""
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

    A value may be passed on, cached, or joined (of a partitioned variable); it may not be the
    result of a computation.
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
    """The variables that any of these operations takes, or takes the value of.

    Global, local and trainable variables, and `others`, which may be in no such collection.

    Args:
      operations: list of operations.
      owned: names of operations that belong to the variables (initial values, reads that were made
        with them), which do not count.
      others: list of variables.
    """
    names = count_reads(operations, owned)
    known = collections.OrderedDict()
    for variable in (tf.global_variables() + tf.local_variables() + tf.trainable_variables()
                     + list(others)):
        known.setdefault(variable.op.name, variable)
    return [variable for name, variable in known.items() if name in names]


def count_reads(operations, owned=()):
    """How often these operations take each variable or its value: a `Counter` by its name.

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
    """Whether a tensor may be a variable itself, by its type: a resource or a reference."""
    return tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype
