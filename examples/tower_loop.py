"""TensorFlow's tutorial of several GPUs, its tower loop replaced, on the bundled digits.

    $ python -m examples.tower_loop --devices=2 --steps=300

    -for i in range(num_gpus):
    -  with tf.device('/gpu:%d' % i), tf.name_scope('tower_%d' % i):
    -    tower_grads.append(optimizer.compute_gradients(tower_loss(images, labels)))
    -    tf.get_variable_scope().reuse_variables()
    -apply_gradients_op = optimizer.apply_gradients(average_gradients(tower_grads), global_step)
    +built = towers.build_towers(tower_loss, batch, optimizer, num_gpus, 'mean',
    +                            global_step=global_step)

What the tutorial has besides the loop (weight decay in a collection, a rate that decays, moving
averages of the weights, and an evaluation with those) is as it was.
"""

import argparse

import tensorflow.compat.v1 as tf

import towers
from datasets.digits import load_digits


def variable_with_weight_decay(name, shape, stddev, decay):
    """A variable whose L2 loss goes into the collection 'losses'."""
    variable = tf.get_variable(
        name, shape, initializer=tf.truncated_normal_initializer(stddev=stddev))
    tf.add_to_collection('losses', decay * tf.nn.l2_loss(variable))
    return variable


def inference(images):
    """Images [n, 8, 8, 1] to logits [n, 10]."""
    with tf.variable_scope('conv1'):
        kernel = variable_with_weight_decay('weights', [3, 3, 1, 32], 0.2, 0.)
        biases = tf.get_variable('biases', [32], initializer=tf.zeros_initializer())
        net = tf.nn.relu(tf.nn.conv2d(images, kernel, [1, 1, 1, 1], 'SAME') + biases)
    net = tf.nn.max_pool(net, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
    with tf.variable_scope('local2'):
        weights = variable_with_weight_decay('weights', [4 * 4 * 32, 64], 0.05, 0.004)
        biases = tf.get_variable('biases', [64], initializer=tf.zeros_initializer())
        net = tf.nn.relu(tf.matmul(tf.reshape(net, [-1, 4 * 4 * 32]), weights) + biases)
    with tf.variable_scope('softmax_linear'):
        weights = variable_with_weight_decay('weights', [64, 10], 1 / 64., 0.)
        return tf.matmul(net, weights) + tf.get_variable(
            'biases', [10], initializer=tf.zeros_initializer())


def tower_loss(images, labels):
    """The loss of one tower: all that is in the collection, as this is called once."""
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=inference(images))
    tf.add_to_collection('losses', tf.reduce_mean(cross_entropy))
    return tf.add_n(tf.get_collection('losses'))


def main(arguments=None):
    """Trains, and returns the accuracy of the averaged weights on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--batch_size', type=int, default=100)
    options = parser.parse_args(arguments)

    dataset = tf.data.Dataset.from_tensor_slices(load_digits('train')).shuffle(2000).repeat()
    batch = tf.data.make_one_shot_iterator(
        dataset.batch(options.batch_size, drop_remainder=True)).get_next()
    global_step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.1, global_step, 200, 0.5, staircase=True)
    built = towers.build_towers(tower_loss, batch, tf.train.MomentumOptimizer(rate, 0.9),
                                options.devices, 'mean', global_step=global_step)
    averages = tf.train.ExponentialMovingAverage(0.99, global_step)
    with tf.control_dependencies([built.train_op]):
        train_op = averages.apply(tf.trainable_variables())

    test_images, test_labels = load_digits('test')
    with tf.variable_scope('', reuse=True):  # the weights have the names that they always had
        right = tf.nn.in_top_k(inference(tf.constant(test_images)), tf.constant(test_labels), 1)
    averaged = [averages.average(variable) for variable in tf.trainable_variables()]
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for step in range(options.steps):
            _, loss = session.run([train_op, built.loss])
            if step % 100 == 99:
                print('step %d, loss %.3f' % (step + 1, loss))
        for variable, value in zip(tf.trainable_variables(), session.run(averaged)):
            variable.load(value, session)
        accuracy = session.run(right).mean()
    print('accuracy %.3f after %d steps' % (accuracy, options.steps))
    return accuracy


if __name__ == '__main__':
    tf.disable_v2_behavior()  # for the whole process, so not where the module is imported
    main()
