"""The plan's lines about gradients, optimizers and their updates: each a label and a text. A line
whose text is None is left out of the plan.

Its test is tests/api/test_plan.py.
"""

import typing

from towers.api.equality_line import equality_line, losses_are_sums
from towers.api.train_ops import Update
from towers.capture.stage_lines import accumulation_line
from towers.copies.tower_set import TowerSet
from towers.errors import counted
from towers.model.objectives import Objectives
from towers.model.request import Request
from towers.optimizers import describe_learning_rate
from towers.recompute.rewrite import Recomputed

Lines = typing.List[typing.Tuple[str, typing.Optional[str]]]


def lines_of_training(tower_set: TowerSet, update: Update) -> Lines:
    """The lines about gradients, optimizers and their updates. The last line, `one device`, tells
    whether the loss is proven to be the loss that one device computes."""
    request = tower_set.request
    who_counts_steps = None
    if update.counts_step:
        who_counts_steps = ('the build adds 1 in each step, since this optimizer does not: do not '
                            'add to the global step yourself')
    loss_scale = request.numerics.loss_scale
    return [
        ('optimizer', _optimizers(request, update)),
        ('global step', who_counts_steps),
        ('reduction', _reduction(request)),
        ('accumulation', accumulation_line(tower_set.towers, request.split.accumulate,
                                           request.memory.schedule)),
        ('recomputation', _recomputation(tower_set.recomputed, request.memory.recompute)),
        ('learning rate', _learning_rates(request)),
        ('loss scale', None if loss_scale is None else loss_scale.describe()),
        ('one device', equality_line(tower_set, update))]


def _reduction(request: Request) -> str:
    """The text after `reduction`: of which loss the combined gradient is the gradient."""
    reduction = request.training.reduction
    cluster = request.cluster
    num_towers = request.towers_of_update
    if num_towers == 1:
        return '%s (of one tower: its own gradient)' % reduction
    if losses_are_sums(request):
        return "sum: the gradient of the sum of the towers' losses"
    batch = 'batch'
    has_other_workers = cluster is not None and cluster.num_workers > 1
    if has_other_workers and cluster.workers_a_step == 1:  # each worker makes its own steps
        batch = "worker's own batch"
    if reduction == 'mean':
        return "mean: the gradient of the %s's mean loss" % batch
    return "sum: %d x the gradient of the %s's mean loss" % (num_towers, batch)


def _named_optimizers(objectives: Objectives
                      ) -> typing.List[typing.Tuple[typing.Optional[str], typing.Any]]:
    """`[(name of the loss or None, its optimizer)]`.

    Where the model function of an Estimator calls optimizers itself, the list has these optimizers,
    without names.
    """
    optimizer_calls = objectives.optimizer_calls
    if optimizer_calls is not None:
        return [(None, optimizer) for optimizer in optimizer_calls.optimizers()]
    return [(each.name, each.optimizer) for each in objectives]


def _optimizers(request: Request, update: Update) -> str:
    """The text after `optimizer`: its class. With several losses, the class of each optimizer,
    how many variables it updates, and how many update ops ride on its train op."""
    objectives = request.training.objectives
    if objectives.names is None:
        return ', '.join(type(optimizer).__name__
                         for _, optimizer in _named_optimizers(objectives))
    texts = []
    for each in objectives:
        text = '%s: %s, %d variables' % (
            each.name, type(each.optimizer).__name__, len(update.gradients[each.name]))
        if update.num_riding[each.name]:
            text += ', %d of the updates' % update.num_riding[each.name]
        texts.append(text)
    return '; '.join(texts)


def _learning_rates(request: Request) -> str:
    """The text after `learning rate`: the rates, and by which factor a sum over towers changes
    them."""
    factor = 1
    # With 'sum' the gradient is N times the gradient of the mean loss, as with N times the learning
    # rate. For an Estimator 'sum' adds up the towers' losses as they are.
    is_times_towers = request.training.reduction == 'sum' and not losses_are_sums(request)
    if is_times_towers:
        factor = request.towers_of_update
    texts = []
    for name, optimizer in _named_optimizers(request.training.objectives):
        text = describe_learning_rate(optimizer, factor)
        if name is not None:
            text = '%s: %s' % (name, text)
        if text not in texts:
            texts.append(text)
    return '; '.join(texts)


def _recomputation(recomputed: typing.Sequence[Recomputed], asked: typing.Any
                   ) -> typing.Optional[str]:
    """The text after `recomputation`: how much is recomputed; None where no recomputation was asked
    for.

    Args:
      recomputed: what the backward pass of tower 0 recomputes, one for each loss.
      asked: `Memory.recompute`: None, `'auto'`, or a list of the results to keep, between which the
        forward pass is to be recomputed.
    """
    num_operations = sum(len(each.operations) for each in recomputed)
    if num_operations:
        num_segments = sum(each.segments for each in recomputed)
        return '%d operations of the forward pass are run again, in %s' % (
            num_operations, counted(num_segments, 'segment'))
    if asked is None:
        return None
    if asked == 'auto':
        return 'nothing: no place of the forward pass is worth it'
    return 'nothing: the backward pass takes nothing that lies between these results'
