"""`LoopSession.run_steps`: when hooks are called, what is fetched, how it ends, equal results."""

import json
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.run.evaluation import Evaluation, EvaluationHook
from towers.run.step_clock import StepCounts
from towers.run.step_loop import LoopSession, OccasionalHook
from towers.run.summaries import Summaries, SummaryHook
from towers.run.training_session import training_session
from trainer.metrics_hook import MetricsHook
from trainer.progress import ProgressHook


class Recorder(OccasionalHook):
    """Due at the multiples of a number; writes down in which steps it is called, and how."""

    def __init__(self, every, stop_at=None):
        self.every, self.stop_at = every, stop_at
        self.hooked, self.passed, self.fetched, self.ended, self.step = [], [], [], 0, 0
        self.asked = []

    def is_due(self):
        self.asked.append(self.step + 1)
        return (self.step + 1) % self.every == 0

    def after_run(self, run_context, run_values):
        self.step += 1
        self.hooked.append(self.step)
        if self.step == self.stop_at:
            run_context.request_stop()

    def step_done(self, fetched):
        self.step += 1
        self.passed.append(self.step)
        self.fetched.append(fetched)

    def end(self, session):
        self.ended += 1


def counter():
    step = tf.train.get_or_create_global_step()
    return step, tf.assign_add(step, 1).op


def value_of(session, tensor):
    return session.run_step_fn(lambda step_context: step_context.session.run(tensor))


def test_hooks_are_called_where_one_of_them_is_due_and_foreign_ones_at_every_step():
    step, train_op = counter()
    hooks = [Recorder(3), Recorder(4)]
    with LoopSession(hooks=hooks) as session:
        assert session.run_steps(train_op, 7) == 7
        assert session.run_steps(train_op, 3) == 3
        assert session.run_steps(train_op, 0) == 0 and session.run_steps(train_op, -1) == 0
        assert value_of(session, step) == 10
    for hook in hooks:
        assert hook.hooked == [3, 4, 6, 8, 9]
        assert hook.passed == [1, 2, 5, 7, 10]
        assert hook.asked == list(range(1, 11))  # also where one before it is due
        assert hook.ended == 1
    recorder = Recorder(3)
    foreign = tf.train.NanTensorHook(tf.constant(0.))  # knows nothing of the loop
    with LoopSession(hooks=[recorder, foreign]) as session:
        session.run_steps(train_op, 5)
    assert recorder.hooked == [1, 2, 3, 4, 5] and not recorder.passed


def test_what_hooks_always_fetch_is_computed_with_every_step():
    step, train_op = counter()
    fetched, seen = tf.py_func(lambda: seen.append(1) or 7., [], tf.float64), []
    fetched.set_shape([])

    class Fetches(Recorder):
        def before_run(self, run_context):
            return tf.train.SessionRunArgs(self.always_fetched())

        def always_fetched(self):
            return {'of': [fetched]}

    hooks = [Recorder(3), Fetches(3), Recorder(3)]
    with LoopSession(hooks=hooks) as session:
        session.run_steps(train_op, 8)
        assert value_of(session, step) == 8
    assert len(seen) == 8
    assert [hook.fetched for hook in hooks] == [[None] * 6, [{'of': [7.]}] * 6, [None] * 6]


def test_a_hook_ends_the_loop():
    step, train_op = counter()
    recorder = Recorder(3, stop_at=6)
    with LoopSession(hooks=[recorder]) as session:
        assert session.run_steps(train_op, 100) == 6
        assert session.should_stop()
        assert session.run_steps(train_op, 100) == 0
    assert recorder.ended == 1 and recorder.step == 6


def test_the_end_of_the_data_ends_the_session_in_good_order():
    data = tf.data.make_one_shot_iterator(tf.data.Dataset.range(5)).get_next()
    recorder = Recorder(4)
    with LoopSession(hooks=[recorder]) as session:
        session.run_steps(data.op, 100)
        pytest.fail('what follows the loop is not run')
    assert recorder.ended == 1 and recorder.step == 5


