"""Counters of metrics, which all towers share: each tower adds its part, in its turn.

`tf.metrics.mean(loss)` of a scalar adds the loss to one counter and 1 to another, whatever the
size of the batch: a shard of one example would count as much as a shard of ten. Where some counter
of a metric gets the same constant from every tower, each tower's additions are weighted as losses
are: with n_k of the batch's n examples on tower k,

    counter += sum_k (n_k / n) addition_k

so that a batch adds the same to it as on one device, if the addition is a mean over the examples.
A shard without an example, which holds a copy of one, adds nothing; where a metric writes its
counters in another way, such a batch is refused when it comes.

A tower takes the counters of a metric when the tower before has updated them, since an update may
depend on a counter's value (a running maximum, a covariance, a list that grows).
"""

import collections
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    ancestors,
    by_name,
    in_order_of_names,
    names_of,
    operation_of,
    reachable_from,
    step_operations,
    variables_by_name,
)
from towers.graph.op_types import ADDS, ADDS_ROWS
from towers.graph.order import Frames, Wait
from towers.graph.variable_access import Writes
from towers.model.objectives import flat
from towers.model.outputs import metrics_by_kind
from towers.roles.ownership import EVERY, METRIC, Roles
from towers.roles.turns import Turn, take_turns, takes_from_outside
from towers.shards.cut_batch import weighted, zero_if_empty


def join_counters(towers: typing.Sequence[Tower], weights: typing.Sequence,
                  roles: Roles) -> typing.List[Wait]:
    """Makes the counters of metrics, and other counts, count the whole batch over all towers.

    From then on a tower counts when the tower before it has counted.

    Args:
      towers: all towers.
      weights: the weights of their shards.
      roles: the roles of the variables.

    Returns:
      What waits for what.
    """
    finder = Writes(tf.get_default_graph())
    counters = set(roles.names(METRIC))
    if counters and not _are_certainly_equal(weights):
        _weigh_additions([tower.metrics or {} for tower in towers], weights, counters, finder)
    variables = counters.union(roles.names(EVERY))
    if variables and not _are_certainly_positive(weights):
        _leave_out_padding(towers, weights, variables, finder)
    counting = _towers_that_count(towers, weights)
    if not counters or len(counting) < 2:
        return []
    return _count_in_turn(counting, counters, finder)


def _are_certainly_equal(weights: typing.Sequence) -> bool:
    """Whether all towers have the same weight, whatever the size of the batch."""
    return _are_static(weights) and len(set(weights)) == 1


def _are_certainly_positive(weights: typing.Sequence) -> bool:
    """Whether all towers have an example, whatever the size of the batch."""
    return _are_static(weights) and all(weights)


def _are_static(weights: typing.Sequence) -> bool:
    """Whether no weight depends on the size of the batch."""
    return all(isinstance(weight, float) for weight in weights)


def _towers_that_count(towers: typing.Sequence[Tower],
                       weights: typing.Sequence) -> typing.List[Tower]:
    """List of the towers whose metrics are run: one with the weight 0.0 has only padding."""
    counting = []
    for tower, weight in zip(towers, weights):
        if not isinstance(weight, float) or weight != 0.:
            counting.append(tower)
    return counting


def _leave_out_padding(towers: typing.Sequence[Tower], weights: typing.Sequence,
                       variables: typing.Set[str], finder: Writes) -> None:
    """Makes towers without an example, of weight 0, add nothing to variables that count.

    Args:
      towers: all towers.
      weights: the weights of their shards.
      variables: the names of the variables.
      finder: finds the writes of the graph.
    """
    for op in tf.get_default_graph().get_operations():
        position = _position_of_addition(op)
        if position is None or variables.isdisjoint(finder.of(op)):
            continue
        for tower, weight in zip(towers, weights):
            if tower.has(op.name):
                addition = op.inputs[position]
                compat.replace_input(op, position, zero_if_empty(addition, weight))


# ---- weights -------------------------------------------------------------------------------------

class _CounterWrites(typing.NamedTuple):
    """The writes of a metric's counters by the update of one tower.

    Attributes:
      additions: {name of a counter: the operations that add to it}.
      others: the operations that write a counter in another way.
    """
    additions: typing.Dict[str, typing.List[tf.Operation]]
    others: typing.List[tf.Operation]


def _weigh_additions(metrics: typing.Sequence[dict], weights: typing.Sequence,
                     counters: typing.Set[str], finder: Writes) -> None:
    """Weighs the towers' additions to the counters of the metrics that count calls, not examples.

    Args:
      metrics: the metrics of each tower.
      weights: the weights of the towers.
      counters: names of the counters of all metrics.
      finder: finds the writes of the graph.
    """
    weighed: typing.Set[str] = set()  # names of operations; metrics may share one
    for name, first in metrics[0].items():
        if not isinstance(first, (tuple, list)):
            continue
        read = counters & _names_upstream(first[0])
        writes_of_towers = []
        for tower_metrics, weight in zip(metrics, weights):
            update = tower_metrics[name][1]
            writes = _counter_writes(update, read, finder)
            for op in writes.others:
                _make_fail_without_example(update, op, weight)
            writes_of_towers.append(writes)
        if not _counts_calls(writes_of_towers):
            continue
        for writes, weight in zip(writes_of_towers, weights):
            for op in sum(writes.additions.values(), []):
                if op.name not in weighed:
                    weighed.add(op.name)
                    _weigh_addition(op, weight)


