"""trainer.output_stream: output that may be lost."""

import errno
import io
import os
import signal

import pytest

from gone_stream import Gone
from trainer.process import OutputStream


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


def test_what_is_still_held_of_a_lost_stream_goes_nowhere():
    """Python writes it out when the stream is closed, or the process ends: once more in vain."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream, errors = open(write_end, 'w'), []
    output = OutputStream(stream, errors.append)
    output.write('a')
    output.flush()
    assert [error.errno for error in errors] == [errno.EPIPE]
    stream.close()
