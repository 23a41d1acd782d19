"""The one update of the shared variables by an optimizer."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.copies.tower_set import TowerSet
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import (
    expected_gradient,
    listed_pairs,
    map_values,
    may_be_gradient_of,
    variables_of,
)
from towers.graph import graph_walk
from towers.graph.variable_access import Writes, is_reference
from towers.optimizers import is_repeatable, rows_at_rate
from towers.placement.variable_device import only_device
from towers.reduce.combination import Combined, Pairs
from towers.reduce.loss_scale import WatchedLosses
from towers.variables.slots import new_slots
from towers.variables.variable_scopes import like_current_scope


class Applied(typing.NamedTuple):
    """The update by one optimizer.

    Attributes:
      train_op: the operation of the step.
      slots: the variables that the optimizer made for variables.
      slots_of_replicas: the variables that it made for replicas.
      counts_step: whether the update adds 1 to the global step in the place of the optimizer. Some
        optimizers, such as BERT's, never do so.
    """

    train_op: tf.Operation
    slots: typing.List[tf.Variable]
    slots_of_replicas: typing.List[tf.Variable]
    counts_step: bool


def apply_update(tower_set: TowerSet, optimizer: typing.Any, combined: Combined,
                 global_step: typing.Optional[tf.Variable], after: typing.Sequence,
                 scaled_losses: typing.Optional[WatchedLosses] = None) -> Applied:
    """Applies the combined gradients once.

    Replicas are updated in the same call of the optimizer. If the optimizer might update them in
    another way than their variables (it is not `is_repeatable`), the replicas are instead given the
    new values of their variables after the update.

    Args:
      tower_set: the towers whose variables are updated.
      optimizer: an object with `apply_gradients`.
      combined: the gradients to apply, transformed.
      global_step: is increased by one, also where the optimizer leaves that to its caller, as
        BERT's does; or None.
      after: operations and tensors that come before the update.
      scaled_losses: with it, gradients that are not finite change nothing, and yet the step is
        counted.
    """
    placement = tower_set.request.placement
    replicas = tower_set.roles.replicas
    pairs = combined.gradients
    optimizer_updates_replicas = replicas is not None and is_repeatable(optimizer)
    if optimizer_updates_replicas:
        # Where there are replicas, `on_towers` is not None: `or {}` is for the checker of types.
        pairs = replicas.pairs(combined.gradients, combined.on_towers or {})
    # The variables that a slot may belong to: the model's, and what the optimizer updates.
    known_variables = tower_set.recorded.variables + variables_of(pairs)
    slots_of_replicas: typing.List[tf.Variable] = []
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(only_device(placement.main))
        scopes.enter_context(_scope_without_reuse())
        if optimizer_updates_replicas:
            # Of two creator scopes TensorFlow asks the inner one first, which is `new_slots` below.
            # This outer scope then changes what `new_slots` has decided for a replica's slot.
            slots_of_replicas = scopes.enter_context(replicas.new_slots(known_variables))
        all_slots = scopes.enter_context(new_slots(placement, known_variables))
        scopes.enter_context(rows_at_rate(optimizer))
        scopes.enter_context(tf.control_dependencies(after))
        with graph_walk.Recording(tf.get_default_graph()) as recording:
            applied = _apply(optimizer, pairs, global_step, scaled_losses)
        made = recording.operations
        # Slots are also made under the control dependencies, but their initial values must not wait
        # for a batch.
        free_initial_values(all_slots, made, after)
        do_replicas_follow = replicas is not None and not optimizer_updates_replicas
        if do_replicas_follow:
            written = _names_written(made, pairs)
            applied = tf.group(applied, *replicas.follow(written, after=[applied]))
        # What the optimizer has not added to the global step itself is added after the update.
        steps = _steps_to_add(applied, made, global_step, scaled_losses)
        if global_step is not None and steps.number is not None:
            applied = _add_steps_after(applied, global_step, steps.number)
    slots = _without(slots_of_replicas, all_slots)
    return Applied(_as_operation(applied), slots, slots_of_replicas, steps.counts_step)


def _as_operation(applied: typing.Any) -> tf.Operation:
    """An update as an operation: some optimizers return a tensor or a variable."""
    if isinstance(applied, tf.Operation):
        return applied
    return tf.group(applied)


def _without(left_out: typing.Iterable[tf.Variable],
             variables: typing.Iterable[tf.Variable]) -> typing.List[tf.Variable]:
    """List of the variables, without the variables that are left out."""
    names_left_out = graph_walk.operation_names(left_out)
    return [variable for variable in variables if variable.op.name not in names_left_out]


def _apply(optimizer: typing.Any, pairs: Pairs, global_step: typing.Optional[tf.Variable],
           scaled_losses: typing.Optional[WatchedLosses]) -> typing.Any:
    """Calls the optimizer's `apply_gradients` and returns the update that it returns.

    Args:
      optimizer: an object with `apply_gradients`.
      pairs: the `(gradient, variable)` pairs to apply.
      global_step: the variable for the optimizer to count steps in; or None.
      scaled_losses: with it, the update is skipped if a gradient is not finite; or None.

    Raises:
      InvalidArgumentError: the optimizer returned something else than an operation, a tensor or
        a variable.
    """
    if scaled_losses is None:
        applied = optimizer.apply_gradients(pairs, global_step=global_step)
    else:
        applied = _apply_if_finite(optimizer, pairs, global_step, scaled_losses)
    if not isinstance(applied, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES):
        raise InvalidArgumentError('apply_gradients of %r returned %.80r: expected the operation '
                                   'that updates the variables.' % (optimizer, applied))
    return applied


def _add_steps_after(applied: typing.Any, global_step: tf.Variable,
                     steps_to_add: tf.Tensor) -> tf.Operation:
    """An operation that runs the update and then adds a number to the global step."""
    with tf.control_dependencies([applied]), only_device(global_step.device or None):
        return tf.group(applied, tf.assign_add(global_step, steps_to_add).op)


def _names_written(operations: typing.Iterable[tf.Operation], pairs: Pairs) -> typing.Set[str]:
    """The names of the variables that an update writes: the variables that the optimizer was to
    update, and other variables that its operations write, such as averages.

    Args:
      operations: the operations that the optimizer has made for the update.
      pairs: the `(gradient, variable)` pairs that the optimizer was to apply.
    """
    names = graph_walk.operation_names(variables_of(pairs))
    writes = Writes(tf.get_default_graph())
    for op in operations:
        names.update(writes.written_by(op))
    return names


def safe_to_fetch(pairs: Pairs) -> Pairs:
    """The same pairs, but with identities of the gradients of reference variables, for the update
    and for programs that fetch gradients.

    A program may fetch a gradient in the run that updates its variable. If the gradient is a sum of
    products with the variable's value, TensorFlow 1.15 computes it twice: once for the program, and
    once for the update, for which it rewrites the sum. The computation for the program may read
    memory that the update has written already. TensorFlow leaves an identity as it is, so that the
    program and the update get the same tensor.
    """
    identities = []
    for gradient, variable in pairs:
        if gradient is not None and is_reference(variable):
            gradient = map_values(_identity, gradient)
        identities.append((gradient, variable))
    return identities


def _identity(values: tf.Tensor) -> tf.Tensor:
    """A tensor with these values, on their device."""
    with tf.name_scope('fetched'), only_device(values.device or None):
        return tf.identity(values)


def free_initial_values(created: typing.Iterable[tf.Variable],
                        made: typing.Iterable[tf.Operation], after: typing.Iterable) -> None:
    """Makes the initializers of variables wait for nothing that the update waits for.

    A `tf.Variable(tf.zeros_like(…))` made in `apply_gradients` would wait for the loss, and so for
    a batch.

    Args:
      created: the variables.
      made: the operations of the update; operations made before are not changed.
      after: operations and tensors that the update waits for.
    """
    names_made = graph_walk.names_of(made)
    names_after = graph_walk.operation_names(after)
    initializers = [variable.initializer for variable in created]
    for op in graph_walk.step_operations(initializers, ends=names_after):
        waits_for_step = not names_after.isdisjoint(graph_walk.names_of(op.control_inputs))
        if waits_for_step and op.name in names_made:
            others = graph_walk.without_names(op.control_inputs, names_after)
            compat.set_control_inputs(op, others)


class _StepsToAdd(typing.NamedTuple):
    """What has to be added to the global step after an update.

    Attributes:
      number: the scalar to add; None where nothing has to be added.
      counts_step: whether `number` is 1 in each step, since the optimizer, such as BERT's, never
        counts.
    """

    number: typing.Optional[tf.Tensor]
    counts_step: bool


def _steps_to_add(applied: typing.Any, made: typing.Iterable[tf.Operation],
                  global_step: typing.Optional[tf.Variable],
                  scaled_losses: typing.Optional[WatchedLosses]) -> _StepsToAdd:
    """Finds what has to be added to the global step after an update, so that each step counts one.

    Args:
      applied: the update.
      made: the operations that the optimizer made for it.
      global_step: the variable that counts steps; None where nothing counts them.
      scaled_losses: with it, the optimizer's update is skipped if a gradient is not finite, and
        the step is counted nevertheless; or None.
    """
    if global_step is None:
        return _StepsToAdd(number=None, counts_step=False)
    dtype = global_step.dtype.base_dtype
    names_counting = graph_walk.names_of(Writes(global_step.graph).writers_of(global_step))
    optimizer_counts = not names_counting.isdisjoint(graph_walk.names_of(made))
    if optimizer_counts:
        number = None
        if scaled_losses is not None:
            # 1 in a step whose update is skipped, since the optimizer's count is skipped with it;
            # else 0.
            number = tf.cast(tf.logical_not(scaled_losses.is_finite), dtype)
        return _StepsToAdd(number, counts_step=False)
    # The program may count the steps itself, in an operation for which the update waits.
    names_run = graph_walk.names_of(graph_walk.step_operations([applied]))
    program_counts = not names_counting.isdisjoint(names_run)
    if program_counts:
        return _StepsToAdd(number=None, counts_step=False)
    return _StepsToAdd(tf.ones([], dtype), counts_step=True)


def _apply_if_finite(optimizer: typing.Any, gradients: Pairs,
                     global_step: typing.Optional[tf.Variable],
                     scaled_losses: WatchedLosses) -> typing.Any:
    """Applies the gradients in a branch that is taken if all gradients are finite, and then updates
    the loss scale. Returns the operation that does both.

    Args:
      optimizer: an object with `apply_gradients`.
      gradients: the `(gradient, variable)` pairs to apply.
      global_step: the variable for the optimizer to count steps in; or None.
      scaled_losses: has the tensor that says whether all gradients are finite.
    """
    # The identity is made under the control dependencies on what has to come before the update, and
    # the branch waits for the identity.
    is_finite = tf.identity(scaled_losses.is_finite)
    # Some optimizers name slots by the name scope. They are to use the scope that is open here,
    # without the scope that `tf.cond` adds: a name with a slash at its end is absolute, and None is
    # the outermost scope.
    scope_here = tf.get_default_graph().get_name_scope()
    absolute_scope = None
    if scope_here:
        absolute_scope = scope_here + '/'

    def apply():
        with tf.name_scope(absolute_scope):
            applied = tf.group(optimizer.apply_gradients(gradients, global_step=global_step))
        with tf.control_dependencies([applied]):
            return tf.constant(True)  # both branches of a `tf.cond` return a tensor

    # Within a function of control flow v2, TensorFlow can neither write a reference variable nor
    # make a slot whose initial value is a tensor.
    with compat.control_flow_v1():
        branch_taken = tf.cond(is_finite, apply, lambda: tf.constant(False))
    with tf.control_dependencies([branch_taken]):
        return scaled_losses.update()


@contextlib.contextmanager
def _scope_without_reuse() -> typing.Iterator[None]:
    """The caller's variable scope, without its reuse flag: under reuse no slot could be made."""
    scope = tf.get_variable_scope()
    can_make_variables = scope.reuse is not True  # `tf.AUTO_REUSE` makes what is not there yet
    if can_make_variables:
        yield
        return
    without_reuse = like_current_scope(scope.name, reuse=False)
    with tf.variable_scope(without_reuse, auxiliary_name_scope=False):
        yield


