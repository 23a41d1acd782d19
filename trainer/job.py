"""The graph that train.py runs: input pipeline, towers, the counts of a step, and the evaluation.

`make_setup` joins model and data, `find_position` says how far a run is, and `build_job` makes the
graph. Its test is tests/trainer/test_trainer_job.py. A step does, in this order:

    read the batch at the example `examples_seen`, and measure how long that takes
    the towers' update, at the learning rate of `examples_seen`; the global step grows by one
    moving averages of the weights (--average_decay)
    `examples_seen` grows by the batch, over all machines

So batches and learning rate depend on `examples_seen` alone, which is saved with the weights: a run
that resumes goes on at the same place, also with another batch size.

Words of other modules used here:

    `Epochs`                    the stream of examples in batches; `length` is the examples of one
                                epoch that batches use
    `Cluster.workers_a_step`    the number of workers whose gradients are in one update: 1 if the
                                workers are asynchronous, else all
    `BuiltTowers.updates_here`  whether this process makes the update; False on a worker of
                                parameter servers for which the chief makes it
"""

import contextlib
import math
import os
import typing

import tensorflow.compat.v1 as tf

import towers
from datasets.epochs import Epochs
from models import registry
from models.classifier import Classifier
from towers.checkpoint.files import counter_in, reader_of
from towers.gradients.stateless_random import make_initial_values_stateless
from towers.placement.session_config import describe_config
from towers.run.evaluation import Evaluation
from towers.run.weights import WeightAverages
from trainer.arguments import (
    clip,
    examples_a_step,
    make_learning_rate,
    make_loss_scale,
    make_optimizer,
    memory_of_tower,
    saves,
    session_config,
    weight_of_l2_loss,
)
from trainer.batch_parts import check_batch, shares_of_towers
from trainer.flags import FLAGS, profiled_steps, train_dir
from trainer.own_model import OwnModel, is_own_model
from trainer.plan_text import short_plan, whole_plan
from trainer.speed import StepCounts, timed_batch


class Setup(typing.NamedTuple):
    """A model with its data, from which a graph is built.

    Attributes:
      model: `Classifier`, a network with its losses; or `OwnModel`.
      dataset: the data set of --dataset.
      batch_size: examples a step on this machine, over all of its towers; or 'auto', which is
        replaced before anything is built.
    """
    model: typing.Any
    dataset: typing.Any
    batch_size: typing.Any


class Job(typing.NamedTuple):
    """A training, built in the default graph.

    Attributes:
      setup: the model and its data.
      built: the towers.
      train_op: the operation of a step: the update of the towers, and all counts.
      evaluation: `Evaluation` of the test set, on the same variables; or None.
      iterator: the iterator of the training batches; to be initialized after the variables.
      counts: the counts of a step; its batch size is the examples of all machines together.
      last_example: the place in the stream of examples at which the run ends.
      learning_rate: a float32 scalar.
      input_wait: the seconds that the step waits for its batch, a float64 scalar; None with
        --deterministic.
    """
    setup: Setup
    built: towers.BuiltTowers
    train_op: tf.Operation
    evaluation: typing.Any
    iterator: typing.Any
    counts: StepCounts
    last_example: int
    learning_rate: tf.Tensor
    input_wait: typing.Optional[tf.Tensor]


class Position(typing.NamedTuple):
    """How far a run is.

    Attributes:
      step: the number of steps done.
      examples: the number of examples taken from the stream of all epochs.
    """
    step: int
    examples: int


START = Position(step=0, examples=0)


class End(typing.NamedTuple):
    """Where a run ends.

    Attributes:
      step: the last step.
      example: the place in the stream of examples after that step.
    """
    step: int
    example: int


def make_setup(dataset: typing.Any) -> Setup:
    """The `Setup` of the flags.

    Args:
      dataset: the data set of --dataset.

    Raises:
      InvalidArgumentError: the model does not go with the data, or is not known.
      OwnModelError: the module of a model of the user's own raised an error.
    """
    image_size = FLAGS.image_size or None  # 0 leaves the size to the model
    if is_own_model():
        return Setup(OwnModel(FLAGS.model, dataset, image_size), dataset, FLAGS.batch_size)
    return Setup(_make_classifier(dataset, image_size), dataset, FLAGS.batch_size)


