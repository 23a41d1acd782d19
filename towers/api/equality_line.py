"""The plan's line `one device`: whether N towers are proven to give one device's numbers.

The proof of the forward pass (`towers/proof/`) says where the examples are in each tensor. This
module asks it about the losses: whether their sum over the towers, each times its weight, is the
loss of the whole batch. Its test is tests/api/test_plan.py; those of the verdicts are in
tests/proof/test_verdict.py.
"""

import typing

from towers.copies.tower_set import TowerSet
from towers.graph import graph_walk
from towers.model.objectives import with_parts
from towers.model.request import Request
from towers.proof.stand_ins import static_size
from towers.proof.verdict import Question, verdict_of
from towers.roles.ownership import FIRST


def equality_line(tower_set: TowerSet) -> typing.Optional[str]:
    """The text after `one device`: the verdict on each loss.

    None for a single tower whose shard is all of a step's examples: without a cluster, and in one
    whose workers step each by itself.
    """
    request = tower_set.request
    recorded = tower_set.recorded
    has_one_shard = len(tower_set.towers) == 1 and request.has_whole_batch
    if has_one_shard:
        return None
    question = _question(tower_set)
    averages = _averages_of_tower_0(tower_set)
    has_names = isinstance(recorded.output.loss, dict)
    texts = []
    for name, loss in with_parts('loss', recorded.output.loss):
        losses = [loss] + tower_set.losses.added  # the loss of the build is their sum
        upstream = graph_walk.ancestors(losses)
        averages_of_loss = [variable for variable in averages if variable in upstream]
        question_of_loss = question._replace(shard_averages=averages_of_loss)
        verdict = verdict_of(losses, recorded.proven.proof, recorded.proven.batch_norms,
                             question_of_loss)
        texts.append('%s: %s' % (name, verdict.text) if has_names else verdict.text)
    return '; '.join(texts) + _whose_batch(request)


def _question(tower_set: TowerSet) -> Question:
    """What the proof is asked about every loss of this build; `equality_line` adds the
    `shard_averages`, which differ from loss to loss."""
    request = tower_set.request
    accumulate = request.split.accumulate
    if len(tower_set.towers) == 1:
        name_of_part = 'machine'
    elif accumulate == 1:
        name_of_part = 'tower'
    else:
        name_of_part = 'micro-batch'
    # Whether the loss of each tower has the weight 1. With 'sum' the weights of N towers add up to
    # N: each is 1, if all shards have the same size, are not cut into micro-batches, and are all
    # shards of the batch.
    all_weights_are_1 = (request.training.reduction == 'sum' and tower_set.batch.is_even
                         and accumulate == 1 and request.has_whole_batch)
    return Question(adds_shards=losses_are_sums(request) or all_weights_are_1,
                    static_size=static_size(tower_set.batch.inputs[0]), names=name_of_part)


def _averages_of_tower_0(tower_set: TowerSet) -> typing.List[str]:
    """The variables that tower 0 writes from a mean, or another statistic, of its own shard.

    Returns:
      Their names, sorted; without the moving averages of batch norms, which the proof names itself.
    """
    proven = tower_set.recorded.proven
    batch_norm_statistics = proven.batch_norms.statistics()
    written_from_statistics = set()
    for writes in proven.analysis.writes.values():
        for write in writes:
            linear_in = write.value.reductions  # means or sums over the examples
            depends_else_on = write.value.shard_statistics
            other_statistics = (linear_in | depends_else_on) - batch_norm_statistics
            if other_statistics:
                written_from_statistics.add(write.variable)
    written_by_tower_0 = tower_set.roles.names(FIRST)
    return sorted(written_from_statistics.intersection(written_by_tower_0))


def _whose_batch(request: Request) -> str:
    """The end of the line: whether the batch is that of all machines, or, where each worker steps
    by itself, the worker's own; empty without a cluster."""
    if request.cluster is None:
        return ''
    steps_alone = request.has_whole_batch  # this worker has all examples of its step
    if steps_alone:
        return "; the batch is one worker's own"
    return '; the batch is that of all machines'


def losses_are_sums(request: Request) -> bool:
    """Whether the gradients are those of the plain sum of the towers' losses L_k.

    `reduction='sum'` means this sum only for an Estimator's model function, which calls optimizers
    itself. Else it means N times the batch's mean loss:

        sum_k L_k    or    N sum_k (n_k / n) L_k

    The two differ where shards have different sizes.
    """
    calls_optimizers_itself = request.training.objectives.optimizer_calls is not None
    return request.training.reduction == 'sum' and calls_optimizers_itself
