"""The towers of a build with `copies='reuse'`: a call of the model function for each tower.

It is what a hand-written tower loop does:

    for k, shard in enumerate(shards):
        with tf.device(devices[k]), tf.name_scope('tower_%d' % k):
            with tf.variable_scope(tf.get_variable_scope(), reuse=k > 0):
                losses.append(model_fn(*shard))

It is for model functions whose Python has to run once per tower. Only variables of
`tf.get_variable` are shared, collections have the entries of all towers, and a tower has no state
of its own. Its test is tests/api/test_reuse.py.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.api.make_towers import begin_step, exchange_values, factors_of_losses, order_writes
from towers.capture.record import Recorded, put_on_devices, record, with_shared_reads
from towers.copies.tower_set import TowerSet
from towers.errors import ModelFunctionError, SharedVariableError
from towers.gradients.backward_pass import Differentiated, TowerGradients
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.variable_access import metric_variables
from towers.model.losses import Losses, make_losses
from towers.model.objectives import flat, trained_variables
from towers.model.request import Request
from towers.reduce.loss_scale import ScaledLosses
from towers.roles.ownership import ownership
from towers.roles.variable_roles import Roles
from towers.shards.batch_inputs import UpstreamVariables
from towers.shards.cut_batch import CutBatch


class _Common(typing.NamedTuple):
    """What the towers have in common; it is made after the first call, which makes the variables.

    Attributes:
      trained: {name of an objective: list of the variables that its loss trains}.
      gradients: what differentiates the losses of all towers.
      step_of_workers: the step of the workers of the cluster; None for this machine alone.
      loss_factors: for each part of the batch, what its loss is multiplied with.
    """

    trained: typing.Dict[typing.Optional[str], list]
    gradients: TowerGradients
    step_of_workers: typing.Any
    loss_factors: list


class _Call(typing.NamedTuple):
    """One call of the model function, for one part of the batch.

    Attributes:
      recorded: the operations of the call.
      roles: the roles of the variables that it uses.
      losses: the losses that it returns.
      differentiated: the tower, with forward and backward pass.
    """

    recorded: Recorded
    roles: Roles
    losses: Losses
    differentiated: Differentiated


def call_for_each_tower(request: Request, batch: CutBatch, upstream: UpstreamVariables,
                        scaled_losses: typing.Optional[ScaledLosses]) -> TowerSet:
    """Builds all towers, by a call of the model function for each.

    The arguments are those of `make_towers.call_once_and_copy`.
    """
    calls: typing.List[_Call] = []
    common: typing.Any = None
    for index, part in enumerate(request.split.parts):
        # The variable scope is entered anew, as in a hand-written loop: layers without a name then
        # find their variables. The name scope is the tower's alone.
        with tf.name_scope(part.scope), _no_new_variables(index), tf.variable_scope(
                tf.get_variable_scope(), auxiliary_name_scope=False):
            recorded = record(request, batch, index)
            _check_made_by_name(recorded)
            put_on_devices(recorded, request, part.device)
            recorded = with_shared_reads(recorded, request)
            if common is None:  # the first call has made the variables
                common = _common(request, batch, upstream, scaled_losses)
            calls.append(_completed(recorded, index, request, batch, common))
    towers = [call.differentiated.tower for call in calls]
    exchanged = exchange_values(towers, request, batch, common.step_of_workers)
    # All calls use the same variables: update and plan go by the first call's roles and losses.
    first = calls[0]
    waits = order_writes(request, towers, first.roles)
    return TowerSet(
        request=request, batch=batch, towers=towers, recorded=_record_of_all(calls),
        losses=first.losses, gradients=common.gradients, roles=first.roles, waits=waits,
        recomputed=first.differentiated.recomputed, step_of_workers=common.step_of_workers,
        exchanged=exchanged,
        how_built='%d calls of the model function' % len(towers))


def _completed(recorded: Recorded, index: int, request: Request, batch: CutBatch,
               common: _Common) -> _Call:
    """Makes a tower of a recorded call: its forward pass gets the changes that the roles of the
    variables ask for, and then a loss and a backward pass.

    Args:
      recorded: the call of the model function for the tower.
      index: the index of the tower.
      request: the checked arguments of the build.
      batch: the parts of the batch.
      common: what the towers have in common.
    """
    roles = ownership(recorded, request, common.trained)
    losses = make_losses(recorded, request, index)
    _check_shard(index, recorded, batch)
    differentiated = common.gradients.differentiate(
        recorded, losses, index, scale=common.loss_factors[index])
    return _Call(recorded, roles, losses, differentiated)


def _record_of_all(calls: typing.Sequence[_Call]) -> Recorded:
    """The record of the first call, with the operations of all calls, and with the operations that
    give the shards of all calls (`sources`): the update may use a tensor of any call."""
    operations: list = []
    sources: list = []
    for call in calls:
        operations += call.recorded.operations
        sources += call.recorded.sources
    return calls[0].recorded._replace(operations=operations, sources=sources)


def _common(request: Request, batch: CutBatch, upstream: UpstreamVariables,
            scaled_losses: typing.Optional[ScaledLosses]) -> _Common:
    """Makes what the towers have in common; the arguments are those of `call_for_each_tower`."""
    trained = trained_variables(request.training.objectives)
    gradients = TowerGradients(request, batch, upstream, scaled_losses, trained)
    step_of_workers = begin_step(request, batch)
    loss_factors = factors_of_losses(request, batch, batch.weights, step_of_workers)
    return _Common(trained, gradients, step_of_workers, loss_factors)


@contextlib.contextmanager
def _no_new_variables(index: int) -> typing.Iterator[None]:
    """A context of the call for tower `index` that refuses new variables, except for tower 0."""
    def refuse(unused_next_creator, **kwargs):
        """Stands in the place of what makes a variable, which TensorFlow would call next."""
        raise SharedVariableError(
            "copies='reuse', and the call of the model function for tower %d makes variable %r: it "
            'shares what tf.get_variable makes, under the same names in every call. Pass '
            "copies='clone', which calls the model function once." % (
                index, kwargs.get('name') or 'Variable'))
    if index == 0:
        yield
        return
    with tf.variable_creator_scope(refuse):
        yield


def _check_made_by_name(recorded: Recorded) -> None:
    """Refuses variables that a call makes without `tf.get_variable`.

    Their names begin with the name scope of the tower, so no other call would find them.
    """
    made_without_get_variable = recorded.direct
    if not made_without_get_variable:
        return
    name = made_without_get_variable[0].variable.op.name
    if name in metric_variables():
        raise SharedVariableError(
            "copies='reuse', and the model function calls a function of tf.metrics, whose "
            "counter %r each call would have for itself: pass copies='clone', which shares it, "
            'or call that function after the build with built.predictions; a scalar in metrics '
            'becomes the mean over the batch.' % name)
    raise SharedVariableError(
        "copies='reuse', and the model function makes variable %r without tf.get_variable, so "
        'that it is of one tower by its name: make it before build_towers (a Keras layer does '
        "when it is called), or with tf.get_variable, or pass copies='clone'." % name)


def _check_shard(index: int, recorded: Recorded, batch: CutBatch) -> None:
    """Refuses a loss of tower `index` that is computed from an earlier tower's shard.

    `tf.losses.get_total_loss` adds up such a loss, since collections have the losses of all towers.

    Args:
      index: the index of the tower.
      recorded: the call of the model function for it.
      batch: the parts of the batch.
    """
    if recorded.output.loss is None:
        return
    upstream = graph_walk.ancestors(flat(recorded.output.loss))
    inputs_of_others = {leaf.op.name for leaf in leaves_of(batch.inputs[:index])}
    if upstream & inputs_of_others:
        raise ModelFunctionError(
            "copies='reuse', and the loss of tower %d is computed from the shard of another tower: "
            'collections have the losses of all towers. Look at those of this tower alone, '
            "tf.losses.get_total_loss(scope='tower_%d/'), or pass copies='clone'." % (
                index, index))
