"""Several micro-batches a tower for one update: one after the other, or through stages.

Each of a tower's k micro-batches has a forward and a backward pass of its own, whose operations are
built already. Here each pass is made to wait for the one before it, so that memory is free again,
and the gradients, which carry the micro-batches' weights, are added up:

    sum_j = sum_(j-1) + gradient_j

In a pipeline a tower has several stages, each on a device of its own: while a stage works on a
micro-batch, the stage before works on the next. Each stage has one thing to do at a time, in the
order of `stage_order`; for tensors of other stages a pass waits by its data.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import tensors_of
from towers.graph import graph_walk
from towers.graph.op_types import PLACEHOLDERS
from towers.graph.order import BACK, Frames, in_order, names_before
from towers.graph.variable_access import initializers
from towers.placement.stages import check_stages
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.reduce.combination import add_up, by_variable

SCHEDULES = ('one_forward_one_backward', 'all_forward')


def add_up_micro_batches(parts, micro_batches, schedule=None):
    """Runs each tower's micro-batches in order: for each tower a list of its gradients' sums,
    sparse where all are. `parts` are the `Tower`s; without a `schedule` micro-batches go through
    all stages one by one."""
    totals, to_begin = [], _needed_to_begin(tf.get_default_graph())
    for start in range(0, len(parts), micro_batches):
        of_tower = parts[start:start + micro_batches]
        stages = (str(of_tower[0].device),) if schedule is None else stages_of(of_tower[0].device)
        rows = [stage_order(schedule, stage, len(stages), micro_batches)
                for stage in range(len(stages))]
        groups = [_by_stage(part, stages, to_begin) for part in of_tower]
        frames = Frames(graph_walk.step_operations(
            [tensor for part in of_tower for tensor in _results(part)]))
        # In the order of the backward passes, which is the same in all stages.
        first, *others = [number for what, number in rows[0] if what == 'backward']
        total = of_tower[first].gradients
        for number in others:
            with tf.name_scope('accumulate_gradients'), \
                    graph_walk.Recording(tf.get_default_graph()) as made:
                # Of variables behind the inputs no part has a gradient, see `Tower.of_shard`.
                aligned = by_variable([total, of_tower[number].gradients])
                total = [(_added(present, variable, stages) if present else None, variable)
                         for variable, present in aligned]
            for op in made.operations:
                stage = _stage_of(op, stages)
                if stage is not None and _may_wait(op, to_begin):
                    groups[number]['backward', stage].append(op)
        for stage, row in enumerate(rows):
            order = [operations for operations in (
                groups[number][what, stage] for what, number in row) if operations]
            with tf.name_scope('micro_batches'), only_device(stages[stage]):
                for earlier, later in zip(order, order[1:]):
                    _follow(earlier, later, frames)
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


def _stage_of(op, stages):
    """The number of an operation's stage; None where it is elsewhere, with a variable, say."""
    if len(stages) == 1:
        return 0
    return stages.index(op.device) if op.device in stages else None


def _by_stage(part, stages, to_begin):
    """{('forward' or 'backward', stage): operations of a micro-batch that a step runs there}."""
    groups = {(what, stage): [] for what in ('forward', 'backward') for stage in range(len(stages))}
    # Metric updates are no part of a pass: they run only if the program fetches them.
    step = graph_walk.step_operations(_results(part))
    # Operations that run before the loss can, a loop's pushes onto stacks included.
    forward = graph_walk.reached([part.data_loss.op], lambda op: map(
        op.graph.get_operation_by_name, _waits_for(op)))
    varying = _computed_from_more_than_constants(step)
    for op in step:
        stage = _stage_of(op, stages)
        if stage is not None and part.has(op.name) and op.name in varying and _may_wait(
                op, to_begin):
            is_backward = op.name not in forward and op.name in part.backward
            groups['backward' if is_backward else 'forward', stage].append(op)
    if len(stages) > 1:
        check_stages([op for (what, _), each in groups.items() if what == 'forward' for op in each],
                     part.device)
    return groups


def _results(part):
    """The tensors that a step needs of a micro-batch: its gradients and its loss."""
    return tensors_of(part.pairs) + graph_walk.fetches_in(part.of_shard) + [part.data_loss]


def _added(present, variable, stages):
    gradient = present[-1][1]
    device = stages[0] if len(stages) == 1 else getattr(gradient, 'values', gradient).device
    with only_device(device or None):
        return add_up([each for _, each in present], variable)


def _follow(earlier, later, frames):
    """Makes the first operations of a pass wait for the last operations of another pass. None waits
    for an operation within a v1 loop or branch, which may never run, but for the operations that
    leave the loop."""
    inside, names = {op.name for op in earlier}, {op.name for op in later}
    earlier = [op for op in earlier if frames.always_runs(op)]
    taken = {name for op in earlier for name in _waits_for(op)}
    ends = [op for op in earlier if op.name in inside - taken]
    if not ends:
        return
    with tf.control_dependencies(ends):
        has_ended = tf.no_op('next')
    for op in later:
        if names.isdisjoint(_waits_for(op)) and frames.is_outside(op):
            compat.add_control_inputs(op, [has_ended])


def _may_wait(op, to_begin):
    """Whether an operation of a micro-batch may be made to wait for others. Constants may not,
    since they are folded; nor handles of variables, tables and queues, which run outside of
    steps, too."""
    names_state = not op.inputs and op.outputs and all(
        tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype  # a reference
        for tensor in op.outputs)
    return op.type != 'Const' and not names_state and op.name not in to_begin


def _computed_from_more_than_constants(operations):
    """The names of the operations that are not computed from constants alone: a set.

    TensorFlow folds the others, such as an attention mask, and has one constant for all
    micro-batches. If they waited for a micro-batch, it would keep a constant for each.
    """
    sources = [op for op in operations if _may_vary(op)]
    return graph_walk.reachable_from(sources, operations, control=True)


def _may_vary(op):
    """Whether an operation may have another value than what its inputs alone determine."""
    is_given = not op.inputs and op.type != 'Const' or op.type in PLACEHOLDERS
    return is_given or op.op_def.is_stateful or graph_walk.is_control_flow(op)


def _needed_to_begin(graph):
    """Names of the operations that a session runs before the first step, for initial values."""
    return {op.name for op in graph_walk.step_operations(
        list(map(graph.get_operation_by_name, initializers()))
        + graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS))}


def check_order(fetches):
    """Raises `InvalidArgumentError` if operations would wait for each other, and no step could end:
    the model makes an earlier micro-batch wait for a later one."""
    operations = graph_walk.step_operations(fetches)
    runs = {op.name for op in in_order(operations, _waits_for)}
    if len(runs) < len(operations):
        raise InvalidArgumentError(
            'the micro-batches of a tower run one after the other, and the model makes an earlier '
            'one wait for a later one (operation %s): its forward pass writes a variable that it '
            'reads. Put the update into the collection UPDATE_OPS, or return it in '
            "'updates'; or train without accumulate= and micro_batches=." % next(
                op.name for op in operations if op.name not in runs))


def _waits_for(op):
    """Names of the operations that an operation waits for, without the back edges of a loop.

    An exit of a loop waits for all that leads into the next turn, onto stacks included.
    """
    names = names_before(op)
    if op.type in ('Exit', 'RefExit') and len(op.inputs[0].op.inputs) == 2:
        condition = op.inputs[0].op.inputs[1]  # of the Switch that the loop is left by
        for switch in condition.consumers():
            names.update(tensor.op.name for tensor in switch.inputs[0].op.inputs
                         if tensor.op.type in BACK)
    return names
