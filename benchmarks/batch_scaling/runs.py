"""Runs train.py once an arm and seed, one after another; what is finished is not run again."""

import glob
import json
import os
import signal
import subprocess
import sys
import time

from benchmarks.batch_scaling.results import read_metrics
from towers.errors import InvalidArgumentError
from towers.safe_files import written_whole

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
                     'train.py')
_POLL_SECONDS = 0.25

FINISHED, FAILED, STOPPED, WAITING = 'finished', 'failed', 'stopped', 'not run yet'


def status(run, examples):
    """How far a run is: `(status, reason)`; the reason is that of a failure, else ''."""
    lines = read_metrics(run.folder)
    if lines and lines[-1].get('examples') == examples and 'test_accuracy' in lines[-1]:
        return FINISHED, ''
    reason = _failure(run.folder)
    if reason:
        return FAILED, reason
    return (STOPPED if lines else WAITING), ''


def check_folders(runs):
    """Raises `InvalidArgumentError` if a folder holds a run of other flags than asked for."""
    for run in runs:
        path = os.path.join(run.folder, 'flags.json')
        if os.path.exists(path):
            with open(path) as opened:
                earlier = json.load(opened)
            if earlier != run.flags:
                changed = sorted(set(run.flags) - set(earlier)) or sorted(
                    set(earlier) - set(run.flags))
                raise InvalidArgumentError(
                    '%s holds a run of other flags (%s is new): give another --directory, or '
                    'delete this one.' % (run.folder, ' '.join(changed)))


class Runner:
    """Runs what is left of a set, and hands signals on to the run that is under way.

    Attributes:
      stopped: whether a signal ended it.
    """

    def __init__(self, runs, examples, display, keep_checkpoints=False, train=TRAIN):
        """
        Args:
          runs: list of `arms.Run`.
          examples: that each of them sees.
          display: `display.Display`.
          keep_checkpoints: leave the checkpoints of finished runs where they are.
          train: path of train.py.
        """
        self._runs = runs
        self._examples = examples
        self._display = display
        self._keep_checkpoints = keep_checkpoints
        self._train = train
        self._process = None
        self.stopped = False

    def run(self):
        """Runs them; a run that fails is noted in its folder, and the next one is begun.

        Raises:
          InvalidArgumentError: as `check_folders`.
        """
        check_folders(self._runs)
        earlier = {number: signal.signal(number, self._stop)
                   for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number, run in enumerate(self._runs):
                if self.stopped:
                    break
                if status(run, self._examples)[0] == FINISHED:
                    self._display.passed_over(number, run)
                else:
                    self._one(number, run)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
            self._display.close()

    def _one(self, number, run):
        os.makedirs(run.folder, exist_ok=True)
        _write_json(os.path.join(run.folder, 'flags.json'), run.flags)
        _forget_failure(run.folder)
        self._display.begin(number, run)
        with open(os.path.join(run.folder, 'output.log'), 'ab') as output:
            # A session of its own, so that Ctrl-C reaches it once: through this process.
            self._process = subprocess.Popen(
                [sys.executable, self._train, '--train_dir=%s' % run.folder] + run.flags,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True)
        if self.stopped:  # by a signal while it was started
            self._process.send_signal(signal.SIGINT)
        while self._process.poll() is None:
            self._display.show(read_metrics(run.folder))
            time.sleep(_POLL_SECONDS)
        code, self._process = self._process.returncode, None
        self._display.show(read_metrics(run.folder))
        if code and not self.stopped:
            reason = 'exit status %d: %s' % (code, _last_words(run.folder))
            _write_json(os.path.join(run.folder, 'failure.json'), reason)
            self._display.failed(reason)
        elif status(run, self._examples)[0] == FINISHED:
            self._display.finished()
            if not self._keep_checkpoints:
                for path in glob.glob(os.path.join(glob.escape(run.folder), 'model.ckpt-*')):
                    os.remove(path)

    def _stop(self, unused_number, unused_frame):
        first, self.stopped = not self.stopped, True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            if first:
                self._display.say('stopping: the run finishes its step and saves; start the same '
                                  'command again to go on')


def _failure(folder):
    path = os.path.join(folder, 'failure.json')
    if not os.path.exists(path):
        return ''
    with open(path) as opened:
        return json.load(opened)


def _forget_failure(folder):
    path = os.path.join(folder, 'failure.json')
    if os.path.exists(path):
        os.remove(path)


def _last_words(folder):
    """The last line that train.py wrote, which is its error."""
    with open(os.path.join(folder, 'output.log'), 'rb') as output:
        lines = output.read().decode('utf-8', 'replace').strip().splitlines()
    return lines[-1].strip() if lines else 'it wrote nothing'


def _write_json(path, value):
    with written_whole(path) as opened:
        json.dump(value, opened)
