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
from towers.tower.example_writes import written_by_every_tower
from towers.tower.inner_training import check_no_own_optimizer
from towers.tower.objectives import flat
from towers.tower.ownership import ownership
from towers.tower.record import record
from towers.tower.regularization import RegisteredLosses
from towers.tower.step import differentiate, fetches_of, put_on_devices


def call_for_each_tower(request, shards, scaled_losses, behind, no_batch_values):
    """`(steps, roles)` of all towers, by a call of the model function for each.

    Args:
      request: `Request`.
      shards: `CutBatch`, one for each of the request's parts.
      scaled_losses: `ScaledLosses`; or None.
      behind: `BehindBatch`.
      no_batch_values: as for `record`.

    Raises:
      SharedVariableError: a later tower makes a variable, or a tower writes one.
      ModelFunctionError: the loss of a tower is computed from another tower's shard.
    """
    options, placement = request.of_tower, request.placement
    # The recipe leaves regularization in each tower's loss: it counts once, as weights add up.
    registered = RegisteredLosses(tf.get_default_graph())
    steps, roles = [], None
    for number, part in enumerate(request.parts):
        # As in the recipe: entered anew, so that layers without a name find their variables.
        with tf.name_scope(part.scope), _no_new_variables(number), tf.variable_scope(
                tf.get_variable_scope(), auxiliary_name_scope=False):
            recorded = record(
                options.model_fn, shards.inputs[number], part.device, placement,
                options.objectives, registered, options.variable_scope,
                tf.AUTO_REUSE if number else options.reuse, None if number else options.earlier,
                options.xla, options.adds_registered, parts=len(request.parts),
                no_batch_values=no_batch_values, batch_norm=request.batch_norm)
            _check_writes(number, recorded, options)
            put_on_devices(recorded, part.device, placement)
            if number:
                _check_shard(number, recorded, shards)
            else:
                check_no_own_optimizer(recorded, options.objectives)
                roles = ownership(recorded, shards.sizes[0], options, 1)
                _check_updates(recorded, shards.sizes[0], options)
            scale = shards.weights[number] * request.factor
            steps.append(differentiate(
                recorded, options, placement, registered, part.device, shards.inputs[number],
                shards.sizes[number], scale, scaled_losses, False, number=number,
                shard=behind.shard_tensors(shards.inputs[number]),
                taker=steps[0].gradients if steps else None))
    # What the update takes of any call is looked for in those of all.
    calls = [step.recorded for step in steps]
    steps[0] = steps[0]._replace(recorded=calls[0]._replace(
        operations=sum((call.operations for call in calls), []),
        sources=sum((call.sources for call in calls), [])))
    return steps, roles


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


def _check_writes(number, recorded, options):
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


def _check_updates(recorded, size, options):
    """Refuses rows and counts of examples in UPDATE_OPS, of which tower 0's alone would run."""
    step = {op.name for op in graph_walk.step_operations(recorded.updates)}
    ignored = {variable.op.name for variable in tf.local_variables()}  # counters, own state
    for name in written_by_every_tower(recorded, size, step, ignored, None) if (
            options.update_ops == 'first') else ():
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
