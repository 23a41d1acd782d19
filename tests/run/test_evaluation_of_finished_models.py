"""`Evaluation` of a finished model."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd

X, Y = samples.vectors(11)


def program(turned=False):
    """`(ModelOutput, inputs, rate)` of a class-like program, with x [examples, 6] or turned."""
    x = tf.placeholder(tf.float64, [6, None] if turned else [None, 6], 'x')
    y, keep = tf.placeholder(tf.float64, [None, 3], 'y'), tf.placeholder(tf.float64, [], 'keep')
    logits = keep * tf.matmul(tf.transpose(x) if turned else x,
                              tf.get_variable('kernel', [6, 3], tf.float64))
    loss = tf.reduce_mean(tf.square(logits - y))
    right = tf.cast(logits[:, 0] > y[:, 0], tf.float64)
    metrics = {'accuracy': tf.reduce_mean(right), 'counted': tf.metrics.mean(right)}
    inputs = (towers.BatchAxis(x, 1) if turned else x), y
    return towers.ModelOutput(loss, logits, metrics), inputs, (x, y, keep)


@pytest.mark.slow
@pytest.mark.parametrize('turned', [True, False])
def test_beside_training(turned):
    model, inputs, (x, y, keep) = program(turned)
    built = towers.build_towers(model.loss, inputs, sgd(), 2, 'mean', remainder='weight')
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    if turned:
        dataset = dataset.map(lambda x, y: (tf.transpose(x), y))
    evaluation = towers.Evaluation(model, dataset, trained=built, inputs=inputs, feed={keep: .5})
    with tf.Session(config=towers.session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.train_op, {x: X.T if turned else X, y: Y, keep: 1.})
        kernel = session.run(tf.trainable_variables()[0])
        logits = .5 * X @ kernel
        results = evaluation.run(session)
        assert results['examples'] == 11
        np.testing.assert_allclose(results['loss'], np.mean((logits - Y) ** 2), rtol=1e-12)
        accuracy = np.mean(logits[:, 0] > Y[:, 0])
        np.testing.assert_allclose([results['accuracy'], results['counted']], accuracy, rtol=1e-6)
        rows = np.concatenate(list(evaluation.predict(session)))
        np.testing.assert_allclose(rows, logits, rtol=1e-12)


@pytest.mark.parametrize('inputs, text', [
    (lambda x, y: None, 'a nest like'), (lambda x, y: x, 'a nest like'),
    (lambda x, y: {'x': x, 'y': y}, 'a nest like')])
def test_inputs_are_like_an_element(inputs, text):
    model, _, (x, y, _) = program()
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(towers.InvalidArgumentError, match=text):
        towers.Evaluation(model, dataset, 2, inputs=inputs(x, y))


def test_inputs_are_for_finished_models():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(towers.InvalidArgumentError, match='inputs= is for'):
        towers.Evaluation(samples.linear, dataset, 2, inputs=(1, 2))
