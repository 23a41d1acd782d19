"""`metrics.jsonl`: the figures of a run, one JSON object a line, exact over kills and restarts.

    {"step": 100, "epoch": 0.2, "examples": 10000, "loss": 1.93, …, "wall_time": 1760000000.123}

One flat object for each logged step, in order, as `pandas.read_json(path, lines=True)` reads it.
When a session ends, `metrics.csv` beside it is written anew with the same values.
"""

import contextlib
import csv
import json
import math
import os
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.checkpoint.files import MOST_STEPS
from towers.errors import BadFileError, InvalidArgumentError, LogFileError
from towers.safe_files import SCALAR, moved_aside, parsed, read_data, regular, written_whole

_MOST_BYTES = 2 ** 31  # a larger file is refused
_BEGIN = b'{"step": '  # the first bytes of each line


class MetricsLog:
    """The file `metrics.jsonl`.

    The line of the latest step is kept back, so that an evaluation can be added to it. JSON has no
    NaN and no infinity: they are written as null. A float32 is written with the fewest digits that
    give it again.

    Attributes:
      path: the name of the file.
    """

    def __init__(self, path: str):
        """`path` is the name of the file, which `resume` makes."""
        self.path = path
        self._pending: typing.Optional[dict] = None  # the entry that is kept back
        self._written: dict = {'step': -1}  # the entry of the file's last line; -1 without a line

    def resume(self, step: int, is_new: bool = False) -> typing.Optional[str]:
        """Prepares the file for a run that goes on from a step.

        It removes the lines of later steps, and a last line that was written by half.

        Args:
          step: the step from which the run goes on.
          is_new: whether the run is new: a file with steps is then renamed.

        Returns:
          A line about what was removed or renamed; None if nothing was.

        Raises:
          LogFileError: the file cannot be read or written.
          BadFileError: a line of it is no JSON object with a step; or it is no regular file.
        """
        self._pending = None
        self._written = {'step': -1}
        content = _read(self.path)
        if is_new and _has_steps(content):
            aside = moved_aside(self.path)
            self._make_file()
            return '%s is of an earlier run, whose checkpoints are gone: renamed to %s' % (
                self.path, aside)
        kept_lines = []
        cut_steps = []
        for line, entry in self._entries_in(content):
            if entry['step'] <= step:
                kept_lines.append(line + b'\n')
                self._written = entry
            else:
                cut_steps.append(entry['step'])
        self._make_file()
        kept = b''.join(kept_lines)
        if kept != content:
            with written_whole(self.path, 'wb') as log:
                log.write(kept)
        if not cut_steps:
            return None
        return 'cut the lines of steps %d to %d from %s: those steps are done again' % (
            cut_steps[0], cut_steps[-1], self.path)

    def _make_file(self) -> None:
        """Makes the file if there is none. If it cannot be written, the run fails here, and not at
        its first line."""
        with _explained(self.path):
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        self._append(b'')

    def _entries_in(self, content: bytes) -> typing.List[typing.Tuple[bytes, dict]]:
        """The lines of the file, each with its object; without a last line written by half.

        Raises:
          BadFileError: another line is no JSON object with a step.
        """
        lines = content.split(b'\n')
        # The text after the last line feed is empty, or half a line, or a whole line without its
        # line feed.
        is_whole = _parse(lines[-1]) is not None
        if not is_whole and _is_torn(lines[-1]):
            lines.pop()
        while lines and not lines[-1].strip():  # empty lines at the end are no mistake
            lines.pop()
        lines_with_entries = []
        for number, line in enumerate(lines, 1):
            entry = _parse(line)
            if entry is None:
                raise BadFileError('line %d of %s is no JSON object with a step: move the file '
                                   'away, or mend that line.' % (number, self.path))
            lines_with_entries.append((line, entry))
        return lines_with_entries

    def add(self, step: int, values: dict) -> None:
        """Adds values to the line of the latest step, or begins the line of a later step.

        Args:
          step: the number of steps done.
          values: dict from names to numbers, texts or None.

        Raises:
          InvalidArgumentError: the step is before the latest step; or a value is of another type.
          LogFileError: the file cannot be written.
        """
        values = {name: _plain(name, value) for name, value in values.items()}
        latest = self._written if self._pending is None else self._pending
        if step < latest['step']:
            raise InvalidArgumentError('step %d is before step %d, which is in %s already.' % (
                step, latest['step'], self.path))
        if step > latest['step']:  # a new line
            self.flush()
            self._pending = dict({'step': step}, **values)
        elif self._pending is not None:  # the line that is kept back
            self._pending.update(values)
        else:  # the line was flushed already, and is in the file
            self._rewrite_last(values)

    def flush(self) -> None:
        """Writes the line that is kept back; after that a kill does not lose it, but a loss of
        power may."""
        if self._pending is not None:
            self._append(_encode(self._pending))
            self._written = self._pending
            self._pending = None

    def sync(self) -> None:
        """Writes the line that is kept back, and waits until the disk has all of the file."""
        self.flush()
        if os.path.exists(self.path):
            with _explained(self.path), open(self.path, 'ab', opener=regular) as log:
                os.fsync(log.fileno())

    def write_csv(self) -> None:
        """Writes all values of the file as a table beside it, `metrics.csv`: a row a step, a column
        for each name, empty where a step has no value."""
        rows = entries(self.path)
        names: typing.Dict[str, None] = {}  # in the order in which they come
        for row in rows:
            names.update(dict.fromkeys(row))
        path = os.path.splitext(self.path)[0] + '.csv'
        with written_whole(path, newline='') as table:  # `csv` makes the line breaks itself
            writer = csv.DictWriter(table, list(names))
            writer.writeheader()
            writer.writerows(rows)

    def _append(self, line: bytes) -> None:
        """Appends bytes to the file, which it opens for that: a run may end in an error."""
        with _explained(self.path), open(self.path, 'ab', opener=regular) as log:
            log.write(line)

    def _rewrite_last(self, values: dict) -> None:
        """Adds values to the last line of the file."""
        complete = dict(self._written, **values)
        if complete == self._written:
            return
        content = _read(self.path)
        line_feed_before_last_line = content.rstrip(b'\n').rfind(b'\n')  # -1 if there is one line
        earlier_lines = content[:line_feed_before_last_line + 1]
        with written_whole(self.path, 'wb') as log:
            log.write(earlier_lines + _encode(complete))
        self._written = complete


