"""The hooks of a run: what train.py does around its steps.

TensorFlow calls the hooks of a session in their order, at its begin, before and after each step,
and at its end. First come the hooks that write something about a step (progress, summaries, the
user's own), then the evaluation, then the hook that saves (`training_session` makes it), and last
the hook that stops at a signal. So a step in which a hook before the save fails is not saved. Tests
are in tests/trainer/test_train.py and test_trainer_stops.py.
"""

import math
import os
import signal
import time
import typing

import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.run.evaluation_hook import EvaluationHook
from towers.run.stopping import StopOnSignalHook
from towers.run.summaries import SummaryHook, default_summaries
from trainer.best import SINCE_BEST, RunEvaluation
from trainer.data import is_own_dataset
from trainer.flags import FLAGS, profiled_steps, train_dir
from trainer.job import Job
from trainer.own_hooks import make_own_hooks
from trainer.own_model import is_own_model
from trainer.progress import ProgressHook

_LARGE_CONSTANT = 4096  # bytes, above which a constant's value is left out of TensorBoard's graph


class RunHooks(typing.NamedTuple):
    """The hooks of a training.

    Attributes:
      first: the hooks that come before the hook that saves; `progress`, `evaluation` and `minutes`
        are among them.
      save_listeners: listeners of the hook that saves.
      progress: the hook that shows the progress.
      evaluation: the hook that evaluates.
      signals: `StopOnSignalHook`, or with several machines `StopTogetherHook`; it comes last.
      minutes: the hook of --max_minutes.
      tested: the evaluation that `evaluation` runs.
    """
    first: typing.List[tf.train.SessionRunHook]
    save_listeners: typing.List[tf.train.CheckpointSaverListener]
    progress: ProgressHook
    evaluation: EvaluationHook
    signals: typing.Any
    minutes: 'MinutesHook'
    tested: RunEvaluation


def make_hooks(job: Job, cluster: typing.Optional[towers.Cluster] = None) -> RunHooks:
    """Makes the hooks of a job from the flags, with their operations.

    Args:
      job: the training, with its evaluation.
      cluster: the machines, or None.

    Returns:
      The `RunHooks`, for `training_session`.

    Raises:
      InvalidArgumentError: --keep_best names no metric of the model; or --hooks no function.
    """
    progress = _progress(job)
    own_hooks = make_own_hooks(job)
    # Hooks whose method `evaluated` gets the results of each evaluation.
    listeners = [progress]
    if FLAGS.summary_steps:
        listeners.append(_summaries(job, own_hooks.summaries))
    listeners += [hook for hook in own_hooks.hooks if hasattr(hook, 'evaluated')]
    own_hooks_without_results = [hook for hook in own_hooks.hooks
                                 if not hasattr(hook, 'evaluated')]
    signals: typing.Any = StopOnSignalHook()
    if cluster is not None:
        signals = towers.StopTogetherHook(cluster, job.built)
    evaluating = _evaluating(job, cluster, signals, listeners)
    minutes = MinutesHook(FLAGS.max_minutes)
    first = [
        StartInputHook(job.iterator, job.evaluation), minutes,
        # The global step counts the steps of all workers, asynchronous workers included. So the
        # chief stops at the last step of the run, however few steps it has made itself.
        tf.train.StopAtStepHook(last_step=job.counts.last_step)]
    first += listeners
    first += own_hooks_without_results
    first += _tracing_hooks(job, progress.write)
    first.append(evaluating.hook)  # after its listeners, and before the hook that saves
    return RunHooks(
        first, save_listeners=[progress.listener, SaveOnSignal(progress.write)], progress=progress,
        evaluation=evaluating.hook, signals=signals, minutes=minutes, tested=evaluating.evaluation)


class _Evaluating(typing.NamedTuple):
    """The hook that evaluates, and the evaluation that it runs."""
    hook: EvaluationHook
    evaluation: RunEvaluation


def _evaluating(job: Job, cluster: typing.Optional[towers.Cluster], signals: typing.Any,
                listeners: typing.Sequence[typing.Any]) -> _Evaluating:
    """Makes the hook that evaluates.

    Args:
      job: the training, with its evaluation.
      cluster: the machines, or None.
      signals: the hook that stops at a signal.
      listeners: the hooks that get the results of each evaluation.

    Raises:
      InvalidArgumentError: --keep_best names no metric of the model.
    """
    def stopped() -> bool:
        """Whether a signal has come."""
        return signals.stopping_signal is not None

    # On one machine a signal breaks an evaluation off. Several machines stop together, after a
    # step, so that no evaluation is broken off.
    breaks_off = stopped if cluster is None else None
    evaluation = RunEvaluation(job.evaluation, train_dir(), job.counts.global_step,
                               metric=FLAGS.keep_best, stopped=breaks_off)
    # `every_steps` is None without --eval_steps: then there is only the evaluation at the end.
    # `skip_end`: a run that a signal stops is to end soon, without its last evaluation.
    hook = EvaluationHook(
        evaluation, job.counts.global_step, every_steps=FLAGS.eval_steps or None,
        listeners=listeners, stop_at=_stop_at(), skip_end=stopped)
    return _Evaluating(hook, evaluation)


