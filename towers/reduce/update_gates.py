"""Updates that ride on the train op, such as batch norm's moving averages, on several machines.

A variable that they write on a parameter server is read by other workers' forward passes of the
same step: the update waits until all workers' gradients have come. In the step in which all data
have ended it must not run at all, and in a worker whose own data have ended it would see the first
batch again.
"""

import functools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.tower import write_order


def held_back(updates, gates, active, computed):
    """Makes updates wait for other operations, and leaves them out where there is no batch.

    What the step computes its results from is left as it is, also where it writes a variable: a
    write of the forward pass itself, which `loss` or a prediction takes along without a step.

    Args:
      updates: list of operations or tensors, which nothing waits for yet but other updates, and
        what `transform_gradients` has made.
      gates: list of operations to wait for.
      active: float scalar, 0 in a worker whose own data have ended; or None.
      computed: list of the tensors that can be had without a step: loss, predictions, metrics.

    Returns:
      `(updates, redirect)`: a list of tensors or operations, which the optimizer has to wait for in
      place of `updates`; and, where updates may be left out, a function to be called when more
      operations have been made: what waits for updates then waits for what runs in any case.
    """
    if not updates or not gates and active is None:
        return updates, None
    gates, skipped = list(gates), None
    if active is not None:
        # As in a branch of control flow v1: what waits for the output that is not taken is not run.
        with only_device('/cpu:0'), tf.name_scope('riding'), tf.control_dependencies(gates):
            has_batch = tf.identity(active >= .5)
            switch = tf.raw_ops.Switch(data=has_batch, pred=has_batch)
            skipped, taken = tf.identity(switch[0]), tf.identity(switch[1])
        gates = [taken.op]
    step = {op.name for op in graph_walk.step_operations(gates + list(computed))}
    operations = graph_walk.step_operations(updates)
    writes, frames = Writes(tf.get_default_graph()), Frames(operations)
    roots = {getattr(update, 'op', update).name for update in updates}
    gated = []
    for op in operations:
        written = writes.of(op)
        if op.name not in step and (op.name in roots or written):
            for held in write_order.gates(op, written, frames):
                if held.name not in step:
                    compat.add_control_inputs(held, gates)
                    gated.append(held)
    if skipped is None:
        return updates, None
    with only_device('/cpu:0'), tf.name_scope('riding'):
        with tf.control_dependencies(updates):
            done = tf.identity(taken)
        merged = tf.raw_ops.Merge(inputs=[done, skipped])[0]
    left_out = graph_walk.reachable_from(gated, operations, control=True)
    return [merged], functools.partial(_wait_instead, left_out, operations, done.op, merged.op)


def _wait_instead(left_out, operations, done, merged):
    """Makes what waits for operations that may be left out wait for `merged`.

    What waits for an operation that is not run is not run, either: `transform_gradients` may have
    a read of a moving average after its update, an optimizer, too, and a program may run averages
    of the weights after all `UPDATE_OPS`.

    Args:
      left_out: names of operations.
      operations: the operations of the updates themselves, which go on waiting.
      done: the operation that runs where the updates have.
      merged: the operation that runs in either case.
    """
    own = {op.name for op in operations}
    for op in merged.graph.get_operations():
        if op.name in own or op is done:
            continue
        kept = [other for other in op.control_inputs if other.name not in left_out]
        if len(kept) < len(op.control_inputs):
            compat.set_control_inputs(op, kept + [merged])
