"""Writes of shared variables whose values come from the examples: whose they are to be.

Tower 0 may write for all towers what is the same in all of them, and moving averages of a statistic
of its examples, such as batch norm's: new = a old + b statistic, with a < 1. Rows that belong to
examples (class centers, memory banks) and counts of examples are written by every tower. A value
that follows from the whole batch in another way can be no tower's: it is refused.
"""


from towers.errors import SharedVariableError
from towers.graph.variable_access import read_from

_ADDS = frozenset(['AssignAdd', 'AssignAddVariableOp', 'AssignSub', 'AssignSubVariableOp'])
_SETS = frozenset(['Assign', 'AssignVariableOp'])
_PASS_ON = frozenset(['Identity', 'Cast', 'Neg', 'Switch', 'RefSwitch', 'Merge', 'RefMerge',
                      'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient', 'Select', 'SelectV2'])
_SUMS = frozenset(['Add', 'AddV2', 'AddN', 'Sub'])
_PRODUCTS = frozenset(['Mul', 'RealDiv', 'Div', 'DivNoNan'])


def is_every_towers(op, name, from_examples):
    """Whether every tower has to make a write, so that it is that of one device.

    Args:
      op: the operation that writes; of a type that is not known here it may be a function's call,
        whose write cannot be looked into.
      name: the name of the variable's operation.
      from_examples: names of the operations that depend on the shard.

    Returns:
      True for rows and counts of examples; False where tower 0 may write for all.

    Raises:
      SharedVariableError: the value comes from the examples in another way.
    """
    if op.name not in from_examples:
        return False
    if 'Scatter' in op.type:
        return True
    if op.type in _ADDS:
        if op.inputs[1].dtype.is_integer:
            return True
        is_average = _depends_on(op.inputs[1], name)
    elif op.type in _SETS:
        is_average = not _is_sum_with_old(op.inputs[1], name)
    else:
        return False
    if is_average and _is_affine(op.inputs[1], name, from_examples):
        return False
    raise SharedVariableError(
        'the model function writes variable %s (operation %s) by its examples, and no moving '
        'average of them: of a part of the batch it would have another value than of the whole. '
        "Pass update_ops='all' to have every tower write, one after the other; or compute the "
        'value from what does not depend on the examples.' % (name, op.name))


def _depends_on(tensor, name):
    """Whether a tensor is computed from the value of a variable."""
    stack, seen = [tensor], set()
    while stack:
        tensor = stack.pop()
        if any(source.name == name for source in read_from(tensor)):
            return True
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            stack.extend(tensor.op.inputs)
    return False


def _is_sum_with_old(tensor, name):
    """Whether a tensor is the variable's old value plus something."""
    while tensor.op.type in ('Identity', 'Cast'):
        tensor = tensor.op.inputs[0]
    return tensor.op.type in _SUMS and any(
        any(source.name == name for source in read_from(each)) for each in tensor.op.inputs)


def _is_affine(tensor, name, from_examples):
    """Whether a tensor is a sum of the variable's value and statistics, each times a factor that
    does not depend on the examples."""
    stack, seen = [tensor], set()
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if op.name in seen or any(source.name == name for source in read_from(tensor)):
            continue
        seen.add(op.name)
        if op.name not in from_examples:
            if _depends_on(tensor, name):
                stack.extend(op.inputs)
            continue
        if op.type in _PASS_ON or op.type in _SUMS:
            stack.extend(op.inputs)
        elif op.type in _PRODUCTS:
            stack.extend(each for each in op.inputs if _depends_on(each, name)
                         or each.op.name in from_examples)
        elif _depends_on(tensor, name):
            return False
    return True
