"""A slim network on the bundled digits, with feed_dict and a Saver, on several devices.

    $ python -m examples.slim_feed_dict --devices=2 --steps=300

    -train_op = slim.learning.create_train_op(loss, optimizer)
    +built = towers.build_towers(model_fn, (images, labels), optimizer, devices=2)
    +train_op = built.train_op

A second run with the same --checkpoint_dir goes on where the first one has stopped, on any number
of devices: the checkpoint has the names that it has on one.
"""

import argparse
import os
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from datasets.digits import load_digits


def digits_net(images, keep):
    """Images [n, 8, 8, 1] to logits [n, 10]."""
    net = slim.conv2d(images, 16, 3, scope='conv1')
    net = slim.max_pool2d(slim.conv2d(net, 32, 3, scope='conv2'), 2, scope='pool2')
    net = tf.nn.dropout(slim.flatten(net), rate=1. - keep)
    return slim.fully_connected(net, 10, activation_fn=None, scope='logits')


def main(arguments=None):
    """Trains, saves, and returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--batch_size', type=int, default=100)
    parser.add_argument('--checkpoint_dir', help='by default a temporary directory')
    options = parser.parse_args(arguments)
    directory = options.checkpoint_dir or tempfile.mkdtemp()

    images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf.placeholder(tf.int64, [None])
    keep = tf.placeholder_with_default(1., [])  # no batch dimension: it comes in from outside

    def model_fn(images, labels):
        logits = digits_net(images, keep)
        right = tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)
        return {'loss': tf.losses.sparse_softmax_cross_entropy(labels, logits),
                'metrics': {'accuracy': tf.reduce_mean(right)}}

    global_step = tf.train.get_or_create_global_step()
    built = towers.build_towers(model_fn, (images, labels), tf.train.AdamOptimizer(0.003),
                                options.devices, 'mean', remainder='weight',
                                global_step=global_step)
    saver = tf.train.Saver()
    train_images, train_labels = load_digits('train')
    numbers = np.random.RandomState(0)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        latest = tf.train.latest_checkpoint(directory)
        if latest:
            saver.restore(session, latest)
        for _ in range(options.steps):
            chosen = numbers.randint(len(train_labels), size=options.batch_size)
            session.run(built.train_op, {
                images: train_images[chosen], labels: train_labels[chosen], keep: 0.8})
        saver.save(session, os.path.join(directory, 'model'), global_step)
        test_images, test_labels = load_digits('test')
        accuracy, step = session.run([built.metrics['accuracy'], global_step],
                                     {images: test_images, labels: test_labels})
    print('accuracy %.3f after %d steps, saved in %s' % (accuracy, step, directory))
    return accuracy


if __name__ == '__main__':
    tf.disable_v2_behavior()  # for the whole process, so not where the module is imported
    main()
