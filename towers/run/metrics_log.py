"""`metrics.jsonl`: what a run measured, one JSON object a line, exact over kills and restarts.

    {"step": 100, "epoch": 0.2, "examples": 10000, "loss": 1.93, …, "wall_time": 1760000000.123}

One line a step, in order, flat: `pandas.read_json(path, lines=True)` reads it as it is.
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
from towers.run.step_clock import SaveListener, StepClock, rate
from towers.run.step_loop import OccasionalHook
from towers.run.whole_file import moved_aside


class MetricsLog:
    """The file. What is known of the latest step is kept back until it is complete, so that an
    evaluation joins the line of its step.

    JSON has no NaN and no Inf: they are null, and spelled out as in `"non_finite": "loss=inf"`. A
    float32 is written with the digits that tell it from the next.
    """

    def __init__(self, path):
        """
        Args:
          path: of the file, on a file system of the operating system's (no `gs://`).
        """
        self.path = directory_name('path', path, 'the name of a file')
        self._pending = None
        self._written = {'step': -1}

    def resume(self, step, is_new=False):
        """Makes the file that of a run that is at `step`: cuts the lines of later steps, and a last
        line that is only half there. It is replaced in one go, if at all, and made if need be.

        Args:
          step: the step that the run goes on from.
          is_new: whether it is a run that begins, so that what is in the file is another one's: the
            file is then renamed to `metrics.jsonl.1`, or the first such name that is free.

        Returns:
          A line about what was cut or renamed, to be shown; or None.

        Raises:
          LogFileError: it cannot be read or written, or has lines that are no such objects.
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
        count = len([line for line in content.split(b'\n') if line.strip()])
        aside = moved_aside(self.path)
        self._append(b'')
        return ('%s held %d line%s of an earlier run, whose checkpoints are gone: renamed to %s' % (
            self.path, count, '' if count == 1 else 's', aside))

    def add(self, step, values):
        """Adds to the line of a step: the latest one, or a later one.

        Args:
          step: an int.
          values: dict from names to numbers (or strings).

        Raises:
          InvalidArgumentError: a value that is neither, or a step before the latest one.
          LogFileError: as `flush`.
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
        """Writes what was kept back; from then on no kill can undo it, but a power cut can.

        Raises:
          LogFileError: the disk is full, or the like.
        """
        if self._pending is not None:
            self._append(_encode(self._pending))
            self._written, self._pending = self._pending, None

    def sync(self):
        """As `flush`, and makes sure that all of it is on the disk."""
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
        # Opened for each line: that is some 20 microseconds in the steps that write, and nothing
        # is left open when a run ends in an error.
        with self._explained(), open(self.path, 'ab') as log:
            log.write(line)

    def _rewrite_last(self, values):
        complete = dict(self._written, **values)
        if complete == self._written:
            return
        content = self._read()
        begin = content.rstrip(b'\n').rfind(b'\n') + 1
        self._replace(content[:begin] + _encode(complete))
        self._written = complete

    def _replace(self, content):
        path = os.path.realpath(self.path)
        with self._explained():
            with open(path + '.new', 'wb') as log:
                log.write(content)
                log.flush()
                os.fsync(log.fileno())
            os.replace(path + '.new', path)

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except OSError as error:
            raise LogFileError('%s: %s.%s' % (
                self.path, error.strerror or error, self._advice())) from error

    def _advice(self):
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

    Which steps have a line depends on the step alone, and a run that goes on from an earlier step
    cuts what came after it, so that after a kill the file has the lines of a run that never was
    killed. For that the line of a step has to be on the disk before a checkpoint of that step
    counts: give `listener` to the hook that saves, and put this hook (and that which evaluates)
    before it in the list of hooks. (`tf.train.MonitoredTrainingSession` puts a saver of its own
    first: pass it `save_checkpoint_steps=None` and `save_checkpoint_secs=None`, and a
    `tf.train.CheckpointSaverHook` as the last hook.)

    Attributes:
      listener: a `CheckpointSaverListener`.
    """

    _OWN = ('step', 'epoch', 'examples', 'images_per_second', 'input_wait', 'wall_time',
            'non_finite')

    def __init__(self, values: typing.Any, global_step: typing.Optional[tf.Variable], path: str,
                 batch_size: int, examples_per_epoch: int, log_every: int = 100,
                 last_step: typing.Optional[int] = None, examples: typing.Any = None,
                 fetch_every_step: bool = False, say: typing.Callable = print,
                 input_watch: typing.Any = None):
        """
        Args:
          values: dict (or list of pairs) from names to scalar tensors, fetched with the steps that
            have a line: `loss`, `learning_rate`, ….
          global_step: the variable that counts steps.
          path: of the file, such as `train_dir + '/metrics.jsonl'`.
          batch_size: examples a step.
          examples_per_epoch: examples in one pass over the data.
          log_every: steps from one line to the next.
          last_step: the step at which training ends, which has a line whatever its number; or None.
          examples: variable that counts examples; None: the step times `batch_size`.
          fetch_every_step: as in `ProgressHook`.
          say: called with the line about what was cut from the file or renamed, see
            `MetricsLog.resume`. A run is new at step 0, where there is no checkpoint beside the
            file.
          input_watch: `InputWatchHook` of the same session: the lines get `input_wait`, the share
            of the time since the last line that was spent waiting for input, 0..1; or None.

        Raises:
          InvalidArgumentError: a number below 1, or a name that the log itself uses.
        """
        check_count('log_every', log_every)
        if last_step is not None:
            check_count('last_step', last_step)
        check_flag('fetch_every_step', fetch_every_step)
        check_say(say)
        check_number('examples_per_epoch', examples_per_epoch, above=0, expected='more than 0')
        self._arguments = tf.train.SessionRunArgs(dict(scalar_tensors('values', values)))
        for name in self._arguments.fetches:
            if name in self._OWN:
                raise InvalidArgumentError('%r is a name that the metrics log uses itself: give '
                                           'that value another one.' % name)
        self.log = MetricsLog(path)
        self._clock = StepClock(global_step, batch_size, examples)
        self.listener = SaveListener(self._clock, self._before_save)
        self._examples_per_epoch = examples_per_epoch
        self._log_every = log_every
        self._last_step = last_step
        self._fetches_always = fetch_every_step
        self._say = say
        self._waiting = checked_watch(input_watch)
        self._is_first_session = True
        self._writes = self._ended = False
        self._since = 0
        self._mark = None

    def after_create_session(self, session, coord):
        """Cuts what the file has of steps after the restored one; of another run, renames it."""
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
        """Fetches the values when the next step is one to write."""
        self._writes = self.is_due()
        return self._arguments if self._writes or self._fetches_always else None

    def after_run(self, run_context, run_values):
        """Counts the step, and notes the values where it is one to write."""
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
        """Whether the coming step has a line; writes that of the step before, should this one fail.
        """
        self.log.flush()
        return self._clock.comes_to(self._log_every, self._last_step)

    def step_done(self, fetched):
        """Counts a step without a line."""
        self._count()

    def always_fetched(self):
        """The values, with `fetch_every_step`."""
        return self._arguments.fetches if self._fetches_always else None

    def end(self, session):
        """Writes what is kept back."""
        self._ended = True
        self.log.sync()

    def evaluated(self, step, results, seconds=0., name='test'):
        """Puts the results of an evaluation into the step's line: `test_accuracy`, ….

        Args:
          step: the step whose weights were evaluated: the current one.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: how long it took; left out of `images_per_second`.
          name: what the names of the results begin with.

        Raises:
          InvalidArgumentError: a step before the latest one in the file.
        """
        self._clock.away(seconds)
        self.log.add(step, {'%s_%s' % (name, key): value for key, value in results.items()})
        if self._ended:  # by a hook whose `end` comes after this one's
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
    try:
        entry = json.loads(line.decode('utf-8'))
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get('step'), int) else None


def _plain(name, value):
    """A number of numpy's, or an array of one, as Python's own."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    if isinstance(value, np.generic) and tf.as_dtype(value.dtype).is_floating:
        # The shortest digits that give the same float32 (or bfloat16) again.
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
    line = dict(entry)
    odd = line.pop('non_finite', '').split()
    for name, value in line.items():
        if isinstance(value, float) and not math.isfinite(value):
            line[name] = None
            odd.append('%s=%s' % (name, value))
    if odd:
        line['non_finite'] = ' '.join(odd)
    return json.dumps(line, allow_nan=False).encode('utf-8') + b'\n'
