"""The hooks of a run: what train.py does around its steps."""

import collections
import math
import os
import signal
import time

import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.run.evaluation import EvaluationHook
from towers.run.stopping import StopOnSignalHook
from towers.run.summaries import SummaryHook, default_summaries
from trainer.best import SINCE_BEST, RunEvaluation
from trainer.data import is_own
from trainer.flags import FLAGS, profiled_steps, train_dir
from trainer.own_model import is_own_model
from trainer.progress import ProgressHook

_LARGE_CONSTANT = 4096  # bytes; TensorBoard draws no values


class RunHooks(collections.namedtuple('RunHooks', [
        'first', 'save_listeners', 'progress', 'evaluation', 'signals', 'minutes', 'tested'])):
    """The hooks of a training.

    Attributes:
      first: list of all hooks that come before the one that saves, in order.
      save_listeners: list of `CheckpointSaverListener`s for the hook that saves.
      progress, evaluation, minutes: `ProgressHook`, `EvaluationHook` and `MinutesHook` of `first`.
      signals: `StopOnSignalHook` (of several machines `StopTogetherHook`), to come last.
      tested: what the `EvaluationHook` runs, a `RunEvaluation`.
    """
    __slots__ = ()


def make_hooks(job, cluster=None):
    """The `RunHooks` of a job, as the flags say. Makes operations."""
    counts = job.counts
    values = [('loss', job.built.loss), ('learning_rate', job.learning_rate)]
    scaled = job.built.scaled_losses
    if scaled is not None:
        values += [('loss_scale', scaled.scale), ('skipped_steps', scaled.skipped_steps)]
    progress = ProgressHook(
        values, counts, os.path.join(train_dir(), 'metrics.jsonl'), FLAGS.log_every,
        input_wait=job.input_wait, unit=job.setup.model.unit)
    told = [progress] + ([_summaries(job)] if FLAGS.summary_steps else [])
    signals = StopOnSignalHook() if cluster is None else towers.StopTogetherHook(cluster, job.built)

    def stopped():
        return signals.stopping_signal is not None
    tested = RunEvaluation(job.evaluation, train_dir(), counts.global_step, FLAGS.keep_best,
                           stopped if cluster is None else None)
    evaluation = EvaluationHook(
        tested, counts.global_step, FLAGS.eval_steps or None, told,
        ('accuracy', FLAGS.stop_at_accuracy) if FLAGS.stop_at_accuracy else
        (SINCE_BEST, FLAGS.stop_after) if FLAGS.stop_after else None, skip_end=stopped)
    minutes = MinutesHook(FLAGS.max_minutes)
    # Asynchronous workers all count the same global step: the chief stops at the last step of the
    # run, however many it has done itself.
    first = [StartInputHook(job.iterator, job.evaluation), minutes,
             tf.train.StopAtStepHook(last_step=counts.last_step)] + told
    if FLAGS.profile_steps:
        first.append(ProfileHook(counts.global_step, os.path.join(train_dir(), 'profile'),
                                 *profiled_steps(FLAGS.profile_steps), say=progress.write))
    if FLAGS.report:
        path = os.path.join(train_dir(), 'step-%d.html' % FLAGS.report)
        first.append(towers.StepReportHook(job.built, FLAGS.report, path, say=progress.write))
    return RunHooks(first + [evaluation], [progress.listener, SaveOnSignal(progress.write)],
                    progress, evaluation, signals, minutes, tested)


class MinutesHook(tf.train.SessionRunHook):
    """Stops the session after the step in which a number of minutes has passed since it began; of 0
    minutes never. `is_over` says whether it has."""

    def __init__(self, minutes):
        self._seconds, self._end, self.is_over = 60 * minutes or math.inf, None, False

    def begin(self):
        """Starts to count."""
        self._end = time.monotonic() + self._seconds

    def after_run(self, run_context, run_values):
        """Asks the session to stop when the time is over."""
        if time.monotonic() >= self._end:
            self.is_over = True
            run_context.request_stop()


class SaveOnSignal(tf.train.CheckpointSaverListener):
    """Has the next step saved at SIGUSR1, and said by a function of a line; the run goes on.

    Attributes:
      wants_save: whether a signal has come since the last save.
    """

    def __init__(self, say):
        self.wants_save, self._say = False, say

    def begin(self):
        """Installs the handler."""
        def ask(number, unused_frame):
            self.wants_save = True
        signal.signal(signal.SIGUSR1, ask)

    def after_save(self, session, global_step_value):
        """Says the checkpoint that was asked for."""
        if self.wants_save:
            self._say('checkpoint     %s/model.ckpt-%d' % (train_dir(), global_step_value))
        self.wants_save = False


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
        default_summaries(built, job.learning_rate) + custom, job.counts.global_step,
        train_dir(), FLAGS.summary_steps, graph=_graph_of_tower_0(job))


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


class ProfileHook(tf.train.SessionRunHook):
    """Traces the step `first` for Chrome, and the steps after it, up to `last`, for TensorBoard.

    Not the same steps for both: TensorFlow has one tracer. The trace for Chrome, by
    `tf.train.ProfilerHook`, is the file `timeline-<step>.json`, whose rows are devices, and so
    towers. TensorBoard's profile is written on TensorFlow 2.2 and later. `1 < first < last`, which
    a run skips that begins later; `say` is called with lines that say where the traces are.
    """

    def __init__(self, global_step, directory, first, last, say):
        self._timeline = tf.train.ProfilerHook(save_steps=1, output_dir=directory)
        self._global_step, self._directory, self._say = global_step, directory, say
        self._first, self._last = first, last
        self._step, self._profiles = 0, False  # the coming step

    def begin(self):
        """Makes the operation that reads the step."""
        self._timeline.begin()

    def after_create_session(self, session, coord):
        """Takes over the step of the session; says where that is after the steps to be traced."""
        self._step = int(session.run(self._global_step)) + 1
        if self._step >= self._first:
            self._say('no trace       of step %d: the run goes on from step %d' % (
                self._first, self._step - 1))

    def before_run(self, run_context):
        """Starts a trace that begins with the coming step."""
        if self._step == self._first + 1:
            self._profiles = compat.start_profile(self._directory)
            if not self._profiles:
                self._say('no profile     for TensorBoard: this needs TensorFlow 2.2 or later')
        return self._timeline.before_run(run_context) if self._is_traced() else None

    def after_run(self, run_context, run_values):
        """Ends a trace that ends with this step."""
        if self._is_traced():
            self._timeline.after_run(run_context, run_values)
            if self._step == self._first:
                self._say('trace          %s/timeline-%d.json' % (self._directory, self._first))
        if self._step >= self._last:
            self.end(run_context.session)
        self._step += 1

    def end(self, session):
        """Ends a profile."""
        if self._profiles:
            self._profiles = False
            compat.stop_profile()
            self._say('profile        tensorboard --logdir=%s' % self._directory)

    def _is_traced(self):
        # `ProfilerHook` does not trace the first step that it is called at: that is the one before.
        return self._step in (self._first - 1, self._first)


class StartInputHook(tf.train.SessionRunHook):
    """Initialises the input pipeline, at the example that the restored variables say is next.

    With data of the user's own it also reads a batch of the test set: that there is none would
    otherwise be found when the training is done.
    """

    def __init__(self, iterator, evaluation=None):
        self._iterator, self._evaluation = iterator, evaluation if is_own() else None

    def after_create_session(self, session, coord):
        """Runs the iterator's initializer."""
        session.run(self._iterator.initializer)
        if self._evaluation is not None:
            self._evaluation.check_examples(session, read=True)
