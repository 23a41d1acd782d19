"""Signals: the first one ends the run in good order, the second one at once."""

import io
import os
import signal
import threading
import time

import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

from towers.run.checkpoint_hook import CheckpointHook
from towers.errors import InvalidArgumentError
from towers.run.stopping import StopOnSignalHook

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers():
    """Handlers of the program's own, which are to be there again in the end."""
    def own(unused_number, unused_frame):
        raise AssertionError('a signal that the hook did not catch')
    former = [signal.signal(number, own) for number in SIGNALS]
    yield own
    for number, handler in zip(SIGNALS, former):
        signal.signal(number, handler)


def installed():
    return [signal.getsignal(number) for number in SIGNALS]


def run(hook, each_step, before=(), after=(), steps=50):
    """Calls `each_step(step)` after each step until the session stops; returns the last step."""
    step = tf.train.get_or_create_global_step()
    train_op = tf.assign_add(step, 1)
    done = 0
    with tf.train.MonitoredSession(hooks=list(before) + [hook] + list(after)) as session:
        while done < steps and not session.should_stop():
            done = int(session.run(train_op))
            each_step(done)
    return done


@pytest.mark.parametrize('number, name', first_fast(1, [
    (signal.SIGTERM, 'SIGTERM'), (signal.SIGHUP, 'SIGHUP')]))
def test_the_first_one_finishes_the_step_and_saves(tmp_path, handlers, number, name):
    said = io.StringIO()
    hook = StopOnSignalHook(said)

    def each_step(step):
        assert handlers not in installed()
        if step == 3:
            os.kill(os.getpid(), number)
    saver = CheckpointHook(str(tmp_path), tf.train.get_or_create_global_step(), save_steps=100)
    # Told between two steps, it does the one that comes next and stops.
    assert run(hook, each_step, before=[saver]) == 4
    assert hook.received == number
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('model.ckpt-4')
    assert installed() == [handlers] * 3
    assert said.getvalue() == ('\n%s: finishing this step and saving; once more to stop at once\n'
                               % name)


def test_a_signal_while_other_hooks_end_is_held_until_they_have_ended(handlers):
    class Saver(tf.train.SessionRunHook):
        done = False

        def end(self, session):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            self.done = True
    saver, hook = Saver(), StopOnSignalHook(io.StringIO())
    assert run(hook, lambda step: None, before=[saver], steps=2) == 2
    assert saver.done and hook.received == signal.SIGTERM
    assert installed() == [handlers] * 3


def test_a_second_one_ends_a_step_that_hangs(monkeypatch, handlers):
    """The step is in TensorFlow, where no handler of Python's runs before it has ended."""
    ended, said, go_on = [], io.StringIO(), threading.Event()

    def exit_at_once(status):
        ended.append((status, said.getvalue()))
        if threading.current_thread() is not threading.main_thread():
            go_on.set()
            raise SystemExit  # of the thread, in place of the process
    monkeypatch.setattr(os, '_exit', exit_at_once)

    def send_both():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
    hook = StopOnSignalHook(said)

    def hang():
        threading.Thread(target=send_both).start()
        assert go_on.wait(30)
        return 1.
    hanging = tf.py_func(hang, [], tf.float64, stateful=True)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        session.run(hanging)
    # The line about the first one was there by then.
    assert ended[0] == (128 + signal.SIGINT, '\nSIGTERM: finishing this step and saving; once more '
                        'to stop at once\n')
    assert installed() == [handlers] * 3


def test_the_same_signal_passed_on_by_another_program_is_no_second_one(monkeypatch):
    ended, said = [], io.StringIO()
    monkeypatch.setattr(os, '_exit', lambda status: ended.append(status))
    monkeypatch.setattr(StopOnSignalHook, '_ECHO_SECONDS', 60)  # however busy the machine is

    def each_step(step):
        if step == 2:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.02)  # so that the kernel does not make one of them
    hook = StopOnSignalHook(said)
    assert run(hook, each_step) == 3
    assert ended == [] and hook.received == signal.SIGTERM
    assert said.getvalue().count('SIGTERM') == 1


@pytest.mark.slow
def test_a_forked_process_has_the_former_handlers(handlers):
    """A signal to one, as a pool sends its workers, is none to the run."""
    hook, found = StopOnSignalHook(io.StringIO()), []

    def each_step(step):
        if step == 2:
            pid = os.fork()
            if pid == 0:
                try:
                    right = installed() == [handlers] * 3 and signal.set_wakeup_fd(-1) == -1
                    for number in SIGNALS:
                        signal.signal(number, lambda *unused: None)
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGINT)
                finally:
                    os._exit(0 if right else 1)
            found.append(os.waitpid(pid, 0)[1])
            time.sleep(0.05)
    assert run(hook, each_step, steps=4) == 4
    assert found == [0]
    assert hook.received is None


def test_a_hangup_that_nohup_ignores_is_none():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run(StopOnSignalHook(io.StringIO()), lambda step: os.kill(os.getpid(), signal.SIGHUP),
               steps=3) == 3
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_two_in_a_session_and_one_in_another_thread_are_refused(handlers):
    other, errors = StopOnSignalHook(), []
    with pytest.raises(InvalidArgumentError, match='the session has two StopOnSignalHooks'):
        run(StopOnSignalHook(), lambda step: None, before=[other])
    other.restore()
    assert installed() == [handlers] * 3

    def in_thread():
        with tf.Graph().as_default(), pytest.raises(InvalidArgumentError, match='main thread only'):
            run(StopOnSignalHook(), lambda step: None)
        errors.append('refused')
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert errors and installed() == [handlers] * 3
