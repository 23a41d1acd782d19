"""Clones of the first tower: the graph that another call of the model function gives, up to names
of functions and seeds; and where that cannot be, calls.
"""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import (SAMPLES, assert_equal_runs, keras, linear, mean_squared_error, momentum,
                           run, sgd, switched)
from sample_models import kind_of_variables  # noqa: F401, a fixture
from towers import graph_walk


# ---- models --------------------------------------------------------------------------------------

def images(count):
    """(x [count, 8, 8, 2], y [count, 3])"""
    random = np.random.RandomState(count)
    return random.randn(count, 8, 8, 2).astype('float32'), random.randn(count, 3).astype('float32')


def slim_net(x, y):
    """Convolutions with batch norm, L2 losses in the total loss, and dropout."""
    with slim.arg_scope([slim.conv2d], normalizer_fn=slim.batch_norm,
                        weights_regularizer=slim.l2_regularizer(0.01)):
        net = slim.conv2d(x, 4, 3, scope='conv1')
        net = slim.conv2d(net, 4, 3, stride=2, scope='conv2')
    net = slim.dropout(slim.flatten(net), 0.5, is_training=True)
    tf.losses.mean_squared_error(y, slim.fully_connected(net, 3, activation_fn=None))
    return tf.losses.get_total_loss()


def outputs_of_every_kind(x, y):
    """A nest of predictions, sparse ones too; metrics of either kind; updates in no collection."""
    out = tf.matmul(x, tf.get_variable('kernel', [6, 3], x.dtype))
    count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
    return towers.ModelOutput(
        mean_squared_error(out, y),
        predictions={'out': out, 'parts': [out[:, 0], (out[:, 1], None)], 'x': x,
                     'sparse': tf.sparse.from_dense(tf.nn.relu(out)), 'scalar': tf.reduce_max(out)},
        metrics={'error': tf.metrics.mean_squared_error(y, out), 'mean': tf.reduce_mean(out)},
        updates=[tf.assign_add(count, 1.), tf.assign_add(count, 2.).op])


def branches(x, y):
    w = tf.get_variable('w', [6, 3], x.dtype)
    positive = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, w), lambda: -tf.matmul(x, w) + 1)
    return mean_squared_error(positive, y)


def parts_on_a_device_of_their_own(x, y):
    with tf.device('/cpu:0'):
        body = tf.matmul(x, tf.get_variable('body', [6, 3], x.dtype), name='pinned')
    with tf.device('/cpu:3'):
        body = tf.tanh(body, name='elsewhere')
    with tf.device(None):
        body = tf.identity(body, name='anywhere')
    with tf.get_default_graph().colocate_with(body.op):
        body = tf.identity(body, name='beside')
    return mean_squared_error(body, y)


def sparse_inputs(x, y):
    w = tf.get_variable('w', [5, 3], tf.float64)
    return mean_squared_error(tf.sparse.sparse_dense_matmul(x['sparse'], w), y) + (
        0. if x['none'] is None else 1.)


def sparse_batch(count):
    x = tf.SparseTensor([[i, i % 5] for i in range(count)], np.arange(count) + 1., [count, 5])
    return {'sparse': x, 'none': None}, np.ones([count, 3])


def waits(x, y):
    """Waits for what is outside: its shard's operation, and one without any output."""
    with tf.control_dependencies([tf.get_default_graph().get_operation_by_name('around'), x.op]):
        return linear(x, y) + 0.


def vectors_and_an_operation(count):
    tf.no_op(name='around')
    return samples.vectors(count)


def two_loops(x, y):
    """A loop with TensorArrays, and one in a branch."""
    w = tf.get_variable('w', [3, 3], tf.float64)
    rows = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)), y)
    count = tf.cond(tf.reduce_mean(x) > 100., lambda: 3., lambda: tf.while_loop(
        lambda i: i < 2., lambda i: i + 1., [tf.constant(0.)]))
    return mean_squared_error(rows * tf.cast(count, tf.float64), y)


MODELS = [(name, sample.model_fn, sample.data, {}) for name, sample in SAMPLES.items()] + [
    ('slim net', slim_net, images, {}),
    ('slim net, float32', slim_net, images, dict(check_numerics=True, update_ops='none')),
    ('outputs', outputs_of_every_kind, lambda count: samples.vectors(count, 'float32'), {}),
    ('branches', branches, samples.vectors, {}),
    ('devices', parts_on_a_device_of_their_own, samples.vectors, {}),
    ('device elsewhere', linear, samples.vectors, dict(variable_device='/cpu:2')),
    ('balanced', samples.two_layers, samples.vectors, dict(variable_device='balanced')),
    ('sparse inputs', sparse_inputs, sparse_batch, {}),
    ('control inputs', waits, vectors_and_an_operation, {}),
    ('loops', two_loops, samples.vectors, {}),
    ('some variables', samples.two_layers, samples.vectors,
     dict(var_list=lambda every: every[1:])),
    ('mean', linear, samples.vectors, dict(reduction='mean', check_numerics=True))]
