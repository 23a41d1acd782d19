"""The graph that train.py runs: input pipeline, towers, what a step counts, and the evaluation."""

import collections
import contextlib
import itertools
import math
import os

import tensorflow.compat.v1 as tf

import datasets
from datasets.epochs import Epochs
from models.classifier import Classifier
import towers
from towers.placement.devices import describe_config
from towers.run.averages import WeightAverages
from towers.run.evaluation import Evaluation
from towers.run.fingerprint import ExamplesChecksum
from towers.run.run_settings import recorded_setting
from towers.tower.stateless_random import make_initial_values_stateless
from trainer import cluster as train_cluster
from trainer import data as train_data
from trainer import flags as train_flags
from trainer.flags import FLAGS, train_dir


class Setup(collections.namedtuple('Setup', [
        'classifier', 'dataset', 'batch_size', 'variable_device', 'stages'])):
    """What a graph is built of.

    Attributes:
      classifier: `Classifier`, the network with its losses.
      dataset: the data set of --dataset.
      batch_size: examples a step on this machine, over all of its towers; or `'auto'`, to be
        replaced before anything is built.
      variable_device: as `VariablePlacement` takes a device; or `'auto'`, likewise.
      stages: as for `build_towers`; None without towers of several devices; while --stages=time or
        both is not measured, `'auto'`.
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


class Position(collections.namedtuple('Position', 'step examples')):
    """How far a run is: steps done, and examples taken from the stream of all epochs (ints)."""
    __slots__ = ()


START = Position(0, 0)


def make_setup(network, dataset):
    """The `Setup` of the flags, for a network of `models.registry`."""
    classifier = Classifier(
        network, dataset.num_classes, FLAGS.image_size or None, FLAGS.weight_decay,
        FLAGS.aux_loss_weight, None if FLAGS.batch_norm_decay < 0 else FLAGS.batch_norm_decay,
        dataset.image_shape)
    return Setup(classifier, dataset, FLAGS.batch_size, FLAGS.variable_device or None,
                 'auto' if '+' in FLAGS.devices else None)


_CLASSES = 'names of classes'  # a setting of the run, which is no flag


def names_of_classes(dataset):
    """The setting of a run that holds them: list of one pair; empty where they have no names."""
    classes = getattr(dataset, 'classes', None)  # image folders have names
    return [] if classes is None else [(_CLASSES, '\n'.join(classes))]


def of_data(dataset):
    """The settings of a run that its data are, as `train_flags.run_settings` takes them."""
    effect = () if train_data.is_own() else (  # their order is the user's own
        'other examples in another order from here on, not the run that it would be without a '
        'stop',)
    found = names_of_classes(dataset) + [
        ('number of training examples', int(dataset.num_examples['train'])) + effect]
    if hasattr(dataset, 'names_digest'):  # files, and they number the examples by their names
        found.append(('digest of the names of training files', dataset.names_digest('train'))
                     + effect)
    return found


def check_classes(dataset):
    """Raises `DatasetError` for classes that are not those which the run's network was trained on.

    A class folder that came, went or got another name moves the numbers of those after it, and
    every label would mean another output of the network.
    """
    recorded, given = recorded_setting(train_dir(), _CLASSES), names_of_classes(dataset)
    if not given or recorded is None or not tf.train.latest_checkpoint(train_dir()):
        return
    # Both split, since a name may have a line break in it.
    trained, found = recorded.split('\n'), given[0][1].split('\n')
    if trained != found:
        place = next(place for place, pair in enumerate(itertools.zip_longest(trained, found))
                     if pair[0] != pair[1])
        raise datasets.DatasetError(
            'the %d classes of --data_dir=%s are not the %d that the run in %s was trained on: '
            'class %d is %s, and was %s. Give the folders their old names, or begin another run in '
            'another --train_dir.' % (
                len(found), FLAGS.data_dir, len(trained), train_dir(), place,
                *('%r' % names[place] if place < len(names) else 'none'
                  for names in (found, trained))))


def find_position(cluster=None):
    """The `Position` of the run in --train_dir, from its newest checkpoint; `START` of a new run.

    All workers of a cluster need it, since the end of the schedule and of the run is counted from
    there. The chief locks the folder while it looks. A worker that does not share the folder begins
    at 0.

    Raises:
      CheckpointError: the newest checkpoint is damaged.
      RunLockedError: another process has the folder.
    """
    if not os.path.isdir(train_dir()):
        return START
    saves = cluster is None or cluster.is_chief
    with towers.hold_directory(train_dir()) if saves else contextlib.nullcontext():
        newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    # A checkpoint of another program is refused, by name, before anything is restored.
    return START if newest is None else position_of(newest.prefix) or START


def position_of(prefix):
    """The `Position` of a checkpoint; None of one of another program."""
    reader = tf.train.NewCheckpointReader(prefix)
    if not all(reader.has_tensor(name) for name in ('global_step', 'examples_seen')):
        return None
    return Position(int(reader.get_tensor('global_step')), int(reader.get_tensor('examples_seen')))


def last_step(setup, cluster, position):
    """The step with which a run ends that goes on from a `Position`, without building it."""
    return _end_of_run(_epochs(setup, cluster), position)[0]


def _epochs(setup, cluster):
    return Epochs(setup.dataset.num_examples['train'], train_cluster.examples_a_step(
        cluster, setup.batch_size), FLAGS.remainder)


def build_job(setup, position=START, with_evaluation=True, stage_inputs=None, cluster=None):
    """Builds the training in the default graph.

    Args:
      setup: `Setup`.
      position: `Position` that the run goes on from.
      with_evaluation: whether to build the towers that evaluate the test set as well.
      stage_inputs: as for `build_towers`; None: as the flags say.
      cluster: `Cluster` of several machines; or None.

    Returns:
      `Job`.

    Raises:
      InvalidArgumentError: a batch that does not divide among the towers, a shift as large as the
        images, or flags of the learning rate that do not fit the data.
    """
    classifier, dataset, batch_size, variable_device, stages = setup
    step_size = train_cluster.examples_a_step(cluster, batch_size)
    epochs = _epochs(setup, cluster)
    train_steps, last_example = _end_of_run(epochs, position)
    devices = FLAGS.devices or FLAGS.num_towers
    num_towers = len(towers.resolve_devices(devices, check=not FLAGS.plan_only))
    _check_batch(batch_size, num_towers)
    _check_shift(dataset)
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The place in the stream of examples, which batches and learning rate depend on.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        batches = dataset.train_batches(
            batch_size=batch_size, seed=FLAGS.seed, first_example=tf.identity(examples_seen),
            shift=FLAGS.augment_shift, remainder=FLAGS.remainder,
            share=train_cluster.share(cluster), **classifier.image_format)
        train_data.check_sizes(batches, 'train_batches', classifier.takes_any_size)
        iterator = tf.data.make_initializable_iterator(batches)
        batch = iterator.get_next()
    rate = train_flags.make_learning_rate(batch_size, num_towers, epochs.length, last_example,
                                          train_cluster.workers_a_step(cluster))
    learning_rate = rate.tensor(tf.identity(examples_seen))
    progress = towers.BuildProgress()
    built = towers.build_towers(
        classifier.model_fn(is_training=True), batch,
        train_flags.make_optimizer(learning_rate), devices, FLAGS.reduction,
        remainder='error' if epochs.is_static else 'weight',
        stage_inputs=train_data.staging() if stage_inputs is None else stage_inputs,
        variables=towers.VariablePlacement(
            variable_device, FLAGS.all_reduce if variable_device == 'replicated' else None),
        numerics=towers.Numerics(FLAGS.precision, train_flags.make_loss_scale(), FLAGS.xla,
                                 FLAGS.check_numerics),
        update_ops=FLAGS.update_ops, regularization='add', learning_rate=rate,
        transform_gradients=train_flags.clip if FLAGS.clip_norm else None, global_step=global_step,
        check_devices=not FLAGS.plan_only, stateless_random=True, copies=FLAGS.copies,
        on_tower=progress, cluster=cluster, stages=stages, **train_flags.memory_options())
    progress.close()
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
        train_op = tf.assign_add(examples_seen, train_cluster.counted(
            built, batch_size if epochs.is_static else tf.cast(
                tf.add_n([tower.size for tower in built.towers]), tf.int64))).op
        if FLAGS.fingerprint:
            checksum = ExamplesChecksum().update(*train_data.whole_batch(built))
            train_op = tf.group(train_op, checksum.op)
    evaluation = None
    if with_evaluation:
        with weights:
            evaluation = make_evaluation(setup, built)
    counts = towers.StepCounts(global_step, step_size, epochs.length, train_steps, examples_seen)
    return Job(setup, built, train_op, evaluation, iterator, counts, last_example, learning_rate,
               checksum)


def _end_of_run(epochs, position):
    """The last step of the run, and the place in the stream of examples after it (two ints).

    Counted from `position`: the steps before it may have had another batch size, and the batches
    from there on begin at its place. --train_epochs are passed over when each of their examples has
    been given; the step that gives the last one is done whole, as in a run without a stop, so with
    --remainder=carry it may take some of the next epoch.
    """
    # In floats 0.07 * 100 is more than 7, which would be a step more.
    end = math.ceil(round(FLAGS.train_epochs * epochs.length, 6))
    train_steps = FLAGS.train_steps or position.step + epochs.steps(position.examples, end)
    return train_steps, epochs.place_after(position.examples, max(0, train_steps - position.step))


def _check_batch(batch_size, num_towers):
    """Raises `InvalidArgumentError` unless the batch divides into micro-batches of one size."""
    micro_batches = FLAGS.accumulate * FLAGS.micro_batches
    parts = num_towers * micro_batches
    if batch_size % parts:
        raise towers.InvalidArgumentError(
            '--batch_size=%d does not divide among %d tower%s%s: give a multiple of %d' % (
                batch_size, num_towers, '' if num_towers == 1 else 's',
                '' if micro_batches == 1 else ' of %d micro-batches' % micro_batches, parts))


def _check_shift(dataset):
    """Raises `InvalidArgumentError` for an --augment_shift that leaves nothing of an image."""
    if FLAGS.augment_shift and FLAGS.augment_shift >= min(
            side or math.inf for side in dataset.image_shape[:2]):
        raise towers.InvalidArgumentError(
            '--augment_shift=%d moves images of %d x %d pixels out of sight: give less' % (
                (FLAGS.augment_shift,) + tuple(dataset.image_shape[:2])))


def make_evaluation(setup, trained=None):
    """The `Evaluation` of the test set in the default graph.

    Args:
      setup: `Setup`.
      trained: `BuiltTowers` whose variables are evaluated; None: the evaluation makes them, to be
        restored from a checkpoint.
    """
    batches = setup.dataset.eval_batches(batch_size=setup.batch_size,
                                         **setup.classifier.image_format)
    train_data.check_sizes(batches, 'eval_batches', setup.classifier.takes_any_size)
    progress = towers.BuildProgress(what='evaluation tower')
    evaluation = Evaluation(
        setup.classifier.model_fn(is_training=False), batches,
        None if trained else FLAGS.devices or FLAGS.num_towers, trained,
        variables=towers.VariablePlacement(setup.variable_device),
        check_devices=not FLAGS.plan_only, copies=FLAGS.copies, precision=FLAGS.precision,
        regularization='add', on_tower=progress,
        stages='auto' if setup.stages else None)  # where the variables are
    progress.close()
    return evaluation


def session_config(built):
    """The `tf.ConfigProto` for a session of these towers, as the flags say."""
    return towers.use_precision(
        towers.session_config(built.devices, **train_flags.session_options()), built.precision,
        built.devices)


def show(built):
    """Prints the plan and the audit of towers.

    Raises:
      AuditError: the audit finds a broken promise.
    """
    print(built.plan._replace(session=describe_config(session_config(built),
                                                      built.devices)), flush=True)
    print(towers.audit(built).raise_if_broken(), flush=True)
