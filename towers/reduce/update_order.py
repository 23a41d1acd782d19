"""The order of an update's writes, and of what rides on the train op, after all reads of a step.

Two kinds of writes do not wait by themselves. An optimizer may write beside the gradients: AdamW
decays a weight before it applies the gradient, a counter goes up first. TensorFlow makes such a
write as soon as its inputs are there, while a backward pass may still read: the memory of a
reference variable, the weights once more in what is recomputed, and on parameter servers all that
the other workers compute from. And updates such as batch norm's moving averages write, on a
parameter server, a variable that other workers' forward passes of the same step read; in the step
in which all data have ended they must not run at all, and in a worker whose own data have ended
they would see the first batch again. Both are found in the finished step here, whatever way they
were made, and wait.
"""

import functools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.frames import Frames, before, in_order
from towers.graph.variable_access import Writes
from towers.placement.variable_device import only_device
from towers.tower import write_order
from towers.tower.objectives import tensors_of


def hold_update(train_op, gradients, after, computed, gates=()):
    """Makes the writes of an update wait until everything has been computed from what they change.

    A write of a variable waits for all gradients, unless it waits for that variable's own: then the
    backward pass is through with the variable; or for any, of a variable that no gradient is
    computed from, such as a slot. Every write waits for `gates`.
    What the loss, the gradients or other results take along is left as it is.

    Args:
      train_op: the operation of the update.
      gradients: list of `(gradient, variable)` before the user's `transform_gradients`, the sums
        over all towers and machines; `variable` is None for gradients of replicas.
      after: list of the tensors and operations that the optimizer waits for. What these need is
        not looked at: updates such as batch norm's wait by `hold_back`.
      computed: list of the tensors that can be had without a step.
      gates: list of operations that every write waits for, see `Machines`.
    """
    pairs = [(gradient, variable) for gradient, variable in gradients if gradient is not None]
    sums = [tensor.op for tensor in tensors_of(pairs)]
    ends = {op.name for op in sums} | {getattr(each, 'op', each).name for each in after}
    operations = graph_walk.step_operations([train_op], ends)
    finder = Writes(train_op.graph)
    writes = [(op, names) for op, names in ((op, finder.of(op)) for op in operations
                                            if op.name not in ends) if names]
    of_variable = {variable.op.name: _values(gradient).op.name for gradient, variable in pairs
                   if variable is not None}
    of_all = set(of_variable.values()) | {_values(gradient).op.name for gradient, _ in pairs}
    read = {op.name for op in graph_walk.step_operations(sums)}
    bits = {name: 1 << place for place, name in enumerate(of_all)}
    awaited = _awaited(operations, ends, bits)

    def waits(op, name):
        found = awaited.get(op.name, 0)
        if name in of_variable:
            return found & bits[of_variable[name]]
        return found == (1 << len(bits)) - 1 if name in read else found
    early = [(op, names) for op, names in writes if not all(waits(op, name) for name in names)]
    if not (early or gates and writes):
        return
    left_alone = {op.name for op in graph_walk.step_operations(
        sums + list(gates) + list(computed))}
    if early:
        with tf.control_dependencies(None), only_device('/cpu:0'):
            _hold(early, [tf.group(*sums, name='all_gradients')], operations, left_alone)
    if gates:
        _hold(writes, gates, operations, left_alone)


def hold_back(updates, gates, active, computed):
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
    operations, writes = graph_walk.step_operations(updates), Writes(tf.get_default_graph())
    roots = {getattr(update, 'op', update).name for update in updates}
    written = [(op, writes.of(op)) for op in operations]
    held = _hold([(op, names) for op, names in written if op.name in roots or names], gates,
                 operations, {op.name for op in graph_walk.step_operations(
                     gates + list(computed))})
    if skipped is None:
        return updates, None
    with only_device('/cpu:0'), tf.name_scope('riding'):
        with tf.control_dependencies(updates):
            done = tf.identity(taken)
        merged = tf.raw_ops.Merge(inputs=[done, skipped])[0]
    left_out = graph_walk.reachable_from(held, operations, control=True)
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


def _hold(writes, others, operations, left_alone):
    """Makes writes wait for other operations.

    Args:
      writes: list of `(operation, names of the variables that it writes)`.
      others: list of the operations to wait for.
      operations: list of operations, in which those of `writes` are, with what is around them.
      left_alone: names of the operations that do not wait: those that `others` wait for.

    Returns:
      List of the operations that wait now.
    """
    frames, held = Frames(operations), []
    for op, names in writes:
        for each in write_order.gates(op, names, frames) if op.name not in left_alone else ():
            if each.name not in left_alone:
                compat.add_control_inputs(each, others)
                held.append(each)
    return held


def _values(gradient):
    """The tensor of a gradient that the backward pass computes last: not the indices of rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _awaited(operations, ends, bits):
    """{name of an operation: the bits of the gradients that it waits for, by data or by control}.

    Args:
      operations: list of operations.
      ends: names of operations beyond which nobody looks.
      bits: {name of the operation of a gradient: its bit}.
    """
    awaited = {}
    for op in in_order(operations, before):
        found = bits.get(op.name, 0)
        for name in before(op) if op.name not in ends else ():
            found |= awaited.get(name, 0)
        awaited[op.name] = found
    return awaited
