"""Rules for operations over dimensions: means, sums, maxima, softmax, the largest entries.

Over another dimension than the examples', the result has an entry of each example. Over the
examples' dimension, a mean has the state MEAN and a sum the state SUM (`totals`); any other result
is a statistic of the shard. Where no input has entries of single examples, `not_linear` gives the
state of the result: the same on every tower, or marked with the means and sums that it is computed
from.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COUPLES_EXAMPLES,
    OWN_ARGUMENTS,
    any_of_kind,
    are_shared_arguments,
    has_examples_first,
    has_examples_last,
    is_broadcast_along,
    is_of_batch,
    is_set,
    layouts_of_examples,
    state_of_layout,
    static_axes,
    static_rank,
    without_dimensions,
)
from towers.proof.rules.entries import by_example, elementwise, of_equal_lengths
from towers.proof.rules.totals import for_examples, not_linear, shard_statistic, total
from towers.proof.states import HAS_OWN_SIZE, INDEPENDENT, Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_OVER_EXAMPLES = 'is taken over the examples of the shard'
_CHOOSES_AMONG_EXAMPLES = 'chooses among the examples of the shard'


# ---- over the dimensions that an argument names --------------------------------------------------

def reduce(op: tf.Operation, states: _States, view: View) -> State:
    """Reductions of x [n, 4]: over dimension 1 the result [n] has a value for each example; over
    dimension 0 each entry of the result [4] is computed from all examples, see `_over_examples`.

    The second input is the dimensions to reduce.
    """
    value = states[0]
    if value.kind is Kind.ONE_EXAMPLE:  # all dimensions are of the one example
        return value.with_marks_of(*states)
    if not value.is_by_example:
        return _reduced_without_examples(op, states, view)
    rank = static_rank(op.inputs[0], op, view)
    axes = static_axes(op.inputs[1], rank, op, view)
    is_over_examples = value.axis in axes
    if is_over_examples:
        return _over_examples(op, value, view).with_marks_of(*states)
    return _of_each_example(op, value, axes).with_marks_of(*states)


def _reduced_without_examples(op: tf.Operation, states: _States, view: View) -> State:
    """The reduction of a value without entries of single examples.

    Let m [4] be a mean over the examples. `tf.reduce_mean(m)` and `tf.reduce_sum(m)` are linear:
    their results are means over the examples again. In the same way, the mean or the sum of the
    entries of a sum over the examples is a sum over the examples. A maximum is not linear:
    `not_linear` gives the state of its result. `not_linear` also gives the state where the value is
    neither a mean nor a sum over the examples: a value that is the same on every tower stays so.
    """
    entries, *axes = states
    is_mean = op.type == 'Mean' and not op.outputs[0].dtype.is_integer  # else it is rounded
    is_linear = is_mean or op.type == 'Sum'
    is_of_total = entries.is_total and are_shared_arguments(axes)
    if is_linear and is_of_total:
        return entries.with_marks_of(*states)
    return not_linear(op, states, view)


def _of_each_example(op: tf.Operation, state: State, axes: typing.List[int]) -> State:
    """The reduction of values of the batch, [n, 4], over other dimensions than the examples': [n].

    The sum of ones [n, 4] is 4 for each example: it stays constant (`State.is_constant`). Only
    means and sums keep this field. All other reductions, such as a maximum, get
    `is_constant=False`, which is always sound.

    Args:
      op: the operation.
      state: the state of the values, PER_EXAMPLE or ROWS.
      axes: the dimensions that it reduces.
    """
    is_mean_or_sum = op.type in ('Mean', 'Sum')
    result = state._replace(is_constant=state.is_constant and is_mean_or_sum)
    # `ArgMax` has no attribute `keep_dims`: it always drops its dimension.
    return result if is_set(op, 'keep_dims') else without_dimensions(result, axes)


def _over_examples(op: tf.Operation, state: State, view: View) -> State:
    """The reduction of values of the batch over the examples.

        sum of x [n, 4]         a sum over the examples
        sum of ones [n]         n, a count: a sum over the examples that is constant
        mean of x [n, 4]        a mean over the examples, if x has floats; a mean of integers is
                                rounded, and so a statistic of the shard
        mean of x [rows, 4]     a statistic of the shard: it divides by the shard's number of rows
        mean or maximum of      the same on every tower: 1, whatever n is
        ones [n]
        any other reduction     a statistic of the shard

    `reduce` adds the marks of all inputs to the result. So the calls of `shard_statistic` pass
    none, `[]`.
    """
    if op.type == 'Sum':
        return total(Kind.SUM, op, is_constant=state.is_constant)
    if op.type == 'Mean':
        return _mean_over_examples(op, state, view)
    if state.is_constant and op.type in ('Max', 'Min', 'All', 'Any'):
        return INDEPENDENT
    return shard_statistic(op, [], view, _OVER_EXAMPLES)


def _mean_over_examples(op: tf.Operation, state: State, view: View) -> State:
    """The mean of values of the batch over the examples."""
    if op.outputs[0].dtype.is_integer:
        return shard_statistic(op, [], view, 'is a mean of integers, which is rounded')
    if state.kind is Kind.ROWS:
        return shard_statistic(
            op, [], view, 'is a mean over rows of which examples have different numbers')
    if state.is_constant:
        return INDEPENDENT
    return total(Kind.MEAN, op)


# ---- over dimensions that the operation has ------------------------------------------------------

def l2_loss(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.l2_loss`: half the sum of the squares of all entries, and so of all examples."""
    state = states[0]
    if is_of_batch(state):
        return total(Kind.SUM, op).with_marks_of(state)
    if state.kind is Kind.ONE_EXAMPLE:  # half the sum of the squares of this example's entries
        return state
    return not_linear(op, [state], view)


