"""`copies='reuse'`: the hand-written recipe, a call of the model function for each tower.

    for k, shard in enumerate(shards):
        with tf.device(devices[k]), tf.name_scope('tower_%d' % k):
            with tf.variable_scope(tf.get_variable_scope(), reuse=k > 0):
                losses.append(model_fn(*shard))

It is for model functions whose Python has to run once per tower, and has the recipe's limits:
variables are shared by `tf.get_variable` alone, collections have the entries of all towers, and a
tower keeps no state of its own.
"""

import contextlib

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError, SharedVariableError
from towers.graph import graph_walk
from towers.graph.nests import leaves_of
from towers.graph.variable_writes import Writes
from towers.tower.batch_values import exchange
from towers.tower.differentiate import differentiate
from towers.tower.example_writes import written_by_every_tower
from towers.tower.gradients import TowerGradients
from towers.tower.inline_updates import LateWrites
from towers.tower.inner_training import check_no_own_optimizer
from towers.tower.losses import make_losses
from towers.tower.objectives import flat
from towers.tower.outputs import fetches_of
from towers.tower.ownership import ownership
from towers.tower.record import put_on_devices, record
from towers.tower.regularization import RegisteredLosses
from towers.tower.tower import TowerSet


def call_for_each_tower(request, shards, behind, scaled_losses):
    """Builds all towers, by a call of the model function for each: `TowerSet`.

    Args:
      request: `Request`.
      shards: `CutBatch`, one for each of the request's parts.
      behind: `VariablesBehindInputs`.
      scaled_losses: `ScaledLosses`; or None.

    Raises:
      SharedVariableError: a later tower makes a variable, or a tower writes one.
      ModelFunctionError: the loss of a tower is computed from another tower's shard.
    """
    registered = RegisteredLosses(tf.get_default_graph())
    calls, all_losses, done = [], [], []
    for number, part in enumerate(request.parts):
        # As in the recipe: entered anew, so that layers without a name find their variables.
        with tf.name_scope(part.scope), _no_new_variables(number), tf.variable_scope(
                tf.get_variable_scope(), auxiliary_name_scope=False):
            recorded = record(request, shards, number, registered)
            _check_writes(number, recorded)
            put_on_devices(recorded, request, part.device)
            if number:
                _check_shard(number, recorded, shards)
            else:
                check_no_own_optimizer(recorded, request.objectives)
                roles = ownership(recorded, request, shards.sizes[0])
                _check_updates(recorded, shards.sizes[0], request)
            losses = make_losses(recorded, request, number)
            if not number:
                gradients = TowerGradients(request, scaled_losses, behind)
            calls.append(recorded)
            all_losses.append(losses)
            done.append(differentiate(recorded, losses, gradients, request, shards, number,
                                      shards.weights[number] * request.factor))
    towers = [each.tower for each in done]
    exchange(towers, shards.weights, request.placement.main)
    # What the update takes of any call is looked for in those of all.
    recorded = calls[0]._replace(operations=sum((call.operations for call in calls), []),
                                 sources=sum((call.sources for call in calls), []))
    return TowerSet(
        towers=towers, recorded=recorded, losses=all_losses[0], gradients=gradients, roles=roles,
        late=LateWrites(), of_shards=[each.of_shard for each in done],
        recomputed=done[0].recomputed,
        how_built='%d calls of the model function' % len(towers))


@contextlib.contextmanager
def _no_new_variables(number):
    def refuse(next_creator, **kwargs):
        raise SharedVariableError(
            "copies='reuse', and the call of the model function for tower %d makes variable %r: it "
            'shares what tf.get_variable makes, under the same names in every call. Pass '
            "copies='clone', which calls the model function once." % (
                number, kwargs.get('name') or 'Variable'))
    with tf.variable_creator_scope(refuse) if number else contextlib.nullcontext():
        yield


def _check_writes(number, recorded):
    """Refuses state that a tower's forward pass writes: all towers would write one variable."""
    writes = Writes(tf.get_default_graph())
    step = {op.name for op in graph_walk.step_operations(fetches_of(recorded.output))}
    for op in recorded.operations:
        is_write = op.name in step and op.name not in recorded.owned and (
            not graph_walk.is_random(op))
        for name in writes.of(op) if is_write else ():
            raise SharedVariableError(
                "copies='reuse', and the forward pass of tower %d writes variable %s (operation "
                '%s), which all towers have in common: put the update into the collection '
                "UPDATE_OPS, or pass copies='clone'." % (number, name, op.name))


def _check_updates(recorded, size, request):
    """Refuses rows and counts of examples in UPDATE_OPS, of which tower 0's alone would run."""
    step = {op.name for op in graph_walk.step_operations(recorded.updates)}
    ignored = {variable.op.name for variable in tf.local_variables()}  # counters, own state
    for name in written_by_every_tower(recorded, size, step, ignored, None) if (
            request.update_ops == 'first') else ():
        raise SharedVariableError(
            "copies='reuse', and an update writes variable %s by its examples, and it would be "
            "tower 0's alone: pass copies='clone', where every tower writes in its turn." % name)


def _check_shard(number, recorded, shards):
    """Refuses a loss with another tower's loss in it, by `tf.losses.get_total_loss`, say."""
    if recorded.output.loss is None:
        return
    known = graph_walk.ancestors(flat(recorded.output.loss))
    others = {leaf.op.name for leaf in leaves_of(shards.inputs[:number])}
    if known & others:
        raise ModelFunctionError(
            "copies='reuse', and the loss of tower %d is computed from the shard of another tower: "
            'collections have the losses of all towers. Look at those of this tower alone, '
            "tf.losses.get_total_loss(scope='tower_%d/'), or pass copies='clone'." % (
                number, number))
