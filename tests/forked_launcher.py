"""The launcher, in a process that has imported TensorFlow, of which it forks the tasks instead of
starting Python for each: that takes five seconds of processor time a process.

All else is the launcher's: a task is a process with its TF_CONFIG, output and session, is hit by
signals, and dies with its parent. It has to be a Python program.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback

from towers import launch


class Forked(subprocess.Popen):
    """A process that runs `[python, program, …]` where another would replace itself by Python."""

    def __init__(self, command, env, preexec_fn, **named):
        def run():
            preexec_fn()
            _run_program(command[1:], env)
        super(Forked, self).__init__(command, env=env, preexec_fn=run, **named)


def _run_program(argv, environment):
    """Runs a program as a new Python would, to the end of this process."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir('/proc/self/fd')):  # a new program inherits none
        if descriptor > 2:
            os.dup2(nothing, descriptor)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(line_buffering=True)
    sys.argv = argv
    status = 0
    try:
        runpy.run_path(argv[0], run_name='__main__')
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)  # waits for threads and calls what `atexit` has, as at any end


def main(argv):
    """As `launch.main`."""
    launch.TaskProcess.__bases__ = (Forked,)
    return launch.main(argv)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