def bias_add_gradient(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of a bias [d]: the sum of [n, …, d] over all dimensions but the channels', which
    is never the first: TensorFlow refuses a tensor [n]."""
    if not has_examples_first(states[0]):
        return unknown(op, 'has no rule for where the examples are in its inputs')
    return total(Kind.SUM, op).with_marks_of(*states)


# ---- along the last dimension --------------------------------------------------------------------

@for_examples
def along_last(op: tf.Operation, states: _States, view: View) -> State:
    """Softmax and its losses: each row of x [n, 4] along the last dimension by itself.

    A loss takes logits [n, 4] and labels [n] or [n, 4], both with the examples in the same place.
    """
    if any_of_kind(states, Kind.ONE_EXAMPLE):  # all rows are of the one example
        return by_example(op, states, view)
    rows = _rows_of_inputs(op, states, view)
    if rows.kind is Kind.UNKNOWN:
        return rows
    if not _is_over_examples(op, states, view):
        return rows
    if op.type not in ('Softmax', 'LogSoftmax'):  # a loss: one value for several examples
        return unknown(op, _OVER_EXAMPLES)
    # Each entry [4, n] is of one example, but divided by a sum over the examples of the shard.
    view.note(op.name, op, _OVER_EXAMPLES)
    return rows.with_shard_statistics([op.name])


def _rows_of_inputs(op: tf.Operation, states: _States, view: View) -> State:
    """The state of rows that are computed from the rows of all inputs, such as the logits and the
    labels of a loss. Each input must have the examples in the same place, or be the same for each
    example.

    Args:
      op: the operation.
      states: the states of its inputs, of which at least one is PER_EXAMPLE or ROWS.
      view: `View`.
    """
    for tensor, state in zip(op.inputs, states):
        # One row goes to each row of the other inputs, and so does a scalar.
        if not state.is_by_example and not is_broadcast_along(-2, tensor, view):
            return unknown(op, HAS_OWN_SIZE)
    layouts = of_equal_lengths(layouts_of_examples(states))
    if len(layouts) > 1:
        return unknown(op, COUPLES_EXAMPLES)
    return state_of_layout(layouts.pop()).with_marks_of(*states)


def _is_over_examples(op: tf.Operation, states: _States, view: View) -> bool:
    """Whether an input has the examples along its last dimension, over which a softmax goes."""
    inputs_with_rows = list(op.inputs)
    if op.type.startswith('Sparse'):  # the second input, labels [n], has numbers of classes
        inputs_with_rows = inputs_with_rows[:1]
    return any(has_examples_last(state, static_rank(tensor, op, view))
               for tensor, state in zip(inputs_with_rows, states))


def largest(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.top_k`, `tf.nn.in_top_k`: each row of x [n, 4] along the last dimension by itself.

    `in_top_k` has a second input, the number of a class for each row.
    """
    state = states[0]
    if not is_of_batch(state):  # one example, or no examples: as any other function
        return elementwise(op, states, view)
    if has_examples_last(state, static_rank(op.inputs[0], op, view)):
        return shard_statistic(op, states, view, _CHOOSES_AMONG_EXAMPLES)
    has_labels = op.type.startswith('InTopK')
    if has_labels and states[1].layout != state.layout:
        return unknown(op, 'has labels that are not known to be of the same examples')
    return state._replace(is_constant=False).with_marks_of(*states)


def drawn_classes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.multinomial(logits [n, 4], 5)`: [n, 5], five classes that are drawn for each example by
    the example's own logits."""
    logits, number = states
    if not are_shared_arguments([number]):
        return unknown(op, OWN_ARGUMENTS)
    if is_of_batch(logits) and has_examples_last(logits, static_rank(op.inputs[0], op, view)):
        return unknown(op, _CHOOSES_AMONG_EXAMPLES)
    result = logits if logits.is_by_example else not_linear(op, states, view)
    # Two examples with equal logits draw different classes.
    return result._replace(is_constant=False, is_random=True).with_marks_of(number)
