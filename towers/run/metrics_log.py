"""`metrics.jsonl`: the figures of a run, one JSON object a line, exact over kills and restarts.

    {"step": 100, "epoch": 0.2, "examples": 10000, "loss": 1.93, …, "wall_time": 1760000000.123}

One flat object for each logged step, in order, as `pandas.read_json(path, lines=True)` reads it.
"""

import contextlib
import json
import math
import os
import time
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.arguments import (check_count, check_flag, check_number, check_say, directory_name,
                              scalar_tensors)
from towers.checkpoint.files import list_checkpoints
from towers.errors import InvalidArgumentError, LogFileError
from towers.run.input_watch import checked_watch
from towers.run.step_clock import SaveListener, StepClock, counts_of, rate
from towers.run.step_loop import OccasionalHook
from towers.run.atomic_file import moved_aside


class MetricsLog:
    """The file. The line of the latest step is kept back, so that an evaluation can be added to it.

    JSON has no NaN and no infinity: they are written as null, and named in a further value, such as
    `"non_finite": "loss=inf"`. A float32 is written with the fewest digits that give it again.
    """

    def __init__(self, path):
        """
        Args:
          path: of the file, on a local file system (no `gs://`).
        """
        self.path = directory_name('path', path, 'the name of a file')
        self._pending = None
        self._written = {'step': -1}

    def resume(self, step, is_new=False):
        """Prepares the file for a run that goes on from a step.

        Cuts the lines of later steps, and a last line that was written by half; the file is
        replaced by renaming another one. Makes the file if it is missing.

        Args:
          step: the step that the run goes on from.
          is_new: whether the run begins, so that steps in the file are of another run: the file is
            then renamed to `metrics.jsonl.1`, or `.2`, …, the first name that is free.

        Returns:
          A line that says what was cut or renamed, to be shown; or None.

        Raises:
          LogFileError: the file cannot be read or written, or has a line that is no such object.
        """
        self._pending = None
        self._written = {'step': -1}
        content, kept, cut = self._read(), [], []
        if is_new and any(line.strip() and (_parse(line) or {'step': 1})['step'] > 0
                          for line in content.split(b'\n')):
            return self._begin_anew(content)
        lines = content.split(b'\n')
        last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
        for number, line in enumerate(lines[:last + 1]):
            entry = _parse(line)
            if entry is None and number < last:
                raise LogFileError('line %d of %s is no JSON object with a step: move the file '
                                   'away, or mend that line.' % (number + 1, self.path))
            if entry is not None and entry['step'] <= step:
                kept.append(line + b'\n')
                self._written = entry
            elif entry is not None:
                cut.append(entry['step'])
        with self._explained():
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        self._append(b'')
        if b''.join(kept) != content:
            self._replace(b''.join(kept))
        if not cut:
            return None
        return 'cut %s after step %d from %s: %s done again' % (
            'the line of step %d' % cut[0] if len(cut) == 1 else
            'the %d lines of steps %d to %d' % (len(cut), cut[0], cut[-1]), step, self.path,
            'that step is' if len(cut) == 1 else 'those steps are')

    def _begin_anew(self, content):
        """Renames the file, which has this content, and begins an empty one; says so in a line."""
        count = len([line for line in content.split(b'\n') if line.strip()])
        aside = moved_aside(self.path)
        self._append(b'')
        return ('%s held %d line%s of an earlier run, whose checkpoints are gone: renamed to %s' % (
            self.path, count, '' if count == 1 else 's', aside))

    def add(self, step, values):
        """Adds values to the line of the latest step, or begins the line of a later one.

        Args:
          step: an int.
          values: dict from names to numbers or strings.

        Raises:
          InvalidArgumentError: a value of another kind, or a step before the latest one.
          LogFileError: the file cannot be written.
        """
        values = {name: _plain(name, value) for name, value in values.items()}
        if self._pending is not None and self._pending['step'] == step:
            self._pending.update(values)
        elif self._pending is None and self._written['step'] == step:
            self._rewrite_last(values)
        elif step < (self._pending or self._written)['step']:
            raise InvalidArgumentError('step %d is before step %d, which is in %s already.' % (
                step, (self._pending or self._written)['step'], self.path))
        else:
            self.flush()
            self._pending = dict({'step': step}, **values)

    def flush(self):
        """Writes the line that is kept back. A kill cannot undo that, a loss of power can.

        Raises:
          LogFileError: the file cannot be written.
        """
        if self._pending is not None:
            self._append(_encode(self._pending))
            self._written, self._pending = self._pending, None

    def sync(self):
        """As `flush`, and waits until the disk has all of the file."""
        self.flush()
        if os.path.exists(self.path):
            with self._explained(), open(self.path, 'ab') as log:
                os.fsync(log.fileno())

    def _read(self):
        with self._explained():
            if not os.path.exists(self.path):
                return b''
            with open(self.path, 'rb') as log:
                return log.read()

    def _append(self, line):
        # Opened for each line, which takes some 20 microseconds: so no open file is left when a run
        # ends in an error.
        with self._explained(), open(self.path, 'ab') as log:
            log.write(line)

    def _rewrite_last(self, values):
        """Adds values to the last line of the file."""
        complete = dict(self._written, **values)
        if complete == self._written:
            return
        content = self._read()
        begin = content.rstrip(b'\n').rfind(b'\n') + 1
        self._replace(content[:begin] + _encode(complete))
        self._written = complete

    def _replace(self, content):
        """Replaces the content of the file by renaming another one, whole or not at all."""
        path = os.path.realpath(self.path)
        with self._explained():
            with open(path + '.new', 'wb') as log:
                log.write(content)
                log.flush()
                os.fsync(log.fileno())
            os.replace(path + '.new', path)

    @contextlib.contextmanager
    def _explained(self):
        """Raises `LogFileError` for an `OSError` of the block."""
        try:
            yield
        except OSError as error:
            raise LogFileError('%s: %s.%s' % (
                self.path, error.strerror or error, self._advice())) from error

    def _advice(self):
        """End of the text of a `LogFileError`: what to do, and which lines are safe."""
        step, folder = self._written['step'], os.path.dirname(os.path.abspath(self.path))
        if os.path.isdir(self.path):
            return ' It is a folder: move it away, or give another path.'
        if not os.path.isdir(folder):
            return ' %s is gone, and with it the lines up to step %d.' % (
                folder, step) if step >= 0 else ''
        if step >= 0 and os.path.exists(self.path):
            return ' Its lines up to step %d are safe.' % step
        return ''


