"""Counters of metrics, which all towers share: each tower adds its part, in its turn.

`tf.metrics.mean(loss)` of a scalar adds the loss to one counter and 1 to another, whatever the
size of the batch: a shard of one example would count as much as a shard of ten. Where some counter
of a metric gets the same constant from every tower, each tower's additions are weighted as losses
are: with n_k of the batch's n examples on tower k,

    counter += sum_k (n_k / n) addition_k

so that a batch adds the same to the counter as on one device, if the addition is a mean over the
examples. A shard without an example, which holds a copy of one, adds nothing, and writes no rows.
If a metric writes its counters in yet another way, a step in which a shard has no example fails.

A tower takes the counters of a metric when the tower before has written them, since an update_op
may depend on a counter's value (a running maximum, a covariance, a list that grows).
"""

import collections
import itertools
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
)
from towers.graph.op_types import ADDS, ADDS_ROWS, WRITES_ROWS
from towers.graph.order import Frames
from towers.graph.variable_access import Writes
from towers.graph.waits import Wait
from towers.model.objectives import flat
from towers.model.outputs import metric_updates
from towers.roles.turns import Turn, Variables, take_turns, takes_from_outside, variables_named
from towers.roles.variable_roles import EVERY, METRIC, Roles
from towers.shards.cut_batch import is_always_empty, weighted, zero_if_empty

Weight = typing.Union[float, tf.Tensor]
"""The weight of a tower: examples of its shard over examples of the batch. A float where the weight
is the same in each step, else a scalar tensor, which is 0 for a shard without examples."""


def join_counters(towers: typing.Sequence[Tower], weights: typing.Sequence[Weight],
                  roles: Roles) -> typing.List[Wait]:
    """Makes the counters of metrics, and other counts, count the whole batch over all towers.

    From then on a tower writes the counters of metrics when the tower before it has written them;
    `write_after_reads` orders the other counts: the variables with the role `EVERY`.

    Args:
      towers: all towers.
      weights: the weights of the towers' shards, see `Weight`.
      roles: the roles of the variables.

    Returns:
      What waits for what.
    """
    finder = Writes(tf.get_default_graph())
    counters = set(roles.names(METRIC))
    # A metric that counts calls is a quotient: what the calls have added, over their number. N
    # towers of equal weight make both N times as large, and the quotient stays.
    if not _are_certainly_equal(weights):
        _weigh_metrics(towers, weights, counters, finder)
    all_counts = counters.union(roles.names(EVERY))
    # A shard without examples holds a copy of an example, which must not count.
    if all_counts and not _are_certainly_positive(weights):
        _leave_out_padding(towers, weights, all_counts, finder)
    counting_towers = _towers_with_examples(towers, weights)
    if not counters or len(counting_towers) < 2:  # no tower has to wait for another one
        return []
    return _count_in_turn(counting_towers, counters, finder)


def _are_certainly_equal(weights: typing.Sequence[Weight]) -> bool:
    """Whether all towers have the same weight, whatever the size of the batch."""
    return _are_static(weights) and len(set(weights)) == 1


def _are_certainly_positive(weights: typing.Sequence[Weight]) -> bool:
    """Whether all towers have an example, whatever the size of the batch."""
    return _are_static(weights) and all(weights)


def _are_static(weights: typing.Sequence[Weight]) -> bool:
    """Whether no weight depends on the size of the batch."""
    return all(isinstance(weight, float) for weight in weights)


def _towers_with_examples(towers: typing.Sequence[Tower],
                          weights: typing.Sequence[Weight]) -> typing.List[Tower]:
    """List of the towers that have an example in some step. Nothing runs the metrics of others."""
    return [tower for tower, weight in zip(towers, weights) if not is_always_empty(weight)]


def _leave_out_padding(towers: typing.Sequence[Tower], weights: typing.Sequence[Weight],
                       variables: typing.Set[str], finder: Writes) -> None:
    """Makes towers without an example, of weight 0, add nothing to variables that count, and write
    no rows of them.

    Args:
      towers: all towers.
      weights: the weights of the towers' shards.
      variables: the names of the variables that count.
      finder: finds the writes of the graph.
    """
    writing = [op for op in tf.get_default_graph().get_operations()
               if finder.writes_any(op, variables)]
    for tower, weight in zip(towers, weights):
        for op in tower.own(writing):
            if _writes_list_of_rows(op):
                _write_no_rows_without_example(op, weight)
                continue
            position = _position_of_addition(op)
            if position is not None:  # see `_make_fail_without_example` for other writes
                addition = op.inputs[position]
                compat.replace_input(op, position, zero_if_empty(addition, weight))


