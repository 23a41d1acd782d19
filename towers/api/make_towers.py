"""The towers of a build: one call of the model function and copies, or a call for each tower.

`copies='clone'`: tower 0 is the model function's graph, or an import of a finished model; the other
towers are copies of it.

`copies='reuse'`: the recipe, as in a hand-written tower loop:

    for k, shard in enumerate(shards):
        with tf.device(devices[k]), tf.name_scope('tower_%d' % k):
            with tf.variable_scope(tf.get_variable_scope(), reuse=k > 0):
                losses.append(model_fn(*shard))

for model functions whose Python has to run once per tower. Only variables of `tf.get_variable` are
shared, collections have the entries of all towers, and a tower has no state of its own.
"""

import contextlib

import tensorflow.compat.v1 as tf

from towers.capture.record import put_on_devices, record
from towers.copies.copy import Copies
from towers.copies.substitution import Substitution
from towers.copies.tower_set import TowerSet
from towers.errors import ModelFunctionError, SharedVariableError
from towers.gradients.backward_pass import TowerGradients
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.stateless_random import give_seeds_of_tower
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.variable_access import Writes, metric_variables
from towers.model.losses import make_losses
from towers.model.objectives import flat, trained_variables
from towers.model.outputs import fetches_of
from towers.reduce.replicas import make_replicas
from towers.roles.ownership import EVERY, ownership
from towers.roles.write_order import (
    check_references_in_loops,
    write_after_reads,
    write_in_turn,
)
from towers.whole_batch.batch_values import exchange, is_batch_value


def call_once_and_copy(request, batch, behind, scaled_losses):
    """Builds all towers, by one call of the model function: `TowerSet`."""
    weights = _as_tensors(batch.weights, batch.is_even)
    # By these the losses are multiplied, so that the plain sum of gradients is the batch's.
    num_parts = len(request.split.parts)
    scales = [request.factor / num_parts if batch.is_even else weight * request.factor
              for weight in weights]
    of_model = request.training.objectives.of_model
    of_calls = [None] if of_model is None else _as_tensors(of_model.weights(batch), batch.is_even)
    with tf.name_scope(request.split.parts[0].scope) if request.call.is_finished else (
            contextlib.nullcontext()):
        recorded = record(
            request, batch, 0, contextlib.nullcontext if of_model is None else (
                lambda: of_model.call(of_calls[0], request.placement)))
        of_update, slots = ([], []) if of_model is None else (of_model.fetches(), of_model.slots())
        names_of_slots = {slot.op.name for slot in slots}  # which a Saver made there reads
        recorded = recorded._replace(variables=[
            each for each in recorded.variables if each.op.name not in names_of_slots])
        # In this order: state is where its stage is; and `ownership` takes writes that become
        # updates out of the forward pass, before that is differentiated.
        cuts = put_on_devices(recorded, request, request.split.parts[0].device)
        trained = trained_variables(request.training.objectives)
        roles = ownership(recorded, request, trained, of_update,
                          make_replicas if request.placement.has_replicas else None)
        taken = of_update + roles.inline_updates.updates
        losses = make_losses(recorded, request, 0)
        gradients = TowerGradients(request, batch, behind, scaled_losses, roles.trained)
        first = gradients.differentiate(recorded, losses, 0, scales[0], taken)
    copies = copies_of(first, roles, request, batch, [weights, scales, of_calls], of_update)
    others = [tower for tower, _ in copies]
    # `ownership` turned some of tower 0's writes into updates; copies have none of these.
    towers = [first.tower._replace(
        updates=first.tower.updates + roles.inline_updates.updates)] + others
    exchange(towers, batch.weights, request.placement.main)
    if request.split.parts_before and others:
        give_seeds_of_tower(
            first.operations, fetches_of(recorded.output) + taken + recorded.updates + tensors_of(
                first.tower.pairs), request.split.parts_before)
    _order_writes(request, towers, roles)
    return TowerSet(
        request=request, batch=batch, towers=towers, recorded=recorded, losses=losses,
        gradients=gradients, roles=roles, recomputed=first.recomputed, cuts=cuts, slots=slots,
        copies=[copied for _, copied in copies],
        how_built='%s, %d cop%s of its graph' % (
            '1 import of the finished model' if request.call.is_finished else
            '1 call of the model function', len(others), 'y' if len(others) == 1 else 'ies'))


def _order_writes(request, towers, roles):
    """Orders the writes of shared variables before the update."""
    check_references_in_loops(towers)
    if request.training.update_ops == 'first' and (len(towers) > 1 or request.has_copies):
        write_after_reads(towers, roles)
    elif request.training.update_ops == 'all' and len(towers) > 1:
        write_in_turn(towers, roles)


