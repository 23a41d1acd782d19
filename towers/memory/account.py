"""`memory_account`: where the memory of a step goes, before there is a session."""

import collections
import os
import typing

from towers import compat
from towers.arguments import check_count, check_instance
from towers.api.built import BuiltTowers
from towers.graph import graph_walk
from towers.memory.simulation import FED, Run, passes_on
from towers.memory.step_graph import (StepGraph, forward_pass, gradients_in, shard_operations,
                                      shard_sizes, step_of)
from towers.placement.devices import is_gpu, short_name

# The uses of memory, in the order in which they are shown, with colours of Okabe and Ito and their
# tints, which the colour-blind can tell apart as neighbours.
KINDS = collections.OrderedDict([
    ('parameters', '#0072B2'),  # the model's variables
    ('slots', '#56B4E9'),  # the optimizer's variables
    ('other variables', '#9ad0ee'),  # counters and the like
    ('initial values', '#cce5f5'),  # constants that the session keeps, see `_kept_initial_values`
    ('constants', '#dddddd'),  # of the graph
    ('input', '#000000'),  # the batch and its shards
    ('activations', '#E69F00'),  # results of the forward pass that the backward pass still needs
    ('forward', '#f5cf7a'),  # other results of the forward pass
    ('gradients', '#009E73'),  # of the parameters: the towers' and the combined ones
    ('backward', '#7fceb9'),  # other results of the backward pass
    ('updates', '#CC79A7'),  # new memory of variables whose old values are still being read
    ('scratch', '#D55E00'),  # memory that a kernel takes for itself while it runs
    ('copies', '#F0E442'),  # of tensors of another device
    ('allocator', '#999999')])  # handed out beyond what was asked for

# TensorFlow's best-fit allocator cuts no chunk that is less than twice as large as the request:
# the memory beyond requests was 1 to 6 % of a step, in five networks on TF 1.15 and 2.21.
_HANDED_OUT_BEYOND = 0.05
_LEAST_KEPT = 4096  # bytes; smaller constants are many, and take no memory to speak of


HeldTensor = collections.namedtuple('HeldTensor', 'name kind bytes device')
"""A tensor in memory at the worst moment, of an operation or a variable; one of the `KINDS`."""


class DeviceAccount(collections.namedtuple('DeviceAccount', 'device kinds moment tensors')):
    """The worst moment of a device.

    Attributes:
      device: its name; '' for all devices together.
      kinds: dict from `KINDS` to bytes at that moment, an int each.
      moment: name of the operation that begins then.
      tensors: list of `HeldTensor`: all tensors in memory then, the largest first.
    """
    __slots__ = ()

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return sum(self.kinds.values())


class MemoryAccount(collections.namedtuple(
        'MemoryAccount', 'batch_size devices together unknown')):
    """Where the memory of a step goes; `print(account)` is a table.

    Attributes:
      batch_size: examples of a step, over all towers; None where it is not known.
      devices: list of `DeviceAccount`, one a device.
      together: `DeviceAccount` of all devices, at the moment that is the worst for their sum. CPUs
        of one process share one memory, so that this is what counts there.
      unknown: names of operations whose output has a size that is not known before they run; the
        size of their largest input is counted.
    """
    __slots__ = ()

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of the fullest GPU; without GPUs, of all CPUs together."""
        return self.fullest().peak

    def fullest(self) -> 'DeviceAccount':
        """The `DeviceAccount` of the fullest of the `pools`."""
        return max(self.pools(), key=lambda each: each.peak)

    def pools(self) -> typing.List['DeviceAccount']:
        """List of `DeviceAccount`, one for each memory that may be short: of each GPU; without
        GPUs, the one that the CPUs of the process share."""
        return [each for each in self.devices if is_gpu(each.device)] or [self.together]

    def largest(self) -> str:
        """The three largest tensors of the fullest memory, as a text."""
        return '; '.join('%s, %.1f MB (%s)' % (tensor.name, tensor.bytes / 1e6, tensor.kind)
                         for tensor in self.fullest().tensors[:3])

    def __str__(self):
        columns = self.devices + ([self.together] if len(self.devices) > 1 else [])
        shown = columns if len(columns) <= 6 else columns[:4] + columns[-1:]
        names = [short_name(each.device)[-12:] or 'together' for each in shown]
        lines = ['memory of a step%s, MB at the worst moment of each device' % (
            '' if self.batch_size is None else ', batch %d' % self.batch_size)]
        lines.append('  %-16s' % '' + ''.join('%13s' % name for name in names))
        for kind in KINDS:
            if any(each.kinds.get(kind) for each in shown):
                lines.append('  %-16s' % kind + ''.join(
                    '%13.1f' % (each.kinds.get(kind, 0) / 1e6) for each in shown))
        lines.append('  %-16s' % 'peak' + ''.join('%13.1f' % (each.peak / 1e6) for each in shown))
        if len(shown) < len(columns):
            lines.append('  and %d devices more' % (len(columns) - len(shown)))
        lines.append('  the worst moment: %s' % self.fullest().moment)
        lines.append('largest tensors then')
        for tensor in self.fullest().tensors[:8]:
            lines.append('  %9.1f MB  %-12s %s' % (tensor.bytes / 1e6, tensor.kind, tensor.name))
        if self.unknown:
            lines.append('sizes not known before they run, counted as their largest input: %d, '
                         'such as %s' % (len(self.unknown), self.unknown[0]))
        return '\n'.join(lines)


def memory_account(built: BuiltTowers,
                   batch_size: typing.Optional[int] = None) -> MemoryAccount:
    """Says where the memory of a training step goes, from its graph alone.

    The step is simulated as TensorFlow's executor runs it: a tensor is freed when the last
    operation that takes it has run, and is written over where kernels do that; see `simulation`.
    The account of a device is of the device's worst moment.

    Args:
      built: the result of `build_towers`.
      batch_size: examples of a step, over all towers: any size; None for that which the towers were
        built with. For another size than a static one, all that is computed from the batch is
        scaled but gradients of variables; a build at that size differs by some percent.

    Returns:
      `MemoryAccount`. Not counted: cuDNN's workspace, weights that oneDNN keeps reordered, input
      pipelines, functions that the graph calls, and of a loop all turns but one.

    Raises:
      InvalidArgumentError: not the result of `build_towers`; a batch that does not divide among
        the towers; a batch of unknown size, and none given, or a sparse one.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if batch_size is not None:
        check_count('batch_size', batch_size)
        shard_sizes(built, batch_size)
    step = step_of(built, batch_size)
    run = Run(step)
    reader = _Reader(built, step)
    kept = _kept_constants(step) + _kept_initial_values(built)
    places = sorted({buffer.device for buffer in run.buffers} | {each.device for each in kept},
                    key=lambda device: (device not in built.devices, built.devices.index(device)
                                        if device in built.devices else 0, device))
    *accounts, together = [reader.account(run, place, kept) for place in places + [None]]
    return MemoryAccount(batch_size or built.plan.batch_size, accounts, together, step.unknown)


