"""What of train.py is for several machines: their flags, and workers that save nothing."""

import contextlib
import os
import time

from absl import flags
import tensorflow.compat.v1 as tf

import towers
from towers.run.step_loop import LoopSession
import train_data
import train_flags

FLAGS = flags.FLAGS
_FOREVER = 10 ** 15  # steps: until the chief stops


def make_cluster():
    """The `Cluster` of --cluster, `TF_CONFIG` and the flags that override it; None without one.

    Raises:
      InvalidArgumentError: they make no cluster.
    """
    if not FLAGS.cluster:
        return None
    try:
        return towers.Cluster.from_tf_config(
            FLAGS.cluster, workers=_listed(FLAGS.worker_hosts), ps=_listed(FLAGS.ps_hosts),
            job=FLAGS.job_name or None,
            rank=FLAGS.task_index if FLAGS.task_index >= 0 else None,
            synchronous=None if FLAGS.cluster != 'ps' else FLAGS.synchronous,
            backup_workers=FLAGS.backup_workers or None)
    except towers.ClusterError as error:  # of the flags, not of a run
        raise towers.InvalidArgumentError(str(error)) from error


def workers_a_step(cluster):
    """How many workers' gradients make one step: all, but where nobody waits for the others."""
    return 1 if cluster is None or not cluster.synchronous else (
        cluster.num_workers - cluster.backup_workers)


def examples_a_step(cluster):
    """How far a step goes in the stream of examples, those of backup workers included."""
    return FLAGS.batch_size * (
        1 if cluster is None or not cluster.synchronous else cluster.num_workers)


def share(cluster):
    """`share=` of the data sets: which batches of the stream are this worker's."""
    return (0, 1) if cluster is None else (cluster.rank, cluster.num_workers)


def counted(built, examples):
    """What a step adds to the examples seen, for those of this machine."""
    return examples if built.machines is None else built.machines.counted(examples)


# What changes no number of a step, or is each machine's own matter, or `towers.join` compares.
_OF_ONE_MACHINE = frozenset([
    'num_towers', 'devices', 'batch_size', 'accumulate', 'micro_batches', 'variable_device',
    'all_reduce', 'xla', 'cluster', 'synchronous', 'backup_workers', 'fingerprint'])


def compared_flags():
    """Names of the flags that have to be the same on all workers: all that change a run's numbers.

    Each worker makes the updates, or its part of the gradient, by its own flags.
    """
    return [name for kind in (train_flags.CHANGES, train_flags.STATE)
            for name in train_flags.RESUMING[kind] if name not in _OF_ONE_MACHINE]


def join(cluster, job):
    """`towers.join` with what the flags say, and what has to be the same on all workers."""
    settings = {'--' + name: FLAGS[name].value for name in compared_flags()}
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:
        settings['end of the cosine, in examples (--decay_epochs says it where workers share no '
                 '--train_dir),'] = job.last_example
    return towers.join(cluster, job.built, start_timeout=FLAGS.start_timeout,
                       dead_after=FLAGS.dead_after, settings=settings)


def joined(cluster, job):
    """As `join`; without a cluster a context of None."""
    return contextlib.nullcontext() if cluster is None else join(cluster, job)


def hooks(cluster, job):
    """Hooks for what only some clusters need: where steps of others count, too."""
    if cluster is None or cluster.synchronous:
        return []
    return [tf.train.StopAtStepHook(last_step=job.train_steps)]


def work(cluster, job, dataset, input_hook):
    """Trains until the chief stops, or this worker is told to; returns the signal, or None."""
    signals = towers.StopTogetherHook(cluster, job.built)
    own_hooks = [input_hook]
    if cluster.kind != 'ring' and job.built.machines.stops is None:
        own_hooks.append(tf.train.StopAtStepHook(last_step=job.train_steps))
    ended = None
    try:
        with join(cluster, job) as member:
            print('%s joined' % cluster.name, flush=True)
            with member.session(own_hooks + [signals], LoopSession) as session:
                try:
                    while not session.should_stop():
                        with train_data.skipping(dataset, job, session, cluster.num_workers):
                            session.run_steps(job.train_op, _FOREVER)
                except tf.errors.OutOfRangeError:  # to the session the end
                    ended = train_data.ended_on_worker()
    finally:
        signals.restore()
    print('%s ended' % cluster.name, flush=True)
    if ended is not None:
        raise ended
    return signals.received


def evaluate_checkpoints(evaluate_newest, directory, pause=1.):
    """Evaluates each new checkpoint of a directory until a signal ends the process.

    Args:
      evaluate_newest: function that evaluates the newest one.
      directory: of the run.
      pause: seconds between two looks.
    """
    seen = None
    while True:
        newest = tf.train.latest_checkpoint(directory) if os.path.isdir(directory) else None
        if newest is not None and newest != seen:
            seen = newest
            evaluate_newest()
        time.sleep(pause)


def _listed(text):
    return [each.strip() for each in text.split(',')] if text else None
