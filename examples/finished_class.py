"""A class with placeholders, a network and a loss, trained on several devices by one line.

    $ python -m examples.finished_class --devices=2 --steps=300

    -train_op = optimizer.minimize(model.loss)
    +built = towers.build_towers(model.loss, (model.images, model.labels), optimizer,
    +                            devices=2, reduction='mean')
    +train_op = built.train_op

The class, its feeds and its accuracy are as they were. The accuracy is computed on one device.
"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from datasets.digits import load_digits


class DigitsModel:
    """A convolution and a dense layer on images of 8 x 8 pixels, as a program of TF1 has it."""

    def __init__(self, num_classes=10, filters=32):
        self.images = tf.placeholder(tf.float32, [None, 8, 8, 1], name='images')
        self.labels = tf.placeholder(tf.int64, [None], name='labels')
        self.keep_prob = tf.placeholder_with_default(1., [], name='keep_prob')
        with tf.variable_scope('conv'):
            kernel = tf.get_variable('kernel', [3, 3, 1, filters])
            bias = tf.Variable(tf.zeros([filters]), name='bias')
            net = tf.nn.relu(tf.nn.conv2d(self.images, kernel, [1, 1, 1, 1], 'SAME') + bias)
            net = tf.nn.max_pool(net, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
        net = tf.nn.dropout(tf.reshape(net, [-1, 16 * filters]), rate=1. - self.keep_prob)
        with tf.variable_scope('dense'):
            weights = tf.get_variable('weights', [16 * filters, num_classes])
            self.logits = tf.matmul(net, weights)
        self.loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=self.labels, logits=self.logits))
        right = tf.equal(tf.argmax(self.logits, 1), self.labels)
        self.accuracy = tf.reduce_mean(tf.cast(right, tf.float32))


def main(arguments=None):
    """Trains, and returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--batch_size', type=int, default=100)
    options = parser.parse_args(arguments)

    model = DigitsModel()
    optimizer = tf.train.AdamOptimizer(0.003)
    built = towers.build_towers(model.loss, (model.images, model.labels), optimizer,
                                devices=options.devices, reduction='mean')
    train_op = built.train_op
    print(built.plan)

    train_images, train_labels = load_digits('train')
    test_images, test_labels = load_digits('test')
    numbers = np.random.RandomState(0)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for step in range(1, options.steps + 1):
            chosen = numbers.randint(len(train_labels), size=options.batch_size)
            _, loss = session.run([train_op, built.loss], {
                model.images: train_images[chosen], model.labels: train_labels[chosen],
                model.keep_prob: 0.8})
            if step % 100 == 0:
                print('step %d, loss %.3f' % (step, loss))
        accuracy = session.run(model.accuracy, {
            model.images: test_images, model.labels: test_labels})
    print('accuracy %.3f after %d steps' % (accuracy, options.steps))
    return accuracy


if __name__ == '__main__':
    tf.disable_v2_behavior()  # for the whole process, so not where the module is imported
    main()
