"""The hooks of a run: what train.py does around its steps."""

import collections
import os
import signal
import time

import tensorflow.compat.v1 as tf

import datasets
import towers
from towers.checkpoint.files import newest_prefix
from towers.errors import InputError
from towers.run.evaluation import EvaluationHook
from towers.run.step_loop import OccasionalHook
from towers.run.stopping import StopOnSignalHook
from towers.run.summaries import SummaryHook, default_summaries
from trainer.best import SINCE_BEST, BestEvaluation
from trainer.data import INPUT_ERRORS, input_failure, is_own, own_failure
from trainer.flags import FLAGS, train_dir
from trainer.metrics_hook import MetricsHook
from trainer.own_model import is_own_model
from trainer.profile_hook import ProfileHook, profiled_steps
from trainer.progress import ProgressHook

_LARGE_CONSTANT = 4096  # bytes; TensorBoard draws no values


class RunHooks(collections.namedtuple('RunHooks', [
        'first', 'save_listeners', 'progress', 'evaluation', 'signals', 'tested', 'newest',
        'best'])):
    """The hooks of a training.

    Attributes:
      first: list of all hooks that come before the one that saves, in order.
      save_listeners: list of `CheckpointSaverListener`s for the hook that saves.
      progress, evaluation: the `ProgressHook` and the `EvaluationHook` of that list.
      signals: `StopOnSignalHook` (of several machines `StopTogetherHook`), to come last.
      tested: what the `EvaluationHook` runs: a `SavingEvaluation`; in a cluster the `Evaluation`.
      newest: `NewestCheckpoint`, of `save_listeners`.
      best: `BestEvaluation`; None without --keep_best.
    """
    __slots__ = ()

    @property
    def failure(self):
        """The error for which the evaluation gave itself up; or None."""
        return getattr(self.tested, 'failure', None)


def make_hooks(job, cluster=None):
    """The `RunHooks` of a job, as the flags say. Makes operations."""
    counts = job.counts
    values = [('loss', job.built.loss), ('learning_rate', job.learning_rate)]
    scaled = job.built.scaled_losses
    if scaled is not None:
        values += [('loss_scale', scaled.scale), ('skipped_steps', scaled.skipped_steps)]
    progress = ProgressHook(
        [('lr' if name == 'learning_rate' else name, value) for name, value in values], counts,
        log_every=FLAGS.log_every, input_wait=job.input_wait, unit=job.setup.model.unit)
    metrics = MetricsHook(
        values, counts, os.path.join(train_dir(), 'metrics.jsonl'), log_every=FLAGS.log_every,
        say=progress.write, input_wait=job.input_wait, unit=job.setup.model.unit)
    listeners, profiles = [progress, metrics], []
    if FLAGS.summary_steps:
        listeners.append(_summaries(job))
    if FLAGS.profile_steps:
        profiles.append(ProfileHook(counts, os.path.join(train_dir(), 'profile'),
                                    *profiled_steps(FLAGS.profile_steps), say=progress.write))
    signals = StopOnSignalHook() if cluster is None else towers.StopTogetherHook(cluster, job.built)
    tested = job.evaluation
    if cluster is None:  # machines stop together, at a step
        tested = SavingEvaluation(tested, lambda: signals.stopping_signal is not None)
    best = BestEvaluation(tested, FLAGS.keep_best, train_dir(), counts.global_step,
                          FLAGS.eval_steps) if FLAGS.keep_best else None
    evaluation = EvaluationHook(
        best or tested, counts.global_step, FLAGS.eval_steps or None, listeners,
        ('accuracy', FLAGS.stop_at_accuracy) if FLAGS.stop_at_accuracy else
        (SINCE_BEST, FLAGS.stop_after) if FLAGS.stop_after else None,
        skip_end=lambda: signals.stopping_signal is not None)
    of_cluster = []
    if cluster is not None and not cluster.synchronous:
        # Asynchronous workers all count the same global step: the chief stops at the last step of
        # the run, however many it has done itself.
        of_cluster = [tf.train.StopAtStepHook(last_step=counts.last_step)]
    newest = NewestCheckpoint(train_dir())
    first = ([StartInputHook(job.iterator, job.evaluation)]
             + [MinutesHook(FLAGS.max_minutes)] * bool(FLAGS.max_minutes)
             + of_cluster + listeners + profiles + [evaluation])
    saved = [hook.listener for hook in listeners] + [SaveOnSignal(), newest]
    return RunHooks(first, saved, progress, evaluation,
                    signals, tested, newest, best)


