"""TensorArrays that a loop of one stage reads and another stage fills: where the loop is."""

from towers import compat
from towers.graph.variable_access import HAND_ON
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
        users = _users(op.outputs[0])
        readers = [user for user in users if user.type in _READS and _is_free(user)]
        there = {reader.device for reader in readers}
        if len(there) != 1 or not there.issubset(stages):
            continue
        for user in users:
            if user.type in _FILLS and not _is_free(user) and user.device in [''] + stages and (
                    user.inputs[0].op is op):  # not within another loop
                # By name, so that clones follow their own reader.
                compat.set_colocation(user, [b'loc:@' + readers[0].name.encode()])
                compat.set_device(user, readers[0].device)


def _is_free(op):
    return op.colocation_groups() == [b'loc:@' + op.name.encode()]


def _users(handle):
    """The operations that take an array, in loops and branches too."""
    found, tensors = [], [handle]
    while tensors:
        for op in tensors.pop().consumers():
            if op.type in HAND_ON:
                tensors.extend(op.outputs)
            else:
                found.append(op)
    return found
