"""The verdict of a proof: whether the loss of N towers is that of one device, in a line."""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms
from towers.proof.states import TAKES_NO_OTHER_BATCH, Kind, Reason, State


class Verdict(typing.NamedTuple):
    """What is proven of a loss."""
    is_proven: bool  # whether nothing but rounding and random numbers can differ
    text: str  # begins with 'proven' or 'not proven'


class Question(typing.NamedTuple):
    """What a build does to the losses of its towers."""
    adds_shards: bool  # whether the losses of the shards are added up, each with the weight 1
    static_size: typing.Optional[int]  # the static number of examples of a shard
    names: str  # the name of a part of the batch: 'tower', 'micro-batch', 'machine'


def verdict_of(losses: typing.List[tf.Tensor], analysis: Analysis, batch_norms: BatchNorms,
               question: Question) -> Verdict:
    """Says whether a loss over the towers is that of one device.

    Args:
      losses: list of the scalars of the analysed forward pass that the loss is the sum of.
      analysis: its `Analysis`.
      batch_norms: its `BatchNorms`.
      question: `Question`, what the build does to the losses.
    """
    state = _sum_of([analysis.of(loss) for loss in losses])
    if state.reason is not None:
        return _not_proven(_sentence(state.reason), question)
    others = [name for name in analysis.in_order(state.estimated)
              if name not in batch_norms.statistics()]
    if others:
        return _not_proven(_sentence(analysis.reasons[others[0]]), question)
    if state.kind is Kind.INDEPENDENT and state.estimated:
        statistic = analysis.in_order(state.estimated)[0]
        return _not_proven(_sentence(analysis.reasons[statistic]), question)
    what = _proven_kind(state, question)
    if what is None:
        return _not_proven(_of_kind(state), question)
    count = len(analysis.operations)
    text = '%s (%d operations)' % (what, count)
    if state.is_random:
        text += '; each %s draws its own random numbers' % question.names
    conditions = ''
    if question.static_size is not None:
        conditions = (', if no number in it comes from the static size of a shard, %d (a batch '
                      '[None, ...] needs no if)' % question.static_size)
    if analysis.scalars:
        conditions += ', if %s is fed a scalar (give it the shape [])' % ', '.join(
            map(repr, analysis.scalars))
    norms = len(batch_norms) if state.estimated else 0
    if norms:
        conditions += ", but for %d batch norm%s of each %s's shard (batch_norm='sync' takes the " \
                      'statistics of the whole batch)' % (
                          norms, '' if norms == 1 else 's', question.names)
    return Verdict(not conditions, 'proven%s: %s' % (conditions, text))


def _sum_of(states: typing.List[State]) -> State:
    """The state of the sum of losses: means, and values that are the same on every tower."""
    found = states[0]
    for state in states[1:]:
        kinds = {found.kind, state.kind}
        if Kind.UNKNOWN in kinds:
            return found if found.kind is Kind.UNKNOWN else state
        if kinds == {Kind.MEAN, Kind.INDEPENDENT}:
            found = State(Kind.MEAN).marked([found, state])
        elif len(kinds) == 1:
            has_offset = found.has_offset or state.has_offset
            found = found._replace(has_offset=has_offset).marked([state])
        else:
            found = State(Kind.SUM, has_offset=True).marked([found, state])
    return found


def _proven_kind(state: State, question) -> typing.Optional[str]:
    """What the loss is, where that makes the towers one device; else None."""
    if state.kind is Kind.MEAN:
        return 'the loss is a mean over the examples'
    if state.kind is Kind.INDEPENDENT:
        return 'the loss is the same on every tower'
    if state.kind is Kind.SUM and not state.has_offset and question.adds_shards:
        return 'the loss is a sum over the examples, and the towers add up'
    return None


def _of_kind(state):
    """Why a loss that is neither a mean nor unknown is not proven, in words."""
    if state.kind is Kind.SUM:
        return 'the loss is a sum over the examples, of which the towers take the mean'
    return 'the loss is %s' % state.kind.value


def _sentence(reason: Reason) -> str:
    return "'%s' (%s) %s" % reason


def _not_proven(why, question):
    advice = 'see towers.batch_sum, check_towers'
    if TAKES_NO_OTHER_BATCH in why and question.static_size is not None:
        operation = why.split(' ' + TAKES_NO_OTHER_BATCH, 1)[0]
        why = 'the graph has the size of a shard, %d, in it (%s)' % (
            question.static_size, operation)
        advice = 'pass a batch [None, ...], and take sizes from tf.shape'
    return Verdict(False, 'not proven: %s; %s' % (why, advice))
