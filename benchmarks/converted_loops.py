"""Steps of two converted programs beside the loop by hand that they had, in turns.

    python -m benchmarks.converted_loops [--quick] [--towers=2]     prints JSON

Two shapes of program, whose steps are short and whose towers meet in each of them:

- `norms`: a batch norm after every layer, whose moving averages are updated in the forward pass, as
  charlesq34/pointnet2 does it;
- `sparse_softmax`: a large table for a sampled softmax, and a recurrent state for each tower, which
  the forward pass writes, as rafaljozefowicz/lm does it.

Each is trained by a loop over devices as people write it, and by `build_towers`, from the same
weights on the same batch: the losses are compared, and `ratio` is towers' time over the loop's,
round by round.
"""

import argparse
import json
import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from benchmarks import turns  # noqa: E402

_LAYERS, _WIDTH, _FEATURES = 8, 64, 32  # of `norms`
_WORDS, _HIDDEN, _TURNS, _SAMPLED = 20000, 64, 5, 64  # of `sparse_softmax`
_DECAY = 0.9
_COMPARED = 3  # steps whose losses are compared


def main(arguments=None):
    """Measures both shapes and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--towers', type=int, default=2)
    options = parser.parse_args(arguments)
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    rounds, steps = (3, 5) if options.quick else (15, 20)
    print(json.dumps({name: compare(name, options.towers, rounds, steps) for name in MODELS}))


def compare(name, num_towers, rounds, steps):
    """Times the two ways to train a model in turns.

    Args:
      name: one of `MODELS`.
      num_towers: devices, virtual CPUs.
      rounds: turns of each way.
      steps: steps of a turn.

    Returns:
      dict: `hand` and `towers`, each `turns.spread` of milliseconds a step; `ratio`, of towers over
      hand round by round; `losses` of the first steps by hand and by towers, which are equal but
      for rounding.
    """
    programs = {'hand': Program(name, num_towers, by_hand),
                'towers': Program(name, num_towers, by_towers)}
    losses = {way: [program.loss() for _ in range(_COMPARED)]
              for way, program in programs.items()}
    milliseconds = {'hand': [], 'towers': []}
    for _ in range(rounds):
        for way, program in programs.items():
            milliseconds[way].append(1e3 * program.seconds(steps))
    for program in programs.values():
        program.close()
    return {'hand': turns.spread(milliseconds['hand']),
            'towers': turns.spread(milliseconds['towers']),
            'ratio': turns.ratios(milliseconds['towers'], milliseconds['hand']), 'losses': losses}


class Program:
    """A graph in a session, whose weights are the same whoever built it."""

    def __init__(self, name, num_towers, build):
        model, batch_of = MODELS[name]
        with tf.Graph().as_default():
            with tf.device('/cpu:0'):
                batch = [tf.constant(array) for array in batch_of(16 * num_towers)]
            train_op, self._loss = build(model, batch, num_towers)
            self._session = tf.Session(config=towers.session_config(num_towers))
            self._session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            chance = np.random.RandomState(0)
            for variable in tf.trainable_variables():
                variable.load(0.1 * chance.randn(*variable.shape.as_list()), self._session)
        self._train_op = train_op
        self._step = self._session.make_callable(train_op)

    def loss(self):
        """The loss of a step, a float."""
        return float(self._session.run([self._loss, self._train_op])[0])

    def seconds(self, steps):
        """The mean time of some steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        return (time.perf_counter() - begin) / steps

    def close(self):
        """Ends the session."""
        self._session.close()


# ---- the two models ------------------------------------------------------------------------------

def norms(x, y):
    """A batch norm after every layer; the forward pass updates the moving averages."""
    for layer in range(_LAYERS):
        with tf.variable_scope('layer%d' % layer):
            x = tf.matmul(x, tf.get_variable('kernel', [x.shape[-1], _WIDTH]))
            mean, variance = tf.nn.moments(x, [0])
            updates = []
            for name, value in (('mean', mean), ('variance', variance)):
                average = tf.get_variable(name, [_WIDTH], trainable=False,
                                          initializer=tf.zeros_initializer())
                updates.append(tf.assign_sub(average, (1 - _DECAY) * (average - value)))
            with tf.control_dependencies(updates):
                x = tf.nn.relu((x - mean) * tf.rsqrt(variance + 1e-3))
    logits = tf.matmul(x, tf.get_variable('logits', [_WIDTH, 10]))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def norms_batch(examples):
    """(features [examples, 32], labels [examples])"""
    chance = np.random.RandomState(1)
    return (chance.randn(examples, _FEATURES).astype(np.float32), chance.randint(0, 10, examples))


