"""towers.invariance: what is proven to be the same in every tower, and every reason to doubt it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.invariance import varying_operations, written_variables


def outcome(make, use_resource=True):
    """Whether the tensor that `make(x, w)` returns may vary, in a tower with shard x."""
    graph = tf.get_default_graph()
    x = tf.placeholder_with_default(np.float32([1., 2.]), [2], name='x')
    around = tf.placeholder(tf.float32, [], name='around')
    with graph_walk.Recording(graph) as made, tf.name_scope('tower_0'):
        w = tf.get_variable('w', [2], initializer=tf.ones_initializer(), use_resource=use_resource)
        tensor = make(x, w, around)
    return tensor.op.name in varying_operations(made.operations, [x.op])


def assigned_first(x, w, around):
    with tf.control_dependencies([tf.assign(w, w * 2.)]):
        return tf.reduce_sum(w.read_value())


def waits_for_data(x, w, around):
    with tf.control_dependencies([x]):
        return tf.reduce_sum(w)


def placeholder_inside(x, w, around):
    return tf.reduce_sum(w) * tf.placeholder(tf.float32, [])


def default_inside(x, w, around):
    return tf.reduce_sum(w) * tf.placeholder_with_default(1., [])


def in_a_function(x, w, around):
    return tf.function(lambda v: tf.reduce_sum(v))(tf.identity(w))


INVARIANT = {
    'a sum of squares': lambda x, w, around: tf.reduce_sum(tf.square(w)),
    'of the shape of the shard': lambda x, w, around: tf.nn.l2_loss(w) + tf.cast(
        tf.constant(x.shape.as_list()[0]), tf.float32),
    'a factor from around': lambda x, w, around: around * tf.nn.l2_loss(w),
    'a gather': lambda x, w, around: tf.reduce_sum(tf.gather(w, [0])),
    'a decomposition': lambda x, w, around: tf.reduce_sum(
        tf.linalg.svd(tf.reshape(w, [1, 2]), compute_uv=False)),
    'stop_gradient': lambda x, w, around: tf.stop_gradient(tf.reduce_max(w)),
}
VARYING = {
    'data': lambda x, w, around: tf.reduce_sum(w * x),
    'waits for data': waits_for_data,
    'noise': lambda x, w, around: tf.reduce_sum(w + tf.random_uniform([2])),
    'dropout': lambda x, w, around: tf.reduce_sum(tf.nn.dropout(w, rate=0.5)),
    'shuffled': lambda x, w, around: tf.random_shuffle(w)[0],
    'cond on data': lambda x, w, around: tf.cond(x[0] > 0, lambda: 2., lambda: 1.) * w[0],
    'cond on the weights': lambda x, w, around: tf.cond(w[0] > 0, lambda: w[0], lambda: w[1]),
    'loop': lambda x, w, around: tf.while_loop(lambda i: i < 3., lambda i: i + w[0], [0.]),
    'written': assigned_first,
    'placeholder of its own': placeholder_inside,
    'default of its own': default_inside,
    'py_func': lambda x, w, around: tf.reshape(tf.py_func(lambda: np.float32(2.), [], tf.float32),
                                               []) * w[0],
    'function': in_a_function,
    'print': lambda x, w, around: tf.Print(w[0], [w]),
    'iterator': lambda x, w, around: w[0] * tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(2.)).get_next(),
}


@pytest.mark.parametrize('use_resource', [False, True], ids=['reference', 'resource'])
@pytest.mark.parametrize('name', sorted(INVARIANT))
def test_what_is_proven(name, use_resource):
    assert not outcome(INVARIANT[name], use_resource)


@pytest.mark.parametrize('use_resource', [False, True], ids=['reference', 'resource'])
@pytest.mark.parametrize('name', sorted(VARYING))
def test_what_is_left_in_doubt(name, use_resource):
    assert outcome(VARYING[name], use_resource)


@pytest.mark.parametrize('use_resource', [False, True], ids=['reference', 'resource'])
def test_variables_that_are_written(use_resource, graph):
    with tf.variable_scope('', use_resource=use_resource):
        names = ['read', 'assigned', 'added', 'scattered']
        read, assigned, added, scattered = [
            tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in names]
        tf.reduce_sum(read + read.read_value() + tf.gather(read, [0]))
        tf.assign(assigned, [1., 1.])
        tf.assign_add(added, [1., 1.])
        tf.scatter_update(scattered, [0], [1.])
    written = written_variables(graph.get_operations())
    assert sorted(op.name for op in written) == ['added', 'assigned', 'scattered']


@pytest.mark.parametrize('use_resource', [False, True], ids=['reference', 'resource'])
def test_what_was_read_before_the_tower_of_a_variable_that_it_writes(use_resource, graph):
    """A reference variable's own read is one operation, made with the variable."""
    w, other = [tf.get_variable(name, [2], initializer=tf.ones_initializer(),
                                use_resource=use_resource) for name in ('w', 'other')]
    with graph_walk.Recording(graph) as made:
        tf.assign(w, [2., 2.])
        terms = [tf.nn.l2_loss(each) for each in (w, other)]
    varying = varying_operations(made.operations, [])
    assert [term.op.name in varying for term in terms] == [True, False]
