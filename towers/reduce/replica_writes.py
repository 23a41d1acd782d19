"""After an update has written a replicated variable, writes the same value into its replicas.

An update that rides on the train op (`UPDATE_OPS`, `updates`), such as the clipping of weights, is
the first tower's, and writes the model's own variable. A write of the forward pass itself is
refused, see `inline_updates`: it takes place whenever the loss is computed, with or without a step.
"""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device


def replicas_follow(replicas, updates, after):
    """Operations that write into the replicas what updates have written into their variables.

    The optimizer has to wait for them.

    Args:
      replicas: `Replicas`, or None.
      updates: list of operations or tensors: updates of the step.
      after: tensors or operations that read the replicas in a step: losses and gradients.

    Returns:
      List of operations, one for each replica of a variable that is written.
    """
    if replicas is None or not updates or not replicas.variables:
        return []
    finder, written = Writes(tf.get_default_graph()), set()
    for op in graph_walk.step_operations(updates):
        written.update(finder.of(op))
    operations, values = [], {}
    with tf.name_scope('replicas/'), tf.control_dependencies(list(updates) + list(after)):
        for replica in replicas.variables:
            variable = replicas.original(replica)
            name = variable.op.name
            if name not in written:
                continue
            if name not in values:
                with only_device(variable.device):
                    values[name] = variable.read_value()
            with only_device(replica.device):
                operations.append(tf.assign(
                    replica, values[name],
                    validate_shape=replica.get_shape().is_fully_defined()).op)
    return operations
