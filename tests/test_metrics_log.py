"""metrics.jsonl: its lines, and that no kill and no restart costs or repeats one."""

import json
import math
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import steps
from towers.errors import InvalidArgumentError, LogFileError
from towers.metrics_log import MetricsHook, MetricsLog


class FakeTime:
    """Stands for the module `time`; tests move `now`."""
    now = 1000.

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(steps, 'time', fake)
    return fake


def strict(path):
    """The objects of a file, which has to be JSON by the letter, one whole line each."""
    def refuse(constant):
        raise AssertionError(constant)
    text = path.read_text()
    assert text == '' or text.endswith('\n')
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# ---- the file -----------------------------------------------------------------------------------

def test_lines_are_flat_objects_in_order(tmp_path):
    path = tmp_path / 'new' / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    assert path.read_text() == ''
    log.add(10, {'loss': np.float32(0.1), 'examples': np.int64(1000), 'rate': 0.1, 'name': b'a'})
    assert path.read_text() == ''  # an evaluation of step 10 may yet come
    log.add(10, {'test_accuracy': np.float64(0.25), 'good': np.bool_(True)})
    log.add(20, {'loss': np.array(2.5, np.float16), 'examples': np.array([2000])})
    assert path.read_text() == ('{"step": 10, "loss": 0.1, "examples": 1000, "rate": 0.1, '
                                '"name": "a", "test_accuracy": 0.25, "good": true}\n')
    log.flush()
    assert strict(path)[1] == {'step': 20, 'loss': 2.5, 'examples': 2000}


