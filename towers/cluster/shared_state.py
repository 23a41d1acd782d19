"""Gives worker 0's state to all workers of a ring, or of Horovod, where the model writes it and
training reads it.

A codebook, centers of classes, a learning rate that falls with the loss: on one machine the first
tower writes them, and all read that. Here every worker has a copy, and writes it from its own
batch. So, in each step, worker 0's value goes to the others

    after all of the model's writes, and before the update, whose own reads wait for it.

The forward passes of the next step read it, too. An update that takes a value which was read
elsewhere is refused, unless the model's write waits for that read. State that training only
writes, such as the moving averages of batch norm, needs no message: worker 0 saves its own. Nor
does what the update writes: it is the same on all workers, see `same_weights`.
"""

import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.frames import Frames
from towers.graph.graph_walk import ancestors, reachable_from, step_operations
from towers.graph.variable_access import Writes, is_variable, read_from, variable_op
from towers.placement.variable_device import only_device
from towers.tower.objectives import tensors_of
from towers.tower.write_order import to_wait_for


def share_state(update, before, own, combined, broadcast, replicated=()):
    """Gives worker 0's state to the other workers.

    Args:
      update: the operation that updates the weights.
      before: list of the tensors and operations of the model that the optimizer waits for.
      own: list of `(gradient, variable)` of this machine.
      combined: such a list, the sums over the workers, before `transform_gradients`.
      broadcast: function that makes the operation by which all workers get worker 0's value of a
        variable.
      replicated: names of the variables of which this worker's towers have replicas.

    Returns:
      `(operation of the step, list of the variables that worker 0 gives to the others in it)`.

    Raises:
      ClusterError: the update takes a value that cannot be told to be worker 0's; or the forward
        pass writes a trained variable, or the model one that has replicas.
    """
    finder, step = Writes(tf.get_default_graph()), step_operations([update])
    model = {op.name for op in step_operations(before)}
    sums = tensors_of(combined)
    behind = model | {op.name for op in step_operations(sums)}
    of_update = [op for op in step if op.name not in behind]
    trained = {variable.op.name: variable for _, variable in own}
    known = {variable.op.name: variable for variable in tf.global_variables()}
    known.update(trained)
    read = ancestors(tensors_of(own)).union(trained, *[
        _names_of(tensor) for op in of_update for tensor in op.inputs])
    writes = {}
    for op in step:
        for name in finder.of(op) if op.name in model else ():
            if name in known and name in read:
                writes.setdefault(name, []).append(op)
    if not writes:
        return update, []
    _check_trained(writes, trained, replicated, tensors_of(own))
    _check_reads(writes, model, of_update, own)
    reached = reachable_from([op for each in writes.values() for op in each], step, control=True)
    waits_for = [each for op in (getattr(end, 'op', end) for end in before) if op.name in reached
                 for each in to_wait_for(op, finder)] + [tensor.op for tensor in sums]
    with only_device('/cpu:0'), tf.name_scope('shared_state'):
        for name in sorted(writes):
            with tf.control_dependencies(waits_for):
                waits_for = [broadcast(known[name])]
    for op in of_update:
        if any(_held(tensor) in writes for tensor in op.inputs):
            compat.add_control_inputs(op, waits_for)
    return tf.group(update, *waits_for), [known[name] for name in sorted(writes)]


def _held(tensor):
    """The name of the variable whose handle or reference a tensor is; else None."""
    source = variable_op(tensor) if is_variable(tensor) else None
    return None if source is None else source.name


def _names_of(tensor):
    """The names of the variables that a tensor is, or has the values of: a list."""
    held = _held(tensor)
    return [source.name for source in read_from(tensor)] if held is None else [held]


def _check_trained(writes, trained, replicated, gradients):
    forward = {op.name for op in step_operations(gradients)}
    for name in sorted(set(writes) & set(trained)):
        if name in replicated:
            raise ClusterError(
                "VariablePlacement('replicated'), and the model writes the trained variable %r "
                "(%r): the replicas would get what this worker has written, and not worker 0's. "
                'Use another placement.' % (name, writes[name][0].name))
        for op in writes[name]:
            if op.name in forward:
                raise ClusterError(
                    'the forward pass writes the trained variable %r (%r): each worker would '
                    'compute with its own value, where on one machine all towers have the first '
                    "one's. Put the update into the collection UPDATE_OPS, or return it in "
                    "'updates'." % (name, op.name))


def _is_from_before(tensor, before_write, writes):
    """Whether a value of a variable is a copy that was made before all of the model's writes.

    TensorFlow makes no copy of what is read from a reference variable.
    """
    step = {op.name for op in step_operations([tensor])}
    return (tensor.op.name in before_write and step.isdisjoint(op.name for op in writes)
            and all(source.type == 'VarHandleOp' for source in read_from(tensor)))


def _check_reads(writes, model, of_update, own):
    """Raises for a value of the state that the update takes, and that may be this worker's own."""
    gradients = {tensor.op.name for tensor in tensors_of(own)}
    first = {op.name for op in itertools.takewhile(
        lambda op: op.name not in gradients, tf.get_default_graph().get_operations())}
    frames = Frames(of_update)
    before_write = {name: {op.name for op in step_operations(each)}
                    for name, each in writes.items()}
    for op in of_update:
        for tensor in op.inputs:
            for name in writes:
                if _held(tensor) == name:
                    # What was made before the gradients the program may run at any time.
                    is_right = op.name not in first and frames.is_outside(op)
                else:
                    is_right = (tensor.op.name not in model or name not in _names_of(tensor)
                                or _is_from_before(tensor, before_write[name], writes[name]))
                if not is_right:
                    raise ClusterError(
                        'variable %r is written by the model of each worker and read by %r, for '
                        'the update of the weights, at a time that cannot be told: each worker '
                        "might take its own value, and not worker 0's. Give the optimizer the "
                        'variable itself (use_resource=True), read it in transform_gradients by '
                        'read_value(), or have the write wait for the read.' % (name, op.name))
