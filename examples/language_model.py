"""An LSTM language model of characters, unrolled; each tower keeps the state of its own part.

    $ python -m examples.language_model --devices=2 --epochs=40

    -train_op = optimizer.minimize(loss_of(characters, next_characters))
    +built = towers.build_towers(make_model_fn(size), (characters, next_characters), optimizer,
    +                            devices=2)

It reads one of the documentation's pages, or the file that --text names, as so many streams side by
side. A step takes the next characters of each stream; gradients go back to the first of them
(truncated backpropagation through time), and the state goes on to the next step.
"""

import argparse
import io
import os

import numpy as np
import tensorflow.compat.v1 as tf

import towers

GUIDE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                     'docs', 'guide.md')
EMBEDDED, HIDDEN = 32, 128


def lstm(inputs, cell, hidden):
    """One time step of an LSTM: (inputs, cell, hidden), each [n, …], to the new (cell, hidden)."""
    with tf.variable_scope('lstm', reuse=tf.AUTO_REUSE):
        weights = tf.get_variable('kernel', [EMBEDDED + HIDDEN, 4 * HIDDEN],
                                  initializer=tf.glorot_uniform_initializer())
        biases = tf.get_variable('bias', [4 * HIDDEN], initializer=tf.zeros_initializer())
        gates = tf.matmul(tf.concat([inputs, hidden], 1), weights) + biases
        i, new, f, o = tf.split(gates, 4, 1)
        cell = tf.sigmoid(f + 1.) * cell + tf.sigmoid(i) * tf.tanh(new)
        return cell, tf.sigmoid(o) * tf.tanh(cell)


def unrolled(characters, cell, hidden, size):
    """Characters [n, steps] and a state to logits [n, steps, size] and the state after them."""
    table = tf.get_variable('embedding', [size, EMBEDDED],
                            initializer=tf.random_normal_initializer(stddev=0.1))
    outputs = []
    for now in tf.unstack(tf.nn.embedding_lookup(table, characters), axis=1):
        cell, hidden = lstm(now, cell, hidden)
        outputs.append(hidden)
    weights = tf.get_variable('softmax', [HIDDEN, size],
                              initializer=tf.glorot_uniform_initializer())
    logits = tf.tensordot(tf.stack(outputs, 1), weights, 1)
    return logits, cell, hidden


def make_model_fn(size):
    """The model function for an alphabet of so many characters."""
    def model_fn(characters, following):
        # Local variables that the forward pass writes: each tower has its own.
        state = [tf.get_variable(name, [characters.shape[0], HIDDEN], trainable=False,
                                 initializer=tf.zeros_initializer(),
                                 collections=[tf.GraphKeys.LOCAL_VARIABLES])
                 for name in ('cell', 'hidden')]
        logits, cell, hidden = unrolled(characters, state[0], state[1], size)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=following, logits=logits))
        return {'loss': loss,
                'updates': [tf.assign(state[0], cell), tf.assign(state[1], hidden)]}
    return model_fn


def written(session, alphabet, count, seed):
    """So many characters that the model writes, each drawn by its probability.

    The model of one character at a time is plain TensorFlow, on the variables by their names.
    """
    with tf.variable_scope('', reuse=True):
        character = tf.placeholder(tf.int32, [1, 1])
        before = tf.placeholder(tf.float32, [1, HIDDEN]), tf.placeholder(tf.float32, [1, HIDDEN])
        logits, cell, hidden = unrolled(character, before[0], before[1], len(alphabet))
        probabilities = tf.nn.softmax(tf.cast(logits[0, 0], tf.float64) * 1.5)
    numbers, now, text = np.random.RandomState(seed), alphabet.index('\n'), ''
    state = np.zeros([1, HIDDEN]), np.zeros([1, HIDDEN])
    for _ in range(count):
        chances, state = session.run([probabilities, (cell, hidden)], {
            character: [[now]], before[0]: state[0], before[1]: state[1]})
        now = numbers.choice(len(alphabet), p=chances)
        text += alphabet[now]
    return text


def main(arguments=None):
    """Trains, prints what it writes, and returns the last epoch's loss in nats a character."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--epochs', type=int, default=40)
    parser.add_argument('--streams', type=int, default=20)
    parser.add_argument('--unrolled_steps', type=int, default=25)
    parser.add_argument('--text', default=GUIDE, help='a file of UTF-8')
    options = parser.parse_args(arguments)
    tf.set_random_seed(1)

    with io.open(options.text, encoding='utf-8') as opened:
        text = opened.read()
    alphabet = sorted(set(text) | {'\n'})
    place = {each: index for index, each in enumerate(alphabet)}
    numbers = np.array([place[each] for each in text], np.int32)
    length = (len(numbers) - 1) // options.streams
    streams, following = [part[:length * options.streams].reshape(options.streams, length)
                          for part in (numbers, numbers[1:])]

    shape = [options.streams, options.unrolled_steps]
    x, y = tf.placeholder(tf.int32, shape), tf.placeholder(tf.int32, shape)
    built = towers.build_towers(
        make_model_fn(len(alphabet)), (x, y),
        towers.Objective(tf.train.AdamOptimizer(0.005), transform_gradients=clipped),
        options.devices, 'mean')
    print(built.plan)
    to_zero = tf.local_variables_initializer()  # the state of every tower
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        losses = []
        for epoch in range(1, options.epochs + 1):
            session.run(to_zero)
            losses = []
            for start in range(0, length - shape[1] + 1, shape[1]):
                window = slice(start, start + shape[1])
                losses.append(session.run([built.loss, built.train_op], {
                    x: streams[:, window], y: following[:, window]})[0])
            if epoch % 10 == 0 or epoch == options.epochs:
                print('epoch %d, %.3f nats a character' % (epoch, np.mean(losses)), flush=True)
        print(written(session, alphabet, 300, seed=1))
    return np.mean(losses) if losses else None


def clipped(pairs):
    """The gradients, scaled down together if their norm is above 5."""
    gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 5.)
    return [(gradient, variable) for gradient, (_, variable) in zip(gradients, pairs)]


if __name__ == '__main__':
    tf.disable_v2_behavior()  # for the whole process, so not where the module is imported
    main()
