"""`memory_account`: where the memory of a step goes, before there is a session."""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance
from towers.graph import graph_walk
from towers.memory.account_table import KINDS, DeviceAccount, HeldTensor, MemoryAccount
from towers.memory.buffers import NO_PEAK, SCRATCH, TRANSFER, UPDATE, Buffer
from towers.memory.kernels import passes_on
from towers.memory.node import Node, Output
from towers.memory.simulation import FED, Run
from towers.memory.step_graph import StepGraph
from towers.memory.tower_step import (
    forward_pass,
    gradients_in,
    shard_operations,
    shard_sizes,
    step_of,
)
from towers.placement.devices import is_gpu

# TensorFlow's best-fit allocator cuts no chunk that is less than twice as large as the request:
# the memory beyond requests was 1 to 6 % of a step, in five networks on TF 1.15 and 2.21.
_HANDED_OUT_BEYOND = 0.05
_LEAST_KEPT = 4096  # bytes; smaller constants are many, and take no memory to speak of
_CPU = '/device:CPU:0'


def memory_account(built: BuiltTowers,
                   batch_size: typing.Optional[int] = None) -> MemoryAccount:
    """Says where the memory of a training step goes, from nothing but its graph.

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
        shard_sizes(built, batch_size)  # raises if the batch does not divide
    step = step_of(built, batch_size)
    return account_of_run(built, step, Run(step), batch_size)


def account_of_run(built: BuiltTowers, step: StepGraph, run: Run,
                   batch_size: typing.Optional[int]) -> MemoryAccount:
    """The `MemoryAccount` of a step that has been simulated.

    Args:
      built: the towers.
      step: the operations of a step of these towers.
      run: the simulation of this step.
      batch_size: the argument of `memory_account`.
    """
    reader = _Reader(built, step)
    constants = _constants(step) + _initial_values(built)
    devices_in_use = {buffer.device for buffer in run.buffers}
    devices_in_use |= {constant.device for constant in constants}
    devices = _in_order_of_towers(devices_in_use, built)
    return MemoryAccount(
        batch_size=batch_size or built.plan.batch_size,
        devices=[reader.account(run, device, constants) for device in devices],
        together=reader.account(run, None, constants), unknown=step.unknown)


def _in_order_of_towers(devices: typing.Set[str], built: BuiltTowers) -> typing.List[str]:
    """List of devices: those of the towers in the towers' order, then others by their names."""
    tower_devices = [device for device in built.devices if device in devices]
    others = sorted(devices - set(tower_devices))
    return list(dict.fromkeys(tower_devices)) + others


# ---- constants that stay in memory ---------------------------------------------------------------

def _constants(step: StepGraph) -> typing.List[HeldTensor]:
    """List of the constants that operations of a step take; they are in memory all the time."""
    constants: typing.Dict[Output, HeldTensor] = {}  # each once, however many operations take it
    nodes_that_run = [node for node in step.nodes if not node.folded]
    for node in nodes_that_run:
        for output in node.inputs:
            if output.node.folded and output.size:
                constants[output] = HeldTensor(
                    output.node.name, 'constants', output.size, output.node.device)
    return list(constants.values())


def _initial_values(built: BuiltTowers) -> typing.List[HeldTensor]:
    """List of the constants that resource variables take their first values from.

    A variable shares the constant's memory until its first update. From then on the variable has
    memory of its own, and the session still keeps the constant.
    """
    values = _tensors_of_initial_values(built)
    if not values:
        return []
    # Initializers run outside of the step, which knows nothing of their sizes.
    nodes = StepGraph([value.op for value in values.values()]).by_name
    constants = []
    for variable_op, value in values.items():
        node = nodes[value.op.name]
        size = node.sizes[value.value_index]
        is_constant = node.folded  # random initial values are not
        if is_constant and size >= _LEAST_KEPT:
            device = variable_op.device or _CPU
            constants.append(HeldTensor(variable_op.name, 'initial values', size, device))
    return constants


def _tensors_of_initial_values(built: BuiltTowers) -> typing.Dict[tf.Operation, tf.Tensor]:
    """`{operation of a resource variable: tensor of its initial value}`, of the variables that one
    assignment initializes."""
    values = {}
    for variable in list(built.variables) + list(built.slots):
        if variable.op.type != 'VarHandleOp':
            continue  # a reference variable copies its initial value
        initializer = compat.initializer_of(variable)
        if initializer is not None and initializer.type == 'AssignVariableOp':
            _, value = initializer.inputs  # the handle is the first
            values[variable.op] = value
    return values


# ---- what memory is for --------------------------------------------------------------------------

