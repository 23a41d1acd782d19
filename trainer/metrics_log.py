"""`metrics.jsonl`: the figures of a run, one JSON object a line, exact over kills and restarts.

    {"step": 100, "epoch": 0.2, "examples": 10000, "loss": 1.93, …, "wall_time": 1760000000.123}

One flat object for each logged step, in order, as `pandas.read_json(path, lines=True)` reads it.
"""

import contextlib
import json
import math
import os

import numpy as np
import tensorflow.compat.v1 as tf

from towers.checkpoint.files import MOST_STEPS
from towers.errors import BadFileError, InvalidArgumentError, LogFileError
from towers.safe_files import (SCALAR, moved_aside, parsed, read_data, regular, written_whole)

_MOST_BYTES = 2 ** 31  # of the file
_BEGIN = b'{"step": '  # of a line


class MetricsLog:
    """The file. The line of the latest step is kept back, so that an evaluation can be added to it.

    JSON has no NaN and no infinity: they are written as null. A float32 is written with the fewest
    digits that give it again.
    """

    def __init__(self, path: str):
        self.path = path
        self._pending = None
        self._written = {'step': -1}

    def resume(self, step, is_new=False):
        """Prepares the file for a run that goes on from a step.

        Cuts the lines of later steps, and what is left of a line that was written by half. Of a run
        that `is_new` it renames a file that has steps. Returns a line that says so; or None.

        Raises:
          LogFileError: the file cannot be read or written; a `BadFileError` where it has a line
            that is no such object, or is no regular file.
        """
        self._pending, self._written = None, {'step': -1}
        content, kept, cut = _read(self.path), [], []
        if is_new and any(line.strip() and (_parse(line) or {'step': 1})['step'] > 0
                          for line in content.split(b'\n')):
            aside = moved_aside(self.path)
            self._append(b'')
            return '%s is of an earlier run, whose checkpoints are gone: renamed to %s' % (
                self.path, aside)
        lines = content.split(b'\n')
        last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
        for number, line in enumerate(lines[:last + 1]):
            entry = _parse(line)
            if entry is None and not (number == len(lines) - 1 and _is_torn(line)):
                raise BadFileError('line %d of %s is no JSON object with a step: move the file '
                                   'away, or mend that line.' % (number + 1, self.path))
            if entry is not None and entry['step'] <= step:
                kept.append(line + b'\n')
                self._written = entry
            elif entry is not None:
                cut.append(entry['step'])
        with _explained(self.path):
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        self._append(b'')
        if b''.join(kept) != content:
            with written_whole(self.path, 'wb') as log:
                log.write(b''.join(kept))
        return 'cut the lines of steps %d to %d from %s: those steps are done again' % (
            cut[0], cut[-1], self.path) if cut else None

    def add(self, step, values):
        """Adds a dict of numbers or strings to the line of the latest step, or of a later one."""
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

    def flush(self) -> None:
        """Writes the line that is kept back. A kill cannot undo that, a loss of power can."""
        if self._pending is not None:
            self._append(_encode(self._pending))
            self._written, self._pending = self._pending, None

    def sync(self) -> None:
        """As `flush`, and waits until the disk has all of the file."""
        self.flush()
        if os.path.exists(self.path):
            with _explained(self.path), open(self.path, 'ab', opener=regular) as log:
                os.fsync(log.fileno())

    def _append(self, line):
        # Opened for each line: so no open file is left when a run ends in an error.
        with _explained(self.path), open(self.path, 'ab', opener=regular) as log:
            log.write(line)

    def _rewrite_last(self, values):
        """Adds values to the last line of the file."""
        complete = dict(self._written, **values)
        if complete == self._written:
            return
        content = _read(self.path)
        with written_whole(self.path, 'wb') as log:
            log.write(content[:content.rstrip(b'\n').rfind(b'\n') + 1] + _encode(complete))
        self._written = complete


@contextlib.contextmanager
def _explained(path):
    """Raises `LogFileError` for an `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise LogFileError('%s: %s.' % (path, error.strerror or error)) from error


def _read(path):
    with _explained(path):
        return read_data(path, _MOST_BYTES) or b''


def entries(path):
    """The objects in such a file, a list of dicts, each with an int `step`."""
    return [entry for entry in map(_parse, _read(path).split(b'\n')) if entry is not None]


def _parse(line):
    """The object of a line of bytes, a dict with an int `step`; None if it is something else."""
    try:
        entry = parsed(line, {'step': int, str: SCALAR})
    except ValueError:
        return None
    return entry if 0 <= entry['step'] <= MOST_STEPS else None


def _is_torn(line):
    """Whether the end of a file, without a line feed, is the part of a line that was written before
    a kill; a loss of power leaves NULs."""
    line = line.rstrip(b'\0')
    return line.startswith(_BEGIN) or _BEGIN.startswith(line)


def _plain(name, value):
    """A value as JSON has it: numbers of numpy, or arrays of one, become Python's."""
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
    line = {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entry.items()}
    return json.dumps(line, allow_nan=False).encode('utf-8') + b'\n'
