"""The steps of a training in its session, and what becomes of the run when they are done."""

import contextlib
import signal
import sys

import tensorflow.compat.v1 as tf

import towers
from towers.run.training_session import training_session
from trainer.cluster import joined
from trainer.data import data_ended
from trainer.exit_status import status_of_signal
from trainer.flags import FLAGS, train_dir
from trainer.hooks import make_hooks, tell_end
from trainer.output_stream import OutputStream
from trainer.resources import memory_limit, session_config
from trainer.results import export, report
from trainer.resuming import run_settings, settings_of_data, settings_of_workers
from trainer.run_settings import SettingsHook

_MANY_OPERATIONS = 50000  # of a graph whose first step takes so long that it is announced


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
        if isinstance(sys.stdout, OutputStream):  # a run whose output is lost saves before it ends
            sys.stdout.tell_of_loss(lambda error: self._hooks.signals.stop(signal.SIGPIPE))

    @contextlib.contextmanager
    def session(self):
        """The `LoopSession` of the run, which goes on from the newest checkpoint; a context.

        The last evaluation is made, and the last checkpoint saved, as it ends.
        """
        job, cluster, hooks = self._job, self._cluster, self._hooks
        _announce_long_start()
        initial_values = (towers.init_from(FLAGS.init_from, job.built.variables)
                          if FLAGS.init_from else None)
        try:
            with joined(cluster, job) as member:
                settings = SettingsHook(self._settings(), train_dir())
                with training_session(
                        train_dir(), job.counts.global_step, [settings] + hooks.first,
                        session_config(job.built), last_hooks=[hooks.signals],
                        save_steps=FLAGS.save_steps, keep=FLAGS.keep,
                        listeners=hooks.save_listeners, recover=FLAGS.recover,
                        initial_values=initial_values, check=settings.check, built=job.built,
                        memory_limit=memory_limit(), member=member) as session:
                    yield session
                if self._ended is not None and cluster is not None and cluster.kind != 'horovod':
                    raise self._ended  # here, so that the other workers hear of it at once
        finally:
            hooks.progress.close()
            hooks.signals.restore()

    def _settings(self):
        """The `RunSettings` of the run."""
        setup = self._job.setup
        return run_settings(setup.batch_size, settings_of_workers(self._cluster, self._job)
                            + settings_of_data(setup.dataset))

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
        tell_end(hooks.end)
        print('checkpoint     %s' % hooks.newest.path)
        if hooks.best is not None and hooks.best.text:
            print('best           %s' % hooks.best.text)
        if self._ended is not None or hooks.failure is not None:
            raise self._ended or hooks.failure
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
        audits = FLAGS.audit_runtime
        # Again if TensorFlow lost the session: it then went back to the newest checkpoint.
        while step < last and not session.should_stop():
            if audits:
                audit_runtime(job, session)
                audits = False
            else:
                session.run_steps(job.train_op, last - step)
            step = last if session.should_stop() else position()
    except tf.errors.OutOfRangeError:  # ends the session without an error, so that it saves
        return data_ended(position(), begin, last)
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


def _announce_long_start():
    """Says that the first step of a large graph takes long, if this one is large."""
    operations = len(tf.get_default_graph().get_operations())
    if operations > _MANY_OPERATIONS:
        print('starting       TensorFlow takes minutes for the first step of a graph of {:,d} '
              'operations'.format(operations), flush=True)
