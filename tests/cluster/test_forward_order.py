"""How the operations of a loss are put together, in full depth, told apart among workers."""

import pytest
import tensorflow.compat.v1 as tf

from towers.cluster.forward_digest import difference_of_forward
from test_forward_digest import control_flow, of_worker


def heads(names, weights=None, join=sum):
    """A weighted sum of deep heads of one structure, each with variables of its own."""
    def model_fn(x):
        losses = {}
        for name in 'abc':
            with tf.variable_scope(name):
                h = tf.tanh(tf.matmul(x, tf.get_variable('k', [3, 3])))
                losses[name] = tf.reduce_mean(tf.square(tf.tanh(h * h - 1.)))
        return join([weight * losses[name] for name, weight in zip(
            names, weights or [1.] * len(names))])
    return model_fn


def found(own, other):
    own, other = [of_worker(rank, each)['forward'] for rank, each in enumerate((own, other))]
    return difference_of_forward(own, other)


@pytest.mark.slow
def test_weights_that_are_swapped_between_heads():
    why = found(heads('abc', [.9, .1, .5]), heads('bac', [.9, .1, .5]))
    assert "arranged in another way where it reads 'a/k', 'b/k'. Have" in why


@pytest.mark.parametrize('join', [sum] + [
    pytest.param(join, marks=pytest.mark.slow) for join in (tf.add_n, tf.reduce_mean)])
def test_terms_in_another_order(join):
    assert found(heads('abc', join=join), heads('cab', join=join)) is None
    if join in (sum, tf.add_n):
        assert found(heads('abc', [.9, .1, .5], join), heads('cba', [.5, .1, .9], join)) is None


@pytest.mark.slow
def test_sums_of_sums_in_another_order():
    assert found(heads('abc', join=lambda each: each[0] + (each[1] + each[2])),
                 heads('bca', join=lambda each: (each[0] + each[1]) + each[2])) is None


@pytest.mark.slow
@pytest.mark.parametrize('v2', [True, False])
def test_loops(v2):
    def looped(names):
        def model_fn(x):
            with control_flow(v2):
                y = tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 2.), [0, x])[1]
            return heads(names, [.9, .1, .5])(tf.reshape(y, [-1, 3]))
        return model_fn
    assert found(looped('abc'), looped('abc')) is None
    assert 'arranged in another way' in found(looped('abc'), looped('bac'))
