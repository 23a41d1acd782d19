"""The plan's line `one device`: whether N towers are proven to give one device's numbers.

The proof of the forward pass (`towers/proof/`) says where the examples are in each tensor. This
module asks it about the losses: whether their sum over the towers, each times its factor, is the
loss of the whole batch. Its test is tests/api/test_plan.py; the tests of the verdicts are in
tests/proof/test_verdict.py.

Words of other modules used here: `FIRST` is the role of a variable that tower 0 writes for all
towers; `OWN` is the role of a variable that each tower has, and writes, for itself
(`roles/ownership`). A `Write` is an operation with the names of the variables that it writes;
`Writers` are the writes of some variables, {name of a variable: operations}. A `Question` is what
the proof has to know of a build beside the forward pass, such as the writers of the variables that
the loss reads (`proof/question`).
"""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.train_ops import Update
from towers.capture.record import Recorded
from towers.copies.tower_set import TowerSet
from towers.gradients.gradient_pairs import has_no_index_twice, indices_of_lookups, tensors_of
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of, names_of, operation_names
from towers.graph.op_types import SAME_NUMBERS, SIZES, VARIABLE_OPS
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes, read_from
from towers.model.objectives import all_pairs, with_parts
from towers.model.outputs import fetches_of
from towers.model.request import Request
from towers.optimizers import is_repeatable
from towers.proof.question import Question, Writers
from towers.proof.stand_ins import static_size
from towers.proof.verdict import verdict_of
from towers.roles.variable_roles import EVERY, FIRST, METRIC, OWN, Roles
from towers.roles.writes import Write, writes_by, writes_of_call, writes_to


def equality_line(tower_set: TowerSet, update: Update) -> typing.Optional[str]:
    """The text after `one device`: the verdict on each loss; None where a step has one shard, which
    is computed as on one device."""
    if tower_set.has_one_shard:
        return None
    recorded = tower_set.recorded
    question = _question(tower_set)
    writes = _writes_of_step(tower_set)
    read_by_transformation = _read_by_transformation(update, tower_set.towers)
    writers_for_update = _writers_read_by(
        _read_by_update(update) + read_by_transformation, writes)
    losses_by_name = with_parts('loss', recorded.output.loss)
    question = question._replace(
        rows_counted=_rows_counted(tower_set),
        transformed_by=_written_by_update_ops(read_by_transformation, writes, tower_set),
        initialized_from_shard=names_initialized_from_shard(
            recorded.created, tower_set.towers[0]),
        statistics_of_losses=_statistics_of_losses(losses_by_name, recorded))
    has_names = isinstance(recorded.output.loss, dict)
    texts = []
    for name_of_loss, loss in losses_by_name:
        # The loss that is differentiated is the model's loss plus the registered losses.
        losses = [loss] + tower_set.losses.added
        writers_for_loss = _writers_read_by(losses, writes)
        question_of_loss = _with_writers(
            question, _writers(writes), writers_for_loss, writers_for_update, tower_set)
        verdict = verdict_of(losses, recorded.proven.proof, recorded.proven.batch_norms,
                             question_of_loss)
        text = verdict.text
        if has_names:
            text = '%s: %s' % (name_of_loss, text)
        texts.append(text)
    return '; '.join(texts) + _which_examples(tower_set.request)


def names_initialized_from_shard(variables: typing.Iterable[tf.Variable],
                                 first: Tower) -> typing.List[str]:
    """The names of the variables whose initial values are computed from the first tower's part of
    the batch."""
    shard = operation_names(leaves_of(first.inputs))
    names = []
    for variable in variables:
        initializer = compat.initializer_of(variable)
        if initializer is not None and shard & graph_walk.ancestors(initializer.inputs):
            names.append(variable.op.name)
    return names


def _rows_counted(tower_set: TowerSet) -> typing.List[str]:
    """The names of the variables whose combined sparse gradient may have an index more or less
    often than the gradient of one device, where its rows are seen one by one: by a transformation
    of the gradients, as for clipping, or by an optimizer that is not TensorFlow's own. To
    TensorFlow's optimizers only the sum of the rows of an index matters.

    The rows of the towers are put together, so that each example has the rows that it has on one
    device. Rows of a lookup that has no index twice are added up. A lookup of fixed indices, one of
    them twice, has its rows once in each tower, and once on one device. Some ways to combine add up
    the rows of each index.
    """
    request = tower_set.request
    if not any(map(_sees_rows, request.training.objectives)):
        return []
    proof = tower_set.recorded.proven.proof
    adds_rows_up = tower_set.roles.replicas is not None or request.trains_with_machines

    def has_rows_of_one_device(indices: tf.Tensor) -> bool:
        """Whether the combined rows of a lookup are those of one device, by its indices."""
        if has_no_index_twice(indices):
            return request.split.accumulate == 1
        looked_up = graph_walk.source_through(indices, SAME_NUMBERS)
        return proof.state(looked_up).is_by_example and not adds_rows_up

    names = []
    for gradient, variable in tower_set.towers[0].pairs:
        if isinstance(gradient, tf.IndexedSlices) and not all(
                map(has_rows_of_one_device, indices_of_lookups(gradient))):
            names.append(variable.op.name)
    return names


