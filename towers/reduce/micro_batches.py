"""Several micro-batches a tower for one update: one after the other, or through stages.

Each of a tower's k micro-batches has a forward and a backward pass of its own, whose operations are
built already. Here each pass is made to wait for the one before it, so that memory is free again,
and the gradients, which carry the micro-batches' weights, are added up:

    sum_j = sum_(j-1) + gradient_j

In a pipeline a tower has several stages, each on a device of its own: while a stage works on a
micro-batch, the stage before works on the next. Each stage runs one pass at a time, in the order
that `schedules` says; for tensors of other stages a pass waits by its data.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.op_types import PLACEHOLDERS
from towers.graph.order import BACK, Frames, awaited_names, find_cycle
from towers.graph.variable_access import Writes, initializers, is_variable
from towers.placement.stages import check_stages
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.reduce.combination import Pairs, add_up, by_variable
from towers.reduce.schedules import BACKWARD, FORWARD, Pass, stage_order

OperationsOfPasses = typing.Dict[typing.Tuple[str, int], typing.List[tf.Operation]]
"""The operations of each pass of a micro-batch, `{(direction, stage): operations}`: the direction
is `FORWARD` or `BACKWARD`, the stage its index in the tower."""


def add_up_micro_batches(micro_batches: typing.Sequence[Tower], per_tower: int,
                         schedule: typing.Optional[str] = None) -> typing.List[Pairs]:
    """Runs each tower's micro-batches in order, and adds up their gradients.

    Args:
      micro_batches: of all towers, tower by tower.
      per_tower: how many each tower has.
      schedule: the order of the micro-batches in the stages of a tower. None without a pipeline: a
        micro-batch ends before the next begins, so the tower counts as one stage.

    Returns:
      For each tower the sums of its gradients. A sum is sparse where all its summands are.
    """
    names_of_initialization = _names_of_initialization(tf.get_default_graph())
    totals = []
    for start in range(0, len(micro_batches), per_tower):
        of_tower = micro_batches[start:start + per_tower]
        device = of_tower[0].device
        stages: typing.Sequence[str] = [str(device)]
        if schedule is not None:
            stages = stages_of(device)
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
    operations = []  # for each micro-batch, the operations of its passes
    for micro_batch in micro_batches:
        operations.append(_operations_of_passes(micro_batch, stages, names_of_initialization))
    if len(stages) > 1:
        for operations_of_passes in operations:
            _check_forward_passes(operations_of_passes, len(stages), micro_batches[0].device)
    results = itertools.chain.from_iterable(map(_results, micro_batches))
    frames = Frames(graph_walk.step_operations(results))
    # For each stage the order of its passes.
    orders = [stage_order(schedule, stage, len(stages), len(micro_batches))
              for stage in range(len(stages))]
    order_of_first_stage = orders[0]  # backward passes are in the same order in all stages
    backward_order = [each.micro_batch for each in order_of_first_stage
                      if each.direction == BACKWARD]
    total = _add_up_gradients(micro_batches, backward_order, operations, stages,
                              names_of_initialization)
    _run_stages(operations, orders, stages, frames)
    return total


def _add_up_gradients(micro_batches: typing.Sequence[Tower], backward_order: typing.Sequence[int],
                      operations: typing.Sequence[OperationsOfPasses],
                      stages: typing.Sequence[str],
                      names_of_initialization: typing.Set[str]) -> Pairs:
    """Adds up the gradients of one tower's micro-batches as soon as they are computed: in the order
    of the backward passes. Returns the sums, with their variables.

    Args:
      micro_batches: the tower's micro-batches.
      backward_order: the indices of the micro-batches in the order of their backward passes.
      operations: for each micro-batch the operations of its passes. The operations that add up
        gradients are added to the backward passes.
      stages: the device of each stage.
      names_of_initialization: the names of the operations that a session runs before the first
        step.
    """
    first = backward_order[0]
    total = micro_batches[first].gradients
    for index in backward_order[1:]:
        with graph_walk.Recording(tf.get_default_graph()) as made:
            total = _sum_of_two(total, micro_batches[index].gradients, stages)
        sums = [op for op in made.operations if _may_wait(op, names_of_initialization)]
        _add_to_backward_passes(operations[index], sums, stages)
    return total


def _run_stages(operations: typing.Sequence[OperationsOfPasses],
                orders: typing.Iterable[typing.List[Pass]], stages: typing.Sequence[str],
                frames: Frames) -> None:
    """Makes each stage of a tower run its passes in order.

    Args:
      operations: for each micro-batch the operations of its passes.
      orders: for each stage the order of its passes.
      stages: the device of each stage.
      frames: the loops and branches around the operations.
    """
    for stage, order in enumerate(orders):
        passes = [operations[each.micro_batch][each.direction, stage] for each in order]
        with tf.name_scope('micro_batches'), only_device(stages[stage]):
            _run_in_order(passes, frames)


def _add_to_backward_passes(operations: OperationsOfPasses, sums: typing.Iterable[tf.Operation],
                            stages: typing.Sequence[str]) -> None:
    """Makes the sums of gradients a part of the backward passes of a micro-batch. So the next pass
    of a stage begins after them, when the gradients that were added need no memory any more.

    Args:
      operations: the operations of the micro-batch's passes, which are added to.
      sums: operations that add the micro-batch's gradients to the sum over the micro-batches
        before.
      stages: the device of each stage.
    """
    for op in sums:
        stage = _stage_of(op, stages)
        if stage is not None:  # else it is on the device of a variable, where no pass runs
            operations[BACKWARD, stage].append(op)


def _run_in_order(passes: typing.Iterable[typing.List[tf.Operation]], frames: Frames) -> None:
    """Makes each pass wait for the pass before it; a pass without operations is left out.

    Args:
      passes: the operations of each pass, in the order in which a stage is to run them.
      frames: the loops and branches around the operations.
    """
    with_operations = list(filter(None, passes))  # [] is a pass without operations
    for earlier, later in zip(with_operations, with_operations[1:]):
        _make_follow(earlier, later, frames)


def _sum_of_two(total: Pairs, gradients: Pairs, stages: typing.Sequence[str]) -> Pairs:
    """Adds the gradients of one more micro-batch to the gradients so far, by variable.

    Args:
      total: the gradients so far, with their variables.
      gradients: the gradients of the micro-batch, with their variables.
      stages: the device of each stage of the tower.
    """
    sums = []
    with tf.name_scope('accumulate_gradients'):
        for aligned in by_variable([total, gradients]):
            added = None
            # A variable upstream of the inputs has no gradient in any micro-batch: its gradient is
            # taken once, through all shards.
            if aligned.gradients:
                added = _added(aligned.gradients, aligned.variable, stages)
            sums.append((added, aligned.variable))
    return sums


def _stage_of(op: tf.Operation, stages: typing.Sequence[str]) -> typing.Optional[int]:
    """The index of the stage on whose device an operation is; None if it is on no stage's device,
    but on a variable's, for example."""
    if len(stages) == 1:
        return 0
    if op.device not in stages:
        return None
    return stages.index(op.device)


