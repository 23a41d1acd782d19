"""The order of a step's writes after its reads: of the towers' forward passes, and of the update.

Variables that a model reads and then writes, in its forward pass or by `UPDATE_OPS`, by role:
`'first'`: tower 0 alone writes, when all towers have read. Tower 0 keeps the model's control
dependencies; without one, each read that the loss or a gradient needs comes first. `'every'`: each
tower writes when all have read, after the tower before. `'metric'`: see `metric_counters`.

In the update, two kinds of writes do not wait by themselves. An optimizer may write beside the
gradients: AdamW decays a weight before it applies the gradient, a counter goes up first, while a
backward pass may still read: the memory of a reference variable, the weights once more in what is
recomputed, and on parameter servers all that the other workers compute from. And updates such as
batch norm's write, on a parameter server, a variable that other workers' forward passes of the same
step read; where all data have ended they must not run at all. Both are found in the finished step.
"""

import collections
import functools
import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in
from towers.graph.order import Frames, Precedence, gates, hold
from towers.graph.variable_access import Writes
from towers.placement.variable_device import only_device
from towers.tower.gradient_pairs import tensors_of
from towers.tower.ownership import EVERY, METRIC

_WriteOfTower = collections.namedtuple('_WriteOfTower', 'tower op name is_every')
"""A write: the number of its tower, its operation, its variable's name, whether every tower's."""


# ---- of the towers -------------------------------------------------------------------------------

def write_after_reads(towers, roles):
    """Makes each write of the first tower, or of every tower, wait for all towers' reads.

    A read that already waits for the write of tower 0, in any tower, is left as it is; where every
    tower writes, outside of control flow, it is refused.
    """
    finder, graph = Writes(tf.get_default_graph()), tf.get_default_graph()
    takers = {name: finder.takers(graph.get_operation_by_name(name), memory=True)
              for name, role in roles.written.items() if role != METRIC}
    if not takers:
        return
    writing = list(enumerate(towers if roles.names(EVERY) else towers[:1]))
    reads = {op.name: op for op in graph_walk.step_operations(sum(
        map(_fetches, towers[1:] + [towers[0]._replace(predictions=None)]), []))}
    step = {op.name: op for op in graph_walk.step_operations(sum(
        (_fetches(tower) + list(tower.updates) for _, tower in writing), []), reads)}
    writes = [_WriteOfTower(number, op, name, roles.written[name] == EVERY)
              for name, found in takers.items() for op in found
              if (op.name in step or op.name in reads) and name in finder.of(op)
              for number, tower in writing
              if tower.has(op.name) and (not number or roles.written[name] == EVERY)]
    step.update(reads)
    pairs = _gates_and_ends(towers, reads, writes, takers, Frames(list(step.values())))
    every = {gate.name: write for gate, _, write in pairs if write.is_every}
    for gate, end in hold([pair[:2] for pair in pairs], finder):
        if gate.name in every:
            raise SharedVariableError(
                'a tower reads variable %s (operation %s) after its examples have written it '
                '(operation %s), where one device reads what the whole batch has written: read it '
                'before.' % (every[gate.name].name, end.name, gate.name))
    for former, later in itertools.permutations([each for each in writes if each.is_every], 2):
        if former.tower + 1 == later.tower and former.name == later.name:
            compat.add_control_inputs(later.op, [former.op])


def _gates_and_ends(towers, reads, writes, takers, frames):
    """`[(gate of a write, operation after which its variable was read, the write)]`; `reads` are
    the operations that the towers' fetches need, by their names."""
    writing, steps = {write.op.name: write for write in writes}, _steps_of_one_loss(towers[0])
    pairs, trains = [], None
    for write in writes:
        of_write = gates(write.op, [write.name], frames)
        for reader in takers[write.name] if of_write else ():
            other = writing.get(reader.name)
            # Writes of every tower are in turn; a step of one loss does not run what only
            # another loss writes.
            if reader.name not in reads or other is not None and (
                    reader is write.op or other.is_every and write.is_every or any(
                        write.op.name in step and reader.name not in step for step in steps)):
                continue
            ends = frames.ends(reader)
            if ends != [reader]:
                # Not operations that only predictions need: a training step does not run them.
                trains = trains or {op.name for op in graph_walk.step_operations(sum(
                    (_fetches(tower._replace(predictions=None)) for tower in towers), []))}
                ends = [end for end in ends if end.name in trains]
            pairs += [(gate, end, write) for end in ends for gate in of_write]
    return pairs


def _steps_of_one_loss(tower):
    """Sets of the names of the operations that a step of one loss runs; [] of a single loss."""
    if not isinstance(tower.loss, dict):
        return []
    return [{op.name for op in graph_walk.step_operations(fetches_in(
        [tower.data_loss[name], [gradient for gradient, _ in tower.gradients.get(name, ())]]))}
            for name in tower.loss]


def updates_that_write(towers, names):
    """The operations among the updates of the towers after the first that write some variables.

    Updates of batch norm and the like come from one tower; updates of counters come from all.
    """
    found, names, finder = {}, set(names), Writes(tf.get_default_graph())
    for tower in towers[1:] if names else ():
        step = graph_walk.step_operations(tower.updates)
        writing = [op for op in step if tower.has(op.name) and names.intersection(finder.of(op))]
        frames = Frames(step) if writing else None
        for op in writing:
            found.update((end.name, end) for end in frames.ends(op) or [op])
    return [found[name] for name in sorted(found)]


