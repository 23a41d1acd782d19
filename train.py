"""Trains an image classifier on several devices; with no flags, handwritten digits on 2 towers."""

import signal

if __name__ == '__main__' and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds, and have nothing to save

import collections  # noqa: E402
import contextlib  # noqa: E402
import csv  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

from absl import app  # noqa: E402

from quiet_import import without_log_lines  # noqa: E402

with without_log_lines():  # this program's own lines are the output
    import tensorflow.compat.v1 as tf  # noqa: E402

import datasets  # noqa: E402
from datasets.epochs import Epochs  # noqa: E402
from models import registry  # noqa: E402
from models.classifier import Classifier  # noqa: E402
import towers  # noqa: E402
from towers.memory import report as memory_reports  # noqa: E402
from towers.placement.devices import describe_config  # noqa: E402
from towers.run import choose_placement  # noqa: E402
from towers.run.averages import WeightAverages, averages_in  # noqa: E402
from towers.run.evaluation import Evaluation, EvaluationHook  # noqa: E402
from towers.run.export import export_saved_model  # noqa: E402
from towers.run.fingerprint import ExamplesChecksum, FingerprintHook  # noqa: E402
from towers.run.metrics_log import MetricsHook  # noqa: E402
from towers.run.output_stream import OutputStream, lasting_output  # noqa: E402
from towers.run.progress import ProgressHook  # noqa: E402
from towers.run.run_settings import recorded_setting  # noqa: E402
from towers.tower.stateless_random import make_initial_values_stateless  # noqa: E402
from towers.run.step_loop import OccasionalHook  # noqa: E402
from towers.run.stopping import StopOnSignalHook, interruptible  # noqa: E402
from towers.run.summaries import SummaryHook, default_summaries  # noqa: E402
from towers.run.training_session import training_session  # noqa: E402
from towers.run.whole_file import written_whole  # noqa: E402
import train_cluster  # noqa: E402
import train_data  # noqa: E402
import train_flags  # noqa: E402
from train_flags import FLAGS, refuse, train_dir  # noqa: E402


