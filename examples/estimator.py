"""An Estimator on the bundled digits, with the model on several devices.

    $ python -m examples.estimator --devices=2 --steps=300

    -optimizer = tf.train.AdamOptimizer(0.003)
    +optimizer = towers.TowerOptimizer(tf.train.AdamOptimizer(0.003))
    -estimator = tf.estimator.Estimator(model_fn, …)
    +estimator = tf.estimator.Estimator(
    +    towers.replicate_model_fn(model_fn, tf.losses.Reduction.MEAN, devices=2), …)

Needs a TensorFlow that has `tf.estimator`: 1.15 or 2.15.
"""

import argparse
import sys

import tensorflow.compat.v1 as tf

import towers
from datasets.digits import load_digits


def model_fn(features, labels, mode, params):
    """A small network, as a model function of a single device has it but for the TowerOptimizer."""
    pixels = tf.reshape(features, [-1, 64])
    hidden = tf.nn.relu(dense(pixels, 'hidden', 64, params['hidden']))
    logits = dense(hidden, 'logits', params['hidden'], 10)
    digits = tf.argmax(logits, 1, name='digits')
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={'digits': digits})
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=logits))
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={
            'accuracy': tf.metrics.accuracy(labels, digits)})
    optimizer = towers.TowerOptimizer(tf.train.AdamOptimizer(params['learning_rate']))
    train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def dense(inputs, name, size, outputs):
    with tf.variable_scope(name):
        weights = tf.get_variable('weights', [size, outputs])
        return tf.matmul(inputs, weights) + tf.get_variable(
            'biases', [outputs], initializer=tf.zeros_initializer())


def digits(split, batch_size, repeat=False):
    """An input function. The last batch of an evaluation is short, which towers take."""
    def input_fn():
        data = tf.data.Dataset.from_tensor_slices(load_digits(split))
        return (data.shuffle(2000).repeat() if repeat else data).batch(batch_size)
    return input_fn


def main(arguments=None):
    """Trains, evaluates, and returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--batch_size', type=int, default=100)
    parser.add_argument('--model_dir', help='for checkpoints; by default a temporary directory')
    options = parser.parse_args(arguments)
    if not hasattr(tf, 'estimator'):
        sys.exit('This example needs tf.estimator, which TensorFlow has up to 2.15, and this is '
                 '%s: make another environment, such as make train VENV=.venv-2.15 '
                 "PINS='tensorflow==2.15.1' PYTHON=python3.11." % tf.__version__)
    estimator = tf.estimator.Estimator(
        towers.replicate_model_fn(model_fn, tf.losses.Reduction.MEAN, options.devices),
        model_dir=options.model_dir, params={'hidden': 64, 'learning_rate': 0.005},
        config=tf.estimator.RunConfig(session_config=towers.session_config(options.devices)))
    estimator.train(digits('train', options.batch_size, repeat=True), steps=options.steps)
    result = estimator.evaluate(digits('test', options.batch_size))
    print('accuracy %.3f after %d steps' % (result['accuracy'], result['global_step']))
    return result['accuracy']


if __name__ == '__main__':
    main()
