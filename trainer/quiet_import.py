"""Imports TensorFlow without the lines that it logs while it loads, for train.py.

TF_CPP_MIN_LOG_LEVEL silences TensorFlow once it is loaded. Before that its libraries write to file
descriptor 2 directly (2.21: "I0000 … oneDNN custom operations are on", "Could not find cuda
drivers").
"""

import contextlib
import os
import re
import sys

_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'
_LOG_LINE = re.compile(rb'([IW])0000 |WARNING: All log messages before absl::InitializeLog')


@contextlib.contextmanager
def without_log_lines():
    """A block in which log lines of TensorFlow, but for errors, are left out of standard error.

    To be entered before TensorFlow is imported. All other text comes through, also the last text
    before a crash: a process of its own reads what is written, until this process has closed the
    pipe or ended. If TF_CPP_MIN_LOG_LEVEL is set, by the user, what it says is left out: from 1 on
    what is for information, from 2 on warnings.
    """
    level = os.environ.setdefault(_LEVEL, '3')
    if level in ('', '0') or not hasattr(os, 'fork') or 'tensorflow' in sys.modules:
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
        _pass_on(source, former, b'I' if level == '1' else b'IW')
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


def _pass_on(source, target, unwanted):
    """Copies lines from one file descriptor to another, without log lines of the unwanted levels
    (letters), until the end."""
    with contextlib.suppress(OSError, KeyboardInterrupt), open(source, 'rb') as lines:
        for line in lines:
            found = _LOG_LINE.match(line)
            if found is None or (found.group(1) or b'I') not in unwanted:
                os.write(target, line)
