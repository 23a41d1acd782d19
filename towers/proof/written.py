"""The values that a forward pass and its updates write to variables, and how they came about.

`roles.written_values` decides by this who has to write a variable: a moving average, say, is linear
in the value that the variable had before.

Words of other modules used here: `SETS`, `ADDS`, `SETS_ROWS`, `ADDS_ROWS`, `WRITES_ROWS`: the
types of the operations that set a variable, add to it, set rows of it, add to rows of it, or write
rows of it in any way;
`QUOTIENTS`: those that divide their first input by the second; `Writes.written_by`: the variables
that any operation may write; `bodies.branch_results`: the results of the functions that a call may
run.
"""

import enum
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import (
    ADDS,
    ADDS_ROWS,
    QUOTIENTS,
    SETS,
    SETS_ROWS,
    WRITES_ROWS,
    is_fused_batch_norm,
)
from towers.graph.variable_access import Writes, is_variable, variable_op
from towers.proof.contexts import conditions_around
from towers.proof.states import INDEPENDENT, Kind, State, unknown
from towers.proof.view import View


class Dependence(enum.Enum):
    """How a value depends on the value that a variable has before."""
    NONE = 'it does not'
    RUNNING_SUM = 'it is added as it is, so that the value is a running sum'
    LINEAR = 'linearly, as a moving average does'
    OTHER = 'otherwise'


class Written(typing.NamedTuple):
    """A write of a variable."""
    # name of the operation that writes; in a function, of the operation in its body
    operation: str
    # its type
    type: str
    # name of the variable
    variable: str
    # the state of the value, or of the rows, that are set or added
    value: State
    # the state of the indices of the rows that are written; None if the whole variable is written
    indices: typing.Optional[State]
    # whether rows are written in the order of the examples; False if the whole variable is written
    is_in_order: bool
    # how the value depends on the variable's value before
    dependence: Dependence
    # whether the value is a single number
    is_scalar: bool
    # the value, where it is a static scalar
    constant: typing.Optional[float]

    @property
    def states(self) -> typing.List[State]:
        """The states of all that decides the write: the value, and the indices of rows."""
        if self.indices is None:
            return [self.value]
        return [self.value, self.indices]

    @property
    def sets(self) -> bool:
        """Whether the variable is set, not added to."""
        return self.type in SETS

    @property
    def sets_rows(self) -> bool:
        """Whether rows of the variable are set: of a row that is set twice the last value stays."""
        return self.type in SETS_ROWS

    @property
    def adds(self) -> bool:
        """Whether the value is added to the variable, or to rows of it: additions may come in any
        order."""
        return self.type in ADDS or self.type in ADDS_ROWS


def written_by(op: tf.Operation, view: View) -> typing.Optional[Written]:
    """What an operation of the scratch graph writes to a variable; None where it writes none.

    An operation that writes rows (`ScatterAdd`) takes the variable, the indices and the rows; any
    other one (`AssignAdd`) the variable and the value.
    """
    is_of_rows = op.type in WRITES_ROWS
    is_write = is_of_rows or op.type in ADDS or op.type in SETS
    if not is_write:
        return None
    variable = variable_op(op.inputs[0])
    if variable is None:  # a `tf.raw_ops.TemporaryVariable`, or a handle from elsewhere
        return None
    indices = None
    is_in_order = False
    if is_of_rows:
        indices = view.state(op.inputs[1])
        is_in_order = view.is_in_order_of_examples(indices)
        value = op.inputs[2]
        dependence = Dependence.NONE  # who has to write rows is decided without it
    else:
        value = op.inputs[1]
        dependence = _dependence(value, variable.name, view)
    return Written(
        operation=op.name, type=op.type, variable=variable.name,
        value=_in_its_branch(op, view.state(value), view), indices=indices,
        is_in_order=is_in_order, dependence=dependence, is_scalar=view.rank(value) == 0,
        constant=_static_scalar(value, view))


def _static_scalar(tensor: tf.Tensor, view: View) -> typing.Optional[float]:
    """The value of a static scalar; None for any other tensor."""
    value = view.value(tensor)
    if value is None or np.ndim(value) > 0:
        return None
    return float(value)


def written_otherwise(op: tf.Operation, view: View, finder: Writes) -> typing.List[Written]:
    """The writes, one for each variable, of an operation that is no assign, add or scatter; [] for
    an operation that writes no variable. The written value is unknown, unless all inputs of the
    operation are the same on every tower.

    Args:
      op: the operation, in the scratch graph.
      view: `View`.
      finder: finds the writes of the scratch graph.
    """
    variables = finder.written_by(op)
    if not variables:
        return []
    taken = [view.state(tensor) for tensor in op.inputs if not is_variable(tensor)]
    if all(map(is_shared, taken)):
        value = INDEPENDENT
    else:
        value = unknown(op, 'writes it in another way than by an assign, an add or a scatter')
    value = _in_its_branch(op, value, view)
    writes = []
    for variable in variables:
        writes.append(Written(
            operation=op.name, type=op.type, variable=variable, value=value, indices=None,
            is_in_order=False, dependence=Dependence.NONE, is_scalar=False, constant=None))
    return writes


