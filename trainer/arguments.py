"""The flags as arguments of towers: optimizer, learning rate, memory, session, machines.

Each function makes one argument of `build_towers`, of the session or of the cluster, and reads the
flags that it needs from `FLAGS`. What depends on the data (an epoch's examples, the end of the run)
is an argument. Only `clip` makes operations. Tests are in tests/trainer/test_trainer_job.py and
test_trainer_flags.py.
"""

import contextlib
import typing
import warnings

import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.errors import counted
from trainer.flags import (
    CHANGES,
    DECAYS_BY_RATE,
    DECAYS_OF_WEIGHTS,
    FLAGS,
    SETTINGS,
    STATE,
    decays_until_the_end,
)
from trainer.weight_decay_optimizers import AdamWOptimizer, LAMBOptimizer, LARSOptimizer


def make_learning_rate(batch_size: int, num_towers: int, examples_per_epoch: int,
                       last_example: int, workers: int = 1) -> towers.LearningRate:
    """The `LearningRate` of the flags.

    Args:
      batch_size: examples a step on each machine.
      num_towers: how many towers each machine has.
      examples_per_epoch: the number of examples in one pass over the data.
      last_example: the number of examples in the whole run.
      workers: the number of machines whose gradients make one step.

    Raises:
      InvalidArgumentError: decay and batch flags that do not fit the data.
    """
    options = {}  # the arguments that this decay takes
    if FLAGS.decay != 'none':
        options['decay_examples'] = _decay_examples(examples_per_epoch, last_example)
    if FLAGS.decay in DECAYS_BY_RATE:
        options['decay_rate'] = FLAGS.decay_rate
    elif FLAGS.decay == 'polynomial':
        options['decay_power'] = FLAGS.decay_power
    elif FLAGS.decay == 'cosine_restarts':
        options['restart_growth'] = FLAGS.restart_growth
    base_batches = workers * _base_batches(batch_size, num_towers)
    return towers.LearningRate(
        FLAGS.base_learning_rate, base_batches, FLAGS.lr_scaling,
        warmup_examples=int(FLAGS.warmup_epochs * examples_per_epoch), decay=FLAGS.decay, **options)


def _decay_examples(examples_per_epoch: int, last_example: int) -> int:
    """The number of examples over which the rate falls.

    Args:
      examples_per_epoch: the number of examples in one pass over the data.
      last_example: the number of examples in the whole run.

    Raises:
      InvalidArgumentError: --decay_epochs are less than an example.
    """
    if decays_until_the_end():
        return last_example
    decay_examples = int(FLAGS.decay_epochs * examples_per_epoch)
    if not decay_examples:
        raise towers.InvalidArgumentError(
            '--decay_epochs=%g is less than one of the %s of an epoch: give more'
            % (FLAGS.decay_epochs, counted(examples_per_epoch, 'example')))
    return decay_examples


def _base_batches(batch_size: int, num_towers: int) -> int:
    """How many base batches a machine's batch has: the N of --lr_scaling.

    The base batch is the batch for which --base_learning_rate is meant, of as many examples as the
    option `base_batch_size` of --config says. Without that option it is one micro-batch of one
    tower, so that N is the number of micro-batches on all towers.

    Args:
      batch_size: examples a step on the machine.
      num_towers: how many towers the machine has.

    Raises:
      InvalidArgumentError: the batch is no multiple of `base_batch_size`.
    """
    if not FLAGS.base_batch_size:
        return num_towers * FLAGS.accumulate * FLAGS.micro_batches
    if batch_size % FLAGS.base_batch_size:
        raise towers.InvalidArgumentError(
            '--batch_size=%d is no multiple of --base_batch_size=%d: give a multiple'
            % (batch_size, FLAGS.base_batch_size))
    return batch_size // FLAGS.base_batch_size