def _sees_rows(objective: typing.Any) -> bool:
    """Whether an objective's transformation of the gradients, or its optimizer, may take the rows
    of a sparse gradient one by one."""
    return objective.transform_gradients is not None or not is_repeatable(objective.optimizer)


def _statistics_of_losses(losses_by_name: typing.Sequence[tuple],
                          recorded: Recorded) -> typing.Set[str]:
    """The marks of all losses: the statistics of the shard on which any loss depends, but not
    linearly.

    Args:
      losses_by_name: pairs of a name and a loss.
      recorded: the forward pass.
    """
    statistics: typing.Set[str] = set()
    for _, loss in losses_by_name:
        statistics |= recorded.proven.proof.state(loss).shard_statistics
    return statistics


def _with_writers(question: Question, all_writers: Writers, writers_for_loss: Writers,
                  writers_for_update: Writers, tower_set: TowerSet) -> Question:
    """The question about one loss: with the writers of the variables that a step writes, in groups
    by who writes the variable, and whether the loss or the update reads it.

    The question is only about variables that may hold what one tower has computed from its
    examples. Other variables are left out: a count of the examples, to which every tower adds in
    its turn, has after a step the value that it has on one device.

    Args:
      question: what is asked about every loss.
      all_writers: the writers of all variables that a step writes.
      writers_for_loss: the writers of the variables that the loss is computed from.
      writers_for_update: the writers of the variables that the update reads beside the gradients.
      tower_set: the towers.
    """
    roles = tower_set.roles
    request = tower_set.request
    if request.training.update_ops == 'all':
        # Every tower writes the variables that otherwise tower 0 alone writes, also those that the
        # loss does not read.
        question = question._replace(writers_in_turn=_with_role(FIRST, all_writers, roles))
    else:
        read = {**writers_for_loss, **writers_for_update}
        others = {name: operations for name, operations in all_writers.items() if name not in read}
        question = question._replace(
            writers_by_tower_0=_with_role(FIRST, writers_for_loss, roles),
            other_writers=_with_role(FIRST, others, roles))
    if request.has_copies and not request.has_whole_batch:
        question = question._replace(writers_of_machine=_with_role(EVERY, all_writers, roles))
    return question._replace(
        writers_by_each_tower=_with_role(OWN, writers_for_loss, roles),
        writers_for_update=_for_update_alone(writers_for_update, writers_for_loss, roles),
        counters_read=list(_with_role(METRIC, {**writers_for_update, **writers_for_loss}, roles)),
        read_in_any_order=_read_in_any_order(writers_for_loss, tower_set))


def _read_in_any_order(writers_for_loss: Writers, tower_set: TowerSet) -> typing.List[str]:
    """The names of the reference variables whose memory a gradient reads and an update op writes.

    A program runs its update ops before its gradients, or after them, or in no fixed order. In the
    towers the gradients' reads come first. For a resource variable the order does not matter: a
    gradient takes the value that the forward pass has read. But a build makes resource variables
    where a program without towers makes reference variables: these count, too.

    Args:
      writers_for_loss: the writers of the variables that the loss is computed from.
      tower_set: the towers.
    """
    recorded = tower_set.recorded
    forward = names_of(graph_walk.step_operations(fetches_of(recorded.output)))
    gradients = tensors_of(tower_set.towers[0].pairs)
    backward = graph_walk.without_names(graph_walk.step_operations(gradients), forward)
    graph = tf.get_default_graph()
    finder = Writes(graph)
    found = []
    for name, operations in writers_for_loss.items():
        # A write that the loss and the predictions do not need is the write of an update op.
        writing_update_ops = names_of(operations) - forward
        if not writing_update_ops:
            continue
        variable = graph.get_operation_by_name(name)
        if variable.type in REFERENCE_VARIABLES:
            is_read = not names_of(backward).isdisjoint(names_of(finder.readers(variable)))
        else:
            is_read = name in recorded.references_elsewhere and _take_value(backward, name)
        if is_read:
            found.append(name)
    return found


def _take_value(operations: typing.Iterable[tf.Operation], variable: str) -> bool:
    """Whether any of some operations takes the value of a variable, given by its name, and not its
    shape alone."""
    for op in operations:
        if op.type in SIZES:
            continue
        if any(variable in names_of(read_from(tensor)) for tensor in op.inputs):
            return True
    return False


