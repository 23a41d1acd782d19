"""The memory account of a step against the peak that was measured, network by network.

    $ python -m benchmarks.memory_account [--onednn=0] [--only=resnet50,lstm] [--json=FILE]

Each case is a process of its own, with TensorFlow's counting allocator on CPUs.
"""

import argparse
import collections
import json
import os
import subprocess
import sys

Case = collections.namedtuple('Case', 'what shape batches')
"""A network in words, the shape of an example, and two batch sizes."""

CASES = collections.OrderedDict([
    ('inception_resnet_v2', Case('InceptionResNet-v2, 96 px', (96, 96, 3), (8, 32))),
    ('resnet50', Case('ResNet-50, 64 px', (64, 64, 3), (16, 64))),
    ('vgg16', Case('VGG-16, 64 px', (64, 64, 3), (16, 64))),
    ('lstm', Case('LSTM of 128, 20 steps', (20,), (64, 512))),
    ('deep_stack', Case('26 convolutions, 206,538,153 parameters', (16, 16, 1), (4, 16)))])


def deep_stack(images, targets):
    """The stack of 3 x 3 convolutions that the question is about: 206,538,153 parameters.

    Args:
      images: float32 [n, 16, 16, 1].
      targets: [n].

    Returns:
      The mean squared error, a scalar.
    """
    import tensorflow.compat.v1 as tf
    numbers = iter(range(100))

    def conv(net, width):
        with tf.variable_scope('conv%d' % next(numbers)):
            weights = tf.get_variable('weights', [3, 3, net.shape.as_list()[-1], width])
            biases = tf.get_variable('biases', [width])
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(net, weights, [1, 1, 1, 1], 'SAME'), biases))

    def pool(net):
        return tf.nn.max_pool(net, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')

    def dense(net, width):
        with tf.variable_scope('dense%d' % next(numbers)):
            weights = tf.get_variable('weights', [net.shape.as_list()[-1], width])
            biases = tf.get_variable('biases', [width])
        return tf.nn.bias_add(tf.matmul(net, weights), biases)
    net = pool(conv(images, 256))
    net = conv(net, 512)
    net = pool(net)
    for _ in range(22):
        net = conv(net, 1024)
    net = pool(net)
    net = pool(conv(conv(net, 256), 32))
    net = dense(dense(tf.reshape(net, [-1, 32]), 4), 1)
    return tf.reduce_mean(tf.square(net[:, 0] - tf.cast(targets, tf.float32)))


def model_named(name):
    """The model function of a case, of `(inputs, targets)`."""
    import tensorflow.compat.v1 as tf
    from benchmarks import workloads

    def loss(logits, labels):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=logits))

    def vgg16(images, labels):
        import tf_slim as slim
        net = images
        for block, (times, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
            net = slim.repeat(net, times, slim.conv2d, width, 3, scope='conv%d' % block)
            net = slim.max_pool2d(net, 2, scope='pool%d' % block)
        net = slim.flatten(net)
        for layer, width in enumerate([4096, 4096]):
            net = slim.dropout(slim.fully_connected(net, width, scope='fc%d' % layer), 0.5)
        return loss(slim.fully_connected(net, 10, activation_fn=None, scope='logits'), labels)

    def network(name, **options):
        def model(images, labels):
            from models import registry
            return loss(registry.get_network(name).build(images, 10, **options)[0], labels)
        return model
    return {'vgg16': vgg16, 'deep_stack': deep_stack,
            'lstm': workloads.WORKLOADS['lstm'].model,
            'resnet50': network('resnet_v1_50'),
            'inception_resnet_v2': network('inception_resnet_v2', create_aux_logits=False)}[name]


def run_case(name, batch_size, num_towers):
    """Builds, predicts and measures one case; returns a dict."""
    import time
    import numpy as np
    import tensorflow.compat.v1 as tf
    import towers
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    towers.mend_slim()
    shape = (batch_size,) + CASES[name].shape
    tokens = len(shape) == 2
    random = np.random.RandomState(0)
    examples = random.randint(1000, size=shape) if tokens else random.rand(*shape)
    inputs = (tf.placeholder(tf.int64 if tokens else tf.float32, shape),
              tf.placeholder(tf.int64, [batch_size]))
    built = towers.build_towers(model_named(name), inputs, tf.train.MomentumOptimizer(1e-4, 0.9),
                                num_towers, 'mean')
    begin = time.time()
    account = towers.memory_account(built)
    seconds = time.time() - begin
    measured = towers.measure_memory(
        built, {inputs[0]: examples, inputs[1]: np.zeros(batch_size, np.int64)})
    return {'case': name, 'batch': batch_size, 'towers': num_towers,
            'parameters': sum(each.get_shape().num_elements() for each in built.variables),
            'predicted': account.peak,
            'measured': measured.peak, 'kinds': account.together.kinds, 'seconds': seconds,
            'moment': account.together.moment, 'measured moment': measured.moments['']}


def main(argv):
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default=','.join(CASES), help='cases by name')
    parser.add_argument('--towers', default='1,4', help='numbers of towers')
    parser.add_argument('--onednn', choices=['0', '1'], help="TensorFlow's choice if not given")
    parser.add_argument('--json', help='file to write the results to')
    parser.add_argument('--case', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        name, batch_size, num_towers = options.case.split(',')
        print('RESULT ' + json.dumps(run_case(name, int(batch_size), int(num_towers))))
        return
    environment = dict(os.environ, TF_CPU_ALLOCATOR_USE_BFC='true', TF_CPP_MIN_LOG_LEVEL='3')
    if options.onednn:
        environment['TF_ENABLE_ONEDNN_OPTS'] = options.onednn
    print('| network | batch | towers | predicted, MB | measured, MB | error |')
    print('|---|---|---|---|---|---|', flush=True)
    results = []
    for name in options.only.split(','):
        for num_towers in map(int, options.towers.split(',')):
            for batch_size in CASES[name].batches:
                done = subprocess.run(
                    [sys.executable, '-m', 'benchmarks.memory_account', '--case=%s,%d,%d' % (
                        name, batch_size, num_towers)], env=environment, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE)
                lines = [line for line in done.stdout.decode().splitlines()
                         if line.startswith('RESULT ')]
                if not lines:
                    print('| %s | %d | %d | failed: %s |' % (
                        name, batch_size, num_towers,
                        (done.stderr.decode().strip().splitlines() or ['?'])[-1]), flush=True)
                    continue
                result = json.loads(lines[0][len('RESULT '):])
                results.append(result)
                print('| %s | %d | %d | %.1f | %.1f | %+.1f %% |' % (
                    CASES[name].what, batch_size, num_towers, result['predicted'] / 1e6,
                    result['measured'] / 1e6,
                    100. * (result['predicted'] / float(result['measured']) - 1)), flush=True)
    if options.json:
        with open(options.json, 'w') as opened:
            json.dump(results, opened, indent=1)


if __name__ == '__main__':
    main(sys.argv[1:])
