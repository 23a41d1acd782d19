"""The view of a run, on a terminal and in a pipe; the lines of metrics.jsonl, exact over kills."""

import csv
import fcntl
import io
import json
import os
import re
import struct
import termios

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import NonFiniteError
from towers.nonfinite import checked_loss
from towers.run.training_session import training_session
from trainer import progress, speed
from trainer.progress import ProgressHook, Throughput
from trainer.speed import StepCounts


class FakeTime:
    """Stands for the module `time`; tests move `now`."""
    now = 1000.

    def perf_counter(self):
        return self.now

    def time(self):
        return 1.8e9


@pytest.fixture(autouse=True)
def time(monkeypatch):
    fake = FakeTime()
    for module in (speed, progress):
        monkeypatch.setattr(module, 'time', fake)
    monkeypatch.setenv('TERM', 'xterm')
    return fake


def screen(written, columns):
    """The lines of a screen after all of `written`, which may not make a line wrap."""
    lines = []
    for line in written.split('\n'):
        shown = ''
        for overwriting in line.split('\r'):
            assert len(overwriting) <= columns
            shown = overwriting + shown[len(overwriting):]
        lines.append(shown.rstrip())
    return lines


class Training:
    """Steps of half a second, of 20 of 80 examples each; the loss in step s is 2 / s."""

    def __init__(self, folder, time, last=20, log_every=4, save_steps=None, **options):
        self.time, self.path, self.graph = time, folder / 'metrics.jsonl', tf.Graph()
        with self.graph.as_default():
            self.step = tf.train.get_or_create_global_step()
            examples = tf.get_variable('examples', [], tf.int64, tf.zeros_initializer())
            loss = 2. / tf.cast(self.step + 1, tf.float32)
            with tf.control_dependencies([loss]):
                self.train_op = tf.group(tf.assign_add(self.step, 1), tf.assign_add(examples, 20))
            waited = tf.constant(options.pop('waited')) if 'waited' in options else None
            self.hook = ProgressHook(
                [('loss', loss), ('learning_rate', tf.constant(0.001))],
                StepCounts(self.step, 20, 80, last, examples), str(self.path), log_every,
                input_wait=waited, **options)
            self.hooks = [self.hook]
            if save_steps:
                self.hooks.append(tf.train.CheckpointSaverHook(
                    str(folder), save_steps=save_steps, listeners=[self.hook.listener]))
        self.creator = tf.train.ChiefSessionCreator(
            checkpoint_dir=str(folder) if save_steps else None)

    def run(self, number, each=lambda hook, step: None, killed=False):
        """Runs so many steps; a killed session is left without its end."""
        try:
            with self.graph.as_default(), tf.train.MonitoredSession(
                    self.creator, self.hooks) as session:
                for step in range(1, number + 1):
                    self.time.now += 0.5
                    session.run(self.train_op)
                    each(self.hook, step)
                if killed:
                    raise Killed()
            self.hook.listener.end(None, number)  # as the hook that saves, at last
        except Killed:
            pass
        return self.hook

    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class Killed(Exception):
    pass


def results(**values):
    return dict(values, examples=1797)


def test_plain_lines_and_those_of_the_log_at_each_multiple_and_the_last_step(time, tmp_path):
    stream = io.StringIO()
    training = Training(tmp_path, time, 7, waited=.05, stream=stream)
    training.hook.listener.before_save(None, 0)  # as a saver does that is before it in the list
    hook = training.run(7)
    assert training.lines() == [{
        'step': step, 'epoch': step / 4, 'examples': 20 * step,
        'loss': pytest.approx(2 / step), 'learning_rate': 0.001, 'images_per_second': 40.,
        'input_wait': pytest.approx(.1), 'wall_time': 1.8e9} for step in (4, 7)]
    hook.evaluated(7, results(loss=2.))
    assert stream.getvalue() == (
        'step 1/7  loss 2.000  lr 0.001  epoch 0.2\n'
        'step 4/7  loss 0.5000  lr 0.001  0:02 left  40 images/s  input wait 10%  epoch 1.0\n'
        'step 7/7  loss 0.2857  lr 0.001  0:00 left  40 images/s  input wait 10%  epoch 1.8\n'
        'step 7/7  test loss 2 on 1,797 examples\n')
    assert hook.throughput == Throughput(100, 2.5)  # 5 steps after the second
    training.hook.listener.end(None, 7)
    with open(str(tmp_path / 'metrics.csv'), newline='') as table:
        rows = list(csv.DictReader(table))
    assert [(row['step'], row['examples'], row['test_loss']) for row in rows] == [
        ('4', '80', ''), ('7', '140', '2.0')]
    assert float(rows[0]['loss']) == 0.5


