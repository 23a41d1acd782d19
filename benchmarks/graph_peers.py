"""Contenders that are plain graphs: towers, the recipe as published, slim's way, one device."""

import contextlib

import tensorflow.compat.v1 as tf

from benchmarks import workloads
from benchmarks.programs import GraphParts, copies_of
from towers import Pipeline, VariablePlacement, build_towers, session_config

_VARIABLE_OPS = ('Variable', 'VariableV2', 'VarHandleOp')


def input_batches(arrays, batch):
    """(next batch, initializer): the same batch for ever, from a tf.data pipeline."""
    with tf.device('/cpu:0'):
        iterator = tf.data.make_initializable_iterator(
            tf.data.Dataset.from_tensor_slices(arrays).batch(batch, drop_remainder=True)
            .cache().repeat().prefetch(2))
        return iterator.get_next(), iterator.initializer


def plain_config(num_devices, intra_op_threads=0, arithmetic=True):
    """The config that people have: as many CPUs as there are towers, and the rest as it comes."""
    config = tf.ConfigProto(device_count={'CPU': num_devices}, allow_soft_placement=True,
                            intra_op_parallelism_threads=intra_op_threads)
    if not arithmetic:
        config.graph_options.rewrite_options.arithmetic_optimization = 2  # RewriterConfig.OFF
    return config


def build_with_towers(workload, arrays, num_towers, threads=None, variable_device=None,
                      beside=False, num_stages=1, pipeline=None, **options):
    """`build_towers` under `session_config`.

    Args:
      workload: `Workload`.
      arrays: the batch.
      num_towers: N.
      threads: intra-op threads, None for what `session_config` says.
      variable_device: where variables live, see `VariablePlacement`.
      beside: the towers leave the first CPU to the variables.
      num_stages: devices of each tower.
      pipeline: dict of arguments of `Pipeline`; or None.
      **options: passed on to `build_towers`.

    Returns:
      `GraphParts`.
    """
    batch, start = input_batches(arrays, len(arrays[0]))
    names = ['/cpu:%d' % (index + beside) for index in range(num_towers * num_stages)]
    devices = [names[first:first + num_stages] for first in range(0, len(names), num_stages)]
    built = build_towers(workload.model, batch, workloads.optimizer(workload.learning_rate),
                         devices, reduction='mean',
                         variables=VariablePlacement(variable_device),
                         pipeline=Pipeline(**(pipeline or {})), **options)
    return GraphParts(built.loss, built.train_op, _by_name(built.variables), [start],
                      session_config(built.devices, intra_op_threads=threads), built.towers[0])


def build_one_device(workload, arrays, num_towers, threads=None):
    """One device on the whole batch, as a program without towers has it; `num_towers` is 1."""
    del num_towers
    batch, start = input_batches(arrays, len(arrays[0]))
    loss = workload.model(*batch)
    optimizer = workloads.optimizer(workload.learning_rate)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        pairs = optimizer.compute_gradients(loss)
        train_op = optimizer.apply_gradients(pairs)
    return GraphParts(loss, train_op, _by_name(_model_variables()), [start],
                      plain_config(1, threads or 0))


def build_recipe(workload, arrays, num_towers, threads=None):
    """The tower loop as published: gradients filtered by position, stacked, summed.

    Its sum is N times the mean's gradient; the rate is divided by N, for equal steps.
    """
    return _hand_written(workload, arrays, num_towers, threads, _stack_and_sum, summed=True)


def build_slim(workload, arrays, num_towers, threads=None):
    """As slim's model_deploy: each clone's loss times 1/N, gradients added with `add_n`."""
    return _hand_written(workload, arrays, num_towers, threads, _add_n)


def build_add_n(workload, arrays, num_towers, threads=None, arithmetic=True):
    """slim's way with grappler's arithmetic optimizer on or off, to compare with a chain."""
    return _hand_written(workload, arrays, num_towers, threads, _add_n, arithmetic=arithmetic)


def build_chain(workload, arrays, num_towers, threads=None, arithmetic=True):
    """Gradients added two at a time, each sum into the buffer of the one before."""
    return _hand_written(workload, arrays, num_towers, threads, _chain, arithmetic=arithmetic)


def _hand_written(workload, arrays, num_towers, threads, combine, summed=False, arithmetic=True):
    batch, start = input_batches(arrays, len(arrays[0]))
    with tf.device('/cpu:0'):
        shards = list(zip(*[tf.split(tensor, num_towers) for tensor in batch]))
    rate = workload.learning_rate / num_towers if summed else workload.learning_rate
    optimizer = workloads.optimizer(rate)
    losses, tower_grads, updates = [], [], []
    for index, shard in enumerate(shards):
        with tf.name_scope('tower_%d' % index), _tower_device(index), \
                tf.variable_scope(tf.get_variable_scope(), reuse=index > 0):
            loss = workload.model(*shard)
            losses.append(loss)
            if not updates:  # batch norm's, of the first tower
                updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
            tower_grads.append(optimizer.compute_gradients(
                loss if summed else loss * (1. / num_towers)))
    with tf.device('/cpu:0'):
        mean_loss = tf.add_n(losses) * (1. / num_towers)
        combined = combine(tower_grads)
        with tf.control_dependencies(updates):
            train_op = optimizer.apply_gradients(combined)
    return GraphParts(mean_loss, train_op, _by_name(_model_variables()), [start],
                      plain_config(num_towers, threads or 0, arithmetic))


@contextlib.contextmanager
def _tower_device(index):
    """Variables on the first CPU, the rest on the tower's: the published device setter, mended to
    know resource variables."""
    def choose(operation):
        return '/cpu:0' if operation.type in _VARIABLE_OPS else '/cpu:%d' % index
    with tf.device(choose):
        yield


def _stack_and_sum(tower_grads):
    combined = []
    for pairs in zip(*tower_grads):
        grads = tf.stack([gradient for gradient, _ in pairs if gradient is not None])
        combined.append((tf.reduce_sum(grads, 0), pairs[0][1]))
    return combined


def _add_n(tower_grads):
    return [(tf.add_n([gradient for gradient, _ in pairs]), pairs[0][1])
            for pairs in zip(*tower_grads)]


def _chain(tower_grads):
    combined = []
    for pairs in zip(*tower_grads):
        total = tf.convert_to_tensor(pairs[0][0])
        for gradient, _ in pairs[1:]:
            total = total + tf.convert_to_tensor(gradient)
        combined.append((total, pairs[0][1]))
    return combined


def _model_variables():
    """Every variable that a model made: what is no slot of the optimizer and no counter."""
    return [variable for variable in tf.global_variables()
            if not variable.op.name.endswith('/Momentum')]


def _by_name(variables):
    return {variable.op.name: copies_of(variable) for variable in variables}


BUILDERS = {'towers': build_with_towers, 'one_device': build_one_device, 'recipe': build_recipe,
            'slim': build_slim, 'add_n': build_add_n, 'chain': build_chain}