def _for_update_alone(writers_for_update: Writers, writers_for_loss: Writers,
                      roles: Roles) -> Writers:
    """The writers of the variables that the update reads and the loss does not read, and that may
    hold what one tower has computed from its examples.

    A variable that both read is among the loss's variables already.
    """
    writers = collections.OrderedDict()
    for name, operations in writers_for_update.items():
        may_hold_examples_of_one_tower = roles.role_of.get(name) in (FIRST, OWN)
        if may_hold_examples_of_one_tower and name not in writers_for_loss:
            writers[name] = operations
    return writers


def _question(tower_set: TowerSet) -> Question:
    """What the proof is asked about every loss of this build; `equality_line` adds the
    writers, which differ from loss to loss."""
    accumulate = tower_set.request.split.accumulate
    if len(tower_set.towers) == 1:  # one tower on each of several machines
        part_name = 'machine'
    elif accumulate == 1:
        part_name = 'tower'
    else:
        part_name = 'micro-batch'
    return Question(adds_shards=_adds_shards(tower_set),
                    static_size=static_size(tower_set.batch.inputs[0]), part_name=part_name,
                    gradient_factor=_gradient_factor(tower_set))


def _gradient_factor(tower_set: TowerSet) -> typing.Optional[int]:
    """By what the gradient of a loss that is a mean over the examples is multiplied: 1, or with
    'sum' the number of towers; None where shards of different sizes count alike."""
    request = tower_set.request
    if request.training.reduction == 'mean':
        return 1
    if losses_are_sums(request) and not tower_set.batch.is_even:
        return None
    return request.towers_of_update


def _adds_shards(tower_set: TowerSet) -> bool:
    """Whether the losses of the shards are added up, each with the factor 1. Where the loss is a
    sum over examples, this gives the loss of the batch."""
    request = tower_set.request
    if losses_are_sums(request):
        return True
    # With 'sum' the factors of the losses add up to the number of towers, N. The losses of two
    # equal shards have the factors 1 and 1; those of shards of 3 and 1 examples have 1.5 and 0.5.
    # With two micro-batches in each tower, the loss of each micro-batch has the factor 1/2.
    adds_up_to_towers = request.training.reduction == 'sum'
    has_shard_a_tower = request.split.accumulate == 1
    return (adds_up_to_towers and has_shard_a_tower and tower_set.batch.is_even
            and _have_machines_one_size(tower_set))


def _have_machines_one_size(tower_set: TowerSet) -> bool:
    """Whether the batches of all machines that make a step together are certain to have one number
    of examples; True for this machine alone."""
    request = tower_set.request
    if request.has_whole_batch:
        return True
    is_static = isinstance(tower_set.batch.batch_size, int)
    return is_static and request.has_equal_workers


def _writes_of_step(tower_set: TowerSet) -> typing.List[Write]:
    """The writes of the model function that a step of tower 0 runs, in its forward pass or among
    the updates."""
    request = tower_set.request
    recorded = tower_set.recorded
    no_updates = request.training.update_ops == 'none'
    has_train_op = bool(request.training.objectives)  # with which the update ops run
    forward = names_of(graph_walk.step_operations(fetches_of(recorded.output)))
    updates = names_of(graph_walk.step_operations(recorded.updates))
    # The proof has analysed the forward pass as the model function made it. Since then `ownership`
    # has taken writes out of the forward pass, which the step runs as updates.
    run = forward | updates | recorded.proven.analysis.analysed
    if no_updates or not has_train_op:
        run -= updates - forward
    if no_updates:  # then tower 0, as every tower, leaves out its inline updates
        run -= tower_set.roles.inline_updates.left_out
    return writes_by(writes_of_call(recorded), run)


def _read_by_update(update: Update) -> typing.List[tf.Tensor]:
    """The tensors that the update reads beside the gradients, such as a learning rate: other inputs
    of the operations that take a gradient."""
    gradients: typing.List[tf.Tensor] = []
    for gradient, _ in all_pairs(update.gradients):
        if isinstance(gradient, tf.IndexedSlices):
            gradients += [gradient.values, gradient.indices]
        elif gradient is not None:
            gradients.append(gradient)
    takers: typing.Dict[str, tf.Operation] = {}  # by name: an operation may take several gradients
    for gradient in gradients:
        takers.update(graph_walk.by_name(gradient.consumers()))
    gradient_names = names_of(gradients)
    read: typing.List[tf.Tensor] = []
    for op in takers.values():
        read += graph_walk.without_names(op.inputs, gradient_names)
    return read


