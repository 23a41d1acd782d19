"""What a run costs besides its steps: checkpoints, logging and summaries, as a share of step time.

    python benchmarks/run_overhead.py                    the digits network, steps of some 20 ms
    python benchmarks/run_overhead.py --model=resnet_v1_50 --image_size=64 --batch_size=32 \\
        --interval=4 --rounds=12                         a model whose step takes about a second

The same graph trains in sessions that stay open, one without hooks and one for each kind of hook,
some steps each in turn, so that what else the machine does meets all alike. An event (a checkpoint,
a log line, a summary) comes every few steps, oftener than in train.py, so that there are many to
measure. Steps are run as train.py runs them. Each kind has two costs:

    a step      median over rounds of (its mean step without an event - the bare mean step)
    an event    median over events of (the step with it - its round's mean step without one)

and the share at train.py's own rhythm (a log line and a summary in 100 steps, a checkpoint in 500)
is (step + event / rhythm) / bare step. The spread is that of the rounds' differences. Beside it is
what a step without an event takes more in processor time, which neighbours disturb less. The
control is a second session without hooks: what it seems to cost is what two sessions of one graph
differ by.
"""

import contextlib
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
from towers.run.summaries import SummaryHook, default_summaries  # noqa: E402
from trainer.progress import ProgressHook  # noqa: E402
from trainer.speed import StepCounts  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_string('model', 'digits', 'network by name')
flags.DEFINE_integer('image_size', 8, 'pixels')
flags.DEFINE_integer('batch_size', 100, 'examples a step')
flags.DEFINE_integer('num_towers', 2, 'virtual CPU towers')
flags.DEFINE_integer('interval', 20, 'steps from one event to the next, and of a turn')
flags.DEFINE_integer('rounds', 100, 'turns of each kind')

RHYTHM = {'checkpoints': 500, 'logging': 100, 'summaries': 100}  # train.py's defaults


def main(unused_argv):
    """Builds one graph, times it in turns, prints the table."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    towers.mend_slim()
    with tf.Graph().as_default(), contextlib.ExitStack() as open_sessions:
        step, batches, built = build()
        summaries = default_summaries(built)
        sessions = {}
        for kind in ['bare', 'control'] + list(RHYTHM):
            directory = open_sessions.enter_context(tempfile.TemporaryDirectory())
            sessions[kind] = open_sessions.enter_context(tf.train.MonitoredSession(
                tf.train.ChiefSessionCreator(config=towers.session_config(built.devices)),
                make_hooks(kind, directory, step, built, summaries)))
            sessions[kind].run_step_fn(
                lambda step_context: step_context.session.run(batches.initializer))
            time_turn(sessions[kind], built.train_op)  # kernels are made, graphs optimized
        kinds, rounds = list(sessions), []
        for number in range(FLAGS.rounds):
            first = number % len(kinds)  # none is always the one after a certain other one
            rounds.append({kind: time_turn(sessions[kind], built.train_op)
                           for kind in kinds[first:] + kinds[:first]})
    report(rounds)


def report(rounds):
    """Prints shares and costs.

    Args:
      rounds: list of dicts from kind to `(seconds a step, seconds of the step with the event,
        processor seconds a step)`.
    """
    bare = statistics.median(turns['bare'][0] for turns in rounds)
    print('%s, %d towers, batch %d: %.1f ms a step (median of %d turns of %d steps)' % (
        FLAGS.model, FLAGS.num_towers, FLAGS.batch_size, 1e3 * bare, len(rounds), FLAGS.interval))
    for kind, rhythm in [('control', 100)] + list(RHYTHM.items()):
        extra = sorted(turns[kind][0] - turns['bare'][0] for turns in rounds)
        quarter = len(extra) // 4
        step = statistics.median(extra)
        event = statistics.median(turns[kind][1] - turns[kind][0] for turns in rounds)
        busy = statistics.median(turns[kind][2] / turns['bare'][2] - 1 for turns in rounds)
        print('  %-12s %+5.2f %% at 1 in %d steps: a step %+.2f ms (quartiles %+.2f to %+.2f; '
              'processor time %+.2f %%), an event %.1f ms' % (
                  kind, 100 * (step + event / rhythm) / bare, rhythm, 1e3 * step,
                  1e3 * extra[quarter], 1e3 * extra[-1 - quarter], 100 * busy, 1e3 * event))


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
    values, every = [('loss', built.loss)], FLAGS.interval
    counts = StepCounts(step, FLAGS.batch_size, examples_per_epoch=1437, last_step=10 ** 9,
                        examples=step)
    if kind == 'logging':
        return [ProgressHook(values, counts, os.path.join(directory, 'metrics.jsonl'), every,
                             open(os.devnull, 'w'))]
    if kind == 'summaries':
        return [SummaryHook(summaries, step, directory, summary_steps=every)]
    if kind == 'checkpoints':
        return [towers.CheckpointHook(directory, step, save_steps=every, keep=1)]
    return []


def time_turn(session, train_op):
    """Runs the steps from one event to the next: mean seconds of one, seconds of the last one, mean
    processor seconds of one."""
    begin, busy = time.perf_counter(), time.process_time()
    for _ in range(FLAGS.interval - 1):
        session.run(train_op)
    before_event, busy_until = time.perf_counter(), time.process_time()
    session.run(train_op)
    return ((before_event - begin) / (FLAGS.interval - 1), time.perf_counter() - before_event,
            (busy_until - busy) / (FLAGS.interval - 1))


if __name__ == '__main__':
    app.run(main)
