"""Several micro-batches a tower for one update: one after the other, or through stages.

Each of a tower's k micro-batches has a forward and a backward pass of its own, whose operations are
built already. Here each pass is made to wait for the one before it, so that memory is free again,
and the gradients, which carry the micro-batches' weights, are added up:

    sum_j = sum_(j-1) + gradient_j

In a pipeline a tower has several stages, each on a device of its own: while a stage works on a
micro-batch, the stage before works on the next. Each stage has one thing to do at a time, in the
order of `stage_order`; for tensors of other stages a pass waits by its data.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.op_types import PLACEHOLDERS
from towers.graph.order import BACK, Frames, awaited_names, topological_order
from towers.graph.variable_access import Writes, initializers, is_variable
from towers.placement.stages import check_stages
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.reduce.combination import Pairs, add_up, by_variable

SCHEDULES = ('one_forward_one_backward', 'all_forward')


FORWARD = 'forward'
BACKWARD = 'backward'

Pass = typing.Tuple[str, int]
"""A pass of a stage: `FORWARD` or `BACKWARD`, and the index of the micro-batch."""

PassOfStage = typing.Tuple[str, int]
"""A pass of a micro-batch: `FORWARD` or `BACKWARD`, and the index of the stage."""


def add_up_micro_batches(micro_batches: typing.Sequence[Tower], per_tower: int,
                         schedule: typing.Optional[str] = None) -> typing.List[Pairs]:
    """Runs each tower's micro-batches in order, and adds up their gradients.

    Args:
      micro_batches: of all towers, tower by tower.
      per_tower: how many each tower has.
      schedule: the order of the micro-batches in the stages of a tower. None without a pipeline: a
        micro-batch ends before the next begins, so the tower counts as one stage.

    Returns:
      For each tower the sums of its gradients, sparse where all are.
    """
    names_of_initialization = _names_of_initialization(tf.get_default_graph())
    totals = []
    for start in range(0, len(micro_batches), per_tower):
        of_tower = micro_batches[start:start + per_tower]
        device = of_tower[0].device
        stages = (str(device),) if schedule is None else stages_of(device)
        totals.append(_add_up_in_order(of_tower, stages, schedule, names_of_initialization))
    return totals


def _add_up_in_order(micro_batches: typing.Sequence[Tower], stages: typing.Sequence[str],
                     schedule: typing.Optional[str],
                     names_of_initialization: typing.Set[str]) -> Pairs:
    """Adds up one tower's gradients, and makes its stages run their passes in order.

    Args:
      micro_batches: the tower's micro-batches.
      stages: the device of each stage.
      schedule: the order of the micro-batches in the stages; None without a pipeline.
      names_of_initialization: the names of the operations that a session runs before the first
        step.

    Returns:
      The pairs of the summed gradients and their variables.
    """
    orders = [stage_order(schedule, stage, len(stages), len(micro_batches))
              for stage in range(len(stages))]
    operations = [_operations_of_passes(micro_batch, stages, names_of_initialization)
                  for micro_batch in micro_batches]
    results: list = []
    for micro_batch in micro_batches:
        results += _results(micro_batch)
    frames = Frames(graph_walk.step_operations(results))
    # The order of the backward passes is the same in all stages. Each sum belongs to the backward
    # pass whose gradients it adds.
    first, *others = [index for direction, index in orders[0] if direction == BACKWARD]
    total = micro_batches[first].gradients
    for index in others:
        with tf.name_scope('accumulate_gradients'), \
                graph_walk.Recording(tf.get_default_graph()) as made:
            total = _sum_of_two(total, micro_batches[index].gradients, stages)
        for op in made.operations:
            stage_of_op = _stage_of(op, stages)
            if stage_of_op is not None and _may_wait(op, names_of_initialization):
                operations[index][BACKWARD, stage_of_op].append(op)
    for stage, order in enumerate(orders):
        passes = [operations[index][direction, stage] for direction, index in order]
        with tf.name_scope('micro_batches'), only_device(stages[stage]):
            _run_in_order(passes, frames)
    return total


def _run_in_order(passes: typing.Iterable[typing.List[tf.Operation]], frames: Frames) -> None:
    """Makes each pass wait for the pass before it; a pass without operations is left out.

    Args:
      passes: the operations of each pass, in the order in which a stage is to run them.
      frames: the loops and branches around the operations.
    """
    with_operations = [operations for operations in passes if operations]
    for earlier, later in zip(with_operations, with_operations[1:]):
        _make_follow(earlier, later, frames)


def _sum_of_two(total: Pairs, gradients: Pairs, stages: typing.Sequence[str]) -> Pairs:
    """The sum of the gradients so far and the gradients of the next micro-batch, by variable."""
    sums = []
    for variable, gradients_present in by_variable([total, gradients]):
        # No micro-batch has a gradient of a variable upstream of the inputs, see `Tower.of_shard`.
        added = None
        if gradients_present:
            added = _added([gradient for _, gradient in gradients_present], variable, stages)
        sums.append((added, variable))
    return sums


def stage_order(schedule: typing.Optional[str], stage: int, num_stages: int, micro_batches: int
                ) -> typing.List[Pass]:
    """The passes of a stage in the order in which it runs them.

    `'all_forward'`: all forward passes, then all backward passes, the last micro-batch's first. The
    activations of all micro-batches are kept at the same time (Huang et al. 2019, GPipe).
    `'one_forward_one_backward'`: backward and forward passes take turns, as soon as a micro-batch's
    gradient arrives. Stage s of K keeps the activations of at most K - s micro-batches
    (Narayanan et al. 2019, PipeDream). Both keep each of K stages waiting for
    (K - 1) / (M + K - 1) of the time, for M micro-batches and stages of equal length.
    """
    if schedule == 'all_forward':
        return ([(FORWARD, each) for each in range(micro_batches)]
                + [(BACKWARD, each) for each in reversed(range(micro_batches))])
    ahead = kept_at_once(schedule, stage, num_stages, micro_batches)
    order = [(FORWARD, each) for each in range(ahead)]
    for each in range(micro_batches):
        order.append((BACKWARD, each))
        if ahead + each < micro_batches:
            order.append((FORWARD, ahead + each))
    return order


def kept_at_once(schedule: typing.Optional[str], stage: int, num_stages: int, micro_batches: int
                 ) -> int:
    """The largest number of micro-batches whose activations a stage keeps at the same time.

    Args:
      schedule: the order of the micro-batches.
      stage: the index of the stage.
      num_stages: the number of stages of a tower.
      micro_batches: the number of micro-batches of a tower.
    """
    if schedule == 'all_forward':
        return micro_batches
    return min(num_stages - stage, micro_batches)


def _stage_of(op: tf.Operation, stages: typing.Sequence[str]) -> typing.Optional[int]:
    """The index of the stage on whose device an operation is; None if it is on no stage's device,
    but on a variable's, for example."""
    if len(stages) == 1:
        return 0
    return stages.index(op.device) if op.device in stages else None


