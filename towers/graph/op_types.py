"""Types of operations by what they do to a value: one list for each meaning."""

import itertools
import typing

import tensorflow.compat.v1 as tf


def _with_prefixes(prefixes: typing.Iterable[str], names: typing.Iterable[str]
                   ) -> typing.FrozenSet[str]:
    """Set of each name after each prefix: `('', 'Ref')` and `('Exit',)` give `Exit`, `RefExit`."""
    return frozenset(prefix + name for prefix, name in itertools.product(prefixes, names))


VARIABLE_OPS = frozenset(['Variable', 'VariableV2', 'VarHandleOp'])
PLACEHOLDERS = frozenset(['Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault'])

# Operations that give the next elements of a queue, a data set or a reader, by how their types
# begin.
DRAWS_DATA = ('QueueDequeue', 'IteratorGetNext', 'MultiDeviceIteratorGetNext', 'ReaderRead',
              'Unstage', 'MapUnstage', 'OrderedMapUnstage', 'RecordInput', 'BarrierTakeMany')

# Operations that make summaries of their inputs, or merge summaries.
SUMMARIES = ('MergeSummary', 'ScalarSummary', 'HistogramSummary', 'ImageSummary', 'AudioSummary',
             'AudioSummaryV2', 'TensorSummary', 'TensorSummaryV2')

# Operations that put elements into a queue, by how their types begin.
FEEDS_DATA = ('QueueEnqueue', 'Stage', 'MapStage', 'OrderedMapStage', 'BarrierInsertMany')

# Iterators that keep state as tables and queues do, without having a `shared_name`, by how their
# types begin.
_WITHOUT_NAME = ('Anonymous', 'IteratorFromStringHandle')


def keeps_state(op: tf.Operation) -> bool:
    """Whether an operation keeps state between steps: a table, a queue, an iterator, a variable.

    TensorFlow gives nearly all of these the attribute `shared_name`, by which sessions share them.
    """
    if op.type.startswith(_WITHOUT_NAME):
        return True
    names_of_attributes = {attribute.name for attribute in op.op_def.attr}
    return 'shared_name' in names_of_attributes


# Control flow v1: operations that enter, leave or repeat a loop or a branch. Control flow v2:
# operations that are a branch, a loop, or either.
CONTROL_FLOW = _with_prefixes(('', 'Ref'), (
    'Switch', 'Merge', 'Enter', 'Exit', 'NextIteration')) | {'LoopCond'}
BRANCHES_V2 = frozenset(['If', 'StatelessIf', 'Case', 'StatelessCase'])
LOOPS_V2 = frozenset(['While', 'StatelessWhile'])
CONTROL_FLOW_V2 = BRANCHES_V2 | LOOPS_V2

# Operations that hand on a value, or a variable itself, and leave both as they are. `LEAD_IN` are
# the operations that hand on their first input, also on the way into a loop or a branch.
HAND_ON = CONTROL_FLOW - {'LoopCond'} | {'Identity', 'IdentityN', 'RefIdentity'}
LEAD_IN = frozenset(['Identity', 'RefIdentity', 'Enter', 'RefEnter', 'Switch', 'RefSwitch'])

# Operations whose result is the value of the first input, in the same or another shape. The result
# of `SAME_NUMBERS` may also be of another dtype.
RESHAPES = frozenset(['Identity', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient',
                      'PreventGradient', 'CheckNumerics'])
SAME_NUMBERS = RESHAPES | {'Cast'}

# Operations whose output may be the memory of their input. If it is the memory of a reference
# variable, an operation that takes the output reads the variable when that operation runs.
HAND_ON_MEMORY = HAND_ON | RESHAPES | {
    'Bitcast', 'Slice', 'StridedSlice', 'Split', 'SplitV', 'Unpack', 'Print', 'RefSelect'}

# The first input divided by the second.
QUOTIENTS = frozenset(['RealDiv', 'Div', 'DivNoNan'])