def call_transform(transform: typing.Optional[typing.Callable], gradients: Pairs,
                   device: typing.Optional[str] = None,
                   name_of_loss: typing.Optional[str] = None) -> Pairs:
    """Calls the user's function on the combined gradients and checks what it returns.

    Args:
      transform: the user's function from pairs to pairs, see `Objective`; None leaves the
        gradients as they are.
      gradients: the combined gradients, with their variables.
      device: the device on which the function makes its operations; None for the device of the
        scopes around.
      name_of_loss: the loss's name for errors, where there are several losses.

    Returns:
      The pairs that the function returned, or `gradients`.

    Raises:
      InvalidArgumentError: the function returned anything but gradients of given variables.
    """
    if transform is None:
        return gradients
    with tf.name_scope('transform_gradients'), contextlib.ExitStack() as scopes:
        if device:
            scopes.enter_context(only_device(device))
        returned = transform(gradients)
    name_of_function = 'transform_gradients'
    if name_of_loss is not None:
        name_of_function += ' for %r' % name_of_loss
    return _checked_pairs(returned, gradients, name_of_function)


def _checked_pairs(returned: typing.Any, given: Pairs, name_of_function: str) -> Pairs:
    """List of the pairs that the user's function has returned; `InvalidArgumentError` for anything
    but gradients of given variables.

    Args:
      returned: what the function has returned.
      given: the pairs that the function was given.
      name_of_function: the function's name for the messages.
    """
    pairs = listed_pairs(returned)
    if not pairs or not _are_given_variables(pairs, given):
        raise InvalidArgumentError(
            '%s returned %.200r: expected a list of (gradient, variable) pairs of given '
            'variables, each once.' % (name_of_function, returned))
    if all(gradient is None for gradient, _ in pairs):
        raise InvalidArgumentError('%s returned %.80r: expected a gradient of at least one '
                                   'variable.' % (name_of_function, returned))
    for gradient, variable in pairs:
        if not may_be_gradient_of(gradient, variable):
            raise InvalidArgumentError('%s returned %.80r as the gradient of %r: %s.' % (
                name_of_function, gradient, variable.op.name, expected_gradient(variable)))
    return pairs


def _are_given_variables(pairs: Pairs, given: Pairs) -> bool:
    """Whether the variables of some pairs are among the given variables, each at most once.

    Args:
      pairs: the pairs that the user's function has returned.
      given: the pairs that it was given.
    """
    names_left = graph_walk.operation_names(variables_of(given))
    for _, variable in pairs:
        name = getattr(getattr(variable, 'op', None), 'name', None)  # None if it is no variable
        if name not in names_left:
            return False
        names_left.remove(name)
    return True
