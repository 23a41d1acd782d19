"""The plan's line `one device`: whether N towers are proven to give one device's numbers.

The proof of the forward pass (`towers/proof/`) says where the examples are in each tensor. This
module asks it about the losses: whether their sum over the towers, each times its weight, is the
loss of the whole batch. Its test is tests/api/test_plan.py; those of the verdicts are in
tests/proof/test_verdict.py.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.graph import graph_walk
from towers.graph.graph_walk import names_of
from towers.model.objectives import with_parts
from towers.model.outputs import fetches_of
from towers.model.request import Request
from towers.proof.stand_ins import static_size
from towers.proof.verdict import Question, Writers, verdict_of
from towers.roles.inline_updates import Write, writes_by, writes_of
from towers.roles.ownership import FIRST, OWN, Roles


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
    writes = _writes_of_step(tower_set)
    has_names = isinstance(recorded.output.loss, dict)
    texts = []
    for name, loss in with_parts('loss', recorded.output.loss):
        losses = [loss] + tower_set.losses.added  # the loss of the build is their sum
        writers = _writers_read_by(losses, writes)
        question_of_loss = question._replace(
            writers_by_tower_0=_with_role(FIRST, writers, tower_set.roles),
            writers_by_each_tower=_with_role(OWN, writers, tower_set.roles))
        verdict = verdict_of(losses, recorded.proven.proof, recorded.proven.batch_norms,
                             question_of_loss)
        texts.append('%s: %s' % (name, verdict.text) if has_names else verdict.text)
    return '; '.join(texts) + _whose_batch(request)


def _question(tower_set: TowerSet) -> Question:
    """What the proof is asked about every loss of this build; `equality_line` adds the
    writers, which differ from loss to loss."""
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


def _writes_of_step(tower_set: TowerSet) -> typing.List[Write]:
    """The writes of the model function that a step of tower 0 runs, in its forward pass or among
    the updates."""
    request = tower_set.request
    recorded = tower_set.recorded
    update_ops = request.training.update_ops
    forward = names_of(graph_walk.step_operations(fetches_of(recorded.output)))
    updates = names_of(graph_walk.step_operations(recorded.updates))
    has_train_op = bool(request.training.objectives)  # with which the updates run
    left_out = set()
    if update_ops == 'none' or not has_train_op:
        left_out = updates - forward
    if update_ops == 'none':
        left_out |= tower_set.roles.inline_updates.left_out
    # Writes that a step runs behind the forward pass now were a part of it for the proof.
    run = (forward | updates | recorded.proven.analysis.analysed) - left_out
    return writes_by(writes_of(recorded), run)


def _writers_read_by(losses: typing.List[tf.Tensor], writes: typing.List[Write]) -> Writers:
    """The writers of the variables that losses are computed from, be it by way of what an earlier
    step has written: where `v` is set to the value of `u`, a loss that reads `v` depends on `u`.

    Args:
      losses: list of scalars.
      writes: the writes of a step.
    """
    read = graph_walk.ancestors(losses)
    writers: typing.Dict[str, typing.List[tf.Operation]] = {}
    others = writes
    while True:
        of_read = [write for write in others if not read.isdisjoint(write.variables)]
        if not of_read:
            return writers
        others = [write for write in others if read.isdisjoint(write.variables)]
        for op, variables in of_read:
            for variable in variables:
                writers.setdefault(variable, []).append(op)
            read |= graph_walk.ancestors(op.inputs)


def _with_role(role: str, writers: Writers, roles: Roles) -> Writers:
    """The writers of the variables that have a role, in the order of the variables' names."""
    return collections.OrderedDict(
        (name, writers[name]) for name in roles.names(role) if name in writers)


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