def test_a_lost_session_is_made_anew(tmp_path):
    """As `MonitoredSession.run` recovers from a machine that is gone."""
    class FailsOnce(Recorder):
        failed = False

        def step_done(self, fetched):
            super(FailsOnce, self).step_done(fetched)
            if self.step == 5 and not self.failed:
                self.failed = True
                raise tf.errors.UnavailableError(None, None, 'gone')

    step, train_op = counter()
    hook = FailsOnce(100)
    with LoopSession(tf.train.ChiefSessionCreator(checkpoint_dir=str(tmp_path)),
                     hooks=[hook]) as session:
        assert session.run_steps(train_op, 9) == 9
        # Four went well; the others in a session that began from nothing, as none was saved.
        assert value_of(session, step) == 5
    assert hook.failed and hook.step == 10


def test_calls_share_what_is_prepared_for_a_step(monkeypatch):
    """A session of a server registers the step's graph anew for each callable."""
    made, make_callable = [], tf.Session.make_callable

    def counted(session, fetches, *args, **options):
        made.append(fetches[0])
        return make_callable(session, fetches, *args, **options)
    monkeypatch.setattr(tf.Session, 'make_callable', counted)
    step, one = counter()
    two = tf.assign_add(step, 2).op
    with LoopSession(hooks=[Recorder(100)]) as session:
        for train_op in (one, one, two, two):
            session.run_steps(train_op, 3)
        assert value_of(session, step) == 18
    assert made == [one, two]


def train(folder, loop, until=23):
    """A run with the hooks of a run; what it left behind, without times."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable('w', [], initializer=tf.zeros_initializer())
        loss = tf.square(w - 4.)
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        values = {'loss': loss}
        lines = open(str(folder) + '.txt', 'w')
        evaluation = Evaluation(lambda x: {'loss': tf.reduce_mean(x) * w},
                                tf.data.Dataset.from_tensor_slices(np.ones([4], 'f')).batch(2))
        hooks = [ProgressHook(values, StepCounts(step, 10, 100, 23), 5, lines),
                 MetricsHook(values, StepCounts(step, 10, examples_per_epoch=100, last_step=23),
                             str(folder / 'metrics.jsonl'), 4),
                 SummaryHook(Summaries(values, {'w': w}, None), StepCounts(step, 10, last_step=23),
                             str(folder), 6)]
        with training_session(
                str(folder), step, hooks + [EvaluationHook(evaluation, step, 10, hooks[1:])],
                save_steps=7, keep=9, listeners=[hook.listener for hook in hooks]) as session:
            steps = until - value_of(session, step)
            if loop:
                assert session.run_steps(train_op, steps) == steps
            else:
                for _ in range(steps):
                    session.run(train_op)
        lines.close()
    metrics = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    events = [(event.step, value.tag, value.simple_value)
              for name in sorted(os.listdir(str(folder))) if 'tfevents' in name
              for event in tf.train.summary_iterator(str(folder / name))
              for value in event.summary.value if value.tag in ('loss', 'w')]
    shown = [line.split()[1] for line in open(str(folder) + '.txt')]
    return ([(line['step'], line.get('examples'), line.get('loss'), line.get('test_loss'))
             for line in metrics], events, shown,
            sorted(name for name in os.listdir(str(folder)) if name.endswith('.index')))


@pytest.mark.slow
def test_hooks_write_the_same_as_without_the_loop(tmp_path):
    plain = train(tmp_path / 'plain', False)
    looped = train(tmp_path / 'looped', True)
    assert looped == plain
    metrics, events, shown, saved = looped
    logged, evaluated = [4, 8, 12, 16, 20, 23], [10, 20, 23]
    assert [line[0] for line in metrics] == sorted(set(logged + evaluated))
    # w_n = 4 (1 - 0.8^n), and a step's loss is of the weights before it: 16 * 0.64^(n - 1)
    assert [line[2] for line in metrics if line[0] in logged] == pytest.approx(
        [16 * .64 ** (step - 1) for step in logged], rel=1e-4)
    assert [line[3] for line in metrics if line[0] in evaluated] == pytest.approx(
        [4 * (1 - .8 ** step) for step in evaluated], rel=1e-4)
    train(tmp_path / 'resumed', True, until=13)
    resumed = train(tmp_path / 'resumed', True)
    assert [line for line in resumed[0] if line[0] != 13] == metrics
    assert sorted({step for step, _, _ in events}) == [6, 12, 18, 23]
    assert shown == ['1/23', '5/23', '10/23', '15/23', '20/23', '23/23']
    assert saved == sorted('model.ckpt-%d.index' % step for step in (0, 7, 14, 21, 23))
    assert resumed[3] == sorted(saved + ['model.ckpt-13.index'])