def make_optimizer(learning_rate: typing.Any) -> tf.train.Optimizer:
    """The `tf.train.Optimizer` of --optimizer.

    Args:
      learning_rate: a scalar float32 tensor, or a number.

    Returns:
      A new optimizer, with --momentum and --weight_decay if it takes them.
    """
    name = FLAGS.optimizer
    if name == 'sgd':
        return tf.train.GradientDescentOptimizer(learning_rate)
    if name == 'momentum':
        return tf.train.MomentumOptimizer(learning_rate, FLAGS.momentum)
    if name == 'adam':
        return tf.train.AdamOptimizer(learning_rate)
    if name == 'adamw':
        return AdamWOptimizer(learning_rate, FLAGS.weight_decay)
    if name == 'rmsprop':
        return tf.train.RMSPropOptimizer(learning_rate, momentum=FLAGS.momentum)
    if name == 'lars':
        return LARSOptimizer(learning_rate, FLAGS.momentum, FLAGS.weight_decay)
    return LAMBOptimizer(learning_rate, weight_decay=FLAGS.weight_decay)  # the last choice, 'lamb'


def weight_of_l2_loss() -> float:
    """The factor of the L2 loss: --weight_decay; 0 where the optimizer itself decays weights."""
    if FLAGS.optimizer in DECAYS_OF_WEIGHTS:
        return 0.
    return FLAGS.weight_decay


def make_loss_scale() -> typing.Optional[towers.LossScale]:
    """The `LossScale` of the option loss_scale; None for the default loss scale of the precision.

    The option is the initial factor. The factor stays between 1 and 2^24; an initial factor outside
    of this range widens it.
    """
    initial = FLAGS.loss_scale
    if not initial:
        return None
    return towers.LossScale(initial, least=min(1., initial), most=max(2. ** 24, initial))


def clip(gradients: typing.List[tuple]) -> typing.List[tuple]:
    """Scales gradients down to the global norm --clip_norm, if their global norm is larger.

    Args:
      gradients: list of `(gradient, variable)`, as `transform_gradients` of `Objective` gets it.

    Returns:
      List of `(gradient, variable)`, as `transform_gradients` returns it.
    """
    variables = [variable for _, variable in gradients]
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in gradients], FLAGS.clip_norm)
    return list(zip(clipped, variables))


