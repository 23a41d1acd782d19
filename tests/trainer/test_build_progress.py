"""trainer.build_progress: that a long build goes on."""

import io
import time

from trainer.build_progress import BuildProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, seconds, **options):
    with BuildProgress('4 towers', stream, **options):
        time.sleep(seconds)
    return stream.getvalue()


def test_a_short_build_is_silent():
    assert shown(io.StringIO(), 0.) == shown(Terminal(), 0.) == ''


def test_lines_where_there_is_no_terminal():
    lines = shown(io.StringIO(), .3, patience=.02).splitlines()
    assert len(lines) > 1 and set(lines) == {'building 4 towers, 0 s'}


def test_one_line_on_a_terminal_which_is_cleared():
    text = shown(Terminal(), .3, patience=.02)
    assert text.startswith('\rbuilding 4 towers, 0 s\r') and text.endswith(
        '\r%s\r' % (' ' * len('building 4 towers, 0 s')))


def test_a_stream_that_is_gone_is_left_alone():
    class Gone(io.StringIO):
        tried = 0

        def write(self, text):
            self.tried += 1
            raise BrokenPipeError(32, 'Broken pipe')
    stream = Gone()
    shown(stream, .2, patience=.02)
    assert stream.tried == 1