def _fetches(tower):
    """The tensors that a step needs of a tower besides its updates."""
    return fetches_in([tower.loss, tower.data_loss, tower.predictions,
                       [gradient for gradient, _ in tower.pairs]])


# ---- of the update -------------------------------------------------------------------------------

def hold_update(train_op, gradients, after, computed, waited=()):
    """Makes the writes of an update wait until all that reads their variables has been computed.

    They wait for all gradients, and for `waited`, see `Machines`. Two writes need no new wait: one
    that waits for its variable's own gradient; and one of a variable that no gradient reads, such
    as a slot, if it waits for some gradient.

    Args:
      gradients: list of `(gradient, variable)`, the sums over all towers and machines; `variable`
        is None for gradients of replicas.
      after: operations before the optimizer, not looked at: updates wait by `hold_back`.
      computed: tensors that can be had without a step: nothing behind them gets a new wait.
    """
    pairs = [(gradient, variable) for gradient, variable in gradients if gradient is not None]
    sums = [tensor.op for tensor in tensors_of(pairs)]
    # Of rows the values, which the backward pass computes after their indices.
    last = [getattr(gradient, 'values', gradient).op for gradient, _ in pairs]
    ends = {op.name for op in sums} | {getattr(each, 'op', each).name for each in after}
    operations = graph_walk.step_operations([train_op], ends)
    finder = Writes(train_op.graph)
    writes = [(op, names) for op, names in ((op, finder.of(op)) for op in operations
                                            if op.name not in ends) if names]
    own = {variable.op.name: op for op, (_, variable) in zip(last, pairs) if variable is not None}
    read = {op.name for op in graph_walk.step_operations(sums)}
    order = Precedence(last)

    def waits(op, name):
        if name in own:
            return order.waits_for(op, own[name])
        return (all if name in read else any)(order.waits_for(op, each) for each in last)
    early = [write for write in writes if not all(waits(write[0], name) for name in write[1])]
    if early:
        with tf.control_dependencies(None), only_device('/cpu:0'):
            _wait(early, [tf.group(*sums, name='all_gradients')], operations, computed)
    if waited and writes:
        _wait(writes, waited, operations, computed)


def hold_back(updates, waited, active, computed):
    """Makes updates wait for other operations, and leaves them out where there is no batch.

    Args:
      updates: list of operations or tensors.
      active: float scalar, 0 in a worker whose own data have ended; or None.
      computed: tensors that can be had without a step: what they need is left as it is, also a
        write of the forward pass.

    Returns:
      `(updates, redirect)`: what the optimizer has to wait for in place of `updates`; and, where
      they may be left out, a function by which operations that wait for updates wait for what runs
      in any case. It is called twice: for the optimizer's own, since the order of the update is
      found in these; and by `join`, for the operations that a program makes after the build.
    """
    if not updates or not waited and active is None:
        return updates, None
    waited, skipped = list(waited), None
    if active is not None:
        # As in a branch of control flow v1: no reader of the output that is not taken is run.
        with only_device('/cpu:0'), tf.name_scope('riding'), tf.control_dependencies(waited):
            has_batch = tf.identity(active >= .5)
            switch = tf.raw_ops.Switch(data=has_batch, pred=has_batch)
            skipped, taken = tf.identity(switch[0]), tf.identity(switch[1])
        waited = [taken.op]
    operations, finder = graph_walk.step_operations(updates), Writes(tf.get_default_graph())
    roots = {getattr(update, 'op', update).name for update in updates}
    written = [(op, finder.of(op)) for op in operations]
    held = _wait([(op, names) for op, names in written if op.name in roots or names], waited,
                 operations, computed)
    if skipped is None:
        return updates, None
    with only_device('/cpu:0'), tf.name_scope('riding'):
        with tf.control_dependencies(updates):
            done = tf.identity(taken)
        merged = tf.raw_ops.Merge(inputs=[done, skipped])[0]
    left_out = graph_walk.reachable_from(held, operations, control=True)
    return [merged], functools.partial(_wait_instead, left_out, operations, done.op, merged.op)


def _wait_instead(left_out, operations, done, merged):
    """Makes operations that wait for a skippable update wait for `merged`, which always runs.

    Else they would be skipped, too: `transform_gradients` may read a moving average after its
    update, and a program may run averages of the weights after all `UPDATE_OPS`. The `operations`
    of the updates themselves go on waiting.
    """
    own = {op.name for op in operations}
    for op in merged.graph.get_operations():
        if op.name in own or op is done:
            continue
        kept = [other for other in op.control_inputs if other.name not in left_out]
        if len(kept) < len(op.control_inputs):
            compat.set_control_inputs(op, kept + [merged])


def _wait(writes, waited, operations, computed):
    """Makes `(operation, names of variables)`s wait, unless they run without a step, too: a list
    of the operations that do."""
    frames = Frames(operations)
    needed = {op.name for op in graph_walk.step_operations(list(waited) + list(computed))}
    held = [gate for op, names in writes if op.name not in needed
            for gate in gates(op, names, frames) if gate.name not in needed]
    for gate in held:
        compat.add_control_inputs(gate, waited)
    return held
