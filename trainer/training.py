"""The part of a process in a training: it trains and saves, is a worker, serves, or evaluates."""

import contextlib

import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint.files import step_of
from towers.run.step_loop import LoopSession
from towers.run.training_session import training_session
from trainer.cluster import joined
from trainer.data import data_ended, data_ended_on_worker
from trainer.evaluator import evaluate_run, say_ended
from trainer.exit_status import status_of_signal
from trainer.flags import FLAGS, train_dir
from trainer.hooks import StartInputHook, make_hooks, tell_end
from trainer.resources import memory_limit, session_config
from trainer.results import export, report
from trainer.run_settings import SettingsHook, run_settings

_FOREVER = 10 ** 15  # steps of a worker, which ends when the chief does


class Training:
    """A training that is built in the default graph; in a cluster the chief's.

        training = Training(job, cluster)
        with training.session() as session:
            training.run_steps(session)
        exit_status = training.finish()
    """

    def __init__(self, job, cluster=None):
        """
        Args:
          job: `Job`.
          cluster: `Cluster`; or None.
        """
        self._job, self._cluster = job, cluster
        self._hooks = make_hooks(job, cluster)
        self._ended = None  # the `OwnDataError` of data that ended before the run

    @contextlib.contextmanager
    def session(self):
        """The `LoopSession` of the run, which goes on from the newest checkpoint; a context.

        The last evaluation is made, and the last checkpoint saved, as it ends.
        """
        job, cluster, hooks = self._job, self._cluster, self._hooks
        initial_values = (towers.init_from(FLAGS.init_from, job.built.variables)
                          if FLAGS.init_from else None)
        try:
            with joined(cluster, job) as member:
                settings = SettingsHook(run_settings(
                    job.setup.batch_size, job.setup.dataset,
                    1 if cluster is None else cluster.num_workers), train_dir())
                with training_session(
                        train_dir(), job.counts.global_step, [settings] + hooks.first,
                        session_config(job.built), last_hooks=[hooks.signals],
                        save_steps=FLAGS.save_steps, keep=FLAGS.keep,
                        listeners=hooks.save_listeners, recover=FLAGS.recover,
                        initial_values=initial_values, check=settings.check, built=job.built,
                        memory_limit=memory_limit(), member=member) as session:
                    say_ended(train_dir(), None)
                    yield session
                if self._ended is not None and cluster is not None and cluster.kind != 'horovod':
                    raise self._ended  # here, so that the other workers hear of it at once
        finally:
            hooks.progress.close()
            hooks.signals.restore()

    def run_steps(self, session):
        """Runs the steps that are left, or those until a hook stops the session."""
        self._ended = run_steps(self._job, session, self._cluster)

    def finish(self):
        """Prints the results of a run whose session has ended, and exports its model.

        Returns:
          The exit status: 0; or that of the signal that stopped the run, in a cluster the first one
          to any worker.

        Raises:
          OwnDataError: the training data ended before the run, or the test set is at fault.
          DatasetError, tf.errors.OpError: of the test set.
        """
        hooks = self._hooks
        stopped_by = hooks.signals.stopping_signal
        if stopped_by is None and hooks.failure is None:
            report(hooks.progress.throughput, hooks.evaluation.latest, self._job.setup)
        if self._cluster is not None:
            tell_end(hooks.signals)
        print('checkpoint     %s' % hooks.newest.path)
        if hooks.best is not None and hooks.best.text:
            print('best           %s' % hooks.best.text)
        if self._ended is not None or hooks.failure is not None:
            raise self._ended or hooks.failure
        if stopped_by is None:
            say_ended(train_dir(), step_of(hooks.newest.path))
        if FLAGS.export_dir and stopped_by is None:
            export(self._job.setup.model)
        return status_of_signal(stopped_by)


def run_steps(job, session, cluster=None):
    """Runs steps up to the last one of the job, or until a hook stops the session.

    Args:
      job: `Job`.
      session: `LoopSession`.
      cluster: `Cluster`; or None.

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
        # Again if TensorFlow lost the session: it then went back to the newest checkpoint.
        while step < last and not session.should_stop():
            session.run_steps(job.train_op, last - step)
            step = last if session.should_stop() else position()
    except tf.errors.OutOfRangeError:  # ends the session without an error, so that it saves
        return data_ended(position(), begin, last)
    return None


def serve_or_evaluate(setup, cluster):
    """Does the part of a process that builds no towers.

    A parameter server works until a signal ends it, and never returns. An evaluator evaluates the
    chief's checkpoints.

    Args:
      setup: `Setup`.
      cluster: `Cluster`; None: of an evaluator beside a run on one machine.

    Returns:
      The exit status.
    """
    if FLAGS.plan_only:
        print('%s builds no towers: it has no plan' % (cluster.name if cluster else 'an evaluator'))
        return 0
    if cluster is not None and cluster.job == 'ps':
        towers.serve(cluster)
    return status_of_signal(evaluate_run(setup))


def work(cluster, job):
    """Trains as a worker that saves nothing, until the chief stops or a signal comes.

    Args:
      cluster: `Cluster`.
      job: `Job`.

    Returns:
      The exit status: of the signal, to whichever worker it was sent; or 0.

    Raises:
      OwnDataError: the training data ended before the chief did.
      ClusterError, WorkerLostError: as `towers.join`.
    """
    signals = towers.StopTogetherHook(cluster, job.built)
    own_hooks = [StartInputHook(job.iterator)]
    if not cluster.synchronous:
        own_hooks.append(tf.train.StopAtStepHook(last_step=job.counts.last_step))
    has_ended, ended = False, None
    try:
        with joined(cluster, job) as member:
            print('%s joined' % cluster.name, flush=True)
            with member.session(own_hooks + [signals], LoopSession) as session:
                try:
                    while not session.should_stop():
                        session.run_steps(job.train_op, _FOREVER)
                except tf.errors.OutOfRangeError:  # which ends the session without an error
                    has_ended = True
            if has_ended and not signals.is_told:  # the chief's end ends a step likewise
                ended = data_ended_on_worker()
            if ended is not None and cluster.kind != 'horovod':
                raise ended  # here, so that the others hear of it at once
    finally:
        signals.restore()
    print('%s ended' % cluster.name, flush=True)
    if ended is not None:
        raise ended
    tell_end(signals)
    return status_of_signal(signals.stopping_signal)
