"""What may be the memory of a reference variable, and so change when the variable is written.

The value of a reference variable is its memory, and many kernels pass on the memory that they read,
at least where there is nothing to compute: `Identity`, `StopGradient`, `Reshape`, `StridedSlice`,
`Tile` by 1, `Sum` over no axis. What takes it from them reads the variable when it computes, and
not when they did. So every operation counts as passing memory on, but for those of a list. (The
value of a resource variable stays as it is: a write takes new memory where a reader holds it.)
"""

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


def takers_of_memory(variable, writes):
    """The operations that take what may be the memory of a reference variable.

    Args:
      variable: the operation of the variable.
      writes: function that tells whether an operation writes the variable: what takes its result
        takes the new value.

    Returns:
      Set of names of operations; empty for a resource variable.
    """
    if variable.type not in REFERENCE_VARIABLES:
        return set()
    stack, found = list(variable.outputs), set()
    while stack:
        for op in stack.pop().consumers():
            if op.name not in found:
                found.add(op.name)
                if op.type not in COMPUTES and not writes(op):
                    stack.extend(op.outputs)
    return found
