"""The states of an operation's results by the table of rules: by its row, or without one.

A rule answers for the operation itself. What all rules have in common is done here, as the flags of
the row say: inputs for which the rule has no answer are found; sizes are taken as numbers; the
result gets the marks of the inputs, and a mark for each mean and sum that it depends on otherwise
than linearly.

Words of other modules used here: the fields of `Row`, which `table` explains; of a state,
`is_total_or_share`: a mean, a sum or a share, and `is_position`: positions of examples;
`as_numbers`: the states where sizes are taken as numbers, n as a sum over the examples;
`NotKnown`, which a rule raises where something that it needs is not known.
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
    PerhapsStates,
    State,
    first_unknown,
    if_complete,
    known_states,
    unknown,
)
from towers.proof.table import RULES, Row
from towers.proof.view import View

Results = typing.Union[State, typing.List[State], None]
"""One state for all results, or a list with a state for each result; None as long as a state that
is needed for them is not there."""

_GIVES_OTHER_VALUES = (
    'IteratorGetNext', 'QueueDequeue', 'ReaderRead', 'Unstage', 'OrderedMap', 'Barrier')
_PYTHON = ('PyFunc', 'EagerPyFunc')
"""The types of operations that give another value at each run, and so another value to each tower,
begin like this."""

_KEEPS_KNOWN_VALUES = frozenset(
    'HashTable HashTableV2 InitializeTable InitializeTableV2 InitializeTableFromTextFile '
    'InitializeTableFromTextFileV2 LookupTableSize LookupTableSizeV2 LookupTableImport '
    'LookupTableImportV2 VarIsInitializedOp IsVariableInitialized VariableShape Assert'.split()
) | VARIABLE_OPS | READS | SETS | ADDS | ADDS_ROWS | frozenset(CALLS)
"""The types of operations that keep values from one run to the next, where the values are the same
on every tower: tables, if no step fills them (`View.fills_tables`); and variables, since
`written_before` takes care of the variables that the forward pass writes."""


def states_by_table(op: tf.Operation, states: PerhapsStates, view: View) -> Results:
    """The states of the results of an operation, by its row of the table or without one.

    Args:
      op: an operation of the scratch graph.
      states: the states of its inputs.
      view: `View`.
    """
    if op.type not in _LIST_OPS_WITH_RULE and _takes_or_gives_list(op):
        return unknown(op, HAS_NO_RULE)
    if op.type.startswith('LookupTable') and view.fills_tables:
        return unknown(op, 'looks up a table to which a step may write')
    row = RULES.get(op.type)
    if row is not None and _can_begin(op, states):
        return states_by_row(row, op, states, view)
    known = if_complete(states)
    if known is None:  # an input has no state yet
        return None
    if row is None:
        return _state_without_row(op, known, view)
    return states_by_row(row, op, known, view)


_LIST_OPS_WITH_RULE = frozenset(
    'Identity Enter Exit Switch Merge NextIteration TensorListReserve TensorListFromTensor '
    'TensorListLength TensorListGetItem TensorListSetItem TensorListStack'.split())
"""The types of the operations on lists of tensors for which a rule knows the length of the list
and the state of its elements. Calls and loops (v2) are not among them: `transfer` goes by their
bodies."""


def _takes_or_gives_list(op: tf.Operation) -> bool:
    """Whether an input or a result of an operation is a list of tensors, or another value of the
    type `tf.variant`."""
    tensors = itertools.chain(op.inputs, op.outputs)
    return any(tensor.dtype == tf.variant for tensor in tensors)


def _can_begin(op: tf.Operation, states: PerhapsStates) -> bool:
    """Whether an operation has results as soon as one input has a state: a `Merge`, whose other
    input comes back from an iteration of its loop later."""
    return op.type in ('Merge', 'RefMerge') and bool(known_states(states))


# ---- by a row ------------------------------------------------------------------------------------

def states_by_row(row: Row, op: tf.Operation, states: PerhapsStates, view: View) -> Results:
    """The states that a row gives for the results of an operation.

    Args:
      row: the row of the operation.
      op: the operation.
      states: the states of its inputs; an input of a `Merge` that comes back from an iteration may
        have none.
      view: `View`.
    """
    inputs = known_states(states)
    without_answer = _state_without_answer(row, op, inputs)
    if without_answer is not None:
        return without_answer
    sizes = _sizes_of_results(row, op, inputs, view)
    if sizes is not None:
        return _completed_results(row, op, inputs, sizes, view)
    if not row.takes_sizes:
        inputs = as_numbers(op, inputs, view)
    # A rule that takes unknown states gets the states of all inputs as they are: None for a state
    # that is not there yet, and sizes as sizes, even without `takes_sizes`.
    answer = _answer(row, op, states if row.takes_unknown else inputs, view)
    if answer is None:  # the rule needs a state that is not there yet
        return None
    if not row.keeps_marks:  # the rule of control flow has marked its answer itself
        return answer
    return _completed_results(row, op, inputs, answer, view)


def _sizes_of_results(row: Row, op: tf.Operation, states: typing.List[State],
                      view: View) -> Results:
    """The sizes of the results of an operation on sizes, or on static integers; None where the
    results are no sizes, so that its rule is to be asked.

    Args:
      row: the row of the operation.
      op: the operation.
      states: the states of its inputs.
      view: `View`.
    """
    if row.of_sizes is None:
        return None
    try:
        return row.of_sizes(op, states, view)
    except NotKnown:
        return None


def _answer(row: Row, op: tf.Operation, states: PerhapsStates, view: View) -> Results:
    """What the rule of a row says of the results; an unknown state, where the rule finds that
    something it needs is not known (`NotKnown`).

    Args:
      row: the row.
      op: the operation.
      states: the states of its inputs, as the rule takes them.
      view: `View`.
    """
    try:
        return row.rule(op, states, view)
    except NotKnown as end_of_proof:
        return end_of_proof.state


def _state_without_answer(row: Row, op: tf.Operation,
                          states: typing.List[State]) -> typing.Optional[State]:
    """The state of the results where an input is in a state for which the rule has no answer.

    Args:
      row: the row with the rule.
      op: the operation.
      states: the states of its inputs, as far as they are there.

    Returns:
      The state; None where the rule is to be asked.
    """
    for state in states:
        if state.kind is Kind.UNKNOWN and not row.takes_unknown:
            return state
        if state.is_position and not row.takes_positions:
            return unknown(op, COMPUTES_WITH_POSITIONS)
    return None


def _completed_results(row: Row, op: tf.Operation, inputs: typing.List[State],
                       answer: typing.Union[State, typing.List[State]], view: View) -> Results:
    """The states of the results: those that the row gives, each completed as `_completed` says."""
    if isinstance(answer, State):  # one state for all results
        return _completed(row, op, inputs, answer, view)
    return [_completed(row, op, inputs, state, view) for state in answer]


def _completed(row: Row, op: tf.Operation, inputs: typing.List[State], result: State,
               view: View) -> State:
    """The state of a result: the state that the rule gives, completed.

    A rule need not look at the values of one example, at uniform results, and at the marks that a
    result gets from its inputs. All of this is done here.

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
    """Whether an operation, in a loop over the examples, takes the values of one example, and
    beside them only values that are the same for all examples: then its result is of that example,
    whatever it computes.

    An operation that keeps values, or takes a variable or a list of tensors, may bring in values of
    other examples. An operation of control flow may bring in values of another iteration.
    """
    if view.is_stateful(op) or op.type in CONTROL_FLOW:
        return False
    types = {tensor.dtype for tensor in itertools.chain(op.inputs, op.outputs)}
    takes_handle_or_list = not types.isdisjoint([tf.resource, tf.variant])
    if takes_handle_or_list:
        return False
    kinds = {_kind_in_iteration(state) for state in inputs}
    return Kind.ONE_EXAMPLE in kinds and kinds <= {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}


