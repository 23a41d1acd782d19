"""Clusters of real processes for tests: started by the launcher, listened to, hit, and ended."""

import contextlib
import os
import re
import signal
import socket
import threading
import time

import numpy as np

import pages
import train_runs

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE = 150
# Before train.py, in its place: standard output and error are one.
LAUNCHER = '''
import os, sys
os.dup2(1, 2)
import forked_launcher
sys.exit(forked_launcher.main(%r))
'''


class Launch:
    """A launch of train.py, or of another program; `with Launch(…) as launch`."""

    def __init__(self, runner, folder, launcher, flags, program=train_runs.TRAIN):
        """
        Args:
          runner: of the fixture.
          folder: for the output.
          launcher: list of the launcher's options.
          flags: list of the program's flags.
          program: its path.
        """
        self._run = runner.start(folder, [], before=LAUNCHER % (
            launcher + ['--', program] + flags,))

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._run.send(signal.SIGKILL)
        self._run.status()
        deadline = time.time() + 10
        while any(is_running(pid) for pid in self.pids().values()):  # none is left behind
            assert time.time() < deadline, self.output
            time.sleep(0.05)

    @property
    def has_ended(self):
        return self._run.has_ended()

    @property
    def output(self):
        return self._run.stdout

    def pids(self):
        """Dict from `'worker 0'` to the number of the newest process of that name."""
        return {name: int(pid) for name, pid in
                re.findall(r'^\[launch\] (\w+ \d+) is process (\d+)$', self.output, re.M)}

    def since(self, start):
        """The output from the start of that number on, of which the first is 1."""
        return ''.join(self.output.split('[launch] worker 0 is ')[start:])

    def wait_for(self, text, start=1):
        """Waits until the output since a start has a text, or the launch ends."""
        deadline = time.time() + PATIENCE
        while text not in self.since(start):
            assert not self.has_ended and time.time() < deadline, self.output
            time.sleep(0.01)

    def send(self, name, number):
        os.kill(self.pids()[name], number)

    def send_launcher(self, number):
        self._run.send(number)

    def status(self):
        """Its exit status."""
        wait_until(lambda: self.has_ended, PATIENCE, lambda: self.output)
        return self._run.status()


def own_program(folder, steps, pause=0., kind=None):
    """Writes the program of docs/clusters.md, "A program from start to end".

    Args:
      folder: for the program, and for its checkpoints, in `run` there.
      steps: instead of its number of steps.
      pause: seconds to wait after each step.
      kind: of its cluster, instead of what `TF_CONFIG` says.

    Returns:
      The path of the program.
    """
    [block] = [each for each in pages.blocks('docs/clusters.md', 'python')
               if pages.own_name(each) == 'own.py']
    text = '\n'.join(block.lines) + '\n'
    for former, new in (
            ('STEPS = 40', 'STEPS = %d' % steps), ("'run'", repr(os.path.join(folder, 'run'))),
            ('towers.Cluster.from_tf_config()', kind and 'towers.Cluster(%r)' % kind),
            ('session.run(built.train_op)',
             'session.run(built.train_op); __import__("time").sleep(%g)' % pause)):
        assert former in text
        text = text.replace(former, new or former)
    path = os.path.join(folder, 'own.py')
    with open(path, 'w') as opened:
        opened.write(text)
    return path


def weights_of_own_program(steps, workers=2):
    """The weights of that program after so many steps, by hand in float64: [4, 3]."""
    images = np.random.RandomState(0).rand(240, 4).astype(np.float32).astype(np.float64)
    classes, weights = images.argmax(1) % 3, np.zeros([4, 3])
    for step in range(steps):
        these = np.concatenate([own[np.arange(8 * step, 8 * step + 8) % len(own)] for own in (
            np.arange(rank, 240, workers) for rank in range(workers))])
        chances = np.exp(images[these].dot(weights))
        chances /= chances.sum(1, keepdims=True)
        weights -= 0.5 * images[these].T.dot(chances - np.eye(3)[classes[these]]) / len(these)
    return weights


def wait_until(condition, seconds=60, says=str):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, says()
        time.sleep(0.02)


def is_running(pid):
    """Whether there is such a process that is no zombie."""
    try:
        with open('/proc/%d/stat' % pid) as stat:
            return stat.read().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


NO_WORKER = b'HTTP/1.1 400 Bad Request\r\n\r\n'  # what a web server says to a worker


@contextlib.contextmanager
def answering(says):
    """The address of a process that says something to who connects; None: nothing, for a second."""
    def answer():
        connection, _ = listener.accept()
        with contextlib.closing(connection):
            if says is None:
                time.sleep(1.)
            else:
                connection.sendall(says)
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield '127.0.0.1:%d' % listener.getsockname()[1]
        thread.join()
