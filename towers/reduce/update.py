"""The one update of the shared variables, and the operations that ride on it."""

import collections
import contextlib

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError, SharedVariableError
from towers.graph import graph_walk
from towers.graph.scopes import like_current_scope
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.reduce.replica_updates import check_updates_alike
from towers.tower.optimizer_gradients import listed_pairs
from towers.tower.variables import slot_creator


Applied = collections.namedtuple('Applied', 'train_op slots counts is_sent')
"""An update of the variables.

Fields:
  train_op: the operation of one step.
  slots: the variables that the optimizer made, without those of replicas.
  counts: whether the step is counted here, since the optimizer leaves it to its caller.
  is_sent: whether the new values are sent to replicas, since the optimizer cannot be repeated.
"""


def apply_update(optimizer, gradients, global_step, placement, variables, after, replicas=None,
                 on_towers=None, scaled_losses=None, on_skip=None):
    """Applies the combined gradients once.

    Args:
      optimizer: a `tf.train.Optimizer`.
      gradients: list of `(gradient, variable)`.
      global_step: variable to increase by one, or None. Where the optimizer does not write it
        (BERT's leaves it to the caller), it is increased here. An optimizer that writes it does all
        the counting, also if it writes within a branch (one that gathers gradients over steps).
      placement: `Placement`; slots go to their variables' devices.
      variables: the model's variables.
      after: tensors and operations to run before the first variable changes: the loss, which reads
        the weights, and the batch-norm updates.
      replicas: `Replicas`, which are updated in the same call; or None.
      on_towers: the gradients that the replicas get, see `Replicas.pairs`.
      scaled_losses: `ScaledLosses` that has checked the gradients: if they are not finite, the
        optimizer does nothing, and yet the step is counted, since its batch is used up; or None.
      on_skip: function that makes the operations of a step that is skipped; or None.

    Returns:
      `Applied`.

    Raises:
      InvalidArgumentError: the optimizer returned no operation.
      SharedVariableError: the optimizer treats replicas otherwise than the model's variables, and
        cannot be called once more for these alone.
    """
    slots, is_sent = [], False

    def apply(pairs):
        with graph_walk.Recording(tf.get_default_graph()) as made:
            if scaled_losses is None:
                applied = optimizer.apply_gradients(pairs, global_step=global_step)
            else:
                applied = _apply_if_finite(optimizer, pairs, global_step, scaled_losses, on_skip,
                                           replicas is not None)
        free_initial_values(slots, made.operations, after)
        if not isinstance(applied, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES):
            raise InvalidArgumentError('apply_gradients of %r returned %.80r: expected the '
                                       'operation that updates the variables.'
                                       % (optimizer, applied))
        return applied, made.operations
    pairs = gradients if replicas is None else replicas.pairs(gradients, on_towers)
    known = variables + [v for _, v in pairs]
    with only_device(placement.main), _scope_without_reuse(), contextlib.ExitStack() as scopes:
        if replicas is not None:  # the outer one is the last to see a creation
            scopes.enter_context(tf.variable_creator_scope(replicas.slot_creator(known)))
        scopes.enter_context(tf.variable_creator_scope(slot_creator(placement, known, slots)))
        scopes.enter_context(tf.control_dependencies(after))
        applied, made = apply(pairs)
        if replicas is not None:
            try:
                check_updates_alike(replicas, pairs, applied, made)
            except SharedVariableError as error:
                is_sent, (applied, made) = True, _of_variables_alone(
                    apply, replicas, pairs[:len(gradients)], error)
        is_left = False
        if global_step is not None:
            uncounted, is_left = _uncounted(applied, made, global_step, scaled_losses)
            if uncounted is not None:
                with tf.control_dependencies([applied]), only_device(global_step.device or None):
                    applied = tf.group(applied, tf.assign_add(global_step, uncounted).op)
    if replicas is not None:
        of_replicas = {slot.op.name for slot in replicas.slots}
        slots = [slot for slot in slots if slot.op.name not in of_replicas]
    return Applied(applied if isinstance(applied, tf.Operation) else tf.group(applied), slots,
                   is_left, is_sent)


def _of_variables_alone(apply, replicas, pairs, error):
    """Updates the model's own variables once more, alone, and sends their values to the replicas.

    An optimizer that goes by names, or by a norm over all variables, does not do to a replica what
    it does to its variable. What it has made for replicas is left out of the step.

    Args:
      apply: function of pairs that returns `(applied, operations made)`.
      replicas: `Replicas`.
      pairs: the pairs of the model's own variables.
      error: the error to raise where the optimizer cannot be called again.

    Returns:
      As `apply`.
    """
    replicas.forget_slots()
    try:
        applied, made = apply(pairs)
    except ValueError:  # it makes variables by get_variable, which are there already
        raise error from None
    with tf.control_dependencies([applied]), tf.name_scope('replicas/'):
        values = {}
        for _, variable in pairs:
            with only_device(variable.device):
                values[variable.op.name] = variable.read_value()
    with tf.control_dependencies(None), tf.name_scope('replicas/'):
        sent = []
        for replica in replicas.variables:
            value = values.get(replicas.original(replica).op.name)
            if value is not None:
                with only_device(replica.device):
                    sent.append(tf.assign(replica, value).op)
        return tf.group(applied, *sent), made


