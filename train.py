"""Trains an image classifier on several devices; with no flags, handwritten digits on 2 towers."""

import signal

if __name__ == '__main__' and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds, and have nothing to save

import collections  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

from absl import app  # noqa: E402

from trainer.quiet_import import without_log_lines  # noqa: E402

with without_log_lines():  # this program's own lines are the output
    import tensorflow.compat.v1 as tf  # noqa: E402

import datasets  # noqa: E402
from models import registry  # noqa: E402
import towers  # noqa: E402
from towers.run.evaluation import EvaluationHook  # noqa: E402
from towers.run.fingerprint import FingerprintHook  # noqa: E402
from towers.run.long_steps import LongStepHook  # noqa: E402
from towers.run.metrics_log import MetricsHook  # noqa: E402
from towers.run.output_stream import OutputStream, lasting_output  # noqa: E402
from towers.run.progress import ProgressHook  # noqa: E402
from towers.run.step_loop import OccasionalHook  # noqa: E402
from towers.run.stopping import StopOnSignalHook, interruptible  # noqa: E402
from towers.run.summaries import SummaryHook, default_summaries  # noqa: E402
from towers.run.training_session import training_session  # noqa: E402
from trainer import cluster as train_cluster  # noqa: E402
from trainer import data as train_data  # noqa: E402
from trainer import evaluator as train_evaluator  # noqa: E402
from trainer import flags as train_flags  # noqa: E402
from trainer.flags import FLAGS, refuse, train_dir  # noqa: E402
from trainer import job as train_job  # noqa: E402
from trainer import results as train_results  # noqa: E402
from trainer import trials as train_trials  # noqa: E402