def _read_by_transformation(update: Update,
                            towers: typing.Sequence[Tower]) -> typing.List[tf.Tensor]:
    """The variables that are read between the gradients of the towers and the gradients that the
    update takes, as by `transform_gradients`."""
    in_towers: typing.Set[str] = set()
    for tower in towers:
        in_towers |= tower.forward | tower.backward

    def sources(op: tf.Operation) -> typing.List[tf.Operation]:
        """The operations that an operation outside of the towers takes its inputs from."""
        return [] if op.name in in_towers else graph_walk.producers_of(op)

    gradients = tensors_of(all_pairs(update.gradients))
    operations = graph_walk.reached([tensor.op for tensor in gradients], sources).values()
    return [op.outputs[0] for op in operations if op.type in VARIABLE_OPS]


def _written_by_update_ops(variables: typing.List[tf.Tensor], writes: typing.List[Write],
                           tower_set: TowerSet) -> typing.List[str]:
    """The names of the variables, among some, that an update op of a step writes: a write that the
    loss and the predictions do not need."""
    forward = names_of(graph_walk.step_operations(fetches_of(tower_set.recorded.output)))
    names = {variable.op.name for variable in variables}
    found: typing.Set[str] = set()
    for write in writes:
        if write.op.name not in forward:
            found |= names.intersection(write.variables)
    return sorted(found)


def _writers(writes: typing.Iterable[Write]) -> typing.Dict[str, typing.List[tf.Operation]]:
    """The writers of each variable that some writes write."""
    writers: typing.Dict[str, typing.List[tf.Operation]] = {}
    for write in writes:
        for variable in write.variables:
            writers.setdefault(variable, []).append(write.op)
    return writers


def _writers_read_by(losses: typing.List[tf.Tensor], writes: typing.List[Write]) -> Writers:
    """The writers of the variables that losses are computed from.

    A loss also depends on a variable through another variable. Say a step sets `v` to the value of
    `u`: a loss that reads `v` depends on `u` in the next step.

    Args:
      losses: list of scalars.
      writes: the writes of a step.
    """
    upstream = _computed_from(losses)  # names of operations, among them the variables' own
    writers: typing.Dict[str, typing.List[tf.Operation]] = {}
    other_writes = writes
    found = writes_to(other_writes, upstream)
    while found:
        for write in found:
            for variable in write.variables:
                writers.setdefault(variable, []).append(write.op)
            # The next round looks for the writers of the variables that this write depends on.
            upstream |= _computed_from([*write.op.inputs, *_conditions_around(write.op)])
        other_writes = [write for write in other_writes if write not in found]
        found = writes_to(other_writes, upstream)
    return writers


def _computed_from(tensors: typing.Iterable[tf.Tensor]) -> typing.Set[str]:
    """The names of the operations that decide the values of tensors: the operations that the
    tensors are computed from, and the operations that compute the conditions of branches (v1).
    `tf.cond(p, lambda: 1, lambda: 2)` depends on `p`, although it takes a constant from each
    branch."""
    def sources(op: tf.Operation) -> typing.List[tf.Operation]:
        """The operations that directly decide the results of an operation."""
        inputs = graph_walk.producers_of(op)
        if op.type not in ('Merge', 'RefMerge'):
            return inputs
        conditions = itertools.chain.from_iterable(map(_conditions_around, inputs))
        return inputs + [condition.op for condition in conditions]
    return set(graph_walk.reached([tensor.op for tensor in tensors], sources))


def _conditions_around(op: tf.Operation) -> typing.List[tf.Tensor]:
    """The conditions of the branches and loops (v1) around an operation."""
    return [op.graph.get_tensor_by_name(name) for name in compat.conditions_around(op)]


def _with_role(role: str, writers: Writers, roles: Roles) -> Writers:
    """The writers of the variables that have a role, in the order of the variables' names."""
    return collections.OrderedDict(
        (name, writers[name]) for name in roles.names(role) if name in writers)


def _which_examples(request: Request) -> str:
    """The end of the line: whether a remainder of the batch is left out; and in a cluster, whether
    the batch is the batch of all machines, or, where each worker steps by itself, the worker's
    own."""
    text = ''
    if request.split.remainder == 'drop':
        text = '; a remainder of the batch is left out'
    if request.cluster is None:
        return text
    steps_alone = request.has_whole_batch  # this worker has all examples of its step
    if steps_alone:
        return text + "; the batch is one worker's own"
    return text + '; the batch is that of all machines'


def losses_are_sums(request: Request) -> bool:
    """Whether the gradients are the gradients of the plain sum of the towers' losses L_k.

    `reduction='sum'` means this sum only for an Estimator's model function, which calls optimizers
    itself. Else it means N times the batch's mean loss:

        sum_k L_k    or    N sum_k (n_k / n) L_k

    The two differ where shards have different sizes.
    """
    calls_optimizers_itself = request.training.objectives.optimizer_calls is not None
    return request.training.reduction == 'sum' and calls_optimizers_itself