def sparse_softmax(words, targets):
    """A recurrent network whose state stays from step to step, and a sampled softmax."""
    examples = words.shape[0]
    state = tf.get_variable('state', [examples, _HIDDEN], initializer=tf.zeros_initializer(),
                            trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    table = tf.get_variable('table', [_WORDS, _HIDDEN])
    kernel = tf.get_variable('kernel', [2 * _HIDDEN, _HIDDEN])
    hidden = state.read_value()
    embedded = tf.nn.embedding_lookup(table, words)
    for turn in range(_TURNS):
        hidden = tf.tanh(tf.matmul(tf.concat([embedded[:, turn], hidden], 1), kernel))
    with tf.control_dependencies([state.assign(hidden)]):
        hidden = tf.identity(hidden)
    sampled = tf.constant(np.arange(0, _WORDS, _WORDS // _SAMPLED)[:_SAMPLED], tf.int64)
    losses = tf.nn.sampled_softmax_loss(
        weights=tf.get_variable('softmax', [_WORDS, _HIDDEN]),
        biases=tf.get_variable('biases', [_WORDS]), labels=targets[:, None], inputs=hidden,
        num_sampled=_SAMPLED, num_classes=_WORDS,
        sampled_values=(sampled, tf.ones([examples, 1]), tf.ones([_SAMPLED])))
    return tf.reduce_mean(losses)


def sparse_softmax_batch(examples):
    """(words [examples, turns], targets [examples])"""
    chance = np.random.RandomState(1)
    return (chance.randint(0, _WORDS, [examples, _TURNS]), chance.randint(0, _WORDS, examples))


MODELS = {'norms': (norms, norms_batch), 'sparse_softmax': (sparse_softmax, sparse_softmax_batch)}


# ---- the two ways to train them ------------------------------------------------------------------

def by_towers(model, batch, num_towers):
    """(train op, loss) of `build_towers`."""
    built = towers.build_towers(model, tuple(batch), tf.train.AdagradOptimizer(0.1), num_towers,
                                reduction='mean', update_ops='all')
    return built.train_op, built.loss


def by_hand(model, batch, num_towers):
    """(train op, loss) of a loop over devices, as public programs have it."""
    optimizer = tf.train.AdagradOptimizer(0.1)
    shards = zip(*[tf.split(tensor, num_towers) for tensor in batch])
    losses, tower_gradients = [], []
    for number, shard in enumerate(shards):
        place = _VariablesOnCpu('/cpu:%d' % number)
        with tf.device(place), tf.variable_scope(
                tf.get_variable_scope(), reuse=number > 0, custom_getter=_own_state(number)):
            losses.append(model(*shard))
            tower_gradients.append(optimizer.compute_gradients(
                losses[-1], tf.trainable_variables()))
    averaged = [_average(pairs) for pairs in zip(*tower_gradients)]
    with tf.device('/cpu:0'):
        return optimizer.apply_gradients(averaged), tf.add_n(losses) / num_towers


class _VariablesOnCpu:
    """A device function: variables on the first CPU, all else on the tower's device."""

    def __init__(self, device):
        self._device = device

    def __call__(self, op):
        return '/cpu:0' if op.type in ('VarHandleOp', 'VariableV2') else self._device


def _own_state(number):
    """A custom getter that gives each tower a state of its own."""
    def get_variable(getter, name, *arguments, **named):
        if name == 'state':
            name, named['reuse'] = 'state_%d' % number, False
        return getter(name, *arguments, **named)
    return get_variable


def _average(pairs):
    """The mean gradient of one variable over the towers; rows of sparse ones are concatenated."""
    gradients, variables = zip(*pairs)
    if isinstance(gradients[0], tf.IndexedSlices):
        values = tf.concat([each.values for each in gradients], 0) / len(gradients)
        rows = tf.concat([each.indices for each in gradients], 0)
        return tf.IndexedSlices(values, rows, gradients[0].dense_shape), variables[0]
    return tf.reduce_mean(tf.stack(gradients), 0), variables[0]


if __name__ == '__main__':
    main()
