"""Tower loops with habits of their own, and what docs/migration.md replaces them by: same numbers.

The loops are short stand-ins for public ones: of Tacotron-2 (a scope around the optimizer),
rafaljozefowicz/lm (sparse gradients summed, dense ones averaged), OpenAI's pixel-cnn (an optimizer
that is a function), and DeepSpeech (CTC's sparse labels, strings).
"""

import numpy as np
import tensorflow.compat.v1 as tf

import towers
import pytest

DEVICES = ['/cpu:0', '/cpu:1']
DRAW = np.random.RandomState(0)
FEATURES = DRAW.randn(8, 5).astype(np.float32)
LABELS = DRAW.randint(3, size=8)
WORDS = DRAW.randint(20, size=[8, 4])


def network(features, labels):
    weights = tf.get_variable('w', [5, 3], initializer=tf.glorot_uniform_initializer(seed=1))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=tf.matmul(features, weights)))


def language_model(words, labels):
    table = tf.get_variable('table', [20, 5], initializer=tf.random_normal_initializer(seed=2))
    return network(tf.reduce_mean(tf.nn.embedding_lookup(table, words), 1), labels)


def trained(build):
    """Losses of four steps, and all variables by name after them, of a `(train op, loss)`."""
    with tf.Graph().as_default():
        train_op, loss = build()
        with tf.Session(config=towers.session_config(2)) as session:
            session.run(tf.global_variables_initializer())
            losses = [session.run([loss, train_op])[0] for _ in range(4)]
            return losses, {each.op.name: session.run(each) for each in tf.global_variables()}


def assert_equal(build, other):
    """To the bit: two addends have one order."""
    (losses, variables), (other_losses, other_variables) = trained(build), trained(other)
    assert losses == other_losses and losses[-1] != losses[0]
    assert sorted(variables) == sorted(other_variables)
    for name, value in variables.items():
        np.testing.assert_array_equal(value, other_variables[name], name)


def gradients_of_loop(optimizer, model, shards):
    """`(pairs of each tower, mean loss)` of a hand-written loop."""
    pairs, losses = [], []
    for index, shard in enumerate(shards):
        with tf.device(DEVICES[index]), tf.variable_scope(
                tf.get_variable_scope(), reuse=index > 0):
            losses.append(model(*shard))
            pairs.append(optimizer.compute_gradients(losses[-1]))
    return pairs, tf.reduce_mean(losses)


def halves(*arrays):
    return list(zip(*[tf.split(tf.constant(array), 2) for array in arrays]))


def averages(pairs_of_towers):
    return [(tf.reduce_mean(tf.stack([gradient for gradient, _ in pairs]), 0), pairs[0][1])
            for pairs in zip(*pairs_of_towers)]


def built(model, inputs, optimizer):
    result = towers.build_towers(model, inputs, optimizer, DEVICES, 'mean')
    return result.train_op, result.loss


def clip(pairs):
    gradients, variables = zip(*pairs)
    return list(zip(tf.clip_by_global_norm(gradients, 0.1)[0], variables))


@pytest.mark.slow
def test_a_scope_around_the_optimizer_is_one_around_the_build():
    def loop():
        optimizer = tf.train.AdamOptimizer(0.1)
        with tf.variable_scope('M'):
            pairs, loss = gradients_of_loop(optimizer, network, halves(FEATURES, LABELS))
            return optimizer.apply_gradients(averages(pairs)), loss

    def towers_in_scope():
        with tf.variable_scope('M'):
            return built(network, (tf.constant(FEATURES), tf.constant(LABELS)),
                         tf.train.AdamOptimizer(0.1))
    assert_equal(loop, towers_in_scope)
    assert sorted(trained(loop)[1]) == [
        'M/M/w/Adam', 'M/M/w/Adam_1', 'M/beta1_power', 'M/beta2_power', 'M/w']


def test_gradients_that_are_clipped_by_tower():
    def of_each_tower():
        optimizer = tf.train.GradientDescentOptimizer(1.)
        pairs, loss = gradients_of_loop(optimizer, network, halves(FEATURES, LABELS))
        return optimizer, [clip(each) for each in pairs], loss

    def loop():
        optimizer, pairs, loss = of_each_tower()
        return optimizer.apply_gradients(averages(pairs)), loss

    def combined():
        optimizer, pairs, loss = of_each_tower()
        return optimizer.apply_gradients([
            (gradient / 2, variable) for gradient, variable
            in towers.combine_gradients(pairs)]), loss
    assert_equal(loop, combined)


