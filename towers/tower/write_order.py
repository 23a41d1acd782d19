"""The order of reads and writes of variables that towers have in common: one rule for each role.

`'first'`: of N towers only the first one writes what a model reads, and then writes, in its forward
pass or by `UPDATE_OPS`; its write waits until all towers have read. What the model says of its own
order holds in the first tower. Where it says nothing, one device reads before or after the write by
chance; the first tower then reads before it, as all others do, as far as the loss and the gradients
are computed from that.

`'every'`: each tower's write waits until all towers have read, and for the tower before.

`'metric'`: a tower takes the counters of a metric when the tower before has updated them, since an
update may depend on a counter's value (a running maximum, a covariance, a list that grows), and has
to see what the batch before on one device would have left.
"""

import collections
import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.graph.nests import fetches_in
from towers.graph.op_types import HAND_ON, VARIABLE_OPS
from towers.graph.variable_access import (Writes, is_variable, read_from, takers_of_memory,
                                          variable_op)
from towers.placement.variable_device import only_device
from towers.tower.objectives import flat
from towers.tower.outputs import metrics_by_kind


def write_after_reads(towers, roles):
    """Makes each write of the first tower, or of every tower, wait for all towers' reads.

    A read that already waits for the write of tower 0, in any tower, is left as it is.

    Args:
      roles: `Roles`; what every tower writes is written outside of control flow.

    Raises:
      SharedVariableError: a tower reads such a variable after it has written it.
    """
    finder, writes, operations = Writes(tf.get_default_graph()), [], {}
    for number, tower in enumerate(towers if roles.names('every') else towers[:1]):
        step = graph_walk.step_operations(_fetches(tower) + list(tower.updates))
        operations.update((op.name, op) for op in step)
        writes += _writes_of(tower, step, finder, roles, number)
    if not writes:
        return
    reading = towers[1:] + [towers[0]._replace(predictions=None)]
    operations.update((op.name, op) for op in graph_walk.step_operations(
        sum((_fetches(tower) for tower in reading), [])))
    operations = list(operations.values())
    frames, waits_for = Frames(operations), collections.OrderedDict()
    pairs = _reads_before_writes(towers, reading, writes, frames, finder)
    precedence = graph_walk.Precedence([gate for _, gate, _ in pairs], operations)
    after = graph_walk.reachable_from([gate for _, gate, _ in pairs], operations, control=True)
    # Reads that come after another variable's write are last, since more of them cannot wait.
    for end, gate, write in sorted(pairs, key=lambda pair: pair[0].name in after):
        if not precedence.waits_for(end, gate):  # else an operation would wait for itself
            precedence.add(gate, end)
            waits_for.setdefault(gate, []).extend(to_wait_for(end, finder))
        elif write.is_every:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (write.variables[0], end.name, gate.name))
    for before, later in itertools.permutations([each for each in writes if each.is_every], 2):
        if before.tower + 1 == later.tower and set(before.variables) & set(later.variables):
            waits_for.setdefault(later.op, []).append(before.op)
    for gate, waited in waits_for.items():
        compat.add_control_inputs(gate, list({op.name: op for op in waited}.values()))


_Write = collections.namedtuple('_Write', 'tower op variables is_every')
"""A write: the number of its tower, its operation, names of variables, whether every tower's."""


def _writes_of(tower, step, finder, roles, number):
    """What a tower writes in a step that is to be put in order: a list of `_Write`."""
    found = []
    for op in step:
        if tower.has(op.name) and not graph_walk.is_random(op):
            names = [name for name in finder.of(op) if roles.written.get(name) != 'metric']
            mine = [name for name in names if roles.written.get(name) == 'every']
            if mine or names and not number:
                found.append(_Write(number, op, mine or names, bool(mine)))
    return found


def _reads_before_writes(towers, reading, writes, frames, finder):
    """`[(operation after which a variable was read, gate of its write, the write)]`."""
    written = {name for write in writes for name in write.variables}
    readers = _readers(reading, written, frames, finder)
    writing = {write.op.name: write for write in writes}
    steps, pairs = _steps_of_one_loss(towers[0]), []
    for write in writes:
        for gate in gates(write.op, write.variables, frames):
            for name in write.variables:
                for reader, ends in readers[name]:
                    other = writing.get(reader.name)
                    # Writes of every tower are in turn; a step of one loss does not run what only
                    # another loss writes.
                    if other is None or reader is not write.op and not (
                            other.is_every and write.is_every) and not any(
                                write.op.name in step and reader.name not in step
                                for step in steps):
                        pairs += [(end, gate, write) for end in ends]
    return pairs


def _steps_of_one_loss(tower):
    """Sets of the names of the operations that a step of one loss runs; [] of a single loss."""
    if not isinstance(tower.loss, dict):
        return []
    return [{op.name for op in graph_walk.step_operations(fetches_in(
        [tower.data_loss[name], [gradient for gradient, _ in tower.gradients.get(name, ())]]))}
            for name in tower.loss]


