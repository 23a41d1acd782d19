"""`OutputStream`: an output that may be lost, as in `train.py | head -3`, or on a closed terminal.
"""

import contextlib
import errno
import os
import signal
import sys
import typing


class OutputStream:
    """A text stream that discards all text after a write has failed.

    So a long run saves and ends in good order with `train.py | head -3`, on a closed terminal, or
    on a full disk, instead of failing in a line that it prints. All other attributes are the
    attributes of the stream. Several `OutputStream`s may write to one stream, such as a bar and
    plain lines.
    """

    def __init__(self, stream: typing.TextIO,
                 on_lost: typing.Optional[typing.Callable[[OSError], None]] = None):
        """
        Args:
          stream: the stream to which the text is written.
          on_lost: function that is called once, with the error of the write that failed. None to
            send SIGHUP to this process, as a closed terminal does: a run then saves and ends.
        """
        self._stream = stream
        self._on_lost = on_lost or _stop
        self._is_lost = False

    def __getattr__(self, name: str) -> typing.Any:
        """Any other attribute, from the stream."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text; returns its length, also if it is discarded.

        Characters that the stream's encoding does not have, as in a file's name that is no UTF-8,
        are escaped.
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

    def _attempt(self, function: typing.Callable, *arguments) -> None:
        """Calls a method of the stream; after an `OSError` the stream counts as lost."""
        if self._is_lost:
            return
        try:
            function(*arguments)
        except OSError as error:
            self._is_lost = True
            self._redirect_to_null_device()
            self._on_lost(error)

    def _redirect_to_null_device(self) -> None:
        """Makes the null device the file of the stream: as Python exits, it writes what is left in
        the stream's buffer, and that cannot fail there."""
        with contextlib.suppress(OSError, ValueError):  # a stream without a file
            with open(os.devnull, 'w') as null_device:
                os.dup2(null_device.fileno(), self._stream.fileno())


def _stop(error: OSError) -> None:
    """Stops the process as a closed terminal does, by SIGHUP.

    It says the reason, except for a closed pipe or terminal, where it is clear.
    """
    if error.errno not in (errno.EPIPE, errno.EIO):
        sys.stderr.write('train.py: standard output cannot be written: %s\n' % error.strerror)
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGHUP)


def make_output_lasting() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by `OutputStream`s, also where they were closed."""
    sys.stdout = OutputStream(sys.stdout or open(os.devnull, 'w'))
    sys.stderr = OutputStream(sys.stderr or open(os.devnull, 'w'), on_lost=lambda error: None)


def progress_stream() -> typing.TextIO:
    """The stream for progress: standard error, as progress bars use it, if standard error and
    standard output are both terminals; else standard output."""
    are_terminals = sys.stdout.isatty() and sys.stderr.isatty()
    return sys.stderr if are_terminals else sys.stdout
