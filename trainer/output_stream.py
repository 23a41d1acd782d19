"""Standard output that can be lost: `train.py | head -3`, a closed terminal, a full disk.

A long run then saves and ends in good order, instead of failing in the line that it prints.
"""

import errno
import os
import signal
import sys


class OutputStream:
    """A text stream whose text is discarded from the first write on that fails.

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
            process gets SIGHUP, as of a closed terminal, at which a run saves and ends.
        """
        self.lost = None
        self._on_lost = on_lost or _stop
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

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
            try:  # since Python writes its buffer at exit
                with open(os.devnull, 'w') as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())
            except (OSError, ValueError):
                pass  # no file of the operating system
            self._on_lost(error)


def _stop(error):
    """Stops the process as a terminal that is closed does; says a reason that is not clear."""
    if error.errno not in (errno.EPIPE, errno.EIO):
        sys.stderr.write('train.py: standard output cannot be written: %s\n' % error.strerror)
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGHUP)


def make_output_lasting():
    """Makes `sys.stdout` and `sys.stderr` `OutputStream`s."""
    sys.stdout = OutputStream(sys.stdout)
    sys.stderr = OutputStream(sys.stderr, on_lost=lambda error: None)


def progress_stream():
    """The stream for progress: standard error if that and standard output are terminals, as
    progress bars use it; else standard output."""
    both = sys.stdout, sys.stderr
    return sys.stderr if all(stream and stream.isatty() for stream in both) else sys.stdout
