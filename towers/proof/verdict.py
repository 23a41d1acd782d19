"""The verdict of a proof: whether the loss of N towers is the loss of one device, in a line.

Words of other modules used here: of a state, `shard_statistics`, its marks: the names of the
statistics of the shard on which it depends, but not linearly, and of the operations of which
something is supposed; of an `Analysis`, `reasons`: why a proof ends at a statistic, `suppositions`:
what a proof supposes of an operation, and `loops_of_size`: loops that may run as often as there are
examples.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms, statistics_of_normalizations
from towers.proof.conditions import conditions_of, quoted_names
from towers.proof.question import Question
from towers.proof.states import (
    HAS_NO_RULE,
    HAS_OWN_SIZE,
    IS_PYTHON,
    TAKES_NO_OTHER_BATCH,
    Kind,
    Reason,
    State,
    first_unknown,
)


class Verdict(typing.NamedTuple):
    """What is proven of a loss."""
    is_proven: bool  # whether nothing but rounding and random numbers can differ
    is_conditional: bool  # whether it is proven under conditions that the text tells
    text: str  # begins with 'proven' or 'not proven'


_NEITHER_MEAN_NOR_SUM = State(Kind.SUM, has_offset=True)
"""The state of a sum of losses of different kinds, as a mean plus a sum: no build's loss is proven
by it."""


def verdict_of(losses: typing.List[tf.Tensor], analysis: Analysis, batch_norms: BatchNorms,
               question: Question) -> Verdict:
    """Says whether a loss over the towers is the loss of one device.

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
    # The loss is not proven with all constants as they are. Perhaps it is if some constants are
    # multiples of the size of the batch.
    return _verdict(losses, other_analysis, batch_norms, question)


def _verdict(losses: typing.List[tf.Tensor], analysis: Analysis, batch_norms: BatchNorms,
             question: Question) -> Verdict:
    """The verdict by one analysis.

    Args:
      losses: list of the scalars of the analysed forward pass that the loss is the sum of.
      analysis: `Analysis`, with the constants as they are, or with size constants.
      batch_norms: `BatchNorms` of the forward pass.
      question: what the build does to the losses.
    """
    state = _sum_of([analysis.state(loss) for loss in losses])
    normalizations = statistics_of_normalizations(batch_norms, losses, analysis)
    ends = _ends(state, losses, analysis, normalizations)
    if ends:
        return _not_proven(_where_it_ends(ends, question))
    what_the_loss_is = _proven_kind(state, question)
    if what_the_loss_is is None:
        return _not_proven(_sentence_about_kind(state, analysis.other_divisors, question))
    loops = _loops_of_size(losses, analysis, question)
    if loops:
        return _not_proven('%s; %s' % ('; '.join(map(_sentence, loops)), _PASS_ANY_SIZE))
    text = '%s (%d operations)' % (what_the_loss_is, len(analysis.operations))
    if state.is_random:
        text += '; each %s draws its own random numbers' % question.part_name
    conditions = conditions_of(state, losses, analysis, batch_norms, question)
    if not conditions:
        return Verdict(is_proven=True, is_conditional=False, text='proven: %s' % text)
    return Verdict(is_proven=False, is_conditional=True, text='proven, %s: %s' % (
        ', '.join(conditions), text))


def _not_proven(text: str) -> Verdict:
    """The verdict of a loss that is not proven, by a text that says why, and what to do."""
    return Verdict(is_proven=False, is_conditional=False, text='not proven: %s' % text)


def _sum_of(states: typing.List[State]) -> State:
    """The state of the sum of losses, each of which is a scalar.

    A mean plus a value that is the same on every tower is a mean; a mean plus a sum is neither a
    mean nor a sum.
    """
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    total = states[0]
    for state in states[1:]:
        has_offset = total.has_offset or state.has_offset
        kinds = {total.kind, state.kind}
        if len(kinds) == 1:
            next_total = total._replace(has_offset=has_offset)
        elif kinds == {Kind.MEAN, Kind.INDEPENDENT}:
            next_total = State(Kind.MEAN)
        else:
            next_total = _NEITHER_MEAN_NOR_SUM
        total = next_total.with_marks_of(total, state)
    return total


