"""The one update of the shared variables by an optimizer."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import (
    expected_gradient,
    listed_pairs,
    map_values,
    may_be_gradient_of,
)
from towers.graph import graph_walk
from towers.graph.variable_access import Writes, is_reference
from towers.optimizers import is_repeatable, rows_at_rate
from towers.placement.variable_device import only_device
from towers.variables.new_variables import like_current_scope, new_slots

Applied = collections.namedtuple('Applied', 'train_op slots slots_of_replicas counts')
"""The operation of one step; the variables that the optimizer made for variables, and for replicas;
whether the step is counted here, since the optimizer leaves it to its caller."""


def apply_update(tower_set, optimizer, combined, global_step, after, scaled_losses=None):
    """Applies the `Combined` gradients once, after `after`: `Applied`.

    `global_step` is increased by one, also where the optimizer leaves that to its caller, as BERT's
    does. Replicas are updated in the same call, or, where the optimizer is not `is_repeatable`, get
    the new values. With `scaled_losses`, `WatchedLosses`, gradients that are not finite change
    nothing, and yet the step is counted.
    """
    placement, replicas = tower_set.request.placement, tower_set.roles.replicas
    is_repeated = replicas is not None and is_repeatable(optimizer)
    pairs = replicas.pairs(*combined) if is_repeated else combined.gradients
    known, of_replicas = tower_set.recorded.variables + [v for _, v in pairs], []
    with only_device(placement.main), _scope_without_reuse(), contextlib.ExitStack() as scopes:
        if is_repeated:  # the outer one is the last to see a creation
            of_replicas = scopes.enter_context(replicas.new_slots(known))
        slots = scopes.enter_context(new_slots(placement, known))
        scopes.enter_context(rows_at_rate(optimizer))
        scopes.enter_context(tf.control_dependencies(after))
        with graph_walk.Recording(tf.get_default_graph()) as made:
            applied = optimizer.apply_gradients(pairs, global_step=global_step) if (
                scaled_losses is None) else _apply_if_finite(
                    optimizer, pairs, global_step, scaled_losses)
        made = made.operations
        free_initial_values(slots, made, after)
        if not isinstance(applied, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES):
            raise InvalidArgumentError('apply_gradients of %r returned %.80r: expected the '
                                       'operation that updates the variables.'
                                       % (optimizer, applied))
        if replicas is not None and not is_repeated:
            writes = Writes(tf.get_default_graph())
            applied = tf.group(applied, *replicas.follow(
                {name for op in made for name in writes.of(op)}.union(
                    variable.op.name for _, variable in pairs), [applied]))
        uncounted, is_left = (None, False) if global_step is None else _uncounted(
            applied, made, global_step, scaled_losses)
        if uncounted is not None:
            with tf.control_dependencies([applied]), only_device(global_step.device or None):
                applied = tf.group(applied, tf.assign_add(global_step, uncounted).op)
    names = {slot.op.name for slot in of_replicas}
    return Applied(applied if isinstance(applied, tf.Operation) else tf.group(applied),
                   [slot for slot in slots if slot.op.name not in names], of_replicas, is_left)


def as_the_update_takes_them(pairs):
    """The pairs, with operations of their own for the gradients of reference variables.

    For a sum of products with a variable's value TensorFlow (1.15) gives the update one product,
    and computes the sum that a program fetches beside it, from memory that the update writes. These
    operations stay as they are, and the update takes what is fetched.
    """
    found = []
    for gradient, variable in pairs:
        if gradient is not None and is_reference(variable):
            gradient = map_values(_identity, gradient)
        found.append((gradient, variable))
    return found


def _identity(values):
    with tf.name_scope('fetched'), only_device(values.device or None):
        return tf.identity(values)


def free_initial_values(created, made, after):
    """Has initializers of created variables wait for nothing that the update waits for, `after`: a
    `tf.Variable(tf.zeros_like(…))` made in `apply_gradients` would wait for the loss, and so for a
    batch."""
    made = {op.name for op in made}
    after = {getattr(each, 'op', each).name for each in after}
    for op in graph_walk.step_operations([each.initializer for each in created], ends=after):
        left = [other for other in op.control_inputs if other.name not in after]
        if op.name in made and len(left) < len(op.control_inputs):
            compat.set_control_inputs(op, left)


def _uncounted(applied, made, global_step, scaled_losses):
    """(number to add to the step, or None; whether the optimizer leaves it to its caller)."""
    dtype = global_step.dtype.base_dtype
    writing = {op.name for op in Writes(global_step.graph).to(global_step)}
    if not writing.isdisjoint(op.name for op in made):
        return None if scaled_losses is None else tf.cast(
            tf.logical_not(scaled_losses.is_finite), dtype), False
    if writing and not writing.isdisjoint(
            op.name for op in graph_walk.step_operations([applied])):
        return None, False  # an operation from before this update writes the step
    return tf.ones([], dtype), True


def _apply_if_finite(optimizer, gradients, global_step, scaled_losses):
    is_finite = tf.identity(scaled_losses.is_finite)  # after the operations that have to come first
    outside = tf.get_default_graph().get_name_scope()

    def apply():
        # In the name scope from outside, which names some slots.
        with tf.name_scope(outside + '/' if outside else None):
            applied = tf.group(optimizer.apply_gradients(gradients, global_step=global_step))
        with tf.control_dependencies([applied]):
            return tf.constant(True)

    # In a function of control flow v2 no reference variable is written, and no slot is made of a
    # tensor.
    with compat.control_flow_v1():
        applied = tf.cond(is_finite, apply, lambda: tf.constant(False))
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


def checked_transform(transform, gradients, device=None, of_loss=None):
    """The user's transformation of the combined gradients, made on `device`, checked."""
    if transform is None:
        return gradients
    with only_device(device) if device else contextlib.nullcontext(), tf.name_scope(
            'transform_gradients'):
        returned = transform(gradients)
    transformed = listed_pairs(returned)
    called = 'transform_gradients' + (' for %r' % of_loss if of_loss is not None else '')
    names = {variable.op.name for _, variable in gradients}
    found = [getattr(getattr(variable, 'op', None), 'name', None)
             for _, variable in transformed or ()]
    if not found or not names.issuperset(found) or len(set(found)) < len(found):
        raise InvalidArgumentError(
            '%s returned %.200r: expected a list of (gradient, variable) pairs of given '
            'variables, each once.' % (called, returned))
    if all(gradient is None for gradient, _ in transformed):
        raise InvalidArgumentError('%s returned %.80r: expected a gradient of at least one '
                                   'variable.' % (called, returned))
    for gradient, variable in transformed:
        if not may_be_gradient_of(gradient, variable):
            raise InvalidArgumentError('%s returned %.80r as the gradient of %r: %s.' % (
                called, gradient, variable.op.name, expected_gradient(variable)))
    return transformed
