"""Stages: pieces of one model on several devices of a tower; arrays and stacks of loops.

`stage` is what a model says. Operations outside of stages, and gradient operations, get their stage
here afterwards.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count
from towers.errors import ModelFunctionError
from towers.graph.edit import (
    Library,
    colocate,
    colocated_names,
    colocated_operations,
    is_uncolocated,
)
from towers.graph.graph_walk import is_control_flow, names_of
from towers.graph.op_types import HAND_ON
from towers.graph.variable_access import read_from
from towers.placement.tower_device import (
    StageDevice,
    TowerDevice,
    current_tower_device,
    resources_taken,
    stages_of,
)


@contextlib.contextmanager
def stage(number: int) -> typing.Iterator[None]:
    """The scope of a stage, a piece of a model that is on one of its tower's devices.

    >>> with towers.stage(0):
    ...     net = stem(images)
    >>> with towers.stage(1):
    ...     logits = head(net)

    With `devices=[['/gpu:0', '/gpu:1'], ['/gpu:2', '/gpu:3']]` stage 1 is on `/gpu:1` in the first
    tower and on `/gpu:3` in the second one. A gradient operation goes to the device of its forward
    operation. An operation outside of stages goes to the last stage among its inputs: a loss, to
    the last stage. In a tower of one device, and outside of towers, all stages are in one place.

    Args:
      number: the number of the stage, from 0.

    Raises:
      InvalidArgumentError: `number` is no int of at least 0.
      ModelFunctionError: the tower has several devices, and fewer than this.
    """
    check_count('number', number, least=0)
    device = None if tf.executing_eagerly() else current_tower_device(tf.get_default_graph())
    if device is None or len(device.stages) == 1:
        yield
        return
    if number >= len(device.stages):
        raise ModelFunctionError(
            'stage(%d), and the devices of this tower are %s: name %d devices for each tower, or '
            'one for all stages.' % (number, ' and '.join(device.stages), number + 1))
    with tf.device(StageDevice(device.stages[number], device.stages)):
        yield


def says_stages(operations: typing.Iterable[tf.Operation]) -> bool:
    """Whether the model has said `stage` around any of these operations."""
    for op in operations:
        scopes = compat.device_scopes(op)
        if any(isinstance(scope, StageDevice) for scope in scopes):
            return True
    return False


def place_forward(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Puts each operation that the model has made outside of stages on the last stage that it takes
    a tensor from; on the first stage if it takes none. An operation on a stage stays there.

    Args:
      operations: the operations of the forward pass, each after its inputs.
      device: the device of the tower.
    """
    stages = stages_of(device)
    if len(stages) == 1:
        return
    placed: typing.Dict[str, str] = {}  # {name of an operation: its device}
    library = Library(tf.get_default_graph())
    for op in operations:
        last_stage = _last_stage_of_inputs(op, placed, stages)
        if may_move(op, stages):
            placed[op.name] = last_stage or stages[0]
            move(op, placed[op.name], library)
        elif op.device in stages:
            placed[op.name] = op.device
        elif last_stage is not None and not op.device:
            # An operation of a TensorArray, which is not moved, as TensorFlow places it with the
            # array. What takes its tensors goes to the stage of the loop that fills the array.
            placed[op.name] = last_stage


def _last_stage_of_inputs(op: tf.Operation, placed: typing.Dict[str, str],
                          stages: typing.Sequence[str]) -> typing.Optional[str]:
    """The device of the last stage that an operation takes a tensor from; None if it takes none.

    Args:
      op: the operation.
      placed: {name of an operation on a stage: its device}.
      stages: the devices of the stages.
    """
    source_names = [tensor.op.name for tensor in op.inputs]
    input_devices = [placed[name] for name in source_names if name in placed]
    if not input_devices:
        return None
    return max(input_devices, key=stages.index)


def may_move(op: tf.Operation, stages: typing.Sequence[str]) -> bool:
    """Whether an operation may be put on another stage: only the tower's scope has put it where it
    is, on the first of `stages`."""
    if op.device != stages[0] or not is_uncolocated(op):
        return False
    scopes = compat.device_scopes(op)
    innermost = scopes[0] if scopes else None
    return isinstance(innermost, TowerDevice) and not isinstance(innermost, StageDevice)


def move(op: tf.Operation, device: str, library: Library) -> None:
    """Puts an operation on the device of a stage.

    Args:
      op: the operation.
      device: the device.
      library: the functions of the graph.

    Raises:
      ModelFunctionError: the operation calls a function with operations on another device.
    """
    if op.device == device:
        return
    for name, function in library.reached_from([op.node_def]).items():
        devices = {node.device for node in function.node_def}
        if not devices <= {'', device}:
            raise ModelFunctionError(
                'operation %s of another stage than the first calls the function %s, which '
                'stays where it was made: call tf.disable_control_flow_v2() before the model '
                'is made, and no tf.function or Defun in stages.' % (op.name, name))
    compat.set_device(op, device)