def _weigh_addition(op: tf.Operation, weight: typing.Union[float, tf.Tensor]) -> None:
    """Multiplies what an operation adds to a counter by the weight of its tower."""
    position = _position_of_addition(op)
    if position is not None and op.inputs[position].dtype.is_floating:
        addition = op.inputs[position]
        compat.replace_input(op, position, weighted(addition, weight))


def _names_upstream(value: typing.Any) -> typing.Set[str]:
    """Set of the names of the operations that the value of a metric is computed from.

    Args:
      value: a tensor or a variable.
    """
    if isinstance(value, compat.VARIABLE_TYPES):
        return {value.op.name}
    return ancestors([value]) if tf.is_tensor(value) else set()


def _counter_writes(update: typing.Any, counters: typing.Set[str],
                    finder: Writes) -> _CounterWrites:
    """The writes of the counters of these names by an update, as `_CounterWrites`."""
    writes = _CounterWrites(collections.defaultdict(list), [])
    for op in step_operations([update]):
        for counter in counters.intersection(finder.of(op)):
            if _position_of_addition(op) is None:
                writes.others.append(op)
            else:
                writes.additions[counter].append(op)
    return writes


def _counts_calls(writes_of_towers: typing.Sequence[_CounterWrites]) -> bool:
    """Whether a metric counts calls: every tower adds the same constant to one of its counters."""
    for counter in writes_of_towers[0].additions:
        additions = [writes.additions[counter] for writes in writes_of_towers]
        if _are_one_constant(additions):
            return True
    return False


def _are_one_constant(additions_of_towers: typing.Sequence[list]) -> bool:
    """Whether every tower adds to a counter once, and all of them the same constant.

    Args:
      additions_of_towers: for each tower the operations that add to the counter.
    """
    constants = []
    for additions in additions_of_towers:
        if len(additions) != 1:
            return False
        op = additions[0]
        constant = tf.get_static_value(op.inputs[_position_of_addition(op)])
        if constant is None:
            return False
        constants.append(constant)
    return all(np.array_equal(constant, constants[0]) for constant in constants)


def _make_fail_without_example(update: typing.Any, op: tf.Operation,
                               weight: typing.Union[float, tf.Tensor]) -> None:
    """Makes the update of a metric fail in a tower without an example: it would count padding.

    Args:
      update: the metric's update_op.
      op: the operation by which it writes a counter in another way than adding to it.
      weight: the tower's weight; a float is never 0 here.
    """
    if not isinstance(weight, tf.Tensor):
        return
    with tf.control_dependencies(None):
        assertion = tf.Assert(weight > 0, [
            'towers: the metric of %s adds nothing up, and a tower has no example: evaluate in '
            'larger batches, or on fewer devices' % op.name])
        compat.add_control_inputs(operation_of(update), [assertion])


def _position_of_addition(op: tf.Operation) -> typing.Optional[int]:
    """The index of the input that an operation adds to a variable; None for an operation that does
    not add, or is in a branch or a loop."""
    if compat.in_control_flow(op):
        return None
    if op.type in ADDS:
        return 1
    if op.type in ADDS_ROWS:
        return 2
    return None


# ---- in turn -------------------------------------------------------------------------------------

Counters = typing.Dict[str, tf.Variable]
"""{name of a counter: the counter}."""


def _count_in_turn(towers: typing.Sequence[Tower], names: typing.Set[str],
                   finder: Writes) -> typing.List[Wait]:
    """Makes each tower take the counters of these names when the tower before has updated them;
    returns what waits for what."""
    variables = variables_by_name(tf.global_variables() + tf.local_variables())
    counters = {name: variables[name] for name in names if name in variables}
    return take_turns([_turns(tower, counters, finder) for tower in towers], finder)


def _turns(tower: Tower, counters: Counters, finder: Writes) -> typing.List[Turn]:
    """List of the turns of a tower: one for each metric, loss, and update of a counter."""
    fetches = _fetches(tower, counters, finder)
    operations = step_operations(fetches)
    takes = takes_from_outside(tower, operations, counters)
    after_takes = reachable_from([take.op for take in takes], operations, control=True)
    before_takes = names_of(operations) - after_takes
    frames = Frames(operations)
    turns = []
    for fetch in fetches:
        run = step_operations([fetch], before_takes)
        ends: typing.Dict[str, tf.Operation] = {}
        for op in tower.own(run):
            if _writes_any(op, counters, finder):
                ends.update(by_name(frames.ends(op)))
        names = names_of(run)
        own_takes = [take for take in takes if take.op.name in names]
        turns.append(Turn(tower.name_scope, own_takes, in_order_of_names(ends)))
    return turns


def _fetches(tower: Tower, counters: Counters, finder: Writes) -> list:
    """The update operations of a tower's metrics, its losses, and its updates of counters."""
    _, pairs = metrics_by_kind(tower.metrics)
    fetches = [update for _, update in pairs]
    if tower.data_loss is not None:
        fetches += flat(tower.data_loss)
    for update in tower.updates:  # all towers have those of counters
        if any(_writes_any(op, counters, finder) for op in step_operations([update])):
            fetches.append(update)
    return fetches


def _writes_any(op: tf.Operation, counters: Counters, finder: Writes) -> bool:
    """Whether an operation writes any of the counters."""
    return not counters.keys().isdisjoint(finder.of(op))
