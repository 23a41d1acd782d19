"""Values of the whole batch, and batch norm in sync, over the workers of a cluster, against plain
TF1 on one device with the examples of all."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from towers import compat
from one_process import addresses, together, train
from sample_models import momentum, plain_step, switched

slow = pytest.mark.slow
random = np.random.RandomState(0)
X, Y = random.randn(9, 5), random.randn(9, 3)
IMAGES = random.randn(9, 4, 4, 3) * 2 + 3
STEPS = 3


def variable(name, shape, seed):
    return tf.get_variable(name, shape, tf.float64, tf.glorot_uniform_initializer(seed))


def moving(name, size, value, dtype=tf.float64):
    average = tf.get_variable(name, [size], dtype, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, .5 * average + .5 * value))


def masked_loss(x, y):
    """A mean over the batch, and a loss over the batch's unmasked examples."""
    h = tf.matmul(x, variable('w', [5, 3], 1))
    mean = towers.batch_mean(tf.reduce_mean(h, 0))
    moving('average', 3, mean)
    mask = tf.cast(x[:, 0] > 0, tf.float64)
    total = tf.reduce_sum(tf.reduce_sum((h - mean - y) ** 2, 1) * mask)
    return towers.batch_sum(total) / towers.batch_sum(tf.reduce_sum(mask))


def contrastive_loss(x, y):
    """Each example against all of the batch; large integers say which is its own."""
    a, b = tf.matmul(x, variable('w', [5, 4], 1)), tf.matmul(y, variable('u', [3, 4], 2))
    own = tf.cast(x[:, 0] * 1e6, tf.int64) + 2 ** 60
    is_own = tf.cast(tf.equal(own[:, None], towers.batch_concat(own)[None]), tf.float64)
    keys = towers.batch_concat(b)
    order = tf.cast(tf.range(tf.shape(keys)[0]), tf.float64)  # the rows are in the batch's order
    moving('ordered', 4, tf.reduce_sum(keys * order[:, tf.newaxis], 0))
    logits = tf.matmul(a, keys, transpose_b=True)
    return tf.reduce_mean(-tf.reduce_sum(tf.nn.log_softmax(logits) * is_own, 1))


def normalized_twice(x, y):
    """Two batch norms of single operations, in float64."""
    h = x
    for name in 'ab':
        h = tf.nn.conv2d(h, variable('k' + name, [3, 3, 3, 3], 1), 1, 'SAME')
        mean, variance = tf.nn.moments(h, [0, 1, 2])
        moving('mean' + name, 3, mean)
        moving('variance' + name, 3, variance)
        h = tf.nn.relu(tf.nn.batch_normalization(
            h, mean, variance, None, variable('scale' + name, [3], 5), .1))
    return tf.reduce_mean((tf.reduce_mean(h, [1, 2]) - y) ** 2)


def fused(x, y):
    """A layer of slim, by TensorFlow's kernel, with a mean far from zero."""
    h = slim.conv2d(x, 6, 3, activation_fn=None, biases_initializer=tf.constant_initializer(9.),
                    scope='conv', weights_initializer=tf.glorot_uniform_initializer(1))
    h = slim.batch_norm(h, fused=True, scale=True, decay=.5, scope='norm', is_training=True)
    out = slim.fully_connected(tf.reduce_mean(tf.nn.relu(h), [1, 2]), 3, activation_fn=None,
                               weights_initializer=tf.glorot_uniform_initializer(2), scope='out')
    return tf.reduce_mean((out - y) ** 2)


DATA = {masked_loss: (X, Y), contrastive_loss: (X, Y), normalized_twice: (IMAGES, Y),
        fused: (IMAGES.astype(np.float32), Y.astype(np.float32))}


def on_one_device(model_fn, start, data, steps=STEPS):
    """The variables after some steps of plain TF1 on all examples, from their values at the
    start."""
    with tf.Graph().as_default(), tf.variable_scope('', use_resource=True), tf.Session() as session:
        _, step = plain_step(model_fn, data, momentum)
        for each in tf.global_variables():
            each.load(start[each.op.name], session)
        for _ in range(steps):
            session.run(step)
        return session.run({each.op.name: each for each in tf.global_variables()})


def of_workers(model_fn, sizes, **options):
    """The runs of the workers of a ring, which have as many examples: see `train`."""
    workers = addresses(len(sizes))
    ends = np.cumsum([0] + list(sizes))

    def work(rank):
        batch = [part[ends[rank]:ends[rank + 1]] for part in DATA[model_fn]]
        cluster = towers.Cluster('ring', workers, rank=rank, uneven=len(set(sizes)) > 1)
        return train(cluster, model_fn, batch, momentum, STEPS, **options)
    return together(work, len(sizes))


@pytest.fixture(autouse=True)
def mended_slim():
    towers.mend_slim()
    with switched('control_flow_v2', False):
        yield


@pytest.mark.parametrize('model_fn, sizes, options', [
    pytest.param(*case, marks=slow) for case in [
        (masked_loss, (5, 4), dict(num_towers=2)),
        (contrastive_loss, (4, 2, 3), dict(num_towers=2)),
        (contrastive_loss, (3, 3, 3), {}),
        (normalized_twice, (5, 4), dict(num_towers=2, batch_norm='sync')),
        (normalized_twice, (3, 3, 3), dict(batch_norm='sync', copies='reuse')),
        (fused, (5, 4), dict(num_towers=2, batch_norm='sync')),
        (fused, (3, 3, 3), dict(batch_norm='sync'))]])
