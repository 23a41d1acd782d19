"""The devices of TensorArrays and stacks, in which loops of control flow v1 keep their values.

They have to be on the device of the operations that use them: else the session says "Cannot
colocate nodes", or "Cannot place the graph because a reference or resource edge connects …".
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import colocate, colocated_operations, is_uncolocated
from towers.graph.op_types import HAND_ON
from towers.placement.tower_device import resources_taken, stages_of

# Types of operations that write into a TensorArray, that read from it, and that use a stack.
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
    """Puts the operations that fill one TensorArray before a loop on the device of the operations
    that read it.

    Args:
      array: the operation that makes the TensorArray.
      stages: the devices of the tower's stages. If the readers are not all on one of these, the
        program has placed them, and everything stays.
    """
    users = _users_of(array.outputs[0])
    readers = [user for user in users if user.type in _READS and is_uncolocated(user)]
    device_of_loop = _common_device(readers)
    if device_of_loop is None or device_of_loop not in stages:
        return
    for writer in _colocated_writers(array, users):
        # With a reader, so that the copy for another tower is with the copy of the reader.
        colocate(writer, [readers[0].name])
        compat.set_device(writer, device_of_loop)


def _colocated_writers(array: tf.Operation,
                       users: typing.Iterable[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations that write into a TensorArray before a loop, and that TensorFlow has
    colocated with the first value.

    Args:
      array: the operation that makes the TensorArray.
      users: the operations that read or write it.
    """
    writers = []
    for user in users:
        # Within the loop an operation takes the array from an `Enter`, and not directly.
        writes_before_loop = user.type in _FILLS and user.inputs[0].op is array
        if writes_before_loop and not is_uncolocated(user):
            writers.append(user)
    return writers


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
    push and pop, if these all ask for one device. What would not be moved from there stays as it
    is."""
    pushes_and_pops = [user for user in _users_of(stack.outputs[0])
                       if user.type in _PUSHES_AND_POPS]
    device = _common_device(pushes_and_pops)
    if not device:
        return
    sizes = [tensor.op for tensor in stack.inputs if tensor.op.type == 'Const']
    for op in [stack] + sizes + _operations_between(stack.outputs[0]):
        if _is_moved_to_resource(op):
            compat.set_device(op, device)
            colocate(op, [op.name])  # with itself alone: the colocation with the value ends


def _is_moved_to_resource(op: tf.Operation) -> bool:
    """Whether TensorFlow would move an operation to the device of a variable: the operation is
    colocated with one that takes the variable, such as a read of it."""
    return any(map(resources_taken, colocated_operations(op)))


def _common_device(operations: typing.Iterable[tf.Operation]) -> typing.Optional[str]:
    """The device that all these operations ask for; None if they differ, or there are none."""
    devices = {op.device for op in operations}
    if len(devices) != 1:
        return None
    return devices.pop()


def _operations_between(handle: tf.Tensor) -> typing.List[tf.Operation]:
    """List of the operations that hand an array or a stack on, into loops and branches.

    Args:
      handle: the tensor that stands for the array or the stack.
    """
    return [op for op in _takers_of(handle) if op.type in HAND_ON]


def _users_of(handle: tf.Tensor) -> typing.List[tf.Operation]:
    """List of the operations that read or write an array or a stack, also within loops and
    branches.

    Args:
      handle: the tensor that stands for the array or the stack.
    """
    return [op for op in _takers_of(handle) if op.type not in HAND_ON]


def _takers_of(handle: tf.Tensor) -> typing.List[tf.Operation]:
    """List of the operations that take a handle, directly or from one that hands it on. That one,
    such as an `Enter`, is in the list, too."""
    takers: typing.List[tf.Operation] = []
    tensors = [handle]
    while tensors:
        for op in tensors.pop().consumers():
            takers.append(op)
            if op.type in HAND_ON:
                tensors.extend(op.outputs)
    return takers
