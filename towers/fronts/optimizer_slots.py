"""Makes the slots of a model function's optimizers in the first tower's call.

The one update of all towers comes after the last tower, and the optimizer would make its slots
then. But a `Saver` or an initializer of all variables, which a model function makes after
`minimize`, holds only the variables that exist. So the slots are made where one device makes them,
and the update finds them.
"""

import contextlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph import graph_walk
from towers.graph.scopes import like_current_scope
from towers.tower.build_context import current_call
from towers.tower.variables import slot_creator


def make_slots(optimizer, variables, placement):
    """Makes the slots of an optimizer, in the first tower's call, as its `apply_gradients` would.

    Args:
      optimizer: a `tf.train.Optimizer`. An optimizer that overrides `apply_gradients` makes its
        variables there, under unknown scopes; nothing is made for it.
      variables: the variables that the optimizer updates.
      placement: `Placement`; slots go to their variables' devices.

    Returns:
      List of the variables that were made.
    """
    outermost = isinstance(optimizer, tf.train.SyncReplicasOptimizer)
    optimizer = _slot_maker(optimizer)
    if not variables or optimizer is None:
        return []
    slots, scope = [], tf.get_variable_scope()
    call = current_call(tf.get_default_graph())
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(call.variables.outside())
        scopes.enter_context(tf.device(None))
        scopes.enter_context(tf.device(placement.main))
        scopes.enter_context(tf.variable_creator_scope(slot_creator(placement, variables, slots)))
        scopes.enter_context(tf.control_dependencies(None))
        if outermost:  # it applies outside of every name scope
            scopes.enter_context(tf.name_scope(None))
        if scope.reuse is True:  # only then, since a scope that is left forgets the names in it
            scopes.enter_context(tf.variable_scope(like_current_scope(scope.name, False),
                                                   auxiliary_name_scope=False))
        compat.make_slots(optimizer, variables)
    return slots


def _slot_maker(optimizer):
    """The optimizer whose `_create_slots` makes the slots, in the scopes of `apply_gradients`.

    None where it is not known how the slots are made.
    """
    if isinstance(optimizer, tf.train.SyncReplicasOptimizer):
        optimizer = compat.wrapped_optimizer(optimizer)
    if not isinstance(optimizer, tf.train.Optimizer) or 'apply_gradients' in vars(optimizer):
        return None
    owner = next(kind for kind in type(optimizer).__mro__ if 'apply_gradients' in vars(kind))
    # The other one is contrib's, of AdamW: it notes what to decay and passes on.
    is_known = owner is tf.train.Optimizer or owner.__name__ == 'DecoupledWeightDecayExtension'
    return optimizer if is_known else None


def apply_call(call, pairs):
    """The update of a call, with the slots named as on one device: by the scopes of the call."""
    with contextlib.ExitStack() as scopes:
        if isinstance(call.optimizer, tf.train.SyncReplicasOptimizer):
            # What it makes beside the update, to start with, has to wait for no step.
            pairs = [(_waiting(gradient), variable) for gradient, variable in pairs]
            scopes.enter_context(tf.control_dependencies(None))
        scopes.enter_context(tf.variable_scope(like_current_scope(call.variable_scope, False),
                                               auxiliary_name_scope=False))
        scopes.enter_context(tf.name_scope(call.name_scope + '/' if call.name_scope else None))
        return call.optimizer.apply_gradients(pairs, **call.arguments)


def _waiting(gradient):
    """The gradient, which waits for the current control dependencies."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices),
                                gradient.dense_shape)
    return gradient if gradient is None else tf.identity(gradient)


def check_saved(spec, late):
    """Raises `ModelFunctionError` where a saver of a spec lacks the variables of `late` alone.

    It was made for all variables, before an `apply_gradients` of the optimizer's own made these. A
    saver that lacks more holds a part on purpose; one that is not built yet will hold all.

    Args:
      spec: the `EstimatorSpec` of the first tower.
      late: list of the global variables that the update made.
    """
    graph = tf.get_default_graph()
    savers = [getattr(spec.scaffold, 'saver', None)] + graph.get_collection(tf.GraphKeys.SAVERS) + [
        compat.saver_of_hook(hook) for hook in
        list(spec.training_hooks or ()) + list(spec.training_chief_hooks or ())]
    for saver in savers if late else ():
        if not isinstance(saver, tf.train.Saver) or not saver.saver_def:
            continue
        held = {op.name for op in graph_walk.step_operations([graph.get_operation_by_name(
            saver.saver_def.save_tensor_name.partition(':')[0])])}
        lacking = [each for each in tf.global_variables() if each.op.name not in held]
        if {each.op.name for each in lacking} == {each.op.name for each in late}:
            raise ModelFunctionError(
                'a tf.train.Saver of the model function, made after the optimizer was called, '
                'lacks %r: the optimizer makes it in an apply_gradients of its own, which is '
                'called once for all towers, after the model function. Make the saver with '
                'defer_build=True, or leave it out: an Estimator makes one of all variables.'
                % late[0].op.name)
