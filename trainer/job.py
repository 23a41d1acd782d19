"""The graph that train.py runs: input pipeline, towers, what a step counts, and the evaluation."""

import collections
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
from trainer.speed import StepCounts, timed_batch


class Setup(collections.namedtuple('Setup', 'model dataset batch_size')):
    """What a graph is built of.

    Attributes:
      model: `Classifier`, a network with its losses; or `OwnModel`.
      dataset: the data set of --dataset.
      batch_size: examples a step on this machine, over all of its towers; or `'auto'`, to be
        replaced before anything is built.
    """
    __slots__ = ()


class Job(collections.namedtuple('Job', [
        'setup', 'built', 'train_op', 'evaluation', 'iterator', 'counts', 'last_example',
        'learning_rate', 'input_wait'])):
    """A training, built in the default graph.

    Attributes:
      setup, built: `Setup` and `BuiltTowers`.
      train_op: operation of one step: the update of the towers, and all that is counted with it.
      evaluation: `Evaluation` of the test set on the same variables; or None.
      iterator: of the training batches; to be initialised after the variables.
      counts: `StepCounts`; the batch size in it is of all machines together.
      last_example: int, the place in the stream of examples at which the run ends.
      learning_rate: scalar float32 tensor.
      input_wait: float64 scalar tensor, the seconds that a step waits for its batch; None with
        --deterministic.
    """
    __slots__ = ()


def make_setup(dataset: typing.Any) -> Setup:
    """The `Setup` of the flags; raises where the model does not go with the data."""
    if is_own_model():
        model = OwnModel(FLAGS.model, dataset, FLAGS.image_size or None)
    elif dataset.num_classes is None:
        raise towers.InvalidArgumentError(
            '--dataset=%s says no num_classes, which --model=%s needs: return it, or give '
            '--model=module:function, a model of your own.' % (FLAGS.dataset, FLAGS.model))
    else:
        model = Classifier(
            registry.get_network(FLAGS.model), dataset.num_classes, FLAGS.image_size or None,
            weight_of_l2_loss(), FLAGS.aux_loss_weight,
            None if FLAGS.batch_norm_decay < 0 else FLAGS.batch_norm_decay, dataset.image_shape,
            FLAGS.label_smoothing, FLAGS.probabilities)
    return Setup(model, dataset, FLAGS.batch_size)


Position = collections.namedtuple('Position', 'step examples')
"""How far a run is: steps done, and examples taken from the stream of all epochs (ints)."""

START = Position(0, 0)


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
    return Position(*(counter_in(newest.prefix, name) for name in ('global_step', 'examples_seen')))


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
              cluster: typing.Optional[towers.Cluster] = None) -> Job:
    """Builds the `Job` of a `Setup` in the default graph, with the evaluation of the test set.

    Raises:
      InvalidArgumentError: a batch that does not divide among the towers, a shift as large as the
        images, or flags of the learning rate that do not fit the data.
    """
    epochs = Epochs(setup.dataset.num_examples['train'],
                    examples_a_step(cluster, setup.batch_size), FLAGS.remainder)
    last_step, last_example = end_of_run(epochs, position)
    devices = _devices()
    _check_batch(setup.batch_size, len(devices))
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The place in the stream of examples, which batches and learning rate depend on.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        batches = setup.dataset.train_batches(
            batch_size=setup.batch_size, seed=FLAGS.seed,
            first_example=tf.identity(examples_seen), shift=FLAGS.augment_shift,
            remainder=FLAGS.remainder, **setup.model.image_format,
            share=(0, 1) if cluster is None else (cluster.rank, cluster.num_workers))
        iterator = tf.data.make_initializable_iterator(batches)
        # TensorFlow refuses to tell the time in a step whose operations are deterministic.
        batch, input_wait = ((iterator.get_next(), None) if FLAGS.deterministic
                             else timed_batch(iterator))
    _check_end(last_step, last_example, epochs.length)
    rate = make_learning_rate(setup.batch_size, len(devices), epochs.length, last_example,
                              1 if cluster is None else cluster.workers_a_step)
    learning_rate = rate.tensor(tf.identity(examples_seen))
    built = _build(setup, batch, devices, learning_rate, cluster)
    # The plan says the schedule, in the place of the tensor that the optimizer has of it.
    effect = built.plan.line('learning rate').partition('; ')[1:]
    built = built._replace(plan=built.plan.with_line(
        'learning rate', rate.describe() + ''.join(effect)))
    train_op, weights = built.train_op, contextlib.nullcontext()
    if FLAGS.average_decay:
        averages = WeightAverages(FLAGS.average_decay, global_step)
        averaged = averages.update_after(train_op, [variable for _, variable in built.gradients])
        if built.updates_here:
            train_op = averaged
        weights = averages.instead_of_weights()
    make_initial_values_stateless(built.variables, FLAGS.seed)
    with tf.control_dependencies([train_op]), tf.device('/cpu:0'):
        examples = examples_a_step(cluster, setup.batch_size) if built.updates_here else 0
        train_op = tf.assign_add(examples_seen, examples).op
    evaluation = None
    if with_evaluation:
        with weights:
            evaluation = make_evaluation(setup, built)
    counts = StepCounts(global_step, examples_a_step(cluster, setup.batch_size), epochs.length,
                        last_step, examples_seen)
    return Job(setup, built, train_op, evaluation, iterator, counts, last_example, learning_rate,
               input_wait)