def copies_of(first, roles, request, batch, by_shard, further):
    """Copies of the first tower, `Differentiated`, for the other parts: a list of `(Tower, function
    from a tensor or operation to its copy)`. `by_shard` has lists of values, one a shard, whose
    tensors stand in for each other; `further` tensors and operations are copied, too."""
    if len(request.split.parts) == 1:
        return []
    tower = first.tower
    first = first._replace(tower=tower._replace(
        updates=_updates_of_every_tower(tower.updates, roles, request)))
    # A value that tower 0 alone writes may be computed from all towers' parts.
    copies = Copies(first, roles.inline_updates, request.split.parts_before,
                    further + [op for op in first.operations if is_batch_value(op)])
    made = []
    for number, part in list(enumerate(request.split.parts))[1:]:
        substituted = dict(zip((leaf.name for leaf in leaves_of(batch.inputs[0])),
                               leaves_of(batch.inputs[number])))
        substituted.update((each[0].name, each[number]) for each in by_shard
                           if isinstance(each[0], tf.Tensor))
        made.append(copies.tower(
            Substitution(number, substituted, roles.in_tower(number, request.split.accumulate)),
            batch.inputs[number], batch.sizes[number], part))
    return made


def _updates_of_every_tower(updates, roles, request):
    """Those of the first tower's updates that a step runs in every tower: a list. With `'first'`
    these are the updates of the towers' own state, of metrics, and of rows and counts."""
    if request.training.update_ops == 'all':
        return updates
    if request.training.update_ops == 'none' or not request.training.objectives:
        return []
    names = roles.own_state.keys() | metric_variables().keys() | set(roles.names(EVERY))
    finder = Writes(tf.get_default_graph())

    def is_of_every_tower(update):
        written = [finder.of(op) for op in graph_walk.step_operations([update])]
        return any(not names.isdisjoint(each) for each in written)
    return list(filter(is_of_every_tower, updates))


def _as_tensors(weights, is_even):
    """Weights of shards; tensors where they differ, so that a copy can have another."""
    if is_even or weights is None:
        return weights or [None]
    with tf.name_scope('shards'), tf.device('/cpu:0'):
        return [tf.constant(weight, tf.float64) if isinstance(weight, float) else weight
                for weight in weights]


def call_for_each_tower(request, batch, behind, scaled_losses):
    """Builds all towers, by a call of the model function for each: `TowerSet`."""
    calls, done = [], []
    for number, part in enumerate(request.split.parts):
        # As in the recipe: entered anew, so that layers without a name find their variables.
        with tf.name_scope(part.scope), _no_new_variables(number), tf.variable_scope(
                tf.get_variable_scope(), auxiliary_name_scope=False):
            recorded = record(request, batch, number)
            _check_made_by_name(recorded)
            put_on_devices(recorded, request, part.device)
            if not number:
                trained = trained_variables(request.training.objectives)
                gradients = TowerGradients(request, batch, behind, scaled_losses, trained)
            roles = ownership(recorded, request, trained)
            losses = make_losses(recorded, request, number)
            _check_shard(number, recorded, batch)
            calls.append((recorded, roles, losses))
            done.append(gradients.differentiate(
                recorded, losses, number, batch.weights[number] * request.factor))
    towers = [each.tower for each in done]
    exchange(towers, batch.weights, request.placement.main)
    # All calls use the same variables: update and plan go by the first one's roles and losses. But
    # the update may use a tensor of any call, so the record lists the operations of all.
    recorded, roles, losses = calls[0]
    _order_writes(request, towers, roles)
    recorded = recorded._replace(operations=sum((call.operations for call, _, _ in calls), []),
                                 sources=sum((call.sources for call, _, _ in calls), []))
    return TowerSet(
        request=request, batch=batch, towers=towers, recorded=recorded, losses=losses,
        gradients=gradients, roles=roles, recomputed=done[0].recomputed,
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


def _check_made_by_name(recorded):
    """Refuses variables that a call makes without `tf.get_variable`: no other call has their name,
    and theirs begins with the name scope of the tower."""
    counters = metric_variables()
    for variable in [each.variable for each in recorded.direct]:
        if variable.op.name in counters:
            raise SharedVariableError(
                "copies='reuse', and the model function calls a function of tf.metrics, whose "
                "counter %r each call would have for itself: pass copies='clone', which shares it, "
                'or call that function after the build with built.predictions; a scalar in metrics '
                'becomes the mean over the batch.' % variable.op.name)
        raise SharedVariableError(
            "copies='reuse', and the model function makes variable %r without tf.get_variable, so "
            'that it is of one tower by its name: make it before build_towers (a Keras layer does '
            "when it is called), or with tf.get_variable, or pass copies='clone'."
            % variable.op.name)


def _check_shard(number, recorded, batch):
    """Refuses a loss with another tower's loss in it, by `tf.losses.get_total_loss`, say."""
    if recorded.output.loss is None:
        return
    known = graph_walk.ancestors(flat(recorded.output.loss))
    others = {leaf.op.name for leaf in leaves_of(batch.inputs[:number])}
    if known & others:
        raise ModelFunctionError(
            "copies='reuse', and the loss of tower %d is computed from the shard of another tower: "
            'collections have the losses of all towers. Look at those of this tower alone, '
            "tf.losses.get_total_loss(scope='tower_%d/'), or pass copies='clone'." % (
                number, number))
