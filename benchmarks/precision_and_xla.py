"""What half precision, loss scaling and XLA do to a step, side by side with plain float32.

    python benchmarks/precision_and_xla.py                          all workloads, all arms
    python benchmarks/precision_and_xla.py --workloads=digits --rounds=3 --turn_seconds=0.2
    TF_ENABLE_ONEDNN_OPTS=1 python benchmarks/precision_and_xla.py  with bf16, which needs oneDNN

Every arm trains the same model from the same weights on the same batch, in a graph and a session of
its own; the sessions take turns. Printed are ratios to float32 (below 1 is faster), each the median
over rounds of one turn by float32's of the same round, with the least and the greatest;
milliseconds a step; seconds from the first build to the end of the first step; the loss after all
steps, and how far it is from float32's. An arm that TensorFlow has not got here is named with the
reason. The table goes to --json too.
"""

import json
import os
import statistics
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from absl import app, flags  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from models import registry  # noqa: E402
import towers  # noqa: E402
from towers.placement.numerics import converted_operations, xla_clusters  # noqa: E402
from towers.gradients.stateless_random import make_initial_values_stateless  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_list('workloads', ['digits', 'resnet', 'lstm'], 'which of them')
flags.DEFINE_list('arms', ['float32', 'loss_scale', 'xla', 'bf16', 'fp16'], 'which of them, '
                  'float32 first')
flags.DEFINE_integer('num_towers', 2, 'virtual CPUs, or GPUs where there are any')
flags.DEFINE_integer('rounds', 7, 'turns of each arm')
flags.DEFINE_float('turn_seconds', 2., 'about how long a turn of the fastest arm takes')
flags.DEFINE_string('json', '', 'file for the figures')

_WARM_UP = 4  # XLA compiles a cluster when it is run for the second time
ARMS = {'float32': {}, 'loss_scale': {'loss_scale': towers.LossScale()}, 'xla': {'xla': True},
        'bf16': {'precision': 'bf16'}, 'fp16': {'precision': 'fp16'}}


def main(unused_argv):
    """Runs the workloads one after the other."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    print('TensorFlow %s, oneDNN %s, %d cores, %d towers, %d rounds' % (
        tf.version.VERSION, os.environ.get('TF_ENABLE_ONEDNN_OPTS', 'by default'), os.cpu_count(),
        FLAGS.num_towers, FLAGS.rounds))
    results = {workload: compare(workload) for workload in FLAGS.workloads}
    if FLAGS.json:
        with open(FLAGS.json, 'w') as written:
            json.dump({'tensorflow': tf.version.VERSION, 'workloads': results}, written, indent=1)


def compare(workload):
    """{arm: {field: figure}} of one workload, which it prints too."""
    model_fn, batch = WORKLOADS[workload]()
    arms, missing = {}, {}
    for name in FLAGS.arms:
        try:
            arms[name] = Arm(model_fn, batch, ARMS[name])
        except towers.TowersError as error:
            missing[name] = str(error)
    steps = max(1, int(FLAGS.turn_seconds / min(arm.step_seconds for arm in arms.values())))
    for number in range(FLAGS.rounds):
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            arms[name].turn(steps)
    losses = {name: arm.finish() for name, arm in arms.items()}
    print('\n%s, batch %d, %d steps a turn\n  %-11s %-26s %12s %10s %10s  %s' % (
        workload, len(batch[0]), steps, 'arm', 'step / float32 (spread)', 'ms a step', 'start, s',
        'loss', 'off by; runs'))
    results = {}
    base = arms[FLAGS.arms[0]]
    for name, arm in arms.items():
        ratios = [one / other for one, other in zip(arm.seconds, base.seconds)]
        results[name] = {
            'ratio': statistics.median(ratios), 'ratio_least': min(ratios),
            'ratio_greatest': max(ratios), 'ms': 1e3 * statistics.median(arm.seconds),
            'start_seconds': arm.start_seconds, 'loss': losses[name],
            'loss_off_by': abs(losses[name] / losses[FLAGS.arms[0]] - 1), 'runs': arm.what_runs}
        print('  %-11s %5.3f (%.3f to %.3f)%6s %12.2f %10.1f %10.6f  %.0e; %s' % (
            name, results[name]['ratio'], min(ratios), max(ratios), '', results[name]['ms'],
            arm.start_seconds, losses[name], results[name]['loss_off_by'], arm.what_runs))
        arm.session.close()
    for name, reason in missing.items():
        print('  %-11s not here: %s' % (name, reason))
        results[name] = {'missing': reason}
    return results


class Arm:
    """One graph, one session."""

    def __init__(self, model_fn, batch, options):
        begin = time.perf_counter()
        with tf.Graph().as_default() as graph:
            tf.set_random_seed(1)
            built = towers.build_towers(
                model_fn, tuple(tf.constant(each) for each in batch),
                tf.train.MomentumOptimizer(0.001, 0.9), FLAGS.num_towers, 'mean',
                numerics=towers.Numerics(**options))
            # By name: TF's seeds count the graph's operations, which are others in each arm.
            make_initial_values_stateless(built.variables, 1)
            config = towers.use_precision(towers.session_config(built.devices), built.precision,
                                          built.devices)
            self.session = tf.Session(graph=graph, config=config)
            self.session.run(tf.global_variables_initializer())
        self._loss, self.seconds = built.loss, []
        metadata = tf.RunMetadata()
        self.session.run(built.train_op)
        self.start_seconds = time.perf_counter() - begin
        self.session.run(built.train_op, options=tf.RunOptions(output_partition_graphs=True),
                         run_metadata=metadata)
        self._step = self.session.make_callable(built.train_op)
        for _ in range(_WARM_UP):
            self._step()
        begin = time.perf_counter()
        self._step()
        self.step_seconds = time.perf_counter() - begin
        self.what_runs = 'as it is'
        if built.xla:
            self.what_runs = '%d clusters' % sum(xla_clusters(metadata).values())
        elif built.precision != 'float32':
            converted = converted_operations(metadata, built.precision).most_common(4)
            self.what_runs = ', '.join('%d %s' % (count, kind) for kind, count in converted)

    def turn(self, steps):
        """Times so many steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        self.seconds.append((time.perf_counter() - begin) / steps)

    def finish(self):
        """The loss after all of them."""
        return float(self.session.run(self._loss))