def _kept_constants(step):
    used = {}
    for node in step.nodes:
        if not node.folded:
            for other, index in node.inputs:
                if other.folded and other.sizes[index]:
                    used[other.name, index] = HeldTensor(other.name, 'constants',
                                                         other.sizes[index], other.device)
    return list(used.values())


def _kept_initial_values(built):
    """The constants that resource variables take their first values from.

    They share memory until the variable's first update; the session keeps the constant.
    """
    values = {}
    for variable in list(built.variables) + list(built.slots):
        op = compat.initializer_of(variable) if variable.op.type == 'VarHandleOp' else None
        if op is not None and len(op.inputs) > 1:
            values[variable.op] = op.inputs[1]
    made = StepGraph([value.op for value in values.values()]).by_name if values else {}
    kept = []
    for variable, value in values.items():
        node, size = made[value.op.name], made[value.op.name].sizes[value.value_index]
        if node.folded and size >= _LEAST_KEPT:
            kept.append(HeldTensor(variable.name, 'initial values', size,
                                   variable.device or '/device:CPU:0'))
    return kept


class _Reader:
    """Finds out what the memory of a simulated step is for."""

    def __init__(self, built, step):
        self._parameters = {variable.op.name for variable in built.variables}
        self._slots = {variable.op.name for variable in built.slots}
        self._input = {op.name for op in graph_walk.step_operations(shard_operations(built))}
        self._forward = forward_pass(built)
        self._gradients = gradients_in(step, built, self._forward)
        self._takers = collections.defaultdict(list)
        for node in step.nodes:
            for other, _ in node.inputs:
                self._takers[other.number].append(node)
        self._kept = {}

    def account(self, run, device, kept):
        """The `DeviceAccount` of a device; with `device=None`, of all devices together."""
        tensors = [each for each in kept if device in (None, each.device)]
        _, event, node = run.peaks.get(device, (0, 0, None))
        for buffer in run.alive(event, device):
            owner, output = buffer.owner(event)
            tensors.append(HeldTensor(owner.name, self._kind(buffer, owner, output), buffer.size,
                                      buffer.device))
        kinds = collections.Counter()
        for tensor in tensors:
            kinds[tensor.kind] += tensor.bytes
        if is_gpu(device or '') or os.environ.get(  # the best-fit allocator serves it
                'TF_CPU_ALLOCATOR_USE_BFC', '').lower() in ('1', 'true'):
            kinds['allocator'] = int(_HANDED_OUT_BEYOND * sum(kinds.values()))
        tensors.sort(key=lambda tensor: -tensor.bytes)
        return DeviceAccount(device or '', {kind: kinds[kind] for kind in KINDS if kinds[kind]},
                             node.name if node is not None else '', tensors)

    def _kind(self, buffer, owner, output):
        if buffer.variable is not None:
            if buffer.what == 'update':
                return 'updates'
            if owner.name in self._parameters:
                return 'parameters'
            return 'slots' if owner.name in self._slots else 'other variables'
        if buffer.what in ('scratch', 'transfer'):
            return {'scratch': 'scratch', 'transfer': 'copies'}[buffer.what]
        if owner.name in self._input or owner.type in FED:
            return 'input'
        if (owner.name, output) in self._gradients:
            return 'gradients'
        if owner.name in self._forward:
            return 'activations' if self._is_kept(owner) else 'forward'
        return 'backward'

    def _is_kept(self, node):
        """Whether an operation of the backward pass takes an output of this forward operation."""
        if node.number not in self._kept:
            self._kept[node.number] = any(
                taker.name not in self._forward and not taker.folded
                or passes_on(taker) and self._is_kept(taker)
                for taker in self._takers[node.number] if taker.number > node.number or
                taker.type not in ('Merge', 'NextIteration'))
        return self._kept[node.number]