def enter_graph_mode() -> None:
    """Switches this process to graphs with resource variables, and mends tf_slim; silences the log
    of TensorFlow, and the warnings of TensorFlow and tf_slim.

    With --deterministic it also switches operations to deterministic kernels.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)
    warnings.filterwarnings('ignore', module='tensorflow|tf_slim')  # about calls in tf_slim
    # A record that is no tf.Example gives this warning; the error that follows says more.
    warnings.filterwarnings('ignore', 'Unexpected end-group tag', RuntimeWarning)
    tf.disable_v2_behavior()
    config = towers.session_config(
        FLAGS.devices or FLAGS.num_towers, intra_op_threads=_intra_op_threads())
    # All sessions share the threads that are made first, on TensorFlow 2 by the input.
    compat.set_threads(config.intra_op_parallelism_threads)
    if FLAGS.deterministic:
        compat.enable_determinism()
    tf.enable_resource_variables()
    towers.mend_slim()


def _intra_op_threads() -> typing.Optional[int]:
    """The threads of one operation; None leaves their number to `towers.session_config`."""
    return None if FLAGS.intra_op_threads == -1 else FLAGS.intra_op_threads


def memory_of_tower() -> towers.Memory:
    """The `towers.Memory` of the flags."""
    recompute: typing.Any = FLAGS.recompute
    if recompute != 'auto':
        recompute = [name for name in FLAGS.recompute.split(',') if name]
    return towers.Memory(FLAGS.accumulate, recompute or None)


def memory_limit() -> typing.Optional[int]:
    """The option memory_limit, a number of MB, in bytes; None for the memory that the devices have.
    """
    return int(FLAGS.memory_limit * 1e6) or None


def session_config(built: towers.BuiltTowers) -> tf.ConfigProto:
    """The config for a session of towers.

    Args:
      built: the towers, with their devices and their precision.

    Returns:
      A `tf.ConfigProto` with the devices, threads and memory of the flags.
    """
    config = towers.session_config(
        built.devices, allow_growth=FLAGS.allow_growth,
        memory_fraction=FLAGS.memory_fraction or None, intra_op_threads=_intra_op_threads(),
        inter_op_threads=FLAGS.inter_op_threads)
    return towers.use_precision(config, built.precision, built.devices)


# ---- Several machines ----------------------------------------------------------------------------

def make_cluster() -> typing.Optional[towers.Cluster]:
    """The `Cluster` of --cluster and `TF_CONFIG`; None for one machine, and for an evaluator."""
    if not FLAGS.cluster or FLAGS.job_name == 'evaluator':
        return None
    synchronous = None  # not given: only parameter servers may be asynchronous
    if FLAGS.cluster == 'ps':
        synchronous = FLAGS.synchronous
    try:
        return towers.Cluster.from_tf_config(FLAGS.cluster, synchronous=synchronous)
    except towers.ClusterError as error:
        # Here the flags are wrong, so it is no error of a run (see `process` for the exit status).
        raise towers.InvalidArgumentError(str(error)) from error


def trains(cluster: typing.Optional[towers.Cluster]) -> bool:
    """Whether this process builds towers; else it is a parameter server, or an evaluator.

    Args:
      cluster: the machines, and which of them this process is; None for one machine, and for an
        evaluator.
    """
    if cluster is None:
        return FLAGS.job_name != 'evaluator'
    return cluster.job == 'worker'


def saves(cluster: typing.Optional[towers.Cluster]) -> bool:
    """Whether this process saves checkpoints: the chief of a cluster, or the only process."""
    return cluster is None or cluster.is_chief


def examples_a_step(cluster: typing.Optional[towers.Cluster], batch_size: int) -> int:
    """How many examples a step takes from the stream, over all machines.

    With asynchronous workers a step is the step of one worker.

    Args:
      cluster: the machines, or None.
      batch_size: examples a step on each machine.
    """
    if cluster is None or not cluster.synchronous:
        return batch_size
    return batch_size * cluster.num_workers


# Settings that workers need not have in common: they change no number of a step, or may differ
# between machines, or `towers.join` compares them itself.
_OF_ONE_MACHINE = frozenset([
    'num_towers', 'devices', 'batch_size', 'accumulate', 'micro_batches', 'variable_device',
    'xla', 'cluster', 'synchronous'])
# Settings that say when a run ends. The chief ends the run, so another value on a worker would have
# no effect.
_OF_THE_END = ['train_steps', 'train_epochs', 'stop_at_accuracy', 'stop_after', 'max_minutes']


def compared_flags() -> typing.List[str]:
    """Names of the settings that have to be the same on all workers.

    Each worker computes its part of the gradient, or updates, by its own flags. So the list has the
    settings that change numbers or variables of the run, and the settings that say when it ends.
    """
    names = list(_OF_THE_END)
    for name, setting in SETTINGS.items():
        changes_numbers = setting.kind in (CHANGES, STATE)
        if changes_numbers and name not in _OF_ONE_MACHINE:
            names.append(name)
    return names


# How the error about a worker names the end of the decay, if the worker's end differs from that of
# worker 0: 'its … is 5000, and that of worker 0 …'.
_END_OF_DECAY = ('end of the decay, in examples (--decay_epochs says it where workers share no '
                 '--train_dir),')


def joined(cluster: typing.Optional[towers.Cluster], job: typing.Any) -> typing.ContextManager:
    """The context of `towers.join`, in which this process is a member of the cluster.

    Args:
      cluster: the machines, or None.
      job: the `Job` of the process.

    Returns:
      A context whose value is the `Member`; without a cluster its value is None.
    """
    if cluster is None:
        return contextlib.nullcontext()
    settings = {'--' + name: FLAGS[name].value for name in compared_flags()}
    if decays_until_the_end():
        # The end of the decay is counted from the checkpoint in --train_dir, which a worker may not
        # see.
        settings[_END_OF_DECAY] = job.last_example
    return towers.join(cluster, job.built, start_timeout=FLAGS.start_timeout,
                       dead_after=FLAGS.dead_after, settings=settings)
