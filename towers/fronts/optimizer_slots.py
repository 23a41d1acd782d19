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
from towers.tower.variables import outside_of_calls, slot_creator


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
    slots, graph, scope = [], tf.get_default_graph(), tf.get_variable_scope()
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(outside_of_calls(graph))
        scopes.enter_context(tf.device(None))
        scopes.enter_context(tf.device(placement.main))
        scopes.enter_context(tf.variable_creator_scope(slot_creator(placement, variables, slots)))
        scopes.enter_context(tf.control_dependencies(None))
        if outermost:  # it applies outside of every name scope
            scopes.enter_context(tf.name_scope(None))
        if scope.reuse is True:  # only then, since a scope that is left forgets the names in it
            scopes.enter_context(tf.variable_scope(like_current_scope(scope.name, False),
                                                   auxiliary_name_scope=False))
        optimizer._create_slots(variables)
    return slots


def _slot_maker(optimizer):
    """The optimizer whose `_create_slots` makes the slots, in the scopes of `apply_gradients`.

    None where it is not known how the slots are made.
    """
    if isinstance(optimizer, tf.train.SyncReplicasOptimizer):
        optimizer = optimizer._opt
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


@contextlib.contextmanager
def made_late(call, late):
    """The context of the update of a call: notes the global variables that it makes.

    Args:
      call: `Call`.
      late: list that `(call, variables)` is appended to, where there are any.
    """
    made = []

    def note(next_creator, **kwargs):
        made.append(next_creator(**kwargs))
        return made[-1]
    with tf.variable_creator_scope(note):
        yield
    listed = {id(variable) for variable in tf.global_variables()}
    found = [variable for variable in made if id(variable) in listed]
    if found:
        late.append((call, found))


def check_saved(spec, late):
    """Raises `ModelFunctionError` where a spec saves or initializes all variables but late ones.

    A saver that also lacks older variables holds a part on purpose; one that is not built yet will
    hold all variables.

    Args:
      spec: the `EstimatorSpec` of the first tower.
      late: list of `(call, variables)`, see `made_late`.
    """
    graph = tf.get_default_graph()
    places = {op.name: place for place, op in enumerate(graph.get_operations())}
    for what, made, op_of, remedy in _savers(spec, graph) + _initializers(spec):
        held = {op.name for op in graph_walk.step_operations([made])}
        for call, variables in late:
            names = {variable.op.name for variable in variables}
            there = [variable for variable in tf.global_variables()
                     if variable.op.name not in names
                     and places[variable.op.name] < places[made.name]]
            if (places[call.placeholder.name] < places[made.name]
                    and all(op_of(variable).name in held for variable in there)):
                raise ModelFunctionError(
                    '%s of the model function, made after the optimizer was called, would know all '
                    'variables but %r%s: %s makes them in an apply_gradients of its own, which is '
                    'called once for all towers, after the model function. %s' % (
                        what, variables[0].op.name,
                        ' and %d more' % (len(variables) - 1) if len(variables) > 1 else '',
                        type(call.optimizer).__name__, remedy))


def _savers(spec, graph):
    """`(what, operation, function from a variable to its operation there, remedy)` of savers."""
    remedy = ('Make it with defer_build=True, or leave it out: an Estimator makes one of all '
              'variables.')
    found = [('the saver of the scaffold', getattr(spec.scaffold, 'saver', None))]
    found += [('a saver in the collection SAVERS', saver)
              for saver in graph.get_collection(tf.GraphKeys.SAVERS)]
    found += [('the saver of a %s' % type(hook).__name__, getattr(hook, '_saver', None))
              for hook in list(spec.training_hooks or ()) + list(spec.training_chief_hooks or ())]
    return [(what, graph.get_operation_by_name(
        saver.saver_def.save_tensor_name.partition(':')[0]), lambda variable: variable.op, remedy)
            for what, saver in found if isinstance(saver, tf.train.Saver) and saver.saver_def]


def _initializers(spec):
    init_op = getattr(spec.scaffold, 'init_op', None)
    if init_op is None:
        return []
    return [('the init_op of the scaffold', getattr(init_op, 'op', init_op),
             compat.initializer_of,
             'Leave it out, for that of all variables, and give what is special as init_fn=.')]