def test_what_json_cannot_say_is_null_and_spelled_out(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    log.add(1, {'loss': float('nan'), 'rate': 0.5, 'norm': np.float32('inf')})
    log.flush()
    log.add(1, {'test_loss': -math.inf})
    log.add(2, {'loss': None})
    log.sync()
    assert strict(path) == [
        {'step': 1, 'loss': None, 'rate': 0.5, 'norm': None, 'test_loss': None,
         'non_finite': 'loss=nan norm=inf test_loss=-inf'}, {'step': 2, 'loss': None}]


def test_float32_come_back_bit_by_bit(tmp_path):
    values = np.random.RandomState(0).randn(300).astype(np.float32) * np.float32(1e-3)
    log = MetricsLog(str(tmp_path / 'metrics.jsonl'))
    log.resume(0)
    for number, value in enumerate(values):
        log.add(number, {'loss': value})
    log.flush()
    read = [line['loss'] for line in strict(tmp_path / 'metrics.jsonl')]
    np.testing.assert_array_equal(np.array(read, np.float32), values)


def test_joins_a_line_that_is_written_already(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    for step in (1, 2):
        log.add(step, {'loss': 0.5})
    log.sync()
    log.add(2, {'test_accuracy': 0.75})
    expected = [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.5, 'test_accuracy': 0.75}]
    assert strict(path) == expected
    again = MetricsLog(str(path))
    again.resume(2)
    again.add(2, {'test_accuracy': 0.75})
    assert strict(path) == expected
    with pytest.raises(InvalidArgumentError, match='step 1 is before step 2'):
        again.add(1, {'test_accuracy': 0.75})
    again.add(3, {})
    again.flush()
    assert strict(path) == expected + [{'step': 3}]
    assert [each.name for each in tmp_path.iterdir()] == ['metrics.jsonl']


def test_resumes_from_whatever_a_kill_left(tmp_path):
    """Cut anywhere after the restored step's line, the file comes back to that line."""
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    for step in (10, 20, 30, 40):
        log.add(step, {})
    log.flush()
    content = path.read_bytes()
    lines = content.splitlines(True)
    for restored, kept in ((0, 0), (20, 2), (25, 2), (30, 3)):
        expected = b''.join(lines[:kept])
        for cut in range(len(expected), len(content) + 1):
            path.write_bytes(content[:cut])
            log.resume(restored)
            assert path.read_bytes() == expected
    log.add(40, {})
    log.flush()
    assert path.read_bytes() == content


def test_the_file_is_cut_in_one_go(tmp_path, monkeypatch):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')

    def full(source, target):
        assert open(source).read() == '{"step": 1}\n'
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(LogFileError, match=r'metrics.jsonl: No space left on device\. Its lines up '
                                           r'to step 1 are safe\.$'):
        MetricsLog(str(path)).resume(1)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    monkeypatch.undo()
    MetricsLog(str(path)).resume(1)  # what the first attempt left is no obstacle
    assert [each.name for each in tmp_path.iterdir()] == ['metrics.jsonl']
    assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize('tail', [b'\x00\x00\x00', b'{"step": 2, "lo', b'\xff\xfe\n', b'\n\n'])
def test_drops_a_spoilt_last_line(tmp_path, tail):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n' + tail)
    MetricsLog(str(path)).resume(5)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_mends_a_missing_last_line_feed(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    MetricsLog(str(path)).resume(5)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_refuses_a_file_that_is_something_else(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1}\nloss,accuracy\n{"step": 2}\n')
    with pytest.raises(LogFileError, match=r'^line 2 of .*metrics.jsonl is no JSON object with'):
        MetricsLog(str(path)).resume(5)
    assert path.read_text() == '{"step": 1}\nloss,accuracy\n{"step": 2}\n'
    with pytest.raises(LogFileError, match=r'^%s: Is a directory\.$' % tmp_path):
        MetricsLog(str(tmp_path)).resume(0)
    with pytest.raises(LogFileError, match='File exists|Not a directory'):
        MetricsLog(str(path / 'metrics.jsonl')).resume(0)


def test_says_what_is_safe_when_a_line_cannot_be_written(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    log.add(10, {})
    log.flush()
    path.unlink()
    path.mkdir()
    log.add(20, {})
    with pytest.raises(LogFileError, match=r'Its lines up to step 10 are safe\.$'):
        log.flush()


def test_refuses_what_is_no_number(tmp_path):
    log = MetricsLog(str(tmp_path / 'metrics.jsonl'))
    log.resume(0)
    with pytest.raises(InvalidArgumentError, match=r'^image=.* cannot be logged'):
        log.add(1, {'image': np.zeros([2, 2])})


def test_pandas_reads_it(tmp_path):
    pandas = pytest.importorskip('pandas')
    path = tmp_path / 'metrics.jsonl'
    log = MetricsLog(str(path))
    log.resume(0)
    log.add(1, {'loss': 0.5, 'wall_time': 1.76e9})
    log.add(2, {'loss': float('inf'), 'wall_time': 1.76e9 + 1, 'test_accuracy': 0.75})
    log.flush()
    frame = pandas.read_json(str(path), lines=True)
    assert list(frame.step) == [1, 2]
    assert frame.loss[0] == 0.5 and math.isnan(frame.loss[1])
    assert frame.test_accuracy[1] == 0.75 and math.isnan(frame.test_accuracy[0])
    assert frame.non_finite[1] == 'loss=inf'


# ---- the hook -----------------------------------------------------------------------------------

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
        return strict(self.path)


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


def test_a_killed_run_has_the_lines_of_one_that_was_not(tmp_path):
    whole = Job(tmp_path / 'whole', 2, 13).run(13).lines()
    assert [line['step'] for line in whole] == [2, 4, 6, 8, 10, 12, 13]
    for kill_at in (3, 4, 7, 12):
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
    Job(tmp_path, 4, save_steps=4).run(4, killed=True)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('-4')
    assert [line['step'] for line in strict(tmp_path / 'metrics.jsonl')] == [4]


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
    (dict(values={'step': 1}), "'step' is a name that the metrics log uses itself"),
    (dict(batch_size=0), 'batch_size=0'),
    (dict(examples_per_epoch=0), 'examples_per_epoch=0: expected more than 0')])
def test_refuses_arguments_that_make_no_sense(tmp_path, options, message):
    arguments = dict(values={}, global_step=tf.train.get_or_create_global_step(),
                     path=str(tmp_path / 'metrics.jsonl'), batch_size=10, examples_per_epoch=100)
    arguments.update(options)
    with pytest.raises(InvalidArgumentError, match=message):
        MetricsHook(**arguments)
    assert not list(tmp_path.iterdir())
