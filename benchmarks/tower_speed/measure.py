"""Times and traces one cell: train.py's own graph, without its hooks; prints one line of JSON.

    python -m benchmarks.tower_speed.measure STEPS TRACES <flags of train.py>
"""

import json
import os
import statistics
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import tensorflow.compat.v1 as tf  # noqa: E402

from benchmarks.programs import tell_tower_0  # noqa: E402
from benchmarks.tower_speed.trace_split import PARTS, split_trace  # noqa: E402
import datasets  # noqa: E402
from trainer.command_line import parse_flags  # noqa: E402
from trainer.flags import FLAGS  # noqa: E402
from trainer.job import build_job, make_setup  # noqa: E402
from trainer.resources import enter_graph_mode, session_config  # noqa: E402

_UNTIMED = 3  # steps that build kernels and optimise the graph


def measure(steps, traces):
    """The figures of the job that train.py's flags describe: a dict.

    Args:
      steps: how many are timed.
      traces: how many are traced, after those.
    """
    tf.set_random_seed(FLAGS.seed)
    begin = time.perf_counter()
    dataset = datasets.get_dataset(FLAGS.dataset, FLAGS.data_dir or None)
    setup = make_setup(dataset)
    job = build_job(setup, with_evaluation=False)
    built = time.perf_counter()
    with tf.Session(config=session_config(job.built)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(job.iterator.initializer)
        session.run(job.train_op)
        first = time.perf_counter()
        for _ in range(_UNTIMED - 1):
            session.run(job.train_op)
        seconds = [_timed(session, job.train_op) for _ in range(steps)]
        scopes = (job.built.plan.line('optimizer').replace('Optimizer', ''), 'GradientDescent')
        splits = []
        for number in range(traces + 1):
            metadata = tf.RunMetadata()
            session.run(job.train_op, run_metadata=metadata,
                        options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))
            tell_tower_0(metadata, job.built.towers[0])
            if number:  # the first trace sets up tracing
                splits.append(split_trace(metadata.step_stats, scopes))
    return {'towers': len(job.built.towers), 'batch_size': FLAGS.batch_size,
            'build_seconds': built - begin, 'first_step_seconds': first - built,
            'step_seconds': seconds, 'traced_step': statistics.median(s.step for s in splits),
            'covered': {part: statistics.median(s.covered[part] for s in splits)
                        for part in PARTS},
            'exposed': {part: statistics.median(s.exposed[part] for s in splits)
                        for part in PARTS},
            'not_overlapped': statistics.median(s.not_overlapped for s in splits)}


def _timed(session, train_op):
    begin = time.perf_counter()
    session.run(train_op)
    return time.perf_counter() - begin


def main(argv):
    """Parses train.py's flags and prints the figures."""
    parse_flags(['train.py'] + argv[3:])
    enter_graph_mode()
    with tf.Graph().as_default():
        print(json.dumps(measure(int(argv[1]), int(argv[2]))), flush=True)


if __name__ == '__main__':
    main(sys.argv)