def image_workload(network_name, image_size, batch_size, **options):
    """(model function, batch) of a network, without dropout, so that all arms do the same."""
    network = registry.get_network(network_name)
    random = np.random.RandomState(1)
    images = random.rand(batch_size, image_size, image_size, network.default_channels)

    def model_fn(images, labels):
        logits, _ = network.build(images, 10, is_training=True, weight_decay=4e-5, **options)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels,
                                                                             logits=logits))
    return model_fn, (images.astype('float32'), random.randint(0, 10, batch_size))


def lstm_workload(batch_size=64, length=20, width=128):
    """(model function, batch) of one LSTM layer, written out step by step."""
    random = np.random.RandomState(1)
    sequences = random.randn(batch_size, length, width).astype('float32')

    def model_fn(sequences, labels):
        kernel = tf.get_variable('kernel', [2 * width, 4 * width],
                                 initializer=tf.glorot_uniform_initializer(seed=1))
        bias = tf.get_variable('bias', [4 * width], initializer=tf.zeros_initializer())
        output_kernel = tf.get_variable('output_kernel', [width, 10],
                                        initializer=tf.glorot_uniform_initializer(seed=2))
        output = cell = tf.zeros([tf.shape(sequences)[0], width])
        for each in tf.unstack(sequences, axis=1):
            gates = tf.matmul(tf.concat([each, output], 1), kernel) + bias
            write, forget, read, candidate = tf.split(gates, 4, 1)
            cell = tf.sigmoid(forget + 1.) * cell + tf.sigmoid(write) * tf.tanh(candidate)
            output = tf.sigmoid(read) * tf.tanh(cell)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=tf.matmul(output, output_kernel)))
    return model_fn, (sequences, random.randint(0, 10, batch_size))


WORKLOADS = {'digits': lambda: image_workload('digits', 8, 100, dropout_keep_prob=1.),
             'resnet': lambda: image_workload('resnet_v1_50', 64, 16),
             'lstm': lstm_workload}


if __name__ == '__main__':
    app.run(main)