def _operations_of_passes(micro_batch: Tower, stages: typing.Sequence[str],
                          names_of_initialization: typing.Set[str]
                          ) -> typing.Dict[PassOfStage, typing.List[tf.Operation]]:
    """{(direction, stage): the operations of a micro-batch that a step runs there}."""
    found: typing.Dict[PassOfStage, typing.List[tf.Operation]] = {}
    for stage in range(len(stages)):
        found[FORWARD, stage] = []
        found[BACKWARD, stage] = []
    # Metric updates are no part of a pass: they run only if the program fetches them.
    step = graph_walk.step_operations(_results(micro_batch))
    before_loss = _operations_before(micro_batch.data_loss.op)
    varying = _computed_from_more_than_constants(step)
    for op in step:
        stage_of_op = _stage_of(op, stages)
        belongs = micro_batch.has(op.name) and op.name in varying
        if stage_of_op is not None and belongs and _may_wait(op, names_of_initialization):
            direction = FORWARD
            if op.name in micro_batch.backward and op.name not in before_loss:
                direction = BACKWARD
            found[direction, stage_of_op].append(op)
    if len(stages) > 1:
        forward: typing.List[tf.Operation] = []
        for stage in range(len(stages)):
            forward += found[FORWARD, stage]
        check_stages(forward, micro_batch.device)
    return found


def _operations_before(last: tf.Operation) -> typing.Set[str]:
    """The names of the operations that run before one can, a loop's pushes onto stacks included."""
    def awaited(op):
        return [op.graph.get_operation_by_name(name) for name in _waits_for(op)]
    return set(graph_walk.reached([last], awaited))


def _results(micro_batch: Tower) -> list:
    """The tensors of a micro-batch that a step needs: its gradients and its loss."""
    gradients = tensors_of(micro_batch.pairs) + graph_walk.fetches_in(micro_batch.of_shard)
    return gradients + [micro_batch.data_loss]


def _added(gradients: list, variable: tf.Variable, stages: typing.Sequence[str]) -> typing.Any:
    """The sum of two gradients of one variable, on the tower's device; in a pipeline on the device
    of the later gradient's stage."""
    if len(stages) == 1:
        device = stages[0]
    else:
        last = gradients[-1]
        device = getattr(last, 'values', last).device
    with only_device(device or None):
        return add_up(gradients, variable)


