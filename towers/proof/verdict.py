"""The verdict of a proof: whether the loss of N towers is the loss of one device, in a line.

Words of other modules used here: of a state, `shard_statistics`, its marks: the names of the
statistics of the shard on which it depends, but not linearly, and of the operations of which
something is supposed; and `reductions`: the names of the means and sums over the examples that it
is computed from; of an `Analysis`, `reasons`: why a proof ends at a statistic, `suppositions`: what
a proof supposes of an operation, and `loops_of_size`: loops that may run as often as there are
examples; `is_shared`: whether a value is the same on every tower, however many examples.
"""

import functools
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms, statistics_of_normalizations
from towers.proof.stand_ins import SizeConstants
from towers.proof.states import (
    HAS_NO_RULE,
    IS_PYTHON,
    TAKES_NO_OTHER_BATCH,
    Kind,
    Reason,
    State,
    first_unknown,
)
from towers.proof.written import is_shared


class Verdict(typing.NamedTuple):
    """What is proven of a loss."""
    is_proven: bool  # whether nothing but rounding and random numbers can differ
    is_conditional: bool  # whether it is proven under conditions that the text tells
    text: str  # begins with 'proven' or 'not proven'


Writers = typing.Mapping[str, typing.Sequence[tf.Operation]]
"""{name of a variable: the operations of a step that write it}."""

NO_WRITERS: Writers = {}


class Question(typing.NamedTuple):
    """What a build does to the losses of its towers."""
    adds_shards: bool  # whether the losses of the shards are added up, each with the weight 1
    static_size: typing.Optional[int]  # the static number of examples of a shard
    part_name: str  # the name of a part of the batch: 'tower', 'micro-batch', 'machine'
    # Of the variables that the loss reads, the writers
    # of those that tower 0 writes for all towers;
    writers_by_tower_0: Writers = NO_WRITERS
    # of those that every tower writes in its turn (`update_ops='all'`), whatever the value;
    writers_in_turn: Writers = NO_WRITERS
    # and of those that each tower has for itself.
    writers_by_each_tower: Writers = NO_WRITERS
    # All writers of the variables that the update reads beside the gradients, as for its learning
    # rate.
    writers_for_update: Writers = NO_WRITERS
    # Names of variables that a transformation of the gradients reads, and an update op writes.
    transformed_by: typing.Sequence[str] = ()
    # Names of reference variables that a gradient may read before an update op writes them, or
    # after the write.
    read_in_any_order: typing.Sequence[str] = ()

    @property
    def writers_for_loss(self) -> typing.List[tf.Operation]:
        """The operations that write the variables which the loss reads."""
        operations: typing.List[tf.Operation] = []
        for writers in (self.writers_by_tower_0, self.writers_in_turn, self.writers_by_each_tower):
            operations += itertools.chain.from_iterable(writers.values())
        return operations


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
    conditions = _conditions(state, losses, analysis, batch_norms, question)
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
    if state.kind is Kind.MEAN:
        return 'the loss is a mean over the examples'
    if state.kind is Kind.INDEPENDENT:
        return 'each tower computes the loss of the whole batch'
    if state.kind is Kind.SUM and not state.has_offset and question.adds_shards:
        return ('the loss is a sum over the examples, and the towers add up (built.loss is the '
                'mean of their sums)')
    return None


# ---- conditions ----------------------------------------------------------------------------------

def _conditions(state: State, losses: typing.List[tf.Tensor], analysis: Analysis,
                batch_norms: BatchNorms, question: Question) -> typing.List[str]:
    """The conditions of a proof, each in words: 'if ...', or 'but for ...'.

    Args:
      state: the state of the sum of the losses.
      losses: list of scalars of the forward pass.
      analysis: `Analysis` of the forward pass.
      batch_norms: its `BatchNorms`.
      question: what the build does to the losses.
    """
    conditions = []
    if question.static_size is not None:
        conditions.append('if %s (with a batch [None, ...] this condition falls away)' % (
            _condition_of_size(question.static_size, _needed_size_constants(losses, analysis),
                               _needed_divisors(losses, analysis))))
    if analysis.assumed_scalars:
        names = ', '.join(map(repr, analysis.assumed_scalars))
        conditions.append('if %s is fed a scalar (give it the shape [])' % names)
    # A supposition about an operation is about a length that is not static, and is not the length
    # of the batch: see `View.suppose`.
    supposed_operations = [name for name in analysis.in_order(state.shard_statistics)
                           if name in analysis.suppositions]
    if supposed_operations:
        sentences = [analysis.suppositions[name] for name in supposed_operations]
        conditions.append('if %s (with a static shape this condition falls away)' % (
            ' and '.join(sentences)))
    # The other statistics belong to batch norms: any other statistic would have ended the proof
    # (`_ends`).
    depends_on_batch_norms = bool(state.shard_statistics.difference(supposed_operations))
    if depends_on_batch_norms:
        conditions.append(_condition_of_batch_norms(batch_norms.number, question))
    return conditions + _conditions_of_variables(state, analysis, question)


