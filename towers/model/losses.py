"""The loss that a tower differentiates.

It is the loss that the model function returns; with `regularization='add'` every registered loss
that is not in it yet is added. A term that is the same in every tower, such as the L2 loss of the
weights, counts once, since the towers' weights w_k add up to 1 (to N for `reduction='sum'`):

    loss of the build = sum_k w_k data_loss_k
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph import graph_walk
from towers.graph.op_types import PLACEHOLDERS
from towers.graph.same_value import is_computed_from
from towers.model.build_context import without
from towers.model.objectives import flat, map_shaped
from towers.model.request import Request
from towers.nonfinite import checked_loss
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device

_INPUTS = PLACEHOLDERS | {'IteratorGetNext'}
"""Types of operations that give a batch."""


class Losses(typing.NamedTuple):
    """The loss that a tower differentiates.

    Attributes:
      data_loss: a scalar; with several losses a dict of scalars by name; None without a loss.
      description: the plan's text about the regularization; None where there is none.
      operations: list of the operations that were made for the loss.
      added: list of the registered losses that were added to the model's loss.
    """
    data_loss: typing.Any
    description: typing.Optional[str]
    operations: typing.List[tf.Operation]
    added: typing.List[tf.Tensor]


def make_losses(recorded: typing.Any, request: Request, index: int) -> Losses:
    """Makes the loss that a tower differentiates from the loss of its model.

    Args:
      recorded: `Recorded`, the forward pass.
      request: `Request` of the build.
      index: the index of the part of the batch.

    Raises:
      ModelFunctionError: no loss depends on the shard; or it is not known to which of several
        losses the registered losses belong.
    """
    loss = recorded.output.loss
    if loss is None:
        return Losses(data_loss=None, description=None, operations=[], added=[])
    _check_depends_on_shard(recorded)
    adds = request.training.regularization == 'add'
    if adds and isinstance(loss, dict):
        raise ModelFunctionError(
            "regularization='add', and the model function returned several losses (%s): which "
            'of them it belongs to is not known here.' % ', '.join(loss))
    device = _device_of_loss(loss, request.split.parts[index].device)
    with graph_walk.Recording(tf.get_default_graph()) as made, only_device(device):
        registered = _registered(recorded)
        added = registered.outside if adds else []
        if added:
            # Every tower computes these losses; they count once, since the towers' weights add up.
            loss = tf.add_n([loss] + [tf.cast(each, loss.dtype) for each in added])
        if request.numerics.check_numerics:
            check = functools.partial(
                checked_loss, part=index, micro_batches=request.split.accumulate)
            loss = map_shaped(check, loss)
    return Losses(loss, _described(registered, adds), made.operations, added)


def _check_depends_on_shard(recorded: typing.Any) -> None:
    """Raises `ModelFunctionError` for a model none of whose losses depends on its shard.

    Every tower would compute the same loss, be it of no example or of the whole batch. A loss also
    depends on the shard if it waits, by a control edge, for an operation that depends on the shard.
    """
    operations_of_shard = recorded.sources
    from_shard = graph_walk.reachable_from(operations_of_shard, recorded.operations, control=True)
    losses = flat(recorded.output.loss)
    if any(loss.op.name in from_shard for loss in losses):
        return
    placeholder = _own_placeholder(recorded, graph_walk.ancestors(losses))
    why = 'not tensors from around it'
    if placeholder is not None:
        why = ('not a placeholder of its own (%s, of shape %s), from which every tower computes '
               'the whole fed batch: pass that in inputs' % (
                   placeholder.op.name, placeholder.shape))
    raise ModelFunctionError(
        'the loss of tower 0 does not depend on its shard: the model function has to use the '
        'inputs that it is called with, %s.' % why)


def _own_placeholder(recorded: typing.Any,
                     names: typing.Container[str]) -> typing.Optional[tf.Tensor]:
    """Finds a placeholder that the model function has made, and that may hold a batch.

    Args:
      recorded: `Recorded`, the call of the model function.
      names: the names of the operations to look among.

    Returns:
      The first such placeholder; None if there is none.
    """
    for op in recorded.operations:
        if op.name in names and op.type in PLACEHOLDERS and _may_hold_batch(op):
            return op.outputs[0]
    return None


def _may_hold_batch(op: tf.Operation) -> bool:
    """Whether an operation gives a tensor that is no scalar; a fed rate or factor is a scalar."""
    return any(output.shape.ndims != 0 for output in op.outputs)


def registered_losses() -> typing.List[tf.Tensor]:
    """List of the losses in `REGULARIZATION_LOSSES`, as tensors.

    TF 2 registers objects that make new operations at each use, so that nothing tells whether a
    model's loss has them. In the collection these objects are replaced by tensors, which TF 1
    registers itself.
    """
    listed = tf.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
    for index, loss in enumerate(listed):
        if loss is not None and not isinstance(loss, tf.Tensor):
            with tf.control_dependencies(None):  # not in a branch of the caller's, say
                listed[index] = tf.convert_to_tensor(loss)
    # A regularizer of scale 0 gives None, which a program may have put there.
    return [loss for loss in listed if loss is not None]


class _Registered(typing.NamedTuple):
    """The registered losses of a model."""
    inside: typing.List[tf.Tensor]  # the losses that the model's loss is computed from
    outside: typing.List[tf.Tensor]  # the other registered losses


def _registered(recorded: typing.Any) -> _Registered:
    """Finds the registered losses of a model, and which of them its loss is computed from.

    Args:
      recorded: `Recorded`, the call of the model function.
    """
    sorted_losses = _sorted_by_test(recorded)
    losses = flat(recorded.output.loss)
    upstream = graph_walk.ancestors(losses)
    inside = [loss for loss in sorted_losses.by_name if loss.op.name in upstream]
    inside += [loss for loss in sorted_losses.by_formula if is_computed_from(losses, loss)]
    outside = without(sorted_losses.by_name + sorted_losses.by_formula, inside)
    return _Registered(inside, outside)


class _SortedByTest(typing.NamedTuple):
    """The registered losses of a model, by the test whether the model's loss is computed from them.

    Attributes:
      by_name: losses for which the name of the tensor tells: it is upstream of the model's loss, or
        is not.
      by_formula: losses for which the formula tells, since one loss may have several tensors. Keras
        makes the loss of a weight anew whenever it is asked for: the model's loss has one tensor of
        it, the list of the layer's losses another.
    """
    by_name: typing.List[tf.Tensor]
    by_formula: typing.List[tf.Tensor]


def _sorted_by_test(recorded: typing.Any) -> _SortedByTest:
    """Finds the registered losses of a model, each once.

    There are four kinds: losses that the model's call has registered; losses from before the build
    that regularize the model's variables; losses of the weights of the model's Keras layers; and
    losses of the activations of these layers.

    Args:
      recorded: `Recorded`, the call of the model function.
    """
    by_name = list(recorded.registered)
    by_formula = recorded.keras_losses.of_weights
    # A second call, with copies='reuse', finds the losses of the first call among the losses from
    # before. It may have registered these losses anew: each counts once.
    losses_before = _not_among(by_name, _losses_before_build(recorded))
    is_finished_model = recorded.imported is not None
    if is_finished_model:
        # The towers' loss is computed from imports of these losses: other tensors, of the same
        # formula.
        by_formula = by_formula + losses_before
    else:
        by_name += losses_before
    # A loss that Keras layers hold, and that the program itself has registered, counts once.
    by_formula = _not_among(by_name, by_formula)
    # Two losses of activations may have the same formula and still both count: by their names they
    # are different.
    return _SortedByTest(by_name + recorded.keras_losses.of_activations, by_formula)


def _not_among(counted_already: list, losses: list) -> list:
    """The losses that do not count already. A loss counts already if one of `counted_already` is
    this loss, or is computed from it, by the name or by the formula."""
    return [loss for loss in losses if not is_computed_from(counted_already, loss)]


def _losses_before_build(recorded: typing.Any) -> typing.List[tf.Tensor]:
    """List of the losses that were registered before the build, and that are computed from the
    model's variables.

    An earlier build of the same variables may have registered losses of its activations: these
    depend on that build's batch, and are left out.

    Args:
      recorded: `Recorded`, the call of the model function.
    """
    variables = graph_walk.operation_names(recorded.variables)
    losses = []
    for loss in recorded.registered_before:
        regularizes_variables = not variables.isdisjoint(graph_walk.ancestors([loss]))
        if regularizes_variables and not _depends_on_a_batch(loss):
            losses.append(loss)
    return losses


def _depends_on_a_batch(loss: tf.Tensor) -> bool:
    """Whether a loss is computed from a tensor that is fed, or that an iterator gives, and that may
    hold a batch."""
    for name in graph_walk.ancestors([loss]):
        op = loss.graph.get_operation_by_name(name)
        if op.type in _INPUTS and _may_hold_batch(op):
            return True
    return False


def _device_of_loss(loss: typing.Any, device: str) -> TowerDevice:
    """The device for operations on the loss of a tower: the stage that has computed the loss.

    If no stage has computed it, as for a loss without a device, it is the whole tower's device.

    Args:
      loss: the loss; or a dict of losses by name, of which the first one counts.
      device: the device of the tower; with stages, all of their devices.
    """
    stages = stages_of(device)
    device_of_loss = flat(loss)[0].op.device
    if device_of_loss in stages:
        return TowerDevice(device_of_loss, stages)
    return TowerDevice(device)


def _described(registered: _Registered, adds: bool) -> typing.Optional[str]:
    """The plan's text about registered losses; None where there are none.

    Args:
      registered: the registered losses.
      adds: whether registered losses that were not in the model's loss are added to it.
    """
    num_outside = len(registered.outside)
    if num_outside == 0:
        return "in the model's own loss, counted once" if registered.inside else None
    outside = '1 registered loss' if num_outside == 1 else '%d registered losses' % num_outside
    if not adds:
        return outside + " not in the model's loss: regularization='add' adds what is missing"
    if registered.inside:
        return outside + " added and in the model's own loss, counted once"
    return outside + ' added, counted once'
