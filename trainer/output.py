"""Standard output that can be lost, as in `train.py | head -3`, or when a terminal is closed."""

import errno
import os
import signal
import sys
import typing


class OutputStream:
    """A text stream whose text is discarded from the first write on that fails.

    `train.py | head -3`, a closed terminal, a full disk: a long run then saves and ends in good
    order, instead of failing in the line that it prints.

    All other attributes are those of the stream. Several of these may write to one stream, such as
    a bar and plain lines.
    """

    def __init__(self, stream: typing.TextIO,
                 on_lost: typing.Optional[typing.Callable[[OSError], None]] = None):
        """
        Args:
          stream: where the text goes.
          on_lost: function that is called with the error of the write that failed, once; None: the
            process gets SIGHUP, as of a closed terminal, at which a run saves and ends.
        """
        self._stream = stream
        self._on_lost = on_lost or _stop
        self._is_lost = False

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text; returns its length, also where it is discarded.

        What the stream's encoding lacks, such as a file's name that is no UTF-8, is escaped.
        """
        try:
            self._attempt(self._stream.write, text)
        except UnicodeEncodeError:  # before any of it is written
            encoding = self._stream.encoding
            escaped = text.encode(encoding, 'backslashreplace').decode(encoding)
            self._attempt(self._stream.write, escaped)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self._attempt(self._stream.flush)

    def _attempt(self, function: typing.Callable, *arguments):
        """Calls a function of the stream, whose `OSError` makes it lost."""
        if self._is_lost:
            return
        try:
            function(*arguments)
        except OSError as error:
            self._is_lost = True
            try:  # since Python writes its buffer at exit
                with open(os.devnull, 'w') as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())
            except (OSError, ValueError):
                pass  # no file of the operating system
            self._on_lost(error)


def _stop(error: OSError):
    """Stops the process as a terminal that is closed does; says a reason that is not clear."""
    if error.errno not in (errno.EPIPE, errno.EIO):
        sys.stderr.write('train.py: standard output cannot be written: %s\n' % error.strerror)
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGHUP)


def make_output_lasting() -> None:
    """Makes `sys.stdout` and `sys.stderr` `OutputStream`s, also where they were closed."""
    sys.stdout = OutputStream(sys.stdout or open(os.devnull, 'w'))
    sys.stderr = OutputStream(sys.stderr or open(os.devnull, 'w'), on_lost=lambda error: None)


def progress_stream() -> typing.TextIO:
    """The stream for progress: standard error if that and standard output are terminals, as
    progress bars use it; else standard output."""
    return sys.stderr if sys.stdout.isatty() and sys.stderr.isatty() else sys.stdout
