"""A step as TensorFlow's executor runs it: what is in memory after each operation.

Ready operations run first come first served. The executor has two or more threads, of which each
prefers what it has just made ready; on average that is near this order. (One thread alone would put
off all gradients of weights.) An output is freed when the last operation that takes it has
finished. An operation's scratch memory is there until the next one has begun, since the two
gradients of a convolution run at the same time.
"""

import collections
import os

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import HAND_ON, RESHAPES

# How kernels use memory, by their sources and by FULL_TRACE runs on TF 1.15.5 and 2.21. A type of
# operation that is not named here allocates its outputs and nothing else. The output of these is
# the input's memory.
_PASSES_ON = HAND_ON | RESHAPES | {
    'CheckNumericsV2', 'Snapshot', 'PlaceholderWithDefault', 'EnsureShape', 'Bitcast', 'LoopCond',
    'TensorArrayWriteV3', 'StackPushV2', 'StackPush'}
# The outputs are parts of the input along its first dimension, in the input's memory.
CUTS = frozenset(['Split', 'SplitV', 'Slice', 'StridedSlice', 'Unpack'])

# These write their output into an input of the same size that no other operation needs any more.
_UNARY = ['Abs', 'Acos', 'Acosh', 'Asin', 'Asinh', 'Atan', 'Atanh', 'Ceil', 'Conj', 'Cos', 'Cosh',
          'Digamma', 'Elu', 'Erf', 'Erfc', 'Exp', 'Expm1', 'Floor', 'Inv', 'Invert', 'LeakyRelu',
          'Lgamma', 'Log', 'Log1p', 'LogSoftmax', 'LogicalNot', 'Neg', 'Reciprocal', 'Relu',
          'Relu6', 'Rint', 'Round', 'Rsqrt', 'Selu', 'Sigmoid', 'Sign', 'Sin', 'Sinh', 'Softmax',
          'Softplus', 'Softsign', 'Sqrt', 'Square', 'Tan', 'Tanh', 'BiasAdd', 'BiasAddV1',
          'ClipByValue', 'FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3',
          'TensorScatterUpdate']
_BINARY = ['Add', 'AddV2', 'Atan2', 'BitwiseAnd', 'BitwiseOr', 'Div', 'DivNoNan', 'FloorDiv',
           'FloorMod', 'LogicalAnd', 'LogicalOr', 'Maximum', 'Minimum', 'Mod', 'Mul', 'MulNoNan',
           'Pow', 'RealDiv', 'SquaredDifference', 'Sub', 'TruncateDiv', 'Xdivy', 'Xlogy',
           'EluGrad', 'InvGrad', 'LeakyReluGrad', 'ReciprocalGrad', 'Relu6Grad', 'ReluGrad',
           'RsqrtGrad', 'SeluGrad', 'SigmoidGrad', 'SoftplusGrad', 'SoftsignGrad', 'SqrtGrad',
           'TanhGrad']
# Type: {number of an output: numbers of the inputs that it may be written into}.
REUSES = dict([(kind, {0: (0,)}) for kind in _UNARY] + [(kind, {0: (0, 1)}) for kind in _BINARY])
REUSES.update({
    'AddN': {0: tuple(range(10000))}, 'AccumulateNV2': {0: tuple(range(10000))},
    'Select': {0: (1, 2)}, 'SelectV2': {0: (1, 2)},
    'SoftmaxCrossEntropyWithLogits': {1: (0,)},
    'SparseSoftmaxCrossEntropyWithLogits': {1: (0,)}})

# These write a resource variable in place. (With `AssignVariableOp` it takes the value's memory.)
_UPDATES = ('ResourceApply', 'AssignAddVariableOp', 'AssignSubVariableOp', 'ResourceScatter',
            'ResourceSparseApply')
_VARIABLES = ('VarHandleOp', 'VariableV2', 'Variable', 'TemporaryVariable')
_MERGES = ('Merge', 'RefMerge')
FED = ('Placeholder', 'PlaceholderV2')  # the caller holds a fed value for the step
_CACHE_FLOATS = (30 << 20) // 4  # floats that a convolution's gradient works on at a time


def passes_on(node):
    """Whether a node's outputs are memory of its input."""
    if node.type in _PASSES_ON or any(  # a reference variable, which is written in place
            tensor.dtype != tensor.dtype.base_dtype for tensor in node.op.outputs):
        return True
    if node.type not in CUTS:
        return False
    # Whether each output is a run of rows of the input, or all of its rows.
    whole, parts = _shape(node, 1 if node.type == 'Split' else 0), node.shapes
    if not whole or None in parts:
        return False
    return node.op.get_attr('axis') == 0 if node.type == 'Unpack' else all(
        len(part) == len(whole) and part[1:] == whole[1:] for part in parts)