def _tracing_hooks(job: Job, say: typing.Callable[[str], None]
                   ) -> typing.List[tf.train.SessionRunHook]:
    """The hooks of --profile_steps and --report, which look into single steps.

    Args:
      job: the training.
      say: called with lines that say where the results are.
    """
    hooks: typing.List[tf.train.SessionRunHook] = []
    profiled = profiled_steps(FLAGS.profile_steps)
    if profiled is not None:
        directory = os.path.join(train_dir(), 'profile')
        hooks.append(ProfileHook(job.counts.global_step, directory, profiled.first, profiled.last,
                                 say=say))
    if FLAGS.report:
        path = os.path.join(train_dir(), 'step-%d.html' % FLAGS.report)
        hooks.append(towers.StepReportHook(job.built, FLAGS.report, path, say=say))
    return hooks


def _progress(job: Job) -> ProgressHook:
    """The `ProgressHook` of a job: loss, learning rate, and with a loss scale its factor and the
    number of skipped steps."""
    values = [('loss', job.built.loss), ('learning_rate', job.learning_rate)]
    scaled = job.built.scaled_losses
    if scaled is not None:
        values += [('loss_scale', scaled.scale), ('skipped_steps', scaled.skipped_steps)]
    return ProgressHook(
        values, job.counts, os.path.join(train_dir(), 'metrics.jsonl'), FLAGS.log_every,
        input_wait=job.input_wait, unit=job.setup.model.unit)


def _stop_at() -> typing.Optional[tuple]:
    """The `stop_at` of an `EvaluationHook`: a metric, and the value that ends the run; or None."""
    if FLAGS.stop_at_accuracy:
        return ('accuracy', FLAGS.stop_at_accuracy)
    if FLAGS.stop_after:
        return (SINCE_BEST, FLAGS.stop_after)
    return None


class MinutesHook(tf.train.SessionRunHook):
    """Stops the session after a step, once a number of minutes has passed since the session began.

    Attributes:
      is_over: whether the time is over.
    """

    def __init__(self, minutes: float):
        """`minutes` is the number of minutes; 0 for no limit."""
        self.is_over = False
        self._seconds = 60 * minutes if minutes else math.inf
        self._end = math.inf

    def begin(self):
        """Starts to count."""
        self._end = time.monotonic() + self._seconds

    def after_run(self, run_context: typing.Any, run_values: typing.Any):
        """Asks the session to stop when the time is over."""
        if time.monotonic() >= self._end:
            self.is_over = True
            run_context.request_stop()


class SaveOnSignal(tf.train.CheckpointSaverListener):
    """Makes `CheckpointHook` save the next step after SIGUSR1, and says so; the run goes on.

    Attributes:
      wants_save: whether a signal has come since the last save.
    """

    def __init__(self, say: typing.Callable[[str], None]):
        """`say` is called with a line for each checkpoint that a signal has asked for."""
        self.wants_save = False
        self._say = say

    def begin(self):
        """Installs the handler."""
        def ask(number: int, unused_frame: typing.Any) -> None:
            """The handler of the signal."""
            self.wants_save = True
        signal.signal(signal.SIGUSR1, ask)

    def after_save(self, session: tf.Session, global_step_value: int):
        """Says the name of a checkpoint that a signal has asked for."""
        if self.wants_save:
            self._say('checkpoint     %s/model.ckpt-%d' % (train_dir(), global_step_value))
        self.wants_save = False


def _summaries(job: Job, own_summaries: typing.List[tf.Tensor]) -> SummaryHook:
    """The `SummaryHook` of the flags: scalars, images of tower 0's shard, histograms, its graph.

    Args:
      job: the training.
      own_summaries: summaries that the function of --hooks has made.
    """
    with tf.device('/cpu:0'):  # summaries have kernels for the CPU alone
        custom = own_summaries + _image_summaries(job)
        if FLAGS.histograms:
            custom += _histograms(job)
    return SummaryHook(
        default_summaries(job.built, job.learning_rate) + custom, job.counts.global_step,
        train_dir(), FLAGS.summary_steps, graph=_graph_of_tower_0(job))


def _image_summaries(job: Job) -> typing.List[tf.Tensor]:
    """A summary of tower 0's images, in a list.

    The list is empty without summary_images, for a model of the user's own, and where the first
    input has not the four dimensions of a batch of images.
    """
    first_input = tf.nest.flatten(job.built.towers[0].inputs, expand_composites=True)[0]
    if not FLAGS.summary_images or is_own_model() or first_input.shape.ndims != 4:
        return []
    # In no collection: the hook writes this summary. A `tf.summary.merge_all` in the user's code is
    # not to write it once more.
    return [tf.summary.image('input', first_input, FLAGS.summary_images, collections=[])]


