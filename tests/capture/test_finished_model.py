"""Finished models whose examples are along another dimension than the first: `BatchAxis`."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import momentum, relative_difference, switched

WORDS = np.random.RandomState(1).randint(9, size=[2, 5, 7])  # [factors, time, examples]
MASK = (np.arange(5)[:, None] < np.random.RandomState(2).randint(1, 6, size=7)) * 1.
TARGETS = np.random.RandomState(3).randn(7, 3)


@pytest.fixture(autouse=True)
def control_flow_v1():
    with switched('control_flow_v2', False):
        yield


def time_major(words, mask, targets):
    """An RNN over words [factors, time, examples], with a mask [time, examples]."""
    tables = [tf.get_variable('table_%d' % k, [9, 4], tf.float64) for k in range(2)]
    inputs = sum(tf.nn.embedding_lookup(table, words[k]) for k, table in enumerate(tables))
    kernel = tf.get_variable('kernel', [4, 4], tf.float64)

    def step(state, each):
        x, counts = each
        return counts[:, None] * tf.tanh(tf.matmul(state, kernel) + x) + (
            1. - counts[:, None]) * state
    states = tf.scan(step, (inputs, mask), tf.zeros([tf.shape(words)[-1], 4], tf.float64))
    logits = tf.matmul(states[-1], tf.get_variable('out', [4, 3], tf.float64))
    return states, tf.reduce_mean(tf.square(logits - targets))


def placeholders(size=None):
    return (tf.placeholder(tf.int64, [2, None, size], 'words'),
            tf.placeholder(tf.float64, [None, size], 'mask'),
            tf.placeholder(tf.float64, [size, 3], 'targets'))


def in_order(words, mask, targets):
    return towers.BatchAxis(words, 2), towers.BatchAxis(mask, 1), targets


def values_after(session, train_op, fetches, feed, initial=()):
    session.run(tf.global_variables_initializer())
    for variable in tf.global_variables():
        if variable.op.name in initial:
            variable.load(initial[variable.op.name], session)
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    before = session.run(variables)
    values = [session.run([train_op, fetches], feed)[1] for _ in range(2)]
    return values, before, session.run(variables)


@pytest.mark.slow
@pytest.mark.parametrize('num_towers', [pytest.param(2, marks=pytest.mark.slow), 3])
def test_time_major_inputs(num_towers):
    with tf.Graph().as_default():
        inputs = placeholders()
        states, loss = time_major(*inputs)
        built = towers.build_towers(
            towers.ModelOutput(loss, predictions=states), in_order(*inputs), momentum(), num_towers,
            'mean', remainder='weight')
        with tf.Session(config=towers.session_config(built.devices)) as session:
            ours, initial, after = values_after(
                session, built.train_op, [built.loss, built.predictions],
                dict(zip(inputs, (WORDS, MASK, TARGETS))))
    with tf.Graph().as_default(), tf.Session() as session:
        inputs = placeholders()
        states, loss = time_major(*inputs)
        theirs, _, expected = values_after(session, momentum().minimize(loss), [loss, states],
                                           dict(zip(inputs, (WORDS, MASK, TARGETS))), initial)
    assert sorted(after) == sorted(expected)
    for name, value in expected.items():
        assert relative_difference(after[name], value) < 1e-12, name
    for mine, other in zip(ours, theirs):
        assert mine[1].shape == (5, 7, 4)
        for one, two in zip(mine, other):
            assert relative_difference(one, two) < 1e-12


@pytest.mark.slow
def test_a_time_major_model_for_the_size_of_a_part():
    """The model is for 2 examples, the batch has 6."""
    of_model = placeholders(2)
    loss = time_major(*of_model)[1]
    batch = placeholders(6)
    built = towers.build_towers(
        loss, dict(zip(in_order(*of_model), in_order(*batch))), None, 3, 'mean')
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        expected = time_major(*batch)[1]
    arrays = WORDS[..., :6], MASK[:, :6], TARGETS[:6]
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        ours, theirs = session.run([built.loss, expected], dict(zip(batch, arrays)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize('make, error, text', [
    (lambda words, mask: towers.BatchAxis(words, 3), towers.InputError, r'has the shape \(2,'),
    (lambda words, mask: towers.BatchAxis(words, -1), towers.InputError, 'from 0 on'),
    (lambda words, mask: towers.BatchAxis(tf.placeholder(tf.int32), 0), towers.InputError,
     'the shape <unknown>'),
    (lambda words, mask: towers.BatchAxis('words', 1), towers.InvalidArgumentError,
     'a dense tensor of a finished model'),
    (lambda words, mask: towers.build_towers(
        lambda x: x, towers.BatchAxis(mask, 1), None, 2), towers.InputError, 'BatchAxis'),
    (lambda words, mask: towers.build_towers(
        tf.reduce_mean(mask), (towers.BatchAxis(mask, 1), words), None, 2), towers.InputError,
     'size 2')])
def test_refusals(make, error, text):
    with tf.Graph().as_default():
        words, mask, _ = placeholders()
        with pytest.raises(error, match=text) as caught:
            make(words, mask)
    assert '\n' not in str(caught.value)
