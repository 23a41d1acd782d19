"""What a step costs besides its computation: of a graph with next to nothing in it.

    python -m benchmarks.step_overhead [--quick]      prints JSON; started by bench.py

Microseconds a step of `session.run`, of a prepared callable, of a `MonitoredSession` without hooks
(as TF's users have it), and of the loop of train.py with its hooks. The step of the graph is one
addition to a counter; the callable's time, which has no Python in it to speak of, is what the
runtime takes, and the rest is Python's.
"""

import json
import os
import sys
import tempfile
import time

import tensorflow.compat.v1 as tf

from benchmarks import turns
from towers.checkpoint_hook import CheckpointHook
from towers.metrics_log import MetricsHook
from towers.progress import ProgressHook
from towers.step_loop import LoopSession
from towers.stopping import StopOnSignalHook

_LOG_EVERY = 100  # train.py's default


def main():
    """Measures the ways of running a step in turns and prints one JSON object."""
    quick = '--quick' in sys.argv
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    steps, rounds = (200, 3) if quick else (2000, 9)
    step = tf.train.get_or_create_global_step()
    loss = tf.placeholder_with_default(1., [])
    train_op = step.assign_add(1, read_value=False)
    ways = {'session.run': _plain, 'callable': _callable, 'monitored': _monitored,
            "train.py's loop": _with_hooks}
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(1e6 * way(step, loss, train_op, steps) / steps)
    print(json.dumps({name: turns.spread(values) for name, values in seconds.items()}))


def _plain(step, loss, train_op, steps):
    del step, loss
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return _timed(lambda: session.run(train_op), steps)


def _callable(step, loss, train_op, steps):
    del step, loss
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return _timed(session.make_callable(train_op), steps)


def _monitored(step, loss, train_op, steps):
    del step, loss
    with tf.train.MonitoredSession() as session:
        return _timed(lambda: session.run(train_op), steps)


def _with_hooks(step, loss, train_op, steps):
    values, last = [('loss', loss)], steps + 1000
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, 'w') as nowhere:
        signals = StopOnSignalHook()
        hooks = [ProgressHook(values, step, last, 1, 1, _LOG_EVERY, nowhere,
                              fetch_every_step=True),
                 MetricsHook(values, step, os.path.join(directory, 'metrics.jsonl'), 1, 1,
                             _LOG_EVERY, last, fetch_every_step=True),
                 CheckpointHook(directory, step, save_steps=last), signals]
        try:
            with LoopSession(hooks=hooks) as session:
                session.run_steps(train_op, 20)
                begin = time.perf_counter()
                session.run_steps(train_op, steps)
                return time.perf_counter() - begin
        finally:
            signals.restore()


def _timed(run, steps):
    """Seconds of so many steps, after some that prepare."""
    for _ in range(20):
        run()
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    return time.perf_counter() - begin


if __name__ == '__main__':
    main()