def _conditions_of_variables(state: State, analysis: Analysis,
                             question: Question) -> typing.List[str]:
    """The conditions of a proof about variables that a step writes and the loss, or the update,
    reads.

    Args:
      state: the state of the sum of the losses.
      analysis: `Analysis` of the forward pass.
      question: what the build does to the losses.
    """
    conditions = []
    by_tower_0 = _own_writes(question.writers_by_tower_0, state, analysis, draws_alike=True)
    if by_tower_0:
        conditions.append(
            'but for what tower 0 writes from its own examples and the loss reads: %s '
            '(towers.batch_mean takes the mean of the batch)' % _names(by_tower_0))
    in_turn = _repeated_writes(question.writers_in_turn, state, analysis)
    if in_turn:
        conditions.append(
            "but for what every %s writes in its turn (update_ops='all') and the loss reads: %s "
            "(with update_ops='first' tower 0 alone writes)" % (
                question.part_name, _names(in_turn)))
    # There is one update for all towers: the random numbers in a variable that it reads are the
    # same for all.
    for_update = _own_writes(question.writers_for_update, state, analysis, draws_alike=True)
    if for_update:
        conditions.append(
            'but for what is written from the examples of a %s and the update reads: %s' % (
                question.part_name, _names(for_update)))
    by_each_tower = _own_writes(
        question.writers_by_each_tower, state, analysis, draws_alike=False)
    if by_each_tower:
        conditions.append(
            'but for state that each %s keeps of its own examples and the loss reads: %s '
            '(towers.batch_sum and batch_mean give values of all towers)' % (
                question.part_name, _names(by_each_tower)))
    if question.transformed_by:
        conditions.append(
            'but for whether a transformation of the gradients reads a variable before an update '
            'op writes it, or after: %s' % _names(question.transformed_by))
    if question.read_in_any_order:
        conditions.append(
            'but for whether a gradient reads a reference variable before an update op writes it, '
            'as it does in towers, or after: %s (with use_resource=True this condition falls away)'
            % _names(question.read_in_any_order))
    return conditions


def _own_writes(writers: Writers, state: State, analysis: Analysis,
                draws_alike: bool) -> typing.List[str]:
    """The names of the variables to which a tower writes a value of its own: the value depends on
    the tower's examples, or on random numbers that the tower draws for itself.

    The moving averages of a batch norm are left out, where the loss goes through that batch norm:
    the loss depends on the same statistics as the averages, and the verdict names the batch norm
    already.

    Args:
      writers: the operations that write each variable.
      state: the state of the sum of the losses.
      analysis: `Analysis` of the forward pass.
      draws_alike: whether one tower draws random numbers for all, as one device does.
    """
    def is_alike(value: State) -> bool:
        """Whether a written value is the same for all towers, but for what the verdict names."""
        has_same_draws = draws_alike or not value.is_random
        return has_same_draws and _is_shared_but_for(state.shard_statistics, value)

    return _written_otherwise(is_alike, writers, analysis)


def _repeated_writes(writers: Writers, state: State, analysis: Analysis) -> typing.List[str]:
    """The names of the variables that every tower writes in its turn: N towers make N writes where
    one device makes one, and a tower may read what the one before has written.

    So a variable counts even if the written value is the same on every tower, as a counter's is. A
    variable is left out if all its writes are moving averages of statistics that the verdict names
    (`_own_writes`).

    Args:
      writers: the operations that write each variable.
      state: the state of the sum of the losses.
      analysis: `Analysis` of the forward pass.
    """
    is_named_by_verdict = functools.partial(_consists_of, state.shard_statistics)
    return _written_otherwise(is_named_by_verdict, writers, analysis)


def _written_otherwise(is_harmless: typing.Callable[[State], bool], writers: Writers,
                       analysis: Analysis) -> typing.List[str]:
    """The names of the variables to which a value is written that is not harmless.

    Args:
      is_harmless: function of the state of a written value.
      writers: the operations that write each variable.
      analysis: `Analysis` of the forward pass.
    """
    return [variable for variable, operations in writers.items()
            if not all(map(is_harmless, _values_written(operations, variable, analysis)))]


def _values_written(operations: typing.Iterable[tf.Operation], variable: str,
                    analysis: Analysis) -> typing.List[State]:
    """The states of the values that operations write to a variable, and of the indices of rows; for
    an operation that is no assign, add or scatter, the states of all its inputs."""
    values: typing.List[State] = []
    for op in operations:
        writes = [write for write in analysis.writes.get(op.name, [])
                  if write.variable == variable]
        for write in writes:
            values += write.states
        if not writes:
            values += map(analysis.state, op.inputs)
    return values


