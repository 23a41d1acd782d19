"""The loops and branches of a scratch graph: which one an operation is in, and its condition.

In control flow v1 a loop is a ring of operations for each value that it carries:

    Enter -> Merge -> Switch -> body -> NextIteration -> back to the Merge
                            \\-> Exit

and a branch begins at a `Switch`, by its condition, and ends at a `Merge`. In control flow v2 both
are calls of functions (`functions`).
"""

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

NUMBER_OF_EXAMPLES = (Size(0, 1),)
"""The sizes of the scalar n, the number of examples."""


class Loop(typing.NamedTuple):
    """A loop of control flow v1."""
    is_over_examples: bool  # whether it has an iteration for each example, and counts them
    condition: State  # of the test for one more iteration


# ---- loops ---------------------------------------------------------------------------------------

def loop_of(op: tf.Operation, view: View) -> Loop:
    """The loop that a `Merge` or an `Exit` belongs to."""
    if op.type == 'Exit':
        op = op.inputs[0].op.inputs[0].op
    switches = [reader for reader in op.outputs[0].consumers()
                if reader.type in ('Switch', 'RefSwitch')]
    test = switches[0].inputs[1].op
    condition = test.inputs[0]
    state = view.states.get(condition.name, INDEPENDENT)
    return Loop(_counts_examples(condition, view), state)


def _counts_examples(condition: tf.Tensor, view: View):
    """Whether a test is that a counter from 0 on is below the number of examples."""
    if condition.op.type == 'LogicalAnd':
        return all(_counts_examples(each, view) for each in condition.op.inputs)
    if condition.op.type != 'Less':
        return False
    counter, limit = condition.op.inputs
    counter = graph_walk.source_through(counter, ('Identity',))
    limit_state = view.state_or_none(limit)
    if counter.op.type != 'Merge' or limit_state is None:
        return False
    back = back_edge(counter.op)
    if back is None or not is_counter(counter.op, back):
        return False
    return sizes_in(limit, limit_state, view) == NUMBER_OF_EXAMPLES


def back_edge(merge: tf.Operation) -> typing.Optional[tf.Tensor]:
    """The value that comes back to a `Merge` from the iteration before; None at a branch's end."""
    for tensor in merge.inputs:
        if tensor.op.type == 'NextIteration':
            return tensor
    return None


def is_counter(merge: tf.Operation, back: tf.Tensor) -> bool:
    """Whether a carried value is the number of the iteration: from 0, one more each time."""
    start = graph_walk.source_through(merge.inputs[0], ('Enter', 'Identity'))
    step = graph_walk.source_through(back, ('NextIteration', 'Identity'))
    if step.op.type not in ('Add', 'AddV2') or constant_of(start) != 0:
        return False
    carried, increment = step.op.inputs
    carried = graph_walk.source_through(carried, ('Identity', 'Switch'))
    increment = graph_walk.source_through(increment, HAND_ON_IN_LOOP)
    return carried.op is merge and constant_of(increment) == 1


def constant_of(tensor: tf.Tensor) -> typing.Optional[int]:
    """The value of a scalar constant that is whole; None for any other tensor."""
    value = tf.get_static_value(tensor)
    is_number = value is not None and not value.shape and np.isrealobj(value)
    if not is_number or not np.issubdtype(value.dtype, np.number):
        return None
    if not np.isfinite(value) or int(value) != value:
        return None
    return int(value)


def frame_is_over_examples(enter: tf.Operation, view: View) -> bool:
    """Whether the loop that a value enters has an iteration for each example."""
    merges = view.merges_of_frame(enter.get_attr('frame_name'))
    return any(loop_of(merge, view).is_over_examples for merge in merges)


def is_array_flow(tensor: tf.Tensor) -> bool:
    """Whether a tensor orders the operations on an array, and has no value of its own."""
    source = graph_walk.source_through(tensor, HAND_ON_IN_LOOP | {'Merge'})
    return source.op.type.startswith('TensorArray')


# ---- conditions ----------------------------------------------------------------------------------

def conditions_of(merge: tf.Operation, view: View) -> typing.List[typing.Optional[State]]:
    """The states of the conditions of the branches that end at a `Merge`; None of one that has none
    yet."""
    names = []
    for tensor in merge.inputs:
        if tensor.op.type in ('Switch', 'RefSwitch'):
            names.append(tensor.op.inputs[1].name)
            continue
        original = view.program_op(tensor.op)
        condition = None if original is None else compat.condition_around(original)
        if condition is not None and view.has_operation(condition.op.name):
            names.append(condition.name)
    return [view.states.get(name) for name in dict.fromkeys(names)]


def conditions_around(op: tf.Operation, view: View) -> typing.List[State]:
    """The states of the conditions of all branches and loops around an operation, as numbers."""
    found = [state for name, state in _conditions_of_calls(view)
             if op.name.startswith(name + '/')]
    outermost = view.graph.get_operation_by_name(view.bodies.callers.get(op.name, op.name))
    original = view.program_op(outermost)
    names = [] if original is None else compat.conditions_around(original)
    found += [view.states[name] for name in names if name in view.states]
    if op.name in view.bodies.callers and _is_behind_choice(op, view):
        found.append(unknown(op, 'is in a branch or a loop in the body of a function'))
    return as_numbers(op, found, view)


def _is_behind_choice(op: tf.Operation, view: View) -> bool:
    """Whether a branch or a loop of control flow v1, in the body of a function, may decide whether
    an operation runs."""
    def inputs_in_bodies(inner):
        return [source for source in graph_walk.inputs_of(inner)
                if source.name in view.bodies.callers]
    before = graph_walk.reached([op], inputs_in_bodies).values()
    return any(each.type in CONTROL_FLOW for each in before)


def _conditions_of_calls(view: View):
    """`[(name of a branch or loop of control flow v2, state of its condition)]`."""
    conditions = [(name, loop.condition) for name, loop in view.bodies.loops.items()]
    for name in view.bodies.results:
        call = view.graph.get_operation_by_name(name)
        if call.type in BRANCHES_V2:
            conditions.append((name, call.inputs[0]))
    return [(name, view.states[tensor.name]) for name, tensor in conditions
            if tensor.name in view.states]