def _histograms(job: Job) -> typing.List[tf.Tensor]:
    """Summaries of all weights that have a gradient, and of the gradients.

    The histogram of a sparse gradient shows only the rows that have a gradient in the step.
    """
    # `collections=[]`: in no collection, as in `_image_summaries`.
    summaries = []
    for gradient, variable in job.built.gradients:
        if gradient is None:
            continue
        if isinstance(gradient, tf.IndexedSlices):
            gradient = gradient.values
        name = variable.op.name
        summaries += [
            tf.summary.histogram('weights/%s' % name, variable, collections=[]),
            tf.summary.histogram('gradients/%s' % name, gradient, collections=[])]
    return summaries


def _graph_of_tower_0(job: Job) -> tf.GraphDef:
    """The `tf.GraphDef` for TensorBoard to draw: the program as its author wrote it.

    It has neither the other towers nor the evaluation, and no values of large constants.
    """
    drawn = tf.GraphDef()
    left_out = list(job.built.towers[1:])
    if job.evaluation:
        left_out += job.evaluation.built.towers
    for node in tf.get_default_graph().as_graph_def().node:
        if any(tower.has(node.name) for tower in left_out):
            continue
        copied = drawn.node.add()
        copied.CopyFrom(node)
        # A constant of more bytes holds data, which TensorBoard does not draw.
        if node.op == 'Const' and node.ByteSize() > _LARGE_CONSTANT:
            copied.attr['value'].Clear()
    return drawn


class ProfileHook(tf.train.SessionRunHook):
    """Traces the step `first` for Chrome, and the steps after it, up to `last`, for TensorBoard.

    Both cannot trace the same step, since TensorFlow has one tracer. `tf.train.ProfilerHook` writes
    the trace for Chrome, the file `timeline-<step>.json`, with a row for each device. TensorBoard's
    profile is written on TensorFlow 2.2 and later. A run that begins later than `first` traces
    nothing for Chrome.
    """

    def __init__(self, global_step: tf.Variable, directory: str, first: int, last: int,
                 say: typing.Callable[[str], None]):
        """
        Args:
          global_step: the variable that counts steps.
          directory: the folder of the traces.
          first, last: the steps; `1 < first < last`.
          say: called with lines that say where the traces are.
        """
        self._timeline = tf.train.ProfilerHook(save_steps=1, output_dir=directory)
        self._global_step = global_step
        self._directory = directory
        self._say = say
        self._first = first
        self._last = last
        self._step = 0  # the step that comes next, or that runs
        self._profiles = False  # whether TensorBoard's profile has begun, and not ended

    def begin(self):
        """Makes the operation that reads the step."""
        self._timeline.begin()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator):
        """Takes over the step of the session; says if the step `first` cannot be traced any more:
        this step is over, or it is the very first step of the session."""
        self._step = int(session.run(self._global_step)) + 1
        if self._step >= self._first:
            self._say('no trace       of step %d: the run goes on from step %d' % (
                self._first, self._step - 1))

    def before_run(self, run_context: typing.Any):
        """Begins TensorBoard's profile before the step after `first`; asks for Chrome's trace."""
        is_after_traced_step = self._step == self._first + 1
        if is_after_traced_step:
            self._profiles = compat.start_profile(self._directory)
            if not self._profiles:
                self._say('no profile     for TensorBoard: this needs TensorFlow 2.2 or later')
        if not self._is_traced():
            return None
        return self._timeline.before_run(run_context)

    def after_run(self, run_context: typing.Any, run_values: typing.Any):
        """Writes Chrome's trace after the step `first`; ends TensorBoard's profile after `last`."""
        if self._is_traced():
            self._timeline.after_run(run_context, run_values)
            if self._step == self._first:
                self._say('trace          %s/timeline-%d.json' % (self._directory, self._first))
        if self._step >= self._last:
            self.end(run_context.session)
        self._step += 1

    def end(self, session: tf.Session):
        """Ends TensorBoard's profile, if it has begun: after `last`, or as the session ends."""
        if self._profiles:
            self._profiles = False
            compat.stop_profile()
            self._say('profile        tensorboard --logdir=%s' % self._directory)

    def _is_traced(self) -> bool:
        """Whether `tf.train.ProfilerHook` is called for the current step.

        It is called for the step `first`, and for the step before: this hook of TensorFlow never
        traces the first step for which it is called.
        """
        return self._step in (self._first - 1, self._first)


class StartInputHook(tf.train.SessionRunHook):
    """Initializes the input pipeline, which begins at the example that the restored variables say.

    With data of the user's own it also reads a batch of the test set: an empty test set would
    otherwise be found only when the training is done.
    """

    def __init__(self, iterator: typing.Any, evaluation: typing.Any = None):
        """
        Args:
          iterator: the iterator of the training batches.
          evaluation: the `Evaluation` of the test set; None to check none.
        """
        self._iterator = iterator
        self._evaluation = evaluation

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator):
        """Runs the iterator's initializer, and reads a batch of a test set of the user's own."""
        session.run(self._iterator.initializer)
        has_own_test_set = is_own_dataset()
        if self._evaluation is not None and has_own_test_set:
            # `read`: reads a batch where TensorFlow cannot tell the number of batches.
            self._evaluation.check_examples(session, read=True)