def is_fused_batch_norm(kind: str) -> bool:
    """Whether operations of the type `kind` are a batch norm in one kernel, in training or not; the
    operations of its gradient are not."""
    return kind.startswith('FusedBatchNorm') and 'Grad' not in kind


# Operations whose result follows from nothing but the shape of the input.
SIZES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])

# Operations that call functions. They take the handles of the variables that these functions use.
CALLS = ('If', 'StatelessIf', 'While', 'StatelessWhile', 'Case', 'StatelessCase', 'PartitionedCall',
         'StatefulPartitionedCall')

# Operations that take a variable itself: they read it, set it, add to it, or to rows of it.
READS = frozenset(['ReadVariableOp', 'ResourceGather', 'ResourceGatherNd'])
SETS = frozenset(['Assign', 'AssignVariableOp'])
ADDS = frozenset(['AssignAdd', 'AssignAddVariableOp', 'AssignSub', 'AssignSubVariableOp'])
ADDS_ROWS = _with_prefixes(('', 'Resource'), (
    'ScatterAdd', 'ScatterSub', 'ScatterNdAdd', 'ScatterNdSub'))
# Operations that write rows of a variable. They take the variable, the indices of the rows, and the
# rows.
WRITES_ROWS = ADDS_ROWS | _with_prefixes(('', 'Resource'), (
    'ScatterUpdate', 'ScatterMul', 'ScatterDiv', 'ScatterMin', 'ScatterMax', 'ScatterNdUpdate',
    'ScatterNdMin', 'ScatterNdMax'))

# Of these, the operations that set rows: where a row is set twice, the last value stays.
SETS_ROWS = _with_prefixes(('', 'Resource'), ('ScatterUpdate', 'ScatterNdUpdate'))

# Operations that access rows of a resource variable, beside those whose types begin with
# `ResourceSparseApply`. From the first of them on, TensorFlow reads the whole variable by a copy,
# and also copies it for each dense update.
ACCESS_ROWS = frozenset(kind for kind in WRITES_ROWS if kind.startswith('Resource')) | {
    'ResourceGather', 'ResourceGatherNd', 'ResourceStridedSliceAssign'}

# Operations that take a variable itself, and leave it unchanged.
LEAVE_UNCHANGED = HAND_ON | READS | {
    '_ReadVariablesOp', 'VarIsInitializedOp', 'VariableShape', 'IsVariableInitialized', 'RefSelect'}

BATCH_VALUE = '_towers_batch_value'
"""The attribute of the placeholder with a default by which a build hands on a value of the whole
batch: `b'<number of the value> <role>'`, such as `b'1 sum'` or `b'1 sum_gradient'`."""


BATCH_VALUE_TO_BE = '_towers_batch_value_to_be'
"""The attribute of the identity that `batch_sum` and its like make outside of a build: `b'<kind>'`.
A build that gets the model as a finished one imports it as a placeholder with `BATCH_VALUE`."""


def batch_value_to_be(op: tf.Operation) -> typing.Optional[str]:
    """The kind, such as `'sum'`, of the function that has made an operation outside of a build:
    `batch_sum` or one of its like. A build that imports the operation makes a value of the whole
    batch from it. None for an operation that no such function has made."""
    # The type is asked first, since `node_def` takes long.
    if op.type != 'Identity' or BATCH_VALUE_TO_BE not in op.node_def.attr:
        return None
    return op.get_attr(BATCH_VALUE_TO_BE).decode()


def batch_value_role(op: tf.Operation) -> typing.Optional[str]:
    """The role of an operation that hands on a value of the whole batch: the `Mark.role` of
    `batch_values`, such as `'sum'`, or `'sum_gradient'` in the backward pass. None for any other
    operation."""
    # The type is asked first, since `node_def` takes long.
    if op.type != 'PlaceholderWithDefault' or BATCH_VALUE not in op.node_def.attr:
        return None
    unused_number, role = op.get_attr(BATCH_VALUE).decode().split()
    return role