def _operations_of_passes(micro_batch: Tower, stages: typing.Sequence[str],
                          names_of_initialization: typing.Set[str]) -> OperationsOfPasses:
    """Sorts the operations of a micro-batch that a step runs by their pass.

    Left out are operations that are not to wait for an earlier micro-batch.

    Args:
      micro_batch: the micro-batch.
      stages: the device of each stage.
      names_of_initialization: the names of the operations that a session runs before the first
        step.
    """
    operations: OperationsOfPasses = {}
    for stage in range(len(stages)):
        operations[FORWARD, stage] = []
        operations[BACKWARD, stage] = []
    # Metric updates are no part of a pass: they run only if the program fetches them.
    step = graph_walk.step_operations(_results(micro_batch))
    before_loss = _names_before(micro_batch.data_loss.op)
    varying = _names_not_folded(step)
    for op in step:
        stage_of_op = _stage_of(op, stages)
        if stage_of_op is None:  # it is on the device of a variable, where no pass runs
            continue
        is_of_some_pass = micro_batch.has(op.name) and op.name in varying
        if not is_of_some_pass:
            continue  # made once for all micro-batches, such as the cut of the batch; or folded
        if not _may_wait(op, names_of_initialization):
            continue
        # Where there is a loop (v1), `tf.gradients` has made operations that run before the loss:
        # they put the loop's values onto stacks, in each iteration.
        is_backward = op.name in micro_batch.backward and op.name not in before_loss
        if is_backward:
            operations[BACKWARD, stage_of_op].append(op)
        else:
            operations[FORWARD, stage_of_op].append(op)
    return operations


