"""The program around the diff of README.md: handwritten digits on two towers.

    $ python -m examples.readme
"""

import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from datasets.digits import load_digits


def model_fn(images, labels):
    """The mean loss of the examples, with the L2 losses of the weights."""
    net = slim.conv2d(images, 16, 3, weights_regularizer=slim.l2_regularizer(1e-4))
    logits = slim.fully_connected(slim.flatten(net), 10, activation_fn=None)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses) + tf.losses.get_regularization_loss()


def main():
    """Trains for 200 steps."""
    tf.set_random_seed(1)
    devices = ['/cpu:0', '/cpu:1']  # or ['/gpu:0', '/gpu:1']
    dataset = tf.data.Dataset.from_tensor_slices(load_digits('train')).repeat().batch(100, True)
    images, labels = tf.data.make_one_shot_iterator(dataset).get_next()
    optimizer, step = tf.train.AdamOptimizer(0.01), tf.train.get_or_create_global_step()

    built = towers.build_towers(model_fn, (images, labels), optimizer, devices, global_step=step)
    train_op, loss = built.train_op, built.loss
    print(built.plan)
    with tf.Session(config=towers.session_config(devices)) as session:
        session.run(tf.global_variables_initializer())
        while session.run(step) < 200:
            value, _ = session.run([loss, train_op])
            if session.run(step) % 100 == 0:
                print('step %d, loss %.3f' % (session.run(step), value))


if __name__ == '__main__':
    tf.disable_v2_behavior()  # graphs and sessions, under TensorFlow 2 too
    main()
