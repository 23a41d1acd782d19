"""Gradient accumulation: several micro-batches a tower, one after the other, for one update.

A tower's shard is cut into k micro-batches. Each has a forward and a backward pass of its own on
the tower's device, and waits until the gradients of the micro-batch before it are added up, so that
its memory is free again: the tower holds one sum a variable and the activations of one micro-batch,
whatever k is.

    sum_j = sum_(j-1) + gradient_j,     micro-batch j + 1 waits for sum_j

The loss of a micro-batch is weighted by its size, as the loss of a tower is, so that the plain sum
is the tower's gradient.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.frames import BACK, Frames, before, in_order
from towers.graph.nests import fetches_in
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.reduce.combination import add_up, align
from towers.tower.objectives import tensors_of


def accumulate(parts, micro_batches, late=()):
    """Runs each tower's micro-batches one after the other and adds up their gradients.

    Args:
      parts: list of `Tower`, one a micro-batch: the first tower's, then the next tower's.
      micro_batches: k, how many each tower has.
      late: operations that the first tower's whole sum waits for, but no micro-batch: writes of
        variables that all micro-batches read.

    Returns:
      List, one entry a tower, of lists of `(gradient, variable)`. Sums of dense gradients are
      dense; `IndexedSlices` are joined and stay sparse.
    """
    totals, to_begin = [], needed_to_begin(tf.get_default_graph())
    for start in range(0, len(parts), micro_batches):
        total = parts[start].gradients
        for part in parts[start + 1:start + micro_batches]:
            is_last_of_first = part is parts[micro_batches - 1]
            with tf.name_scope('accumulate_gradients'), only_device(part.device):
                _start_after(part, tensors_of(total), to_begin)
                with tf.control_dependencies(late if is_last_of_first else ()):
                    total = [(add_up([gradient for _, gradient in present], variable), variable)
                             for variable, present in align([total, part.gradients])]
        totals.append(total)
    return totals


def _start_after(part, tensors, to_begin):
    """Makes all operations of a micro-batch that a step runs wait for tensors.

    Only operations without an input from within the micro-batch need a control edge. Operations
    that only initialize a variable get none, since they are no part of a step; nor do those that
    `may_wait` excepts.
    """
    with tf.control_dependencies(tensors):
        gate = tf.no_op('next_micro_batch')
    step = graph_walk.step_operations(fetches_in([
        part.loss, part.data_loss, part.predictions, part.metrics, part.updates,
        [gradient for gradient, _ in part.pairs]]))
    frames = Frames(step)
    step = [op for op in step if part.has(op.name)]
    waiting = {op.name for op in step if may_wait(op, to_begin)}
    for op in step:
        if op.name in waiting and frames.is_outside(op) and not any(
                other.name in waiting for other in
                [tensor.op for tensor in op.inputs] + list(op.control_inputs)):
            compat.add_control_inputs(op, [gate])


def may_wait(op, to_begin):
    """Whether an operation of a micro-batch may be made to wait for other operations of a step.

    Constants may not, since they are folded. What only names a variable, a table or a queue may
    not, since it runs outside of steps, too: to initialize it, to fill it, to look at it.

    Args:
      op: an operation.
      to_begin: `needed_to_begin`.
    """
    names_state = not op.inputs and op.outputs and all(
        tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype  # a reference
        for tensor in op.outputs)
    return op.type != 'Const' and not names_state and op.name not in to_begin


def needed_to_begin(graph):
    """Names of what a session runs before the first step: initializers, and all that they need."""
    holders = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES) + graph.get_collection(
        tf.GraphKeys.LOCAL_VARIABLES)
    initializers = graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS) + [
        getattr(holder, 'initializer', None) for holder in holders]
    return {op.name for op in graph_walk.step_operations(
        [each for each in initializers if isinstance(each, (tf.Operation, tf.Tensor))])}


def check_order(fetches):
    """Raises if operations would wait for each other, so that the step would never end.

    Each micro-batch waits for the one before it. A model may make an earlier one wait for a later
    one, too: the first writes a variable in its forward pass, after all have read it.

    Args:
      fetches: the tensors and operations that a step runs.

    Raises:
      InvalidArgumentError: names an operation in the circle.
    """
    operations = graph_walk.step_operations(fetches)
    runs = {op.name for op in in_order(operations, waits_for)}
    if len(runs) < len(operations):
        raise InvalidArgumentError(
            'the micro-batches of a tower run one after the other, and the model makes an earlier '
            'one wait for a later one (operation %s): its forward pass writes a variable that it '
            'reads. Put the update into the collection UPDATE_OPS, or return it in '
            "'updates'; or train without accumulate= and micro_batches=." % _write_among(
                {op.name: op for op in operations if op.name not in runs}))


def _write_among(stuck):
    """Of operations {name: operation} that never run, one that writes, for the text of an error."""
    takers = collections.Counter(name for op in stuck.values() for name in waits_for(op))
    ends = [name for name in stuck if not takers[name]]
    circle = dict(stuck)
    while ends:  # what only waits for the circle, such as the optimizer's updates, is not of it
        for name in waits_for(circle.pop(ends.pop())):
            takers[name] -= 1
            if name in circle and not takers[name]:
                ends.append(name)
    writes = Writes(next(iter(stuck.values())).graph)
    for name in sorted(circle):
        for variable in writes.of(circle[name]):
            return '%s, which writes variable %s' % (name, variable)
    return min(circle)


def waits_for(op):
    """Names of the operations that an operation waits for, without the back edges of a loop.

    An operation that leads out of a loop waits for all that leads into the next turn: no turn
    begins before all of the one `parallel_iterations` earlier is over, pushes onto stacks included.
    """
    names = before(op)
    if op.type in ('Exit', 'RefExit') and len(op.inputs[0].op.inputs) == 2:
        condition = op.inputs[0].op.inputs[1]  # of the Switch that the loop is left by
        for switch in condition.consumers():
            names.update(tensor.op.name for tensor in switch.inputs[0].op.inputs
                         if tensor.op.type in BACK)
    return names
