"""Runs `train.py` many times without importing TensorFlow each time.

Each line of input, a JSON object `{"argv": […], "output": folder, "before": code or null}`, starts
one. It is a process of its own, forked from this one, that runs the file as `python train.py` does,
in this directory; `before` is Python code that it runs first, to break something. In the folder:
`pid` of the process, then `stdout`, `stderr`, and at the end `status`: its exit status, or minus
the signal that killed it.
"""

import gc
import json
import os
import runpy
import signal
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # as train.py does, before the import


TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'train.py')
sys.path.insert(0, os.path.dirname(TRAIN))

# What takes the time; train.py itself is run anew by each process.
from models import registry  # noqa: E402, F401
import datasets  # noqa: E402, F401
import towers.run.evaluation  # noqa: E402, F401
import towers.run.weights  # noqa: E402, F401


def write(path, text):
    with open(path + '.new', 'w') as new:
        new.write(str(text))
    os.rename(path + '.new', path)


def wait(pid, output):
    """Waits for the process and writes down how it ended."""
    write(os.path.join(output, 'pid'), pid)
    _, status = os.waitpid(pid, 0)
    write(os.path.join(output, 'status'),
          -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def become(output):
    """Makes this process a child like one that was started from a shell."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(300)  # should nobody end it
    for number, name in ((1, 'stdout'), (2, 'stderr')):
        opened = os.open(os.path.join(output, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)


def main():
    # Or each process, at its end, touches and so copies what all share: a second of its time.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the waiting ones
    for line in iter(sys.stdin.readline, ''):
        job = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid:
                wait(pid, job['output'])
                os._exit(0)
            become(job['output'])
            if job['before']:
                exec(job['before'], {})
            sys.argv = [TRAIN] + job['argv']
            runpy.run_path(TRAIN, run_name='__main__')
            sys.exit()


if __name__ == '__main__':
    main()