@pytest.mark.slow
def test_a_loop_that_sums_sparse_gradients_and_averages_dense_ones():
    def loop():
        optimizer = tf.train.AdagradOptimizer(0.2)
        (one, two), loss = gradients_of_loop(optimizer, language_model, halves(WORDS, LABELS))
        pairs = []
        for (first, variable), (second, _) in zip(one, two):
            if isinstance(first, tf.IndexedSlices):
                pairs.append((tf.IndexedSlices(
                    tf.concat([first.values, second.values], 0),
                    tf.concat([first.indices, second.indices], 0)), variable))
            else:
                pairs.append(((first + second) / 2, variable))
        return optimizer.apply_gradients(pairs), loss

    def times_two(gradient):
        return tf.IndexedSlices(2 * gradient.values, gradient.indices, gradient.dense_shape)

    def summed(pairs):
        return [(times_two(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient,
                 variable) for gradient, variable in pairs]
    assert_equal(loop, lambda: built(
        language_model, (tf.constant(WORDS), tf.constant(LABELS)),
        towers.Objective(tf.train.AdagradOptimizer(0.2), transform_gradients=summed)))


def adam(params, gradients, rate=0.1, decay_1=0.9, decay_2=0.99):
    """As pixel-cnn's `adam_updates`: a function, with variables of its own."""
    step = tf.Variable(1., name='adam_t')
    updates = []
    for param, gradient in zip(params, gradients):
        first = tf.Variable(tf.zeros(param.get_shape()), name='first')
        second = tf.Variable(tf.zeros(param.get_shape()), name='second')
        new_first = decay_1 * first + (1 - decay_1) * gradient
        new_second = decay_2 * second + (1 - decay_2) * tf.square(gradient)
        corrected = new_first / (1 - tf.pow(decay_1, step))
        scale = tf.sqrt(new_second / (1 - tf.pow(decay_2, step)) + 1e-8)
        updates += [first.assign(new_first), second.assign(new_second),
                    param.assign(param - rate * corrected / scale)]
    with tf.control_dependencies(updates):  # which read it
        return step.assign_add(1).op


class Adam(tf.train.Optimizer):
    def __init__(self):
        super().__init__(use_locking=False, name='adam')

    def apply_gradients(self, pairs, global_step=None, name=None):
        return adam([v for _, v in pairs], [g for g, _ in pairs])


@pytest.mark.slow
def test_an_optimizer_that_is_a_function():
    def loop():
        pairs, loss = gradients_of_loop(
            tf.train.GradientDescentOptimizer(1.), network, halves(FEATURES, LABELS))
        averaged = averages(pairs)
        return adam([v for _, v in averaged], [g for g, _ in averaged]), loss
    assert_equal(loop, lambda: built(
        network, (tf.constant(FEATURES), tf.constant(LABELS)), Adam()))


@pytest.mark.slow
def test_sparse_labels_and_strings_are_cut_as_a_loop_cuts_them():
    frames = DRAW.randn(8, 6, 5).astype(np.float32)
    texts = np.array([b'a', b'bb', b'c', b'dd', b'e', b'ff', b'g', b'hh'])
    letters = [[1, 2], [2], [0, 1], [1], [2, 2], [0], [1, 0], [2]]
    places = [[row, column] for row, word in enumerate(letters) for column in range(len(word))]

    def labels():
        flat = [letter for word in letters for letter in word]
        return tf.SparseTensor(places, tf.constant(flat, tf.int32), [8, 2])

    def speech(frames, labels, texts):
        weights = tf.get_variable('w', [5, 4], initializer=tf.glorot_uniform_initializer(seed=1))
        logits = tf.transpose(tf.tensordot(frames, weights, 1), [1, 0, 2])
        losses = tf.nn.ctc_loss(labels, logits, tf.fill([tf.shape(frames)[0]], 6))
        return tf.reduce_mean(tf.cast(tf.strings.length(texts), tf.float32) * losses)

    def loop():
        optimizer = tf.train.AdamOptimizer(0.1)
        halves_of_labels = tf.sparse.split(sp_input=labels(), num_split=2, axis=0)
        shards = [(frames_of, labels_of, texts_of) for (frames_of, texts_of), labels_of
                  in zip(halves(frames, texts), halves_of_labels)]
        pairs, loss = gradients_of_loop(optimizer, speech, shards)
        return optimizer.apply_gradients(averages(pairs)), loss
    assert_equal(loop, lambda: built(
        speech, (tf.constant(frames), labels(), tf.constant(texts)), tf.train.AdamOptimizer(0.1)))
