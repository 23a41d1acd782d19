"""Data and a network of one's own, trained by `train.py`: two spirals of points in the plane.

    $ python train.py --model=examples.own_data:classify --dataset=examples.own_data:spirals \
          --train_steps=400 --base_learning_rate=0.01

A loop of one's own over the data goes; `spirals` says where the batches come from, and `classify`
what the loss is:

    -for batch in batches():
    -    session.run(train_op, {points: batch[0], arms: batch[1]})
"""

import numpy as np
import tensorflow.compat.v1 as tf

import towers

TRAIN, TEST = 1600, 400


def points_and_arms():
    """Draws points on two spirals: float32 [n, 2], and the number of the arm of each, int64 [n]."""
    numbers = np.random.RandomState(0)
    arms = numbers.randint(2, size=TRAIN + TEST)
    turns = numbers.uniform(0.2, 1.5, size=TRAIN + TEST)
    angles = 2 * np.pi * turns + np.pi * arms
    points = np.stack([turns * np.cos(angles), turns * np.sin(angles)], 1)
    points += numbers.normal(scale=0.03, size=points.shape)
    return points.astype(np.float32), arms.astype(np.int64)


def spirals(data_dir):
    """The data set, as train.py asks for it (docs/own_model.md); there is no file to read."""
    del data_dir
    points, arms = points_and_arms()

    def train_batches(batch_size, seed, first_example):
        examples = tf.data.Dataset.from_tensor_slices((points[:TRAIN], arms[:TRAIN]))
        examples = examples.shuffle(TRAIN, seed).repeat().skip(first_example)
        return examples.batch(batch_size, drop_remainder=True).prefetch(2)

    def eval_batches(batch_size):
        return tf.data.Dataset.from_tensor_slices(
            (points[TRAIN:], arms[TRAIN:])).batch(batch_size)

    return {'num_examples': {'train': TRAIN, 'test': TEST},
            'train_batches': train_batches, 'eval_batches': eval_batches}


def dense(inputs, name, size):
    """A dense layer: [n, k] to [n, size]."""
    with tf.variable_scope(name):
        weights = tf.get_variable('weights', [inputs.shape[1], size])
        return tf.matmul(inputs, weights) + tf.get_variable(
            'biases', [size], initializer=tf.zeros_initializer())


def classify(features, labels, mode):
    """The model function: points [n, 2] to the probabilities of both arms."""
    net = features
    for layer in range(2):
        net = tf.nn.relu(dense(net, 'hidden%d' % layer, 32))
    logits = dense(net, 'logits', 2)
    arms = tf.argmax(logits, 1)
    if mode == 'infer':
        return {'predictions': {'arm': arms, 'probabilities': tf.nn.softmax(logits)}}
    return towers.ModelOutput(
        tf.losses.sparse_softmax_cross_entropy(labels, logits),
        metrics={'accuracy': tf.metrics.accuracy(labels, arms)})