def main(unused_argv):
    """Builds, shows the plan, checks it, and does what --mode says; returns the exit status."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # of TF to tf_slim, not to us
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    unused = train_flags.without_effect()
    if unused:
        print('without effect %s: --mode=%s does not train' % (
            ', '.join('--' + name for name in unused), FLAGS.mode), flush=True)
    network = registry.get_network(FLAGS.model)
    dataset = train_data.make_dataset()
    if FLAGS.mode == 'check_data':
        return 1 if datasets.check_data(dataset) else 0
    classifier = make_classifier(network, dataset)
    variable_device = FLAGS.variable_device or None
    if FLAGS.mode in ('eval', 'predict') and not FLAGS.plan_only:
        newest_or_refuse()  # before a network is built for nothing
    runs = FLAGS.mode == 'train' and not FLAGS.plan_only
    if FLAGS.mode == 'memory' or FLAGS.batch_size == 'auto':
        show_or_fit_memory(classifier, dataset, variable_device)
        if FLAGS.mode == 'memory':
            return 0
    cluster = train_cluster.make_cluster()
    if cluster is not None and cluster.job == 'ps' and runs:
        return towers.serve(cluster)
    if cluster is not None and cluster.job == 'evaluator' and runs:
        return train_cluster.evaluate_checkpoints(
            lambda: evaluate_in_graph(classifier, dataset, variable_device), train_dir())
    saves = cluster is None or cluster.is_chief
    position = find_position(cluster) if runs else START
    if variable_device == 'auto':
        variable_device = choose_variable_device(classifier, dataset, position)
    if FLAGS.mode == 'diagnose':
        print(train_data.diagnose(dataset, classifier, lambda stage: build_job(
            classifier, dataset, variable_device, with_evaluation=False, stage_inputs=stage),
                                  session_config))
        return 0
    if saves:
        train_data.prepare_skipping(dataset, train_dir(), position)
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        if FLAGS.mode == 'train':
            job = build_job(classifier, dataset, variable_device, position,
                            with_evaluation=saves and not FLAGS.plan_only, cluster=cluster)
            if saves or FLAGS.plan_only:
                show(job.built)
            stopped_by = None if FLAGS.plan_only else (
                train(job, dataset, cluster) if saves else train_cluster.work(
                    cluster, job, dataset, StartInputHook(job.iterator)))
            if stopped_by is not None:
                return 128 + stopped_by
        else:
            evaluation = make_evaluation(classifier, dataset, variable_device)
            show(evaluation.built)
            if not FLAGS.plan_only:
                with train_data.naming_bad_test_images(dataset):
                    {'eval': evaluate, 'predict': predict}[FLAGS.mode](evaluation)
    if FLAGS.export_dir and not FLAGS.plan_only:
        export(classifier)
    return 0


def show(built):
    """Prints the plan and the audit; an audit that finds a broken promise is the end."""
    print(built.plan._replace(session=describe_config(session_config(built), built.devices)),
          flush=True)
    print(towers.audit(built).raise_if_broken(), flush=True)


Job = collections.namedtuple('Job', 'built train_op evaluation iterator global_step examples_seen '
                             'train_steps learning_rate examples_per_epoch checksum batch_size '
                             'last_example')


# Where in the stream of examples a run is.
Position = collections.namedtuple('Position', 'step examples')
START = Position(0, 0)


def find_position(cluster=None):
    """The `Position` of the run in --train_dir, from its newest checkpoint.

    Workers that save nothing need it as well: the end of a schedule and of the run is reckoned from
    it. They only look, while the chief holds the folder; one that does not share it begins at 0.
    """
    if not os.path.isdir(train_dir()):
        return START
    saves = cluster is None or cluster.is_chief
    with towers.hold_directory(train_dir()) if saves else contextlib.nullcontext():
        newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        return START
    reader = tf.train.NewCheckpointReader(newest.prefix)
    if not all(reader.has_tensor(name) for name in ('global_step', 'examples_seen')):
        return START  # of another program: refused, by name, before anything is restored
    return Position(int(reader.get_tensor('global_step')), int(reader.get_tensor('examples_seen')))


def choose_variable_device(classifier, dataset, position):
    """Where the run in --train_dir has its variables; if it is new, the place that is fastest."""
    def build(candidate):
        tf.set_random_seed(FLAGS.seed)
        job = build_job(classifier, dataset, candidate, position, with_evaluation=False)
        return choose_placement.Trial(job.train_op, [job.iterator.initializer],
                                      session_config(job.built))
    devices = towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)
    chosen, text = choose_placement.recorded_choice(
        train_dir(), devices,
        lambda: towers.choose_variable_device(build, towers.placement_candidates(devices)))
    print(text, flush=True)
    return chosen


def show_or_fit_memory(classifier, dataset, variable_device):
    """Says where the memory of a step goes; or makes 'auto' the largest batch that fits."""
    def build(batch_size):
        FLAGS.batch_size = batch_size
        tf.set_random_seed(FLAGS.seed)
        job = build_job(classifier, dataset, variable_device)
        return job.built, [job.iterator.initializer]
    memory_reports.count_on_cpus()
    if FLAGS.mode == 'memory':
        towers.memory_report(build, FLAGS.batch_size, train_flags.memory_limit(),
                             FLAGS.memory_plot or None, session_config)
        return
    parts = FLAGS.accumulate * FLAGS.micro_batches * len(
        towers.resolve_devices(FLAGS.devices or FLAGS.num_towers))
    recorded = recorded_setting(train_dir(), 'batch_size')
    if isinstance(recorded, int) and recorded % parts == 0:
        FLAGS.batch_size = recorded
        print('batch %d: as the run in %s was last started' % (recorded, train_dir()), flush=True)
        return
    FLAGS.batch_size = towers.fit_batch_size(
        build, parts, train_flags.memory_limit(), print, session_config,
        dataset.num_examples['train']).batch_size


def make_classifier(network, dataset):
    """The classifier of the flags."""
    return Classifier(
        network, dataset.num_classes, FLAGS.image_size or None, FLAGS.weight_decay,
        FLAGS.aux_loss_weight, None if FLAGS.batch_norm_decay < 0 else FLAGS.batch_norm_decay)


def build_job(classifier, dataset, variable_device, position=START, with_evaluation=False,
              stage_inputs=None, cluster=None):
    """The graph: batches, towers, and the evaluation that shares their variables if wanted."""
    batch_size = train_cluster.examples_a_step(cluster)
    epochs = Epochs(dataset.num_examples['train'], batch_size, FLAGS.remainder)
    examples_per_epoch = epochs.length
    # From the position on: the steps before it may have had another batch size.
    train_steps = FLAGS.train_steps or position.step + max(0, int(epochs.steps(
        position.examples, FLAGS.train_epochs * examples_per_epoch)))
    last_example = epochs.place_after(position.examples, max(0, train_steps - position.step))
    devices = FLAGS.devices or FLAGS.num_towers
    num_towers = len(towers.resolve_devices(devices, check=not FLAGS.plan_only))
    micro_batches = FLAGS.accumulate * FLAGS.micro_batches
    parts = num_towers * micro_batches
    if FLAGS.batch_size % parts:
        raise towers.InvalidArgumentError(
            '--batch_size=%d does not divide among %d towers%s: give a multiple of %d' % (
                FLAGS.batch_size, num_towers, '' if micro_batches == 1 else
                ' of %d micro-batches' % micro_batches, parts))
    if FLAGS.augment_shift and FLAGS.augment_shift >= min(
            side or math.inf for side in dataset.image_shape[:2]):
        raise towers.InvalidArgumentError(
            '--augment_shift=%d moves images of %d x %d pixels out of sight: give less' % (
                (FLAGS.augment_shift,) + tuple(dataset.image_shape[:2])))
    with tf.device('/cpu:0'):
        global_step = tf.train.get_or_create_global_step()
        # The run's position: where in the stream of examples, hence of the schedule, it is.
        examples_seen = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)
        batches = dataset.train_batches(
            batch_size=FLAGS.batch_size, seed=FLAGS.seed,
            first_example=tf.identity(examples_seen), shift=FLAGS.augment_shift,
            remainder=FLAGS.remainder, share=train_cluster.share(cluster),
            **classifier.image_format)
        iterator = tf.data.make_initializable_iterator(batches)
        batch = iterator.get_next()
    rate = train_flags.make_learning_rate(num_towers, examples_per_epoch, last_example,
                                           train_cluster.workers_a_step(cluster))
    learning_rate = rate.tensor(tf.identity(examples_seen))
    progress = towers.BuildProgress()
    built = towers.build_towers(
        classifier.model_fn(is_training=True), batch,
        train_flags.make_optimizer(learning_rate), devices, FLAGS.reduction,
        remainder='error' if epochs.is_static else 'weight',
        stage_inputs=train_data.staging() if stage_inputs is None else stage_inputs,
        variable_device=variable_device, update_ops=FLAGS.update_ops,
        transform_gradients=train_flags.clip if FLAGS.clip_norm else None, global_step=global_step,
        regularization='add',
        learning_rate=rate, check_devices=not FLAGS.plan_only,
        check_numerics=FLAGS.check_numerics, stateless_random=True, copies=FLAGS.copies,
        all_reduce=FLAGS.all_reduce if variable_device == 'replicated' else None,
        precision=FLAGS.precision, loss_scale=train_flags.make_loss_scale(), xla=FLAGS.xla,
        on_tower=progress, cluster=cluster, **train_flags.memory_options())
    progress.close()
    train_op, weights = built.train_op, contextlib.nullcontext()
    if FLAGS.average_decay:
        averages = WeightAverages(FLAGS.average_decay, global_step)
        averaged = averages.update_after(train_op, [variable for _, variable in built.gradients])
        if cluster is None or built.machines.updates_here:
            train_op = averaged
        weights = averages.instead_of_weights()
    make_initial_values_stateless(built.variables, FLAGS.seed)
    checksum = None
    with tf.control_dependencies([train_op]), tf.device('/cpu:0'):
        train_op = tf.assign_add(examples_seen, train_cluster.counted(
            built, FLAGS.batch_size if epochs.is_static else tf.cast(
                tf.add_n([tower.size for tower in built.towers]), tf.int64))).op
        if FLAGS.fingerprint:
            checksum = ExamplesChecksum().update(*train_data.whole_batch(built))
            train_op = tf.group(train_op, checksum.op)
    evaluation = None
    if with_evaluation:
        with weights:
            evaluation = make_evaluation(classifier, dataset, variable_device, built)
    return Job(built, train_op, evaluation, iterator, global_step, examples_seen, train_steps,
               learning_rate, examples_per_epoch, checksum, batch_size, last_example)


def make_evaluation(classifier, dataset, variable_device, trained=None):
    """The towers that evaluate the test set, on the variables of trained towers if given."""
    batches = dataset.eval_batches(batch_size=FLAGS.batch_size, **classifier.image_format)
    progress = towers.BuildProgress(what='evaluation tower')
    evaluation = Evaluation(
        classifier.model_fn(is_training=False), batches,
        None if trained else FLAGS.devices or FLAGS.num_towers, trained,
        variable_device=variable_device, check_devices=not FLAGS.plan_only, copies=FLAGS.copies,
        precision=FLAGS.precision, regularization='add', on_tower=progress,
        stages=FLAGS.stages or None)
    progress.close()
    return evaluation


MANY_OPERATIONS = 50000  # from about here on the first step takes longer than one waits in silence


def train(job, dataset, cluster=None):
    """Runs the steps that are left, evaluates, and says where things are.

    Returns:
      The number of the signal that stopped it, or None.
    """
    values = [('loss', job.built.loss), ('learning_rate', job.learning_rate)]
    scaled = job.built.scaled_losses
    if scaled is not None:
        values += [('loss_scale', scaled.scale), ('skipped_steps', scaled.skipped_steps)]
    log_values = values + ([] if job.checksum is None else [('examples_checksum', job.checksum)])
    counts = dict(batch_size=job.batch_size, examples=job.examples_seen)
    watch = towers.InputWatchHook(job.train_op, say=None, staged=job.built.staged)
    progress = ProgressHook([('lr' if name == 'learning_rate' else name, value)
                             for name, value in values],
                            job.global_step, job.train_steps, log_every=FLAGS.log_every,
                            examples_per_epoch=job.examples_per_epoch,
                            devices=job.built.devices, fetch_every_step=True, input_watch=watch,
                            **counts)
    metrics = MetricsHook(log_values, job.global_step, os.path.join(train_dir(), 'metrics.jsonl'),
                          examples_per_epoch=job.examples_per_epoch, log_every=FLAGS.log_every,
                          last_step=job.train_steps, fetch_every_step=True, say=progress.write,
                          input_watch=watch, **counts)
    listeners = [progress, metrics]
    if FLAGS.summary_steps:
        listeners.append(SummaryHook(
            default_summaries(job.built, job.learning_rate), job.global_step, train_dir(),
            summary_steps=FLAGS.summary_steps, last_step=job.train_steps, **counts))
    fingerprint = [FingerprintHook(job.built.variables, job.global_step, metrics.log)
                   ] if FLAGS.fingerprint else []
    signals = StopOnSignalHook() if cluster is None else towers.StopTogetherHook(cluster, job.built)
    if isinstance(sys.stdout, OutputStream):  # a run whose output is lost saves before it ends
        sys.stdout.on_lost = lambda error: signals.stop(signal.SIGPIPE)
    evaluation = EvaluationHook(
        job.evaluation, job.global_step, FLAGS.eval_steps or None, listeners,
        ('accuracy', FLAGS.stop_at_accuracy) if FLAGS.stop_at_accuracy else None,
        skip_end=lambda: signals.received is not None)
    operations = len(tf.get_default_graph().get_operations())
    if operations > MANY_OPERATIONS:
        print('starting       TensorFlow takes minutes for the first step of a graph of {:,d} '
              'operations'.format(operations), flush=True)
    initial_values = (towers.init_from(FLAGS.init_from, job.built.variables)
                      if FLAGS.init_from else None)
    ended = None
    try:
        with train_cluster.joined(cluster, job) as member, training_session(
                train_dir(), job.global_step, [StartInputHook(job.iterator, job.evaluation), watch]
                + train_cluster.hooks(cluster, job) + listeners + fingerprint + [evaluation],
                session_config(job.built), FLAGS.save_steps,
                FLAGS.keep, FLAGS.recover, initial_values,
                [hook.listener for hook in listeners], last_hooks=[signals],
                settings=train_flags.run_settings(), built=job.built,
                memory_limit=train_flags.memory_limit(), member=member) as session:
            def position():
                return session.run_step_fn(
                    lambda step_context: int(step_context.session.run(job.global_step)))
            step = begin = position()
            if step >= job.train_steps:
                print('%s holds %d steps already, and %d were asked for: evaluating them. Another '
                      '--train_dir starts anew.' % (train_dir(), step, job.train_steps))
            try:
                if FLAGS.audit_runtime and step < job.train_steps and not session.should_stop():
                    audit_runtime(job, session)
                    step += 1
                # Again if TensorFlow lost the session: it then went back to the newest checkpoint.
                while step < job.train_steps and not session.should_stop():
                    with train_data.skipping(dataset, job, session,
                                             train_cluster.share(cluster)[1]):
                        session.run_steps(job.train_op, job.train_steps - step)
                    step = job.train_steps if session.should_stop() else position()
            except tf.errors.OutOfRangeError:  # to the session the end, at which it saves as usual
                ended = train_data.ended(position(), begin, job.train_steps)
    finally:
        progress.close()
        signals.restore()
    train_data.tell_skipped(dataset)
    if signals.received is None:
        report(progress.throughput, evaluation.latest)
    print('checkpoint     %s' % tf.train.latest_checkpoint(train_dir()))
    if ended is not None:
        raise ended
    return signals.received


class StartInputHook(OccasionalHook):
    """Starts the input at the example that the restored variables say comes next.

    Of a user's own data it reads a batch to be evaluated: that there is none would otherwise show
    when the training is done.
    """

    def __init__(self, iterator, evaluation=None):
        self._iterator = iterator
        self._evaluation = evaluation if train_data.is_own() else None

    def after_create_session(self, session, coord):
        """Runs the iterator's initializer."""
        session.run(self._iterator.initializer)
        if self._evaluation is not None:
            self._evaluation.check_examples(session, read=True)

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False


