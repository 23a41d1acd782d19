"""The view of a run: what is on an 80-column terminal, and which lines go into a pipe."""

import fcntl
import io
import os
import re
import struct
import sys
import termios
import threading

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.run import step_clock
from towers.run.step_clock import StepCounts
from trainer import progress
from trainer.progress import ProgressHook, Throughput


class FakeTime:
    """Stands for the module `time`; tests move `now`."""
    now = 1000.

    def perf_counter(self):
        return self.now


@pytest.fixture(autouse=True)
def time(monkeypatch):
    fake = FakeTime()
    for module in (step_clock, progress):
        monkeypatch.setattr(module, 'time', fake)
    monkeypatch.setenv('TERM', 'xterm')
    return fake


class Terminal:
    """A pseudo-terminal, and what its screen shows."""

    def __init__(self, columns, rows=24):
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))
        self.stream = io.open(slave, 'w', encoding='utf-8')
        self._received = b''
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        try:
            while True:
                self._received += os.read(self._master, 1024)
        except OSError:  # what Linux raises for a terminal that nobody has open any more
            pass

    def close(self):
        """Everything that was written, with the line feeds as they were written."""
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return self._received.decode('utf-8').replace('\r\n', '\n')


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


def training(hook_of, number, time, seconds=0.5, start=0, each=None):
    """Runs a hook for so many steps of so many seconds; the loss in step s is 2 / s."""
    global_step = tf.train.get_or_create_global_step()
    loss = 2. / tf.cast(global_step + 1, tf.float32)
    with tf.control_dependencies([loss]):
        train_op = tf.assign_add(global_step, 1).op
    hook = hook_of([('loss', loss), ('lr', tf.constant(0.001))], global_step)
    scaffold = tf.train.Scaffold(init_fn=lambda _, session: global_step.load(start, session))
    with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(scaffold), [hook]) as session:
        for step in range(start + 1, start + number + 1):
            time.now += seconds
            session.run(train_op)
            if each is not None:
                each(hook, step)
    return hook


def test_plain_lines_also_of_a_loop_that_goes_on_after_the_last_step(time):
    stream = io.StringIO()
    hook = training(lambda values, global_step: ProgressHook(
        values, StepCounts(global_step, 20, 80, 5), log_every=4, stream=stream,
        input_wait=tf.constant(.05)), 13, time)
    hook.evaluated(13, {'loss': 2.})
    hook.evaluated(5, {'loss': 3.})
    assert stream.getvalue() == (
        'step 1/5  loss 2.000  lr 0.001  epoch 0.2\n'
        'step 4/5  loss 0.5000  lr 0.001  0:00 left  40 images/s  input wait 10%  epoch 1.0\n'
        'step 5/5  loss 0.4000  lr 0.001  0:00 left  40 images/s  input wait 10%  epoch 1.2\n'
        'step 8  loss 0.2500  lr 0.001  40 images/s  input wait 10%  epoch 2.0\n'
        'step 12  loss 0.1667  lr 0.001  40 images/s  input wait 10%  epoch 3.0\n'
        'step 13  test loss 2\n'
        'step 5/5  test loss 3\n')
    assert hook.throughput == Throughput(220, 5.5)  # 11 steps after the second


def test_a_resumed_run_goes_on_counting(time):
    stream = io.StringIO()
    hook = training(lambda values, global_step: ProgressHook(
        values, StepCounts(global_step, 20, 80, 1000), log_every=100, stream=stream), 2, time,
        start=298)
    assert hook.throughput is None  # no step after the second yet
    assert [line.split('  ')[0] for line in stream.getvalue().splitlines()] == [
        'step 299/1000', 'step 300/1000']


def test_evaluations_and_checkpoints_are_left_out_of_the_rates(time):
    stream = io.StringIO()

    def stop(hook, step):
        if step in (3, 5):
            time.now += 30.
            hook.evaluated(step, {'accuracy': 0.875, 'loss': 0.25, 'examples': 1797}, 30.)
            hook.listener.before_save(None, step)
            time.now += 7.
            hook.listener.after_save(None, step)
    hook = training(lambda values, global_step: ProgressHook(
        values, StepCounts(global_step, 20, 80, 8), log_every=4, stream=stream), 8, time, each=stop)
    assert hook.throughput == Throughput(120, 3.)
    lines = stream.getvalue().splitlines()
    assert lines[1] == 'step 3/8  test accuracy 0.875, loss 0.25 on 1,797 examples'
    assert ['40 images/s' in line for line in lines] == [False, False, True, False, True]


def test_runs_that_are_no_steps_are_not_shown_as_steps(time):
    """As in a program that adds gradients up over three runs: here all of them belong to step 1."""
    stream = io.StringIO()
    hook = ProgressHook({}, StepCounts(tf.train.get_or_create_global_step(), 20, 80, 100),
                        log_every=4, stream=stream)
    with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(), [hook]) as session:
        for _ in range(12):
            session.run(tf.train.get_global_step())
    assert set(stream.getvalue().splitlines()) == {'step 0/100  epoch 0.0'}