def _writes_list_of_rows(op: tf.Operation) -> bool:
    """Whether an operation writes rows of a variable that are given as a list, outside of branches
    and loops (v1). The index of a single row is a scalar; for `tf.scatter_nd_add`, and its like, it
    is a vector."""
    if op.type not in WRITES_ROWS or compat.in_control_flow(op):
        return False
    rank = op.inputs[1].shape.ndims
    rank_of_single_index = 1 if 'ScatterNd' in op.type else 0
    return rank is not None and rank > rank_of_single_index


def _write_no_rows_without_example(op: tf.Operation, weight: Weight) -> None:
    """Makes an operation that writes rows of a variable write none if its tower has no example. (A
    row of zeros would leave the variable as it is where rows are added, and not where they are set
    or multiplied.)

    Args:
      op: the operation, which takes the variable, the indices of the rows, and the rows.
      weight: the weight of the tower.
    """
    _, indices, values = op.inputs
    number = zero_if_empty(tf.shape(indices)[0], weight)
    compat.replace_input(op, 1, _first_rows(indices, number))
    has_one_value_for_all = values.shape.ndims == 0
    if not has_one_value_for_all:
        compat.replace_input(op, 2, _first_rows(values, number))


def _first_rows(tensor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """The first rows of a tensor, as a tensor without a static shape: no operation takes an input
    in the place of another one whose static shape differs."""
    return tf.placeholder_with_default(tensor[:number], None)


# ---- the weight of an addition -------------------------------------------------------------------

class _Addition(typing.NamedTuple):
    """An operation that adds to a counter."""
    op: tf.Operation
    position: int  # of the input that is added

    @property
    def value(self) -> tf.Tensor:
        """What is added."""
        return self.op.inputs[self.position]


class _CounterWrites(typing.NamedTuple):
    """How the update_op of one tower writes the counters of a metric.

    Attributes:
      update_op: the metric's update_op.
      additions: {name of a counter: the operations that add to it}.
      others: the operations that write a counter in another way.
    """
    update_op: typing.Any
    additions: typing.Dict[str, typing.List[_Addition]]
    others: typing.List[tf.Operation]


def _weigh_metrics(towers: typing.Sequence[Tower], weights: typing.Sequence[Weight],
                   counters: typing.Set[str], finder: Writes) -> None:
    """Makes the metrics of towers of different weights count as one device does: those that the
    model function returns, and those whose update_ops are among its update ops.

    Args:
      towers: the towers.
      weights: the weights of the towers.
      counters: names of the counters of all metrics.
      finder: finds the writes of the graph.
    """
    weighed: typing.Set[str] = set()  # names of operations, since metrics may share a counter
    metrics_of_towers = [tower.metrics or {} for tower in towers]
    for name, metric_of_tower_0 in metrics_of_towers[0].items():
        is_pair = isinstance(metric_of_tower_0, (tuple, list))
        if is_pair:  # a scalar counts nothing
            value, _ = metric_of_tower_0
            update_ops = [metrics[name][1] for metrics in metrics_of_towers]
            _weigh_metric(update_ops, weights, counters & _names_upstream(value), finder, weighed)
    update_ops_of_towers = [_counting_update_ops(tower, counters, finder) for tower in towers]
    for same_update_op in zip(*update_ops_of_towers):
        for counters_of_metric in _counters_by_metric(same_update_op[0], counters):
            _weigh_metric(same_update_op, weights, counters_of_metric, finder, weighed)


def _counters_by_metric(update_op: typing.Any,
                        counters: typing.Set[str]) -> typing.List[typing.Set[str]]:
    """The sets of counters that an update op puts together into one value, as `tf.metrics.mean`
    does with a sum and a count. A counter by itself is in no set.

    Args:
      update_op: an update op, which may be a group of the update_ops of several metrics.
      counters: names of the counters of all metrics.
    """
    operations = step_operations([update_op])
    counters_of_op = collections.defaultdict(set)  # {name of an operation: counters before it}
    for counter in sorted(counters):
        variable = tf.get_default_graph().get_operation_by_name(counter)
        for name in reachable_from([variable], operations):
            counters_of_op[name].add(counter)
    sets: typing.List[typing.Set[str]] = []
    for together in counters_of_op.values():
        if len(together) < 2:
            continue
        apart = [others for others in sets if others.isdisjoint(together)]
        joined = set(together)
        for others in sets:
            if not others.isdisjoint(together):
                joined |= others
        sets = apart + [joined]
    return sets


def _weigh_metric(update_ops: typing.Sequence, weights: typing.Sequence[Weight],
                  counters: typing.Set[str], finder: Writes, weighed: typing.Set[str]) -> None:
    """Makes a metric of towers of different weights count as one device does.

    If it counts calls, and not examples, what each tower adds is weighted. If a tower's update_op
    writes counters in another way than adding to them, it fails when the tower has no example.

    Args:
      update_ops: the update_op of each tower.
      weights: the weights of the towers.
      counters: names of the counters of the metric.
      finder: finds the writes of the graph.
      weighed: names of the operations whose addition has its weight already; is added to.
    """
    writes_of_towers = [_counter_writes(update_op, counters, finder) for update_op in update_ops]
    counts_calls = _counts_calls(writes_of_towers)
    for writes, weight in zip(writes_of_towers, weights):
        _make_fail_without_example(writes, weight)
        if counts_calls:
            _weigh_additions(writes, weight, weighed)


def _weigh_additions(writes: _CounterWrites, weight: Weight, weighed: typing.Set[str]) -> None:
    """Multiplies what the update_op of one tower adds to the counters of a metric by a weight.

    Args:
      writes: the writes of the update_op.
      weight: the weight of the tower.
      weighed: names of the operations whose addition has its weight already; is added to.
    """
    for addition in itertools.chain.from_iterable(writes.additions.values()):
        op = addition.op
        if op.name in weighed:
            continue
        weighed.add(op.name)
        if addition.value.dtype.is_floating:  # a whole number has no half
            compat.replace_input(op, addition.position, weighted(addition.value, weight))


def _names_upstream(value: typing.Any) -> typing.Set[str]:
    """Set of the names of the operations that the value of a metric is computed from, so that the
    counters that it reads are known.

    Args:
      value: a tensor or a variable; a number, which reads no counter, gives an empty set.
    """
    if isinstance(value, compat.VARIABLE_TYPES):
        return {value.op.name}
    if tf.is_tensor(value):
        return ancestors([value])
    return set()


def _counter_writes(update_op: typing.Any, counters: typing.Set[str],
                    finder: Writes) -> _CounterWrites:
    """Finds the writes by which the update_op of one tower changes counters.

    Args:
      update_op: the metric's update_op.
      counters: names of the counters.
      finder: finds the writes of the graph.
    """
    writes = _CounterWrites(update_op, additions=collections.defaultdict(list), others=[])
    for op in step_operations([update_op]):
        position = _position_of_addition(op)
        for counter in counters.intersection(finder.written_by(op)):
            if position is None:
                writes.others.append(op)
            else:
                writes.additions[counter].append(_Addition(op, position))
    return writes


def _counts_calls(writes_of_towers: typing.Sequence[_CounterWrites]) -> bool:
    """Whether a metric counts calls: every tower adds the same constant to one of its counters, as
    `tf.metrics.mean` of a scalar adds 1."""
    for counter in writes_of_towers[0].additions:
        additions_of_towers = [writes.additions[counter] for writes in writes_of_towers]
        if _add_one_constant(additions_of_towers):
            return True
    return False


def _add_one_constant(additions_of_towers: typing.Sequence[typing.List[_Addition]]) -> bool:
    """Whether every tower adds to a counter once, and all towers add the same constant.

    Args:
      additions_of_towers: for each tower its additions to the counter.
    """
    constants = []
    for additions in additions_of_towers:
        if len(additions) != 1:  # a metric that counts its calls adds to that counter once a call
            return False
        constant = tf.get_static_value(additions[0].value)
        if constant is None:
            return False
        constants.append(constant)
    return all(np.array_equal(constant, constants[0]) for constant in constants)


def _make_fail_without_example(writes: _CounterWrites, weight: Weight) -> None:
    """Makes the update_op of a metric that writes counters in another way than adding to them fail
    in a tower without an example: it would count padding.

    Args:
      writes: the writes of the update_op.
      weight: the tower's weight.
    """
    is_same_in_each_step = not isinstance(weight, tf.Tensor)
    if is_same_in_each_step:
        # The tower always has an example; or it never has one (0.), and then nothing runs its
        # metrics, see `_towers_with_examples`.
        return
    for op in writes.others:
        _assert_has_example(writes.update_op, op, weight)


def _assert_has_example(update_op: typing.Any, op: tf.Operation, weight: tf.Tensor) -> None:
    """Makes the update_op of a metric wait for an assertion that its tower has an example.

    Args:
      update_op: the metric's update_op.
      op: the operation of the update_op that writes a counter, for the text of the error.
      weight: the tower's weight, 0 without examples.
    """
    with tf.control_dependencies(None):  # it waits for nothing that the caller's scopes name
        assertion = tf.Assert(weight > 0, [
            'towers: the metric of %s adds nothing up, and a tower has no example: evaluate in '
            'larger batches, or on fewer devices' % op.name])
        compat.add_control_inputs(operation_of(update_op), [assertion])


def _position_of_addition(op: tf.Operation) -> typing.Optional[int]:
    """The index of the input that an operation adds to a variable; None for an operation that does
    not add, or is in a branch or a loop (v1)."""
    if compat.in_control_flow(op):
        # The callers compute a new addition from the old one. The new one would be outside of the
        # branch or loop that has the old one.
        return None
    if op.type in ADDS:
        return 1  # its inputs are the variable and the addition
    if op.type in ADDS_ROWS:
        return 2  # its inputs are the variable, the indices of the rows, and the addition
    return None


# ---- one tower after the other -------------------------------------------------------------------

def _count_in_turn(towers: typing.Sequence[Tower], names: typing.Set[str],
                   finder: Writes) -> typing.List[Wait]:
    """Makes each tower take the counters of these names when the tower before has written them;
    returns what waits for what."""
    counters = variables_named(names)
    return take_turns([_turns(tower, counters, finder) for tower in towers], finder)


def _turns(tower: Tower, counters: Variables, finder: Writes) -> typing.List[Turn]:
    """List of the turns of a tower: one for each metric, loss, and update op that counts."""
    fetches = _counting_fetches(tower, counters, finder)
    operations = step_operations(fetches)
    takes = takes_from_outside(tower, operations, counters)
    # Most of the forward pass neither takes a counter nor comes after an operation that does. The
    # searches below end there, so that they need not go through the whole forward pass each time.
    names_after_takes = reachable_from([take.op for take in takes], operations, control=True)
    names_beside_counters = names_of(operations) - names_after_takes
    frames = Frames(operations)
    turns = []
    for fetch in fetches:
        counting = by_name(step_operations([fetch], ends=names_beside_counters))
        takes_of_fetch = [take for take in takes if take.op.name in counting]
        ends = _ends_of_writes(tower.own(counting.values()), counters, frames, finder)
        turns.append(Turn(tower.name_scope, takes_of_fetch, ends))
    return turns


def _ends_of_writes(operations: typing.Iterable[tf.Operation], counters: Variables, frames: Frames,
                    finder: Writes) -> typing.List[tf.Operation]:
    """List of operations after which all writes of counters have been done: the writes themselves;
    for a write in a loop or a branch, the operations outside that come after it.

    Args:
      operations: the operations among which the writes are.
      counters: the counters.
      frames: the loops and branches around the operations.
      finder: finds the writes of the graph.
    """
    ends: typing.Dict[str, tf.Operation] = {}
    for op in operations:
        if finder.writes_any(op, counters):
            ends.update(by_name(frames.ends(op)))
    return in_order_of_names(ends)


def _counting_fetches(tower: Tower, counters: Variables, finder: Writes) -> list:
    """List of what a tower computes that may write counters: the update_ops of its metrics, its
    losses, and its update ops that write counters. All towers have lists of the same length, in the
    same order, since `take_turns` puts the n-th turn of a tower after the n-th turn of the tower
    before.
    """
    fetches = metric_updates(tower.metrics)
    if tower.data_loss is not None:
        fetches += flat(tower.data_loss)
    return fetches + _counting_update_ops(tower, counters, finder)


def _counting_update_ops(tower: Tower, counters: typing.Container[str], finder: Writes) -> list:
    """List of a tower's update ops that write counters, the same for all towers. Other update ops
    are left out: perhaps only the first tower has them."""
    return [update_op for update_op in tower.updates
            if any(finder.writes_any(op, counters) for op in step_operations([update_op]))]