def _check_forward_passes(operations: OperationsOfPasses, num_stages: int, device: str) -> None:
    """Refuses a model in which a stage takes a tensor of a later stage.

    Args:
      operations: the operations of the passes of a micro-batch.
      num_stages: the number of stages.
      device: the device of the tower.
    """
    forward: typing.List[tf.Operation] = []
    for stage in range(num_stages):
        forward += operations[FORWARD, stage]
    check_stages(forward, device)


def _names_before(last: tf.Operation) -> typing.Set[str]:
    """The names of an operation and of all operations that run before it in a step. If it comes
    after a loop (v1), all operations of the loop's iterations are among these."""
    def awaited(op: tf.Operation) -> typing.List[tf.Operation]:
        return graph_walk.operations_named(op.graph, _awaited_with_iterations(op))
    return set(graph_walk.reached([last], awaited))


def _results(micro_batch: Tower) -> list:
    """The tensors of a micro-batch that a step needs: its gradients and its loss."""
    gradients = tensors_of(micro_batch.pairs)
    # Where trained variables are upstream of the inputs, also the gradients of the shard.
    gradients_of_shard = graph_walk.fetches_in(micro_batch.of_shard)
    return gradients + gradients_of_shard + [micro_batch.data_loss]


def _added(gradients: list, variable: tf.Variable, stages: typing.Sequence[str]) -> typing.Any:
    """The sum of gradients of one variable, made on the tower's device; in a pipeline on the device
    of the stage that computes them.

    Args:
      gradients: the sum of the gradients so far, if there is any, and the next gradient.
      variable: the variable.
      stages: the device of each stage of the tower.
    """
    next_gradient = gradients[-1]
    if len(stages) == 1:
        device = stages[0]
    elif isinstance(next_gradient, tf.IndexedSlices):
        device = next_gradient.values.device
    else:
        device = next_gradient.device
    with only_device(device or None):
        return add_up(gradients, variable)


def _make_follow(earlier: typing.List[tf.Operation], later: typing.List[tf.Operation],
                 frames: Frames) -> None:
    """Makes the first operations of a pass wait for the last operations of another pass.

    Args:
      earlier: all operations of the pass that is waited for.
      later: all operations of the pass that waits.
      frames: the loops and branches around them.
    """
    last_operations = _last_operations(earlier, frames)
    if not last_operations:
        return
    # One operation between the passes needs fewer edges than an edge from each last operation to
    # each first one.
    with tf.control_dependencies(last_operations):
        ended = tf.no_op('next')
    names_later = graph_walk.names_of(later)
    for op in later:
        is_first = names_later.isdisjoint(_awaited_with_iterations(op))
        # An operation in a loop (v1) cannot wait for one outside: what leads into the loop waits.
        if is_first and frames.is_outside_of_loops(op):
            compat.add_control_inputs(op, [ended])


def _last_operations(operations: typing.Iterable[tf.Operation],
                     frames: Frames) -> typing.List[tf.Operation]:
    """The operations of a pass that no other operation of the pass waits for.

    An operation within a loop or branch (v1) runs several times a step, or never: it is left out.
    The operation by which its result leaves the loop or branch may be among the last operations.

    Args:
      operations: the operations of the pass.
      frames: the loops and branches around them.
    """
    always_run = list(filter(frames.always_runs, operations))
    awaited: typing.Set[str] = set()  # names of the operations that others of the pass wait for
    for op in always_run:
        awaited |= _awaited_with_iterations(op)
    return graph_walk.without_names(always_run, awaited)


def _may_wait(op: tf.Operation, names_of_initialization: typing.Set[str]) -> bool:
    """Whether an operation of a micro-batch may be made to wait for others.

    Constants may not, since TensorFlow computes them once and for all. Handles of variables, tables
    and queues may not, nor may operations that run before the first step
    (`names_of_initialization`): all of these also run outside of steps, where nothing that they
    would wait for can run.
    """
    if op.type == 'Const' or op.name in names_of_initialization:
        return False
    is_source = bool(op.outputs) and not op.inputs
    makes_handles = is_source and all(map(is_variable, op.outputs))
    return not makes_handles


