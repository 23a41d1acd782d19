"""The hook that writes metrics.jsonl: no kill and no restart costs or repeats a line."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.nonfinite import NonFiniteError, checked_loss
from towers.run import step_clock
from towers.run.step_clock import StepCounts
from towers.run.training_session import training_session
from trainer.metrics_hook import MetricsHook


class FakeTime:
    """Stands for the module `time`; tests move `now`."""
    now = 1000.

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(step_clock, 'time', fake)
    return fake


class Job:
    """A training whose loss in step s is 1 / s, with a checkpoint every `save_steps`."""

    def __init__(self, folder, log_every=4, last_step=None, save_steps=None, graph=None,
                 **options):
        self.graph = graph or tf.Graph()
        self.path = folder / 'metrics.jsonl'
        with self.graph.as_default():
            self.global_step = tf.train.get_or_create_global_step()
            loss = 1. / tf.cast(self.global_step + 1, tf.float32)
            with tf.control_dependencies([loss]):
                self.train_op = tf.assign_add(self.global_step, 1).op
            counts = StepCounts(self.global_step, 10, examples_per_epoch=80, last_step=last_step)
            self.hook = MetricsHook([('loss', loss)], counts, str(self.path), log_every, **options)
            hooks = [self.hook]
            if save_steps:
                saver = tf.train.CheckpointSaverHook(str(folder), save_steps=save_steps,
                                                     listeners=[self.hook.listener])
                hooks += [saver]
            self.creator = tf.train.ChiefSessionCreator(checkpoint_dir=str(folder))
            self.hooks = hooks

    def run(self, number, each=lambda: None, killed=False):
        """Runs so many steps; a killed session is left without its end."""
        try:
            with self.graph.as_default(), tf.train.MonitoredSession(
                    self.creator, self.hooks) as session:
                for _ in range(number):
                    session.run(self.train_op)
                    each()
                if killed:
                    raise Killed()
        except Killed:
            pass
        return self

    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class Killed(Exception):
    pass


def test_a_line_at_each_multiple_and_at_the_last_step(tmp_path, time):
    job = Job(tmp_path, log_every=4, last_step=10)
    job.hook.listener.before_save(None, 0)  # as a saver does that is before it in the list

    def advance():
        time.now += 0.5  # 10 examples a step: 20 a second
    lines = job.run(10, each=advance).lines()
    assert [line['step'] for line in lines] == [4, 8, 10]
    assert [line['loss'] for line in lines] == [0.25, 0.125, pytest.approx(0.1)]
    assert [line['examples'] for line in lines] == [40, 80, 100]
    assert [line['epoch'] for line in lines] == [0.5, 1.0, 1.25]
    assert [line['images_per_second'] for line in lines] == [20., 20., 20.]
    assert all(line['wall_time'] > 1.7e9 for line in lines)
    assert all(list(line) == ['step', 'epoch', 'examples', 'loss', 'images_per_second',
                              'wall_time'] for line in lines)


def test_no_rate_before_there_is_one(tmp_path, time):
    lines = Job(tmp_path, log_every=1).run(3, each=lambda: setattr(time, 'now', time.now + 2)
                                           ).lines()
    assert [line['images_per_second'] for line in lines] == [None, None, 5.]


def test_the_line_is_there_before_the_checkpoint(tmp_path):
    """Step 4 is saved and has a line; the kill comes before anything else is done."""
    job = Job(tmp_path, 4, save_steps=4).run(4, killed=True)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('-4')
    assert [line['step'] for line in job.lines()] == [4]


def test_evaluations_join_the_line_of_their_step(tmp_path):
    job = Job(tmp_path, log_every=4, last_step=10)
    done = []

    def evaluate():
        done.append(1)
        if len(done) in (4, 6):
            job.hook.evaluated(len(done), {'accuracy': np.float64(0.5), 'examples': 7}, 1.)
    job.run(10, each=evaluate)
    # A hook that evaluates at the end may come after this one's end; a test has other names.
    job.hook.evaluated(10, {'accuracy': 0.875}, name='validation')
    lines = job.lines()
    assert [line['step'] for line in lines] == [4, 6, 8, 10]
    assert (lines[0]['loss'], lines[0]['test_accuracy'], lines[0]['test_examples']) == (.25, .5, 7)
    assert lines[1] == {'step': 6, 'test_accuracy': 0.5, 'test_examples': 7}
    assert lines[3]['validation_accuracy'] == 0.875 and lines[3]['examples'] == 100


def test_examples_are_those_of_the_variable_if_there_is_one(tmp_path):
    job = Job(tmp_path, log_every=2)
    with job.graph.as_default():
        examples = tf.Variable(1000, dtype=tf.int64)
        with tf.control_dependencies([job.train_op]):
            job.train_op = tf.assign_add(examples, 30).op
        counts = StepCounts(job.global_step, 30, examples_per_epoch=100, examples=examples)
        job.hooks[:] = [MetricsHook([], counts, str(job.path), 2)]
    lines = job.run(4).lines()
    assert [(line['examples'], line['epoch']) for line in lines] == [(1060, 10.6), (1120, 11.2)]


def test_several_runs_a_step_write_each_step_once(tmp_path):
    """As in a program that adds gradients up over three runs and then updates."""
    job = Job(tmp_path, log_every=2)
    with job.graph.as_default():
        nothing = tf.no_op()
    with job.graph.as_default(), tf.train.MonitoredSession(job.creator, job.hooks) as session:
        for _ in range(7):
            session.run(nothing)
            session.run(nothing)
            session.run(job.train_op)
    assert [(line['step'], line['loss']) for line in job.lines()] == [
        (2, 0.5), (4, 0.25), (6, pytest.approx(1 / 6.))]


def test_a_new_run_where_there_was_one_is_told_and_a_killed_one_is_none(tmp_path):
    said = []
    Job(tmp_path, log_every=1, save_steps=100, say=said.append).run(3, killed=True)
    Job(tmp_path, log_every=1, save_steps=100, say=said.append).run(2)  # from the save of step 0
    assert said == ['cut the lines of steps 1 to 2 from %s/metrics.jsonl: those steps are done '
                    'again' % tmp_path]
    for path in tmp_path.iterdir():
        if path.name != 'metrics.jsonl':
            path.unlink()
    Job(tmp_path, log_every=1, save_steps=100, say=said.append).run(1)
    assert said[1:] == ['{0} is of an earlier run, whose checkpoints are gone: renamed to '
                        '{0}.1'.format(tmp_path / 'metrics.jsonl')]
    assert (tmp_path / 'metrics.jsonl.1').read_text().count('\n') == 2


def test_the_line_of_the_step_before_one_that_fails_is_in_the_log(tmp_path):
    step = tf.train.get_or_create_global_step()
    loss = tf.where(tf.equal(step, 8), float('nan'), 1.)
    with tf.control_dependencies([checked_loss(loss, 1)]):
        train_op = tf.assign_add(step, 1).op
    metrics = MetricsHook([('loss', loss)], StepCounts(step, 1, examples_per_epoch=1),
                          str(tmp_path / 'metrics.jsonl'), 4)
    with pytest.raises(NonFiniteError):
        with training_session(str(tmp_path), step, [metrics]) as session:
            session.run_steps(train_op, 20)
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [4, 8]


def test_a_session_that_is_lost_costs_no_line_and_repeats_none(tmp_path):
    class FailsOnce(tf.train.SessionRunHook):
        failed = False

        def after_run(self, run_context, run_values):
            if not self.failed and run_context.session.run(tf.train.get_global_step()) == 11:
                self.failed = True
                raise tf.errors.UnavailableError(None, None, 'gone')
    step, said = tf.train.get_or_create_global_step(), []
    train_op = tf.assign_add(step, 1).op
    metrics = MetricsHook([], StepCounts(step, 1, examples_per_epoch=1),
                          str(tmp_path / 'metrics.jsonl'), 1, say=said.append)
    with training_session(str(tmp_path), step, [metrics, FailsOnce()], save_steps=4,
                          say=lambda line: None) as session:
        for _ in range(14 - 8 + 11):  # from step 8 on again
            if not session.should_stop():
                session.run(train_op)
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == list(range(1, lines[-1]['step'] + 1))
    assert lines[-1]['step'] >= 14 and len(said) == 1 and said[0].startswith('cut the ')


def test_the_share_of_waiting_of_each_line(tmp_path, time):
    """Steps of half a second wait for a fifth of it."""
    job = Job(tmp_path, log_every=4, input_wait=tf.constant(.1), graph=tf.get_default_graph())
    lines = job.run(8, each=lambda: setattr(time, 'now', time.now + .5)).lines()
    assert [line['input_wait'] for line in lines] == [pytest.approx(.2)] * 2
