"""The hook that writes metrics.jsonl: no kill and no restart costs or repeats a line."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.run import step_clock
from towers.errors import InvalidArgumentError
from towers.run.metrics_log import MetricsHook


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

    def __init__(self, folder, log_every=4, last_step=None, save_steps=None, saver_first=False,
                 **options):
        self.graph = tf.Graph()
        self.path = folder / 'metrics.jsonl'
        with self.graph.as_default():
            self.global_step = tf.train.get_or_create_global_step()
            loss = 1. / tf.cast(self.global_step + 1, tf.float32)
            with tf.control_dependencies([loss]):
                self.train_op = tf.assign_add(self.global_step, 1).op
            self.hook = MetricsHook([('loss', loss)], self.global_step, str(self.path), 10, 80,
                                    log_every, last_step, **options)
            hooks = [self.hook]
            if save_steps:
                saver = tf.train.CheckpointSaverHook(str(folder), save_steps=save_steps,
                                                     listeners=[self.hook.listener])
                hooks = [saver] + hooks if saver_first else hooks + [saver]
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


def test_fetches_only_for_the_steps_that_have_a_line(tmp_path):
    for every_step, expected in ((False, [3, 6, 7]), (True, list(range(1, 9)))):
        job = Job(tmp_path / str(every_step), log_every=3, last_step=7,
                  fetch_every_step=every_step)
        asked, before_run = [], job.hook.before_run

        def spy(run_context):
            arguments = before_run(run_context)
            asked.append(arguments)
            return arguments
        job.hook.before_run = spy
        job.run(8)
        assert [step for step, arguments in enumerate(asked, 1) if arguments] == expected
        assert [line['step'] for line in job.lines()] == [3, 6, 7]


@pytest.mark.slow
def test_a_killed_run_has_the_lines_of_one_that_was_not(tmp_path):
    whole = Job(tmp_path / 'whole', 2, 13).run(13).lines()
    assert [line['step'] for line in whole] == [2, 4, 6, 8, 10, 12, 13]
    for kill_at in (3, 4, 7):
        folder = tmp_path / str(kill_at)
        Job(folder, 2, 13, save_steps=4).run(kill_at, killed=True)
        done = kill_at // 4 * 4
        assert tf.train.latest_checkpoint(str(folder)).endswith('-%d' % done)
        lines = Job(folder, 2, 13).run(13 - done).lines()
        assert len(lines) == len(whole)
        for one, other in zip(whole, lines):
            for name in ('step', 'epoch', 'examples', 'loss'):
                assert one[name] == other[name]


def test_the_line_is_there_before_the_checkpoint(tmp_path):
    """Step 4 is saved and has a line; the kill comes before anything else is done."""
    job = Job(tmp_path, 4, save_steps=4).run(4, killed=True)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('-4')
    assert [line['step'] for line in job.lines()] == [4]


def test_a_saver_that_comes_first_is_found_out(tmp_path):
    with pytest.raises(InvalidArgumentError, match='put the MetricsHook before the hook that'):
        Job(tmp_path, 4, save_steps=4, saver_first=True).run(6)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('-0')
    Job(tmp_path / 'other', 5, save_steps=4, saver_first=True).run(6)  # not the same steps


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


def test_an_evaluation_after_the_end_of_a_run_stopped_between_lines(tmp_path):
    job = Job(tmp_path, log_every=4).run(6)
    job.hook.evaluated(6, {'accuracy': 0.875})
    assert job.lines()[-1] == {'step': 6, 'test_accuracy': 0.875}


def test_examples_are_those_of_the_variable_if_there_is_one(tmp_path):
    job = Job(tmp_path, log_every=2)
    with job.graph.as_default():
        examples = tf.Variable(1000, dtype=tf.int64)
        with tf.control_dependencies([job.train_op]):
            job.train_op = tf.assign_add(examples, 30).op
        job.hooks[:] = [MetricsHook({}, job.global_step, str(job.path), 30, 100, 2,
                                    examples=examples)]
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


@pytest.mark.parametrize('options, message', [
    (dict(log_every=0), 'log_every=0: expected a whole number of at least 1'),
    (dict(values={'step': 1}), "=1 is a int: expected a scalar tensor"),
    (dict(values=lambda: {'step': tf.constant(1.)}),
     "'step' is a name that the metrics log uses itself"),
    (dict(batch_size=0), 'batch_size=0'),
    (dict(say=3), 'say=3: expected a function of one text, such as print'),
    (dict(examples_per_epoch=0), 'examples_per_epoch=0: expected more than 0')])
def test_refuses_arguments_that_make_no_sense(tmp_path, options, message):
    arguments = dict(values={}, global_step=tf.train.get_or_create_global_step(),
                     path=str(tmp_path / 'metrics.jsonl'), batch_size=10, examples_per_epoch=100)
    arguments.update(options)
    if callable(arguments['values']):
        arguments['values'] = arguments['values']()
    with pytest.raises(InvalidArgumentError, match=message):
        MetricsHook(**arguments)
    assert not list(tmp_path.iterdir())


def test_a_new_run_where_there_was_one_is_told_and_a_killed_one_is_none(tmp_path):
    said = []
    Job(tmp_path, log_every=1, save_steps=100, say=said.append).run(3, killed=True)
    Job(tmp_path, log_every=1, save_steps=100, say=said.append).run(2)  # from the save of step 0
    assert said == ['cut the 2 lines of steps 1 to 2 after step 0 from %s/metrics.jsonl: those '
                    'steps are done again' % tmp_path]
    for path in tmp_path.iterdir():
        if path.name != 'metrics.jsonl':
            path.unlink()
    Job(tmp_path, log_every=1, save_steps=100, say=said.append).run(1)
    assert said[1:] == ['{0} held 2 lines of an earlier run, whose checkpoints are gone: renamed '
                        'to {0}.1'.format(tmp_path / 'metrics.jsonl')]
    assert (tmp_path / 'metrics.jsonl.1').read_text().count('\n') == 2
