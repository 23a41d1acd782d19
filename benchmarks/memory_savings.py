"""What recomputation and accumulation save of memory, and what they cost of time.

    $ python -m benchmarks.memory_savings [--only=resnet50,residual_64,accumulate] [--rounds=5]
          [--json=FILE]
    $ python -m benchmarks.memory_savings --flat [--only=resnet50,vgg16]

Recomputation: a step of each network without and with `recompute='auto'`; of residual stacks four
and sixteen times as deep, too, for how the memory of activations grows. Accumulation: steps of 1, 4
and 16 micro-batches of one size. Memory is the peak of TensorFlow's counting allocator, activations
the peak less what parameters and slots hold between steps. Time is the median of ratios, in turns
within one process, with the least and the greatest; of accumulation, the gradient of k micro-batches
over k times the gradient of one, both without the update. What is timed together is one process;
each peak is of a process of its own.

`--flat` takes the peaks of 4, 8 and 16 micro-batches of one size of each network, without times: the
memory of a step may grow by the batch, and by nothing else.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import time

import numpy as np

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
FLAT = collections.OrderedDict([
    ('resnet50', Case('ResNet-50, 64 px', 'resnet50', (64, 64, 3), 4)),
    ('vgg16', Case('VGG-16, 64 px', 'vgg16', (64, 64, 3), 4)),
    ('residual_64', Case('64 residual layers of 256', 'residual_64', (256,), 1024)),
    ('convolutions_12', Case('12 convolutions of 32, 64 px', 'convolutions_12', (64, 64, 3), 4)),
    ('deep_stack', Case('26 convolutions, 206,538,153 parameters', 'deep_stack', (16, 16, 1), 2)),
    ('inception_resnet_v2', Case('InceptionResNet-v2, 96 px', 'inception_resnet_v2', (96, 96, 3),
                                 2))])
_FLAT_MICRO_BATCHES = (4, 8, 16)


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


def _convolutions(layers, width=32):
    def model(net, targets):
        import tensorflow.compat.v1 as tf
        for layer in range(layers):
            weights = tf.get_variable('weights%d' % layer, [3, 3, net.shape[-1], width])
            net = tf.nn.relu(tf.nn.conv2d(net, weights, [1, 1, 1, 1], 'SAME'))
        return tf.reduce_mean(tf.square(
            tf.reduce_mean(net, [1, 2, 3]) - tf.cast(targets, tf.float32)))
    return model


def _model(name):
    if name.startswith('convolutions_'):
        return _convolutions(int(name[len('convolutions_'):]))
    if name.startswith('residual_'):
        return _residual(int(name[len('residual_'):]))
    return memory_account.model_named(name)


class _Program:
    """A build in a graph and a session of its own."""

    def __init__(self, case, batch, **options):
        import tensorflow.compat.v1 as tf
        import towers
        random = np.random.RandomState(0)
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            inputs = (tf.placeholder(tf.float32, (batch,) + case.shape),
                      tf.placeholder(tf.int64, [batch]))
            self._feed = {inputs[0]: random.rand(batch, *case.shape),
                          inputs[1]: np.zeros(batch, np.int64)}
            self._built = towers.build_towers(
                _model(case.model), inputs, tf.train.MomentumOptimizer(1e-4, 0.9), 1, 'mean',
                memory=towers.Memory(**options))
            self.train_op = self._built.train_op
            # A number of each: TensorFlow leaves out what is only waited for.
            self.gradients = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(gradient))
                                       for gradient, _ in self._built.gradients])
            # What stays between steps: variables, trained or not, and slots.
            self.kept = sum(variable.get_shape().num_elements() * variable.dtype.base_dtype.size
                            for variable in tf.global_variables())
            self._session = tf.Session(config=towers.session_config(self._built.devices))
            self._session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])

    def peak(self):
        """Bytes in use at the most, in a step."""
        import towers
        return towers.measure_memory(self._built, self._feed, session=self._session).peak

    def seconds(self, operation, steps=1):
        """Seconds a step."""
        begin = time.monotonic()
        for _ in range(steps):
            self._session.run(operation, self._feed)
        return (time.monotonic() - begin) / steps


def variants(name):
    """`(Case, [(batch, options of Memory)])`: the first is what the others are held to."""
    if name.startswith('flat_'):
        case = FLAT[name[len('flat_'):]]
        return case, [(case.batch * count, {'accumulate': count}) for count in _FLAT_MICRO_BATCHES]
    if name == 'accumulate':
        return ACCUMULATED, [(ACCUMULATED.batch * count, {'accumulate': count})
                             for count in _MICRO_BATCHES]
    case = RECOMPUTED[name]
    return case, [(case.batch, {}), (case.batch, {'recompute': 'auto'})]


def measured_peak(name, number):
    """{'peak', 'kept'} of one variant, in this process."""
    case, builds = variants(name)
    program = _Program(case, builds[number][0], **builds[number][1])
    return dict(peak=program.peak(), kept=program.kept)


def measured_times(name, rounds):
    """Seconds of each variant, a list of lists: a step, or a micro-batch's gradient."""
    case, builds = variants(name)
    programs = [_Program(case, batch, **options) for batch, options in builds]
    seconds = [[] for _ in programs]
    for turn in range(rounds + 1):
        for number in list(range(len(programs)))[::-1 if turn % 2 else 1]:
            program, count = programs[number], builds[number][1].get('accumulate')
            taken = program.seconds(program.train_op) if count is None else program.seconds(
                program.gradients, max(_MICRO_BATCHES) // count) / count
            if turn:
                seconds[number].append(taken)
    return seconds


def run_case(name, rounds):
    """Peaks and times of a case, of processes of its own; a dict.

    Raises:
      ValueError: one of them failed.
    """
    _, builds = variants(name)
    seconds = _in_a_process('%s,times,%d' % (name, rounds))
    return dict(case=name, seconds=seconds, ratios=[turns.ratios(each, seconds[0])
                                                    for each in seconds],
                memory=[_in_a_process('%s,peak,%d' % (name, number))
                        for number in range(len(builds))])


def flat_lines(name):
    """The rows of a network of `FLAT`, in Markdown, as each is measured.

    Raises:
      ValueError: a process failed.
    """
    case, builds = variants('flat_' + name)
    first = None
    for number, (batch, options) in enumerate(builds):
        peak = _in_a_process('flat_%s,peak,%d' % (name, number))['peak']
        examples = batch * int(np.prod(case.shape)) * 4  # bytes of float32
        first = peak - examples if first is None else first
        yield '| %s, %d of %d | %.1f | %.1f | %+.1f |' % (
            case.what, options['accumulate'], case.batch, peak / 1e6, examples / 1e6,
            (peak - examples - first) / 1e6)


def _in_a_process(what):
    counts = {'TF_CPU_ALLOCATOR_USE_BFC': 'true'} if ',peak,' in what else {}
    done = subprocess.run([sys.executable, '-m', 'benchmarks.memory_savings', '--case=' + what],
                          env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3', **counts),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told = [line for line in done.stdout.decode().splitlines() if line.startswith('RESULT ')]
    if not told:
        raise ValueError((done.stderr.decode().strip().splitlines() or ['?'])[-1])
    return json.loads(told[0][len('RESULT '):])


def _answer(what):
    import tensorflow.compat.v1 as tf
    import towers
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    towers.mend_slim()
    name, kind, number = what.split(',')
    return (measured_peak if kind == 'peak' else measured_times)(name, int(number))


def lines(result):
    """The rows of a case, in Markdown."""
    case, builds = variants(result['case'])
    for (batch, options), memory, ratio in zip(builds, result['memory'], result['ratios']):
        yield '| %s, batch %d | %s | %.0f | %.0f | %.2f (%.2f to %.2f) |' % (
            case.what, batch, ', '.join('%s=%s' % each for each in options.items()) or 'plain',
            memory['peak'] / 1e6, (memory['peak'] - memory['kept']) / 1e6, ratio['median'],
            ratio['least'], ratio['most'])


def main(argv):
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', help='cases by name')
    parser.add_argument('--flat', action='store_true',
                        help='peaks of 4, 8 and 16 micro-batches, without times')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--json', help='file to write the results to')
    parser.add_argument('--case', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print('RESULT ' + json.dumps(_answer(options.case)))
        return
    if options.flat:
        print('| | peak, MB | the batch, MB | growth beyond the batch, MB |\n|---|---|---|---|')
        for name in options.only.split(',') if options.only else FLAT:
            for line in flat_lines(name):
                print(line, flush=True)
        return
    names = options.only.split(',') if options.only else list(RECOMPUTED) + ['accumulate']
    print('| | | peak, MB | less variables, MB | time, over the first |\n|---|---|---|---|---|',
          flush=True)
    results = []
    for name in names:
        try:
            results.append(run_case(name, options.rounds))
        except ValueError as error:
            print('| %s | failed: %s |' % (name, error), flush=True)
            continue
        print('\n'.join(lines(results[-1])), flush=True)
    if options.json:
        with open(options.json, 'w') as opened:
            json.dump(results, opened, indent=1)


if __name__ == '__main__':
    main(sys.argv[1:])
