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


def _say(line):
    print(line, file=sys.stderr, flush=True)


class Runner:
    """Runs what is left of a set, and hands signals on to the run that is under way.

    Attributes:
      stopped: whether a signal ended it.
    """

    def __init__(self, runs, examples, keep_checkpoints=False, train=TRAIN, say=_say):
        """
        Args:
          runs: list of `arms.Run`.
          examples: that each of them sees.
          keep_checkpoints: leave the checkpoints of finished runs where they are.
          train: path of train.py.
          say: called with each line on how far the set is.
        """
        self._runs, self._examples, self._say = runs, examples, say
        self._keep_checkpoints, self._train = keep_checkpoints, train
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
                title = '[%d/%d] %s' % (number + 1, len(self._runs), run.label)
                if status(run, self._examples)[0] == FINISHED:
                    self._say('%s: finished already' % title)
                else:
                    self._one(title, run)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _one(self, title, run):
        os.makedirs(run.folder, exist_ok=True)
        _write_json(os.path.join(run.folder, 'flags.json'), run.flags)
        _forget_failure(run.folder)
        self._say('%s: starting' % title)
        evaluated = len(_evaluations(run))
        with open(os.path.join(run.folder, 'output.log'), 'ab') as output:
            # A session of its own, so that Ctrl-C reaches it once: through this process.
            self._process = subprocess.Popen(
                [sys.executable, self._train, '--train_dir=%s' % run.folder] + run.flags,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True)
        if self.stopped:  # by a signal while it was started
            self._process.send_signal(signal.SIGINT)
        while self._process.poll() is None:
            evaluated = self._show(title, run, evaluated)
            time.sleep(_POLL_SECONDS)
        code, self._process = self._process.returncode, None
        self._show(title, run, evaluated)
        if code and not self.stopped:
            reason = 'exit status %d: %s' % (code, _last_words(run.folder))
            _write_json(os.path.join(run.folder, 'failure.json'), reason)
            self._say('%s: FAILED, %s' % (title, reason))
        elif status(run, self._examples)[0] == FINISHED and not self._keep_checkpoints:
            for path in glob.glob(os.path.join(glob.escape(run.folder), 'model.ckpt-*')):
                os.remove(path)

    def _show(self, title, run, before):
        """Says the evaluations that are new; returns how many there are."""
        evaluations = _evaluations(run)
        for line in evaluations[before:]:
            self._say('%s: %s of %s examples, test accuracy %.4f, loss %.4g' % (
                title, '{:,}'.format(line['examples']), '{:,}'.format(self._examples),
                line['test_accuracy'], line['test_loss']))
        return len(evaluations)

    def _stop(self, unused_number, unused_frame):
        first, self.stopped = not self.stopped, True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            if first:
                self._say('stopping: the run finishes its step and saves; start the same command '
                          'again to go on')


def _evaluations(run):
    return [line for line in read_metrics(run.folder) if 'test_accuracy' in line]


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
