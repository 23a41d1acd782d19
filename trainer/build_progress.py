"""Shows the progress of a long build: `building tower 17 of 1,000`."""

import time

from trainer.output_stream import OutputStream, progress_stream


class BuildProgress:
    """Shows which tower is built, for `build_towers(on_tower=…)`.

    On a terminal one line that is overwritten, from the third second of the build on; elsewhere a
    line now and then.
    """

    _PATIENCE, _REDRAW_SECONDS = 3., 0.1  # on a terminal

    def __init__(self, stream=None, every=10., what='tower'):
        """
        Args:
          stream: text stream to write to; None: as in `ProgressHook`.
          every: where the stream is no terminal, seconds to the first line and between lines.
          what: a word for what is built: `'building <what> 17 of 1,000'`.
        """
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        on_terminal = self._stream.isatty()
        self._every = self._REDRAW_SECONDS if on_terminal else every
        self._what = what
        self._next = time.monotonic() + (self._PATIENCE if on_terminal else every)
        self._width = 0

    def __call__(self, index, count):
        """Called before tower `index` (from 0) of `count` is built."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        text = 'building {} {:,d} of {:,d}'.format(self._what, index + 1, count)
        if self._stream.isatty():
            self._stream.write('\r' + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + '\n')
        self._stream.flush()

    def close(self):
        """Clears the line on a terminal."""
        if self._width:
            self._stream.write('\r%s\r' % (' ' * self._width))
            self._stream.flush()
            self._width = 0