def free_initial_values(created, made, after):
    """Has initializers of variables wait for nothing that the update waits for.

    A program that makes `tf.Variable(tf.zeros_like(…))` in `apply_gradients` makes the value there:
    it would wait for the loss, and so for a batch and for variables that have no value yet.

    Args:
      created: the variables that the optimizer has made.
      made: the operations that it has made.
      after: tensors and operations that the update waits for.
    """
    made = {op.name for op in made}
    after = {getattr(each, 'op', each).name for each in after}
    for op in graph_walk.step_operations([each.initializer for each in created], ends=after):
        left = [other for other in op.control_inputs if other.name not in after]
        if op.name in made and len(left) < len(op.control_inputs):
            compat.set_control_inputs(op, left)


def _uncounted(applied, made, global_step, scaled_losses):
    """(what to add to the step after an update, whether the optimizer leaves the step alone).

    The former is None where the optimizer does all the counting.
    """
    dtype = global_step.dtype.base_dtype
    writing = {op.name for op in Writes(global_step.graph).to(global_step)}
    if not writing.isdisjoint(op.name for op in made):
        return None if scaled_losses is None else tf.cast(
            tf.logical_not(scaled_losses.is_finite), dtype), False
    if writing and not writing.isdisjoint(
            op.name for op in graph_walk.step_operations([applied])):
        return None, False  # an operation from before this update writes the step
    return tf.ones([], dtype), True


def _apply_if_finite(optimizer, gradients, global_step, scaled_losses, on_skip, replicated):
    is_finite = tf.identity(scaled_losses.is_finite)  # after what has to come first
    outside = tf.get_default_graph().get_name_scope()

    def apply():
        # In the name scope from outside, which names some slots.
        with tf.name_scope(outside + '/' if outside else None):
            applied = tf.group(optimizer.apply_gradients(gradients, global_step=global_step))
        with tf.control_dependencies([applied]):
            return tf.constant(True)

    def skip():
        with tf.control_dependencies([on_skip()] if on_skip is not None else []):
            return tf.constant(False)
    references = any(variable.op.type != 'VarHandleOp' for _, variable in gradients)
    # The check of replicas cannot look into functions (control flow v2).
    with compat.control_flow_v1() if references or replicated else contextlib.nullcontext():
        applied = tf.cond(is_finite, apply, skip)
    with tf.control_dependencies([applied]):
        return scaled_losses.update()


@contextlib.contextmanager
def _scope_without_reuse():
    """The caller's variable scope, without its reuse flag: under reuse no slot could be made."""
    scope = tf.get_variable_scope()
    if scope.reuse is not True:
        yield
        return
    with tf.variable_scope(like_current_scope(scope.name, False), auxiliary_name_scope=False):
        yield


def checked_transform(transform, gradients, placement, of_loss=None):
    """Calls the user's transformation of the combined gradients and checks what comes back.

    Args:
      transform: the function, or None.
      gradients: list of `(gradient, variable)`.
      placement: `Placement`.
      of_loss: with several losses, the name of the loss of these gradients, for error texts.

    Raises:
      InvalidArgumentError: the function does not return pairs of a gradient and one of these
        variables.
    """
    if transform is None:
        return gradients
    with only_device(placement.main), tf.name_scope('transform_gradients'):
        return transformed_pairs(transform, gradients, of_loss)


def transformed_pairs(transform, gradients, of_loss=None):
    """What a transformation makes of gradients: list of `(gradient, variable)`.

    Raises:
      InvalidArgumentError: as `checked_transform`.
    """
    returned = transform(gradients)
    transformed = listed_pairs(returned)
    called = 'transform_gradients' + (' for %r' % of_loss if of_loss is not None else '')
    names = {variable.op.name for _, variable in gradients}
    if not transformed or not all(hasattr(variable, 'op') and variable.op.name in names
                                  for _, variable in transformed):
        raise InvalidArgumentError(
            '%s returned %.200r: expected a list of (gradient, variable) pairs with variables '
            'among those it was given.' % (called, returned))
    seen = set()
    for gradient, variable in transformed:
        _check_transformed(gradient, variable, called)
        if variable.op.name in seen:
            raise InvalidArgumentError('%s returned %r twice: expected one pair a variable.'
                                       % (called, variable.op.name))
        seen.add(variable.op.name)
    if all(gradient is None for gradient, _ in transformed):
        raise InvalidArgumentError('%s returned None for every gradient: there is nothing left to '
                                   'apply.' % called)
    return transformed


def _check_transformed(gradient, variable, called):
    """Raises for a value that no optimizer takes as a gradient of that variable."""
    kind = variable.dtype.base_dtype
    if gradient is None:
        return
    if isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
        graph, dtype = gradient.graph, gradient.dtype.base_dtype
        shape = gradient.shape if isinstance(gradient, tf.Tensor) else None
        if graph is not variable.graph:
            raise InvalidArgumentError('%s returned a gradient of %r from another graph: make it '
                                       'of those it was given.' % (called, variable.op.name))
    elif isinstance(gradient, np.ndarray):
        dtype, shape = tf.as_dtype(gradient.dtype), tf.TensorShape(gradient.shape)
    else:
        raise InvalidArgumentError(
            '%s returned %.80r of type %s as the gradient of %r: expected a tensor, an '
            'IndexedSlices or None.' % (
                called, gradient, type(gradient).__name__, variable.op.name))
    if dtype != kind or shape is not None and not variable.shape.is_compatible_with(shape):
        raise InvalidArgumentError(
            '%s returned a gradient of shape %s and dtype %s for %r, which has shape %s and dtype '
            '%s: expected the same.' % (
                called, 'unknown' if shape is None else shape, dtype.name, variable.op.name,
                variable.shape, kind.name))
