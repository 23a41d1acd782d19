"""The one update of the shared variables, and what rides on it."""

import contextlib

import tensorflow.compat.v1 as tf

from towers import graph_walk
from towers.errors import InvalidArgumentError
from towers.placement import only_device
from towers.variables import slot_creator


def apply_update(optimizer, gradients, global_step, placement, variables, after, replicas=None,
                 on_towers=None, scaled_losses=None, on_skip=None):
    """Applies the combined gradients once.

    Args:
      optimizer: a `tf.train.Optimizer`.
      gradients: list of `(gradient, variable)`.
      global_step: variable to increase by one, or None. Optimizers that forget to (BERT's leaves
        it to its caller) are helped out.
      placement: `Placement`; slots go beside their variables.
      variables: the model's variables.
      after: what has to have run before the first variable changes: the loss, which reads the
        weights, and the batch-norm updates.
      replicas: `Replicas`, whose copies are updated in the same call; or None.
      on_towers: the gradients that the copies get, see `Replicas.pairs`.
      scaled_losses: `ScaledLosses` that has looked at the gradients: if they are not finite, the
        optimizer does nothing, and the step is counted all the same, since it has used up its
        batch; or None.
      on_skip: function that makes the operations of a step that is skipped; or None.

    Returns:
      `(train_op, slots)`: the operation of one step, and the variables that the optimizer made,
      without those of copies.
    """
    graph = tf.get_default_graph()
    slots = []
    pairs = gradients if replicas is None else replicas.pairs(gradients, on_towers)
    known = variables + [v for _, v in pairs]
    with only_device(placement.main), _scope_without_reuse(), contextlib.ExitStack() as scopes:
        if replicas is not None:  # the outer one is the last to see a creation
            scopes.enter_context(tf.variable_creator_scope(replicas.slot_creator(known)))
        scopes.enter_context(tf.variable_creator_scope(slot_creator(placement, known, slots)))
        scopes.enter_context(tf.control_dependencies(after))
        with graph_walk.Recording(graph) as made:
            if scaled_losses is None:
                applied = optimizer.apply_gradients(pairs, global_step=global_step)
            else:
                applied = _apply_if_finite(optimizer, pairs, scaled_losses, on_skip)
        # Under a loss scale the optimizer was not given the step, since one that is skipped counts.
        if global_step is not None and (scaled_losses is not None
                                        or not _writes(made.operations, global_step)):
            with tf.control_dependencies([applied]), only_device(global_step.device or None):
                applied = tf.group(applied, tf.assign_add(global_step, 1).op)
    if replicas is not None:
        of_copies = {slot.op.name for slot in replicas.slots}
        slots = [slot for slot in slots if slot.op.name not in of_copies]
    return applied if isinstance(applied, tf.Operation) else tf.group(applied), slots


def _apply_if_finite(optimizer, gradients, scaled_losses, on_skip):
    is_finite = tf.identity(scaled_losses.is_finite)  # after what has to come first
    outside = tf.get_default_graph().get_name_scope()

    def apply():
        # In the name scope from outside, which names some slots.
        with tf.name_scope(outside + '/' if outside else None):
            applied = tf.group(optimizer.apply_gradients(gradients))
        with tf.control_dependencies([applied]):
            return tf.constant(True)

    def skip():
        with tf.control_dependencies([on_skip()] if on_skip is not None else []):
            return tf.constant(False)
    applied = tf.cond(is_finite, apply, skip)
    with tf.control_dependencies([applied]):
        return scaled_losses.update()


@contextlib.contextmanager
def _scope_without_reuse():
    """The caller's variable scope; if its reuse flag is on, without it: slots could not be made."""
    scope = tf.get_variable_scope()
    if scope.reuse is not True:
        yield
        return
    fresh = tf.VariableScope(
        False, scope.name, scope.initializer, scope.regularizer, scope.caching_device,
        scope.partitioner, scope.custom_getter, scope.original_name_scope, scope.dtype,
        scope.use_resource, scope.constraint)
    with tf.variable_scope(fresh, auxiliary_name_scope=False):
        yield


def checked_transform(transform, gradients, placement):
    """Calls the user's transformation of the combined gradients and checks what comes back.

    Raises:
      InvalidArgumentError: it does not return pairs of a gradient and one of these variables.
    """
    if transform is None:
        return gradients
    with only_device(placement.main), tf.name_scope('transform_gradients'):
        transformed = transform(gradients)
    names = {variable.op.name for _, variable in gradients}
    if not isinstance(transformed, (list, tuple)) or not transformed or not all(
            isinstance(pair, (tuple, list)) and len(pair) == 2
            and hasattr(pair[1], 'op') and pair[1].op.name in names for pair in transformed):
        raise InvalidArgumentError(
            'transform_gradients returned %.200r: expected a list of (gradient, variable) pairs '
            'with variables among those it was given.' % (transformed,))
    return [tuple(pair) for pair in transformed]


def _writes(operations, variable):
    """Whether any of the operations may write the variable: gets it itself, not just its value.

    One that sits in a `tf.cond`, as in a loss-scaling optimizer, shows as an If or a Switch on it.
    """
    handle = variable.op.name
    return any(op.type not in ('Identity', 'ReadVariableOp')
               and any(tensor.op.name == handle for tensor in op.inputs) for op in operations)