def test_evaluations_and_checkpoints_are_left_out_of_the_rates(time, tmp_path):
    stream = io.StringIO()

    def stop(hook, step):
        if step in (3, 5):
            time.now += 30.
            hook.evaluated(step, results(accuracy=0.875, loss=0.25), 30.)
            hook.listener.before_save(None, step)
            time.now += 7.
            hook.listener.after_save(None, step)
    training = Training(tmp_path, time, 8, stream=stream)
    assert training.run(8, stop).throughput == Throughput(120, 3.)
    lines = stream.getvalue().splitlines()
    assert lines[1] == 'step 3/8  test accuracy 0.875, loss 0.25 on 1,797 examples'
    assert ['40 images/s' in line for line in lines] == [False, False, True, False, True]
    assert [line.get('images_per_second') for line in training.lines()] == [None, 40., None, 40.]


def test_one_bar_on_80_columns_and_other_lines_above_it(time, tmp_path):
    def say(hook, step):
        if step == 3:
            hook.evaluated(3, results(accuracy=0.5))
        if step == 5:
            hook.write('\nSIGTERM: finishing this step and saving\n')
    terminal, end_of_program = os.openpty()
    fcntl.ioctl(end_of_program, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
    with io.open(end_of_program, 'w', encoding='utf-8') as stream:
        Training(tmp_path, time, stream=stream).run(20, say)
        stream.flush()
        received = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert b'it/s' not in received  # of tqdm's own form
    assert re.match(r'\s*0/20 \|\s*\| first step: the graph is made ready epoch 0.0',
                    received.decode('utf-8').lstrip('\r'))
    lines = screen(received.decode('utf-8').replace('\r\n', '\n'), 80)
    assert lines[:2] == ['step 3/20  test accuracy 0.5 on 1,797 examples',
                         'SIGTERM: finishing this step and saving']
    assert re.match(r'20/20 \|█{5,}\| loss 0.1000 lr 0.001 0:00 left 40 images/s epoch 5.0$',
                    lines[2])
    assert lines[3:] == [''] and len(lines[2]) == 79  # tqdm leaves one column free


# ---- metrics.jsonl -------------------------------------------------------------------------------

def test_the_line_is_there_before_the_checkpoint(tmp_path, time):
    """Step 4 is saved and has a line; the kill comes before anything else is done."""
    training = Training(tmp_path, time, save_steps=4)
    training.run(4, killed=True)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('-4')
    assert [line['step'] for line in training.lines()] == [4]



@pytest.mark.slow
def test_a_new_run_where_there_was_one_is_told_and_a_killed_one_is_none(tmp_path, time):
    stream = io.StringIO()

    def run(number, **options):
        Training(tmp_path, time, log_every=1, save_steps=100, stream=stream).run(number, **options)
    run(3, killed=True)
    run(2)  # from the save of step 0
    assert ('cut the lines of steps 1 to 2 from %s/metrics.jsonl: those steps are done again\n'
            % tmp_path) in stream.getvalue()
    for path in tmp_path.iterdir():
        if path.name != 'metrics.jsonl':
            path.unlink()
    run(1)
    assert ('{0} is of an earlier run, whose checkpoints are gone: renamed to {0}.1\n'.format(
        tmp_path / 'metrics.jsonl')) in stream.getvalue()
    assert (tmp_path / 'metrics.jsonl.1').read_text().count('\n') == 2


def test_the_line_of_the_step_before_one_that_fails_is_in_the_log(tmp_path):
    step = tf.train.get_or_create_global_step()
    loss = tf.where(tf.equal(step, 8), float('nan'), 1.)
    with tf.control_dependencies([checked_loss(loss, 1)]):
        train_op = tf.assign_add(step, 1).op
    hook = ProgressHook([('loss', loss)], StepCounts(step, 1, 1, 20, step),
                        str(tmp_path / 'metrics.jsonl'), 4, io.StringIO())
    with pytest.raises(NonFiniteError, match='is NaN in step 9'):
        with training_session(str(tmp_path), step, [hook]) as session:
            for _ in range(20):
                session.run(train_op)
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [4, 8]
