"""The hooks of a run: what train.py does around its steps."""

import collections
import os

import tensorflow.compat.v1 as tf

import datasets
import towers
from towers.checkpoint.files import newest_prefix
from towers.errors import InputError
from towers.run.evaluation import EvaluationHook
from towers.run.long_steps import LongStepHook
from towers.run.step_loop import OccasionalHook
from towers.run.stopping import StopOnSignalHook
from towers.run.summaries import SummaryHook, default_summaries
from trainer.best import SINCE_BEST, BestEvaluation
from trainer.data import INPUT_ERRORS, input_failure, is_own, own_failure
from trainer.fingerprint import FingerprintHook
from trainer.flags import FLAGS, train_dir
from trainer.metrics_hook import MetricsHook
from trainer.profile_hook import ProfileHook, profiled_steps
from trainer.progress import ProgressHook


class RunHooks(collections.namedtuple('RunHooks', [
        'first', 'save_listeners', 'progress', 'evaluation', 'signals', 'tested', 'end',
        'newest', 'best'])):
    """The hooks of a training.

    Attributes:
      first: list of all hooks that come before the one that saves, in order.
      save_listeners: list of `CheckpointSaverListener`s for the hook that saves.
      progress, evaluation: the `ProgressHook` and the `EvaluationHook` of that list.
      signals: `StopOnSignalHook` (of several machines `StopTogetherHook`), to come last.
      tested: what the `EvaluationHook` runs: a `SavingEvaluation`; in a cluster the `Evaluation`.
      end: in a cluster an `EndHook`, else None.
      newest: `NewestCheckpoint`, the last one of `save_listeners`.
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
    log_values = values + ([] if job.checksum is None else [('examples_checksum', job.checksum)])
    # TensorFlow refuses to tell the time in a step whose operations are deterministic.
    watch = None if FLAGS.deterministic else towers.InputWatchHook(job.train_op, say=None)
    progress = ProgressHook(
        [('lr' if name == 'learning_rate' else name, value) for name, value in values], counts,
        log_every=FLAGS.log_every, devices=job.built.devices, fetch_every_step=True,
        input_watch=watch, unit=job.setup.model.unit)
    metrics = MetricsHook(
        log_values, counts, os.path.join(train_dir(), 'metrics.jsonl'), log_every=FLAGS.log_every,
        fetch_every_step=True, say=progress.write, input_watch=watch,
        unit=job.setup.model.unit)
    listeners, profiles = [progress, metrics], []
    if FLAGS.summary_steps:
        listeners.append(SummaryHook(default_summaries(job.built, job.learning_rate), counts,
                                     train_dir(), summary_steps=FLAGS.summary_steps))
    if FLAGS.profile_steps:
        profiles.append(ProfileHook(counts, os.path.join(train_dir(), 'profile'),
                                    *profiled_steps(FLAGS.profile_steps), say=progress.write))
    fingerprint = [FingerprintHook(job.built.variables, counts.global_step, metrics.log)
                   ] if FLAGS.fingerprint else []
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
    of_cluster, end = [], None
    if cluster is not None:
        end = EndHook(cluster, job, signals)
        of_cluster = [end]
        if not cluster.synchronous:
            # Asynchronous workers all count the same global step: the chief stops at the last step
            # of the run, however many it has done itself.
            of_cluster = [tf.train.StopAtStepHook(last_step=counts.last_step), end]
    newest = NewestCheckpoint(train_dir())
    watching = [] if watch is None else [watch, LongStepHook(watch.watch, say=progress.write)]
    first = ([StartInputHook(job.iterator, job.evaluation)] + watching
             + of_cluster + listeners + profiles + fingerprint + [evaluation])
    return RunHooks(first, [hook.listener for hook in listeners] + [newest], progress, evaluation,
                    signals, tested, end, newest, best)


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


class EndHook(OccasionalHook):
    """Says why a run ends before its last step.

    Attributes:
      step: steps that the run has done when the session ends; None before.
    """

    def __init__(self, cluster, job, signals):
        """
        Args:
          cluster: `Cluster`.
          job: `Job`.
          signals: `StopTogetherHook`.
        """
        self.step = None
        self._cluster, self._counts, self._signals = cluster, job.counts, signals

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False

    def end(self, session):
        """Reads the step."""
        self.step = int(session.run(self._counts.global_step))

    def reason(self):
        """`'stopped at step 629 of 100000: worker 1 was told to stop (SIGTERM)'`; or None."""
        why = self._signals.reason()
        if why is None and not self._cluster.is_chief and self._signals.is_told:
            why = '%s, the chief, has ended the run' % self._cluster.who(0)
        if why is None or self.step is None or self.step >= self._counts.last_step:
            return None
        return 'stopped at step %d of %d: %s' % (self.step, self._counts.last_step, why)


def tell_end(end):
    """Prints the reason of an `EndHook`, if there is one; `end` may be None."""
    if end is not None and end.reason() is not None:
        print(end.reason(), flush=True)


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