def _is_shared_but_for(named: typing.AbstractSet[str], value: State) -> bool:
    """Whether a value is the same on every tower, or differs by statistics of these names alone."""
    return is_shared(value) or _consists_of(named, value)


def _consists_of(named: typing.AbstractSet[str], value: State) -> bool:
    """Whether a value depends on the examples by statistics of these names alone, and by at least
    one of them."""
    statistics = value.reductions | value.shard_statistics
    # INDEPENDENT: computed from statistics, but not linearly, as a root of a variance.
    is_statistic = value.kind in (Kind.MEAN, Kind.INDEPENDENT)
    return is_statistic and bool(statistics) and statistics <= named


def _condition_of_batch_norms(number: int, question: Question) -> str:
    """The condition of a proof that some batch norms take the statistics of a shard, in words.

    Args:
      number: how many batch norms.
      question: what the build does to the losses.
    """
    batch_norms = '1 batch norm' if number == 1 else '%d batch norms' % number
    return ("but for %s of each %s's shard (batch_norm='sync' takes the statistics of the whole "
            'batch)') % (batch_norms, question.part_name)


def _needed_size_constants(losses: typing.List[tf.Tensor], analysis: Analysis) -> SizeConstants:
    """The constants that an analysis takes for multiples of the batch's size, as far as losses
    depend on them."""
    needed = graph_walk.ancestors(losses)
    size_constants = analysis.size_constants or {}
    return {name: constant for name, constant in size_constants.items() if name in needed}


def _needed_divisors(losses: typing.List[tf.Tensor], analysis: Analysis) -> typing.List[str]:
    """The names of the divisors of values that losses depend on, and that may be computed from the
    batch's size, without those that the proof takes for multiples of it."""
    needed = graph_walk.ancestors(losses)
    size_constants = analysis.size_constants or {}
    divisors = dict.fromkeys(analysis.divisors_of_values)  # each once
    return [name for name in divisors if name in needed and name not in size_constants]


def _condition_of_size(size: int, size_constants: SizeConstants,
                       divisors: typing.List[str]) -> str:
    """What a proof supposes of a static batch, in words.

    Args:
      size: the static number of examples of a shard.
      size_constants: the constants that the proof takes for multiples of it.
      divisors: names of other constants that may be computed from it.
    """
    if not size_constants:
        no_constant = 'no constant of the model'
        if divisors:
            no_constant += ', such as %s,' % _names(divisors)
        return '%s was computed from the static size of a shard, %d' % (no_constant, size)
    number = len(size_constants)
    operations = 'operation' if number == 1 else 'operations'
    times = max(constant.most_times for constant in size_constants.values())
    if times == 1:
        numbers = '%d' % size
        condition = 'is the static size of a shard'
    elif number == 1:
        # 32 is twice 16 in any case: the condition is that it was computed as twice 16.
        numbers = '%d' % (times * size)
        condition = 'was computed as %d times the static size of a shard, %d' % (times, size)
    else:
        numbers = '%d, or up to %d times as much,' % (size, times)
        condition = 'was computed from the static size of a shard'
    text = '%s in %d %s (%s) %s, and no other constant was computed from it' % (
        numbers, number, operations, _names(size_constants), condition)
    if divisors:
        text += ', such as %s' % _names(divisors)
    return text


# ---- in words ------------------------------------------------------------------------------------

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
    if state.kind is not Kind.SUM:
        return 'the loss is %s; %s' % (state.kind.value, _VALUES_OF_ALL_TOWERS)
    if question.adds_shards:  # a sum without another term would be proven: see `_proven_kind`
        return ('the loss is a sum over the examples plus another term, such as a penalty of '
                'weights, which each tower adds: divide that term by the number of towers')
    text = 'the loss is a sum over the examples, of which the towers take the mean'
    if other_divisors:
        text += ', unless one of its divisors (%s) is the size of a shard' % _names(other_divisors)
    return ("%s; pass reduction='sum', with equal shards and no micro-batches, or return the mean "
            'over the examples' % text)


def _names(names: typing.Iterable[str]) -> str:
    """The first two of some names, in quotes, and '...' for more: "'a', 'b', ..."."""
    texts = list(map(repr, names))
    if len(texts) > 2:
        texts[2:] = ['...']
    return ', '.join(texts)


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
            return '%s: the graph has the size of one batch in it; take sizes from tf.shape' % (
                _sentence(first))
        return "the graph has the size of a shard, %d, in it ('%s' (%s)); %s" % (
            question.static_size, first.operation, first.type, _PASS_ANY_SIZE)
    text = '; '.join(map(_sentence, ends[:_MOST_ENDS]))
    if len(ends) > _MOST_ENDS:
        text += '; and %d more' % (len(ends) - _MOST_ENDS)
    if all(end.why in (HAS_NO_RULE, IS_PYTHON) for end in ends):
        return '%s; towers.check_towers measures the difference' % text
    return '%s; %s' % (text, _VALUES_OF_ALL_TOWERS)
