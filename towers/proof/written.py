"""The values that a forward pass and its updates write to variables, and how they came about."""

import enum
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import ADDS, QUOTIENTS, SETS, is_fused_batch_norm
from towers.graph.variable_access import variable_op
from towers.proof.contexts import conditions_around
from towers.proof.states import Kind, State, unknown
from towers.proof.view import View


class Dependence(enum.Enum):
    """How a value depends on the value that a variable has before."""
    NONE = 'it does not'
    RUNNING_SUM = 'it is added as it is, so that the value is a running sum'
    LINEAR = 'linearly, as a moving average does'
    OTHER = 'otherwise'


class Written(typing.NamedTuple):
    """A write of a variable."""
    # name of the operation that writes; in a function, of the one in its body
    operation: str
    # its type
    type: str
    # name of the variable
    variable: str
    # the state of what is set, or added, or of the rows that are
    value: State
    # the state of the indices of the rows that are written; None where the whole variable is
    indices: typing.Optional[State]
    # how the value depends on the variable's value before
    dependence: Dependence
    # whether the value is a single number
    is_scalar: bool
    # the value, where it is a static scalar
    constant: typing.Optional[float]

    @property
    def sets(self) -> bool:
        """Whether the variable is set, not added to."""
        return self.type in SETS


def written_by(op: tf.Operation, view: View) -> typing.Optional[Written]:
    """The write that an operation of the scratch graph is; None for any other operation."""
    is_of_rows = 'Scatter' in op.type
    is_write = is_of_rows or op.type in ADDS or op.type in SETS
    if not is_write or not op.inputs:
        return None
    variable = variable_op(op.inputs[0])
    if variable is None:  # what a row is written to may be a tensor: `tf.scatter_nd`
        return None
    indices = None
    if is_of_rows:
        value = op.inputs[2]
        indices = view.state(op.inputs[1])
        dependence = Dependence.NONE  # of rows it is not looked for
    else:
        value = op.inputs[1]
        dependence = _dependence(value, variable.name, view)
    number = view.value(value)
    constant = None
    if number is not None and np.ndim(number) == 0:
        constant = float(number)
    return Written(
        operation=op.name, type=op.type, variable=variable.name,
        value=_in_its_branch(op, view.state(value), view), indices=indices,
        dependence=dependence, is_scalar=view.rank(value) == 0, constant=constant)


def _in_its_branch(op: tf.Operation, value: State, view: View) -> State:
    """The state of a value that an operation writes, by the branches and loops that it is in: a
    condition of the examples decides on each tower by itself whether it is written.

    Args:
      op: the operation.
      value: the state of the value itself.
      view: `View`.
    """
    for condition in conditions_around(op, view):
        if condition.kind is not Kind.INDEPENDENT:
            return unknown(op, 'is in a branch or a loop that depends on the examples')
        value = value.with_marks_of(condition)
    return value


# ---- how a value depends on the variable's value before ------------------------------------------

# Operations that hand the value of an input on, or add other values to it.
_HAND_ON = frozenset('Identity Cast StopGradient Reshape ExpandDims Squeeze Switch RefSwitch '
                     'Add AddV2 AddN Sub Merge RefMerge Select SelectV2 Enter'.split())


def _dependence(tensor: tf.Tensor, variable: str, view: View) -> Dependence:
    """How a value depends on the value that a variable had before, through operations on statistics
    and weights.

    `v * 0.9 + mean * 0.1` is linear in v, `v + total` is a running sum, `v * v` is neither. A value
    of single examples ends the search: what follows from it is a statistic of them, even if the
    variable went into it.

    Args:
      tensor: the value.
      variable: the name of the variable.
      view: `View`.
    """
    if variable in view.variables_read(tensor):
        return Dependence.RUNNING_SUM  # v itself is v + 0
    op = tensor.op
    state = view.state(tensor)
    if state.is_by_example or state.kind is Kind.UNKNOWN or not op.inputs:
        return Dependence.NONE
    # Around a loop the value counts as one that does not depend on the variable, while it is found.
    dependences = [view.remembered(_dependence, source, variable, meanwhile=Dependence.NONE)
                   for source in _sources(tensor, view)]
    return _combined(op, dependences, view)


def _combined(op: tf.Operation, dependences: typing.List[Dependence], view: View) -> Dependence:
    """How the results of an operation depend on a variable, by how its inputs do.

    Args:
      op: the operation.
      dependences: how each of its inputs depends on the variable.
      view: `View`.
    """
    found = [dependence for dependence in dependences if dependence is not Dependence.NONE]
    if not found:
        return Dependence.NONE
    if Dependence.OTHER in found:
        return Dependence.OTHER
    # A call gives the result of a branch; a batch norm the average that it takes.
    hands_on = op.type in _HAND_ON or op.name in view.bodies.results or (
        is_fused_batch_norm(op.type))
    if not hands_on:
        return Dependence.LINEAR if _is_linear(op, dependences, view) else Dependence.OTHER
    is_subtracted = op.type == 'Sub' and dependences[0] is Dependence.NONE
    if found == [Dependence.RUNNING_SUM] and not is_subtracted:
        return Dependence.RUNNING_SUM
    return Dependence.LINEAR


def _is_linear(op: tf.Operation, dependences: typing.List[Dependence], view: View) -> bool:
    """Whether an operation is linear in the only one of its inputs that depends on the variable.

    In a product or a quotient, the other factor has to be the same on every tower: `v * 0.9`, but
    not `v * mean`, which is no average of v and of a statistic.

    Args:
      op: the operation.
      dependences: how each of its inputs depends on the variable.
      view: `View`.
    """
    if op.type == 'Neg':
        return True
    if op.type in QUOTIENTS:
        is_in_one_factor = dependences[1] is Dependence.NONE  # not in the divisor
    else:
        is_in_one_factor = op.type == 'Mul' and dependences.count(Dependence.NONE) == 1
    factors = [view.state(tensor) for tensor, dependence in zip(op.inputs, dependences)
               if dependence is Dependence.NONE]
    return is_in_one_factor and all(_is_shared(factor) for factor in factors)


def _is_shared(factor: State) -> bool:
    """Whether a factor is the same on every tower, whatever the number of their examples."""
    if factor.kind is Kind.SIZES:
        return not factor.depends_on_size
    return factor.is_alike_on_towers


def _sources(tensor: tf.Tensor, view: View) -> typing.List[tf.Tensor]:
    """The tensors that a value is computed from: of a call, the results of its branches; of a batch
    norm in one kernel, the moving average that it hands on outside of training, if it does."""
    op = tensor.op
    branches = view.bodies.results.get(op.name)
    if branches is not None:
        return [results[tensor.value_index] for results in branches]
    if not is_fused_batch_norm(op.type):
        return list(op.inputs)
    # Results 1 and 2 are the mean and the variance; inputs 3 and 4 are their averages.
    hands_on_average = not op.get_attr('is_training') and tensor.value_index in (1, 2)
    if not hands_on_average:
        return []
    return [op.inputs[tensor.value_index + 2]]