def _in_its_branch(op: tf.Operation, value: State, view: View) -> State:
    """The state of a value that an operation writes, by the branches and loops that the operation
    is in: under a condition of the examples, one tower may write the value, and another tower not.

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
_HAND_ON_OR_ADD = frozenset(
    'Identity Cast StopGradient Reshape ExpandDims Squeeze Switch RefSwitch '
    'Add AddV2 AddN Sub Merge RefMerge Select SelectV2 Enter'.split())


def _dependence(tensor: tf.Tensor, variable: str, view: View) -> Dependence:
    """How a value depends on the value v that a variable had before.

    `v * 0.9 + mean * 0.1` is linear in v, `v + total` is a running sum, `v * v` is neither. A value
    of single examples counts as independent of v: `reduce_mean(x * v)` is a statistic of the
    examples, and no average of v and a statistic. An unknown value counts as independent of v, too:
    for an unknown value no role is decided by how it depends on v.

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
    # Where a loop leads back to a value that is still being looked at, this value counts as
    # independent of the variable.
    dependences = [view.remembered(_dependence, source, variable, meanwhile=Dependence.NONE)
                   for source in _sources(tensor, view)]
    return _combined(op, dependences, view)


def _combined(op: tf.Operation, dependences: typing.List[Dependence], view: View) -> Dependence:
    """How the results of an operation depend on a variable, by how its inputs do.

    An operation that hands on or adds keeps a running sum, unless another input depends on the
    variable as well, or the running sum is subtracted: `v + total` is a running sum, `v + v` and
    `total - v` are not.

    Args:
      op: the operation.
      dependences: how each of its inputs depends on the variable.
      view: `View`.
    """
    kinds = set(dependences)
    if kinds <= {Dependence.NONE}:
        return Dependence.NONE
    if Dependence.OTHER in kinds:
        return Dependence.OTHER
    if _hands_on_or_adds(op, view):
        is_running_sum = _keeps_running_sum(op, dependences)
        return Dependence.RUNNING_SUM if is_running_sum else Dependence.LINEAR
    if _is_linear(op, dependences, view):
        return Dependence.LINEAR
    return Dependence.OTHER


def _hands_on_or_adds(op: tf.Operation, view: View) -> bool:
    """Whether the results of an operation are sums of its `_sources`, or one of these: a call gives
    the result of a branch; a batch norm in one kernel hands on the average that it takes."""
    is_call = op.name in view.bodies.branch_results
    return op.type in _HAND_ON_OR_ADD or is_call or is_fused_batch_norm(op.type)


def _keeps_running_sum(op: tf.Operation, dependences: typing.List[Dependence]) -> bool:
    """Whether an operation that hands on or adds keeps a running sum: one input is a running sum,
    and is not subtracted, and no other input depends on the variable."""
    is_subtracted = op.type == 'Sub' and dependences[0] is Dependence.NONE
    number_of_others = dependences.count(Dependence.NONE)
    is_in_one_input = number_of_others == len(dependences) - 1
    return Dependence.RUNNING_SUM in dependences and is_in_one_input and not is_subtracted


def _is_linear(op: tf.Operation, dependences: typing.List[Dependence], view: View) -> bool:
    """Whether an operation is linear in the only one of its inputs that depends on the variable v:
    the product of v and a factor, a quotient of v, or -v.

    The factor, or the divisor, has to be the same on every tower: in `v * 0.9` it is, but not in
    `v * mean`, which is no average of v and of a statistic.

    Args:
      op: the operation.
      dependences: how each of its inputs depends on the variable; at least one does.
      view: `View`.
    """
    if op.type == 'Neg':
        return True
    if op.type in QUOTIENTS:
        is_in_one_factor = dependences[1] is Dependence.NONE  # not in the divisor
    elif op.type == 'Mul':
        is_in_one_factor = Dependence.NONE in dependences  # not in both
    else:
        return False
    factors = [view.state(tensor) for tensor, dependence in zip(op.inputs, dependences)
               if dependence is Dependence.NONE]
    return is_in_one_factor and all(is_shared(factor) for factor in factors)


def is_shared(value: State) -> bool:
    """Whether a value is the same on every tower, whatever the number of their examples."""
    if value.kind is Kind.SIZES:
        return not value.depends_on_size
    return value.is_alike_on_towers


def _sources(tensor: tf.Tensor, view: View) -> typing.List[tf.Tensor]:
    """The tensors by which a value depends on a variable: the inputs of its operation; for a call,
    the results of its branches; for a batch norm in one kernel, the average that it hands on."""
    op = tensor.op
    branches = view.bodies.branch_results.get(op.name)
    if branches is not None:
        return [results[tensor.value_index] for results in branches]
    if is_fused_batch_norm(op.type):
        return _average_handed_on(tensor)
    return list(op.inputs)


def _average_handed_on(result: tf.Tensor) -> typing.List[tf.Tensor]:
    """The moving average that a batch norm in one kernel hands on as a result, as it does outside
    of training; [] for all other results.

    In training, results 1 and 2 are the mean and the variance of the examples.
    """
    op = result.op
    hands_on = not op.get_attr('is_training') and result.value_index in (1, 2)
    if not hands_on:
        return []
    average = op.inputs[result.value_index + 2]  # inputs 3 and 4 are the averages
    return [average]
