"""What a process does in a training: it trains and saves, works for a chief, serves, or evaluates.

Tests are in tests/trainer/test_train.py, test_trainer_stops.py and test_trainer_kills.py.
"""

import signal
import typing

import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint.files import step_of
from towers.checkpoint.newest import newest_prefix
from towers.run.training_session import training_session
from trainer.arguments import joined, memory_limit, session_config
from trainer.best import SINCE_BEST
from trainer.data import data_ended
from trainer.evaluator import evaluate_run, say_ended, say_goes_on
from trainer.flags import FLAGS, train_dir
from trainer.hooks import RunHooks, StartInputHook, make_hooks
from trainer.job import Job, Setup
from trainer.process import status_of_signal
from trainer.results import export, report
from trainer.run_settings import run_settings


def train(job: Job, cluster: typing.Optional[towers.Cluster] = None) -> int:
    """Trains, evaluates, prints the results and exports, as the only process or a cluster's chief.

    Args:
      job: the `Job` of the process.
      cluster: the machines, or None.

    Returns:
      The exit status: 0; or the status of the signal that stopped the run. In a cluster this is the
      first signal that any worker got.

    Raises:
      OwnDataError: the training data ended before the run, or the test set is at fault.
      DatasetError, tf.errors.OpError: the test set cannot be read.
    """
    hooks = make_hooks(job, cluster)
    initial_values = None
    if FLAGS.init_from:
        initial_values = towers.init_from(FLAGS.init_from, job.built.variables)
    num_workers = 1 if cluster is None else cluster.num_workers
    try:
        with joined(cluster, job) as member:
            settings = run_settings(job.setup.batch_size, job.setup.dataset, num_workers)
            # The last evaluation is made, and the last checkpoint saved, as the session ends.
            with training_session(
                    train_dir(), job.counts.global_step, [settings] + hooks.first,
                    session_config(job.built), last_hooks=[hooks.signals],
                    save_steps=FLAGS.save_steps, keep=FLAGS.keep, listeners=hooks.save_listeners,
                    recover=FLAGS.recover, initial_values=initial_values, check=settings.check,
                    built=job.built, memory_limit=memory_limit(), member=member) as session:
                # If the run had ended before, it goes on now, and an evaluator beside it has to
                # wait for more checkpoints.
                say_goes_on(train_dir())
                end_of_data = run_steps(job, session)
            if end_of_data is not None and cluster is not None:
                # Within `joined`, so that the other workers hear of it at once. With one machine
                # `_finish` raises it, after the results.
                raise end_of_data
    finally:
        hooks.progress.close()
        hooks.signals.restore()
    return _finish(job, hooks, end_of_data, cluster)


class _EndOfSession(typing.NamedTuple):
    """How the session of a training has ended.

    Attributes:
      checkpoint: the prefix of the checkpoint that it has saved last.
      step: the step of this checkpoint.
      is_early: whether the run has steps after this step.
      signal_number: the signal that has stopped the session; None if no signal has.
      failure: the error about the training data or the test set that has stopped the session; None
        if no error has.
    """
    checkpoint: str
    step: int
    is_early: bool
    signal_number: typing.Optional[int]
    failure: typing.Optional[Exception]


def _finish(job: Job, hooks: RunHooks, end_of_data: typing.Optional[Exception],
            cluster: typing.Optional[towers.Cluster]) -> int:
    """Ends a run whose session has ended: says how it ended, and what it leaves behind.

    Args:
      job: the `Job` of the process.
      hooks: the `RunHooks` of the run.
      end_of_data: the error to raise if the training data ended before the last step; or None.
      cluster: the machines, or None.

    Returns:
      The exit status of the process.

    Raises:
      Exception: `end_of_data`; or else the error with which an evaluation could not read the test
        set.
    """
    checkpoint: typing.Any = newest_prefix(train_dir())  # never None: the session has saved
    step: typing.Any = step_of(checkpoint)
    end = _EndOfSession(
        checkpoint, step, is_early=step < job.counts.last_step,
        signal_number=hooks.signals.stopping_signal, failure=end_of_data or hooks.tested.failure)
    _report_end(end, job, hooks, cluster)
    if end.failure is not None:
        raise end.failure
    if end.signal_number is not None:
        return status_of_signal(end.signal_number)
    # --max_minutes ends a part of a run: an evaluator beside it waits for the next part, and is not
    # told that the run has ended. Each part exports the weights that it ends with.
    goes_on_later = end.is_early and hooks.minutes.is_over
    if not goes_on_later:
        say_ended(train_dir(), end.step)
    if FLAGS.export_dir:
        export(job.setup.model)
    return 0


def _report_end(end: _EndOfSession, job: Job, hooks: RunHooks,
                cluster: typing.Optional[towers.Cluster]) -> None:
    """Prints the last results, what has stopped the run, and its checkpoints.

    Args:
      end: how the session has ended.
      job: the `Job` of the process.
      hooks: the `RunHooks` of the run.
      cluster: the machines, or None.
    """
    _report_last_evaluation(job, hooks)
    if cluster is not None:
        _say_stopped(hooks.signals)
    # Only a signal, a failure or a setting ends a run early. `_finish` reports a signal by the exit
    # status, and raises a failure.
    was_stopped_by_setting = end.is_early and end.signal_number is None and end.failure is None
    if was_stopped_by_setting:
        print('stopped: by %s' % _reason_to_stop(hooks))
    print('checkpoint     %s' % end.checkpoint)
    if hooks.tested.text:
        print('best           %s' % hooks.tested.text)