def _readers(towers, written, frames, finder):
    """{name of a variable: [(operation that reads it, [operations after which it has read])]}."""
    readers, of_memory = collections.defaultdict(list), collections.defaultdict(set)
    for name in sorted(written):
        for taker in takers_of_memory(tf.get_default_graph().get_operation_by_name(name),
                                      lambda op: name in finder.of(op)):
            of_memory[taker].add(name)
    for tower in towers:
        trains = None
        for op in graph_walk.step_operations(_fetches(tower)):
            if not tower.has(op.name) or op.type in HAND_ON and is_variable(op.outputs[0]):
                continue  # the latter hands on a variable itself, to where it is read
            names = of_memory[op.name].union(written.intersection(
                source.name for tensor in op.inputs for source in _sources(tensor, tower)))
            if not names:
                continue
            ends = frames.ends(op)
            if ends != [op]:
                # Not operations that only predictions need: a training step does not run them.
                trains = trains or {each.name for each in graph_walk.step_operations(
                    _fetches(tower._replace(predictions=None)))}
                ends = [end for end in ends if end.name in trains]
            for name in names:
                readers[name].append((op, ends))
    return readers


def _sources(tensor, tower):
    """The variables that a tensor is, or, from outside of the tower, has the value of."""
    if not tower.has(tensor.op.name):
        return read_from(tensor)
    source = variable_op(tensor) if is_variable(tensor) else None
    return [] if source is None else [source]


def gates(op, names, frames):
    """The operations that have to wait so that `op` writes its variables later.

    An operation in a loop cannot wait for one outside: there the operations that lead the variable
    into the loop wait.
    """
    if frames.is_outside(op):
        return [op]
    found = []
    for tensor in op.inputs:
        source = variable_op(tensor) if is_variable(tensor) else None
        if source is None or source.name not in names:
            continue
        while not frames.is_outside(tensor.op):
            tensor = tensor.op.inputs[0]
        if tensor.op.type not in VARIABLE_OPS:
            found.append(tensor.op)
    return found


def to_wait_for(op, finder):
    """The operations to wait for: `op`, and its values if it calls functions (control flow v2).

    TensorFlow inlines the functions. An operation that waits for an `If` then waits for its
    condition alone, and for no read or write of its branches (measured on 1.15.5 and 2.21); one
    that waits for the values of the `If` waits for what they are computed from.

    Args:
      op: an operation in no loop and no branch of control flow v1.
    """
    if not finder.within_function(op):
        return [op]
    with tf.control_dependencies(None), only_device(op.device or None), \
            tf.name_scope(op.name + '_has_run/'):
        return [op] + [tf.identity(tensor).op for tensor in op.outputs if not is_variable(tensor)]


def updates_that_write(towers, names):
    """The operations among the updates of the towers after the first that write some variables.

    Updates of batch norm and the like come from one tower; updates of counters come from all.
    """
    found, names, finder = {}, set(names), Writes(tf.get_default_graph())
    for tower in towers[1:] if names else ():
        frames = Frames(graph_walk.step_operations(tower.updates))
        for update in tower.updates:
            for op in graph_walk.step_operations([update]):
                if tower.has(op.name) and names.intersection(finder.of(op)):
                    for end in frames.ends(op) or [getattr(update, 'op', update)]:
                        found[end.name] = end
    return [found[name] for name in sorted(found)]


def _fetches(tower):
    """The tensors that a step needs of a tower besides its updates."""
    return fetches_in([tower.loss, tower.data_loss, tower.predictions,
                       [gradient for gradient, _ in tower.pairs]])


def count_in_turn(towers, weights, roles):
    """Has each tower take the counters of a metric when the tower before has updated them.

    A tower of weight 0. has nothing but padding, and its metrics are not run.
    """
    counters = {variable.op.name: variable for variable in tf.global_variables()
                + tf.local_variables() if roles.written.get(variable.op.name) == 'metric'}
    towers = [tower for tower, weight in zip(towers, weights)
              if not (isinstance(weight, float) and weight == 0.)]
    if len(towers) < 2 or not counters:
        return
    finder = Writes(tf.get_default_graph())
    counting = [_counting(tower, counters, finder) for tower in towers]
    for tower, before, after in zip(towers[1:], counting, counting[1:]):
        for (waited, _), (_, takes) in zip(before, after):
            for op, position, variable in takes if waited else ():
                if op.inputs[position].op is variable.op:
                    compat.add_control_inputs(op, waited)
                else:  # its value, which was read once for all towers
                    with tf.control_dependencies(waited), tf.name_scope(tower.name_scope), \
                            only_device(variable.device or None):
                        compat.replace_input(op, position, variable.read_value())


def _counting(tower, counters, finder):
    """How a tower counts: for each metric, update and loss `(operations, takes)`.

    The operations are those after which its counters are updated; the takes are `[(operation,
    position of an input, counter)]` where it gets a counter, or its value, from outside.
    """
    fetches = [update for _, update in metrics_by_kind(tower.metrics)[1]] + list(tower.updates) + (
        [] if tower.data_loss is None else flat(tower.data_loss))
    operations = graph_walk.step_operations(fetches)
    inside = {op.name for op in operations if tower.has(op.name)}
    takes = [(op, position, counters[source.name]) for op in operations if op.name in inside
             for position, tensor in enumerate(op.inputs)
             if tensor.op.name not in inside or tensor.op.name in counters
             for source in read_from(tensor) if source.name in counters]
    rest = {op.name for op in operations} - graph_walk.reachable_from(
        [op for op, _, _ in takes], operations, control=True)
    frames, found = Frames(operations), []
    for fetch in fetches:
        mine = {op.name: op for op in graph_walk.step_operations([fetch], rest)}
        ends = {end.name: end for op in mine.values() if op.name in inside
                and counters.keys() & finder.of(op) for end in frames.ends(op)}
        found.append(([each for name in sorted(ends) for each in to_wait_for(ends[name], finder)],
                      [take for take in takes if take[0].name in mine]))
    return found