def _build(setup, batch, devices, learning_rate, cluster):
    """The `BuiltTowers` of the flags."""
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
    return towers.resolve_devices(FLAGS.devices or FLAGS.num_towers, check=not FLAGS.plan_only)


def _stages():
    """As `Pipeline` takes stages: cut by memory, for towers of several devices."""
    return 'auto' if '+' in FLAGS.devices else None


def shares_of_towers() -> typing.Optional[list]:
    """--shares as whole numbers; None for equal parts."""
    return [int(share) if share.isdecimal() else share
            for share in filter(None, FLAGS.shares.split(','))] or None


def parts_of_batch(num_towers: int) -> int:
    """The number that must divide a batch: towers by their --shares, times their micro-batches."""
    return sum(checked_shares(shares_of_towers(), num_towers, 'towers')) * (
        FLAGS.accumulate * FLAGS.micro_batches)


def _check_batch(batch_size, num_towers):
    """Raises `InvalidArgumentError` unless the batch divides into micro-batches."""
    micro_batches, parts = FLAGS.accumulate * FLAGS.micro_batches, parts_of_batch(num_towers)
    if batch_size % parts:
        raise towers.InvalidArgumentError(
            '--batch_size=%d does not divide among %d tower%s%s: give a multiple of %d' % (
                batch_size, num_towers, '' if num_towers == 1 else 's',
                '' if micro_batches == 1 else ' of %d micro-batches' % micro_batches, parts))


def _check_end(last_step, last_example, examples_per_epoch):
    """Raises `InvalidArgumentError` for what is to come after the end of the run."""
    if FLAGS.profile_steps and profiled_steps(FLAGS.profile_steps)[1] > last_step:
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


def make_evaluation(setup, trained=None, mode='eval'):
    """The `Evaluation` of the test set in the default graph; with `mode='infer'`, for predictions.

    Of the variables of `trained`, a `BuiltTowers`; or it makes them, to be restored.
    """
    batches = setup.dataset.eval_batches(batch_size=setup.batch_size,
                                         **setup.model.image_format)
    return Evaluation(
        setup.model.model_fn(mode), batches, None if trained else _devices(), trained,
        variables=towers.VariablePlacement(FLAGS.variable_device or None), copies=FLAGS.copies,
        precision=FLAGS.precision, regularization=setup.model.regularization,
        shares=shares_of_towers(), pipeline=towers.Pipeline(stages=_stages()))


def show(built: towers.BuiltTowers) -> None:
    """Prints the plan and the audit of towers; raises `AuditError` for a broken promise."""
    print(built.plan.with_line('session_config', describe_config(
        session_config(built), built.devices)), flush=True)
    print(towers.audit(built).raise_if_broken(), flush=True)