def _ends(state: State, losses: typing.List[tf.Tensor], analysis: Analysis,
          normalizations: typing.Set[str]) -> typing.List[Reason]:
    """Where the proof of a loss ends, and why, each once; [] where it ends nowhere: then the
    verdict may still have conditions, for batch norms and suppositions.

    Args:
      state: the state of the sum of the losses.
      losses: list of scalars of the forward pass.
      analysis: `Analysis` of the forward pass.
      normalizations: names of the statistics of batch norms that do nothing but normalize.
    """
    statistics = analysis.in_order(state.shard_statistics)
    # For these marks the verdict of a mean or a sum has a condition: they do not end its proof.
    conditions = normalizations | set(analysis.suppositions)
    ends = [analysis.reasons[name] for name in statistics if name not in conditions]
    if state.kind is Kind.UNKNOWN:
        ends = _unknown_before(losses, analysis) + ends
    if state.kind is Kind.INDEPENDENT and not ends:
        ends = _suppositions_that_end(statistics, analysis)
    return list(dict.fromkeys(ends))


def _suppositions_that_end(statistics: typing.List[str], analysis: Analysis) -> typing.List[Reason]:
    """For a loss of the kind INDEPENDENT: the first supposition on which it depends, as the end of
    its proof; [] if the loss depends on none.

    Such a loss is the maximum of `tf.reshape(tf.ones_like(x), [-1, 5])`. Of a mean or a sum a
    supposition is a condition: if it is true, the loss is a mean. A loss that is INDEPENDENT with a
    mark is computed from a statistic of the shard, but not linearly. That it is the same on every
    tower does not follow from the supposition, which therefore ends the proof.

    Args:
      statistics: the marks of the loss.
      analysis: `Analysis` of the forward pass.
    """
    supposed = [name for name in statistics if name in analysis.suppositions]
    return [analysis.reasons[name] for name in supposed[:1]]


def _loops_of_size(losses: typing.List[tf.Tensor], analysis: Analysis,
                   question: Question) -> typing.List[Reason]:
    """The constants that may be the static size of the batch, and end a loop that computes the
    losses, or that writes a variable which the losses read.

    Args:
      losses: list of scalars of the forward pass.
      analysis: `Analysis` of the forward pass.
      question: what the build does to the losses.
    """
    if not analysis.loops_of_size:
        return []
    needed = graph_walk.ancestors(losses)
    for op in question.writers_for_loss:
        conditions = map(op.graph.get_tensor_by_name, compat.conditions_around(op))
        needed |= graph_walk.ancestors(op.inputs) | graph_walk.operation_names(conditions)
        needed.add(op.name)
    constants = [reason for name, reason in analysis.loops_of_size.items() if name in needed]
    return list(dict.fromkeys(constants))


def _unknown_before(losses: typing.List[tf.Tensor], analysis: Analysis) -> typing.List[Reason]:
    """The reasons of all unknown tensors on the way to losses, in the order of the forward pass."""
    def unknown_inputs(tensor: tf.Tensor) -> typing.List[tf.Tensor]:
        """The inputs of a tensor's operation of which nothing is proven."""
        return [source for source in tensor.op.inputs
                if analysis.state(source).kind is Kind.UNKNOWN]

    reasons = {}  # by the operation at which the proof ends
    for tensor in graph_walk.reached(losses, unknown_inputs).values():
        reason = analysis.state(tensor).reason
        if reason is not None:
            reasons[reason.operation] = reason
    return [reasons[name] for name in analysis.in_order(reasons)]


