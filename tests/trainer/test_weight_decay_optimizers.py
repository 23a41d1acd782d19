"""AdamW, LARS, LAMB: numbers by the papers' formulas, and the same on towers as on one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from case_marks import first_fast
import towers
from trainer.weight_decay_optimizers import AdamWOptimizer, LAMBOptimizer, LARSOptimizer
from train_runs import values_of

MATRIX = np.array([[3., 0.], [0., 4.]])  # of norm 5
BIAS = np.array([1., -1.])
ROWS = np.array([[0., 0.], [6., 8.]])  # a gradient of norm 10


def steps_of(optimizer, count=1, sparse=False, resource=True, start=MATRIX):
    """Matrix and bias after steps with the gradient `ROWS` of the one, [0.5, 2] of the other."""
    with tf.Graph().as_default(), tf.Session() as session:
        matrix = tf.get_variable('w', initializer=start, use_resource=resource)
        bias = tf.get_variable('b', initializer=BIAS, use_resource=resource)
        gradient = tf.constant(ROWS)
        if sparse:  # the second row in two parts
            gradient = tf.IndexedSlices(tf.constant([[2., 8.], [4., 0.]], tf.float64),
                                        tf.constant([1, 1]), tf.constant([2, 2]))
        step = optimizer().apply_gradients(
            [(gradient, matrix), (tf.constant([0.5, 2.], tf.float64), bias)])
        session.run(tf.global_variables_initializer())
        for _ in range(count):
            session.run(step)
        return session.run([matrix, bias])


@pytest.mark.parametrize('resource, sparse', first_fast(1, [
    (False, False), (False, True), (True, False), (True, True)]))
def test_two_steps_of_lars(sparse, resource):
    def optimizer():
        return LARSOptimizer(0.5, momentum=0.9, weight_decay=0.2, trust_coefficient=0.01)
    matrix, bias = steps_of(optimizer, 1, sparse, resource)
    # local = 0.01 * 5 / (10 + 0.2 * 5)
    first = 0.5 * 0.05 / 11 * (ROWS + 0.2 * MATRIX)
    np.testing.assert_allclose(matrix, MATRIX - first, rtol=1e-12)
    np.testing.assert_allclose(bias, [1 - 0.5 * 0.5, -1 - 0.5 * 2], rtol=1e-12)
    norm = np.linalg.norm(matrix)
    second = 0.9 * first + 0.5 * 0.01 * norm / (10 + 0.2 * norm) * (ROWS + 0.2 * matrix)
    matrix, bias = steps_of(optimizer, 2, sparse, resource)
    np.testing.assert_allclose(matrix, MATRIX - first - second, rtol=1e-12)
    np.testing.assert_allclose(bias, [1 - 0.25 * 2.9, -1 - 1 * 2.9], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('resource', [False, True])
def test_two_steps_of_lamb(sparse, resource):
    def optimizer():
        return LAMBOptimizer(0.5, weight_decay=0.2)
    # In the first step m / (1 - beta1) is the gradient and the root its size: r is its sign.
    matrix, bias = steps_of(optimizer, 1, sparse, resource)
    decayed = np.sign(ROWS) + 0.2 * MATRIX  # [[0.6, 0], [1, 1.8]]
    first = 0.5 * 5 / np.sqrt(0.6 ** 2 + 1 + 1.8 ** 2) * decayed
    np.testing.assert_allclose(matrix, MATRIX - first, rtol=1e-5)
    np.testing.assert_allclose(bias, [0.5, -1.5], rtol=1e-5)
    # So it is in the second, with the same gradient: bias is corrected by the number of steps.
    decayed = np.sign(ROWS) + 0.2 * matrix
    second = 0.5 * np.linalg.norm(matrix) / np.linalg.norm(decayed) * decayed
    matrix, bias = steps_of(optimizer, 2, sparse, resource)
    np.testing.assert_allclose(matrix, MATRIX - first - second, rtol=5e-5)
    np.testing.assert_allclose(bias, [0., -2.], atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize('sparse', [False, True])
@pytest.mark.parametrize('resource', [False, True])
def test_two_steps_of_adamw(sparse, resource):
    def optimizer():
        return AdamWOptimizer(0.5, weight_decay=0.2)
    # As of LAMB, Adam's own step is the rate times the gradient's sign, here twice.
    decayed = MATRIX * (1 - 0.5 * 0.2)
    first = decayed - 0.5 * np.sign(ROWS)
    matrix, bias = steps_of(optimizer, 1, sparse, resource)
    np.testing.assert_allclose(matrix, first, rtol=1e-6)
    np.testing.assert_allclose(bias, [0.5, -1.5], rtol=1e-6)
    matrix, bias = steps_of(optimizer, 2, sparse, resource)
    np.testing.assert_allclose(matrix, first * 0.9 - 0.5 * np.sign(ROWS), rtol=1e-5)
    np.testing.assert_allclose(bias, [0., -2.], atol=1e-5)


@pytest.mark.slow
def test_adamw_without_decay_is_adam():
    ours = steps_of(lambda: AdamWOptimizer(0.1, weight_decay=0.), 3)
    theirs = steps_of(lambda: tf.train.AdamOptimizer(0.1), 3)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.parametrize('optimizer, step', first_fast(1, [
    (lambda: LARSOptimizer(0.5), 0.5 * ROWS), (lambda: LAMBOptimizer(0.5), 0.5 * np.sign(ROWS))]))
def test_weights_of_zero_take_the_rate_as_it_is(optimizer, step):
    matrix, _ = steps_of(optimizer, start=np.zeros([2, 2]))
    np.testing.assert_allclose(matrix, -step, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', [lambda: LARSOptimizer(0.5, trust_coefficient=0.1),
                                       lambda: LAMBOptimizer(0.05),
                                       lambda: AdamWOptimizer(0.05, 0.1)],
                         ids=['lars', 'lamb', 'adamw'])
@pytest.mark.parametrize('place', [None, 'replicated'])
def test_towers_train_as_one_device(optimizer, place):
    numbers = np.random.RandomState(0)
    words, labels = numbers.randint(0, 5, [8, 3]), numbers.randint(0, 4, 8)

    def model_fn(words, labels):
        table = tf.get_variable('table', [5, 6], tf.float64)
        rows = tf.reduce_mean(tf.nn.embedding_lookup(table, words), 1)
        hidden = tf.matmul(rows, tf.get_variable('w', [6, 4], tf.float64))
        bias = tf.get_variable('b', [4], tf.float64, tf.zeros_initializer())
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=hidden + bias))
    report = towers.check_towers(model_fn, (words, labels), optimizer, 2, tolerance=1e-12,
                                 variables=towers.VariablePlacement(place))
    assert report.equal, report


@pytest.mark.slow
def test_a_run_with_one(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--optimizer=lamb', '--train_steps=3',
                                        '--weight_decay=0.001', '--base_learning_rate=0.01',
                                        '--plan'])
    assert 'optimizer        LAMBOptimizer\n' in run.stdout
    assert '4 registered losses' not in run.stdout  # no L2 loss beside the decay
    assert {'beta1_power', 'Digits/conv1/weights/LAMB', 'Digits/conv1/weights/LAMB_1'} <= set(
        values_of(tmp_path / 'run', 3))
