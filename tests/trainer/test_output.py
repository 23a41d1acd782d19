"""trainer.output: what becomes of output whose reader has gone."""

import errno
import io
import os
import signal

import pytest

from trainer.output import OutputStream


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