def _kind_in_iteration(state: State) -> Kind:
    """The kind of a state; INDEPENDENT for constant sizes, which are the same for all examples."""
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
    all others are arguments, such as an axis, or the place from which `tf.gather` takes a mean. A
    result that is a mean, a sum or a share itself is linear in the values, so that its arguments
    alone mark it: a place that is a sum over the examples is another place on a shard. Any other
    result is marked by values and arguments.

    Args:
      row: the row of the operation.
      op: the operation.
      inputs: the states of its inputs.
      result: the state of its result.
      view: `View`, in which the use of the means, sums and shares is noted.
    """
    if result.kind is Kind.UNKNOWN:
        return result
    values = inputs[row.linear_in]
    arguments = list(inputs)
    del arguments[row.linear_in]
    # An argument with the number of examples n in it counts as a sum over the examples, where the
    # result has one value for all examples. Where the result has a value of each example, it does
    # not: to reshape x [n * 4] to [n, 4] is right with the n of a shard as well.
    if result.is_total_or_share or result.kind is Kind.INDEPENDENT:
        arguments = as_numbers(op, arguments, view)
    marking = arguments if result.is_total_or_share else values + arguments
    marks = marks_of_totals(op, marking, view, 'depends on a value of all examples (%s)')
    return result.with_marks_of(marks)


# ---- without a row -------------------------------------------------------------------------------

def _state_without_row(op: tf.Operation, states: typing.List[State], view: View) -> State:
    """The state of the results of an operation in no row of the table.

    Whatever the operation computes: where its inputs are the same on every tower, its results are
    the same on every tower. Where its inputs are values of one example, in a loop over the
    examples, its results belong to that example.

    Args:
      op: the operation.
      states: the states of its inputs.
      view: `View`.
    """
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    why_unknown = _why_unknown(op, view)
    if why_unknown is not None:
        return unknown(op, why_unknown)
    numbers = as_numbers(op, states, view)
    kinds = {state.kind for state in numbers}
    if kinds <= {Kind.INDEPENDENT}:  # also for a constant, which has no inputs
        return _independent_result(op, numbers, view)
    # A stateful operation may have kept values of other examples, from earlier iterations.
    if kinds <= {Kind.INDEPENDENT, Kind.ONE_EXAMPLE} and not view.is_stateful(op):
        return ONE_EXAMPLE.with_marks_of(*numbers)
    return unknown(op, HAS_NO_RULE)


def _why_unknown(op: tf.Operation, view: View) -> typing.Optional[str]:
    """Why nothing is known of the results of an operation in no row, whatever its inputs are; None
    where the inputs tell."""
    if op.type.startswith(_GIVES_OTHER_VALUES):
        return 'gives another value to each tower'
    if op.type.startswith(_PYTHON):
        return IS_PYTHON
    # An operation that draws random numbers is stateful only in that it keeps its generator.
    keeps_values = view.is_stateful(op) and not graph_walk.is_random(op)
    if keeps_values and op.type not in _KEEPS_KNOWN_VALUES:
        return 'keeps values from run to run, of which nothing is known'
    return None


def _independent_result(op: tf.Operation, states: typing.List[State], view: View) -> State:
    """The state of the results of an operation whose inputs are the same on every tower.

    Args:
      op: the operation.
      states: the states of its inputs, all of the kind INDEPENDENT.
      view: `View`.
    """
    result = INDEPENDENT.with_marks_of(*states)
    is_random = result.is_random or graph_walk.is_random(op)
    # Only rules for the graph as it was built ask whether a value is uniform (`State.is_uniform`).
    is_uniform = view.is_as_built and _is_uniform_constant(op)
    return result._replace(is_random=is_random, is_uniform=is_uniform)


def _is_uniform_constant(op: tf.Operation) -> bool:
    """Whether an operation is a constant of several entries, all of which are equal."""
    if op.type != 'Const' or op.outputs[0].shape.ndims == 0:
        return False
    value = tf.get_static_value(op.outputs[0])
    return value.size > 1 and bool((value == value.flat[0]).all())
