"""Rules for recurrent cells in one kernel: `LSTMBlockCell`, `GRUBlockCell`, and `BlockLSTM`, which
goes over all time steps.

A cell computes each row of its results from the same row of x and of the state before the step, by
weights that all towers share.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COUPLES_EXAMPLES,
    GOES_ALONG_EXAMPLES,
    OWN_ARGUMENTS,
    fits_examples_as_built,
    is_of_batch,
    kinds_of,
    layouts_of_examples,
    state_of_layout,
    with_new_dimension,
)
from towers.proof.rules.totals import for_examples
from towers.proof.states import HAS_OWN_SIZE, Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_INPUTS_WITH_ROWS = {'GRUBlockCell': 2, 'LSTMBlockCell': 3}
"""{type of a cell: how many of its first inputs have a row for each example}: x and h, or x, the
cell state and h. The others are weights."""


@for_examples
def cell(op: tf.Operation, states: _States, view: View) -> State:
    """One step: of x [n, 4] and the state before it, h [n, 3], results [n, 3]."""
    number = _INPUTS_WITH_ROWS[op.type]
    return _step(op, states[:number], states[number:], view)


@for_examples
def lstm_over_time(op: tf.Operation, states: _States, view: View) -> State:
    """`BlockLSTM`: of x [time, n, 4] and the first state [n, 3], results [time, n, 3].

    The first input is the number of steps. The results of all later steps are 0. If the number is
    that of the longest example of the shard, the results have the mark of this maximum.
    """
    number_of_steps, sequences, cell_state, h, *weights = states
    x_of_step = sequences
    if is_of_batch(sequences):
        x_of_step = sequences._replace(axis=sequences.axis - 1)  # -1, for examples along the time
    step = _step(op, [x_of_step, cell_state, h], [number_of_steps, *weights], view)
    return with_new_dimension(step, 0) if is_of_batch(step) else step


def _step(op: tf.Operation, rows: _States, arguments: _States, view: View) -> State:
    """The state of the results of one step.

    Args:
      op: the operation.
      rows: the states of the inputs that need a row for each example, as inputs of this step.
      arguments: the states of all other inputs, such as the weights.
      view: `View`.
    """
    if not kinds_of(arguments) <= {Kind.INDEPENDENT}:
        return unknown(op, OWN_ARGUMENTS)
    # A cell broadcasts nothing: a state [1, 3] fits a batch of one example alone.
    if not all(state.is_by_example or fits_examples_as_built(state, view) for state in rows):
        return unknown(op, HAS_OWN_SIZE)
    layouts = layouts_of_examples(rows)
    if len(layouts) > 1:
        return unknown(op, COUPLES_EXAMPLES)
    layout = layouts.pop()
    if layout.axis != 0:  # in x [4, n] a row would have entries of all examples
        return unknown(op, GOES_ALONG_EXAMPLES)
    return state_of_layout(layout).with_marks_of(*rows, *arguments)
