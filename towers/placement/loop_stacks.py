"""Puts the stacks on which a loop (v1) keeps values for its gradient on the device of the loop."""

from towers import compat
from towers.graph.variable_access import HAND_ON

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
        handed_on, users = _users(op)
        devices = {user.device for user in users}
        if len(devices) != 1 or '' in devices:
            continue
        size = [tensor.op for tensor in op.inputs if tensor.op.type == 'Const']
        for each in [op] + size + handed_on:
            if any(map(_is_on_variables_device, _others(each))):
                compat.set_device(each, users[0].device)
                compat.set_colocation(each, [b'loc:@' + each.name.encode()])


def _others(op):
    """The operations that `op` is colocated with."""
    names = [group.decode()[len('loc:@'):] for group in op.colocation_groups()]
    return [op.graph.get_operation_by_name(name) for name in names if name != op.name]


def _is_on_variables_device(op):
    """Whether TensorFlow moves an operation to the resource that it takes, on whatever device."""
    return any(tensor.dtype.name == 'resource' for tensor in op.inputs)


def _users(stack):
    """The operations that pass a stack into loops and branches, or push to it or pop from it."""
    handed_on, users, tensors = [], [], [stack.outputs[0]]
    while tensors:
        for op in tensors.pop().consumers():
            if op.type in _ON_STACK:
                users.append(op)
            elif op.type in HAND_ON:
                handed_on.append(op)
                tensors.extend(op.outputs)
    return handed_on, users
