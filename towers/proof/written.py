"""The values that a forward pass and its updates write to variables, and how they came about."""

import enum
import typing

import numpy as np

from towers.graph.op_types import ADDS, QUOTIENTS, SETS, is_fused_batch_norm
from towers.graph.variable_access import variable_op
from towers.proof.states import Kind, State, unknown


class Own(enum.Enum):
    """How a written value depends on the variable's value before."""
    NOT = 'it does not'
    WHOLE = 'it is added as it is, so that the value is a running sum'
    LINEAR = 'linearly, as a moving average does'
    OTHERWISE = 'otherwise'


class Written(typing.NamedTuple):
    """A write of a variable."""
    operation: str  # name of the operation that writes; in a function, of the one in its body
    type: str
    variable: str  # name of the variable
    value: State  # of what is set, or added, or of the rows
    places: typing.Optional[State]  # of the places of rows; None where all is written
    own: Own  # how the value depends on the variable's value before
    constant: typing.Optional[float]  # the value, where it is a static scalar

    @property
    def sets(self) -> bool:
        """Whether the variable is set, not added to."""
        return self.type in SETS


def written_by(op, walk) -> typing.Optional[Written]:
    """The write that an operation of the scratch graph is; None for any other operation."""
    is_rows = 'Scatter' in op.type
    if not (is_rows or op.type in ADDS or op.type in SETS) or not op.inputs:
        return None
    variable = variable_op(op.inputs[0])
    if variable is None:
        return None
    value = op.inputs[2 if is_rows else 1]
    own = Own.NOT if is_rows else _dependence(value, variable.name, walk)
    places = walk.state(op.inputs[1]) if is_rows else None
    constant = walk.value(value)
    if constant is not None:
        constant = float(constant) if np.ndim(constant) == 0 else None
    state = walk.state(value)
    for condition in walk.conditions_around(op):
        if condition.kind is not Kind.INDEPENDENT:
            state = unknown(op, 'is in a branch or a loop that depends on the examples')
            break
        state = state.marked([condition])
    return Written(op.name, op.type, variable.name, state, places, own, constant)


_HAND_ON = frozenset('Identity Cast StopGradient Reshape ExpandDims Squeeze Switch RefSwitch '
                     'Add AddV2 AddN Sub Merge RefMerge Select SelectV2 Enter'.split())


def _dependence(tensor, variable, walk):
    """How a value depends on the value of a variable, by operations on statistics and weights. A
    value of single examples ends the search: what follows from it is a statistic of them, even if
    the variable went into it."""
    op, state = tensor.op, walk.state(tensor)
    if variable in walk.variables_read(tensor):
        return Own.WHOLE
    if state.is_by_example or state.reason is not None or not op.inputs:
        return Own.NOT
    inputs = _inputs_of_value(tensor, walk)
    found = [walk.remembered(_dependence, each, variable, Own.NOT) for each in inputs]
    dependent = [each for each in found if each is not Own.NOT]
    if not dependent:
        return Own.NOT
    if Own.OTHERWISE in dependent:
        return Own.OTHERWISE
    hands_on = op.type in _HAND_ON or walk.bodies_of(op) is not None or is_fused_batch_norm(op.type)
    if hands_on:
        is_whole = dependent == [Own.WHOLE] and not (op.type == 'Sub' and found[0] is Own.NOT)
        return Own.WHOLE if is_whole else Own.LINEAR
    is_product = op.type == 'Mul' and len(dependent) == 1
    is_quotient = op.type in QUOTIENTS and found[1] is Own.NOT
    if op.type == 'Neg' or is_product or is_quotient:
        return Own.LINEAR
    return Own.OTHERWISE


def _inputs_of_value(tensor, walk):
    """The tensors that a value is computed from; of a batch norm, the averages it hands on."""
    op = tensor.op
    bodies = walk.bodies_of(op)
    if bodies is not None:
        return [results[tensor.value_index] for results in bodies]
    if not is_fused_batch_norm(op.type):
        return list(op.inputs)
    hands_on = not op.get_attr('is_training') and tensor.value_index in (1, 2)
    return [op.inputs[tensor.value_index + 2]] if hands_on else []