def scratch(node):
    """Bytes that a kernel on a CPU takes for itself while it runs; with oneDNN next to nothing.

    A convolution's gradient lays out the patches of some images at a time, of as many as fill 30 MB
    together with the other factors (`conv_grad_filter_ops.cc`, `conv_grad_input_ops.h`). The
    gradient of a maximum pooling looks for the maxima again (`maxpooling_op.cc`).
    """
    if 'CPU' not in node.device:
        return 0
    if node.type == 'MaxPoolGrad' and node.sizes:
        other, index = node.inputs[1]
        return 8 * (other.sizes[index] // 4)  # places, int64; the maxima go where the output was
    if node.type not in ('Conv2DBackpropFilter', 'Conv2DBackpropInput') or compat.uses_onednn():
        return 0
    gradient = _shape(node, 2)
    weights = node.shapes[0] if node.type.endswith('Filter') else _shape(node, 1)
    if gradient is None or weights is None or node.op.get_attr('data_format') != b'NHWC':
        return 0
    places, depth = gradient[1] * gradient[2], weights[3]
    patch = weights[0] * weights[1] * weights[2]
    work = places * depth + patch * depth + places * patch
    if not work:
        return 0
    images = -(-_CACHE_FLOATS // work)
    if node.type.endswith('Input') and (
            gradient[0] == 1 or work // (os.cpu_count() or 1) >= (256 << 10) // 4):
        images = 1
    return 4 * images * places * patch


def _shape(node, number):
    other, index = node.inputs[number]
    return other.shapes[index]


def _variable_bytes(node):
    """Bytes of the variable that an operation is; 0 where its shape is not known."""
    elements = tf.TensorShape(node.op.get_attr('shape')).num_elements()
    return (elements or 0) * tf.as_dtype(node.op.get_attr('dtype')).size


def _variable_of(node):
    """The number of a handle's variable; nodes that pass the handle on are skipped."""
    while node.inputs and node.type not in _VARIABLES:
        node = node.inputs[0][0]
    return node.number


# ---- the run of a step ---------------------------------------------------------------------------

class Buffer:
    """A piece of memory: `size` bytes on a `device`.

    Attributes:
      owners: list of `(event, Node, output)`: whose output it was from that event on.
      what: 'variable', 'output', 'scratch', 'transfer' (a copy of another device's tensor), or
        'update' (a variable's new memory while its old memory is still being read).
      variable: the `Node` of the variable that it holds or held; None for anything else.
      since, until: the events between which it is there; `until` is None at the end.
      references: how many operations, or variables, still hold it.
    """
    __slots__ = ('size', 'device', 'owners', 'what', 'since', 'until', 'references', 'variable')

    def __init__(self, size, device, node, output, what, since, variable):
        self.size, self.device, self.what, self.variable = size, device, what, variable
        self.owners = [(since, node, output)]
        self.since, self.until, self.references = since, None, 0

    def owner(self, event: int) -> tuple:
        """`(Node, output)`: the output, or the variable, that the buffer holds at an event."""
        if self.variable is not None:
            return self.variable, 0
        return [owner[1:] for owner in self.owners if owner[0] <= event][-1]


class Run:
    """What a step, a `StepGraph`, does; nothing is computed.

    Attributes:
      buffers: list of `Buffer`, in order of allocation, without constants.
      peaks: dict from a device to `(bytes, event, Node)`; under None for all devices together.
    """

    def __init__(self, step):
        self.buffers, self.peaks = [], {}
        self._events, self._now = 0, collections.Counter()
        self._waits = {}  # operation: how many others it waits for
        self._takers = collections.defaultdict(list)  # operation: those that wait for it
        self._uses = collections.defaultdict(list)  # (operation, output): devices of its takers
        self._held = {}  # (operation, output, device or None for its own): Buffer
        self._variables = {}  # variable: the Buffer that holds it now
        nodes = [node for node in step.nodes if not node.folded]
        for node in nodes:
            sources = {other.number for other in node.controls if not other.folded}
            for other, index in self._inputs(node):
                sources.add(other.number)
                self._uses[other.number, index].append(node.device)
            self._waits[node.number] = min(1, len(sources)) if (
                node.type in _MERGES) else len(sources)
            for source in sources:
                self._takers[source].append(node)
            if node.type in _VARIABLES:
                self._variables[node.number] = self._allocate(
                    _variable_bytes(node), node.device, node, what='variable', variable=node)
        self._run(nodes)

    def alive(self, event: int, device=None) -> list:
        """The buffers of a device (None: of all) that are there right after an event."""
        return [buffer for buffer in self.buffers
                if buffer.since <= event and (buffer.until is None or buffer.until > event)
                and device in (None, buffer.device) and buffer.size]

    def _run(self, nodes):
        waiting = collections.deque(node for node in nodes if not self._waits[node.number])
        started, before = {node.number for node in waiting}, None
        while waiting:
            node = waiting.popleft()
            before = self._begin(node, before)
            for taker in self._takers[node.number]:
                self._waits[taker.number] -= 1
                if self._waits[taker.number] <= 0 and taker.number not in started:
                    started.add(taker.number)
                    waiting.append(taker)
            self._end(node)
        self._release(before)

    def _allocate(self, size, device, node, output=0, what='output', variable=None):
        """A new `Buffer`, which an operation or a variable takes; None for no bytes."""
        if not size and variable is None:
            return None
        self._events += 1
        buffer = Buffer(size, device, node, output, what, self._events, variable)
        buffer.references = int(what in ('scratch', 'variable', 'update'))
        self.buffers.append(buffer)
        for place in (device, None):
            self._now[place] += size
            if self._now[place] > self.peaks.get(place, (0,))[0]:
                self.peaks[place] = (self._now[place], self._events, node)
        return buffer

    def _release(self, buffer):
        """Lets go of a buffer, or of None, once."""
        if buffer is not None:
            buffer.references -= 1
            if not buffer.references:
                self._events += 1
                buffer.until = self._events
                self._now[buffer.device] -= buffer.size
                self._now[None] -= buffer.size

    @staticmethod
    def _inputs(node):
        """Inputs that the step computes, without the back edges of loops: a loop is run once."""
        return [(other, index) for other, index in node.inputs if not other.folded
                and not (node.type in _MERGES and other.type.endswith('NextIteration'))]

    def _input(self, other, index, device):
        """The `Buffer` of an input on a device; None where it takes no memory."""
        return self._held.get((other.number, index, device),
                              self._held.get((other.number, index, None)))

    def _begin(self, node, before):
        """Allocates outputs and scratch; frees the scratch `before`; returns the scratch."""
        is_update = node.type.startswith(_UPDATES)
        for tensor, (other, _) in zip(node.op.inputs, node.inputs) if is_update else ():
            old = tensor.dtype == tf.resource and self._variables.get(_variable_of(other))
            if old and old.references > 1:  # still being read: it goes on in new memory
                self._variables[old.variable.number] = self._allocate(
                    old.size, old.device, node, what='update', variable=old.variable)
                self._release(old)
        buffers = self._outputs(node)
        own = self._allocate(scratch(node), node.device, node, what='scratch')
        self._release(before)
        for index, buffer in enumerate(buffers):
            if buffer is not None:
                buffer.references += 1  # until `_end` has counted the takers
                self._held[node.number, index, None] = buffer
        return own

    def _outputs(self, node):
        """The `Buffer` of each output."""
        if node.type in _VARIABLES:
            return [self._variables[node.number] if size else None for size in node.sizes]
        if node.type == 'ReadVariableOp':
            return [self._variables.get(_variable_of(node))]
        taken = [self._input(other, index, node.device) if not other.folded else None
                 for other, index in node.inputs]  # None for a constant
        if passes_on(node):
            if node.type != 'IdentityN':
                taken = [next(filter(None, taken), None)] * len(node.sizes)
            if node.inputs:
                return [each if size else None for each, size in zip(taken, node.sizes)]
        outputs = []
        for index, size in enumerate(node.sizes):
            places = REUSES.get(node.type, {}).get(index, ())[:len(taken)]
            buffer = next((
                each for each in (taken[place] for place in places) if each and each.size == size
                and each.references == 1 and each.what != 'variable' and each not in outputs), None)
            if buffer is None:
                buffer = self._allocate(size, node.device, node, index)
            else:
                buffer.owners.append((self._events, node, index))
            outputs.append(buffer)
        return outputs

    def _end(self, node):
        """Hands the outputs to those that take them, on their devices; lets go of the inputs."""
        outputs = [self._held.get((node.number, index, None)) for index in range(len(node.sizes))]
        for index, buffer in enumerate(outputs):
            elsewhere = collections.Counter()
            for device in self._uses.get((node.number, index), ()) if buffer is not None else ():
                if _memory(device) == _memory(node.device):
                    buffer.references += 1
                else:
                    elsewhere[device] += 1
            for device, count in elsewhere.items():
                moved = self._allocate(node.sizes[index], device, node, index, 'transfer')
                moved.references = count
                self._held[node.number, index, device] = moved
        for other, index in self._inputs(node):
            self._release(self._input(other, index, node.device))
        for buffer in outputs if node.type not in FED else ():
            self._release(buffer)


def _memory(device):
    """The name of a device's memory, which the CPUs of a process share."""
    return device.rsplit(':', 1)[0] if 'CPU' in device else device