def _make_classifier(dataset: typing.Any, image_size: typing.Optional[int]) -> Classifier:
    """The `Classifier` of the flags, with the network that --model names.

    Args:
      dataset: the data set of --dataset.
      image_size: height and width in pixels; None for the size that the network asks for.

    Raises:
      InvalidArgumentError: the network does not go with the data, or is not known.
    """
    if dataset.num_classes is None:
        raise towers.InvalidArgumentError(
            '--dataset=%s says no num_classes, which --model=%s needs: return it, or give '
            '--model=module:function, a model of your own.' % (FLAGS.dataset, FLAGS.model))
    batch_norm_decay = None
    if FLAGS.batch_norm_decay != -1:  # -1 is for what the network asks for
        batch_norm_decay = FLAGS.batch_norm_decay
    return Classifier(
        registry.get_network(FLAGS.model), dataset.num_classes, image_size=image_size,
        weight_decay=weight_of_l2_loss(), aux_loss_weight=FLAGS.aux_loss_weight,
        batch_norm_decay=batch_norm_decay, image_shape=dataset.image_shape,
        label_smoothing=FLAGS.label_smoothing, all_probabilities=FLAGS.probabilities)


def find_position(cluster: typing.Optional[towers.Cluster] = None) -> Position:
    """The `Position` of the run in --train_dir, from its newest checkpoint.

    All workers of a cluster need the position, since they count from it to the end of the schedule
    and of the run. The process that saves locks the folder while it looks for the checkpoint. A
    worker on a machine without this folder finds no checkpoint, and counts from 0.

    Args:
      cluster: the machines, or None.

    Returns:
      The position; `START` for a new run, and with --plan_only.
    """
    if FLAGS.plan_only or not os.path.isdir(train_dir()):
        return START
    lock: typing.ContextManager = contextlib.nullcontext()
    if saves(cluster):
        lock = towers.hold_directory(train_dir())
    with lock:
        newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        return START
    reader = reader_of(newest.prefix)
    if not (reader.has_tensor('global_step') and reader.has_tensor('examples_seen')):
        return START  # a checkpoint of another program, which is refused before it is restored
    return Position(counter_in(newest.prefix, 'global_step'),
                    counter_in(newest.prefix, 'examples_seen'))


def end_of_run(epochs: Epochs, position: Position) -> End:
    """The `End` of the run, for --train_steps or --train_epochs.

    --train_epochs stands for a number of examples. Steps are made until all of these are used, so
    the last step may also take examples of the next epoch.

    Only the steps from `position` on are counted by the current batch size: the steps before may
    have had another batch size. A run with 400 examples in 10 steps of 40 that now has batches of
    100, and is to end after 2874 examples, needs 25 steps more: it ends with step 35, at example
    2900.

    Args:
      epochs: the stream of examples, as batches.
      position: how far the run is.
    """
    last_step = FLAGS.train_steps
    if not last_step:
        # Rounded, since in floats 0.07 * 100 is more than 7, which would be one step more.
        num_examples = math.ceil(round(FLAGS.train_epochs * epochs.length, 6))
        last_step = position.step + epochs.steps(position.examples, num_examples)
    steps_left = max(0, last_step - position.step)  # a run may be beyond --train_steps already
    return End(last_step, epochs.place_after(position.examples, steps_left))


def build_job(setup: Setup, position: Position = START, with_evaluation: bool = True,
              cluster: typing.Optional[towers.Cluster] = None,
              learning_rate: typing.Optional[tf.Tensor] = None) -> Job:
    """Builds the `Job` of a `Setup` in the default graph.

    Args:
      setup: the model and its data.
      position: how far the run is.
      with_evaluation: whether to build the evaluation of the test set as well.
      cluster: the machines, or None.
      learning_rate: a float32 scalar in the place of the flags' learning rate; or None.

    Raises:
      InvalidArgumentError: a batch that does not divide among the towers, a shift as large as the
        images, or flags of the learning rate that do not fit the data.
    """
    batch_of_all = examples_a_step(cluster, setup.batch_size)
    epochs = Epochs(setup.dataset.num_examples['train'], batch_of_all, FLAGS.remainder)
    end = end_of_run(epochs, position)
    devices = _devices()
    check_batch(setup.batch_size, len(devices))
    _check_end(end, epochs.length)
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The place in the stream of examples, which batches and learning rate depend on.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        # `tf.identity` reads the variable: these functions take a tensor.
        iterator = _training_iterator(setup, tf.identity(examples_seen), cluster)
        batch = timed_batch(iterator, is_timed=not FLAGS.deterministic)
    schedule = make_learning_rate(setup.batch_size, len(devices), epochs.length, end.example,
                                  workers=1 if cluster is None else cluster.workers_a_step)
    if learning_rate is None:  # else the caller tries rates of its own, as --mode=find_rate does
        learning_rate = schedule.tensor(tf.identity(examples_seen))
    built = _build(setup, batch.batch, devices, learning_rate, cluster)
    built = _with_schedule_in_plan(built, schedule)
    averaged = _averaged(built, global_step)
    # So initial weights depend on the seed and their names alone, and not on other operations.
    make_initial_values_stateless(built.variables, FLAGS.seed)
    train_op = _counting(averaged.train_op, examples_seen, batch_of_all, built.updates_here)
    evaluation = None
    if with_evaluation:
        with averaged.instead_of_weights:  # the evaluation reads the averages, if there are any
            evaluation = make_evaluation(setup, trained=built)
    counts = StepCounts(global_step, batch_of_all, examples_per_epoch=epochs.length,
                        last_step=end.step, examples=examples_seen)
    return Job(setup, built, train_op, evaluation, iterator, counts, last_example=end.example,
               learning_rate=learning_rate, input_wait=batch.waited)


