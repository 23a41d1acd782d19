"""The loss that a tower differentiates, and the plan's lines about it.

It is the loss that the model function returns; with `regularization='add'` every registered loss
that is not in it yet is added. A term that is the same in every tower, such as the L2 loss of the
weights, counts once, since the towers' weights w_k add up to 1 (to N for `reduction='sum'`):

    loss of the build = sum_k w_k data_loss_k

Where a loss divides by a number that is counted in the batch, takes a root of its mean, or
multiplies examples with each other, the mean of the towers' losses is not the loss of the batch.
The plan says where a graph shows such a loss; `check_towers` measures the difference.
"""

import collections

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph import graph_walk
from towers.graph.graph_walk import is_computed_from
from towers.graph.op_types import (CHOICES, PLACEHOLDERS, QUOTIENTS, READS, SAME_NUMBERS, SIZES,
                                   SUMS, VARIABLE_OPS)
from towers.nonfinite import checked_loss
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device
from towers.tower.across_examples import mixed
from towers.tower.batch_values import is_batch_value
from towers.tower.objectives import flat, map_shaped, with_parts


class Losses(collections.namedtuple('Losses', 'data_loss description operations')):
    """The loss that a tower differentiates, a scalar; or a dict by name, or None.

    Attributes:
      description: the plan's line about the regularization; None where none was found.
      operations: list of the operations that were made for it.
    """
    __slots__ = ()


def make_losses(recorded, request, number):
    """Makes the loss that a tower differentiates from the loss of its model: `Losses`."""
    loss = recorded.output.loss
    if loss is None:
        return Losses(None, None, [])
    _check_depends_on_shard(recorded)
    with graph_walk.Recording(tf.get_default_graph()) as made, \
            only_device(_device_of_loss(loss, request.parts[number].device)):
        inside, outside = _registered(recorded)
        adds = request.regularization == 'add'
        if adds and isinstance(loss, dict):
            raise ModelFunctionError(
                "regularization='add', and the model function returned several losses (%s): which "
                'of them it belongs to is not known here.' % ', '.join(loss))
        if adds and outside:
            loss = tf.add_n([loss] + [tf.cast(each, loss.dtype) for each in outside])
        if request.numerics.check_numerics:
            loss = map_shaped(
                lambda each: checked_loss(each, number, request.accumulate), loss)
    return Losses(loss, _described(len(inside), len(outside), adds), made.operations)


def _check_depends_on_shard(recorded):
    """Refuses a loss of tensors from around the model function, which is not the shard's."""
    draws = [op for op in recorded.operations if op.type in PLACEHOLDERS or (
        op.op_def.is_stateful and op.type not in VARIABLE_OPS and op.type not in READS)]
    depends = graph_walk.reachable_from(recorded.sources + draws, recorded.operations, control=True)
    for name, loss in with_parts('loss', recorded.output.loss):
        if loss.op.name not in depends:
            raise ModelFunctionError(
                'the %s of tower 0 does not depend on its shard: the model function has to '
                'use the inputs that it is called with, not tensors from around it.' % name)


def registered_losses():
    """The losses in `REGULARIZATION_LOSSES`, as tensors: a list.

    TF 2 registers objects, which make new operations at each use, so that it cannot be told whether
    a loss has one in it. In the collection they are exchanged for tensors, as TF 1 registers them.
    """
    listed = tf.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
    for place, loss in enumerate(listed):
        if loss is not None and not isinstance(loss, tf.Tensor):
            with tf.control_dependencies(None):
                listed[place] = tf.convert_to_tensor(loss)
    return [loss for loss in listed if loss is not None]


def _registered(recorded):
    """`(inside, outside)`: the losses that belong to the model, in its own loss or not."""
    registered = list(recorded.registered)
    # A call of the recipe may register the losses of the call before anew, or not.
    registered += [each for each in _of_before(recorded) if not is_computed_from(registered, each)]
    of_weights, of_activations = recorded.keras_losses
    # A program may itself have registered a loss that its Keras layers hold.
    of_weights = [each for each in of_weights if not is_computed_from(registered, each)]
    losses, inside, outside = flat(recorded.output.loss), [], []
    known = graph_walk.ancestors(losses)
    for each in registered + of_activations:  # another loss may have the same formula
        (inside if each.op.name in known else outside).append(each)
    for each in of_weights:
        (inside if is_computed_from(losses, each) else outside).append(each)
    return inside, outside


def _of_before(recorded):
    """The losses from before the towers that regularize the model's variables; not losses of an
    earlier build's activations."""
    names = {variable.op.name for variable in recorded.variables}
    return [loss for loss in recorded.registered_before
            if graph_walk.ancestors([loss]) & names and not _depends_on_a_batch(loss)]


