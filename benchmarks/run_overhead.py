"""What a run costs besides its steps: checkpoints, logging and summaries, as a share of step time.

    python benchmarks/run_overhead.py                    the digits network, steps of some 30 ms
    python benchmarks/run_overhead.py --model=resnet_v1_50 --image_size=64 --batch_size=64 \\
        --warm_up=3 --steps=16 --every=8 --save_steps=8  a model whose step takes about a second

The same graph trains in turns with nothing, with each kind of hook alone, and with all of them, at
train.py's rhythm by default. A turn is a session of its own; the first steps of it, which build
kernels, are not timed. Printed are medians over turns: shares of the bare step with their spread
(least and greatest over turns, each against the bare turn of the same round), and what one
checkpoint or one summary costs, from which follows the share at any other rhythm.
"""

import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from absl import app, flags  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import datasets  # noqa: E402
from models import registry  # noqa: E402
import towers  # noqa: E402
from towers.metrics_log import MetricsHook  # noqa: E402
from towers.progress import ProgressHook  # noqa: E402
from towers.summaries import SummaryHook, default_summaries  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_string('model', 'digits', 'network by name')
flags.DEFINE_integer('image_size', 8, 'pixels')
flags.DEFINE_integer('batch_size', 100, 'examples a step')
flags.DEFINE_integer('num_towers', 2, 'virtual CPU towers')
flags.DEFINE_integer('steps', 500, 'timed steps a turn')
flags.DEFINE_integer('every', 100, 'steps from one log line and summary to the next')
flags.DEFINE_integer('save_steps', 500, 'steps from one checkpoint to the next')
flags.DEFINE_integer('rounds', 5, 'turns of each kind')
flags.DEFINE_integer('warm_up', 20, 'steps of a turn before those that are timed')

KINDS = ('bare', 'checkpoints', 'logging', 'summaries', 'all')


def main(unused_argv):
    """Builds one graph, times it in turns, prints the table."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    with tf.Graph().as_default():
        step, batches, built = build()
        summaries = default_summaries(built)
        seconds = {kind: [] for kind in KINDS}
        for _ in range(FLAGS.rounds):
            for kind in KINDS:
                with tempfile.TemporaryDirectory() as directory:
                    hooks = make_hooks(kind, directory, step, built, summaries)
                    seconds[kind].append(time_steps(hooks, batches, built))
    print('%s, %d towers, batch %d: %.1f ms a step (median of %d turns of %d steps)' % (
        FLAGS.model, FLAGS.num_towers, FLAGS.batch_size,
        1e3 * statistics.median(seconds['bare']) / FLAGS.steps, FLAGS.rounds, FLAGS.steps))
    for kind in KINDS[1:]:
        shares = [with_it / bare - 1 for with_it, bare in zip(seconds[kind], seconds['bare'])]
        print('  %-12s %+5.1f %%  (%+.1f to %+.1f)%s' % (
            kind, 100 * statistics.median(shares), 100 * min(shares), 100 * max(shares),
            price(kind, seconds)))


def price(kind, seconds):
    """What one checkpoint or summary costs, in words; '' for the other kinds."""
    interval = {'checkpoints': FLAGS.save_steps, 'summaries': FLAGS.every}.get(kind)
    if interval is None:
        return ''
    last = FLAGS.warm_up + FLAGS.steps
    times = last // interval - FLAGS.warm_up // interval
    extra = statistics.median(
        [with_it - bare for with_it, bare in zip(seconds[kind], seconds['bare'])])
    return ', %d in the timed steps, %.0f ms each' % (times, 1e3 * extra / times) if times else (
        ', none in the timed steps')


def build():
    """(global step, iterator, towers) of the network on the digits."""
    network = registry.get_network(FLAGS.model)
    with tf.device('/cpu:0'):
        step = tf.train.get_or_create_global_step()
        iterator = tf.data.make_initializable_iterator(datasets.train_batches(
            *datasets.get_dataset('digits').load('train'), batch_size=FLAGS.batch_size, seed=1,
            image_size=FLAGS.image_size, channels=network.default_channels))

    def model_fn(images, labels):
        logits, _ = network.build(images, 10, is_training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels,
                                                                             logits=logits))
    built = towers.build_towers(model_fn, iterator.get_next(), tf.train.AdamOptimizer(0.001),
                                FLAGS.num_towers, global_step=step)
    return step, iterator, built


def make_hooks(kind, directory, step, built, summaries):
    """The hooks of one kind, as train.py makes them."""
    hooks = []
    values, last = [('loss', built.loss)], FLAGS.warm_up + FLAGS.steps
    if kind in ('logging', 'all'):
        hooks.append(ProgressHook(values, step, last, FLAGS.batch_size, 1437, FLAGS.every,
                                  open(os.devnull, 'w'), fetch_every_step=True))
        hooks.append(MetricsHook(values, step, os.path.join(directory, 'metrics.jsonl'),
                                 FLAGS.batch_size, 1437, FLAGS.every, last,
                                 fetch_every_step=True))
    if kind in ('summaries', 'all'):
        hooks.append(SummaryHook(summaries, step, directory, FLAGS.batch_size, FLAGS.every, last))
    if kind in ('checkpoints', 'all'):
        hooks.append(towers.CheckpointHook(directory, step, FLAGS.save_steps,
                                           listeners=[hook.listener for hook in hooks]))
    return hooks


def time_steps(hooks, iterator, built):
    """Seconds of the timed steps of one session."""
    creator = tf.train.ChiefSessionCreator(config=towers.session_config(built.devices))
    with tf.train.MonitoredSession(creator, hooks) as session:
        session.run_step_fn(lambda step_context: step_context.session.run(iterator.initializer))
        for _ in range(FLAGS.warm_up):
            session.run(built.train_op)
        begin = time.perf_counter()
        for _ in range(FLAGS.steps):
            session.run(built.train_op)
        return time.perf_counter() - begin


if __name__ == '__main__':
    app.run(main)
