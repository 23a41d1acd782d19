"""A batch in the memory of the towers' devices, to measure steps without their input.

The shards of one batch are kept in a variable each, on the device of their tower, and the finished
step is made to read these variables. All else of the step is as it was.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import reachable_from, step_operations
from towers.placement.tower_device import stages_of
from towers.run.read_times import reads_of


def hold_batch(built, fetches):
    """Makes a step train on one batch over and over: it reads, cuts and copies no other.

    Args:
      built: `BuiltTowers`.
      fetches: list of what each step runs: operations and tensors, the first one an operation.

    Returns:
      List of the operations that read a batch and hold it, to be run together before the first
      step.
    """
    step = step_operations(fetches)
    reads = reads_of(fetches[0], step)
    devices = {leaf.op: stages_of(tower.device)[0] for tower in built.towers
               for leaf in tf.nest.flatten(tower.inputs, expand_composites=True)
               if isinstance(leaf, tf.Tensor)}
    after = reachable_from(reads, step)
    # The way of the batch to the towers. Beside the shards, a step takes their sizes from it.
    way = {op.name for op in reads + step_operations(list(devices))} & after
    held, initializers = {}, []
    for op in step:
        if op.name in way:
            continue
        for position, tensor in enumerate(op.inputs):
            if tensor.op.name not in way:
                continue
            if tensor.name not in held:
                variable = _variable(tensor, devices.get(tensor.op, tensor.device))
                held[tensor.name] = variable.value()
                initializers.append(variable.initializer)
            compat.replace_input(op, position, held[tensor.name])
        waits = [other for other in op.control_inputs if other.name not in way]
        if len(waits) < len(op.control_inputs):
            compat.set_control_inputs(op, waits)
    return initializers


def _variable(initial, device):
    """A variable on a device, in no collection."""
    with tf.device(None), tf.device(device), tf.control_dependencies(None):
        return tf.Variable(initial, trainable=False, collections=[], use_resource=True,
                           validate_shape=False, name='held_batch')