def _report_last_evaluation(job: Job, hooks: RunHooks) -> None:
    """Prints the results of the evaluation that is made as the session ends.

    There are no results after a signal, which ends the session without this evaluation, nor where
    the test set cannot be read.
    """
    if hooks.signals.stopping_signal is not None or hooks.tested.failure is not None:
        return
    latest: typing.Any = hooks.evaluation.latest
    report(hooks.progress.throughput, latest, job.setup)


def _reason_to_stop(hooks: RunHooks) -> str:
    """The setting that has stopped a run before its last step, as text.

    A session does not tell which hook has stopped it. So the condition of each setting is evaluated
    once more.
    """
    results: dict = hooks.evaluation.latest or {}
    if hooks.minutes.is_over:
        return '--max_minutes'
    if FLAGS.stop_after and results.get(SINCE_BEST, 0) >= FLAGS.stop_after:
        return '--stop_after'
    if FLAGS.stop_at_accuracy and results.get('accuracy', 0.) >= FLAGS.stop_at_accuracy:
        return 'stop_at_accuracy of --config'
    return 'a hook of --hooks'


def _say_stopped(hook: towers.StopTogetherHook) -> None:
    """Says which worker got a signal, if one did; `hook` is the hook of this worker."""
    rank, signal_number = hook.stopped_by  # (None, None) without a signal
    if signal_number is not None:
        name = signal.Signals(signal_number).name
        print('stopped: worker %s was told to stop (%s)' % (rank, name), flush=True)


def run_steps(job: Job, session: typing.Any) -> typing.Optional[Exception]:
    """Runs steps until a hook stops the session, at the last step of the job or before.

    Args:
      job: the `Job`.
      session: a `MonitoredSession`.

    Returns:
      The `OwnDataError` about training data that ended before the last step, to be raised when the
      session has saved; None if the data did not end.
    """
    last_step = job.counts.last_step

    def read_step(step_context: typing.Any) -> int:
        """The global step, read without the hooks: they would count the read as a step."""
        return int(step_context.session.run(job.counts.global_step))
    step_at_start = session.run_step_fn(read_step)
    if step_at_start >= last_step:
        print('%s holds %d steps already, and %d were asked for: evaluating them. Another '
              '--train_dir starts anew.' % (train_dir(), step_at_start, last_step))
        return None
    was_out_of_range = _run_until_stopped(session, job.train_op)
    if not was_out_of_range:  # a hook has stopped the session
        return None
    step = session.run_step_fn(read_step)
    return data_ended('%d of %d steps' % (step, last_step), at_once=step == step_at_start)


def _run_until_stopped(session: typing.Any, train_op: tf.Operation) -> bool:
    """Runs steps until a hook stops the session, or a step raises an `OutOfRangeError`.

    TensorFlow raises this error for a step that finds no batch. It is not raised again, so that the
    session ends as after its last step, and the process that saves makes a checkpoint.

    Args:
      session: a `MonitoredSession`.
      train_op: the operation of a step.

    Returns:
      Whether a step raised an `OutOfRangeError`.
    """
    try:
        while not session.should_stop():
            session.run(train_op)
    except tf.errors.OutOfRangeError:
        return True
    return False


def serve_or_evaluate(setup: Setup, cluster: typing.Optional[towers.Cluster]) -> int:
    """Runs a process that builds no towers: a parameter server or an evaluator.

    A parameter server works until a signal ends it, and never returns. An evaluator evaluates the
    chief's checkpoints.

    Args:
      setup: the `Setup` of the job.
      cluster: the machines, and which of them this process is; None for an evaluator.

    Returns:
      The exit status.
    """
    if FLAGS.plan_only:
        name = 'an evaluator' if cluster is None else cluster.name
        print('%s builds no towers: it has no plan' % name)
        return 0
    if cluster is not None:  # a parameter server: a worker would build towers
        towers.serve(cluster)
    evaluate_run(setup)
    return 0


def work(cluster: towers.Cluster, job: Job) -> int:
    """Trains as a worker that saves nothing, until the chief stops or a signal comes.

    Args:
      cluster: the machines, and which of them this process is.
      job: the `Job` of the process.

    Returns:
      The exit status: 0; or the status of the signal that any worker got.

    Raises:
      OwnDataError: the training data ended before the chief did.
      ClusterError, WorkerLostError: as `towers.join`.
    """
    signals = towers.StopTogetherHook(cluster, job.built)
    hooks = [StartInputHook(job.iterator)]
    if not cluster.synchronous:  # an asynchronous worker itself stops at the last step
        hooks.append(tf.train.StopAtStepHook(last_step=job.counts.last_step))
    try:
        with joined(cluster, job) as member:
            print('%s joined' % cluster.name, flush=True)
            with member.session(hooks + [signals]) as session:
                was_out_of_range = _run_until_stopped(session, job.train_op)
            # An `OutOfRangeError` means that the data of this worker ended, or that another worker
            # has said that all workers stop. In the second case `is_told` is True.
            if was_out_of_range and not signals.is_told:
                # Within `joined`, so that the other workers hear of it at once.
                raise data_ended('some steps, before the chief did')
    finally:
        signals.restore()
    print('%s ended' % cluster.name, flush=True)
    _say_stopped(signals)
    return status_of_signal(signals.stopping_signal)