every_model = pytest.mark.parametrize('model_fn, data, options', [each[1:] for each in MODELS],
                                      ids=[each[0] for each in MODELS])


def build(copies, model_fn, data, num_towers=3, optimizer=momentum, **options):
    """A build in a graph of its own, with its initial weights by seed."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        inputs = data(4 * num_towers) if callable(data) else data
        options.setdefault('devices', num_towers)
        return towers.build_towers(model_fn, inputs, optimizer and optimizer(), copies=copies,
                                   **options)


def graph_of(built):
    leaves = tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
    return next(leaf.graph for leaf in leaves if leaf is not None)


def fetches_of(tower):
    """All that a tower gives, as a flat list of tensors and operations."""
    nest = [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
            [gradient for gradient, _ in tower.gradients]]
    leaves = []
    for leaf in tf.nest.flatten(nest):
        if isinstance(leaf, (tf.SparseTensor, tf.IndexedSlices)):
            leaves += tf.nest.flatten(leaf, expand_composites=True)
        elif leaf is not None:  # what assigning to a variable gives counts as the assignment
            leaves.append(leaf if isinstance(leaf, tf.Tensor) else getattr(leaf, 'op', leaf))
    return leaves


def described(op):
    """What an operation is, but for seeds and the names of functions, which count calls."""
    attributes = {key: value.SerializeToString() for key, value in op.node_def.attr.items()
                  if key not in ('seed', 'seed2', '_class')
                  and value.WhichOneof('value') != 'func' and 'func' not in str(value)[:20]}
    return (op.type, op.device, [tensor.name for tensor in op.inputs],
            sorted(each.name for each in op.control_inputs), attributes,
            sorted(op.colocation_groups()),
            [output.dtype for output in op.outputs])


# ---- equal to calls ------------------------------------------------------------------------------

@every_model
def test_the_graph_is_that_of_calls(kind_of_variables, model_fn, data, options):
    cloned, called = [build(copies, model_fn, data, **options) for copies in ('auto', 'reuse')]
    assert called.plan.how_built == '3 calls of the model function'
    if not cloned.plan.how_built.startswith('1 call'):
        assert tf.control_flow_v2_enabled() and 'function' in cloned.plan.how_built
        return
    for one, other in zip(cloned.towers, called.towers):
        assert one[:3] == other[:3] and repr(one.size) == repr(other.size)
        for field in ('loss', 'predictions', 'metrics', 'gradients', 'updates', 'data_loss'):
            ours, theirs = getattr(one, field), getattr(other, field)
            if field == 'gradients':
                assert [v.op.name for _, v in ours] == [v.op.name for _, v in theirs]
                ours, theirs = [g for g, _ in ours], [g for g, _ in theirs]
            if field != 'updates':
                tf.nest.assert_same_structure(ours, theirs)
        names = [leaf.name for leaf in fetches_of(one)]
        assert names == [leaf.name for leaf in fetches_of(other)]
        assert [getattr(leaf, 'shape', None) for leaf in fetches_of(one)] == [
            getattr(leaf, 'shape', None) for leaf in fetches_of(other)]
        ours, theirs = [
            {op.name: described(op) for op in graph_walk.step_operations(fetches_of(tower))
             if op.name.startswith(tower.name_scope)} for tower in (one, other)]
        assert len(ours) > 5
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            assert ours[name] == theirs[name], name
        assert samples.names(one.variables) == samples.names(other.variables)
    assert samples.names(cloned.variables) == samples.names(called.variables)


@every_model
def test_the_numbers_are_those_of_calls(kind_of_variables, model_fn, data, options):
    runs = []
    for copies in ('auto', 'reuse'):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            step = tf.train.get_or_create_global_step()
            built = towers.build_towers(model_fn, data(12), momentum(), 3, copies=copies,
                                        stateless_random=True, global_step=step, **options)
            session = tf.Session(config=towers.session_config(4))
            initial = {} if not runs else runs[0].initial
            runs.append(samples._train(session, built.loss, built.gradients, built.train_op, 3,
                                       {}, built) if not runs else
                        _train_from(session, built, initial))
    # Momentum's sums are over the same terms in the same order.
    assert_equal_runs(runs[0], runs[1], 1e-6 if 'net' in model_fn.__name__ else 1e-12)
    one, other = [towers.audit(each.built) for each in runs]
    assert one == other


def _train_from(session, built, initial):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for variable in tf.global_variables():
        variable.load(initial[variable.op.name], session)
    dense = {v.op.name: tf.convert_to_tensor(gradient) for gradient, v in built.gradients}
    gradients = session.run(dense)
    losses = [session.run([built.loss, built.train_op])[0] for _ in range(3)]
    after = session.run({v.op.name: v for v in tf.global_variables()})
    return samples.Run(initial, losses, gradients, after, built)
