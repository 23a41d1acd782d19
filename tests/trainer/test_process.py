"""trainer.process: the exit status of a program; output that may be lost."""

import errno
import io
import os
import signal

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer.flags import FLAGS
from trainer.process import OutputStream, run


class Gone(io.StringIO):
    """A stream whose reader has gone: it fails from the second write on."""

    def __init__(self, number=errno.EPIPE):
        super().__init__()
        self.number, self.writes = number, 0

    def write(self, text):
        self.writes += 1
        if self.writes > 1:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.fixture
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        yield


def raises(error):
    def main(unused_argv):
        raise error
    return main


@pytest.mark.parametrize('error, status, said', [
    (towers.CheckpointError('damaged'), 1, 'damaged'),
    (datasets.BadExampleError('a.jpg is empty'), 1, 'a.jpg is empty'),
    (towers.InputError('the test set has no batch'), 1, 'the test set has no batch'),
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
    for error in (KeyError('w'), tf.errors.InternalError(None, None, 'of the model')):
        with pytest.raises(type(error)) as caught:
            run(raises(error), [])
        assert caught.value is error


@pytest.mark.parametrize('encoding, written', [
    ('utf-8', b'\xc3\xbc m\\udcfc\n'), ('ascii', b'\\xfc m\\udcfc\n')])
def test_what_the_encoding_lacks_is_escaped(encoding, written):
    stream = io.TextIOWrapper(io.BytesIO(), encoding, 'strict')
    output = OutputStream(stream)
    print('\xfc m\udcfc', file=output, flush=True)
    assert stream.buffer.getvalue() == written


def test_a_loss_is_told_once_and_the_rest_goes_nowhere():
    errors, stream = [], Gone()
    output = OutputStream(stream, errors.append)
    for text in 'abcd':
        assert output.write(text) == 1
    assert stream.getvalue() == 'a' and stream.writes == 2
    assert [error.errno for error in errors] == [errno.EPIPE]


def test_without_anybody_to_tell_the_process_is_hung_up(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(os, 'kill', lambda pid, number: sent.append(number))
    for number, said in ((errno.EPIPE, ''), (errno.ENOSPC, 'train.py: standard output cannot be '
                                             'written: No space left on device\n')):
        output = OutputStream(Gone(number))
        for text in 'abc':
            output.write(text)
        assert capsys.readouterr().err == said
    assert sent == [signal.SIGHUP] * 2
