"""The verdict of a proof: whether the loss of N towers is that of one device, in a line."""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms, statistics_of_normalizations
from towers.proof.stand_ins import SizeConstants
from towers.proof.states import TAKES_NO_OTHER_BATCH, Kind, Reason, State


class Verdict(typing.NamedTuple):
    """What is proven of a loss."""
    is_proven: bool  # whether nothing but rounding and random numbers can differ
    is_conditional: bool  # whether it is proven under conditions that the text tells
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
    verdict = _verdict(losses, analysis, batch_norms, question)
    other_analysis = analysis.with_size_constants
    if other_analysis is None or verdict.is_proven or verdict.is_conditional:
        return verdict
    needed = graph_walk.ancestors(losses)
    constants_of_losses = {}
    for name, constant in (other_analysis.size_constants or {}).items():
        if name in needed:
            constants_of_losses[name] = constant
    other_analysis = other_analysis._replace(size_constants=constants_of_losses)
    return _verdict(losses, other_analysis, batch_norms, question)


def _verdict(losses: typing.List[tf.Tensor], analysis: Analysis, batch_norms: BatchNorms,
             question: Question) -> Verdict:
    """The verdict by one analysis; see `verdict_of`."""
    state = _sum_of([analysis.state(loss) for loss in losses])
    normalizations = statistics_of_normalizations(batch_norms, losses, analysis)
    ends = _ends(state, losses, analysis, normalizations)
    if ends:
        return _not_proven(ends, question)
    what = _proven_kind(state, question)
    if what is None:
        why = _sentence_about_kind(state, analysis.other_divisors)
        return Verdict(False, False, 'not proven: %s; %s' % (why, _ADVICE))
    text = '%s (%d operations)' % (what, len(analysis.operations))
    if state.is_random:
        text += '; each %s draws its own random numbers' % question.names
    conditions = _conditions(state, analysis, batch_norms, question)
    return Verdict(not conditions, bool(conditions), 'proven%s: %s' % (conditions, text))


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


def _ends(state: State, losses: typing.List[tf.Tensor], analysis: Analysis,
          normalizations: typing.Set[str]) -> typing.List[Reason]:
    """Where the proof of a loss ends, and why; nothing where it is proven, but for batch norms.

    Args:
      state: of the sum of the losses.
      losses: list of scalars of the forward pass.
      analysis: `Analysis` of the forward pass.
      normalizations: names of the statistics of batch norms that do nothing but normalize.
    """
    statistics = analysis.in_order(state.shard_statistics)
    accepted = normalizations | set(analysis.suppositions)
    others = list(dict.fromkeys(
        analysis.reasons[name] for name in statistics if name not in accepted))
    if state.kind is Kind.UNKNOWN:
        return list(dict.fromkeys(_unknown_before(losses, analysis) + others))
    if state.kind is Kind.INDEPENDENT and statistics and not others:  # no mean, even in sync
        return [analysis.reasons[statistics[0]]]
    return others


def _unknown_before(losses: typing.List[tf.Tensor], analysis: Analysis) -> typing.List[Reason]:
    """The reasons of all tensors, on the way to losses, of which nothing is proven: in the order of
    the forward pass."""
    def unknown_inputs(tensor: tf.Tensor) -> typing.List[tf.Tensor]:
        return [source for source in tensor.op.inputs
                if analysis.state(source).kind is Kind.UNKNOWN]

    on_the_way = graph_walk.reached(losses, unknown_inputs).values()
    reasons = [analysis.state(tensor).reason for tensor in on_the_way]
    by_operation = {reason.operation: reason for reason in reasons if reason is not None}
    return [by_operation[name] for name in analysis.in_order(by_operation)]


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
        conditions += ', if %s (with a batch [None, ...] this condition falls away)' % (
            _condition_of_size(question.static_size, analysis.size_constants or {}))
    if analysis.assumed_scalars:
        names = ', '.join(map(repr, analysis.assumed_scalars))
        conditions += ', if %s is fed a scalar (give it the shape [])' % names
    supposed = [name for name in analysis.in_order(state.shard_statistics)
                if name in analysis.suppositions]
    if supposed:
        sentences = [analysis.suppositions[name] for name in supposed]
        conditions += ', if %s (with a static shape this condition falls away)' % (
            ' and '.join(sentences))
    if state.shard_statistics.difference(supposed) and batch_norms.number:
        norms = '%d batch norm%s' % (batch_norms.number, '' if batch_norms.number == 1 else 's')
        conditions += ", but for %s of each %s's shard (batch_norm='sync' takes the statistics " \
                      'of the whole batch)' % (norms, question.names)
    if question.shard_averages:
        conditions += (', but for what tower 0 writes from its own examples and the loss reads: '
                       '%s (towers.batch_mean takes the mean of the batch)' % _names(
                           question.shard_averages))
    return conditions


def _condition_of_size(size: int, size_constants: SizeConstants) -> str:
    """What a proof supposes of a static batch, in words.

    Args:
      size: the static number of examples of a shard.
      size_constants: the constants that the proof takes for multiples of it.
    """
    if not size_constants:
        return 'no constant of the model was computed from the static size of a shard, %d' % size
    number = len(size_constants)
    operations = 'operation' if number == 1 else 'operations'
    has_multiples = any(constant.is_multiple for constant in size_constants.values())
    multiple = ', or a multiple of it,' if has_multiples else ''
    return ('%d%s in %d %s (%s) is the static size of a shard, and no other constant was computed '
            'from it') % (size, multiple, number, operations, _names(size_constants))


# ---- in words ------------------------------------------------------------------------------------

_ADVICE = 'see towers.batch_sum, check_towers'
_MOST_ENDS = 3  # operations that a line names


def _sentence(reason: Reason) -> str:
    """Where and why a proof ends: "'loss/Max' (Max) is taken over the examples of the shard"."""
    return "'%s' (%s) %s" % reason


def _sentence_about_kind(state: State, other_divisors: typing.Sequence[str]) -> str:
    """Why a loss that is neither a mean nor unknown is not proven.

    Args:
      state: of the loss.
      other_divisors: names of divisors any of which may be the size of a shard.
    """
    if state.kind is not Kind.SUM:
        return 'the loss is %s' % state.kind.value
    text = 'the loss is a sum over the examples, of which the towers take the mean'
    if other_divisors:
        text += ', unless one of its divisors (%s) is the size of a shard' % _names(other_divisors)
    return text


def _names(names: typing.Iterable[str]) -> str:
    """The first names of some: "'a', 'b', ..."."""
    texts = list(map(repr, names))
    if len(texts) > 2:
        texts[2:] = ['...']
    return ', '.join(texts)


def _not_proven(ends: typing.List[Reason], question: Question) -> Verdict:
    """The verdict of a loss of which nothing is proven: where the proof ends, and what to do."""
    held = [end for end in ends if end.why == TAKES_NO_OTHER_BATCH]
    if held and question.static_size is not None:
        why = "the graph has the size of a shard, %d, in it ('%s' (%s))" % (
            question.static_size, held[0].operation, held[0].type)
        advice = 'pass a batch [None, ...], and take sizes from tf.shape'
    else:
        why = '; '.join(map(_sentence, ends[:_MOST_ENDS]))
        if len(ends) > _MOST_ENDS:
            why += '; and %d more' % (len(ends) - _MOST_ENDS)
        advice = _ADVICE
    return Verdict(False, False, 'not proven: %s; %s' % (why, advice))
