"""Devices of the TensorArrays and stacks of a loop (v1), which TensorFlow colocates with values.

An array or a stack has to be on the device of the operations that use it: else the session says
"Cannot colocate nodes", or "Cannot place the graph", when it runs.
"""

from towers import compat
from towers.graph.edit import beside, colocate, is_free
from towers.graph.op_types import HAND_ON
from towers.placement.tower_device import stages_of

_FILLS = frozenset(['TensorArrayScatterV3', 'TensorArraySplitV3', 'TensorArrayWriteV3'])
_READS = frozenset(['TensorArrayReadV3', 'TensorArrayGatherV3', 'TensorArrayConcatV3'])


def keep_arrays_with_readers(operations, device):
    """Puts what fills a TensorArray before a loop (v1) on the stage of the loop, which reads it.

    TensorFlow colocates the filling with the first value that is written. `tf.map_fn`, and
    `dynamic_rnn(time_major=True)`, fill an array with their input, which may be of the stage
    before. An array cannot be on another device than its readers: "Cannot place the graph because a
    reference or resource edge connects colocation groups" then, when the session runs.

    Args:
      operations: those of the model function's call, on the devices of their stages.
      device: the tower's device, or `StagedDevices`.
    """
    stages = list(stages_of(device))
    for op in operations if len(stages) > 1 else ():
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


_ON_STACK = frozenset(['StackPushV2', 'StackPopV2'])


def keep_stacks_with_loops(operations):
    """Puts the stacks of variables' values on the device of the operations that push and pop.

    TensorFlow colocates a stack, and its size, with the value that it keeps. A resource variable
    that is read in the loop is read on the variable's device, but the pushes are on the tower's
    device, and a stack has to be on the device of its pushes: else the session says "Cannot
    colocate nodes … f_acc".

    Args:
      operations: the operations that taking gradients has made.
    """
    for op in operations:
        if op.type != 'StackV2':
            continue
        handed_on, users = _users(op.outputs[0])
        users = [user for user in users if user.type in _ON_STACK]
        devices = {user.device for user in users}
        if len(devices) != 1 or '' in devices:
            continue
        size = [tensor.op for tensor in op.inputs if tensor.op.type == 'Const']
        for each in [op] + size + handed_on:
            if any(map(_is_on_variables_device, beside(each))):
                compat.set_device(each, users[0].device)
                colocate(each, [each.name])


def _is_on_variables_device(op):
    """Whether TensorFlow moves an operation to the resource that it takes, on whatever device."""
    return any(tensor.dtype.name == 'resource' for tensor in op.inputs)


def _users(handle):
    """The operations that pass an array or a stack into loops and branches, and those that use it.
    """
    handed_on, users, tensors = [], [], [handle]
    while tensors:
        for op in tensors.pop().consumers():
            if op.type in HAND_ON:
                handed_on.append(op)
                tensors.extend(op.outputs)
            else:
                users.append(op)
    return handed_on, users
