"""The graph that train.py runs: input pipeline, towers, what a step counts, and the evaluation.

`make_setup` joins model and data, `find_position` says how far a run is, and `build_job` makes the
graph of both. A step does, in this order:

    read the batch at the example `examples_seen`, and measure how long that takes
    the towers' update, at the learning rate of `examples_seen`; the global step grows by one
    moving averages of the weights (--average_decay)
    `examples_seen` grows by the batch, over all machines

So batches and learning rate depend on `examples_seen` alone, which is saved with the weights: a run
that resumes goes on at the same place, also with another batch size.
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
from towers.errors import counted
from towers.gradients.stateless_random import make_initial_values_stateless
from towers.placement.devices import describe_config
from towers.run.evaluation import Evaluation
from towers.run.weights import WeightAverages
from towers.shards.cut_batch import checked_shares
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
from trainer.flags import FLAGS, profiled_steps, train_dir
from trainer.own_model import OwnModel, is_own_model
from trainer.plan_text import short_plan, whole_plan
from trainer.speed import StepCounts, timed_batch


class Setup(typing.NamedTuple):
    """What a graph is built of."""
    model: typing.Any  # `Classifier`, a network with its losses; or `OwnModel`
    dataset: typing.Any  # the data set of --dataset
    # Examples a step on this machine, over all of its towers, an int; or 'auto', to be replaced
    # before anything is built.
    batch_size: typing.Any


class Job(typing.NamedTuple):
    """A training, built in the default graph."""
    setup: Setup
    built: towers.BuiltTowers
    train_op: tf.Operation  # a step: the update of the towers, and all that is counted with it
    evaluation: typing.Any  # `Evaluation` of the test set, on the same variables; or None
    iterator: typing.Any  # of the training batches; to be initialised after the variables
    counts: StepCounts  # its batch size is that of all machines together
    last_example: int  # place in the stream of examples at which the run ends
    learning_rate: tf.Tensor  # float32 scalar
    input_wait: typing.Optional[tf.Tensor]  # seconds, a float64 scalar; None with --deterministic


class Position(typing.NamedTuple):
    """How far a run is."""
    step: int  # steps done
    examples: int  # taken from the stream of all epochs


START = Position(0, 0)


def make_setup(dataset: typing.Any) -> Setup:
    """The `Setup` of the flags.

    Args:
      dataset: the data set of --dataset.

    Raises:
      InvalidArgumentError: the model does not go with the data, or nobody knows it.
      OwnModelError: the module of a model of the user's own raised an error.
    """
    image_size = FLAGS.image_size or None
    if is_own_model():
        return Setup(OwnModel(FLAGS.model, dataset, image_size), dataset, FLAGS.batch_size)
    if dataset.num_classes is None:
        raise towers.InvalidArgumentError(
            '--dataset=%s says no num_classes, which --model=%s needs: return it, or give '
            '--model=module:function, a model of your own.' % (FLAGS.dataset, FLAGS.model))
    batch_norm_decay = None
    if FLAGS.batch_norm_decay >= 0:
        batch_norm_decay = FLAGS.batch_norm_decay
    model = Classifier(
        registry.get_network(FLAGS.model), dataset.num_classes, image_size, weight_of_l2_loss(),
        FLAGS.aux_loss_weight, batch_norm_decay, dataset.image_shape, FLAGS.label_smoothing,
        FLAGS.probabilities)
    return Setup(model, dataset, FLAGS.batch_size)


def find_position(cluster: typing.Optional[towers.Cluster] = None) -> Position:
    """The `Position` of the run in --train_dir, from its newest checkpoint; `START` of a new run,
    and for --plan_only.

    All workers of a cluster need it, since the end of the schedule and of the run is counted from
    there. The chief locks the folder while it looks. A worker that does not share it begins at 0.
    """
    if FLAGS.plan_only or not os.path.isdir(train_dir()):
        return START
    with towers.hold_directory(train_dir()) if saves(cluster) else contextlib.nullcontext():
        newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    # A checkpoint of another program is refused, by name, before anything is restored.
    if newest is None or not all(reader_of(newest.prefix).has_tensor(name)
                                 for name in ('global_step', 'examples_seen')):
        return START
    return Position(counter_in(newest.prefix, 'global_step'),
                    counter_in(newest.prefix, 'examples_seen'))


def end_of_run(epochs: Epochs, position: Position) -> typing.Tuple[int, int]:
    """The last step of the run, and the place in the stream of examples after it (two ints).

    Counted from `position`: the steps before it may have had another batch size, and the batches
    from there on begin at its place. --train_epochs are passed over when each of their examples has
    been given; the step that gives the last one is done whole, as in a run without a stop, so where
    an epoch's last batch is carried over it may take some of the next epoch.
    """
    # In floats 0.07 * 100 is more than 7, which would be a step more.
    end = math.ceil(round(FLAGS.train_epochs * epochs.length, 6))
    train_steps = FLAGS.train_steps or position.step + epochs.steps(position.examples, end)
    return train_steps, epochs.place_after(position.examples, max(0, train_steps - position.step))


def build_job(setup: Setup, position: Position = START, with_evaluation: bool = True,
              cluster: typing.Optional[towers.Cluster] = None,
              learning_rate: typing.Optional[tf.Tensor] = None) -> Job:
    """Builds the `Job` of a `Setup` in the default graph.

    Args:
      setup: what to build it of.
      position: how far the run is.
      with_evaluation: whether to build the evaluation of the test set.
      cluster: the machines, or None.
      learning_rate: float32 scalar, in the place of that of the flags.

    Raises:
      InvalidArgumentError: a batch that does not divide among the towers, a shift as large as the
        images, or flags of the learning rate that do not fit the data.
    """
    batch_of_all = examples_a_step(cluster, setup.batch_size)
    epochs = Epochs(setup.dataset.num_examples['train'], batch_of_all, FLAGS.remainder)
    last_step, last_example = end_of_run(epochs, position)
    devices = _devices()
    _check_batch(setup.batch_size, len(devices))
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The place in the stream of examples, which batches and learning rate depend on.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        iterator = _training_iterator(setup, tf.identity(examples_seen), cluster)
        batch = timed_batch(iterator, is_timed=not FLAGS.deterministic)
    _check_end(last_step, last_example, epochs.length)
    rate = make_learning_rate(setup.batch_size, len(devices), epochs.length, last_example,
                              1 if cluster is None else cluster.workers_a_step)
    if learning_rate is None:
        learning_rate = rate.tensor(tf.identity(examples_seen))
    built = _with_schedule(_build(setup, batch.batch, devices, learning_rate, cluster), rate)
    averaged = _averaged(built, global_step)
    make_initial_values_stateless(built.variables, FLAGS.seed)
    with tf.control_dependencies([averaged.train_op]), tf.device('/cpu:0'):
        examples = batch_of_all if built.updates_here else 0
        train_op = tf.assign_add(examples_seen, examples).op
    evaluation = None
    if with_evaluation:
        with averaged.instead_of_weights:
            evaluation = make_evaluation(setup, built)
    counts = StepCounts(global_step, batch_of_all, epochs.length, last_step, examples_seen)
    return Job(setup, built, train_op, evaluation, iterator, counts, last_example, learning_rate,
               batch.waited)


def _training_iterator(setup: Setup, first_example: tf.Tensor,
                       cluster: typing.Optional[towers.Cluster]):
    """The iterator of the training batches.

    Args:
      setup: the model, whose images have some size, and its data.
      first_example: int64 scalar, the place in the stream of examples at which they begin.
      cluster: the machines, each of which reads its share; or None.
    """
    share = (0, 1)
    if cluster is not None:
        share = (cluster.rank, cluster.num_workers)
    batches = setup.dataset.train_batches(
        batch_size=setup.batch_size, seed=FLAGS.seed, first_example=first_example,
        shift=FLAGS.augment_shift, remainder=FLAGS.remainder, share=share,
        **setup.model.image_format)
    return tf.data.make_initializable_iterator(batches)


def _with_schedule(built: towers.BuiltTowers, rate: towers.LearningRate):
    """Towers whose plan says the schedule, in place of the tensor that the optimizer has of it.

    Args:
      built: the towers.
      rate: the schedule of their optimizer.
    """
    line = built.plan.line('learning rate') or ''
    effect = line.partition('; ')[1:]
    text = rate.describe() + ''.join(effect)
    return built._replace(plan=built.plan.with_line('learning rate', text))


class _Averaged(typing.NamedTuple):
    """An update with that of the moving averages of the weights."""
    train_op: tf.Operation
    instead_of_weights: typing.ContextManager  # in it, models read the averages


def _averaged(built: towers.BuiltTowers, global_step: tf.Variable):
    """The update of towers with the moving averages of their weights.

    A process that does not update the weights, as a worker of parameter servers, does not update
    the averages either.

    Args:
      built: the towers.
      global_step: by which the decay is smaller in the first steps.

    Returns:
      The `_Averaged`; without --average_decay the update alone.
    """
    if not FLAGS.average_decay:
        return _Averaged(built.train_op, contextlib.nullcontext())
    averages = WeightAverages(FLAGS.average_decay, global_step)
    train_op = averages.update_after(built.train_op,
                                     [variable for _, variable in built.gradients])
    if not built.updates_here:
        train_op = built.train_op
    return _Averaged(train_op, averages.instead_of_weights())


def _build(setup: Setup, batch: typing.Any, devices: typing.List[str], learning_rate: tf.Tensor,
           cluster: typing.Optional[towers.Cluster]):
    """The `BuiltTowers` of the flags.

    Args:
      setup: the model.
      batch: a nest of tensors [batch_size, …].
      devices: of the towers.
      learning_rate: float32 scalar.
      cluster: the machines, or None.
    """
    return towers.build_towers(
        setup.model.model_fn('train'), batch,
        towers.Objective(make_optimizer(learning_rate),
                         transform_gradients=clip if FLAGS.clip_norm else None),
        devices, FLAGS.reduction, shares=shares_of_towers(),
        global_step=tf.train.get_global_step(),
        regularization=setup.model.regularization, batch_norm=FLAGS.batch_norm,
        variables=towers.VariablePlacement(FLAGS.variable_device or None),
        numerics=towers.Numerics(FLAGS.precision, make_loss_scale(), FLAGS.xla,
                                 FLAGS.check_numerics, stateless_random=True),
        memory=memory_of_tower(),
        pipeline=towers.Pipeline(FLAGS.micro_batches, stages=_stages()),
        cluster=cluster, copies=FLAGS.copies)


def _devices():
    """The devices of the towers, a list; with --plan_only also those that are not there."""
    return towers.resolve_devices(FLAGS.devices or FLAGS.num_towers, check=not FLAGS.plan_only)


def _stages():
    """The stages for `Pipeline`: cut by memory, for towers of several devices."""
    return 'auto' if '+' in FLAGS.devices else None


def shares_of_towers() -> typing.Optional[list]:
    """--shares as whole numbers; None for equal parts. Other texts stay, to be refused."""
    shares: list = []
    for share in filter(None, FLAGS.shares.split(',')):
        shares.append(int(share) if share.isdecimal() else share)
    return shares or None


def parts_of_batch(num_towers: int) -> int:
    """The number that must divide a batch: the sum of `shares`, times the micro-batches of a tower.

    Args:
      num_towers: how many there are; without `shares` each has the share 1.
    """
    return sum(checked_shares(shares_of_towers(), num_towers, 'towers')) * (
        FLAGS.accumulate * FLAGS.micro_batches)


def _check_batch(batch_size: int, num_towers: int):
    """Raises `InvalidArgumentError` unless the batch divides into the micro-batches of all towers.

    Args:
      batch_size: examples a step on this machine.
      num_towers: of this machine.
    """
    parts = parts_of_batch(num_towers)
    if batch_size % parts == 0:
        return
    among = counted(num_towers, 'tower')
    micro_batches = FLAGS.accumulate * FLAGS.micro_batches
    if micro_batches > 1:
        among += ' of %d micro-batches' % micro_batches
    raise towers.InvalidArgumentError(
        '--batch_size=%d does not divide among %s: give a multiple of %d' % (
            batch_size, among, parts))


def _check_end(last_step: int, last_example: int, examples_per_epoch: int):
    """Raises `InvalidArgumentError` for what is to come after the end of the run.

    Args:
      last_step: of the run, beyond which nothing can be profiled.
      last_example: the place in the stream of examples at which the run ends.
      examples_per_epoch: by which the warm-up is counted.
    """
    profiled = profiled_steps(FLAGS.profile_steps)
    if profiled is not None and profiled[1] > last_step:
        raise towers.InvalidArgumentError(
            '--profile_steps=%s: the run ends with step %d: give steps before its end'
            % (FLAGS.profile_steps, last_step))
    if FLAGS.report > last_step:
        raise towers.InvalidArgumentError(
            '--report=%d: the run ends with step %d: give a step before its end' % (
                FLAGS.report, last_step))
    if int(FLAGS.warmup_epochs * examples_per_epoch) > last_example:
        raise towers.InvalidArgumentError(
            '--warmup_epochs=%g is longer than the run, which has %.4g epochs, so that the rate '
            'would never be the full one: give less, or train longer' % (
                FLAGS.warmup_epochs, last_example / examples_per_epoch))


def make_evaluation(setup: Setup, trained: typing.Optional[towers.BuiltTowers] = None,
                    mode: str = 'eval') -> Evaluation:
    """Builds the `Evaluation` of the test set in the default graph.

    Args:
      setup: the model and its data.
      trained: the towers whose variables it reads; None: it makes variables, to be restored.
      mode: 'eval'; or 'infer', for predictions.
    """
    batches = setup.dataset.eval_batches(batch_size=setup.batch_size,
                                         **setup.model.image_format)
    return Evaluation(
        setup.model.model_fn(mode), batches, None if trained else _devices(), trained,
        variables=towers.VariablePlacement(FLAGS.variable_device or None), copies=FLAGS.copies,
        precision=FLAGS.precision, regularization=setup.model.regularization,
        shares=shares_of_towers(), pipeline=towers.Pipeline(stages=_stages()))


def show(built: towers.BuiltTowers) -> None:
    """Prints plan and audit of towers: the short form, or with --plan and --plan_only all.

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
