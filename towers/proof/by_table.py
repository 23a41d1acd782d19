"""The states of an operation's results by the table of rules: by its row, or without one.

A rule answers for the operation itself. What all rules have in common is done here, as the flags of
the row say: inputs for which the rule has no answer; sizes that are taken as numbers; marks of the
inputs, and of means and sums that the result depends on otherwise than linearly.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import (
    ADDS,
    ADDS_ROWS,
    CALLS,
    CONTROL_FLOW,
    READS,
    SETS,
    VARIABLE_OPS,
)
from towers.proof.rules.common import COMPUTES_WITH_POSITIONS, NotKnown
from towers.proof.rules.totals import marks_of_totals
from towers.proof.sizes import as_numbers
from towers.proof.states import (
    HAS_NO_RULE,
    INDEPENDENT,
    IS_PYTHON,
    ONE_EXAMPLE,
    Kind,
    State,
    first_unknown,
    unknown,
)
from towers.proof.table import RULES, Row
from towers.proof.view import View

InputStates = typing.Sequence[typing.Optional[State]]
"""The states of the inputs of an operation, None where one has none yet."""

Results = typing.Union[State, typing.List[State], None]
"""The state of all results, or of each; None as long as a state that it needs is not there."""

_GIVES_OTHER_VALUES = (
    'IteratorGetNext', 'QueueDequeue', 'ReaderRead', 'Unstage', 'OrderedMap', 'Barrier')
_PYTHON = ('PyFunc', 'EagerPyFunc')
"""How the types of operations begin that give another value at each run, and so to each tower."""

_KEEPS_KNOWN_VALUES = frozenset(
    'HashTable HashTableV2 InitializeTable InitializeTableV2 InitializeTableFromTextFile '
    'InitializeTableFromTextFileV2 LookupTableSize LookupTableSizeV2 LookupTableImport '
    'LookupTableImportV2 VarIsInitializedOp IsVariableInitialized VariableShape Assert'.split()
) | VARIABLE_OPS | READS | SETS | ADDS | ADDS_ROWS | frozenset(CALLS)
"""Operations with values from one run to the next that are the same on every tower: tables, if no
step fills them (`View.fills_tables`); and variables, since `written_before` takes care of those
that the forward pass writes."""


def states_by_table(op: tf.Operation, states: InputStates, view: View) -> Results:
    """The states of the results of an operation, by its row of the table or without one.

    Args:
      op: of the scratch graph.
      states: of its inputs.
      view: `View`.
    """
    if _is_on_list(op) and op.type not in _ON_LISTS:
        return unknown(op, HAS_NO_RULE)
    if op.type.startswith('LookupTable') and view.fills_tables:
        return unknown(op, 'looks up a table to which a step may write')
    row = RULES.get(op.type)
    known = if_complete(states)
    if row is None:
        return None if known is None else _state_without_row(op, known, view)
    if known is None and not _can_begin(op, states):
        return None
    return states_by_row(row, op, states, view)


_ON_LISTS = frozenset(
    'Identity Enter Exit Switch Merge NextIteration TensorListReserve TensorListFromTensor '
    'TensorListLength TensorListGetItem TensorListSetItem TensorListStack'.split())
"""The types of the operations on lists of tensors for which a rule knows the length of the list
and the state of its elements. Calls and loops (v2) go by their bodies."""


def _is_on_list(op: tf.Operation) -> bool:
    """Whether an operation takes or gives a list of tensors, or another value of that type."""
    tensors = itertools.chain(op.inputs, op.outputs)
    return any(tensor.dtype.base_dtype == tf.variant for tensor in tensors)


def if_complete(states: InputStates) -> typing.Optional[typing.List[State]]:
    """The states, where each of them is there; else None."""
    known = [state for state in states if state is not None]
    return known if len(known) == len(states) else None


def _can_begin(op: tf.Operation, states: InputStates) -> bool:
    """Whether an operation has results as soon as one input has a state: a `Merge`, to whose loop
    the other value comes back later."""
    has_any = any(state is not None for state in states)
    return op.type in ('Merge', 'RefMerge') and has_any


# ---- by a row ------------------------------------------------------------------------------------

def states_by_row(row: Row, op: tf.Operation, states: InputStates, view: View) -> Results:
    """The states that a row gives for the results of an operation.

    Args:
      row: the row of the operation, or of one that does the same.
      op: the operation.
      states: of its inputs.
      view: `View`.
    """
    without_answer = _state_without_answer(row, op, states)
    if without_answer is not None:
        return without_answer
    # What the rule is asked about, and what `_completed` marks the results with.
    inputs = [state for state in states if state is not None]
    if not row.takes_sizes:
        inputs = as_numbers(op, inputs, view)
    try:
        if row.takes_unknown:
            # Such a rule gets all states as they are: None for one that is not there yet, for which
            # it has an answer, too; and sizes as sizes, also without `takes_sizes`.
            answer = row.rule(op, states, view)
        else:
            answer = row.rule(op, inputs, view)
    except NotKnown as end_of_proof:
        answer = end_of_proof.state
    if answer is None:  # the rule, too, needs a state that is not there yet
        return None
    if not row.keeps_marks:  # the rule of control flow has marked its answer itself
        return answer
    if isinstance(answer, State):  # one state for all results
        return _completed(row, op, inputs, answer, view)
    return [_completed(row, op, inputs, state, view) for state in answer]


def _state_without_answer(row: Row, op: tf.Operation,
                          states: InputStates) -> typing.Optional[State]:
    """The state of the results where an input is in a state for which the rule has no answer.

    Args:
      row: the row with the rule.
      op: the operation.
      states: of its inputs.

    Returns:
      The state; None where the rule is to be asked.
    """
    for state in states:
        if state is None:  # of what comes back to a `Merge` later: the other input's state decides
            continue
        if state.kind is Kind.UNKNOWN and not row.takes_unknown:
            return state
        if state.is_position and not row.takes_positions:
            return unknown(op, COMPUTES_WITH_POSITIONS)
    return None


def _completed(row: Row, op: tf.Operation, inputs: typing.List[State], result: State,
               view: View) -> State:
    """The state of a result: what its rule gives, with all that rules leave to be done here.

    A rule need not know of the values of one example, of uniform results, and of the marks that a
    result gets from its inputs.

    Args:
      row: the row with the rule.
      op: the operation.
      inputs: the states of its inputs.
      result: the state that the rule gives.
      view: `View`.
    """
    if result.kind is Kind.UNKNOWN and _computes_on_one_example(op, inputs, view):
        result = ONE_EXAMPLE
    if row.keeps_uniform:
        is_uniform = result.kind is Kind.INDEPENDENT and _keeps_uniform(op, inputs, view)
        result = result._replace(is_uniform=is_uniform)
    if not row.accounts_for_totals:
        result = _marked_with_totals(row, op, inputs, result, view)
    return result.with_marks_of(*inputs)


def _computes_on_one_example(op: tf.Operation, inputs: typing.List[State], view: View) -> bool:
    """Whether an operation, in a loop over the examples, takes the values of one example and what
    all examples have alike: then its result is of that example, whatever it computes.

    An operation that keeps values, or takes a variable or a list of tensors, may bring in values of
    other examples; one of control flow, those of another iteration.
    """
    if view.is_stateful(op) or op.type in CONTROL_FLOW:
        return False
    for tensor in list(op.inputs) + op.outputs:
        is_handle_or_list = tensor.dtype in (tf.resource, tf.variant)
        if is_handle_or_list:
            return False
    kinds = {_kind_in_iteration(state) for state in inputs}
    return Kind.ONE_EXAMPLE in kinds and kinds <= {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}


def _kind_in_iteration(state: State) -> Kind:
    """The kind of a state where constant sizes count as what all examples have alike."""
    if state.kind is Kind.SIZES and not state.depends_on_size:
        return Kind.INDEPENDENT
    return state.kind


def _keeps_uniform(op: tf.Operation, inputs: typing.List[State], view: View) -> bool:
    """Whether an operation on single entries gives a uniform result: one of its inputs is uniform,
    and all others are single numbers, as in `2. * ones`.

    Args:
      op: the operation.
      inputs: the states of its inputs.
      view: `View`.
    """
    states_of_arrays = []  # of the inputs that are no single numbers
    for tensor, state in zip(op.inputs, inputs):
        is_single_number = view.rank(tensor) == 0
        if not is_single_number:
            states_of_arrays.append(state)
    return len(states_of_arrays) == 1 and states_of_arrays[0].is_uniform


def _marked_with_totals(row: Row, op: tf.Operation, inputs: typing.List[State], result: State,
                        view: View) -> State:
    """Marks a result with each mean, sum and share that it depends on otherwise than linearly.

    The inputs in `row.linear_in` are values, such as the means in `tf.stack([mean, other_mean])`;
    all others are arguments, such as an axis. A result that is a mean, a sum or a share itself is
    linear in the values: only its arguments mark it, since one that is computed from the examples
    chooses what is taken. Any other result is marked by values and arguments.

    Args:
      row: the row of the operation.
      op: the operation.
      inputs: the states of its inputs.
      result: the state of its result.
      view: `View`, in which the use of the means, sums and shares is noted.
    """
    if result.kind is Kind.UNKNOWN:
        return result
    places_of_values = range(len(inputs))[row.linear_in]
    values = [inputs[place] for place in places_of_values]
    arguments = [state for place, state in enumerate(inputs) if place not in places_of_values]
    # The number of examples n counts as a sum over them, and marks a result that has one value for
    # all examples. It marks no result that has a value of each example, which is right for n of
    # them alone: x [n * 4] in the shape [n, 4].
    if result.is_total_or_share or result.kind is Kind.INDEPENDENT:
        arguments = as_numbers(op, arguments, view)
    marking = arguments if result.is_total_or_share else values + arguments
    marks = marks_of_totals(op, marking, view, "depends on a value of all examples ('%s')")
    return result.with_marks_of(marks)


# ---- without a row -------------------------------------------------------------------------------

def _state_without_row(op: tf.Operation, states: typing.List[State], view: View) -> State:
    """The state of the results of an operation in no row of the table.

    Whatever it computes: from inputs that are the same on every tower comes what is the same, too;
    from those of one example, in a loop over the examples, what belongs to that example.

    Args:
      op: the operation.
      states: of its inputs.
      view: `View`.
    """
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    if op.type.startswith(_GIVES_OTHER_VALUES):
        return unknown(op, 'gives another value to each tower')
    if op.type.startswith(_PYTHON):
        return unknown(op, IS_PYTHON)
    is_random = graph_walk.is_random(op)
    keeps_values = view.is_stateful(op)  # TensorFlow says so of random numbers, too
    if keeps_values and op.type not in _KEEPS_KNOWN_VALUES and not is_random:
        return unknown(op, 'keeps values from run to run, of which nothing is known')
    numbers = as_numbers(op, states, view)
    kinds = {state.kind for state in numbers}
    if kinds <= {Kind.INDEPENDENT}:  # a constant, too, which has no inputs
        result = INDEPENDENT.with_marks_of(*numbers)
        # The graph as it was built alone asks whether a value is uniform (`State.is_uniform`).
        is_uniform = view.is_as_built and _is_uniform_constant(op)
        return result._replace(
            is_random=result.is_random or is_random, is_uniform=is_uniform)
    # Values that are kept may be those of other examples, from earlier iterations.
    if kinds <= {Kind.INDEPENDENT, Kind.ONE_EXAMPLE} and not keeps_values:
        return ONE_EXAMPLE.with_marks_of(*numbers)
    return unknown(op, HAS_NO_RULE)


def _is_uniform_constant(op: tf.Operation) -> bool:
    """Whether an operation is a constant of several entries, all of which are equal."""
    if op.type != 'Const' or op.outputs[0].shape.num_elements() == 1:
        return False
    value = tf.get_static_value(op.outputs[0])
    return value is not None and value.size > 1 and bool((value == value.flat[0]).all())
