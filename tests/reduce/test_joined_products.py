"""Wide dense layers with few examples a tower: one product of all examples, equal to their sum."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from case_marks import first_fast

WIDTH = 1024  # the least width that is joined


def whole_numbers(seed, shape):
    """Small ones, whose sums of products float32 holds exactly."""
    return np.random.RandomState(seed).randint(-4, 5, shape).astype(np.float32)


def combined(gradients, shape=(WIDTH, WIDTH)):
    """The combined gradient, and the types of the operations that were made for it."""
    with tf.device('/cpu:3'):
        variable = tf.get_variable('weights', shape, initializer=tf.zeros_initializer())
    graph = tf.get_default_graph()
    before = len(graph.get_operations())
    ((gradient, owner),) = towers.combine_gradients([[(each, variable)] for each in gradients])
    assert owner is variable
    return gradient, [op.type for op in graph.get_operations()[before:] if op.type != 'Const']


def product(tower, rows, transpose_a=True, transpose_b=False, width=WIDTH, check=None):
    """A tower's gradient, and its numbers."""
    x, y = whole_numbers(tower, [rows, width]), whole_numbers(tower + 50, [rows, width])
    with tf.device('/cpu:%d' % tower), tf.control_dependencies(check or []):
        return tf.identity(tf.matmul(
            tf.constant(x if transpose_a else x.T), tf.constant(y.T if transpose_b else y),
            transpose_a, transpose_b)), x.T.dot(y)


def run(fetches):
    with tf.Session(config=towers.session_config(5)) as session:
        return session.run(fetches)


@pytest.mark.parametrize('transpose_a, transpose_b', [(True, False), (False, True)])
def test_one_product_of_all_rows_is_made_where_the_variable_is(transpose_a, transpose_b):
    of_towers = [product(tower, rows, transpose_a, transpose_b)
                 for tower, rows in enumerate((1, 32, 5))]
    gradient, made = combined([each for each, _ in of_towers])
    assert made == ['ConcatV2', 'ConcatV2', 'MatMul']
    assert gradient.device == '/device:CPU:3'
    assert np.array_equal(run(gradient), sum(numbers for _, numbers in of_towers))


def test_the_product_waits_for_what_a_towers_own_waits_for():
    said_no = tf.Assert(tf.constant(False), ['tower 1 said no'])
    gradient, made = combined([product(0, 2)[0], product(1, 2, check=[said_no])[0]])
    assert made[-1] == 'MatMul'
    with pytest.raises(tf.errors.InvalidArgumentError, match='tower 1 said no'):
        run(gradient)


@pytest.mark.parametrize('rows, others', first_fast(1, [
    ([33, 1], {}), ([32] * 5, {}), ([4, 4], dict(width=WIDTH - 1)),
    ([4, 4], 'read'), ([4, 4], 'a sum')]))
def test_the_others_are_added_up(rows, others):
    width = others['width'] if isinstance(others, dict) and others else WIDTH
    of_towers = [product(tower, count, width=width) for tower, count in enumerate(rows)]
    gradients = [gradient for gradient, _ in of_towers]
    if others == 'read':
        tf.summary.histogram('gradient', gradients[1])
    elif others == 'a sum':
        gradients[1] = gradients[1] + 0.
    gradient, made = combined(gradients, (width, width))
    assert made == ['AddN']
    assert np.array_equal(run(gradient), sum(numbers for _, numbers in of_towers))