def main(unused_argv):
    """Does what --mode says; returns the exit status.

    The way of a batch: `train_data.make_dataset` finds the examples, `train_job.build_job` makes
    batches of them and the step of the towers, and `run_steps` runs it.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # about calls in tf_slim
    # Of a record that is no tf.Example, which the error names.
    warnings.filterwarnings('ignore', 'Unexpected end-group tag', RuntimeWarning)
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
    setup = train_job.make_setup(network, dataset)
    if FLAGS.mode == 'memory':
        train_trials.show_memory(setup)
        train_data.tell_skipped(dataset)
        return 0
    if FLAGS.mode == 'diagnose':
        print(train_trials.diagnose(setup))
        train_data.tell_skipped(dataset)
        return 0
    train_job.check_classes(dataset)
    if FLAGS.mode == 'train':
        stopped_by = train_or_plan(setup)
        if stopped_by is not None:
            return 128 + stopped_by
    else:
        train_results.evaluate_or_predict(setup)
    return 0


# ---- Training -----------------------------------------------------------------------------------

def train_or_plan(setup):
    """Chooses what is 'auto', builds the job, shows its plan, and trains unless --plan_only.

    In a cluster this process does its own part: the chief trains and saves, a worker trains, an
    evaluator evaluates the chief's checkpoints, and a parameter server works until a signal ends
    it, and never returns.

    Returns:
      The number of the signal that stopped the training, or None.
    """
    runs = not FLAGS.plan_only
    if setup.batch_size == 'auto':
        setup = setup._replace(batch_size=train_trials.choose_batch_size(setup))
    cluster = train_cluster.make_cluster()
    if not runs and (FLAGS.job_name == 'evaluator' or cluster and cluster.job != 'worker'):
        print('%s builds no towers: it has no plan' % (cluster.name if cluster else 'an evaluator'))
        return None
    if cluster is not None and cluster.job == 'ps':
        towers.serve(cluster)
    if FLAGS.job_name == 'evaluator' or cluster is not None and cluster.job == 'evaluator':
        return train_evaluator.evaluate_run(setup, cluster)
    saves = cluster is None or cluster.is_chief
    position = train_job.find_position(cluster) if runs else train_job.START
    if setup.variable_device == 'auto':
        setup = setup._replace(
            variable_device=train_trials.choose_variable_device(setup, position))
    if runs:
        setup = setup._replace(stages=train_trials.choose_stages(setup, position))
    if saves:
        train_data.prepare_skipping(setup, train_dir(), position,
                                    train_cluster.share(cluster)[1])
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        job = train_job.build_job(setup, position, with_evaluation=saves and runs, cluster=cluster)
        if saves or not runs:
            train_job.show(job.built)
        if not runs:
            return None
        if not saves:
            return train_cluster.work(cluster, job, StartInputHook(job.iterator))
        return train(job, cluster)


def train(job, cluster=None):
    """Runs the steps that are left, evaluates, saves, exports, and prints the results.

    Returns:
      The number of the signal that stopped it, or None; in a cluster the first one to any worker.
    """
    hooks = make_hooks(job, cluster)
    newest = train_results.NewestCheckpoint(train_dir())
    if isinstance(sys.stdout, OutputStream):  # a run whose output is lost saves before it ends
        sys.stdout.on_lost = lambda error: hooks.signals.stop(signal.SIGPIPE)
    operations = len(tf.get_default_graph().get_operations())
    if operations > MANY_OPERATIONS:
        print('starting       TensorFlow takes minutes for the first step of a graph of {:,d} '
              'operations'.format(operations), flush=True)
    initial_values = (towers.init_from(FLAGS.init_from, job.built.variables)
                      if FLAGS.init_from else None)
    ended = None
    try:
        # The last evaluation is made when the steps are done, as the session ends.
        with train_data.naming_bad_test_images(job.setup.dataset), \
                train_cluster.joined(cluster, job) as member:
            with training_session(
                    train_dir(), job.counts.global_step, hooks.first,
                    train_job.session_config(job.built), last_hooks=[hooks.signals],
                    listeners=hooks.save_listeners + [newest], initial_values=initial_values,
                    built=job.built,
                    memory_limit=train_flags.memory_limit(), member=member,
                    **train_flags.file_options(
                        job.setup.batch_size, train_cluster.of_all(cluster, job)
                        + train_job.of_data(job.setup.dataset))) as session:
                newest.path = tf.train.latest_checkpoint(train_dir())
                ended = run_steps(job, session, cluster)
            if ended is not None and cluster is not None and cluster.kind != 'horovod':
                raise ended  # here, so that the other workers hear of it at once
    finally:
        hooks.progress.close()
        hooks.signals.restore()
    train_data.tell_skipped(job.setup.dataset)
    failure = getattr(hooks.tested, 'failure', None)
    if hooks.signals.stopping_signal is None and failure is None:
        train_results.report(hooks.progress.throughput, hooks.evaluation.latest, job.setup.dataset)
    train_cluster.tell_end(hooks.end)
    print('checkpoint     %s' % newest.path)
    if ended is not None or failure is not None:
        raise ended or failure
    if FLAGS.export_dir and hooks.signals.stopping_signal is None:
        train_results.export(job.setup.classifier)
    return hooks.signals.stopping_signal


MANY_OPERATIONS = 50000  # of a graph whose first step takes so long that it is announced


class RunHooks(collections.namedtuple('RunHooks', [
        'first', 'save_listeners', 'progress', 'evaluation', 'signals', 'tested', 'end'])):
    """The hooks of a training.

    Attributes:
      first: list of all hooks that come before the one that saves, in order.
      save_listeners: list of `CheckpointSaverListener`s for the hook that saves.
      progress, evaluation: the `ProgressHook` and the `EvaluationHook` of that list.
      signals: `StopOnSignalHook` (of several machines `StopTogetherHook`), to come last.
      tested: what the `EvaluationHook` runs: a `SavingEvaluation`; in a cluster the `Evaluation`.
      end: in a cluster an `EndHook`, else None.
    """
    __slots__ = ()


def make_hooks(job, cluster=None):
    """The `RunHooks` of a job, as the flags say. Makes operations."""
    counts = job.counts
    values = [('loss', job.built.loss), ('learning_rate', job.learning_rate)]
    scaled = job.built.scaled_losses
    if scaled is not None:
        values += [('loss_scale', scaled.scale), ('skipped_steps', scaled.skipped_steps)]
    log_values = values + ([] if job.checksum is None else [('examples_checksum', job.checksum)])
    watch = towers.InputWatchHook(job.train_op, say=None)
    progress = ProgressHook(
        [('lr' if name == 'learning_rate' else name, value) for name, value in values], counts,
        log_every=FLAGS.log_every, devices=job.built.devices, fetch_every_step=True,
        input_watch=watch)
    metrics = MetricsHook(
        log_values, counts, os.path.join(train_dir(), 'metrics.jsonl'), log_every=FLAGS.log_every,
        fetch_every_step=True, say=progress.write, input_watch=watch)
    listeners = [progress, metrics]
    if FLAGS.summary_steps:
        listeners.append(SummaryHook(default_summaries(job.built, job.learning_rate), counts,
                                     train_dir(), summary_steps=FLAGS.summary_steps))
    fingerprint = [FingerprintHook(job.built.variables, counts.global_step, metrics.log)
                   ] if FLAGS.fingerprint else []
    signals = StopOnSignalHook() if cluster is None else towers.StopTogetherHook(cluster, job.built)
    tested = job.evaluation
    if cluster is None:  # machines stop together, at a step
        tested = train_data.SavingEvaluation(tested, job.setup.dataset,
                                             lambda: signals.stopping_signal is not None)
    evaluation = EvaluationHook(
        tested, counts.global_step, FLAGS.eval_steps or None, listeners,
        ('accuracy', FLAGS.stop_at_accuracy) if FLAGS.stop_at_accuracy else None,
        skip_end=lambda: signals.stopping_signal is not None)
    ends = [] if cluster is None else [train_cluster.EndHook(cluster, job, signals)]
    first = ([StartInputHook(job.iterator, job.evaluation), watch]
             + [LongStepHook(watch.watch, say=progress.write)]
             + train_cluster.hooks(cluster, job) + ends + listeners + fingerprint + [evaluation])
    return RunHooks(first, [hook.listener for hook in listeners], progress, evaluation, signals,
                    tested, ends[0] if ends else None)


def run_steps(job, session, cluster=None):
    """Runs steps up to the last one of the job, or until a hook stops the session.

    Args:
      session: `LoopSession`.

    Returns:
      The `OwnDataError` of training data that ended before the run; or None. To be raised when the
      session has saved.
    """
    last = job.counts.last_step

    def position():
        return session.run_step_fn(
            lambda step_context: int(step_context.session.run(job.counts.global_step)))
    step = begin = position()
    if step >= last:
        print('%s holds %d steps already, and %d were asked for: evaluating them. Another '
              '--train_dir starts anew.' % (train_dir(), step, last))
    try:
        audits = FLAGS.audit_runtime
        # Again if TensorFlow lost the session: it then went back to the newest checkpoint.
        while step < last and not session.should_stop():
            with train_data.skipping(job, session, train_cluster.share(cluster)[1]):
                if audits:
                    audit_runtime(job, session)
                    audits = False
                else:
                    session.run_steps(job.train_op, last - step)
            step = last if session.should_stop() else position()
    except tf.errors.OutOfRangeError:  # ends the session without an error, so that it saves
        return train_data.ended(position(), begin, last)
    return None


def audit_runtime(job, session):
    """Does one step and checks on which devices the runtime ran its operations.

    Raises:
      AuditError: on another device than the plan says.
    """
    metadata = tf.RunMetadata()
    session.run(job.train_op, options=tf.RunOptions(output_partition_graphs=True),
                run_metadata=metadata)
    print(towers.audit(job.built, metadata).raise_if_broken(), flush=True)


class StartInputHook(OccasionalHook):
    """Initialises the input pipeline, at the example that the restored variables say is next.

    With data of the user's own it also reads a batch of the test set: that there is none would
    otherwise be found when the training is done.
    """

    def __init__(self, iterator, evaluation=None):
        """
        Args:
          iterator: of the training batches.
          evaluation: `Evaluation` of the test set; or None.
        """
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


# ---- Errors -------------------------------------------------------------------------------------

def run(argv):
    """Runs `main` and returns the exit status; a user's mistake is one line, not a traceback."""
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
        failure = train_data.own_failure(error) or train_data.unknown_failure(error)
        if failure is None:
            raise
        train_data.show_cause(failure)
        train_flags.say(failure)
        return 1
    except KeyboardInterrupt:  # before the first step, where there is nothing to save
        return 128 + signal.SIGINT


# Errors of a run (status 1); the other `TowersError`s are about the flags (status 2).
FAILURES = (datasets.BadExampleError, datasets.OwnDataError, towers.AuditError,
            towers.CheckpointError, towers.ClusterError, towers.LogFileError,
            towers.NonFiniteError, towers.OutOfMemoryError, towers.RunLockedError)


if __name__ == '__main__':
    with lasting_output(train_flags.say):
        app.run(run, flags_parser=lambda argv: train_flags.parse_flags(argv, __doc__))