def _counting(update: tf.Operation, examples_seen: tf.Variable, batch_of_all: int,
              updates_here: bool) -> tf.Operation:
    """The operation of a step: counts the examples of the step after its update.

    Args:
      update: the operation of the update.
      examples_seen: the variable that counts the examples.
      batch_of_all: examples of a step, over all machines.
      updates_here: whether this process makes the update. On parameter servers the chief makes it,
        and adds the examples of all workers to the shared variable; another worker adds 0.
    """
    counted_here = batch_of_all if updates_here else 0
    with tf.control_dependencies([update]), tf.device('/cpu:0'):
        return tf.assign_add(examples_seen, counted_here).op


def _training_iterator(setup: Setup, first_example: tf.Tensor,
                       cluster: typing.Optional[towers.Cluster]) -> typing.Any:
    """The iterator of the training batches.

    Args:
      setup: the model, which says the size of images, and its data.
      first_example: int64 scalar, the place in the stream of examples at which the batches begin.
      cluster: the machines, each of which reads its share; or None.
    """
    reader = 0
    num_readers = 1
    if cluster is not None:
        reader = cluster.rank
        num_readers = cluster.num_workers
    batches = setup.dataset.train_batches(
        batch_size=setup.batch_size, seed=FLAGS.seed, first_example=first_example,
        shift=FLAGS.augment_shift, remainder=FLAGS.remainder, share=(reader, num_readers),
        **setup.model.image_format)
    return tf.data.make_initializable_iterator(batches)


def _with_schedule_in_plan(built: towers.BuiltTowers,
                           schedule: towers.LearningRate) -> towers.BuiltTowers:
    """The towers, with a plan that describes the schedule of the learning rate.

    `build_towers` sees only a tensor as the optimizer's learning rate, so its plan names the
    tensor. With a sum over the towers the line has a second half, after '; ', which stays:

        the tensor 'rate'; on the sum, steps as 4 x the rate would on the mean
        <the schedule>; on the sum, steps as 4 x the rate would on the mean

    Args:
      built: the towers.
      schedule: the schedule of the learning rate.
    """
    line = built.plan.line('learning rate') or ''
    _, semicolon, effect_of_sum = line.partition('; ')
    text = schedule.describe() + semicolon + effect_of_sum
    return built._replace(plan=built.plan.with_line('learning rate', text))


class _Averaged(typing.NamedTuple):
    """The update of towers, followed by the update of the moving averages of their weights.

    Attributes:
      train_op: the operation of both updates.
      instead_of_weights: a context in which models read the averages in the place of the weights.
    """
    train_op: tf.Operation
    instead_of_weights: typing.ContextManager


def _averaged(built: towers.BuiltTowers, global_step: tf.Variable) -> _Averaged:
    """Adds the moving averages of the weights to the update, if --average_decay is given.

    All workers of parameter servers make the averages, which are shared variables. Only a worker
    that updates the weights also updates the averages.

    Args:
      built: the towers.
      global_step: the variable that counts steps; in the first steps the decay is smaller.
    """
    if not FLAGS.average_decay:
        return _Averaged(built.train_op, instead_of_weights=contextlib.nullcontext())
    averages = WeightAverages(FLAGS.average_decay, global_step)
    weights = [variable for _, variable in built.gradients]
    train_op = built.train_op
    update_with_averages = averages.update_after(built.train_op, weights)  # makes the averages
    if built.updates_here:  # else this worker leaves their update to the chief, and does not run it
        train_op = update_with_averages
    return _Averaged(train_op, averages.instead_of_weights())


