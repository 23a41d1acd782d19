"""trainer.exit_status: of a program whose output is lost, whose run fails, that is interrupted."""

import errno
import signal
import sys

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
from gone_stream import Gone
import towers
from trainer import exit_status
from trainer.exit_status import lasting_output, run, status_of_signal
from trainer.flags import FLAGS


@pytest.fixture
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        yield


def ended(action, number=errno.EPIPE, monkeypatch=None):
    """Exit status and lines said, of a program whose output is lost with the second write."""
    said, out = [], Gone(number)
    monkeypatch.setattr(sys, 'stdout', out)
    monkeypatch.setattr(exit_status, 'say', said.append)
    with pytest.raises(SystemExit) as caught, lasting_output():
        action()
    assert sys.stdout is out
    return caught.value.code, said


def test_exit_statuses(monkeypatch):
    def twice():
        sys.stdout.write('a')
        sys.stdout.write('b')

    def exits(status):
        def action():
            sys.stdout.tell_of_loss(lambda error: None)
            twice()
            sys.exit(status)
        return action
    full = 'standard output cannot be written: No space left on device'
    for action, number, expected in (
            (lambda: sys.stdout.write('a'), errno.EPIPE, (0, [])),
            (lambda: sys.exit(3), errno.EPIPE, (3, [])),
            (twice, errno.EPIPE, (128 + signal.SIGPIPE, [])),
            (twice, errno.EIO, (128 + signal.SIGPIPE, [])),
            (twice, errno.ENOSPC, (1, [full])),
            (exits(0), errno.EPIPE, (128 + signal.SIGPIPE, [])),
            (exits(128 + signal.SIGPIPE), errno.ENOSPC, (1, [full])),
            (exits(128 + signal.SIGHUP), errno.EIO, (128 + signal.SIGHUP, []))):
        assert ended(action, number, monkeypatch) == expected


def test_an_error_of_the_program_comes_through(monkeypatch):
    former = sys.stdout
    with pytest.raises(FloatingPointError), lasting_output():
        raise FloatingPointError()
    assert sys.stdout is former


# ---- errors and signals --------------------------------------------------------------------------

def raises(error):
    def main(unused_argv):
        raise error
    return main


@pytest.mark.parametrize('error, status, said', [
    (towers.CheckpointError('damaged'), 1, 'damaged'),
    (datasets.BadExampleError('a.jpg is empty'), 1, 'a.jpg is empty'),
    (towers.InvalidArgumentError("precision='fp9': expected\none"), 2,
     '--precision=fp9: expected one'),
    (tf.errors.ResourceExhaustedError(None, None, 'OOM when allocating tensor with shape[3,4] and'),
     1, 'there is not enough memory: OOM when allocating tensor with shape[3,4]. Give a smaller '
     '--batch_size or --image_size, or more towers on other devices.'),
    (KeyboardInterrupt(), 130, None)])
def test_a_users_mistake_is_one_line(error, status, said, parsed, capsys):
    if status == 2:
        with pytest.raises(SystemExit) as ended_with:
            run(raises(error), [])
        assert ended_with.value.code == 2
    else:
        assert run(raises(error), []) == status
    out, err = capsys.readouterr()
    assert (out, err) == ('', '' if said is None else 'train.py: %s\n' % said)


def test_other_errors_come_through(parsed):
    for error in (KeyError('w'), tf.errors.InternalError(None, None, 'of the model'),
                  towers.OutputLostError('gone')):
        with pytest.raises(type(error)) as caught:
            run(raises(error), [])
        assert caught.value is error


def test_the_status_of_a_signal():
    assert [status_of_signal(number) for number in (None, signal.SIGTERM)] == [0, 143]
    assert run(lambda argv: len(argv), ['a', 'b']) == 2