class MetricsHook(OccasionalHook):
    """Writes a line of `metrics.jsonl` at each multiple of `log_every` steps and at the last step.

    After a kill the file has the lines of a run that was never killed: which steps have a line
    depends on the step alone, and a run that goes on from a step cuts the lines of later ones. For
    that the line of a step has to be on the disk before its checkpoint is: give `listener` to the
    hook that saves, and put this hook and the hook that evaluates before it in the list of hooks.
    (`tf.train.MonitoredTrainingSession` puts a saver of its own first: pass it
    `save_checkpoint_steps=None` and `save_checkpoint_secs=None`, and a
    `tf.train.CheckpointSaverHook` as the last hook.)

    Attributes:
      listener: a `CheckpointSaverListener`.
    """

    # Names of values that the hook and the log add.
    _OWN = ('step', 'epoch', 'examples', 'images_per_second', 'input_wait', 'wall_time',
            'non_finite')

    def __init__(self, values: typing.Any, global_step: typing.Optional[tf.Variable], path: str,
                 batch_size: typing.Optional[int] = None,
                 examples_per_epoch: typing.Optional[float] = None, log_every: int = 100,
                 last_step: typing.Optional[int] = None, *, examples: typing.Any = None,
                 fetch_every_step: bool = False, say: typing.Callable = print,
                 input_watch: typing.Any = None):
        """
        Args:
          values: dict (or list of pairs) from names to scalar tensors, fetched with the steps that
            have a line: `loss`, `learning_rate`, ….
          global_step: `StepCounts` with `examples_per_epoch`, whose `last_step`, if given, has a
            line whatever its number; or the variable that counts steps.
          path: of the file, such as `train_dir + '/metrics.jsonl'`.
          batch_size, examples_per_epoch, last_step, examples: with a variable, the other fields of
            `StepCounts`.
          log_every: steps from one line to the next.
          fetch_every_step: as in `ProgressHook`.
          say: called with the line about what was cut or renamed, see `MetricsLog.resume`. A run
            is new if it is at step 0 and there is no checkpoint beside the file.
          input_watch: `InputWatchHook` of the same session, for `input_wait` in each line: the
            share of the time since the line before that was waiting for input, 0..1; or None.

        Raises:
          InvalidArgumentError: a number below 1, or missing; a field beside `StepCounts`; a name
            that the log itself uses.
        """
        counts = counts_of(global_step, batch_size=batch_size, last_step=last_step,
                           examples_per_epoch=examples_per_epoch, examples=examples)
        check_count('log_every', log_every)
        if counts.last_step is not None:
            check_count('last_step', counts.last_step)
        check_flag('fetch_every_step', fetch_every_step)
        check_say(say)
        check_number('examples_per_epoch', counts.examples_per_epoch, above=0,
                     expected='more than 0')
        self._arguments = tf.train.SessionRunArgs(dict(scalar_tensors('values', values)))
        for name in self._arguments.fetches:
            if name in self._OWN:
                raise InvalidArgumentError('%r is a name that the metrics log uses itself: give '
                                           'that value another one.' % name)
        self.log = MetricsLog(path)
        self._clock = StepClock(counts.global_step, counts.batch_size, counts.examples)
        self.listener = SaveListener(self._clock, self._before_save)
        self._examples_per_epoch = counts.examples_per_epoch
        self._log_every = log_every
        self._last_step = counts.last_step
        self._fetches_always = fetch_every_step
        self._say = say
        self._waiting = checked_watch(input_watch)
        self._is_first_session = True
        self._writes = self._ended = False
        self._since = 0
        self._mark = None

    def after_create_session(self, session, coord):
        """Cuts the lines of steps after the restored one; renames the file of another run."""
        self._clock.restart(session)
        self._since, self._mark = self._clock.step, None
        self._writes = self._ended = False
        is_new = (self._is_first_session and self._clock.step == 0
                  and not list_checkpoints(os.path.dirname(os.path.abspath(self.log.path))))
        self._is_first_session = False
        told = self.log.resume(self._clock.step, is_new)
        if told is not None:
            self._say(told)

    def before_run(self, run_context):
        """Fetches the values if the coming step has a line."""
        self._writes = self.is_due()
        return self._arguments if self._writes or self._fetches_always else None

    def after_run(self, run_context, run_values):
        """Counts the step, and puts its line, if it has one, into the log."""
        clock = self._clock
        self._count()
        if not self._writes:
            return
        self._writes = False
        clock.read(run_context.session)
        if not clock.passed(self._since, self._log_every, self._last_step):
            return
        self._since = clock.step
        speed = rate(self._mark, clock.mark)
        self._mark = clock.mark
        line = {'epoch': round(clock.examples / self._examples_per_epoch, 6),
                'examples': clock.examples}
        line.update(run_values.results)
        line['images_per_second'] = None if speed is None else round(speed, 3)
        if self._waiting is not None:
            share = self._waiting.next(run_context.session).share
            line['input_wait'] = None if share is None else round(share, 4)
        line['wall_time'] = round(time.time(), 3)
        self.log.add(clock.step, line)

    def is_due(self):
        """Whether the coming step has a line.

        Also writes the line of the step before, which would be lost if the coming step failed.
        """
        self.log.flush()
        return self._clock.comes_to(self._log_every, self._last_step)

    def step_done(self, fetched):
        """Counts a step without a line."""
        self._count()

    def always_fetched(self):
        """The values, with `fetch_every_step`; else None."""
        return self._arguments.fetches if self._fetches_always else None

    def end(self, session):
        """Writes the line that is kept back."""
        self._ended = True
        self.log.sync()

    def evaluated(self, step, results, seconds=0., name='test'):
        """Adds the results of an evaluation to the step's line: `test_accuracy`, ….

        Args:
          step: the step whose weights were evaluated: the current one.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: duration of the evaluation; left out of `images_per_second`.
          name: prefix of the names of the results.

        Raises:
          InvalidArgumentError: a step before the latest one in the file.
        """
        self._clock.away(seconds)
        self.log.add(step, {'%s_%s' % (name, key): value for key, value in results.items()})
        if self._ended:  # the `end` of the hook that evaluates came after this one's
            self.log.sync()

    def _count(self):
        self._clock.count()
        if self._mark is None:
            self._mark = self._clock.mark

    def _before_save(self, step):
        if self._writes and step > self._clock.step:
            raise InvalidArgumentError(
                'a checkpoint was about to be saved before the same step had its line in %s: put '
                'the MetricsHook before the hook that saves.' % self.log.path)
        self.log.sync()


