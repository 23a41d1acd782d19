"""Counters of metrics, which all towers share: each counts its part of the batch, as it counts.

An addition to a counter may come in any order of towers (`tf.metrics`). An update that depends on
the counter's value (a running maximum, a covariance, a list that grows) has to see the update of
the tower before, as the next batch on one device would: so towers update such counters one after
the other, in their order.

`tf.metrics.mean(loss)` of a scalar adds the loss to one counter and 1 to another one, whatever the
size of the batch. A tower adds the same 1 for its shard, so that a shard of one example would count
as much as one of ten. In a metric of which some counter gets the same constant from every tower,
each tower's additions are weighted as losses are: with n_k of the batch's n examples on tower k,

    counter += sum_k (n_k / n) addition_k

so that a batch adds to it what it adds on one device, if the addition is a mean over the examples.
Whatever is counted, a shard without an example, which holds a copy of another one's, adds nothing.
Where a metric writes its counters in another way, such a batch is refused when it comes.
"""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.graph.op_types import ADDS, ADDS_ROWS
from towers.graph.variable_access import Writes, metric_variables, read_from
from towers.placement.variable_device import only_device
from towers.tower.objectives import flat
from towers.tower.outputs import metrics_by_kind
from towers.tower.shards import if_any, weighted
from towers.tower.write_order import to_wait_for

_ADDS = ADDS | ADDS_ROWS


def put_in_order(towers, weights):
    """Makes a tower wait for the one before it where it updates a counter by the counter's value.

    Args:
      towers: list of `Tower`s, in the order of their parts of the batch.
      weights: the weights of the towers' losses; a tower of weight 0. has nothing but padding, and
        its metrics are not run.
    """
    counters = metric_variables()
    towers = [tower for tower, weight in zip(towers, weights)
              if not (isinstance(weight, float) and weight == 0.)]
    if len(towers) < 2 or not counters:
        return
    writes = Writes(tf.get_default_graph())
    users = [_Users(tower, counters, writes) for tower in towers]
    for names in users[0].updated_by_their_values():
        for before, after in zip(users, users[1:]):
            _follow(before, after, names, counters, writes)


class _Users:
    """Which operations of a tower's step and of its metrics read or write which counters."""

    def __init__(self, tower, counters, writes):
        fetches = [update for _, update in metrics_by_kind(tower.metrics)[1]] + list(tower.updates)
        if tower.data_loss is not None:
            fetches += flat(tower.data_loss)
        self.tower = tower
        self.operations = graph_walk.step_operations(fetches)
        self._inside = {op.name for op in self.operations if tower.has(op.name)}
        self.frames = Frames(self.operations)
        self.written = {}
        for op in self.operations:
            names = counters.keys() & writes.of(op) if op.name in self._inside else ()
            if names:
                self.written[op] = names
        self._counters = counters

    def taken(self, op):
        """`[(position, names)]`: the inputs by which an operation gets counters from outside."""
        found = []
        for position, tensor in enumerate(op.inputs):
            if op.name in self._inside and (
                    tensor.op.name not in self._inside or tensor.op.name in self._counters):
                names = {source.name for source in read_from(tensor)} & set(self._counters)
                if names:
                    found.append((position, names))
        return found

    def updated_by_their_values(self):
        """The sets of counters that are updated together, some of them by a counter's value."""
        apart = []
        for op, names in self.written.items():
            read = self._read_for(op)
            if read or op.type not in _ADDS:
                together = set(names) | read
                together.update(*[each for each in apart if each & together])
                apart = [each for each in apart if not each & together] + [together]
        return apart

    def _read_for(self, write):
        """The counters that an operation's written value is computed from."""
        found, stack, seen = set(), [], set()
        for position, tensor in enumerate(write.inputs):
            if position or write.type not in _ADDS:
                stack.append((write, position, tensor))
        while stack:
            op, position, tensor = stack.pop()
            if op is not write or position:
                found.update(name for place, names in self.taken(op) if place == position
                             for name in names)
            other = tensor.op
            if other.name in seen or other.name not in self._inside:
                continue
            seen.add(other.name)
            found.update(self.written.get(other, ()))  # the output of an update is a value
            stack.extend((other, place, each) for place, each in enumerate(other.inputs))
        return found


