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
from towers.memory.buffers import NO_PEAK, SCRATCH, TRANSFER, UPDATE, VARIABLE, Buffer
from towers.memory.kernels import passes_on
from towers.memory.node import Node, Output
from towers.memory.simulation import FED, Run, computed_inputs
from towers.memory.step_graph import StepGraph
from towers.memory.tower_step import (
    forward_pass,
    gradients_in,
    shard_operations,
    shard_sizes,
    step_of,
)
from towers.placement.devices import is_gpu

# TensorFlow's best-fit allocator cuts no chunk that is less than twice as large as the request.
# The memory beyond the requests was 1 to 6 % of a step, in five networks on TF 1.15 and 2.21.
_HANDED_OUT_BEYOND = 0.05
_LEAST_KEPT = 4096  # bytes; smaller initial values are left out: many constants, little memory
_CPU = '/device:CPU:0'
# {use of a buffer: its kind}, for the uses that have one kind each. The kind of any other buffer
# depends on what the buffer holds, see `_Reader._kind`.
_KINDS_OF_USES = {SCRATCH: 'scratch', TRANSFER: 'copies', UPDATE: 'updates'}


def memory_account(built: BuiltTowers,
                   batch_size: typing.Optional[int] = None) -> MemoryAccount:
    """Says where the memory of a training step goes, from nothing but its graph.

    The step is simulated as TensorFlow's executor runs it: a tensor is freed when the last
    operation that takes it has run, and kernels write over their inputs; see `simulation`.
    The account of a device is of the device's worst moment.

    Args:
      built: the result of `build_towers`.
      batch_size: examples of a step, over all towers. Any size is allowed; None is the size that
        the towers were built with. If the towers were built with another static size, tensors that
        are computed from the batch are scaled, and gradients of variables are not: this account
        differs by some percent from the account of a build at the given size.

    Returns:
      `MemoryAccount`. Not counted: cuDNN's workspace, weights that oneDNN keeps reordered, input
      pipelines, functions that the graph calls, and all iterations of a loop but one.

    Raises:
      InvalidArgumentError: `built` is not the result of `build_towers`; the batch does not divide
        among the towers; the batch has no static size, and `batch_size` is None, or the batch is
        sparse.
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
        together=reader.account(run, device=None, constants=constants), unknown=step.unknown)


def _in_order_of_towers(devices: typing.Set[str], built: BuiltTowers) -> typing.List[str]:
    """List of the devices: the towers' devices in the order of the towers, then others by name."""
    tower_devices = dict.fromkeys(built.devices)  # each once: several towers may share a device
    others = sorted(devices.difference(tower_devices))
    return [device for device in tower_devices if device in devices] + others


# ---- constants that stay in memory ---------------------------------------------------------------

def _constants(step: StepGraph) -> typing.List[HeldTensor]:
    """List of the constants that operations of a step take; they are in memory all the time."""
    constants: typing.Dict[Output, HeldTensor] = {}  # each once, however many operations take it
    for node in step.executed:
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
    # The graph of a training step has no initializers. The step of this graph makes initial values.
    initialization = StepGraph([value.op for value in values.values()])
    constants = []
    for variable_op, value in values.items():
        node = initialization.by_name[value.op.name]
        size = node.sizes[value.value_index]
        is_constant = node.folded  # False for random initial values
        if is_constant and size >= _LEAST_KEPT:
            # An initial value is made where its variable is.
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
        # {name of the operation of a variable: what the variable is}
        self._kinds_of_variables = dict.fromkeys(graph_walk.operation_names(slots), 'slots')
        self._kinds_of_variables.update(
            dict.fromkeys(graph_walk.operation_names(parameters), 'parameters'))
        # Names of operations: the shards, and all that they are cut out of.
        self._input = graph_walk.names_of(graph_walk.step_operations(shard_operations(built)))
        # Names of operations.
        self._forward = forward_pass(built)
        # Names of tensors.
        self._gradients = gradients_in(step, built, self._forward)
        # {name of a node: the nodes that take one of its outputs}
        self._takers: typing.Dict[str, typing.List[Node]] = collections.defaultdict(list)
        for node in step.executed:
            for output in computed_inputs(node):
                self._takers[output.node.name].append(node)

    def account(self, run: Run, device: typing.Optional[str],
                constants: typing.List[HeldTensor]) -> DeviceAccount:
        """The account of a device at its worst moment.

        Args:
          run: the simulated step.
          device: the name of the device; None for all devices together.
          constants: the constants of all devices, which are in memory all the time.
        """
        peak = run.peaks.get(device, NO_PEAK)  # no peak on a device that has constants alone
        tensors = [constant for constant in constants if device in (None, constant.device)]
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
        if buffer.what in _KINDS_OF_USES:
            return _KINDS_OF_USES[buffer.what]
        if buffer.what == VARIABLE:
            return self._kinds_of_variables.get(output.node.name, 'other variables')
        return self._kind_of_result(output)

    def _kind_of_result(self, output: Output) -> str:
        """Which of `KINDS` the result of an operation is."""
        node = output.node
        # All fed values count as input. A program may feed more than its batch, such as a rate.
        if node.name in self._input or node.type in FED:
            return 'input'
        if output.name in self._gradients:
            return 'gradients'
        if node.name not in self._forward:
            return 'backward'
        if self._is_kept(node):
            return 'activations'
        return 'forward'

    def _is_kept(self, node: Node) -> bool:
        """Whether an output of a forward operation is kept for the backward pass: an operation of
        the backward pass takes the output, or the result of an operation that passes the output's
        memory on, such as a reshape.
        """
        def takers_of_memory(holder: Node) -> typing.Sequence[Node]:
            """The nodes that take outputs of `holder`; () if these are not in `node`'s memory."""
            has_memory = holder is node or passes_on(holder)
            return self._takers[holder.name] if has_memory else ()

        names_of_takers = graph_walk.reached([node], takers_of_memory).keys()
        return not names_of_takers <= self._forward


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
    """Whether TensorFlow's best-fit allocator serves a device: a GPU, and CPUs in a process whose
    environment asks for it.

    None stands for all devices together, and counts as CPUs: `MemoryAccount.pools` uses the account
    of all devices only in a build without GPUs.
    """
    if device is not None and is_gpu(device):
        return True
    return os.environ.get('TF_CPU_ALLOCATOR_USE_BFC', '').lower() in ('1', 'true')
