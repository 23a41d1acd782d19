"""Types of operations by what they do to a value: one list for each meaning."""

VARIABLE_OPS = frozenset(['Variable', 'VariableV2', 'VarHandleOp'])
PLACEHOLDERS = frozenset(['Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault'])

# Control flow v1: what enters, leaves or repeats a loop or a branch; and v2.
CONTROL_FLOW = frozenset(prefix + name for prefix in ('', 'Ref') for name in (
    'Switch', 'Merge', 'Enter', 'Exit', 'NextIteration')) | {'LoopCond'}
BRANCHES_V2 = frozenset(['If', 'StatelessIf', 'Case', 'StatelessCase'])
CONTROL_FLOW_V2 = BRANCHES_V2 | {'While', 'StatelessWhile'}

# What hands on a value, or a variable itself, and leaves both as they are; and of that, what has
# one input that counts and lies on the way into a loop or a branch.
HAND_ON = CONTROL_FLOW - {'LoopCond'} | {'Identity', 'IdentityN', 'RefIdentity'}
LEAD_IN = frozenset(['Identity', 'RefIdentity', 'Enter', 'RefEnter', 'Switch', 'RefSwitch'])

# The value of the first input, in its own or another shape; and in another type.
RESHAPES = frozenset(['Identity', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient',
                      'PreventGradient', 'CheckNumerics'])
SAME_NUMBERS = RESHAPES | {'Cast'}

# What is linear in the examples, each input of a sum, the first of a quotient; a value is chosen.
SUMS = frozenset(['Add', 'AddV2', 'AddN', 'AccumulateNV2', 'Sub'])
QUOTIENTS = frozenset(['RealDiv', 'Div', 'DivNoNan'])
CHOICES = frozenset(['Select', 'SelectV2', 'Switch', 'Merge', 'RefSwitch', 'RefMerge'])


def is_fused_batch_norm(kind):
    """Whether an operation of a type is a batch norm in one kernel, in training mode or not."""
    return kind.startswith('FusedBatchNorm') and 'Grad' not in kind


# What follows from the shape of the input alone.
SIZES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])

# What takes a variable itself, and reads it, or sets it, or adds to it, or to rows of it.
READS = frozenset(['ReadVariableOp', 'ResourceGather', 'ResourceGatherNd'])
SETS = frozenset(['Assign', 'AssignVariableOp'])
ADDS = frozenset(['AssignAdd', 'AssignAddVariableOp', 'AssignSub', 'AssignSubVariableOp'])
ADDS_ROWS = frozenset(prefix + name for prefix in ('', 'Resource') for name in (
    'ScatterAdd', 'ScatterSub', 'ScatterNdAdd', 'ScatterNdSub'))
