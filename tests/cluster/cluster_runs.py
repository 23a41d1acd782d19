"""Clusters of real processes for tests: started by the launcher, listened to, hit, and ended."""

import os
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PATIENCE = 150


class Launch:
    """A launch of train.py; `with Launch(…) as launch`."""

    def __init__(self, folder, launcher, flags):
        """
        Args:
          folder: for the output.
          launcher: list of the launcher's options.
          flags: list of train.py's flags.
        """
        number = 0
        while os.path.exists('%s.%d.output' % (folder, number)):
            number += 1
        self.path = '%s.%d.output' % (folder, number)
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3')
        with open(self.path, 'w') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'towers.launch'] + launcher + ['--', 'train.py'] + flags,
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


def is_running(pid):
    """Whether there is such a process that is no zombie."""
    try:
        with open('/proc/%d/stat' % pid) as stat:
            return stat.read().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False
