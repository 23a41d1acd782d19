"""A GAN that draws handwritten digits: two losses and two optimizers in one build.

    $ python -m examples.gan --devices=2 --steps=12000 --picture=gan.png

    -discriminator_step = discriminator_optimizer.minimize(discriminator_loss, var_list=…)
    -generator_step = generator_optimizer.minimize(generator_loss, var_list=…)
    +built = towers.build_towers(model_fn, (images, labels), {'discriminator': …, 'generator': …},
    +                            devices=2)

The picture, by default `gan.png`, has a row for each digit; it takes matplotlib (`pip install
matplotlib`), and without it the program draws none.
"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from datasets.digits import load_digits

NOISE = 32


def dense(inputs, name, outputs):
    with tf.variable_scope(name):
        weights = tf.get_variable('weights', [inputs.shape[1], outputs],
                                  initializer=tf.glorot_uniform_initializer())
        return tf.matmul(inputs, weights) + tf.get_variable(
            'biases', [outputs], initializer=tf.zeros_initializer())


def generator(noise, labels):
    """Noise [n, NOISE] and digits [n] to images [n, 64] of values in 0..1."""
    with tf.variable_scope('generator', reuse=tf.AUTO_REUSE):
        net = tf.concat([noise, tf.one_hot(labels, 10)], 1)
        net = tf.nn.leaky_relu(dense(net, 'hidden1', 256))
        net = tf.nn.leaky_relu(dense(net, 'hidden2', 256))
        return tf.sigmoid(dense(net, 'pixels', 64))


def discriminator(images, labels):
    """Images [n, 64] and digits [n] to logits [n]: above 0 is real."""
    with tf.variable_scope('discriminator', reuse=tf.AUTO_REUSE):
        net = tf.concat([images, tf.one_hot(labels, 10)], 1)
        for layer in ('hidden1', 'hidden2'):
            net = tf.nn.dropout(tf.nn.leaky_relu(dense(net, layer, 256)), rate=0.3)
        return dense(net, 'logit', 1)[:, 0]


def model_fn(images, labels, noise):
    """Both losses, of one forward pass."""
    fake = generator(noise, labels)
    of_real = discriminator(tf.reshape(images, [-1, 64]), labels)
    of_fake = discriminator(fake, labels)

    def mean_loss(logits, target):
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.fill(tf.shape(logits), target), logits=logits))
    return {'loss': {'discriminator': mean_loss(of_real, 0.9) + mean_loss(of_fake, 0.),
                     'generator': mean_loss(of_fake, 1.)}}


def beginning_with(scope):
    return lambda variables: [each for each in variables if each.op.name.startswith(scope)]


PICTURE = 'gan.png'


def checked_picture(asked):
    """The path of the picture, or an empty text: matplotlib is missing, and none was asked for.

    The program ends where a picture was asked for and cannot be drawn.
    """
    if asked == '':
        return asked
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        advice = 'The picture takes matplotlib: pip install it'
        if asked is not None:
            raise SystemExit('%s, or give --picture=' % advice)
        print('%s. Training without one.' % advice)
        return ''
    picture = PICTURE if asked is None else asked
    open(picture, 'ab').close()  # told before twelve thousand steps, not after
    return picture


def load_pyplot():
    """matplotlib's pyplot, which draws without a screen."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    return pyplot


def draw(images, path):
    """Writes a picture of ten rows of images [n, 64], n a multiple of ten."""
    picture = images.reshape(10, -1, 8, 8)
    picture = np.pad(picture, [(0, 0), (0, 0), (1, 1), (1, 1)], 'constant')
    picture = picture.transpose(0, 2, 1, 3).reshape(100, -1)
    load_pyplot().imsave(path, np.kron(1 - picture, np.ones([4, 4])), cmap='gray', vmin=0, vmax=1)


def main(arguments=None):
    """Trains, draws, and returns the last losses by name."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--steps', type=int, default=12000)
    parser.add_argument('--batch_size', type=int, default=100)
    parser.add_argument('--picture', help='a file to draw to, %s by default; empty: none' % PICTURE)
    options = parser.parse_args(arguments)
    picture = checked_picture(options.picture)
    tf.set_random_seed(1)

    dataset = tf.data.Dataset.from_tensor_slices(load_digits('train')).cache()
    images, labels = tf.data.make_one_shot_iterator(
        dataset.shuffle(2000, seed=1).repeat().batch(options.batch_size, drop_remainder=True)
        .prefetch(4)).get_next()
    noise = tf.random_normal([options.batch_size, NOISE])
    built = towers.build_towers(
        model_fn, (images, labels, noise),
        optimizer={name: towers.Objective(tf.train.AdamOptimizer(0.0003, beta1=0.5),
                                          var_list=beginning_with(name + '/'))
                   for name in ('discriminator', 'generator')},
        devices=options.devices, reduction='mean')
    print(built.plan)
    drawn = generator(tf.random_normal([100, NOISE]), tf.constant(np.arange(100) // 10))
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        losses = {}
        for step in range(1, options.steps + 1):
            session.run(built.train_ops['discriminator'])
            session.run(built.train_ops['generator'])
            if step % 1000 == 0 or step == options.steps:
                losses = session.run(built.loss)
                print('step %d, discriminator %.3f, generator %.3f' % (
                    step, losses['discriminator'], losses['generator']), flush=True)
        if picture:
            draw(session.run(drawn), picture)
    return losses


if __name__ == '__main__':
    tf.disable_v2_behavior()  # for the whole process, so not where the module is imported
    main()
