"""train.py on several machines: the cluster of its flags, and the workers."""

import contextlib

from absl import flags
import tensorflow.compat.v1 as tf

import towers
from towers.run.step_loop import LoopSession, OccasionalHook
from trainer import data as train_data
from trainer import flags as train_flags

FLAGS = flags.FLAGS
_FOREVER = 10 ** 15  # steps of a worker, which ends when the chief does


def make_cluster():
    """The `Cluster` of --cluster, `TF_CONFIG` and the flags that override it; None of one machine.

    Raises:
      InvalidArgumentError: flags and `TF_CONFIG` do not describe a cluster with this process in it.
    """
    if not FLAGS.cluster:
        return None
    try:
        return towers.Cluster.from_tf_config(
            FLAGS.cluster, workers=_listed('worker_hosts'), ps=_listed('ps_hosts'),
            job=FLAGS.job_name or None,
            rank=FLAGS.task_index if FLAGS.task_index >= 0 else None,
            synchronous=None if FLAGS.cluster != 'ps' else FLAGS.synchronous,
            backup_workers=FLAGS.backup_workers or None)
    except towers.ClusterError as error:  # of the flags, not of a run
        raise towers.InvalidArgumentError(str(error)) from error


def workers_a_step(cluster):
    """How many workers' gradients make one step: all but the backup workers; asynchronously 1."""
    return 1 if cluster is None else cluster.workers_a_step


def examples_a_step(cluster, batch_size):
    """How many examples a step takes from the stream, for backup workers as well: an int.

    Args:
      cluster: `Cluster`, or None.
      batch_size: examples a step on each machine.
    """
    return batch_size * (
        1 if cluster is None or not cluster.synchronous else cluster.num_workers)


def share(cluster):
    """This worker's batches of the stream, as `share=` of the data sets: `(rank, workers)`."""
    return (0, 1) if cluster is None else (cluster.rank, cluster.num_workers)


def counted(built, examples):
    """How many examples a step takes on all machines.

    Args:
      built: `BuiltTowers`.
      examples: how many it takes on this one, an int or a tensor.
    """
    return examples if built.machines is None else built.machines.counted(examples)


# Flags that change no number of a step, or may differ between machines, or that `towers.join`
# compares itself.
_OF_ONE_MACHINE = frozenset([
    'num_towers', 'devices', 'batch_size', 'accumulate', 'micro_batches', 'variable_device',
    'all_reduce', 'xla', 'cluster', 'synchronous', 'backup_workers', 'fingerprint'])


# Flags by which a run ends: the chief's count, and another value on a worker would be passed over.
_OF_THE_END = ['train_steps', 'train_epochs', 'stop_at_accuracy']


def compared_flags():
    """Names of the flags that have to be the same on all workers: they change the run's numbers, or
    its end.

    Each worker computes its part of the gradient, or updates, by its own flags.
    """
    return _OF_THE_END + [name for kind in (train_flags.CHANGES, train_flags.STATE)
            for name in train_flags.RESUMING[kind] if name not in _OF_ONE_MACHINE]


def of_all(cluster, job):
    """What a run with another number of workers has changed, without another value of a flag: a
    list of pairs of a name and a value. One machine is one worker."""
    return list(zip(train_flags.OF_WORKERS, (
        1 if cluster is None else cluster.num_workers, job.counts.batch_size,
        str(job.built.plan.learning_rate))))


def join(cluster, job):
    """`towers.join` with the timeouts of the flags, and with the settings that all workers share.
    """
    settings = {'--' + name: FLAGS[name].value for name in compared_flags()}
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:
        settings['end of the cosine, in examples (--decay_epochs says it where workers share no '
                 '--train_dir),'] = job.last_example
    return towers.join(cluster, job.built, start_timeout=FLAGS.start_timeout,
                       dead_after=FLAGS.dead_after, settings=settings)


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


def joined(cluster, job):
    """As `join`; without a cluster a context whose value is None."""
    return contextlib.nullcontext() if cluster is None else join(cluster, job)


def hooks(cluster, job):
    """The chief's further hooks, a list: of asynchronous workers all count the same global step, so
    it stops at the last step of the run, however many it has done itself."""
    if cluster is None or cluster.synchronous:
        return []
    return [tf.train.StopAtStepHook(last_step=job.counts.last_step)]


def work(cluster, job, input_hook):
    """Trains as a worker that saves nothing, until the chief stops or a signal comes.

    Args:
      cluster: `Cluster`.
      job: `Job`.
      input_hook: hook that starts the input pipeline.

    Returns:
      The number of the signal, to whichever worker it was sent; or None.

    Raises:
      OwnDataError: the training data ended before the chief did.
      ClusterError, WorkerLostError: as `towers.join`.
    """
    signals = towers.StopTogetherHook(cluster, job.built)
    end = EndHook(cluster, job, signals)
    own_hooks = [input_hook, end]
    if cluster.kind != 'ring' and job.built.machines.stops is None:
        own_hooks.append(tf.train.StopAtStepHook(last_step=job.counts.last_step))
    has_ended, ended = False, None
    try:
        with join(cluster, job) as member:
            print('%s joined' % cluster.name, flush=True)
            with member.session(own_hooks + [signals], LoopSession) as session:
                try:
                    while not session.should_stop():
                        with train_data.skipping(job, session, cluster.num_workers):
                            session.run_steps(job.train_op, _FOREVER)
                except tf.errors.OutOfRangeError:  # which ends the session without an error
                    has_ended = True
            if has_ended and not signals.is_told:  # the chief's end ends a step likewise
                ended = train_data.ended_on_worker()
            if ended is not None and cluster.kind != 'horovod':
                raise ended  # here, so that the others hear of it at once
    finally:
        signals.restore()
    print('%s ended' % cluster.name, flush=True)
    if ended is not None:
        raise ended
    tell_end(end)
    return signals.stopping_signal


def _listed(name):
    """The parts of a flag's text between commas, a list; None of an empty text."""
    parts = [each.strip() for each in FLAGS[name].value.split(',')]
    if parts == ['']:
        return None
    if '' in parts:
        raise towers.InvalidArgumentError('--%s=%s has a comma without an address: leave it '
                                          'out.' % (name, FLAGS[name].value))
    return parts