def _depends_on_a_batch(loss):
    """Whether a loss needs a placeholder or an iterator that is no scalar, such as an L2 factor."""
    sources = map(loss.graph.get_operation_by_name, graph_walk.ancestors([loss]))
    return any((op.type in PLACEHOLDERS or op.type == 'IteratorGetNext')
               and any(output.shape.ndims != 0 for output in op.outputs) for op in sources)


def _device_of_loss(loss, device):
    """The device for operations on the loss: the loss's own in a tower of several stages."""
    there, stages = flat(loss)[0].op.device, stages_of(device)
    return TowerDevice(there, stages) if there in stages else TowerDevice(device)


def _described(num_inside, num_outside, adds):
    outside = '%d registered loss%s' % (num_outside, '' if num_outside == 1 else 'es')
    if num_outside and not adds:
        return outside + " not in the model's loss: regularization='add' adds what is missing"
    facts = [outside + ' added'] * bool(num_outside)
    facts += ["in the model's own loss"] * bool(num_inside)
    return ' and '.join(facts) + ', counted once' if facts else None


_LINEAR = SAME_NUMBERS | SUMS | CHOICES | {'Neg', 'Mul'}
_BENT = frozenset(['Sqrt', 'Rsqrt', 'Square', 'Pow', 'Log', 'Log1p', 'Exp', 'Reciprocal', 'Inv'])


def whole_batch_line(recorded, reduction):
    """The plan's line about a loss that is not the mean of the towers' losses: a text, or None."""
    by_value = graph_walk.reachable_from(
        recorded.sources, [op for op in recorded.operations if op.type not in SIZES
                             and not is_batch_value(op)])
    choices = [op for op in recorded.operations if op.name in by_value and _chooses(op)]
    of_choices, found = graph_walk.reachable_from(choices, recorded.operations), []
    for loss in flat(recorded.output.loss):
        found += _in_scalars(loss, by_value)
        if reduction == 'mean':
            found += _sums(loss, by_value)
        needed = graph_walk.ancestors([loss])
        found += [('multiplies examples with each other', op.name) for op in recorded.operations
                  if op.type == 'MatMul' and op.name in needed
                  and all(tensor.op.name in by_value for tensor in op.inputs)]
        if any(op.type == 'Mean' and op.name in of_choices & needed for op in recorded.operations):
            found += [('chooses among the examples of the shard', op.name) for op in choices
                      if op.name in needed]
    if not found:
        return None
    more = '' if len(found) == 1 else ' and %d more' % (len(found) - 1)
    return ('the loss %s (%s%s), and each tower has its shard alone: N towers are not one device; '
            'see towers.batch_sum' % (found[0] + (more,)))


def _chooses(op):
    """Whether an operation takes the best examples, or examples by a mask (`tf.boolean_mask`)."""
    return op.type == 'TopKV2' and op.inputs[0].shape.ndims == 1 or (
        op.type in ('Gather', 'GatherV2')
        and graph_walk.behind(op.inputs[1], SAME_NUMBERS).op.type == 'Where')


def _sums(loss, by_value):
    """`[(text, name of the operation)]` of sums over the examples that a loss has as they are."""
    def is_sum(op):
        return op.name in by_value and op.type == 'Sum' and (
            mixed(op.inputs[0], by_value, ()) is None)
    found = graph_walk.reached([loss.op], lambda op: [each.op for each in op.inputs] if (
        (op.type in SUMS or op.type in SAME_NUMBERS) and not is_sum(op)) else ())
    return [("adds up the examples of the shard, and the towers' mean is taken", op.name)
            for op in found.values() if is_sum(op)]


def _in_scalars(loss, by_value):
    """`[(text, name of the operation)]` of a loss's arithmetic on scalars of all examples."""
    stack, seen, found = [loss], set(), []
    while stack:
        op = stack.pop().op
        if op.name in seen or op.name not in by_value:
            continue
        seen.add(op.name)
        inputs = [tensor for tensor in op.inputs if tensor.shape.ndims == 0]
        if op.type in QUOTIENTS:
            if op.inputs[1].op.name in by_value and op.inputs[1].shape.ndims == 0:
                found.append(('divides by a number that is counted in the shard', op.name))
            stack.append(op.inputs[0])
        elif op.type in _BENT and inputs:
            found.append(('has a %s of a mean over the shard' % op.type, op.name))
        elif op.type in _LINEAR:
            stack.extend(inputs)
    return found
