"""What a step costs besides its computation: of a graph with next to nothing in it.

    python -m benchmarks.step_overhead [--quick]      prints JSON; started by bench.py

Microseconds a step of `session.run`, of a prepared callable, of a `MonitoredSession` without hooks
(as TF's users have it), and of the loop of train.py with its hooks: in steps without an event, and
with log lines, summaries and checkpoints at their rhythm.
The step of the graph adds to two counters. A callable has next to no Python in it: its time is the
runtime's; of one that fetches what the hooks of train.py fetch, theirs as well. What the loop takes
`above` that, round by round, is Python's.
"""

import collections
import functools
import json
import os
import sys
import tempfile
import time

import tensorflow.compat.v1 as tf

from benchmarks import turns
from towers.run.checkpoint_hook import CheckpointHook
from towers.run.evaluation_hook import EvaluationHook
from towers.run.stopping import StopOnSignalHook
from towers.run.summaries import SummaryHook
from trainer.progress import ProgressHook
from trainer.speed import StepCounts

_EVERY, _SAVE_EVERY = 100, 500  # lines and summaries, and checkpoints: train.py's defaults

_NEVER = 10 ** 6

Graph = collections.namedtuple('Graph', 'step examples values train_op')


def main():
    """Measures the ways of running a step in turns and prints one JSON object."""
    quick = '--quick' in sys.argv
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    steps, rounds = (200, 3) if quick else (2000, 9)
    step = tf.train.get_or_create_global_step()
    examples = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer(),
                               trainable=False)
    values = [('loss', tf.placeholder_with_default(1., [])),
              ('learning_rate', tf.placeholder_with_default(1., []))]
    train_op = tf.group(step.assign_add(1, read_value=False),
                        examples.assign_add(1, read_value=False))
    graph = Graph(step, examples, values, train_op)
    ways = {'session.run': _plain, 'callable': _callable, 'callable that fetches': _fetching,
            'monitored': _monitored,
            "train.py's loop": functools.partial(_with_hooks, every=_NEVER, save_every=_NEVER),
            "train.py's loop, with its events": functools.partial(
                _with_hooks, every=_EVERY, save_every=_SAVE_EVERY)}
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(1e6 * way(graph, steps) / steps)
    fetching = seconds['callable that fetches']
    print(json.dumps({
        name: dict(turns.spread(values),
                   above=turns.spread([each - least for each, least in zip(values, fetching)]))
        for name, values in seconds.items()}))


def _plain(graph, steps):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return _timed(lambda: session.run(graph.train_op), steps)


def _callable(graph, steps):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return _timed(session.make_callable(graph.train_op), steps)


def _fetching(graph, steps):
    """What the hooks' values cost in the runtime, without a hook."""
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return _timed(session.make_callable([graph.train_op, dict(graph.values), graph.step]),
                      steps)


def _monitored(graph, steps):
    with tf.train.MonitoredSession() as session:
        return _timed(lambda: session.run(graph.train_op), steps)


# What an evaluation has; none is asked for.
_NO_EVALUATION = collections.namedtuple('NoEvaluation', 'metrics run')({}, None)


def _with_hooks(graph, steps, every, save_every):
    """The hooks of a run of train.py, without evaluations, which a run has on request only."""
    counts = StepCounts(graph.step, 1, examples_per_epoch=1, last_step=_NEVER,
                        examples=graph.examples)
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, 'w') as nowhere:
        listeners = [
            ProgressHook(graph.values, counts, os.path.join(directory, 'metrics.jsonl'), every,
                         nowhere),
            SummaryHook([tf.summary.scalar(name, value) for name, value in graph.values],
                        graph.step, directory, summary_steps=every)]
        signals = StopOnSignalHook()
        evaluation = EvaluationHook(_NO_EVALUATION, graph.step, None, listeners,
                                    skip_end=lambda: True)
        checkpoints = CheckpointHook(directory, graph.step, save_steps=save_every,
                                     listeners=[listeners[0].listener])
        try:
            with tf.train.MonitoredSession(
                    hooks=listeners + [evaluation, checkpoints, signals]) as session:
                return _timed(lambda: session.run(graph.train_op), steps)
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