def _parse(line):
    """The object of a line of bytes, a dict with an int `step`; None if it is something else."""
    try:
        entry = json.loads(line.decode('utf-8'))
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get('step'), int) else None


def _plain(name, value):
    """A value as JSON has it: numbers of numpy, or arrays of one, become Python's.

    Raises:
      InvalidArgumentError: neither a number nor a string.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    if isinstance(value, np.generic) and tf.as_dtype(value.dtype).is_floating:
        # The fewest digits that give the same float32 (or bfloat16) again.
        return float(value) if value.dtype == np.float64 else float(str(value))
    if isinstance(value, (np.integer, np.bool_)):
        return value.item()
    if isinstance(value, bytes):
        return value.decode('utf-8', 'replace')
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InvalidArgumentError('%s=%.80s cannot be logged: expected one number.' % (
        name, ' '.join(repr(value).split())))


def _encode(entry):
    """The line of an object, bytes."""
    line = dict(entry)
    odd = line.pop('non_finite', '').split()
    for name, value in line.items():
        if isinstance(value, float) and not math.isfinite(value):
            line[name] = None
            odd.append('%s=%s' % (name, value))
    if odd:
        line['non_finite'] = ' '.join(odd)
    return json.dumps(line, allow_nan=False).encode('utf-8') + b'\n'
