"""Stacks on which a loop of control flow v1 keeps what its gradient needs: where the loop is."""

from towers import compat
from towers.graph.variable_access import HAND_ON

_ON_STACK = frozenset(['StackPushV2', 'StackPopV2'])


def keep_stacks_with_loops(operations):
    """Puts the stacks of variables' values on the device of what pushes to them and pops from them.

    TensorFlow colocates a stack with the value that it is for. A resource variable that is read in
    the loop is read on its own device, and a stack cannot be on another one than its pushes, which
    are on the tower's: "Cannot colocate nodes … f_acc" then, when the session runs.

    Args:
      operations: those that taking gradients has made.
    """
    for op in operations:
        if op.type != 'StackV2':
            continue
        handed_on, users = _users(op)
        devices = {user.device for user in users}
        if len(devices) != 1 or '' in devices:
            continue
        for each in [op] + handed_on:
            if any(map(_is_on_variables_device, _others(each))):
                compat.set_device(each, users[0].device)
                compat.set_colocation(each, [b'loc:@' + each.name.encode()])


def _others(op):
    """The operations that it is colocated with."""
    names = [group.decode()[len('loc:@'):] for group in op.colocation_groups()]
    return [op.graph.get_operation_by_name(name) for name in names if name != op.name]


def _is_on_variables_device(op):
    """Whether TensorFlow moves it to the resource that it takes, whatever device it is made for."""
    return any(tensor.dtype.name == 'resource' for tensor in op.inputs)


def _users(stack):
    """What hands a stack on into loops and branches, and what pushes to it there and pops from it.
    """
    handed_on, users, tensors = [], [], [stack.outputs[0]]
    while tensors:
        for op in tensors.pop().consumers():
            if op.type in _ON_STACK:
                users.append(op)
            elif op.type in HAND_ON:
                handed_on.append(op)
                tensors.extend(op.outputs)
    return handed_on, users