def check_stages(operations: typing.Sequence[tf.Operation], device: str) -> None:
    """Refuses a model in which a stage takes a tensor of a later one: no pipeline can run it.

    Args:
      operations: the operations of the forward pass. What is not among them, such as the tower's
        shard of the batch, is of no stage.
      device: the device of the tower.

    Raises:
      ModelFunctionError: such a tensor.
    """
    stages = stages_of(device)
    stage_by_name = {op.name: stages.index(op.device) for op in operations if op.device in stages}
    for op in operations:
        if op.name not in stage_by_name or _is_kept_with_another(op):
            continue
        op_stage = stage_by_name[op.name]
        for tensor in op.inputs:
            source_stage = stage_by_name.get(tensor.op.name, 0)
            if source_stage > op_stage and not _is_at_every_stage(tensor):
                raise ModelFunctionError(
                    'operation %s of stage %d takes %s of stage %d, so that the stages wait for '
                    'each other in a circle: with micro_batches= data goes from a stage to later '
                    'ones only.' % (op.name, op_stage, tensor.name, source_stage))


def _is_kept_with_another(op: tf.Operation) -> bool:
    """Whether TensorFlow keeps an operation with another one, wherever that is: it is colocated, or
    takes the handle of a variable."""
    return not is_uncolocated(op) or bool(resources_taken(op))


def _is_at_every_stage(tensor: tf.Tensor) -> bool:
    """Whether a tensor is there before any stage runs: a constant, a variable or its value."""
    if tensor.dtype == tf.resource or tensor.op.type == 'Const':
        return True
    return bool(read_from(tensor))


def place_backward(operations: typing.Sequence[tf.Operation], loss: tf.Tensor,
                   device: str) -> None:
    """Puts each gradient operation of a tower on the stage of its forward operation.

    A gradient operation without a forward operation, such as a sum of gradients, goes to the first
    stage among its inputs, so that the gradient of each activation is sent only once.

    Args:
      operations: the gradient operations, each after its inputs.
      loss: the loss that was differentiated, on the last stage.
      device: the device of the tower.
    """
    if len(stages_of(device)) > 1:
        placement = _BackwardPlacement(operations, loss, stages_of(device))
        for op in operations:
            placement.place(op)


class _BackwardPlacement:
    """Puts a tower's gradient operations on stages, one after the other."""

    def __init__(self, operations: typing.Iterable[tf.Operation], loss: tf.Tensor,
                 stages: typing.Tuple[str, ...]):
        """
        Args:
          operations: all gradient operations.
          loss: the loss that was differentiated.
          stages: the devices of the stages.
        """
        self._stages = stages
        self._loss = loss
        self._placed: typing.Dict[str, str] = {}  # {name of an operation: its device}
        self._devices_of_loops = _devices_of_loops(loss.graph, operations, stages)
        self._library = Library(loss.graph)

    def place(self, op: tf.Operation) -> None:
        """Puts one operation on its stage; its inputs have been placed before."""
        colocated = colocated_names(op)
        if any(name not in self._placed for name in colocated):
            return  # colocated with a variable, say
        is_group = op.type == 'NoOp' and len(op.control_inputs) > 0
        if is_group and not colocated:
            # `tf.group` copies the device of what it waits for; colocated, copies follow that, too.
            leader = op.control_inputs[0]
            colocate(op, [leader.name])
            device = self._placed.get(leader.name, leader.device)
        else:
            device = self._device_of(op)
        if op.device not in self._stages or device not in self._stages:
            return
        self._placed[op.name] = device
        move(op, device, self._library)
        if colocated:  # TensorFlow colocates a gradient with its source, which is a stage later
            colocate(op, [op.name])

    def _device_of(self, op: tf.Operation) -> str:
        """The device to put a gradient operation on: that of its forward operation, else of the
        loop that it is in, else the first stage of its inputs, else the device of the loss."""
        forward = compat.differentiated_operation(op)
        if forward is not None and forward.device in self._stages:
            return forward.device
        context = compat.control_flow_context(op)
        if is_control_flow(op) and context in self._devices_of_loops:
            return self._devices_of_loops[context]  # counters and stacks of a loop
        return self._first_stage_of_inputs(op) or self._loss.op.device

    def _first_stage_of_inputs(self, op: tf.Operation) -> typing.Optional[str]:
        """The device of the first stage that an operation takes a tensor from, without constants;
        None if it takes none from a stage."""
        sources = [tensor.op for tensor in op.inputs if tensor.op.type != 'Const']
        devices = [self._placed.get(source.name, source.device) for source in sources]
        stage_devices = [device for device in devices if device in self._stages]
        if not stage_devices:
            return None
        return min(stage_devices, key=self._stages.index)


