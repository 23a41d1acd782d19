"""Clusters of real processes for tests: started by the launcher, listened to, hit, and ended."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np

import pages

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE = 150


class Launch:
    """A launch of train.py, or of another program; `with Launch(…) as launch`."""

    def __init__(self, folder, launcher, flags, program='train.py'):
        """
        Args:
          folder: for the output.
          launcher: list of the launcher's options.
          flags: list of the program's flags.
          program: its path.
        """
        number = 0
        while os.path.exists('%s.%d.output' % (folder, number)):
            number += 1
        self.path = '%s.%d.output' % (folder, number)
        # A program in another folder would else import what is installed.
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3', PYTHONPATH=ROOT)
        with open(self.path, 'w') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'towers.launch'] + launcher + ['--', program] + flags,
                stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        deadline = time.time() + 10
        while any(is_running(pid) for pid in self.pids().values()):  # none is left behind
            assert time.time() < deadline, self.output
            time.sleep(0.05)

    @property
    def output(self):
        with open(self.path) as output:
            return output.read()

    def pids(self):
        """Dict from `'worker 0'` to the number of the newest process of that name."""
        return {name: int(pid) for name, pid in
                re.findall(r'^\[launch\] (\w+ \d+) is process (\d+)$', self.output, re.M)}

    def wait_for(self, text):
        """Waits until the output has a text, or the launch ends."""
        deadline = time.time() + PATIENCE
        while text not in self.output:
            assert self.process.poll() is None and time.time() < deadline, self.output
            time.sleep(0.01)

    def send(self, name, number):
        os.kill(self.pids()[name], number)

    def status(self):
        """Its exit status."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.output)


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


def wait_until(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def is_running(pid):
    """Whether there is such a process that is no zombie."""
    try:
        with open('/proc/%d/stat' % pid) as stat:
            return stat.read().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False
