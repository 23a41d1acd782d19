"""Additions to counters of metrics, which all towers share: each adds its part, in its turn.

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

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.op_types import ADDS, ADDS_ROWS
from towers.graph.order import Frames
from towers.graph.variable_access import Writes
from towers.model.objectives import flat
from towers.model.outputs import metrics_by_kind
from towers.roles.ownership import EVERY, METRIC
from towers.roles.write_order import Turn, take_turns, takes_from_outside
from towers.shards.cut_batch import weighted, zero_if_empty


def join_counters(towers, weights, roles):
    """Makes counters count the batch over all towers, whose shares of it are the `weights`. From
    then on a tower's metric waits for the tower before it."""
    counters, finder = set(roles.names(METRIC)), Writes(tf.get_default_graph())
    variables = counters.union(roles.names(EVERY))
    is_static = all(isinstance(weight, float) for weight in weights)
    if counters and not (is_static and len(set(weights)) == 1):
        _weigh_additions([tower.metrics or {} for tower in towers], weights, counters, finder)
    if variables and not (is_static and all(weights)):
        _leave_out_padding(towers, weights, variables, finder)
    # A tower of weight 0. has nothing but padding, and its metrics are not run.
    counting = [tower for tower, weight in zip(towers, weights)
                if not (isinstance(weight, float) and weight == 0.)]
    if counters and len(counting) > 1:
        _count_in_turn(counting, counters, finder)


def _leave_out_padding(towers, weights, variables, finder):
    """Has towers without an example, of weight 0, add nothing to variables of these names."""
    for op in tf.get_default_graph().get_operations():
        if _added(op) is None or variables.isdisjoint(finder.of(op)):
            continue
        for tower, weight in zip(towers, weights):
            if tower.has(op.name):
                compat.replace_input(op, _added(op), zero_if_empty(op.inputs[_added(op)], weight))


def _weigh_additions(metrics, weights, counters, finder):
    """Weighs the additions of all towers to counters of these names. `metrics` are each tower's
    dict of metrics."""
    done = set()
    for name, pair in metrics[0].items():
        if not isinstance(pair, (tuple, list)):
            continue
        read = counters & ({pair[0].op.name} if isinstance(pair[0], compat.VARIABLE_TYPES) else
                           graph_walk.ancestors([pair[0]] if tf.is_tensor(pair[0]) else []))
        of_towers = []
        for of_tower, weight in zip(metrics, weights):
            update, additions = of_tower[name][1], collections.defaultdict(list)
            for op in graph_walk.step_operations([update]):
                for counter in read.intersection(finder.of(op)):
                    if _added(op) is None:
                        _fail_without_example(update, op, weight)
                    else:
                        additions[counter].append(op)
            of_towers.append(additions)
        counts_calls = any(_same_constant([additions[counter] for additions in of_towers])
                           for counter in of_towers[0])
        for additions, weight in zip(of_towers, weights) if counts_calls else ():
            for op in {op.name: op for every in additions.values() for op in every}.values():
                addition = op.inputs[_added(op)]
                if op.name not in done and addition.dtype.is_floating:
                    done.add(op.name)
                    compat.replace_input(op, _added(op), weighted(addition, weight))


def _same_constant(of_towers):
    """Whether every tower adds to a counter once, and all the same constant."""
    added = [tf.get_static_value(op.inputs[_added(op)])
             for operations in of_towers for op in operations]
    return all(len(operations) == 1 for operations in of_towers) and all(
        each is not None and np.array_equal(each, added[0]) for each in added)


def _fail_without_example(update, op, weight):
    """Has the update of a metric fail without an example, since its operation adds nothing up."""
    if isinstance(weight, tf.Tensor):
        with tf.control_dependencies(None):
            compat.add_control_inputs(getattr(update, 'op', update), [tf.Assert(weight > 0, [
                'towers: the metric of %s adds nothing up, and a tower has no example: evaluate in '
                'larger batches, or on fewer devices' % op.name])])


def _added(op):
    """Which input of an operation is added to a variable; None if it adds none, or in a branch."""
    position = 1 if op.type in ADDS else 2 if op.type in ADDS_ROWS else None
    return None if position is None or compat.in_control_flow(op) else position


# ---- in turn -------------------------------------------------------------------------------------

def _count_in_turn(towers, names, finder):
    """Has each tower take the counters of a metric when the tower before has updated them."""
    counters = {variable.op.name: variable for variable in tf.global_variables()
                + tf.local_variables() if variable.op.name in names}
    take_turns([_turns(tower, counters, finder) for tower in towers], finder)


def _turns(tower, counters, finder):
    """The `Turn`s of a tower: one for each metric, loss, and update of a counter."""
    fetches = [update for _, update in metrics_by_kind(tower.metrics)[1]]
    if tower.data_loss is not None:
        fetches += flat(tower.data_loss)
    fetches += [update for update in tower.updates if any(  # all towers have these
        counters.keys() & finder.of(op) for op in graph_walk.step_operations([update]))]
    operations = graph_walk.step_operations(fetches)
    takes = takes_from_outside(tower, operations, counters)
    after_takes = graph_walk.reachable_from([take.op for take in takes], operations, control=True)
    rest = {op.name for op in operations} - after_takes
    frames = Frames(operations)
    turns = []
    for fetch in fetches:
        run = {op.name: op for op in graph_walk.step_operations([fetch], rest)}
        ends = {}
        for op in run.values():
            if tower.has(op.name) and counters.keys() & finder.of(op):
                ends.update((end.name, end) for end in frames.ends(op))
        turns.append(Turn(tower.name_scope, [take for take in takes if take.op.name in run],
                          [ends[name] for name in sorted(ends)]))
    return turns
