"""The loops and branches of a scratch graph: which one an operation is in, and its condition.

In control flow v1 a loop is a ring of operations for each value that it carries:

    Enter -> Merge -> Switch -> body -> NextIteration -> back to the Merge
                            \\-> Exit

and a branch begins at a `Switch`, by its condition, and ends at a `Merge`. In control flow v2 both
are calls of functions (`functions`).

A loop over the examples has an iteration for each of them: a counter goes from 0 to their number.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.op_types import BRANCHES_V2, CONTROL_FLOW
from towers.proof.sizes import as_numbers, sizes_in
from towers.proof.states import INDEPENDENT, Size, State, unknown
from towers.proof.view import View

HAND_ON_IN_LOOP = frozenset(['Identity', 'Enter', 'RefEnter', 'Exit', 'Switch', 'NextIteration'])
"""The types of the operations of a loop that hand a value on as it is."""

_SWITCHES = ('Switch', 'RefSwitch')

NUMBER_OF_EXAMPLES = (Size(constant=0, per_example=1),)
"""The sizes of the scalar n, the number of examples."""


class Loop(typing.NamedTuple):
    """A loop of control flow v1."""
    is_over_examples: bool  # whether it has an iteration for each example, and counts them
    condition: State  # of the test for one more iteration


# ---- loops ---------------------------------------------------------------------------------------

def loop_of(op: tf.Operation, view: View) -> Loop:
    """The loop that a `Merge` or an `Exit` belongs to."""
    condition = _condition_of_loop(op, view)
    # In the first round the condition comes after the loop's `Merge`s, and has no state yet: it
    # counts as INDEPENDENT. The state that it gets then reaches the `Merge`s in the next round.
    state = view.states.get(condition.name, INDEPENDENT)
    return Loop(is_over_examples=_counts_examples(condition, view), condition=state)


def _condition_of_loop(op: tf.Operation, view: View) -> tf.Tensor:
    """The condition of the loop that a `Merge` or an `Exit` belongs to.

        Enter -> Merge -> Switch(value, LoopCond(condition)) -> Exit
    """
    if op.type == 'Exit':
        switch = op.inputs[0].op
    else:
        switch = _switch_of_loop(op, view)
    loop_cond = switch.inputs[1].op
    return loop_cond.inputs[0]


def _switch_of_loop(merge: tf.Operation, view: View) -> tf.Operation:
    """A `Switch` of the loop that a `Merge` belongs to, of any value that the loop carries: every
    `Switch` of the loop has the loop's condition.

    The `Merge` may have no `Switch` of its own. The scratch graph has only operations that the
    outputs need: of a value that the condition alone reads, as the residual in
    `while residual > tolerance`, it has the `Merge`, and not the `Switch` behind it.
    """
    enter = merge.inputs[0].op
    merges = view.merges_of_frame(enter.get_attr('frame_name'))
    takers = itertools.chain.from_iterable(each.outputs[0].consumers() for each in merges)
    return graph_walk.of_types(takers, _SWITCHES)[0]


def _counts_examples(condition: tf.Tensor, view: View) -> bool:
    """Whether a test is that a counter from 0 on is below the number of examples.

    `tf.map_fn` makes two such tests: `i < n and i_of_arrays < n`.
    """
    if condition.op.type == 'LogicalAnd':
        return all(_counts_examples(part, view) for part in condition.op.inputs)
    if condition.op.type != 'Less':
        return False
    counter, limit = condition.op.inputs
    merge = graph_walk.source_through(counter, ('Identity',)).op
    limit_sizes = sizes_in(limit, view.state_so_far(limit), view)
    return is_counter(merge) and limit_sizes == NUMBER_OF_EXAMPLES


def back_edge(merge: tf.Operation) -> typing.Optional[tf.Tensor]:
    """The value that comes back to a `Merge` from the iteration before; None for a `Merge` that
    ends branches, and for other operations, none of which takes the result of a `NextIteration`."""
    for tensor in merge.inputs:
        if tensor.op.type == 'NextIteration':
            return tensor
    return None


def is_counter(merge: tf.Operation) -> bool:
    """Whether an operation is the `Merge` at which the iterations of a counter begin: of a carried
    value that is the number of the iteration, from 0, one more each time."""
    back = back_edge(merge)
    if back is None:
        return False
    before_loop = merge.inputs[0]
    start = graph_walk.source_through(before_loop, ('Enter', 'Identity'))
    step = graph_walk.source_through(back, ('NextIteration', 'Identity'))
    if step.op.type not in ('Add', 'AddV2') or constant_of(start) != 0:
        return False
    carried, increment = step.op.inputs
    carried = graph_walk.source_through(carried, ('Identity', 'Switch'))
    increment = graph_walk.source_through(increment, HAND_ON_IN_LOOP)
    return carried.op is merge and constant_of(increment) == 1


def constant_of(tensor: tf.Tensor) -> typing.Optional[int]:
    """The value of a scalar constant that is a whole number; None for any other tensor."""
    value = tf.get_static_value(tensor)
    if value is None or value.shape:
        return None
    is_real = np.issubdtype(value.dtype, np.number) and np.isrealobj(value)
    is_whole = is_real and float(value).is_integer()  # False for infinity
    return int(value) if is_whole else None


def frame_is_over_examples(enter: tf.Operation, view: View) -> bool:
    """Whether the loop that a value enters has an iteration for each example.

    Args:
      enter: the `Enter`, by which the value comes into the loop.
      view: `View`.
    """
    merges = view.merges_of_frame(enter.get_attr('frame_name'))
    return any(loop_of(merge, view).is_over_examples for merge in merges)


def is_array_flow(tensor: tf.Tensor) -> bool:
    """Whether a tensor orders the operations on an array, and has no value of its own. What is read
    of an array (`TensorArrayReadV3`) is a value."""
    return all(source.op.type in _MAKE_FLOWS for source in sources_of_carried(tensor))


_MAKE_FLOWS = frozenset(['TensorArrayV3', 'TensorArrayWriteV3', 'TensorArrayScatterV3'])
"""The types of the operations on arrays that give a flow. `TensorArrayV3` also gives the handle of
the array."""


def sources_of_carried(tensor: tf.Tensor) -> typing.List[tf.Tensor]:
    """The tensors that a tensor may be, through branches and iterations that hand them on."""
    def handed_on(tensor: tf.Tensor) -> typing.List[tf.Tensor]:
        """The tensors that a tensor may be handed on from: both inputs, for a `Merge`."""
        inputs = list(tensor.op.inputs)
        if tensor.op.type == 'Merge':
            return inputs
        if tensor.op.type in HAND_ON_IN_LOOP:
            return inputs[:1]
        return []

    found = graph_walk.reached([tensor], handed_on).values()
    return [source for source in found if not handed_on(source)]


# ---- conditions ----------------------------------------------------------------------------------

def conditions_of(merge: tf.Operation, view: View) -> typing.List[typing.Optional[State]]:
    """The states of the conditions of the branches that end at a `Merge`, each once.

    Returns:
      List of states, with a None for a state that is not there yet; [] where no condition is known.
    """
    names = dict.fromkeys(_condition_of_branch(tensor.op, view) for tensor in merge.inputs)
    return [view.states.get(name) for name in names if name is not None]


def _condition_of_branch(op: tf.Operation, view: View) -> typing.Optional[str]:
    """The name of the condition of the branch that an operation gives the result of; None for an
    operation in no branch, or for a condition from outside of the forward pass."""
    if op.type in _SWITCHES:  # a branch that hands its input on
        return op.inputs[1].name
    original = view.program_op(op)  # an import loses the contexts of branches
    if original is None:
        return None
    condition = compat.condition_around(original)
    if condition is None or not view.has_operation(condition.op.name):
        return None
    return condition.name


def conditions_around(op: tf.Operation, view: View) -> typing.List[State]:
    """The states of the conditions of all branches and loops around an operation, which decide
    whether the operation runs, and how often. Sizes in conditions are taken as numbers.

    For an operation in the body of a function these are the conditions around the calls that run
    it; the condition of a branch or a loop of control flow v1 within the body is unknown.
    """
    names = _conditions_around_v2(op, view) + _conditions_around_v1(op, view)
    # A condition without a state is from outside of the forward pass, or not reached in this round.
    found = [view.states[name] for name in names if name in view.states]
    if view.bodies.is_in_body(op.name) and _is_behind_choice(op, view):
        found.append(unknown(op, 'is in a branch or a loop in the body of a function'))
    return as_numbers(op, found, view)


def _conditions_around_v2(op: tf.Operation, view: View) -> typing.List[str]:
    """The names of the conditions of the branches and loops whose bodies an operation is in."""
    return [call.condition.name for call in _branches_and_loops_v2(view)
            if op.name.startswith(call.name + '/')]  # a body has the name scope of its call


def _conditions_around_v1(op: tf.Operation, view: View) -> typing.List[str]:
    """The names of the conditions of the branches and loops of the program that an operation is in.
    An operation in the body of a function is in the branches and loops that its outermost call is
    in."""
    call = view.graph.get_operation_by_name(view.bodies.outermost_call(op.name))
    original = view.program_op(call)  # an import loses the contexts of branches and loops
    return [] if original is None else list(compat.conditions_around(original))


def _is_behind_choice(op: tf.Operation, view: View) -> bool:
    """Whether a branch or a loop of control flow v1, in the body of a function, may decide whether
    an operation of the body runs. An imported body has no contexts that would tell: so this is true
    if the operation waits for any operation of control flow."""
    def inputs_in_bodies(inner: tf.Operation) -> typing.List[tf.Operation]:
        """The operations in bodies that an operation of a body waits for."""
        names_in_bodies = view.bodies.outermost_calls
        return graph_walk.with_names(graph_walk.inputs_of(inner), names_in_bodies)

    before = graph_walk.reached([op], inputs_in_bodies).values()
    return bool(graph_walk.of_types(before, CONTROL_FLOW))


class _CallByCondition(typing.NamedTuple):
    """A branch or a loop of control flow v2."""
    name: str  # of the call
    condition: tf.Tensor


def _branches_and_loops_v2(view: View) -> typing.List[_CallByCondition]:
    """The branches and loops of control flow v2 of a scratch graph."""
    calls = []
    for name, loop in view.bodies.loops.items():
        calls.append(_CallByCondition(name, loop.condition))
    for name in view.bodies.branch_results:
        call = view.graph.get_operation_by_name(name)
        if call.type in BRANCHES_V2:  # not the call of a function, which has no condition
            calls.append(_CallByCondition(name, call.inputs[0]))
    return calls
