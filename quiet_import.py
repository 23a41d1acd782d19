"""Importing TensorFlow without the lines that it logs while it loads, for train.py.

TF_CPP_MIN_LOG_LEVEL silences what TensorFlow logs from then on. Its libraries log before they have
read it (2.21: "I0000 … oneDNN custom operations are on", "Could not find cuda drivers"), straight
to file descriptor 2.
"""

import contextlib
import os
import re
import sys

_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'
_LOG_LINE = re.compile(rb'[IW]0000 |WARNING: All log messages before absl::InitializeLog')


@contextlib.contextmanager
def without_log_lines():
    """Leaves out of standard error what TensorFlow logs of itself in the block, errors excepted.

    To be entered before TensorFlow is imported. Everything else that is written there comes
    through, also what comes last before a crash: another process reads it, until this one has
    closed its end. A user who has set TF_CPP_MIN_LOG_LEVEL gets all lines, and nothing is changed.
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = '3'
    if not hasattr(os, 'fork') or 'tensorflow' in sys.modules:
        yield
        return
    try:
        former = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    source, target = os.pipe()
    reader = os.fork()
    if not reader:
        os.close(target)
        _pass_on(source, former)
        os._exit(0)
    os.close(source)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        os.dup2(former, 2)  # which closes the last end of the pipe to write to
        os.close(former)
        os.waitpid(reader, 0)


def _pass_on(source, target):
    """Copies lines from one file descriptor to another, but for log lines, until the end."""
    with contextlib.suppress(OSError, KeyboardInterrupt), open(source, 'rb') as lines:
        for line in lines:
            if not _LOG_LINE.match(line):
                os.write(target, line)
