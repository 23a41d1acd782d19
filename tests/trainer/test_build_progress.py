"""trainer.build_progress: how far a long build is."""

import io

import pytest
import sample_models as samples

from towers import build_towers
from trainer import build_progress
from trainer.build_progress import BuildProgress


class Clock:
    """Seconds that pass by a fixed number each time that one asks."""

    def __init__(self, step):
        self.now, self.step = 0., step

    def monotonic(self):
        self.now += self.step
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_short_build_is_silent():
    stream = io.StringIO()
    progress = BuildProgress(stream)
    for index in range(100):
        progress(index, 100)
    progress.close()
    assert stream.getvalue() == ''


def test_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(build_progress, 'time', Clock(1.))
    stream = io.StringIO()
    progress = BuildProgress(stream, every=500.)
    for index in range(1234):
        progress(index, 1234)
    progress.close()
    assert stream.getvalue() == 'building tower 500 of 1,234\nbuilding tower 1,000 of 1,234\n'


def test_one_line_on_a_terminal(monkeypatch):
    monkeypatch.setattr(build_progress, 'time', Clock(1.))
    stream = Terminal()
    progress = BuildProgress(stream, what='copy')
    for _ in range(3):
        progress(0, 10)
    progress(1, 10)
    progress.close()
    text = stream.getvalue()
    assert text == '\rbuilding copy 1 of 10\rbuilding copy 2 of 10\r%s\r' % (' ' * 21)


@pytest.mark.parametrize('copies', ['clone', 'reuse'])
def test_build_towers_tells_of_each_tower(copies):
    calls = []
    build_towers(samples.linear, samples.vectors(6), samples.sgd(), 3, copies=copies,
                 on_tower=lambda index, count: calls.append((index, count)))
    assert calls == [(0, 3), (1, 3), (2, 3)]


def test_a_stream_that_is_gone():
    class Gone(io.StringIO):
        tried = 0

        def write(self, text):
            self.tried += 1
            raise BrokenPipeError(32, 'Broken pipe')
    stream = Gone()
    progress = BuildProgress(stream, every=0.)
    built = build_towers(samples.linear, samples.vectors(6), samples.sgd(), 3, on_tower=progress)
    progress.close()
    assert len(built.towers) == 3
    assert stream.tried == 1  # and is left alone from then on