def _names_not_folded(operations: typing.Iterable[tf.Operation]) -> typing.Set[str]:
    """The names of the operations that are computed from more than constants.

    TensorFlow computes the other operations, such as an attention mask, before the step (constant
    folding). It then has one constant for all micro-batches. If these operations waited for passes,
    each micro-batch would have a constant of its own.
    """
    sources = [op for op in operations if _may_vary(op)]
    return graph_walk.reachable_from(sources, operations, control=True)


def _may_vary(op: tf.Operation) -> bool:
    """Whether TensorFlow computes an operation anew in each step, even if its inputs are constants:
    it has a source of its own, or is in a loop or a branch."""
    is_source = not op.inputs and op.type != 'Const'
    if is_source or op.type in PLACEHOLDERS or op.op_def.is_stateful:
        return True
    return graph_walk.is_control_flow(op)


def _names_of_initialization(graph: tf.Graph) -> typing.Set[str]:
    """Names of the operations that a session runs before the first step, for initial values."""
    variable_initializers = graph_walk.operations_named(graph, initializers())
    table_initializers = graph.get_collection(tf.GraphKeys.TABLE_INITIALIZERS)
    operations = graph_walk.step_operations(variable_initializers + table_initializers)
    return graph_walk.names_of(operations)


def check_order(fetches: typing.Iterable, operations_of_model: typing.Iterable = ()) -> None:
    """Refuses a model in which an earlier micro-batch would wait for a later one.

    Args:
      fetches: what a step runs.
      operations_of_model: the operations that the model function has made; the error names one.

    Raises:
      InvalidArgumentError: operations would wait for each other, and no step could end.
    """
    circle = find_cycle(graph_walk.step_operations(fetches), _awaited_with_iterations)
    if circle:
        named = _named_operation(circle, graph_walk.names_of(operations_of_model))
        raise InvalidArgumentError(
            'the micro-batches of a tower run one after the other, and the model makes an earlier '
            'one wait for a later one (operation %s): its forward pass writes a variable that it '
            'reads. Put the update into the collection UPDATE_OPS, or return it in '
            "'updates'; or train without accumulate= and micro_batches=." % named.name)


def _named_operation(circle: typing.Sequence[tf.Operation],
                     names_of_model: typing.Container[str]) -> tf.Operation:
    """The operation of a circle that tells a user most: one that the model has made and that writes
    a variable; else one that the model has made; else any.

    Args:
      circle: operations that wait for each other.
      names_of_model: the names of the operations that the model has made.
    """
    finder = Writes(tf.get_default_graph())
    of_model = graph_walk.with_names(circle, names_of_model)
    writing = [op for op in of_model if finder.written_by(op)]
    candidates = writing or of_model or circle
    return candidates[0]


def _awaited_with_iterations(op: tf.Operation) -> typing.Set[str]:
    """Names of the operations that an operation waits for; for an `Exit`, by which a loop (v1) is
    left, the loop's `NextIteration`s are among them.

    In the graph an `Exit` does not wait for the `NextIteration`s, nor for operations before them,
    such as a push onto a stack. But the `Exit` runs in the last iteration, and the others have run
    in the iterations before.
    """
    if op.type in ('Exit', 'RefExit'):
        return awaited_names(op) | _next_iterations(op)
    return awaited_names(op)


def _next_iterations(exit_of_loop: tf.Operation) -> typing.Set[str]:
    """Names of the `NextIteration`s of the loop (v1) that an `Exit` leads out of.

    For each of its variables, a loop has a circle of operations:

        Enter -> Merge -> Switch -> body -> NextIteration -> Merge;  Switch -> Exit

    The `Switch`es of all variables take the loop's condition: by it they are found.
    """
    switch = exit_of_loop.inputs[0].op
    if len(switch.inputs) != 2:
        return set()  # the loop is not of the form above, in which TensorFlow makes loops
    condition = switch.inputs[1]
    merges = [switch_of_variable.inputs[0].op for switch_of_variable in condition.consumers()]
    names = set()
    for merge in merges:
        for producer in graph_walk.producers_of(merge):
            if producer.type in BACK:
                names.add(producer.name)
    return names