def test_rates_are_of_the_last_seconds(time):
    stream = io.StringIO()

    def slow_down(hook, step):
        if step == 40:
            time.now += 100.  # something else; then steps of 5 s instead of 0.5
        if step >= 40:
            time.now += 4.5
    training(lambda values, global_step: ProgressHook(
        values, StepCounts(global_step, 20, 80, 60), log_every=10, stream=stream), 60, time,
        each=slow_down)
    rates = re.findall(r'([\d:]+) left  ([\d,.]+) images/s', stream.getvalue())
    assert rates == [('0:25', '40'), ('0:20', '40'), ('0:15', '40'), ('0:10', '40'),
                     ('2:30', '1.3'), ('0:00', '4')]


def on(terminal):
    """The hook of a run of 20 steps, of 20 of 80 examples each, on a terminal."""
    return lambda values, global_step: ProgressHook(
        values, StepCounts(global_step, 20, 80, 20), stream=terminal.stream)


def test_one_bar_on_80_columns_and_other_lines_above_it(time):
    terminal = Terminal(80)

    def say(hook, step):
        if step == 3:
            hook.evaluated(3, {'accuracy': 0.5})
        if step == 5:
            hook.write('\nSIGTERM: finishing this step and saving\n')
    training(on(terminal), 20, time, each=say)
    lines = screen(terminal.close(), 80)
    assert lines[:2] == ['step 3/20  test accuracy 0.5', 'SIGTERM: finishing this step and saving']
    assert re.match(r'20/20 \|█{5,}\| loss 0.1000 lr 0.001 0:00 left 40 images/s epoch 5.0$',
                    lines[2])
    assert lines[3:] == [''] and len(lines[2]) == 79  # tqdm leaves one column free


@pytest.mark.parametrize('columns, expected', [
    (200, r' 7/20 \|█+.? +\| loss 0.2857 lr 0.001 0:06 left 40 images/s epoch 1.8$'),
    (40, r' 7/20 \|.\| loss 0.2857 lr 0.001 0:06 lef$')])
@pytest.mark.slow
def test_what_matters_least_is_cut_off_on_a_narrow_terminal(time, columns, expected):
    terminal = Terminal(columns)
    training(on(terminal), 7, time)
    assert re.match(expected, screen(terminal.close(), columns)[0])


def test_an_error_begins_on_a_line_of_its_own(time):
    terminal = Terminal(80)
    hooks = []

    def fail(hook, step):
        hooks.append(hook)
        if step == 3:
            raise RuntimeError()
    with pytest.raises(RuntimeError):
        training(on(terminal), 6, time, each=fail)
    hooks[0].close()
    hooks[0].close()
    terminal.stream.write('the error\n')
    lines = screen(terminal.close(), 80)
    assert lines[0].startswith(' 3/20') and lines[1:] == ['the error', '']


def test_no_bar_on_a_dumb_terminal(time, monkeypatch):
    monkeypatch.setenv('TERM', 'dumb')
    terminal = Terminal(80)
    training(on(terminal), 3, time)
    assert terminal.close().splitlines()[0] == (
        'step 1/20  loss 2.000  lr 0.001  epoch 0.2')


# ---- where to ------------------------------------------------------------------------------------

@pytest.mark.parametrize('out, error, chosen', [
    (True, True, 'error'), (False, True, 'out')])
def test_lines_go_to_standard_output_and_a_bar_to_standard_error(time, monkeypatch, out, error,
                                                                 chosen):
    class Stream(io.StringIO):
        def __init__(self, on_terminal):
            super(Stream, self).__init__()
            self.isatty = lambda: on_terminal
    streams = {'out': Stream(out), 'error': Stream(error)}
    monkeypatch.setattr(sys, 'stdout', streams['out'])
    monkeypatch.setattr(sys, 'stderr', streams['error'])
    monkeypatch.setenv('TERM', 'dumb')  # lines in either case
    training(lambda values, global_step: ProgressHook(
        values, StepCounts(global_step, 20, 80, 2), log_every=1), 2, time)
    assert 'step 2/2' in streams[chosen].getvalue()
    assert [name for name, stream in streams.items() if stream.getvalue()] == [chosen]


def test_values_and_numbers_that_cannot_be_shown():
    step = tf.train.get_or_create_global_step()
    value, train_op = tf.placeholder_with_default(tf.constant([1., 2.]), None), step.assign_add(1)
    hook = ProgressHook({'v': value}, StepCounts(step, 8, 8, 3), log_every=1)
    with pytest.raises(InvalidArgumentError, match=r"the value 'v' of a ProgressHook has the shape "
                                                   r'\[2\]: expected one number\.'):
        with tf.train.MonitoredTrainingSession(hooks=[hook]) as session:
            session.run(train_op)
