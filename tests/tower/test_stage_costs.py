"""What an operation costs its stage; and where a line of pieces is cut, by numbers made by hand."""

import pytest
import tensorflow.compat.v1 as tf

from towers.arguments import number_of_slots
from towers.graph.graph_walk import Recording, step_operations
from towers.tower.stage_costs import Piece, StageCost, cut_evenly, kept_bytes


def weights(name, shape):
    return tf.get_variable(name, shape, tf.float32, tf.ones_initializer())


def dense_net(x):
    w = weights('w', [6, 8])
    net = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), weights('b', [8])), name='relu')
    net = tf.reshape(net, [-1, 2, 4])
    net = tf.tanh(tf.reshape(net, [-1, 8]) * 3., name='tanh')
    net = tf.add(net, tf.square(net), name='sum')
    return tf.reduce_mean(tf.matmul(net, weights('v', [8, 1])), name='loss')


def test_what_the_backward_pass_keeps():
    """As TensorFlow's gradient functions take it, without what shares memory with that."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [16, 6], name='x')
        with tf.variable_scope('', use_resource=True), Recording(graph) as made:
            loss = dense_net(x)
        gradients = tf.gradients(loss, tf.trainable_variables())
        own = {op.name for op in made.operations} | {'x'}
        taken = {tensor.op.name for op in step_operations(gradients) if op.name not in own
                 for tensor in op.inputs if tensor.op.name in own
                 and tensor.shape.num_elements() in (16 * 6, 16 * 8)}
        assert taken == {'x', 'relu', 'tanh', 'sum'}
        assert dict(kept_bytes(made.operations)) == {
            'x': 16 * 6 * 4, 'relu': 512, 'tanh': 512, 'sum': 512}


@pytest.mark.parametrize('make, slots', [
    (lambda: tf.train.MomentumOptimizer(.1, .9), 1),
    (lambda: type('Mine', (tf.train.AdamOptimizer,), {})(), 2),
    (lambda: type('Own', (tf.train.Optimizer,), {})(False, 'own'), 1),
    (lambda: type('Around', (tf.train.Optimizer,), {'_opt': tf.train.AdamOptimizer()})(
        False, 'around'), 2)])
def test_slots_of_optimizers(make, slots):
    assert number_of_slots(make()) == slots


# ---- where to cut --------------------------------------------------------------------------------

def piece(kept=0, crossing=1, held=0, gradients=0, transient=0):
    return Piece(held, kept, gradients, transient, crossing)


def test_the_memory_of_a_stage_is_that_of_its_worst_moment():
    pieces = [piece(kept=10, transient=2, held=100, gradients=1), piece(kept=5, transient=8),
              piece(kept=1, transient=1, held=200, gradients=50)]
    # With the backward pass at the first piece: its 10, and all gradients. At the second: 10 + 5,
    # 8, and the last one's gradient. At the last: 16, 1, and that.
    assert StageCost(1, pieces).memory == 300 + max(10 + 2 + 51, 15 + 8 + 50, 16 + 1 + 50)
    assert StageCost(3, pieces).memory == 300 + max(30 + 2 + 51, 45 + 8 + 50, 48 + 1 + 50)


def test_it_is_cut_where_the_least_crosses_but_not_at_any_price():
    crossing = [9] * 100
    crossing[50], crossing[60] = 5, 1
    pieces = [piece(kept=1, crossing=each) for each in crossing]
    assert cut_evenly(pieces, [1, 1]) == [50]  # 51 is within 7 % of 50, 61 is not


def test_it_is_cut_between_layers():
    """Not between a product and its activation function, where as much crosses."""
    product, function = piece(held=1), piece(kept=1)
    assert cut_evenly([product, function] * 20, [1, 1]) == [19]
    assert cut_evenly([function, product] * 20, [1, 1]) in ([18], [20])


def test_a_stage_of_a_pipeline_keeps_as_many_micro_batches_as_stages_follow():
    pieces = [piece(kept=1) for _ in range(12)]
    assert cut_evenly(pieces, [1, 1]) == [5]
    assert cut_evenly(pieces, [2, 1]) == [3]  # 4 kept twice, 8 kept once


def test_the_costliest_of_any_stages_is_near_the_best():
    """Against all ways to cut twelve pieces of many sizes into three."""
    sizes = [7, 1, 30, 2, 2, 14, 9, 1, 1, 25, 3, 11]
    pieces = [piece(held=size) for size in sizes]

    def costliest(cuts):
        bounds = [0] + [cut + 1 for cut in cuts] + [len(sizes)]
        return max(sum(sizes[a:b]) for a, b in zip(bounds, bounds[1:]))
    best = min(costliest([a, b]) for a in range(10) for b in range(a + 1, 11))
    assert costliest(cut_evenly(pieces, [1, 1, 1])) <= 1.07 * best * 1.001
