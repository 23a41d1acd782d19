"""Stages: pieces of one model on several devices of a tower; arrays and stacks of loops."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count
from towers.errors import ModelFunctionError
from towers.graph.edit import Library, beside, colocate, is_free, names_beside
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
      number: from 0.

    Raises:
      InvalidArgumentError: no such number.
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
    """Whether any of these operations was made within a `stage` of the model's own."""
    for op in operations:
        scopes = compat.device_scopes(op)
        if any(isinstance(scope, StageDevice) for scope in scopes):
            return True
    return False


def place_forward(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Puts each operation outside of stages on the last stage among its inputs."""
    stages = stages_of(device)
    if len(stages) == 1:
        return
    placed: typing.Dict[str, str] = {}  # from names of operations to their devices
    library = Library(tf.get_default_graph())
    for op in operations:
        last_stage = _last_stage_of_inputs(op, placed, stages)
        if may_move(op, stages):
            placed[op.name] = last_stage or stages[0]
            move(op, placed[op.name], library)
        elif op.device in stages:
            placed[op.name] = op.device
        elif last_stage is not None and not op.device:
            # A TensorArray's: it hands on data of the loop that fills it.
            placed[op.name] = last_stage


def _last_stage_of_inputs(op: tf.Operation, placed: typing.Dict[str, str],
                          stages: typing.Sequence[str]) -> typing.Optional[str]:
    """The device of the last stage that an operation takes a tensor from; None where all its inputs
    come from elsewhere. `placed` has the devices of operations by their names."""
    source_names = [tensor.op.name for tensor in op.inputs]
    input_devices = [placed[name] for name in source_names if name in placed]
    if not input_devices:
        return None
    return max(input_devices, key=stages.index)


def may_move(op: tf.Operation, stages: typing.Sequence[str]) -> bool:
    """Whether an operation is on the first of `stages` because of the tower's scope alone."""
    if op.device != stages[0] or not is_free(op):
        return False
    scopes = compat.device_scopes(op)
    innermost = scopes[0] if scopes else None
    return isinstance(innermost, TowerDevice) and not isinstance(innermost, StageDevice)


def move(op: tf.Operation, device: str, library: Library) -> None:
    """Puts an operation on a stage's device; raises `ModelFunctionError` if it calls a function
    whose operations, in the `library`, are on another one."""
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


def check_stages(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Raises `ModelFunctionError` if a stage takes a tensor of a later one.

    What was made outside of the model, such as the tower's shard of the batch, is of no stage.
    """
    stages = stages_of(device)
    operations = list(operations)
    names = names_of(operations)
    for op in operations:
        if op.device not in stages or _is_kept_with_another(op):
            continue
        number = stages.index(op.device)
        for tensor in op.inputs:
            source = tensor.op
            if source.name not in names or source.device not in stages:
                continue
            source_number = stages.index(source.device)
            if source_number > number and not _is_at_every_stage(tensor):
                raise ModelFunctionError(
                    'operation %s of stage %d takes %s of stage %d, so that the stages wait for '
                    'each other in a circle: with micro_batches= data goes from a stage to later '
                    'ones only.' % (op.name, number, tensor.name, source_number))


def _is_kept_with_another(op: tf.Operation) -> bool:
    """Whether TensorFlow keeps an operation with another, wherever that is: with a variable, that
    it is colocated with or whose handle it takes."""
    return not is_free(op) or any(tensor.dtype == tf.resource for tensor in op.inputs)


def _is_at_every_stage(tensor: tf.Tensor) -> bool:
    """Whether a tensor waits for no stage: a constant, or a variable."""
    return tensor.dtype == tf.resource or tensor.op.type == 'Const' or bool(read_from(tensor))


def place_backward(operations: typing.Sequence[tf.Operation], loss: tf.Tensor,
                   device: str) -> None:
    """Puts each gradient operation of a tower with stages on the stage of its forward operation;
    one without, a sum say, on the first stage of its inputs: each activation's gradient crosses
    once.

    Args:
      operations: the gradient operations, each after its inputs.
      loss: what they differentiate, on the last stage.
      device: the tower's.
    """
    if len(stages_of(device)) > 1:
        placement = _BackwardPlacement(operations, loss, stages_of(device))
        for op in operations:
            placement.place(op)


class _BackwardPlacement:
    """The stages of a tower's gradient operations, one after the other."""

    def __init__(self, operations: typing.Iterable[tf.Operation], loss: tf.Tensor,
                 stages: typing.Tuple[str, ...]):
        self._stages = stages
        self._loss = loss
        self._placed: typing.Dict[str, str] = {}  # from names of operations to their devices
        self._devices_of_loops = _devices_of_loops(loss.graph, operations, stages)
        self._library = Library(loss.graph)

    def place(self, op: tf.Operation) -> None:
        """Puts one operation on its stage; its inputs have been placed before."""
        colocated = names_beside(op)
        if any(name not in self._placed for name in colocated):
            return  # with a variable, say
        if op.type == 'NoOp' and op.control_inputs and not colocated:
            # `tf.group` says the device of what it waits for by name: copies are to follow that.
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
        """The device of the forward operation, of the loop, or the first one of the inputs."""
        forward = compat.differentiated_operation(op)
        if forward is not None and forward.device in self._stages:
            return forward.device
        context = compat.control_flow_context(op)
        if is_control_flow(op) and context in self._devices_of_loops:
            return self._devices_of_loops[context]  # counters and stacks of a loop
        return self._first_stage_of_inputs(op) or self._loss.op.device

    def _first_stage_of_inputs(self, op: tf.Operation) -> typing.Optional[str]:
        """The device of the first stage that an operation takes a tensor from; None where it takes
        none from a stage. Constants do not count: they are wherever they are taken."""
        sources = [tensor.op for tensor in op.inputs if tensor.op.type != 'Const']
        devices = [self._placed.get(source.name, source.device) for source in sources]
        stage_devices = [device for device in devices if device in self._stages]
        if not stage_devices:
            return None
        return min(stage_devices, key=self._stages.index)


def _devices_of_loops(graph: tf.Graph, backward: typing.Iterable[tf.Operation],
                      stages: typing.Tuple[str, ...]) -> typing.Dict[typing.Any, str]:
    """The device of each loop or branch (v1): that of the first operation in it that is on one of
    the `stages`; for a `backward` operation its forward operation counts."""
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
    """Puts operations that fill a TensorArray before a loop (v1), as `tf.map_fn`, on the device
    of the loop, which reads it: TensorFlow colocates these with the first value that is written.
    `device` is the tower's."""
    stages = stages_of(device)
    for op in operations:
        if op.type == 'TensorArrayV3':
            _keep_array_with_readers(op, stages)


def _keep_array_with_readers(array: tf.Operation, stages: typing.Sequence[str]) -> None:
    """Puts operations that fill an array before a loop on the device of its readers, if these are
    together on one of the `stages`."""
    users = _uses(array.outputs[0]).users
    readers = [user for user in users if user.type in _READS and is_free(user)]
    device_of_loop = _common_device(readers)
    if device_of_loop is None or device_of_loop not in stages:
        return
    writers = [user for user in users if user.type in _FILLS]
    for writer in writers:
        is_before_loop = writer.inputs[0].op is array  # not within another loop
        if is_before_loop and not is_free(writer):
            # By name, so that copies follow their own reader.
            colocate(writer, [readers[0].name])
            compat.set_device(writer, device_of_loop)


def keep_stacks_with_loops(operations: typing.Iterable[tf.Operation]) -> None:
    """Puts the stacks of variables' values on the device of the operations that push and pop.

    TensorFlow colocates a stack, and its size, with the value that it keeps, such as a variable's.
    """
    for op in operations:
        if op.type == 'StackV2':
            _keep_stack_with_loop(op)


def _keep_stack_with_loop(stack: tf.Operation) -> None:
    """Puts a stack, its size and what hands it into the loop on the device of what pushes and pops,
    if that is one device."""
    uses = _uses(stack.outputs[0])
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
    """The device of all these operations; None where they have several, or there are none."""
    devices = {op.device for op in operations}
    return devices.pop() if len(devices) == 1 else None


def _is_beside_resource(op: tf.Operation) -> bool:
    """Whether an operation is colocated with one that takes a resource: TensorFlow moves it to that
    resource, on whatever device."""
    return any(resources_taken(other) for other in beside(op))


class _Uses(typing.NamedTuple):
    """What takes an array or a stack, directly or within loops and branches."""
    handing_on: typing.List[tf.Operation]  # those that pass it into loops and branches
    users: typing.List[tf.Operation]  # those that read or write it


def _uses(handle: tf.Tensor) -> _Uses:
    """The `_Uses` of the array or stack with a handle."""
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