@contextlib.contextmanager
def _explained(path: str) -> typing.Iterator[None]:
    """A context in which an `OSError` becomes a `LogFileError` about the file `path`."""
    try:
        yield
    except OSError as error:
        raise LogFileError('%s: %s.' % (path, error.strerror or error)) from error


def _read(path: str) -> bytes:
    """The content of the file; empty if there is none."""
    with _explained(path):
        return read_data(path, _MOST_BYTES) or b''


def entries(path: str) -> typing.List[dict]:
    """The objects in the lines of a file, each with an int `step`; other lines are left out."""
    parsed_lines = [_parse(line) for line in _read(path).split(b'\n')]
    return [entry for entry in parsed_lines if entry is not None]


def _parse(line: bytes) -> typing.Optional[dict]:
    """The object in a line, a dict with an int `step`; None if the line is something else."""
    try:
        entry = parsed(line, {'step': int, str: SCALAR})
    except ValueError:
        return None
    return entry if 0 <= entry['step'] <= MOST_STEPS else None


def _has_steps(content: bytes) -> bool:
    """Whether a file has something in it that is worth keeping when a new run begins.

    That is a line of a later step than 0; or a line that is no object with a step, which this
    program has not written. Lines for step 0 alone are of a run that was stopped before its first
    step: the new run writes them anew.
    """
    lines = content.split(b'\n')
    for line in filter(bytes.strip, lines):
        entry = _parse(line)
        if entry is None or entry['step'] > 0:
            return True
    return False


def _is_torn(line: bytes) -> bool:
    r"""Whether the last line of a file, without a line feed, was written by half.

        {"step": 100, "epo       the first bytes of a line
        {"st                     still fewer, not all of `_BEGIN`
        {"step": 100, "e\0\0     after a loss of power: NULs for bytes that never came to the disk
    """
    line = line.rstrip(b'\0')
    return line.startswith(_BEGIN) or _BEGIN.startswith(line)


def _plain(name: str, value: typing.Any) -> typing.Any:
    """A value of a type that JSON has: a numpy scalar, or an array of one number, becomes Python's.

    Args:
      name: the name of the value, for the error.
      value: a number, a text or None.

    Raises:
      InvalidArgumentError: the value is something else.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]  # its one number
    if isinstance(value, np.float64):
        return float(value)  # the same 64 bits
    if isinstance(value, np.generic) and tf.as_dtype(value.dtype).is_floating:
        return float(str(value))  # the fewest digits that give the same float32 (or bfloat16) again
    if isinstance(value, (np.integer, np.bool_)):
        return value.item()
    if isinstance(value, bytes):
        return value.decode('utf-8', 'replace')
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InvalidArgumentError('%s=%.80s cannot be logged: expected one number.' % (
        name, ' '.join(repr(value).split())))


def _encode(entry: dict) -> bytes:
    """The line of the file for an object; NaN and infinity become null, which JSON has."""
    line = {}
    for name, value in entry.items():
        is_no_number = isinstance(value, float) and not math.isfinite(value)
        line[name] = None if is_no_number else value
    return json.dumps(line, allow_nan=False).encode('utf-8') + b'\n'