def _make_follow(earlier: typing.List[tf.Operation], later: typing.List[tf.Operation],
                 frames: Frames) -> None:
    """Makes the first operations of a pass wait for the last operations of another pass.

    None waits for an operation within a v1 loop or branch, which may never run, but for the
    operations that leave the loop.

    Args:
      earlier: all operations of the pass that is waited for.
      later: all operations of the pass that waits.
      frames: the loops and branches around them.
    """
    names_earlier = graph_walk.names_of(earlier)
    names_later = graph_walk.names_of(later)
    always_run = [op for op in earlier if frames.always_runs(op)]
    followed = set()
    for op in always_run:
        followed |= _waits_for(op)
    last_operations = [op for op in always_run if op.name in names_earlier - followed]
    if not last_operations:
        return
    with tf.control_dependencies(last_operations):
        ended = tf.no_op('next')
    for op in later:
        is_first = names_later.isdisjoint(_waits_for(op))
        if is_first and frames.is_outside(op):
            compat.add_control_inputs(op, [ended])


def _may_wait(op: tf.Operation, names_of_initialization: typing.Set[str]) -> bool:
    """Whether an operation of a micro-batch may be made to wait for others.

    Constants may not, since they are folded; nor handles of variables, tables and queues, and what
    runs before the first step (`names_of_initialization`): these run outside of steps, too.
    """
    if op.type == 'Const' or op.name in names_of_initialization:
        return False
    names_state = not op.inputs and op.outputs and all(map(is_variable, op.outputs))
    return not names_state


def _computed_from_more_than_constants(operations: typing.Iterable[tf.Operation]
                                       ) -> typing.Set[str]:
    """The names of the operations that are not computed from constants alone.

    TensorFlow folds the others, such as an attention mask, and has one constant for all
    micro-batches. If they waited for a micro-batch, it would keep a constant for each.
    """
    sources = [op for op in operations if _may_vary(op)]
    return graph_walk.reachable_from(sources, operations, control=True)


def _may_vary(op: tf.Operation) -> bool:
    """Whether an operation may have another value than what its inputs alone determine."""
    is_source = not op.inputs and op.type != 'Const'
    return (is_source or op.type in PLACEHOLDERS or op.op_def.is_stateful
            or graph_walk.is_control_flow(op))


def _names_of_initialization(graph: tf.Graph) -> typing.Set[str]:
    """Names of the operations that a session runs before the first step, for initial values."""
    of_variables = [graph.get_operation_by_name(name) for name in initializers()]
    of_tables = graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS)
    return graph_walk.names_of(graph_walk.step_operations(of_variables + of_tables))


def check_order(fetches: typing.Iterable, operations_of_model: typing.Iterable = ()) -> None:
    """Refuses micro-batches of which an earlier one would wait for a later one.

    Args:
      fetches: what a step runs.
      operations_of_model: those that the model function has made, of which the error names one.

    Raises:
      InvalidArgumentError: operations would wait for each other, and no step could end.
    """
    operations = graph_walk.step_operations(fetches)
    names_run = graph_walk.names_of(topological_order(operations, _waits_for))
    stuck = graph_walk.by_name(op for op in operations if op.name not in names_run)
    if stuck:
        named = _named_operation(_circle(stuck), graph_walk.names_of(operations_of_model))
        raise InvalidArgumentError(
            'the micro-batches of a tower run one after the other, and the model makes an earlier '
            'one wait for a later one (operation %s): its forward pass writes a variable that it '
            'reads. Put the update into the collection UPDATE_OPS, or return it in '
            "'updates'; or train without accumulate= and micro_batches=." % named.name)


def _circle(stuck: typing.Dict[str, tf.Operation]) -> typing.List[tf.Operation]:
    """Operations that wait for each other, among those that no step can run, which each wait for
    another one of these."""
    name = next(iter(stuck))
    passed: typing.List[str] = []
    while name not in passed:
        passed.append(name)
        name = min(_waits_for(stuck[name]) & stuck.keys())
    return [stuck[each] for each in passed[passed.index(name):]]


def _named_operation(circle: typing.Sequence[tf.Operation],
                     names_of_model: typing.Container[str]) -> tf.Operation:
    """The operation of a circle that tells a user most: the model's own, and one that writes."""
    finder = Writes(tf.get_default_graph())
    of_model = [op for op in circle if op.name in names_of_model]
    writing = [op for op in of_model if finder.of(op)]
    return (writing or of_model or list(circle))[0]


def _waits_for(op: tf.Operation) -> typing.Set[str]:
    """Names of the operations that an operation waits for, without the back edges of a loop.

    An exit of a loop waits for all that leads into the next turn, onto stacks included.
    """
    names = awaited_names(op)
    if op.type not in ('Exit', 'RefExit'):
        return names
    left_by = op.inputs[0].op
    if len(left_by.inputs) == 2:  # a Switch, with the condition of the loop
        condition = left_by.inputs[1]
        for switch in condition.consumers():
            for tensor in switch.inputs[0].op.inputs:
                if tensor.op.type in BACK:
                    names.add(tensor.op.name)
    return names