def _proven_kind(state: State, question: Question) -> typing.Optional[str]:
    """What the loss is, in words, if a loss of this kind is the same on towers as on one device;
    else None."""
    text_of_kind = {Kind.MEAN: 'the loss is a mean over the examples',
                    Kind.INDEPENDENT: 'each tower computes the loss of the whole batch'}
    text = text_of_kind.get(state.kind)
    if text is not None and question.gradient_factor is not None:
        if question.gradient_factor > 1:
            text += ', and the update takes %d times its gradient' % question.gradient_factor
        return text
    if state.kind is Kind.SUM and not state.has_offset and question.adds_shards:
        return ('the loss is a sum over the examples, and the towers add up (built.loss is the '
                'mean of their sums)')
    return None


_VALUES_OF_ALL_TOWERS = (
    'towers.batch_sum, batch_mean and batch_concat give values of all towers; check_towers '
    'measures the difference')
_PASS_ANY_SIZE = 'pass a batch [None, ...], and take sizes from tf.shape'
_MOST_ENDS = 3  # operations that a line names


def _sentence(reason: Reason) -> str:
    """Where and why a proof ends: "'loss/Max' (Max) is taken over the examples of the shard"."""
    return "'%s' (%s) %s" % reason


def _sentence_about_kind(state: State, other_divisors: typing.Sequence[str],
                         question: Question) -> str:
    """Why a loss that is neither a mean nor unknown is not proven, and what to do.

    Args:
      state: the state of the loss.
      other_divisors: names of divisors any of which may be the size of a shard.
      question: what the build does to the losses.
    """
    if state.kind is Kind.MEAN:
        return ('the loss is a mean over the examples, and the towers add up the means of shards '
                'of different sizes; pass tf.losses.Reduction.MEAN, or return the sum over the '
                'examples')
    if state.kind is not Kind.SUM:
        return 'the loss is %s; %s' % (state.kind.value, _VALUES_OF_ALL_TOWERS)
    if question.adds_shards:  # a sum without another term would be proven: see `_proven_kind`
        return ('the loss is a sum over the examples plus another term, such as a penalty of '
                'weights, which each tower adds: divide that term by the number of towers')
    text = 'the loss is a sum over the examples, of which the towers take the mean'
    if other_divisors:
        text += ', unless one of its divisors (%s) is the size of a shard' % (
            quoted_names(other_divisors))
    return ("%s; pass reduction='sum', with equal shards and no micro-batches, or return the mean "
            'over the examples' % text)


def _where_it_ends(ends: typing.List[Reason], question: Question) -> str:
    """Where the proof of a loss ends, and what to do.

    Args:
      ends: the operations at which it ends, and why; at least one.
      question: what the build does to the losses.
    """
    ends_by_size = [end for end in ends if end.why == TAKES_NO_OTHER_BATCH]
    if ends_by_size:
        first = ends_by_size[0]
        if question.static_size is None:
            return '%s: constants in it fit some sizes alone; take sizes from tf.shape' % (
                _sentence(first))
        return "the graph has the size of a shard, %d, in it ('%s' (%s)); %s" % (
            question.static_size, first.operation, first.type, _PASS_ANY_SIZE)
    text = '; '.join(map(_sentence, ends[:_MOST_ENDS]))
    if len(ends) > _MOST_ENDS:
        text += '; and %d more' % (len(ends) - _MOST_ENDS)
    if all(end.why in (HAS_NO_RULE, IS_PYTHON) for end in ends):
        return '%s; towers.check_towers measures the difference' % text
    # Such as the first state of a loop, zeros [8, 4]: with a batch of any size it has to be made of
    # the batch's own size, `tf.shape(x)[0]`, and the proof sees where its length comes from.
    are_ends_by_length = all(end.why == HAS_OWN_SIZE for end in ends)
    if are_ends_by_length and question.static_size is not None:
        return '%s; %s' % (text, _PASS_ANY_SIZE)
    return '%s; %s' % (text, _VALUES_OF_ALL_TOWERS)
