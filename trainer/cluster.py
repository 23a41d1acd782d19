"""The cluster of TF_CONFIG: which process this is, its share of the batches, what all compare."""

import contextlib

import towers
from trainer.flags import CHANGES, FLAGS, SETTINGS, STATE


def make_cluster():
    """The `Cluster` of --cluster and `TF_CONFIG`; None of one machine, and of an evaluator."""
    if not FLAGS.cluster or FLAGS.job_name == 'evaluator':
        return None
    try:
        return towers.Cluster.from_tf_config(
            FLAGS.cluster, synchronous=None if FLAGS.cluster != 'ps' else FLAGS.synchronous)
    except towers.ClusterError as error:  # of the flags, not of a run
        raise towers.InvalidArgumentError(str(error)) from error


def trains(cluster):
    """Whether this process builds towers and trains; else it is a parameter server, or evaluates.
    """
    return FLAGS.job_name != 'evaluator' if cluster is None else cluster.job == 'worker'


def saves(cluster):
    """Whether this process is the one that saves: the chief; of one machine the only one."""
    return cluster is None or cluster.is_chief


def workers_a_step(cluster):
    """How many workers' gradients make one step: of all; asynchronously 1."""
    return 1 if cluster is None else cluster.workers_a_step


def examples_a_step(cluster, batch_size):
    """How many examples a step takes from the stream; each machine takes `batch_size`."""
    return batch_size * (
        1 if cluster is None or not cluster.synchronous else cluster.num_workers)


def share(cluster):
    """This worker's batches of the stream, as `share=` of the data sets: `(rank, workers)`."""
    return (0, 1) if cluster is None else (cluster.rank, cluster.num_workers)


def counted(built, examples):
    """How many examples a step takes on all machines, of which this one takes `examples`."""
    return examples if built.machines is None else built.machines.counted(examples)


# ---- What the workers compare --------------------------------------------------------------------

# Settings that change no number of a step, or may differ between machines, or that `towers.join`
# compares itself.
_OF_ONE_MACHINE = frozenset([
    'num_towers', 'devices', 'batch_size', 'accumulate', 'micro_batches', 'variable_device',
    'xla', 'cluster', 'synchronous'])
# Settings by which a run ends: the chief's count, and another value on a worker would be passed
# over.
_OF_THE_END = ['train_steps', 'train_epochs', 'stop_at_accuracy', 'stop_after', 'max_minutes']


def compared_flags():
    """Names of the settings that have to be the same on all workers: each computes its part of the
    gradient, or updates, by its own flags."""
    return _OF_THE_END + [name for name, setting in SETTINGS.items()
                          if setting.kind in (CHANGES, STATE) and name not in _OF_ONE_MACHINE]


def joined(cluster, job):
    """`towers.join` with the timeouts of the flags, and with the settings that all workers share;
    without a cluster a context whose value is None."""
    if cluster is None:
        return contextlib.nullcontext()
    settings = {'--' + name: FLAGS[name].value for name in compared_flags()}
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:
        settings['end of the cosine, in examples (--decay_epochs says it where workers share no '
                 '--train_dir),'] = job.last_example
    return towers.join(cluster, job.built, start_timeout=FLAGS.start_timeout,
                       dead_after=FLAGS.dead_after, settings=settings)