def test_workers_with_towers_are_one_device(model_fn, sizes, options):
    runs = of_workers(model_fn, sizes, **options)
    theirs = on_one_device(model_fn, runs[0]['first'], DATA[model_fn])
    tolerance = 2e-5 if model_fn is fused else 1e-12
    for run in runs:
        for name, value in theirs.items():
            np.testing.assert_allclose(run['last'][name], value, tolerance, tolerance,
                                       err_msg=name)


def until_all_end(cluster, model_fn, sizes, **options):
    """A worker's run until the data of all end, in a graph and a session of its own.

    Args:
      cluster: its `Cluster`.
      model_fn: one of `DATA`.
      sizes: of each worker, the numbers of examples in its batches; worker 0 has the first ones.
      options: of the build.

    Returns:
      Two dicts of the variables: before the first step and after the last one.
    """
    parts = DATA[model_fn]

    def batches():
        begin = sum(map(sum, sizes[:cluster.rank]))
        for size in sizes[cluster.rank]:
            yield tuple(part[begin:begin + size] for part in parts)
            begin += size

    with tf.Graph().as_default():
        tf.set_random_seed(7 + cluster.rank)
        feed = towers.until_all_end(tf.data.Dataset.from_generator(
            batches, tuple(tf.as_dtype(part.dtype) for part in parts),
            tuple(tf.TensorShape([None]).concatenate(part.shape[1:]) for part in parts)))
        cluster = cluster._replace(active=feed.active)
        with compat.CONTROL_FLOW_SWITCH:
            built = towers.build_towers(model_fn, feed.inputs, momentum(), 2, 'mean',
                                        remainder='weight', cluster=cluster, **options)
        fetched = {each.op.name: each for each in tf.global_variables()}

        def values(session):
            return session.run_step_fn(
                lambda step_context: step_context.session.run(fetched))
        with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member, \
                member.session() as session:
            first = last = values(session)
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    session.run(built.train_op)
                    last = values(session)
        return first, last


@slow
@pytest.mark.parametrize('model_fn', [contrastive_loss, masked_loss, normalized_twice, fused])
def test_a_worker_without_data_has_no_part_in_the_batch(model_fn):
    """Worker 1 has two batches more than worker 0; averages of a worker without data stay."""
    options = {} if model_fn in (contrastive_loss, masked_loss) else dict(batch_norm='sync')
    workers = addresses(2)
    [(values, last_of_0), (_, last)] = together(lambda rank: until_all_end(
        towers.Cluster('ring', workers, rank=rank), model_fn, [[4], [2, 3]], **options), 2)
    for rows in ([0, 1, 2, 3, 4, 5], [6, 7, 8]):
        values = on_one_device(model_fn, values, [part[rows] for part in DATA[model_fn]], 1)
    tolerance = 2e-5 if model_fn is fused else 1e-12
    for name, value in values.items():
        np.testing.assert_allclose(last[name], value, tolerance, tolerance, err_msg=name)
    of_worker_1 = {name: value for name, value in last.items() if 'Momentum' in name or name in 'wu'}
    for name, value in of_worker_1.items():
        assert value.tobytes() == last_of_0[name].tobytes(), name


@slow
def test_a_type_that_workers_do_not_add_up_is_refused():
    cluster = towers.Cluster('ring', ['a:1', 'b:2'])
    with pytest.raises(towers.ClusterError, match='whole batch is uint64, which workers cannot'):
        towers.build_towers(
            lambda x: tf.get_variable('w', []) * tf.cast(
                towers.batch_sum(tf.cast(tf.reduce_sum(x), tf.uint64)), tf.float32),
            tf.ones([4]), momentum(), 1, 'mean', cluster=cluster)


@slow
def test_check_towers_tries_them_over_workers():
    def model_fn(x, y):
        mean = towers.batch_mean(tf.reduce_mean(y, 0))
        return normalized_twice(x, y - mean)
    report = towers.check_towers(
        model_fn, (IMAGES, Y), momentum, 2, 3, shares=(2, 1), cluster='ring', batch_norm='sync')
    assert report.equal, report


@pytest.mark.slow
def test_the_proof_is_about_the_towers_of_all_workers():
    """With one tower a worker, too."""
    built = towers.build_towers(
        normalized_twice, [tf.placeholder(part.dtype, (None,) + part.shape[1:])
                           for part in DATA[normalized_twice]],
        momentum(), 1, 'mean', cluster=towers.Cluster('ring', ['a:1', 'b:2']), batch_norm='sync',
        remainder='weight')
    assert re.match('proven: the loss is a mean over the examples .* is that of all machines',
                    built.plan.line('one device'))
    assert built.plan.line('batch norm').startswith('2 in sync over the whole batch')


@pytest.mark.slow
def test_a_batch_norm_by_the_kernel_is_one_message_each_way():
    cluster = towers.Cluster('ring', ['a:1', 'b:2'])
    towers.build_towers(fused, list(map(tf.constant, DATA[fused])), momentum(), 3, 'mean',
                        cluster=cluster, batch_norm='sync')
    messages = [op.type for op in tf.get_default_graph().get_operations()
                if op.type.startswith('Collective')]
    assert messages == ['CollectiveReduce'] * 3  # and one for the gradients