def session_config(built):
    """The session's config for these towers."""
    return towers.use_precision(
        towers.session_config(built.devices, **train_flags.session_options()), built.precision,
        built.devices)


def audit_runtime(job, session):
    """Does one step and checks where the runtime put its operations."""
    metadata = tf.RunMetadata()
    session.run(job.train_op, options=tf.RunOptions(output_partition_graphs=True),
                run_metadata=metadata)
    print(towers.audit(job.built, metadata).raise_if_broken(), flush=True)


def report(throughput, evaluation):
    """How good and how fast."""
    print('test accuracy  %.4f on %d images' % (evaluation['accuracy'], evaluation['examples']))
    if throughput is not None:
        print('speed          {:,.0f} images/s'.format(throughput.examples / throughput.seconds))


def evaluate(evaluation):
    """Evaluates the newest checkpoint on the test set."""
    with restored_session(evaluation.built) as session:
        report(None, evaluation.run(session))


def evaluate_in_graph(classifier, dataset, variable_device):
    """Evaluates the newest checkpoint in a graph of its own."""
    with tf.Graph().as_default():
        evaluate(make_evaluation(classifier, dataset, variable_device))


def predict(evaluation):
    """Writes a row an image of the test set: its number, label, prediction and probability."""
    with restored_session(evaluation.built) as session, \
            written_whole(FLAGS.predictions, 'Give another --predictions.', newline='') as table:
        rows = csv.writer(table)
        rows.writerow(['image', 'label', 'predicted', 'probability'])
        number = 0
        for batch in evaluation.predict(session):
            for label, predicted, probability in zip(batch['label'], batch['predicted'],
                                                     batch['probability']):
                rows.writerow([number, label, predicted, '%.6f' % probability])
                number += 1
    print('predictions    %s, %d images' % (FLAGS.predictions, number))