def _devices_of_loops(graph: tf.Graph, backward: typing.Iterable[tf.Operation],
                      stages: typing.Tuple[str, ...]) -> typing.Dict[typing.Any, str]:
    """Finds the device of each loop or branch (v1): that of the first operation in it that is on a
    stage.

    Args:
      graph: the graph.
      backward: the gradient operations; each counts with the device of its forward operation.
      stages: the devices of the stages.

    Returns:
      {TensorFlow's object for the loop or branch: its device}.
    """
    backward_names = names_of(backward)
    devices: typing.Dict[typing.Any, str] = {}
    for op in graph.get_operations():
        context = compat.control_flow_context(op)
        if context is None or context in devices:
            continue
        is_backward = op.name in backward_names
        forward = compat.differentiated_operation(op) if is_backward else op
        if forward is not None and forward.device in stages:
            devices[context] = forward.device
    return devices


# ---- TensorArrays and stacks of loops (v1) -------------------------------------------------------
#
# They have to be on the device of the operations that use them: else the session says "Cannot
# colocate nodes", or "Cannot place the graph because a reference or resource edge connects …".

_FILLS = frozenset(['TensorArrayScatterV3', 'TensorArraySplitV3', 'TensorArrayWriteV3'])
_READS = frozenset(['TensorArrayReadV3', 'TensorArrayGatherV3', 'TensorArrayConcatV3'])
_PUSHES_AND_POPS = frozenset(['StackPushV2', 'StackPopV2'])


def keep_arrays_with_readers(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Puts operations that fill a TensorArray before a loop (v1), such as those of `tf.map_fn`, on
    the device of the loop, which reads it. TensorFlow colocates them with the first value that is
    written.

    Args:
      operations: the operations of a tower.
      device: the device of the tower.
    """
    stages = stages_of(device)
    for op in operations:
        if op.type == 'TensorArrayV3':
            _keep_array_with_readers(op, stages)


def _keep_array_with_readers(array: tf.Operation, stages: typing.Sequence[str]) -> None:
    """Puts the operations that fill one TensorArray before a loop on the device of those that read
    it, if these are all on one of the `stages`."""
    users = _uses_of(array.outputs[0]).users
    readers = [user for user in users if user.type in _READS and is_uncolocated(user)]
    device_of_loop = _common_device(readers)
    if device_of_loop is None or device_of_loop not in stages:
        return
    for writer in users:
        is_before_loop = writer.type in _FILLS and writer.inputs[0].op is array
        if is_before_loop and not is_uncolocated(writer):
            # By name, so that copies follow their own reader.
            colocate(writer, [readers[0].name])
            compat.set_device(writer, device_of_loop)


def keep_stacks_with_loops(operations: typing.Iterable[tf.Operation]) -> None:
    """Puts the stacks on which loops (v1) keep values for the backward pass on the device of the
    operations that push and pop.

    TensorFlow colocates a stack, and its size, with the value that it keeps: with a variable, if
    that is the variable's value.
    """
    for op in operations:
        if op.type == 'StackV2':
            _keep_stack_with_loop(op)


def _keep_stack_with_loop(stack: tf.Operation) -> None:
    """Puts one stack, its size and what hands it into the loop on the device of the operations that
    push and pop, if these are all on one device."""
    uses = _uses_of(stack.outputs[0])
    pushes_and_pops = [user for user in uses.users if user.type in _PUSHES_AND_POPS]
    device = _common_device(pushes_and_pops)
    if not device:
        return
    sizes = [tensor.op for tensor in stack.inputs if tensor.op.type == 'Const']
    for op in [stack] + sizes + uses.handing_on:
        if _is_beside_resource(op):
            compat.set_device(op, device)
            colocate(op, [op.name])


def _common_device(operations: typing.Iterable[tf.Operation]) -> typing.Optional[str]:
    """The device that all these operations ask for; None if they differ, or there are none."""
    devices = {op.device for op in operations}
    return devices.pop() if len(devices) == 1 else None


def _is_beside_resource(op: tf.Operation) -> bool:
    """Whether an operation is colocated with one that takes a resource, to whose device TensorFlow
    would move it."""
    return any(resources_taken(other) for other in colocated_operations(op))


class _Uses(typing.NamedTuple):
    """The operations that take an array or a stack, directly or within loops and branches."""
    handing_on: typing.List[tf.Operation]  # those that pass it into loops and branches
    users: typing.List[tf.Operation]  # those that read or write it


def _uses_of(handle: tf.Tensor) -> _Uses:
    """Finds the operations that take the array or the stack of a handle."""
    uses = _Uses([], [])
    tensors = [handle]
    while tensors:
        for op in tensors.pop().consumers():
            if op.type in HAND_ON:
                uses.handing_on.append(op)
                tensors.extend(op.outputs)
            else:
                uses.users.append(op)
    return uses
