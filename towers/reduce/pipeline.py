"""A pipeline: while a stage of a tower works on a micro-batch, the stage before works on the next.

The operations of each micro-batch are built already, each on the device of its stage. A stage runs
a row of forward and backward passes of micro-batches; here each pass is made to wait for the one
before it in the row. For tensors of other stages a pass waits by its data. Gradients are added up
as in `accumulation`.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.placement.stages import check_stages
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.reduce.accumulation import may_wait, needed_to_begin, waits_for
from towers.reduce.combination import add_up, align
from towers.tower.objectives import tensors_of

SCHEDULES = ('one_forward_one_backward', 'all_forward')


def pipeline(parts, micro_batches, schedule, late=()):
    """Runs each tower's micro-batches through its stages, and adds up their gradients.

    While a stage works on a micro-batch, the one before it works on the next. Each stage has one
    thing to do at a time, in the order of `stage_order`.

    Args, returns: as `accumulate`.
      schedule: one of `SCHEDULES`.

    Raises:
      ModelFunctionError: a stage takes a tensor of a later stage.
    """
    totals, to_begin = [], needed_to_begin(tf.get_default_graph())
    for start in range(0, len(parts), micro_batches):
        of_tower = parts[start:start + micro_batches]
        stages = stages_of(of_tower[0].device)
        groups = [_by_stage(part, stages, to_begin) for part in of_tower]
        frames = Frames(graph_walk.step_operations(
            [tensor for part in of_tower for tensor in tensors_of(part.pairs) + [part.data_loss]]))
        # In the order of the backward passes, which is the same in all stages.
        first, *others = [micro_batch for what, micro_batch in stage_order(
            schedule, 0, len(stages), micro_batches) if what == 'backward']
        total = of_tower[first].gradients
        for micro_batch in others:
            part = of_tower[micro_batch]
            with tf.name_scope('accumulate_gradients'), tf.control_dependencies(
                    late if start == 0 and micro_batch == others[-1] else ()), \
                    graph_walk.Recording(tf.get_default_graph()) as made:
                total = [(_added(present, variable), variable)
                         for variable, present in align([total, part.gradients])]
            for op in made.operations:
                if op.device in stages and may_wait(op, to_begin):
                    groups[micro_batch]['backward', stages.index(op.device)].append(op)
        for stage, device in enumerate(stages):
            order = [groups[micro_batch][what, stage] for what, micro_batch in stage_order(
                schedule, stage, len(stages), micro_batches)]
            order = [operations for operations in order if operations]
            with tf.name_scope('pipeline'), only_device(device):
                for before, after in zip(order, order[1:]):
                    _follow(before, after, frames)
        totals.append(total)
    return totals


def stage_order(schedule, stage, num_stages, micro_batches):
    """The passes of a stage, in order: list of `('forward' or 'backward', micro-batch)`.

    `'all_forward'`: all forward passes, then all backward passes, the last micro-batch's first. The
    activations of all micro-batches are kept at the same time (Huang et al. 2019, GPipe).
    `'one_forward_one_backward'`: backward and forward passes take turns, as soon as a micro-batch's
    gradient arrives. Stage s of K keeps the activations of at most K - s micro-batches
    (Narayanan et al. 2019, PipeDream). Both keep each of K stages waiting for
    (K - 1) / (M + K - 1) of the time, for M micro-batches and stages of equal length.
    """
    if schedule == 'all_forward':
        return ([('forward', each) for each in range(micro_batches)]
                + [('backward', each) for each in reversed(range(micro_batches))])
    ahead = kept_at_once(schedule, stage, num_stages, micro_batches)
    order = [('forward', each) for each in range(ahead)]
    for each in range(micro_batches):
        order.append(('backward', each))
        if ahead + each < micro_batches:
            order.append(('forward', ahead + each))
    return order


def kept_at_once(schedule, stage, num_stages, micro_batches):
    """How many micro-batches' activations a stage keeps at the same time, at the most."""
    return micro_batches if schedule == 'all_forward' else min(num_stages - stage, micro_batches)


def _by_stage(part, stages, to_begin):
    """{('forward' or 'backward', stage): operations of a micro-batch that a step runs there}."""
    groups = {(what, stage): [] for what in ('forward', 'backward') for stage in range(len(stages))}
    # Without other fetches (metrics that are counted): only a fetch of them may run them.
    step = [op for op in graph_walk.step_operations(tensors_of(part.pairs) + [part.data_loss])
            if part.has(op.name) and may_wait(op, to_begin)
            and op.device in stages]
    # The gradient of a loop of control flow v2 makes the loop anew, for the forward pass as well.
    forward = _needed_by(part.data_loss.op)
    for op in step:
        is_backward = op.name not in forward and op.name in part.backward
        groups['backward' if is_backward else 'forward', stages.index(op.device)].append(op)
    check_stages([op for (what, _), each in groups.items() if what == 'forward' for op in each],
                 part.device)
    return groups


def _needed_by(end):
    """The names of the operations that have to run before one can, itself included.

    The stacks on which a loop keeps values for its gradient are among them, though the gradient has
    made them: the loop pushes in every turn.
    """
    names, stack = {end.name}, [end]
    while stack:
        for name in waits_for(stack.pop()) - names:
            names.add(name)
            stack.append(end.graph.get_operation_by_name(name))
    return names


def _added(present, variable):
    gradient = present[-1][1]
    with only_device(getattr(gradient, 'values', gradient).device or None):
        return add_up([each for _, each in present], variable)


def _follow(before, after, frames):
    """Makes operations of a device wait for other operations of the same device.

    No operation waits for one within a loop or a branch (v1), since an operation in a branch that
    is not taken never runs; it waits for the operations that leave the loop or the branch.
    """
    inside, names = {op.name for op in before}, {op.name for op in after}
    before = [op for op in before if frames.always_runs(op)]
    taken = {name for op in before for name in waits_for(op)}
    ends = [op for op in before if op.name in inside - taken]
    if not ends:
        return
    with tf.control_dependencies(ends):
        gate = tf.no_op('next')
    for op in after:
        if names.isdisjoint(waits_for(op)) and frames.is_outside(op):
            compat.add_control_inputs(op, [gate])