def _follow(before, after, names, counters, writes):
    """Makes one tower's reads and writes of some counters wait for another tower's writes."""
    gates = {}
    for op, written in before.written.items():
        if names.intersection(written):
            gates.update((end.name, end) for end in before.frames.ends(op))
    if not gates:
        return
    gates = [op for name in sorted(gates) for op in to_wait_for(gates[name], writes)]
    for op in after.operations:
        for position, taken in after.taken(op):
            if not taken & names:
                continue
            tensor = op.inputs[position]
            if tensor.op.name in taken:  # the variable itself
                compat.add_control_inputs(op, gates)
            else:  # its value, which was read once for all towers
                compat.replace_input(op, position, _read_again(
                    counters[min(taken)], gates, after.tower.name_scope))


def _read_again(variable, gates, scope):
    with tf.control_dependencies(gates), tf.name_scope(scope), only_device(
            variable.device or None):
        return variable.read_value()


def leave_out_padding(towers, weights, variables):
    """Has towers without an example add nothing to these variables.

    Args:
      towers: list of `Tower`s.
      weights: each tower's share of the batch: floats, or float64 scalars.
      variables: set of names of the variables that every tower adds to.
    """
    if all(isinstance(weight, float) and weight for weight in weights) or not variables:
        return
    graph = tf.get_default_graph()
    writes = Writes(graph)
    for op in graph.get_operations():
        if not _adds(op) or variables.isdisjoint(writes.of(op)):
            continue
        for tower, weight in zip(towers, weights):
            if tower.has(op.name):
                compat.replace_input(op, _added(op), if_any(op.inputs[_added(op)], weight))


def weigh_additions(metrics, weights):
    """Weighs the additions of all towers to counters of metrics.

    Args:
      metrics: for each tower its dict of metrics, of the same names; or None.
      weights: each tower's share of the batch: floats, or float64 scalars.
    """
    counters = set(metric_variables())
    if all(weight is weights[0] for weight in weights) or not counters:
        return
    writes, done = Writes(tf.get_default_graph()), set()
    for name, pair in (metrics[0] or {}).items():
        if not isinstance(pair, (tuple, list)):
            continue
        read = counters & ({pair[0].op.name} if isinstance(pair[0], compat.VARIABLE_TYPES) else
                           graph_walk.ancestors([pair[0]]))
        of_towers = [_additions(of_tower[name][1], read, writes) for of_tower in metrics]
        for of_tower, additions, weight in zip(metrics, of_towers, weights):
            _refuse_other_writes(of_tower[name][1], additions, read, writes, weight)
        counts_calls = any(_same_constant([additions[counter] for additions in of_towers])
                           for counter in of_towers[0])
        for additions, weight in zip(of_towers, weights) if counts_calls else ():
            for op in {op.name: op for every in additions.values() for op in every}.values():
                addition = op.inputs[_added(op)]
                if op.name not in done and addition.dtype.is_floating:
                    done.add(op.name)
                    compat.replace_input(op, _added(op), weighted(addition, weight))


def _additions(update, counters, writes):
    """{name of a counter: the operations of an update that add to it}."""
    found = collections.defaultdict(list)
    for op in graph_walk.step_operations([update]):
        if _adds(op):
            for name in counters.intersection(writes.of(op)):
                found[name].append(op)
    return found


def _same_constant(of_towers):
    """Whether every tower adds to a counter once, and all the same constant."""
    added = [tf.get_static_value(op.inputs[_added(op)])
             for operations in of_towers for op in operations]
    return all(len(operations) == 1 for operations in of_towers) and all(
        each is not None and np.array_equal(each, added[0]) for each in added)


def _refuse_other_writes(update, additions, counters, writes, weight):
    """Has an update fail without an example where it writes otherwise than by adding."""
    added = {op.name for operations in additions.values() for op in operations}
    others = [op for op in graph_walk.step_operations([update])
              if op.name not in added and counters.intersection(writes.of(op))]
    if others and isinstance(weight, tf.Tensor):
        with tf.control_dependencies(None):
            compat.add_control_inputs(getattr(update, 'op', update), [tf.Assert(weight > 0, [
                'towers: the metric of %s adds nothing up, and a tower has no example: evaluate in '
                'larger batches, or on fewer devices' % others[0].name])])


def _adds(op):
    return (op.type in ADDS or op.type in ADDS_ROWS) and not compat.in_control_flow(op)


def _added(op):
    """Which input of an addition is what is added."""
    return 1 if op.type in ADDS else 2
