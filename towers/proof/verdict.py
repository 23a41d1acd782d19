"""The verdict of a proof: whether the loss of N towers is that of one device, in a line."""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms, statistics_of_normalizations
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
    # Names of variables that the loss reads, and tower 0 writes from its own examples.
    shard_averages: typing.Sequence[str] = ()


def verdict_of(losses: typing.List[tf.Tensor], analysis: Analysis, batch_norms: BatchNorms,
               question: Question) -> Verdict:
    """Says whether a loss over the towers is that of one device.

    Args:
      losses: list of the scalars of the analysed forward pass that the loss is the sum of.
      analysis: its `Analysis`.
      batch_norms: its `BatchNorms`.
      question: `Question`, what the build does to the losses.
    """
    state = _sum_of([analysis.state(loss) for loss in losses])
    normalizations = statistics_of_normalizations(batch_norms, losses, analysis)
    reason = _reason_against(state, analysis, normalizations)
    if reason is not None:
        return _not_proven(_sentence(reason), question)
    what = _proven_kind(state, question)
    if what is None:
        return _not_proven(_sentence_about_kind(state), question)
    text = '%s (%d operations)' % (what, len(analysis.operations))
    if state.is_random:
        text += '; each %s draws its own random numbers' % question.names
    conditions = _conditions(state, analysis, batch_norms, question)
    return Verdict(not conditions, 'proven%s: %s' % (conditions, text))


def _sum_of(states: typing.List[State]) -> State:
    """The state of the sum of losses, each of which is a scalar.

    Unlike a sum in the graph (`rules.totals.sum_of_totals`), it has no operation to which a mark
    could point, so that a mean plus a sum is a sum with an offset here.
    """
    total = states[0]
    for state in states[1:]:
        if total.kind is Kind.UNKNOWN:
            return total
        if state.kind is Kind.UNKNOWN:
            return state
        has_offset = total.has_offset or state.has_offset
        kinds = {total.kind, state.kind}
        if len(kinds) == 1:
            with_both = total._replace(has_offset=has_offset)
        elif kinds == {Kind.MEAN, Kind.INDEPENDENT}:
            with_both = State(Kind.MEAN)
        else:
            with_both = State(Kind.SUM, has_offset=True)
        total = with_both.with_marks_of(total, state)
    return total


def _reason_against(state: State, analysis: Analysis,
                    normalizations: typing.Set[str]) -> typing.Optional[Reason]:
    """The reason why nothing is proven of a loss; None where it is proven, but for batch norms.

    Args:
      state: of the loss.
      analysis: `Analysis` of the forward pass.
      normalizations: names of the statistics of batch norms that do nothing but normalize.
    """
    if state.kind is Kind.UNKNOWN:
        return state.reason
    statistics = analysis.in_order(state.shard_statistics)
    for name in statistics:
        if name not in normalizations and name not in analysis.suppositions:
            return analysis.reasons[name]
    if state.kind is Kind.INDEPENDENT and statistics:  # which is no mean, even in sync
        return analysis.reasons[statistics[0]]
    return None


def _proven_kind(state: State, question: Question) -> typing.Optional[str]:
    """What the loss is, where that makes the towers one device; else None."""
    if state.kind is Kind.MEAN:
        return 'the loss is a mean over the examples'
    if state.kind is Kind.INDEPENDENT:
        return 'the loss is the same on every tower'
    if state.kind is Kind.SUM and not state.has_offset and question.adds_shards:
        return 'the loss is a sum over the examples, and the towers add up'
    return None


def _conditions(state: State, analysis: Analysis, batch_norms: BatchNorms,
                question: Question) -> str:
    """The conditions of a proof, in words: ', if …, but for …', or ''."""
    conditions = ''
    if question.static_size is not None:
        conditions += (', if no number in it comes from the static size of a shard, %d (a batch '
                       '[None, ...] needs no if)' % question.static_size)
    if analysis.assumed_scalars:
        names = ', '.join(map(repr, analysis.assumed_scalars))
        conditions += ', if %s is fed a scalar (give it the shape [])' % names
    supposed = [name for name in analysis.in_order(state.shard_statistics)
                if name in analysis.suppositions]
    if supposed:
        sentences = [analysis.suppositions[name] for name in supposed]
        conditions += ', if %s (a static shape needs no if)' % ' and '.join(sentences)
    if state.shard_statistics.difference(supposed) and batch_norms.number:
        norms = '%d batch norm%s' % (batch_norms.number, '' if batch_norms.number == 1 else 's')
        conditions += ", but for %s of each %s's shard (batch_norm='sync' takes the statistics " \
                      'of the whole batch)' % (norms, question.names)
    if question.shard_averages:
        names = ', '.join(map(repr, question.shard_averages[:2]))
        more = ', ...' if len(question.shard_averages) > 2 else ''
        conditions += (', but for what tower 0 writes from its own examples and the loss reads: '
                       '%s%s (towers.batch_mean takes the mean of the batch)' % (names, more))
    return conditions


# ---- in words ------------------------------------------------------------------------------------

def _sentence(reason: Reason) -> str:
    """Where and why a proof ends: "'loss/Max' (Max) is taken over the examples of the shard"."""
    return "'%s' (%s) %s" % reason


def _sentence_about_kind(state: State) -> str:
    """Why a loss that is neither a mean nor unknown is not proven."""
    if state.kind is Kind.SUM:
        return 'the loss is a sum over the examples, of which the towers take the mean'
    return 'the loss is %s' % state.kind.value


def _not_proven(why: str, question: Question) -> Verdict:
    """The verdict of a loss of which nothing is proven, with what to do."""
    advice = 'see towers.batch_sum, check_towers'
    if TAKES_NO_OTHER_BATCH in why and question.static_size is not None:
        operation = why.split(' ' + TAKES_NO_OTHER_BATCH, 1)[0]
        why = 'the graph has the size of a shard, %d, in it (%s)' % (
            question.static_size, operation)
        advice = 'pass a batch [None, ...], and take sizes from tf.shape'
    return Verdict(False, 'not proven: %s; %s' % (why, advice))
