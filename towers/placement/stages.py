"""Stages: parts of one model on several devices of a tower; arrays and stacks of loops."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count
from towers.errors import ModelFunctionError
from towers.graph.edit import Library, beside, colocate, is_free, names_beside
from towers.graph.graph_walk import is_control_flow
from towers.graph.op_types import HAND_ON
from towers.graph.variable_access import read_from
from towers.placement.tower_device import StageDevice, TowerDevice, current_tower_device, stages_of


@contextlib.contextmanager
def stage(number: int) -> typing.Iterator[None]:
    """The scope of a part of a model that is on one of its tower's devices.

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
    return any(isinstance(scope, StageDevice) for op in operations
               for scope in compat.device_scopes(op))


def place_forward(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Puts each operation outside of stages on the last stage among its inputs."""
    stages = stages_of(device)
    if len(stages) == 1:
        return
    placed, library = {}, Library(tf.get_default_graph())
    for op in operations:
        known = [placed[tensor.op.name] for tensor in op.inputs if tensor.op.name in placed]
        if may_move(op, stages):
            placed[op.name] = max(known, key=stages.index) if known else stages[0]
            move(op, placed[op.name], library)
        elif op.device in stages:
            placed[op.name] = op.device
        elif known and not op.device:  # a TensorArray's: it hands on data of the loop that fills it
            placed[op.name] = max(known, key=stages.index)


def may_move(op: tf.Operation, stages: typing.Sequence[str]) -> bool:
    """Whether an operation is on the first device because of the tower's scope alone."""
    scopes = compat.device_scopes(op)
    return (op.device == stages[0] and bool(scopes) and isinstance(scopes[0], TowerDevice)
            and not isinstance(scopes[0], StageDevice) and is_free(op))


def move(op: tf.Operation, device: str, library: Library) -> None:
    """Puts an operation on a stage's device; raises `ModelFunctionError` if it calls a function."""
    if op.device != device:
        for name, function in library.reached_from([op.node_def]).items():
            if any(node.device not in ('', device) for node in function.node_def):
                raise ModelFunctionError(
                    'operation %s of another stage than the first calls the function %s, which '
                    'stays where it was made: call tf.disable_control_flow_v2() before the model '
                    'is made, and no tf.function or Defun in stages.' % (op.name, name))
        compat.set_device(op, device)


def _stages_of_loops(graph, backward, stages):
    """{loop or branch of control flow v1: the device of the operations in it}."""
    own = {op.name for op in backward}
    found = {}
    for op in graph.get_operations():
        context = compat.control_flow_context(op)
        if context is None or context in found:
            continue
        of = compat.differentiated_operation(op) if op.name in own else op
        if of is not None and of.device in stages:
            found[context] = of.device
    return found


def check_stages(operations: typing.Iterable[tf.Operation], device: str) -> None:
    """Raises `ModelFunctionError` if a stage takes a tensor of a later one.

    What was made outside of the model, such as the tower's part of the batch, is of no stage.
    """
    stages, names = stages_of(device), {op.name for op in operations}
    for op in operations:
        # TensorFlow keeps some operations with a variable, wherever the variable is.
        for tensor in op.inputs if op.device in stages and is_free(op) else ():
            if tensor.dtype != tf.resource and tensor.op.type != 'Const' and (
                    tensor.op.name in names and tensor.op.device in stages) and (
                    stages.index(tensor.op.device) > stages.index(op.device)) and not (
                    read_from(tensor)):
                raise ModelFunctionError(
                    'operation %s of stage %d takes %s of stage %d, so that the stages wait for '
                    'each other in a circle: with micro_batches= data goes from a stage to later '
                    'ones only.' % (op.name, stages.index(op.device), tensor.name,
                                    stages.index(tensor.op.device)))


def place_backward(operations, loss, device):
    """Puts each gradient operation of a tower with stages on the stage of its forward operation;
    one without, a sum say, on the first stage of its inputs: each activation's gradient crosses
    once."""
    stages = stages_of(device)
    if len(stages) == 1:
        return
    placed = {}
    of_loops = _stages_of_loops(loss.graph, operations, stages)
    library = Library(loss.graph)
    for op in operations:
        groups, of = names_beside(op), compat.differentiated_operation(op)
        if op.type == 'NoOp' and not groups and op.control_inputs:
            # `tf.group` says the device of what it waits for by name: copies are to follow that.
            leader = op.control_inputs[0]
            there = placed.get(leader.name, leader.device)
            colocate(op, [leader.name])
        elif any(name not in placed for name in groups):
            continue  # with a variable, say
        elif of is not None and of.device in stages:
            there = of.device
        elif is_control_flow(op) and compat.control_flow_context(op) in of_loops:
            there = of_loops[compat.control_flow_context(op)]  # counters and stacks of a loop
        else:
            known = [placed.get(tensor.op.name, tensor.op.device) for tensor in op.inputs
                     if tensor.op.type != 'Const']
            known = [each for each in known if each in stages]
            there = min(known, key=stages.index) if known else loss.op.device
        if op.device in stages and there in stages:
            placed[op.name] = there
            move(op, there, library)
            if groups:  # TensorFlow colocates a gradient with its source, which is a stage later
                colocate(op, [op.name])


# ---- TensorArrays and stacks of loops (v1) -------------------------------------------------------
#
# They have to be on the device of the operations that use them: else the session says "Cannot
# colocate nodes", or "Cannot place the graph because a reference or resource edge connects …".

_FILLS = frozenset(['TensorArrayScatterV3', 'TensorArraySplitV3', 'TensorArrayWriteV3'])
_READS = frozenset(['TensorArrayReadV3', 'TensorArrayGatherV3', 'TensorArrayConcatV3'])


def keep_arrays_with_readers(operations, device):
    """Puts operations that fill a TensorArray before a loop (v1), as `tf.map_fn`, on the device
    of the loop, which reads it: TensorFlow colocates these with the first value that is written."""
    stages = list(stages_of(device))
    for op in operations:
        if op.type != 'TensorArrayV3':
            continue
        _, users = _users(op.outputs[0])
        readers = [user for user in users if user.type in _READS and is_free(user)]
        there = {reader.device for reader in readers}
        if len(there) != 1 or not there.issubset(stages):
            continue
        for user in users:
            if user.type in _FILLS and not is_free(user) and user.device in [''] + stages and (
                    user.inputs[0].op is op):  # not within another loop
                # By name, so that copies follow their own reader.
                colocate(user, [readers[0].name])
                compat.set_device(user, readers[0].device)


def keep_stacks_with_loops(operations: typing.Iterable[tf.Operation]) -> None:
    """Puts the stacks of variables' values on the device of the operations that push and pop.

    TensorFlow colocates a stack, and its size, with the value that it keeps, such as a variable's.
    """
    for op in operations:
        if op.type != 'StackV2':
            continue
        handed_on, users = _users(op.outputs[0])
        users = [user for user in users if user.type in ('StackPushV2', 'StackPopV2')]
        devices = {user.device for user in users}
        if len(devices) != 1 or '' in devices:
            continue
        size = [tensor.op for tensor in op.inputs if tensor.op.type == 'Const']
        for each in [op] + size + handed_on:
            # TensorFlow moves an operation to the resource that it takes, on whatever device.
            if any(tensor.dtype == tf.resource for other in beside(each)
                   for tensor in other.inputs):
                compat.set_device(each, users[0].device)
                colocate(each, [each.name])


def _users(handle):
    """Operations that pass an array or stack into loops and branches, and its users: two lists."""
    handed_on, users, tensors = [], [], [handle]
    while tensors:
        for op in tensors.pop().consumers():
            if op.type in HAND_ON:
                handed_on.append(op)
                tensors.extend(op.outputs)
            else:
                users.append(op)
    return handed_on, users
