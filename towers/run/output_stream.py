"""Standard output whose reader may go away: `train.py | head -3`, a terminal that is closed, a full
disk. A run that has done an hour of steps then ends in good order, and not in the line it printed.
"""

import contextlib
import errno
import os
import signal
import sys

from towers.errors import OutputLostError


class OutputStream:
    """A text stream that is written to for as long as that is possible.

    The first write that fails calls `on_lost`; what is written after it goes nowhere. Everything
    else is the stream's own. Two streams may write to one place, such as a bar beside plain lines.

    Attributes:
      lost: the `OSError` of the write that failed, or None.
      on_lost: called with that error, once; None raises `OutputLostError` there and then.
    """

    def __init__(self, stream, on_lost=None):
        """
        Args:
          stream: a text stream; None, which is what Python has for a closed one, takes nothing.
          on_lost: see above.
        """
        self.lost = None
        self.on_lost = on_lost
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        """Writes text where it can."""
        self._attempt('write', text)
        return len(text)

    def writelines(self, lines):
        """Writes several texts."""
        self.write(''.join(lines))

    def flush(self):
        """Sends on what has been written."""
        self._attempt('flush')

    def isatty(self):
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def _attempt(self, method, *arguments):
        if self._stream is None or self.lost is not None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            self.lost = error
            self._send_nowhere()
            if self.on_lost is None:
                raise OutputLostError('standard output cannot be written: %s' % error.strerror)
            self.on_lost(error)

    def _send_nowhere(self):
        """Points the descriptor at /dev/null: else Python writes its buffer again at exit."""
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass  # no file of the system's


def progress_stream():
    """Standard output, but for a bar on a terminal standard error, as is the custom of bars."""
    both = sys.stdout, sys.stderr
    return sys.stderr if all(stream and stream.isatty() for stream in both) else sys.stdout


@contextlib.contextmanager
def lasting_output(say):
    """Makes `sys.stdout` and `sys.stderr` `OutputStream`s while a program's main runs.

    Where standard output is lost the program ends with the status that a shell expects: 141 (128
    plus SIGPIPE) and no word where nobody reads it any more, as of any program in a pipe; else 1,
    and a line. A status of the program's own that says more stays, such as that of a signal.

    Args:
      say: called with that line, for standard error.
    """
    former = sys.stdout, sys.stderr
    sys.stdout = output = OutputStream(sys.stdout)
    sys.stderr = OutputStream(sys.stderr, on_lost=lambda error: None)
    status = 0
    try:
        with contextlib.suppress(OutputLostError):
            try:
                yield
            except SystemExit as ended:
                status = ended.code
            output.flush()
        if output.lost is not None and status in (0, None, 128 + signal.SIGPIPE):
            status = status_of(output.lost)
            if status == 1:
                say('standard output cannot be written: %s' % output.lost.strerror)
    finally:
        sys.stdout, sys.stderr = former
    sys.exit(status)


def status_of(error):
    """The exit status of a program whose output ended with this error."""
    return 128 + signal.SIGPIPE if error.errno in (errno.EPIPE, errno.EIO) else 1
