"""The flags as arguments of towers: optimizer, learning rate, memory, session, machines."""

import contextlib
import warnings

import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.errors import counted
from trainer.flags import CHANGES, FLAGS, SETTINGS, STATE
from trainer.large_batch_optimizers import LAMBOptimizer, LARSOptimizer


def make_learning_rate(batch_size, num_towers, examples_per_epoch, last_example, workers=1):
    """The `LearningRate` of the flags.

    Args:
      batch_size, num_towers: of each machine.
      examples_per_epoch, last_example: of one pass over the data, and of the whole run.
      workers: how many machines' gradients make one step.

    Raises:
      InvalidArgumentError: decay and batch flags that do not fit the data.
    """
    decay_examples = decay_rate = None
    if FLAGS.decay != 'none':
        decay_examples = int(FLAGS.decay_epochs * examples_per_epoch)
        if FLAGS.decay_epochs and not decay_examples:
            raise towers.InvalidArgumentError(
                '--decay_epochs=%g is less than one of the %s of an epoch: give more'
                % (FLAGS.decay_epochs, counted(examples_per_epoch, 'example')))
        decay_rate = FLAGS.decay_rate if FLAGS.decay == 'exponential' else None
        if FLAGS.decay == 'cosine' and not decay_examples:
            decay_examples = last_example
    times = num_towers * FLAGS.accumulate * FLAGS.micro_batches  # the batch that the rate is for
    if FLAGS.base_batch_size:
        if batch_size % FLAGS.base_batch_size:
            raise towers.InvalidArgumentError(
                '--batch_size=%d is no multiple of --base_batch_size=%d: give a multiple'
                % (batch_size, FLAGS.base_batch_size))
        times = batch_size // FLAGS.base_batch_size
    return towers.LearningRate(
        FLAGS.base_learning_rate, workers * times, FLAGS.lr_scaling,
        warmup_examples=int(FLAGS.warmup_epochs * examples_per_epoch), decay=FLAGS.decay,
        decay_examples=decay_examples, decay_rate=decay_rate)


def make_optimizer(learning_rate):
    """The `tf.train.Optimizer` of --optimizer."""
    return {'sgd': lambda: tf.train.GradientDescentOptimizer(learning_rate),
            'momentum': lambda: tf.train.MomentumOptimizer(learning_rate, FLAGS.momentum),
            'adam': lambda: tf.train.AdamOptimizer(learning_rate),
            'rmsprop': lambda: tf.train.RMSPropOptimizer(learning_rate, momentum=FLAGS.momentum),
            'lars': lambda: LARSOptimizer(learning_rate, FLAGS.momentum, FLAGS.weight_decay),
            'lamb': lambda: LAMBOptimizer(learning_rate, weight_decay=FLAGS.weight_decay),
            }[FLAGS.optimizer]()


def weight_of_l2_loss():
    """Factor of the L2 loss: --weight_decay; 0 where the optimizer itself decays weights."""
    return 0. if FLAGS.optimizer in ('lars', 'lamb') else FLAGS.weight_decay


def make_loss_scale():
    """The `LossScale` of --loss_scale; None: the default one of the precision."""
    first = FLAGS.loss_scale
    if not first:
        return None
    return towers.LossScale(first, least=min(1., first), most=max(2. ** 24, first))


def clip(gradients):
    """`transform_gradients` of `build_towers`: scales the gradients to the global norm --clip_norm,
    if theirs is larger."""
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in gradients], FLAGS.clip_norm)
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, gradients)]


def enter_graph_mode():
    """Switches this process to graphs with resource variables, mends tf_slim, silences both.

    With --deterministic it also switches operations to deterministic kernels.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # about calls in tf_slim
    # Of a record that is no tf.Example, which the error names.
    warnings.filterwarnings('ignore', 'Unexpected end-group tag', RuntimeWarning)
    tf.disable_v2_behavior()
    if FLAGS.deterministic:
        compat.enable_determinism()
    tf.enable_resource_variables()
    towers.mend_slim()


def memory_of_tower():
    """`towers.Memory` as the flags say."""
    recompute = FLAGS.recompute if FLAGS.recompute == 'auto' else [
        name for name in FLAGS.recompute.split(',') if name]
    return towers.Memory(FLAGS.accumulate, recompute or None)


def memory_limit():
    """The option memory_limit in bytes, an int; None: the memory that the devices have."""
    return int(FLAGS.memory_limit * 1e6) or None


def session_config(built):
    """The `tf.ConfigProto` for a session of `BuiltTowers`."""
    config = towers.session_config(
        built.devices, allow_growth=FLAGS.allow_growth,
        memory_fraction=FLAGS.memory_fraction or None,
        intra_op_threads=None if FLAGS.intra_op_threads < 0 else FLAGS.intra_op_threads,
        inter_op_threads=FLAGS.inter_op_threads)
    return towers.use_precision(config, built.precision, built.devices)


# ---- Several machines ----------------------------------------------------------------------------

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
    """Whether this process builds towers; else it is a parameter server, or evaluates."""
    return FLAGS.job_name != 'evaluator' if cluster is None else cluster.job == 'worker'


def saves(cluster):
    """Whether this process is the one that saves: the chief; of one machine the only one."""
    return cluster is None or cluster.is_chief


def examples_a_step(cluster, batch_size):
    """How many examples a step takes from the stream; each machine takes `batch_size`."""
    return batch_size * (
        1 if cluster is None or not cluster.synchronous else cluster.num_workers)


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
