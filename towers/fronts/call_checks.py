"""Programs that cannot train by combined optimizer calls: a `GradientError` for each.

`optimizer_calls` combines the calls that a model function makes in each tower. For this, every
update has to come from a `TowerOptimizer`; nothing in the forward pass may wait for such an update;
and gradients have to go to the update without a detour through variables.

The test of this module is tests/fronts/test_optimizer_calls.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.variable_access import Writes
from towers.optimizers import OPTIMIZER_UPDATES
from towers.roles.inner_training import GRADIENTS_SCOPE

# The types of the operations that take the mean of the gradients out of TF 1's
# `ConditionalAccumulator`, which is no variable, end like this.
_TAKES_FROM_ACCUMULATOR = 'AccumulatorTakeGradient'


def check_wrapped(train_op: tf.Operation, step: typing.List[tf.Operation],
                  wrapped: typing.Set[str]) -> None:
    """Refuses a train op with an update of an optimizer that no `TowerOptimizer` wraps.

    Args:
      train_op: the train op of the model function.
      step: all operations that run with it.
      wrapped: names of the operations that the wrapped optimizers have made.

    Raises:
      GradientError: an optimizer that is not wrapped updates a trained variable; or no optimizer is
        wrapped.
    """
    unwrapped = _unwrapped_update(step, wrapped)
    if unwrapped is not None:
        raise _not_wrapped('has the update %r' % unwrapped.name)
    # No optimizer at all: the model function updates its weights by operations of its own, such as
    # `tf.assign_sub`, or its train op does nothing.
    if not wrapped:
        raise _not_wrapped('is %r' % train_op.name)


def _not_wrapped(fault: str) -> GradientError:
    """The error for a train op with something that comes from no `TowerOptimizer`; `fault` says
    what, such as `has the update 'Adam/update_w/ResourceApplyAdam'`."""
    return GradientError(
        'the train_op of the model function %s, which comes from no TowerOptimizer: each '
        'tower would train on its own shard. Wrap every optimizer of the model function: '
        'optimizer = towers.TowerOptimizer(optimizer).' % fault)


def _unwrapped_update(step: typing.List[tf.Operation],
                      wrapped: typing.Set[str]) -> typing.Optional[tf.Operation]:
    """The first update of a trained variable that no wrapped optimizer has made; None if there is
    none. The arguments are those of `check_wrapped`.

    TensorFlow's optimizers update a variable by an operation of a type that only updates have, such
    as `ApplyAdam`. The variable is one of the operation's inputs.
    """
    trained_variables = graph_walk.operation_names(tf.trainable_variables())
    for op in step:
        is_update = OPTIMIZER_UPDATES.search(op.type) is not None
        trains = not trained_variables.isdisjoint(graph_walk.operation_names(op.inputs))
        if is_update and trains and op.name not in wrapped:
            return op
    return None


def check_before_updates(fetches: typing.Iterable[typing.Any], updates: typing.List[tf.Operation],
                         operations: typing.List[tf.Operation]) -> None:
    """Refuses a loss, or an operation of `UPDATE_OPS`, that waits for an optimizer's update.

    Args:
      fetches: the loss and the operations of `UPDATE_OPS`.
      updates: the updates of the wrapped optimizers.
      operations: the operations that the model function has made.
    """
    names_after_updates = graph_walk.reachable_from(updates, operations, control=True)
    for fetch in fetches:
        op = graph_walk.operation_of(fetch)
        if op.name in names_after_updates:
            raise GradientError(
                '%r, the loss of the model function or one of its UPDATE_OPS, waits for an '
                'update of a TowerOptimizer, which itself comes after the losses and the '
                'UPDATE_OPS of all towers: take it out of tf.control_dependencies of the train '
                'op.' % op.name)


def check_no_gathering(model: typing.List[tf.Operation], gradients: typing.List[tf.Tensor]) -> None:
    """Refuses gradients that the model function gathers in shared state before it applies them.

    Each tower would add its share of the gradient to the variable or accumulator that all towers
    share, and then apply the sum that is there.

    Args:
      model: the operations of the model function, without the operations of its optimizers: an
        optimizer that gathers gradients gathers the gradients of all towers.
      gradients: the gradients that the model function gives to `apply_gradients`.
    """
    upstream = graph_walk.ancestors(gradients)
    shared_state = []
    for op in model:
        takes_from_accumulator = op.type.endswith(_TAKES_FROM_ACCUMULATOR)
        if takes_from_accumulator and op.name in upstream:
            shared_state.append(op.name)
    shared_state += _variables_with_gradients(model, upstream)
    if shared_state:
        raise GradientError(
            'the model function writes gradients of a tower to %r, which all towers share, and '
            'applies what is computed from it. An optimizer within the TowerOptimizer gets the '
            'gradients of all towers: towers.TowerOptimizer(tf.train.SyncReplicasOptimizer('
            'optimizer, …)), or TowerOptimizer(GatheringOptimizer(optimizer)).' % shared_state[0])


def _variables_with_gradients(model: typing.List[tf.Operation], upstream: typing.Set[str]
                              ) -> typing.List[str]:
    """The variables in which the model function gathers gradients.

    Args:
      model: the operations of the model function, without the operations of its optimizers.
      upstream: names of all operations that the applied gradients are computed from.

    Returns:
      Names of variables that are not trained, are written from gradients, and are upstream of the
      applied gradients.
    """
    variables = graph_walk.operation_names(tf.global_variables())
    trained = graph_walk.operation_names(tf.trainable_variables())
    candidates = (variables - trained) & upstream
    if not candidates:  # so that most programs need no search for writes
        return []
    writes = Writes(tf.get_default_graph())
    # `tf.gradients` makes its operations in a name scope `gradients`.
    gradient_operations = {op.name for op in model if GRADIENTS_SCOPE.search(op.name)}
    found = []
    for op in model:
        for variable in candidates.intersection(writes.written_by(op)):
            if not gradient_operations.isdisjoint(_upstream_of_value(op, variable)):
                found.append(variable)
    return found


def _upstream_of_value(write: tf.Operation, variable: str) -> typing.Set[str]:
    """Names of the operations from which the value is computed that an operation writes to a
    variable. The inputs of a write are the variable itself, and the value."""
    values = [tensor for tensor in write.inputs if tensor.op.name != variable]
    return graph_walk.ancestors(values)
