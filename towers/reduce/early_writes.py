"""Writes of an update that do not wait for the gradients by themselves.

An optimizer may write beside the gradients: AdamW decays a weight before it applies the gradient, a
counter goes up first. TensorFlow makes such a write as soon as its inputs are there, while a
backward pass may still read: the memory of a reference variable, the weights once more in what is
recomputed, and on parameter servers all that the other workers compute from. Whatever way the
optimizer or `transform_gradients` has made a write, it is found in the finished step here, and
waits.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.tower import write_order
from towers.tower.objectives import tensors_of


def hold_update(train_op, gradients, before, computed, gates=()):
    """Makes the writes of an update wait until everything has been computed from what they change.

    A write of a variable waits for all gradients, unless it waits for that variable's own: then the
    backward pass is through with the variable; or for any, of a variable that no gradient is
    computed from, such as a slot. Every write waits for `gates`.
    What the loss, the gradients or other results take along is left as it is.

    Args:
      train_op: the operation of the update.
      gradients: list of `(gradient, variable)` before the user's `transform_gradients`, the sums
        over all towers and machines; `variable` is None for gradients of replicas.
      before: list of the tensors and operations that the optimizer waits for. What these need is
        not looked at: updates such as batch norm's wait by `update_gates`.
      computed: list of the tensors that can be had without a step.
      gates: list of operations that every write waits for, see `Machines`.
    """
    pairs = [(gradient, variable) for gradient, variable in gradients if gradient is not None]
    sums = [tensor.op for tensor in tensors_of(pairs)]
    ends = {op.name for op in sums} | {getattr(each, 'op', each).name for each in before}
    operations = graph_walk.step_operations([train_op], ends)
    finder = Writes(train_op.graph)
    writes = [(op, names) for op, names in ((op, finder.of(op)) for op in operations
                                            if op.name not in ends) if names]
    of_variable = {variable.op.name: _values(gradient).op.name for gradient, variable in pairs
                   if variable is not None}
    of_all = set(of_variable.values()) | {_values(gradient).op.name for gradient, _ in pairs}
    read = {op.name for op in graph_walk.step_operations(sums)}
    early = [(op, names) for op, names in writes if not all(
        _waits_for(op, {of_variable[name]}, ends) if name in of_variable
        else _waits_for(op, of_all, ends, every=name in read) for name in names)]
    held = writes if gates else early
    if not held:
        return
    not_held = {op.name for op in graph_walk.step_operations(
        sums + list(gates) + list(computed))}
    if early:
        with tf.control_dependencies(None), only_device('/cpu:0'):
            _hold(early, [tf.group(*sums, name='all_gradients')], operations, not_held)
    if gates:
        _hold(writes, gates, operations, not_held)


def _hold(writes, others, operations, not_held):
    """Makes writes wait for other operations.

    Args:
      writes: list of `(operation, names of the variables that it writes)`.
      others: list of the operations to wait for.
      operations: list of operations, in which those of `writes` are, with what is around them.
      not_held: names of the operations that are left as they are: those that `others` wait for.
    """
    frames = Frames(operations)
    for op, names in writes:
        if op.name not in not_held:
            for each in write_order.gates(op, names, frames):
                if each.name not in not_held:
                    compat.add_control_inputs(each, others)


def _values(gradient):
    """The tensor of a gradient that the backward pass computes last: not the indices of rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _waits_for(op, wanted, ends, every=False):
    """Whether an operation waits for any of some operations, by data or by control.

    The nearest ones are looked at first: an optimizer's operation takes its gradient itself.

    Args:
      op: the operation.
      wanted: names of operations.
      ends: names of operations beyond which nobody looks.
      every: whether it has to wait for all of them.
    """
    queue, seen, missing = collections.deque([op]), {op.name}, set(wanted)
    while queue:
        each = queue.popleft()
        missing.discard(each.name)
        if not missing or each.name in wanted and not every:
            return True
        if each.name in ends:
            continue
        for other in [tensor.op for tensor in each.inputs] + list(each.control_inputs):
            if other.name not in seen:
                seen.add(other.name)
                queue.append(other)
    return False