class _Reader:
    """Finds out what the memory of a simulated step is used for."""

    def __init__(self, built: BuiltTowers, step: StepGraph):
        """
        Args:
          built: the towers.
          step: the operations of a step of these towers.
        """
        parameters = list(built.variables)
        slots = list(built.slots)
        if built.replicas is not None:
            parameters += built.replicas.variables
            slots += built.replicas.slots
        # Sets of names of operations: the next four.
        self._parameters = graph_walk.operation_names(parameters)
        self._slots = graph_walk.operation_names(slots)
        # The shards, and all that they are cut out of.
        self._input = graph_walk.names_of(graph_walk.step_operations(shard_operations(built)))
        self._forward = forward_pass(built)
        self._gradients = gradients_in(step, built, self._forward)
        # {number of a node: the nodes that take one of its outputs}
        self._takers: typing.Dict[int, typing.List[Node]] = collections.defaultdict(list)
        for node in step.nodes:
            for output in node.inputs:
                self._takers[output.node.number].append(node)
        # {number of a node: whether the backward pass takes one of its outputs}, of the nodes that
        # were asked for so far
        self._is_kept_by_number: typing.Dict[int, bool] = {}

    def account(self, run: Run, device: typing.Optional[str],
                constants: typing.List[HeldTensor]) -> DeviceAccount:
        """The account of a device at its worst moment.

        Args:
          run: the simulated step.
          device: the name of the device; None for all devices together.
          constants: the constants of all devices, which are in memory all the time.
        """
        peak = run.peaks.get(device, NO_PEAK)
        if device is None:
            tensors = list(constants)
        else:
            tensors = [constant for constant in constants if constant.device == device]
        for buffer in run.alive(peak.event, device):
            output = buffer.held_output(peak.event)
            kind = self._kind(buffer, output)
            tensors.append(HeldTensor(output.node.name, kind, buffer.size, buffer.device))
        tensors.sort(key=lambda tensor: -tensor.bytes)
        moment = '' if peak.node is None else peak.node.name
        return DeviceAccount(device or '', _bytes_of_kinds(tensors, device), moment, tensors)

    def _kind(self, buffer: Buffer, output: Output) -> str:
        """Which of `KINDS` a buffer is used for.

        Args:
          buffer: a buffer in memory at the worst moment.
          output: what it holds then: the output of an operation, or a variable.
        """
        node = output.node
        if buffer.variable is not None:
            return self._kind_of_variable(buffer, node)
        if buffer.what == SCRATCH:
            return 'scratch'
        if buffer.what == TRANSFER:
            return 'copies'
        if node.name in self._input or node.type in FED:
            return 'input'
        if (node.name, output.value_index) in self._gradients:
            return 'gradients'
        if node.name not in self._forward:
            return 'backward'
        if self._is_kept(node):
            return 'activations'
        return 'forward'

    def _kind_of_variable(self, buffer: Buffer, variable: Node) -> str:
        """Which of `KINDS` the buffer of a variable is used for.

        Args:
          buffer: the buffer.
          variable: the node of the variable.
        """
        if buffer.what == UPDATE:
            return 'updates'
        if variable.name in self._parameters:
            return 'parameters'
        if variable.name in self._slots:
            return 'slots'
        return 'other variables'

    def _is_kept(self, node: Node) -> bool:
        """Whether the backward pass takes an output of a forward operation, so that the output is
        kept for it. It may take it by way of operations that pass the memory on, such as reshapes.
        """
        if node.number not in self._is_kept_by_number:
            # Along the back edge of a loop, the way would come back to this node without end.
            takers = [taker for taker in self._takers[node.number]
                      if not _is_back_edge(node, taker)]
            self._is_kept_by_number[node.number] = any(map(self._leads_backward, takers))
        return self._is_kept_by_number[node.number]

    def _leads_backward(self, taker: Node) -> bool:
        """Whether the backward pass needs what an operation takes: the operation is of the backward
        pass, or passes the memory of its input on to an operation that is."""
        is_backward = taker.name not in self._forward and not taker.folded
        if is_backward:
            return True
        return passes_on(taker) and self._is_kept(taker)


def _bytes_of_kinds(tensors: typing.Iterable[HeldTensor],
                    device: typing.Optional[str]) -> typing.Dict[str, int]:
    """{kind: bytes} of the tensors in memory, in the order of `KINDS`, without kinds of no bytes.

    Args:
      tensors: the tensors.
      device: the device whose memory it is; None for all devices together.
    """
    kinds: typing.Counter[str] = collections.Counter()
    for tensor in tensors:
        kinds[tensor.kind] += tensor.bytes
    if _has_best_fit_allocator(device):
        kinds['allocator'] = int(_HANDED_OUT_BEYOND * sum(kinds.values()))
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def _has_best_fit_allocator(device: typing.Optional[str]) -> bool:
    """Whether TensorFlow's best-fit allocator serves a device; None for all devices together."""
    if is_gpu(device or ''):
        return True
    return os.environ.get('TF_CPU_ALLOCATOR_USE_BFC', '').lower() in ('1', 'true')


def _is_back_edge(node: Node, taker: Node) -> bool:
    """Whether the edge between two nodes leads back to the beginning of a loop: the taker was made
    before."""
    return taker.number <= node.number and taker.type in ('Merge', 'NextIteration')
