"""Loops that may run as often as a static batch has examples.

A constant that decides how often a loop runs, and equals the static size of a batch, may be the
number of examples or a number of time steps: nothing in the graph tells. The condition that no
constant was computed from the size is false of a loop over the examples. So nothing is proven of a
loss that needs such a loop.

Its test is `tests/proof/test_static_batch.py`.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.states import RUNS_AS_OFTEN, Kind, Reason, State
from towers.proof.view import View


class _Condition(typing.NamedTuple):
    """What a loop asks before each iteration.

    Attributes:
      loop: the name of the operation of the program that runs the loop: the test of a loop of
        control flow v1; in v2 the loop, or the outermost loop or call that it is in.
      tensor: whether there is one more iteration.
    """
    loop: str
    tensor: tf.Tensor


def loops_of_size(view: View, batch_size: int) -> typing.Dict[str, Reason]:
    """Finds the loops that end by a constant which equals the size of the batch, as `i < 50` does
    for a batch of 50.

    Args:
      view: `View` of the forward pass.
      batch_size: the static number of examples.

    Returns:
      {`loop` of a `_Condition`: the constant, as the end of a proof}.
    """
    if batch_size < 2:  # every counter has the constants 0 and 1
        return {}
    found: typing.Dict[str, Reason] = {}
    decided_by = functools.partial(_decided_by, view)
    for condition in _conditions(view):
        for tensor in graph_walk.reached([condition.tensor], decided_by).values():
            if tensor.op.type == 'Const' and _is_scalar_of(tensor, batch_size):
                found[condition.loop] = Reason(tensor.op.name, tensor.op.type, RUNS_AS_OFTEN)
    return found


def _conditions(view: View) -> typing.List[_Condition]:
    """The conditions of all loops, those of loops in loops and in functions, too."""
    bodies = view.bodies
    conditions = []
    for op in view.graph.get_operations():
        if op.type == 'LoopCond':
            [condition] = op.inputs
            conditions.append(_Condition(bodies.outermost_call(condition.op.name), condition))
    for name, body in bodies.loops.items():
        conditions.append(_Condition(bodies.outermost_call(name), body.condition))
    return conditions


def _decided_by(view: View, tensor: tf.Tensor) -> typing.List[tf.Tensor]:
    """The whole numbers and truth values, the same on every tower, that a tensor is computed from.
    An argument of a loop's body (v2) is computed from its value before the loop."""
    sources = list(tensor.op.inputs)
    if tensor.op.name in view.bodies.initial_values:
        sources.append(view.bodies.initial_values[tensor.op.name])
    return [source for source in sources
            if _is_whole_number(source) and _is_alike(view.state_or_none(source))]


def _is_whole_number(tensor: tf.Tensor) -> bool:
    """Whether a tensor has whole numbers, or truth values."""
    return tensor.dtype.base_dtype.is_integer or tensor.dtype.base_dtype == tf.bool


def _is_alike(state: typing.Optional[State]) -> bool:
    """Whether a state is known, and is INDEPENDENT (the same on every tower) or SIZES."""
    return state is not None and state.kind in (Kind.INDEPENDENT, Kind.SIZES)


def _is_scalar_of(tensor: tf.Tensor, number: int) -> bool:
    """Whether a constant is a scalar with this number."""
    value = tf.get_static_value(tensor)
    return value is not None and not value.shape and value == number
