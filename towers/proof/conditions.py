"""The conditions of a proof, in words: "if 6 in 1 operation ('mul') is the static size of a shard",
"but for 2 batch norms of each tower's shard".

Words of other modules used here: of a state, `shard_statistics`, its marks: the names of the
statistics of the shard on which it depends, but not linearly, and of the operations of which
something is supposed; and `reductions`: the names of the means and sums over the examples that it
is computed from; of an `Analysis`, `suppositions`: what a proof supposes of an operation;
`is_shared`: whether a value is the same on every tower, however many examples.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms
from towers.proof.question import Question, Writers
from towers.proof.stand_ins import SizeConstants
from towers.proof.states import Kind, State
from towers.proof.written import is_shared


def conditions_of(state: State, losses: typing.List[tf.Tensor], analysis: Analysis,
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
    if question.rows_counted:
        conditions.append(
            'but for how often an index occurs in a sparse gradient that a transformation of the '
            'gradients, or the optimizer, takes, as for a norm of its rows: %s' % quoted_names(
                question.rows_counted))
    conditions += _conditions_of_variables(state, analysis, question)
    return conditions + _conditions_of_order(question)


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
    if question.initialized_from_shard:
        conditions.append(
            'but for initial values that are computed from the examples of a %s: %s (compute them '
            'from the whole batch, before build_towers)' % (
                question.part_name, quoted_names(question.initialized_from_shard)))
    named = state.shard_statistics
    by_tower_0 = _own_writes(question.writers_by_tower_0, named, analysis, draws_alike=True)
    if by_tower_0:
        conditions.append(
            'but for what tower 0 writes from its own examples and the loss reads: %s '
            '(towers.batch_mean takes the mean of the batch)' % quoted_names(by_tower_0))
    # Another loss may go through other batch norms: its own verdict names these.
    beside_loss = _own_writes(
        question.other_writers, named | question.statistics_of_losses, analysis, draws_alike=True)
    if beside_loss:
        conditions.append(
            'but for what tower 0 writes from its own examples beside the loss: %s '
            '(towers.batch_mean takes the mean of the batch)' % quoted_names(beside_loss))
    in_turn = _repeated_writes(question.writers_in_turn, state, analysis)
    if in_turn:
        conditions.append(
            "but for what every %s writes in its turn (update_ops='all'): %s "
            "(with update_ops='first' tower 0 alone writes)" % (
                question.part_name, quoted_names(in_turn)))
    # There is one update for all towers: the random numbers in a variable that it reads are the
    # same for all.
    for_update = _own_writes(question.writers_for_update, named, analysis, draws_alike=True)
    if for_update:
        conditions.append(
            'but for what is written from the examples of a %s and the update reads: %s' % (
                question.part_name, quoted_names(for_update)))
    by_each_tower = _own_writes(
        question.writers_by_each_tower, named, analysis, draws_alike=False)
    if by_each_tower:
        conditions.append(
            'but for state that each %s keeps of its own examples and the loss reads: %s '
            '(towers.batch_sum and batch_mean give values of all towers)' % (
                question.part_name, quoted_names(by_each_tower)))
    if question.writers_of_machine:
        conditions.append(
            'but for what the towers of each machine write from its own examples: %s (worker 0 '
            'gives the others what the loss reads, and saves)' % (
                quoted_names(question.writers_of_machine)))
    if question.counters_read:
        conditions.append(
            'but for counters of metrics, to which each %s adds in its turn, that the loss or the '
            'update reads: %s (a variable that is not in METRIC_VARIABLES is written as the proof '
            'says)' % (question.part_name, quoted_names(question.counters_read)))
    return conditions


def _conditions_of_order(question: Question) -> typing.List[str]:
    """The conditions of a proof about the order in which a step reads and writes variables."""
    conditions = []
    if question.transformed_by:
        conditions.append(
            'but for whether a transformation of the gradients reads a variable before an update '
            'op writes it, or after: %s' % quoted_names(question.transformed_by))
    if question.read_in_any_order:
        conditions.append(
            'but for whether a gradient reads a reference variable before an update op writes it, '
            'as it does in towers, or after: %s (with use_resource=True this condition falls away)'
            % quoted_names(question.read_in_any_order))
    return conditions


def _own_writes(writers: Writers, named: typing.AbstractSet[str], analysis: Analysis,
                draws_alike: bool) -> typing.List[str]:
    """The names of the variables to which a tower writes a value of its own: the value depends on
    the tower's examples, or on random numbers that the tower draws for itself.

    The moving averages of a batch norm are left out, where the loss goes through that batch norm:
    the loss depends on the same statistics as the averages, and the verdict names the batch norm
    already.

    Args:
      writers: the operations that write each variable.
      named: the statistics of the shard that a verdict names, as the marks of the loss.
      analysis: `Analysis` of the forward pass.
      draws_alike: whether one tower draws random numbers for all, as one device does.
    """
    def is_alike(value: State) -> bool:
        """Whether a written value is the same for all towers, but for what the verdict names."""
        has_same_draws = draws_alike or not value.is_random
        return has_same_draws and _is_shared_but_for(named, value)

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
            no_constant += ', such as %s,' % quoted_names(divisors)
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
    no_other = 'no other constant'
    if divisors:
        no_other += ', such as %s,' % quoted_names(divisors)
    return '%s in %d %s (%s) %s, and %s was computed from it' % (
        numbers, number, operations, quoted_names(_numbers_first(size_constants)), condition,
        no_other)


def _numbers_first(size_constants: SizeConstants) -> typing.List[str]:
    """The names of size constants, single numbers before shapes and arrays: a number that was not
    computed from the batch's size, as a divisor, would go unseen, and a shape would not fit."""
    return sorted(size_constants, key=lambda name: size_constants[name].value.ndim > 0)


def quoted_names(names: typing.Iterable[str]) -> str:
    """The first two of some names, in quotes, and '...' for more: "'a', 'b', ..."."""
    texts = list(map(repr, names))
    if len(texts) > 2:
        texts[2:] = ['...']
    return ', '.join(texts)
