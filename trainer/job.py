"""The graph that train.py runs: input pipeline, towers, what a step counts, and the evaluation."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from models import registry
from models.classifier import Classifier
import towers
from towers.placement.devices import describe_config
from towers.run.averages import WeightAverages
from towers.run.evaluation import Evaluation
from towers.tower.shards import checked_shares
from towers.tower.stateless_random import make_initial_values_stateless
from trainer.build_progress import BuildProgress
from trainer.cluster import counted, examples_a_step, share, workers_a_step
from trainer.fingerprint import ExamplesChecksum
from trainer.flags import FLAGS
from trainer.own_model import OwnModel, is_own_model
from trainer.optimizer import (clip, make_learning_rate, make_loss_scale, make_optimizer,
                               weight_of_l2_loss)
from trainer.position import START, end_of_run, epochs_of
from trainer.resources import memory_of_tower, session_config


class Setup(collections.namedtuple('Setup', [
        'model', 'dataset', 'batch_size', 'variable_device', 'stages'])):
    """What a graph is built of.

    Attributes:
      model: `Classifier`, a network with its losses; or `OwnModel`.
      dataset: the data set of --dataset.
      batch_size: examples a step on this machine, over all of its towers; or `'auto'`, to be
        replaced before anything is built.
      variable_device: as `VariablePlacement` takes a device; or `'auto'`, likewise.
      stages: as for `build_towers`; None without towers of several devices.
    """
    __slots__ = ()


class Job(collections.namedtuple('Job', [
        'setup', 'built', 'train_op', 'evaluation', 'iterator', 'counts', 'last_example',
        'learning_rate', 'checksum'])):
    """A training, built in the default graph.

    Attributes:
      setup: `Setup`.
      built: `BuiltTowers`.
      train_op: operation of one step: the update of the towers, and all that is counted with it.
      evaluation: `Evaluation` of the test set on the same variables; or None.
      iterator: of the training batches; to be initialised after the variables.
      counts: `StepCounts`; the batch size in it is of all machines together.
      last_example: int, the place in the stream of examples at which the run ends.
      learning_rate: scalar float32 tensor.
      checksum: int64 scalar tensor, with --fingerprint; else None.
    """
    __slots__ = ()


def make_setup(dataset):
    """The `Setup` of the flags.

    Raises:
      InvalidArgumentError: there is no such model, or it cannot be trained on the data set.
    """
    if is_own_model():
        model = OwnModel(FLAGS.model, dataset, FLAGS.image_size or None)
    elif dataset.num_classes is None:
        raise towers.InvalidArgumentError(
            '--dataset=%s says of no num_classes, which --model=%s needs: return it, or give '
            '--model=module:function, a model of your own.' % (FLAGS.dataset, FLAGS.model))
    else:
        model = Classifier(
            registry.get_network(FLAGS.model), dataset.num_classes, FLAGS.image_size or None,
            weight_of_l2_loss(), FLAGS.aux_loss_weight,
            None if FLAGS.batch_norm_decay < 0 else FLAGS.batch_norm_decay, dataset.image_shape)
    return Setup(model, dataset, FLAGS.batch_size, FLAGS.variable_device or None,
                 'auto' if '+' in FLAGS.devices else None)


def build_job(setup, position=START, with_evaluation=True, cluster=None):
    """Builds the training in the default graph.

    Args:
      setup: `Setup`.
      position: `Position` that the run goes on from.
      with_evaluation: whether to build the towers that evaluate the test set as well.
      cluster: `Cluster` of several machines; or None.

    Returns:
      `Job`.

    Raises:
      InvalidArgumentError: a batch that does not divide among the towers, a shift as large as the
        images, or flags of the learning rate that do not fit the data.
    """
    model, dataset, batch_size, variable_device, stages = setup
    step_size = examples_a_step(cluster, batch_size)
    epochs = epochs_of(setup, cluster)
    train_steps, last_example = end_of_run(epochs, position)
    devices = _devices()
    num_towers = len(devices)
    _check_batch(batch_size, num_towers)
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The place in the stream of examples, which batches and learning rate depend on.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        batches = dataset.train_batches(
            batch_size=batch_size, seed=FLAGS.seed, first_example=tf.identity(examples_seen),
            shift=FLAGS.augment_shift, remainder=FLAGS.remainder, share=share(cluster),
            **model.image_format)
        iterator = tf.data.make_initializable_iterator(batches)
        batch = iterator.get_next()
    rate = make_learning_rate(batch_size, num_towers, epochs.length, last_example,
                              workers_a_step(cluster))
    learning_rate = rate.tensor(tf.identity(examples_seen))
    with BuildProgress('%d tower%s' % (num_towers, '' if num_towers == 1 else 's')):
        built = towers.build_towers(
            model.model_fn('train'), batch, towers.Objective(
                make_optimizer(learning_rate),
                transform_gradients=clip if FLAGS.clip_norm else None), devices, FLAGS.reduction,
            remainder='error' if epochs.is_static else 'weight', shares=shares_of_towers(),
            global_step=global_step, regularization=model.regularization,
            update_ops=FLAGS.update_ops, batch_norm=FLAGS.batch_norm,
            variables=towers.VariablePlacement(
                variable_device, FLAGS.all_reduce if variable_device == 'replicated' else None),
            numerics=towers.Numerics(FLAGS.precision, make_loss_scale(), FLAGS.xla,
                                     FLAGS.check_numerics, stateless_random=True),
            memory=memory_of_tower(),
            pipeline=towers.Pipeline(FLAGS.micro_batches, FLAGS.schedule, stages),
            cluster=cluster, copies=FLAGS.copies)
    built = built._replace(plan=_with_rate(built.plan, rate))
    train_op, weights = built.train_op, contextlib.nullcontext()
    if FLAGS.average_decay:
        averages = WeightAverages(FLAGS.average_decay, global_step)
        averaged = averages.update_after(train_op, [variable for _, variable in built.gradients])
        if built.updates_here:
            train_op = averaged
        weights = averages.instead_of_weights()
    make_initial_values_stateless(built.variables, FLAGS.seed)
    checksum = None
    with tf.control_dependencies([train_op]), tf.device('/cpu:0'):
        train_op = tf.assign_add(examples_seen, counted(
            built, batch_size if epochs.is_static else tf.cast(
                tf.add_n([tower.size for tower in built.towers]), tf.int64))).op
        if FLAGS.fingerprint:
            checksum = ExamplesChecksum().update(*(tf.concat(parts, 0) for parts in zip(
                *[tower.inputs for tower in built.towers])))
            train_op = tf.group(train_op, checksum.op)
    evaluation = None
    if with_evaluation:
        with weights:
            evaluation = make_evaluation(setup, built)
    counts = towers.StepCounts(global_step, step_size, epochs.length, train_steps, examples_seen)
    return Job(setup, built, train_op, evaluation, iterator, counts, last_example, learning_rate,
               checksum)


def _devices():
    return towers.resolve_devices(FLAGS.devices or FLAGS.num_towers, check=not FLAGS.plan_only)


def _with_rate(plan, rate):
    """The plan with the schedule in the place of the tensor that the optimizer has of it."""
    effect = plan.learning_rate.partition('; ')[1:]
    return plan._replace(learning_rate=rate.describe() + ''.join(effect))


def shares_of_towers():
    """--shares as whole numbers; None for equal parts."""
    return [int(share) if share.isdecimal() else share for share in FLAGS.shares] or None


def parts_of_batch(num_towers):
    """What a batch has to be a multiple of: towers by their --shares, times their micro-batches."""
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


def make_evaluation(setup, trained=None, mode='eval'):
    """The `Evaluation` of the test set in the default graph.

    Args:
      setup: `Setup`.
      mode: 'eval'; or 'infer', for predictions.
      trained: `BuiltTowers` whose variables are evaluated; None: the evaluation makes them, to be
        restored from a checkpoint.
    """
    batches = setup.dataset.eval_batches(batch_size=setup.batch_size,
                                         **setup.model.image_format)
    with BuildProgress('the towers of the evaluation'):
        return Evaluation(
            setup.model.model_fn(mode), batches,
            None if trained else _devices(), trained,
            variables=towers.VariablePlacement(setup.variable_device), copies=FLAGS.copies,
            precision=FLAGS.precision, regularization=setup.model.regularization,
            shares=shares_of_towers(),
            # where the variables are
            pipeline=towers.Pipeline(stages='auto' if setup.stages else None))


def show(built):
    """Prints the plan and the audit of towers.

    Raises:
      AuditError: the audit finds a broken promise.
    """
    print(built.plan._replace(session=describe_config(session_config(built),
                                                      built.devices)), flush=True)
    print(towers.audit(built).raise_if_broken(), flush=True)