@contextlib.contextmanager
def restored_session(built):
    """A session with the weights of the newest checkpoint, or their averages if it has them."""
    prefix = newest_or_refuse()
    names, averages = averages_in(prefix, tf.global_variables())
    towers.check_fits(prefix, names)
    saver = tf.train.Saver(names)
    with tf.Session(config=session_config(built)) as session:
        saver.restore(session, prefix)
        print('checkpoint     %s%s' % (prefix, ', moving averages' if averages else ''), flush=True)
        yield session


def newest_or_refuse():
    """The newest checkpoint of --train_dir, which is only read, or an error if there is none."""
    newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    if newest is None:
        raise towers.CheckpointError('%s holds no checkpoint: train first, or give the --train_dir '
                                     'of a run.' % train_dir())
    return newest.prefix


def export(classifier):
    """Writes the SavedModel of the newest checkpoint."""
    print('SavedModel     %s' % export_saved_model(classifier.serving, newest_or_refuse(),
                                                   FLAGS.export_dir))


def run(argv):
    """Runs `main`; what a user can get wrong is one line, not a traceback."""
    try:
        with interruptible():
            return main(argv)
    except towers.OutputLostError:
        raise
    except FAILURES as error:
        if isinstance(error, datasets.OwnDataError):
            train_data.show_cause(error)
        train_flags.say(error)
        return 1
    except towers.TowersError as error:
        refuse(error)
    except tf.errors.ResourceExhaustedError as error:
        found = re.search(r'OOM when allocating tensor with shape\[[\d,]*\]', str(error))
        train_flags.say('there is not enough memory%s. Give a smaller --batch_size or '
                        '--image_size, or more towers on other devices.' % (
                            ': ' + found.group() if found else ''))
        return 1
    except tf.errors.OpError as error:
        failure = train_data.own_failure(error)
        if failure is None:
            raise
        train_data.show_cause(failure)
        train_flags.say(failure)
        return 1
    except KeyboardInterrupt:  # before the first step, where there is nothing to save
        return 128 + signal.SIGINT


# What goes wrong in a run, as against what makes no sense about its flags.
FAILURES = (datasets.BadExampleError, datasets.OwnDataError, towers.AuditError,
            towers.CheckpointError, towers.ClusterError, towers.LogFileError,
            towers.NonFiniteError, towers.OutOfMemoryError, towers.RunLockedError)


if __name__ == '__main__':
    with lasting_output(train_flags.say):
        app.run(run, flags_parser=lambda argv: train_flags.parse_flags(argv, __doc__))