class MinutesHook(OccasionalHook):
    """Stops the session after the step in which a number of minutes has passed since it was made.
    """

    def __init__(self, minutes):
        self._seconds, self._end = 60 * minutes, None

    def after_create_session(self, session, coord):
        """Starts to count, once: not again where TensorFlow lost a session."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds

    def is_due(self):
        """Whether the time is over."""
        return time.monotonic() >= self._end

    def after_run(self, run_context, run_values):
        """Asks the session to stop."""
        if self.is_due():
            run_context.request_stop()


class SaveOnSignal(tf.train.CheckpointSaverListener):
    """Has the next step saved at SIGUSR1, and the run goes on.

    Attributes:
      wants_save: whether a signal has come since the last save.
    """

    def __init__(self):
        self.wants_save, self._former = False, None

    def begin(self):
        """Installs the handler."""
        def ask(number, unused_frame):
            self.wants_save = True
        self._former = signal.signal(signal.SIGUSR1, ask)

    def after_save(self, session, global_step_value):
        """The signal has been heeded."""
        self.wants_save = False

    def end(self, session, global_step_value):
        """Puts the former handler back."""
        signal.signal(signal.SIGUSR1, self._former)


def _summaries(job):
    """The `SummaryHook` of the flags: scalars, images of tower 0's shard, histograms, its graph."""
    built, custom = job.built, []
    with tf.device('/cpu:0'):
        images = tf.nest.flatten(built.towers[0].inputs, expand_composites=True)[0]
        if FLAGS.summary_images and not is_own_model() and images.shape.ndims == 4:
            custom.append(tf.summary.image('input', images, FLAGS.summary_images, collections=[]))
        for gradient, variable in built.gradients if FLAGS.histograms else ():
            if gradient is not None:
                custom += [tf.summary.histogram('%s/%s' % (name, variable.op.name), values,
                                                collections=[])
                           for name, values in (('weights', variable), (
                               'gradients', getattr(gradient, 'values', gradient)))]
    return SummaryHook(
        default_summaries(built, job.learning_rate, custom=custom), job.counts, train_dir(),
        summary_steps=FLAGS.summary_steps, graph=_graph_of_tower_0(job))


def _graph_of_tower_0(job):
    """The `tf.GraphDef` without other towers and the evaluation, and without large constants."""
    drawn = tf.GraphDef()
    left_out = job.built.towers[1:] + (job.evaluation.built.towers if job.evaluation else [])
    for node in tf.get_default_graph().as_graph_def().node:
        if not any(tower.has(node.name) for tower in left_out):
            copied = drawn.node.add()
            copied.CopyFrom(node)
            if node.op == 'Const' and node.ByteSize() > _LARGE_CONSTANT:
                copied.attr['value'].Clear()
    return drawn


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
        self._evaluation = evaluation if is_own() else None

    def after_create_session(self, session, coord):
        """Runs the iterator's initializer."""
        session.run(self._iterator.initializer)
        if self._evaluation is not None:
            self._evaluation.check_examples(session, read=True)

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False


def tell_end(signals):
    """Prints that a signal to a worker of a cluster has ended the run, if one has.

    Args:
      signals: `StopTogetherHook`.
    """
    if signals.reason() is not None:
        print('stopped: %s' % signals.reason(), flush=True)


class NewestCheckpoint(tf.train.CheckpointSaverListener):
    """Keeps the newest checkpoint of this run: when it has ended, another one may save beside it.

    Attributes:
      path: the prefix of its files; first that of the one that the run goes on from; or None.
    """

    def __init__(self, directory):
        self._directory, self.path = directory, None

    def begin(self):
        """Takes the one that is there when the session is made."""
        self.path = newest_prefix(self._directory)

    def after_save(self, session, global_step_value):
        """Takes the one that has been saved."""
        self.path = os.path.join(self._directory, 'model.ckpt-%d' % global_step_value)


class SavingEvaluation:
    """The evaluation of a run, which gives itself up where going on would lose trained steps.

    That is at a signal that ends the run, and at an error of the test set. `EvaluationHook` then
    stops the session, which saves.

    Attributes:
      metrics: those of the evaluation.
      failure: the error, to be raised when the session has saved; or None.
    """

    def __init__(self, evaluation, stopped):
        """
        Args:
          evaluation: `Evaluation` of the test set.
          stopped: function without arguments that tells whether a signal has come.
        """
        self.metrics, self.failure = evaluation.metrics, None
        self._evaluation, self._stopped = evaluation, stopped

    def check_examples(self, session):
        """As of the `Evaluation`."""
        self._evaluation.check_examples(session)

    def run(self, session):
        """As of the `Evaluation`; None where it was given up."""
        try:
            return self._evaluation.run(session, self._stopped)
        except (datasets.DatasetError, InputError) as error:
            self.failure = error
        except INPUT_ERRORS as error:
            self.failure = own_failure(error) or input_failure(error) or error
        return None