def _build(setup: Setup, batch: typing.Any, devices: towers.Devices, learning_rate: tf.Tensor,
           cluster: typing.Optional[towers.Cluster]) -> towers.BuiltTowers:
    """Builds the towers, as the flags say.

    Args:
      setup: the model.
      batch: a nest of tensors [batch_size, …].
      devices: the devices of the towers.
      learning_rate: a float32 scalar.
      cluster: the machines, or None.
    """
    objective = towers.Objective(make_optimizer(learning_rate),
                                 transform_gradients=clip if FLAGS.clip_norm else None)
    # Stateless random numbers depend on the seed and the step alone: a run that was stopped draws
    # the same numbers as a run that was not.
    numerics = towers.Numerics(
        FLAGS.precision, loss_scale=make_loss_scale(), xla=FLAGS.xla,
        check_numerics=FLAGS.check_numerics, stateless_random=True)
    return towers.build_towers(
        setup.model.model_fn('train'), batch, objective, devices, FLAGS.reduction,
        shares=shares_of_towers(), global_step=tf.train.get_global_step(),
        regularization=setup.model.regularization, batch_norm=FLAGS.batch_norm,
        variables=towers.VariablePlacement(FLAGS.variable_device or None), numerics=numerics,
        memory=memory_of_tower(),
        pipeline=towers.Pipeline(FLAGS.micro_batches, stages=_stages()),
        cluster=cluster, copies=FLAGS.copies)


def _devices() -> towers.Devices:
    """The devices of the towers; with --plan_only also devices that this machine does not have."""
    return towers.resolve_devices(FLAGS.devices or FLAGS.num_towers, check=not FLAGS.plan_only)


def _stages() -> typing.Optional[str]:
    """The `stages` for `Pipeline`: 'auto' for towers of several devices, as in
    --devices=/gpu:0+/gpu:1; else None."""
    return 'auto' if '+' in FLAGS.devices else None


def _check_end(end: End, examples_per_epoch: int) -> None:
    """Raises `InvalidArgumentError` for a flag about something after the end of the run: steps to
    be profiled or reported, or the end of the warm-up.

    Args:
      end: the end of the run.
      examples_per_epoch: the number of examples in one pass over the data.
    """
    profiled = profiled_steps(FLAGS.profile_steps)
    if profiled is not None and profiled.last > end.step:
        raise towers.InvalidArgumentError(
            '--profile_steps=%s: the run ends with step %d: give steps before its end'
            % (FLAGS.profile_steps, end.step))
    if FLAGS.report > end.step:
        raise towers.InvalidArgumentError(
            '--report=%d: the run ends with step %d: give a step before its end' % (
                FLAGS.report, end.step))
    if int(FLAGS.warmup_epochs * examples_per_epoch) > end.example:
        raise towers.InvalidArgumentError(
            '--warmup_epochs=%g is longer than the run, which has %.4g epochs, so that the rate '
            'would never be the full one: give less, or train longer' % (
                FLAGS.warmup_epochs, end.example / examples_per_epoch))


def make_evaluation(setup: Setup, trained: typing.Optional[towers.BuiltTowers] = None,
                    mode: str = 'eval') -> Evaluation:
    """Builds the `Evaluation` of the test set in the default graph.

    Args:
      setup: the model and its data.
      trained: the towers whose variables the evaluation reads, and on whose devices it runs; None
        to make variables, to be restored from a checkpoint.
      mode: 'eval'; or 'infer', for predictions.
    """
    devices = None  # `Evaluation` then takes the devices of `trained`
    if trained is None:
        devices = _devices()
    batches = setup.dataset.eval_batches(batch_size=setup.batch_size,
                                         **setup.model.image_format)
    return Evaluation(
        setup.model.model_fn(mode), batches, devices, trained,
        variables=towers.VariablePlacement(FLAGS.variable_device or None), copies=FLAGS.copies,
        precision=FLAGS.precision, regularization=setup.model.regularization,
        shares=shares_of_towers(), pipeline=towers.Pipeline(stages=_stages()))


def show(built: towers.BuiltTowers) -> None:
    """Prints plan and audit of towers: the short form; with --plan or --plan_only all of both.

    Args:
      built: the towers.

    Raises:
      AuditError: the graph breaks a promise of the plan.
    """
    audit = towers.audit(built).raise_if_broken()
    if FLAGS.plan or FLAGS.plan_only:
        config = describe_config(session_config(built), built.devices)
        print(whole_plan(built.plan, audit, config), flush=True)
    else:
        print(short_plan(built.plan, audit), flush=True)
