"""What recomputation and accumulation save of memory, and what they cost of time.

    $ python -m benchmarks.memory_savings [--only=resnet50,residual_64,accumulate] [--rounds=5]
          [--json=FILE]

Recomputation: a step of each network without and with `recompute='auto'`; of residual stacks four
and sixteen times as deep, too, for how the memory of activations grows. Accumulation: steps of 1, 4
and 16 micro-batches of one size. Memory is the peak of TensorFlow's counting allocator, activations
the peak less what parameters and slots hold between steps. Time is the median of ratios, in turns
within one process, with the least and the greatest; of accumulation, the gradient of k micro-batches
over k times the gradient of one, both without the update. A case is a process of its own.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import time

from benchmarks import memory_account, turns

Case = collections.namedtuple('Case', 'what model shape batch')
"""In words; a name that `_model` knows; the shape of an example; the batch, or micro-batch."""

RECOMPUTED = collections.OrderedDict([
    ('inception_resnet_v2', Case('InceptionResNet-v2, 299 px', 'inception_resnet_v2',
                                 (299, 299, 3), 4)),
    ('resnet50', Case('ResNet-50, 224 px', 'resnet50', (224, 224, 3), 8)),
    ('deep_stack', Case('26 convolutions, 206,538,153 parameters', 'deep_stack', (16, 16, 1), 64)),
    ('residual_16', Case('16 residual layers of 256', 'residual_16', (256,), 8192)),
    ('residual_64', Case('64 residual layers of 256', 'residual_64', (256,), 8192)),
    ('residual_256', Case('256 residual layers of 256', 'residual_256', (256,), 8192))])
ACCUMULATED = Case('ResNet-50, 64 px', 'resnet50', (64, 64, 3), 16)
_MICRO_BATCHES = (1, 4, 16)


def _residual(layers, width=256):
    def model(net, targets):
        import tensorflow.compat.v1 as tf
        for layer in range(layers):
            with tf.variable_scope('layer%d' % layer):
                weights = tf.get_variable('weights', [width, width], tf.float32,
                                          tf.random_normal_initializer(stddev=0.01))
            net += tf.tanh(tf.matmul(net, weights))
        return tf.reduce_mean(tf.square(tf.reduce_mean(net, 1) - tf.cast(targets, tf.float32)))
    return model


def _model(name):
    if name.startswith('residual_'):
        return _residual(int(name[len('residual_'):]))
    return memory_account.model_named(name)


class _Program:
    """A build in a graph and a session of its own, its memory measured."""

    def __init__(self, case, batch, **options):
        import numpy as np
        import tensorflow.compat.v1 as tf
        import towers
        random = np.random.RandomState(0)
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            inputs = (tf.placeholder(tf.float32, (batch,) + case.shape),
                      tf.placeholder(tf.int64, [batch]))
            self._feed = {inputs[0]: random.rand(batch, *case.shape),
                          inputs[1]: np.zeros(batch, np.int64)}
            begin = time.time()
            built = towers.build_towers(_model(case.model), inputs,
                                        tf.train.MomentumOptimizer(1e-4, 0.9), 1, 'mean', **options)
            self.build_seconds = time.time() - begin
            self.gradients = tf.group(*[gradient for gradient, _ in built.gradients])
            self.train_op = built.train_op
            # What stays between steps: variables, trained or not, and slots.
            self.kept = sum(variable.get_shape().num_elements() * variable.dtype.base_dtype.size
                            for variable in tf.global_variables())
            self._session = tf.Session(config=towers.session_config(built.devices))
            self._session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            self.peak = towers.measure_memory(built, self._feed, session=self._session).peak

    def seconds(self, operation, steps=1):
        """Seconds a step, after one that is not timed."""
        begin = time.monotonic()
        for _ in range(steps):
            self._session.run(operation, self._feed)
        return (time.monotonic() - begin) / steps

    def close(self):
        self._session.close()


def recomputation(name, rounds):
    """One network without and with recomputation; a dict."""
    case = RECOMPUTED[name]
    found, programs = {}, []
    for label, options in (('plain', {}), ('recomputed', {'recompute': 'auto'})):
        program = _Program(case, case.batch, **options)
        # Peaks of two sessions of one process would add up: the first one's is known by now.
        found[label] = dict(peak=program.peak - sum(other.kept for other in programs),
                            kept=program.kept, build_seconds=program.build_seconds)
        programs.append(program)
    seconds = [[], []]
    for number in range(rounds + 1):
        for each in ((0, 1) if number % 2 else (1, 0)):
            taken = programs[each].seconds(programs[each].train_op)
            if number:
                seconds[each].append(taken)
    return dict(found, case=name, ratio=turns.ratios(seconds[1], seconds[0]), seconds=seconds)


def accumulation(rounds):
    """Steps of 1, 4 and 16 micro-batches; a dict."""
    found, programs = [], []
    for count in _MICRO_BATCHES:
        program = _Program(ACCUMULATED, ACCUMULATED.batch * count, accumulate=count)
        found.append(dict(micro_batches=count, kept=program.kept,
                          peak=program.peak - sum(other.kept for other in programs)))
        programs.append(program)
    seconds = [[] for _ in programs]
    for number in range(rounds + 1):
        for each, program in enumerate(programs):
            count = _MICRO_BATCHES[each]
            taken = program.seconds(program.gradients, 16 // count) / count
            if number:
                seconds[each].append(taken)
    for each, one in zip(found, seconds):
        each['ratio'] = turns.ratios(one, seconds[0])
    return dict(case='accumulate', found=found)


def _run_case(name, rounds):
    import tensorflow.compat.v1 as tf
    import towers
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    towers.mend_slim()
    return accumulation(rounds) if name == 'accumulate' else recomputation(name, rounds)


def lines(result):
    """The rows of a case, in Markdown."""
    def text(ratio):
        return '%.2f (%.2f to %.2f)' % (ratio['median'], ratio['least'], ratio['most'])
    if result['case'] == 'accumulate':
        for each in result['found']:
            yield '| %s, %d x %d | %.0f | | %s |' % (
                ACCUMULATED.what, each['micro_batches'], ACCUMULATED.batch, each['peak'] / 1e6,
                text(each['ratio']))
        return
    plain, recomputed = result['plain'], result['recomputed']
    yield '| %s, batch %d | %.0f, %.0f | %.0f, %.0f | %s |' % (
        RECOMPUTED[result['case']].what, RECOMPUTED[result['case']].batch,
        plain['peak'] / 1e6, recomputed['peak'] / 1e6, (plain['peak'] - plain['kept']) / 1e6,
        (recomputed['peak'] - recomputed['kept']) / 1e6, text(result['ratio']))


def main(argv):
    """Runs the cases and prints the table."""
    names = list(RECOMPUTED) + ['accumulate']
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default=','.join(names), help='cases by name')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--json', help='file to write the results to')
    parser.add_argument('--case', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print('RESULT ' + json.dumps(_run_case(options.case, options.rounds)))
        return
    environment = dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC='true', TF_CPP_MIN_LOG_LEVEL='3')
    print('| | peak without, with, MB | less variables, MB | time, over without |\n|---|---|---|---|',
          flush=True)
    results = []
    for name in options.only.split(','):
        done = subprocess.run(
            [sys.executable, '-m', 'benchmarks.memory_savings', '--case=' + name,
             '--rounds=%d' % options.rounds], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
        told = [line for line in done.stdout.decode().splitlines() if line.startswith('RESULT ')]
        if not told:
            print('| %s | failed: %s |' % (
                name, (done.stderr.decode().strip().splitlines() or ['?'])[-1]), flush=True)
            continue
        results.append(json.loads(told[0][len('RESULT '):]))
        print('\n'.join(lines(results[-1])), flush=True)
    if options.json:
        with open(options.json, 'w') as opened:
            json.dump(results, opened, indent=1)


if __name__ == '__main__':
    main(sys.argv[1:])
