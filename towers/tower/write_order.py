"""The order of reads and writes of shared variables: towers write after every tower has read.

A model that reads a variable, and then writes it in its forward pass, reads the value that the step
before has written. Of N towers only the first one writes; its write waits until all towers have
read. What the model says of its own order holds in the first tower. Where it says nothing, one
device reads before or after the write by chance; the first tower then reads before it, as all
others do, as far as the loss and the gradients are computed from that.
Where every tower writes (`example_writes`), each waits for the tower before it.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.graph.nests import fetches_in
from towers.graph.op_types import HAND_ON, VARIABLE_OPS
from towers.graph.variable_access import (Writes, is_variable, metric_variables, read_from,
                                          takers_of_memory, variable_op)
from towers.placement.variable_device import only_device


def write_after_reads(towers, graph, of_every_tower=()):
    """Makes each write of the first tower, or of every tower, wait for all towers' reads.

    A read that already waits for the write of tower 0, in any tower, is left as it is.

    Args:
      towers: list of all `Tower`s.
      graph: their graph.
      of_every_tower: names of the variables that every tower writes, outside of control flow.

    Raises:
      SharedVariableError: a tower reads such a variable after it has written it.
    """
    finder = Writes(graph)
    first = graph_walk.step_operations(_fetches(towers[0]) + list(towers[0].updates))
    # Counters of metrics are every tower's to write, see `metric_counters`.
    counters = metric_variables()
    writes = [(op, [name for name in finder.of(op) if name not in counters]) for op in first
              if towers[0].has(op.name) and not graph_walk.is_random(op)]
    writes = [(op, names) for op, names in writes if names]
    if not writes:
        return
    by_tower = [[(op, [name for name in finder.of(op) if name in of_every_tower])
                 for op in graph_walk.step_operations(_fetches(tower) + list(tower.updates))
                 if tower.has(op.name)] for tower in towers if of_every_tower]
    by_tower = [[(op, names) for op, names in some if names] for some in by_tower]
    of_every = {op.name for some in by_tower for op, _ in some}
    writes = [(op, names) for op, names in writes if op.name not in of_every] + sum(by_tower, [])
    written = {name for _, names in writes for name in names}
    writing = {op.name for op, _ in writes}
    steps = _steps_of_one_loss(towers[0])
    reading = towers[1:] + [towers[0]._replace(predictions=None)]
    others = graph_walk.step_operations(sum((_fetches(tower) for tower in reading), []))
    operations = list({op.name: op for op in first + others}.values())
    frames = Frames(operations)
    readers = _readers(reading, written, frames, finder, graph)
    pairs = [(end, gate) for op, names in writes for gate in gates(op, names, frames)
             for name in names for reader, ends in readers[name]
             if reader is not op and (op.name not in of_every or reader.name not in of_every)
             # A step of one loss does not run what only another loss writes.
             and not (reader.name in writing and any(
                 op.name in step and reader.name not in step for step in steps))
             for end in ends]
    precedence = graph_walk.Precedence([gate for _, gate in pairs], operations)
    after = graph_walk.reachable_from([gate for _, gate in pairs], operations, control=True)
    waits_for = collections.OrderedDict()
    # Reads that come after another variable's write are last, since more of them cannot wait.
    for end, gate in sorted(pairs, key=lambda pair: pair[0].name in after):
        if not precedence.waits_for(end, gate):  # else an operation would wait for itself
            precedence.add(gate, end)
            waits_for.setdefault(gate, []).extend(to_wait_for(end, finder))
        elif gate.name in of_every:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (finder.of(gate)[0], end.name, gate.name))
    for before, after in zip(by_tower, by_tower[1:]):
        for gate, names in after:
            waits_for.setdefault(gate, []).extend(
                op for op, others in before if not set(others).isdisjoint(names))
    for gate, waited in waits_for.items():
        compat.add_control_inputs(gate, list({op.name: op for op in waited}.values()))


def _steps_of_one_loss(tower):
    """Sets of the names of the operations that a step of one loss runs; [] of a single loss."""
    if not isinstance(tower.loss, dict):
        return []
    return [{op.name for op in graph_walk.step_operations(fetches_in(
        [tower.data_loss[name], [gradient for gradient, _ in tower.gradients.get(name, ())]]))}
            for name in tower.loss]


def _readers(towers, written, frames, finder, graph):
    """{name of a variable: [(operation that reads it, [operations after which it has read])]}."""
    readers = collections.defaultdict(list)
    of_memory = _takers_of_memory(graph, written, finder)
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


def _takers_of_memory(graph, written, finder):
    """{name of an operation: names of the reference variables whose memory it may read}."""
    found = collections.defaultdict(set)
    for name in sorted(written):
        for taker in takers_of_memory(graph.get_operation_by_name(name),
                                      lambda op: name in finder.of(op)):
            found[taker].add(name)
    return found


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
      finder: `Writes` of its graph.

    Returns:
      List of operations.
    """
    if not finder.within_function(op):
        return [op]
    with tf.control_dependencies(None), only_device(op.device or None), \
            tf.name_scope(op.name + '_has_run/'):
        return [op] + [tf.identity(tensor).op for tensor in op.outputs if not is_variable(tensor)]


def updates_that_write(towers, names):
    """The operations among the updates of the towers after the first that write some variables.

    Updates of batch norm and the like come from one tower; updates of counters come from all.

    Args:
      towers: list of `Tower`s.
      names: names of the variables.

    Returns:
      List of operations, none of them within a loop or a branch.
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
