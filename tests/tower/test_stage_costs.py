"""What an operation costs its stage, before there is a backward pass."""

import pytest
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import Recording, step_operations
from towers.tower.stage_costs import kept_bytes, number_of_slots, pieces_of, variable_bytes


def weights(name, shape):
    return tf.get_variable(name, shape, tf.float32, tf.ones_initializer())


def dense_net(x):
    w = weights('w', [6, 8])
    net = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), weights('b', [8])), name='relu')
    net = tf.reshape(net, [-1, 2, 4])
    net = tf.tanh(tf.reshape(net, [-1, 8]) * 3., name='tanh')
    net = tf.add(net, tf.square(net), name='sum')
    return tf.reduce_mean(tf.matmul(net, weights('v', [8, 1])), name='loss')


@pytest.mark.parametrize('resource', [False, True], ids=['reference', 'resource'])
def test_what_the_backward_pass_keeps(resource):
    """As TensorFlow's gradient functions take it, without what shares memory with that."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [16, 6], name='x')
        with tf.variable_scope('', use_resource=resource), Recording(graph) as made:
            loss = dense_net(x)
        gradients = tf.gradients(loss, tf.trainable_variables())
        own = {op.name for op in made.operations} | {'x'}
        taken = {tensor.op.name for op in step_operations(gradients) if op.name not in own
                 for tensor in op.inputs if tensor.op.name in own
                 and tensor.shape.num_elements() in (16 * 6, 16 * 8)}
        assert taken == {'x', 'relu', 'tanh', 'sum'}
        assert dict(kept_bytes(made.operations)) == {
            'x': 16 * 6 * 4, 'relu': 512, 'tanh': 512, 'sum': 512}


def test_products_of_constants_keep_nothing():
    with tf.Graph().as_default() as graph, Recording(graph) as made:
        x = tf.placeholder(tf.float32, [16, 6])
        y = tf.matmul(x, tf.ones([6, 6]), name='constant')  # nothing is trained before it
        tf.tanh(tf.matmul(y, weights('w', [6, 6]), name='product') * .5, name='tanh')
    assert dict(kept_bytes(made.operations)) == {'constant': 384, 'tanh': 384}


@pytest.mark.parametrize('make, slots', [
    (lambda: tf.train.GradientDescentOptimizer(.1), 0),
    (lambda: tf.train.MomentumOptimizer(.1, .9), 1), (lambda: tf.train.AdamOptimizer(), 2),
    (lambda: type('Mine', (tf.train.AdamOptimizer,), {})(), 2),
    (lambda: type('Own', (tf.train.Optimizer,), {})(False, 'own'), 1),
    (lambda: type('Around', (tf.train.Optimizer,), {'_opt': tf.train.AdamOptimizer()})(
        False, 'around'), 2)])
def test_slots_of_optimizers(make, slots):
    assert number_of_slots(make()) == slots


def test_bytes_of_a_variable():
    with tf.Graph().as_default():
        reference = tf.get_variable('a', [10], use_resource=False)
        resource = tf.get_variable('b', [10], use_resource=True)
        fixed = tf.get_variable('c', [10], trainable=False)
        assert variable_bytes(reference, 2) == variable_bytes(resource, 2) == (40 * 5, 40)
        assert variable_bytes(reference, None) == variable_bytes(fixed, 2) == (40, 0)


@pytest.mark.parametrize('gradients, held, waiting, transient', [
    ('apply', [0, 100], [0, 0], [96, 400]), ('wait', [0, 100], [0, 400], [96, 160]),
    ('add up', [0, 500], [0, 0], [96, 400])])
def test_pieces(gradients, held, waiting, transient):
    with tf.Graph().as_default() as graph, Recording(graph) as made:
        one = tf.tanh(tf.placeholder(tf.float32, [2, 6], name='x'), name='one')
        tf.concat([one, tf.zeros([2, 4])], 1, name='two')
    mine = [op for op in made.operations if op.type != 'Placeholder']
    pieces, ends = pieces_of(mine, 2, {'one': 7}, {'two': [(100, 400)]}, gradients)
    assert [mine[end].name for end in ends] == ['one', 'two']
    assert [each.held for each in pieces] == held
    assert [each.gradients for each in pieces] == waiting
    assert [each.transient for each in pieces] == transient
    assert [each.kept for each in pieces] == [7, 0]
    assert [each.crossing for each in pieces] == [48, 0]
