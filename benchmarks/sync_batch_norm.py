"""What `batch_norm='sync'` costs: a step of ResNet-50 beside one whose batch norms see shards.

    python -m benchmarks.sync_batch_norm                                 2 and 4 towers, 64 px
    python -m benchmarks.sync_batch_norm --towers=2 --rounds=3 --shard=4 --profile

'sync' and 'shard' train the same model from the same weights on the same batch, each in a graph and
a session of its own, in turns. Printed is the median over rounds of sync's time by shard's of the
same round, with the least, the greatest and the quartiles; the values that the towers exchange in
a step, counted in the graph; and with --profile the time of each kind of operation, of one step.
"""

import collections
import os
import statistics
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from absl import app, flags  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks import turns  # noqa: E402
import towers  # noqa: E402
from towers.gradients.stateless_random import make_initial_values_stateless  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_list('towers', ['2', '4'], 'how many, one after the other')
flags.DEFINE_string('network', 'resnet_v1_50', 'network by name')
flags.DEFINE_integer('pixels', 64, 'height and width in pixels')
flags.DEFINE_integer('shard', 8, 'examples a tower')
flags.DEFINE_integer('rounds', 9, 'turns of each')
flags.DEFINE_integer('steps', 2, 'of a turn')
flags.DEFINE_bool('profile', False, 'print where the time of a step goes, by kind of operation')


def main(unused_argv):
    """Compares them on each number of towers."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    print('TensorFlow %s, oneDNN %s, %d cores; %s at %d px, %d examples a tower' % (
        tf.version.VERSION, os.environ.get('TF_ENABLE_ONEDNN_OPTS', 'by default'), os.cpu_count(),
        FLAGS.network, FLAGS.pixels, FLAGS.shard))
    for count in map(int, FLAGS.towers):
        arms = {kind: Arm(kind, count) for kind in ('shard', 'sync')}
        for number in range(FLAGS.rounds):
            for kind in list(arms)[::1 if number % 2 else -1]:
                arms[kind].turn()
        report(count, arms['shard'], arms['sync'])
        for arm in arms.values():
            arm.session.close()


def report(count, shard, sync):
    """Prints what came out on so many towers."""
    ratios = turns.ratios(sync.seconds, shard.seconds)
    each = sorted(one / other for one, other in zip(sync.seconds, shard.seconds))
    print('%d towers: sync / shard %.3f (%.3f to %.3f; quartiles %.3f to %.3f); %.0f and %.0f ms a '
          'step, loss %.5f and %.5f' % (
              count, ratios['median'], ratios['least'], ratios['most'], each[len(each) // 4],
              each[-1 - len(each) // 4], 1e3 * statistics.median(sync.seconds),
              1e3 * statistics.median(shard.seconds), sync.loss, shard.loss))
    forward, backward = exchanged(sync.graph)
    print('  exchanged in a step: %d tensors of %s values forward, %d of %s backward; %d '
          'operations against %d' % (len(forward), '{:,}'.format(sum(forward)), len(backward),
                          '{:,}'.format(sum(backward)), len(sync.graph.get_operations()),
                          len(shard.graph.get_operations())), flush=True)
    if FLAGS.profile:
        times = [arm.profile() for arm in (shard, sync)]
        for kind, _ in (times[1] - times[0]).most_common(15):
            print('  %-32s %9.1f ms in shard %9.1f ms in sync' % (
                kind, times[0][kind] / 1e3, times[1][kind] / 1e3))


def exchanged(graph):
    """How many values each tensor has that towers exchange: forward and backward, two lists.

    A sum over the towers under `batch_values` is one exchange; one of the backward pass reads
    gradients.
    """
    sizes = ([], [])
    for op in graph.get_operations():
        if op.type == 'AddN' and op.name.startswith('batch_values/'):
            backward = any('gradients' in each.op.name for each in _sources(op))
            sizes[backward].append(op.outputs[0].shape.num_elements())
    return sizes


def _sources(op):
    """What it adds, without the weights."""
    for tensor in op.inputs:
        yield tensor.op.inputs[0] if tensor.op.type == 'Mul' else tensor


class Arm:
    """One graph, one session."""

    def __init__(self, batch_norm, count):
        model_fn, batch = image_workload(count)
        with tf.Graph().as_default() as self.graph:
            tf.set_random_seed(1)
            built = towers.build_towers(
                model_fn, tuple(tf.constant(each) for each in batch),
                tf.train.MomentumOptimizer(0.001, 0.9), count, 'mean', batch_norm=batch_norm)
            # By name: TF's seeds count the graph's operations, which are others in each arm.
            make_initial_values_stateless(built.variables, 1)
            self.session = tf.Session(graph=self.graph,
                                      config=towers.session_config(built.devices))
            self.session.run(tf.global_variables_initializer())
        self._train, self.seconds = built.train_op, []
        self.loss = float(self.session.run(built.loss))
        self._step = self.session.make_callable(built.train_op)
        self._step()
        self._step()

    def turn(self):
        """Times some steps."""
        begin = time.perf_counter()
        for _ in range(FLAGS.steps):
            self._step()
        self.seconds.append((time.perf_counter() - begin) / FLAGS.steps)

    def profile(self):
        """Microseconds of a step in each kind of operation, on all threads: a Counter."""
        metadata, spent = tf.RunMetadata(), collections.Counter()
        self.session.run(self._train, options=tf.RunOptions(
            trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
        kinds = {op.name: op.type for op in self.graph.get_operations()}
        for device in metadata.step_stats.dev_stats:
            for node in device.node_stats:
                spent[kinds.get(node.node_name, node.node_name.split(':')[0][:7])] += (
                    node.op_end_rel_micros - node.op_start_rel_micros)
        return spent


def image_workload(count):
    """(model function, batch) for so many towers."""
    import numpy as np  # pylint: disable=import-outside-toplevel
    from models import registry  # pylint: disable=import-outside-toplevel
    network, random = registry.get_network(FLAGS.network), np.random.RandomState(1)
    images = random.rand(count * FLAGS.shard, FLAGS.pixels, FLAGS.pixels,
                         network.default_channels).astype('float32')

    def model_fn(images, labels):
        logits, _ = network.build(images, 10, is_training=True, weight_decay=4e-5)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels,
                                                                             logits=logits))
    return model_fn, (images, random.randint(0, 10, len(images)))


if __name__ == '__main__':
    app.run(main)
