"""Standard output that can be lost: `train.py | head -3`, a closed terminal, a full disk.

A long run then saves and ends in good order, instead of failing in the line that it prints.
"""

import os
import sys

from towers.errors import OutputLostError


class OutputStream:
    """A text stream whose first failed write is reported once, and whose later text is discarded.

    All other attributes are those of the stream. Several of these may write to one stream, such as
    a bar and plain lines.

    Attributes:
      lost: the `OSError` of the write that failed; or None.
    """

    def __init__(self, stream, on_lost=None):
        """
        Args:
          stream: a text stream; None, Python's value for a closed one, discards all text.
          on_lost: function that is called with the error of the write that failed, once; None: the
            write raises `OutputLostError`.
        """
        self.lost = None
        self._on_lost = on_lost
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def tell_of_loss(self, on_lost):
        """Calls this function in place of `on_lost` from now on."""
        self._on_lost = on_lost

    def write(self, text):
        """Writes a text; returns its length, also where it is discarded.

        What the stream's encoding lacks, such as a file's name that is no UTF-8, is escaped.
        """
        try:
            self._attempt('write', text)
        except UnicodeEncodeError:  # before any of it is written
            encoding = self._stream.encoding
            self._attempt('write', text.encode(encoding, 'backslashreplace').decode(encoding))
        return len(text)

    def writelines(self, lines):
        """Writes several texts."""
        self.write(''.join(lines))

    def flush(self):
        """Flushes the stream."""
        self._attempt('flush')

    def isatty(self):
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def _attempt(self, method, *arguments):
        """Calls a method of the stream; an `OSError` makes it lost."""
        if self._stream is None or self.lost is not None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            self.lost = error
            self._send_nowhere()
            if self._on_lost is None:
                raise OutputLostError('standard output cannot be written: %s' % error.strerror)
            self._on_lost(error)

    def _send_nowhere(self):
        """Points the stream's descriptor at /dev/null, since Python writes its buffer at exit."""
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass  # no file of the operating system


def progress_stream():
    """The stream for progress: standard error if that and standard output are terminals, as
    progress bars use it; else standard output."""
    both = sys.stdout, sys.stderr
    return sys.stderr if all(stream and stream.isatty() for stream in both) else sys.stdout
