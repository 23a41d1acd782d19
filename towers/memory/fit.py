"""The account beside the measurement, the largest batch that fits, and advice where none does."""

import contextlib
import numbers
import re
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import (check_count, check_instance, check_number, check_say,
                              directory_name)
from towers.errors import InvalidArgumentError, MeasurementError, OutOfMemoryError
from towers.memory.account import MemoryAccount, memory_account
from towers.memory.measure import (MeasuredMemory, called_build, check_build, device_limit, draw,
                                   figure_class, is_out_of_memory, measure_memory)
from towers.placement.devices import is_gpu, short_name

MOST_PER_TOWER = 1 << 16  # examples, the end of the search
_TRIES = 6


class FittedBatch(typing.NamedTuple):
    """The largest batch that fits; `print(fitted)` says why.

    Attributes:
      batch_size: examples of a step, over all towers.
      per_tower: examples of each tower, in all its micro-batches; with `shares` the most of them.
      limit: bytes of memory that a step may take.
      account: `MemoryAccount` of that batch.
      measured: `MeasuredMemory`; None where no step was run, or TensorFlow did not count.
      micro_batches: how many micro-batches each tower's examples are cut into.
      ends_search: whether more may fit: the search ends at 65,536 examples a tower.
    """
    batch_size: int
    per_tower: int
    limit: int
    account: MemoryAccount
    measured: typing.Optional[MeasuredMemory]
    micro_batches: int
    ends_search: bool

    def __str__(self):
        micro_batches = ''
        if self.micro_batches > 1:
            micro_batches = ' in %d micro-batches' % self.micro_batches
        text = 'batch %d, %d a tower%s: %.1f MB predicted of %.1f MB' % (
            self.batch_size, self.per_tower, micro_batches, self.account.peak / 1e6,
            self.limit / 1e6)
        if self.measured is not None:
            text += ', %.1f MB measured' % (self.measured.peak / 1e6)
        if self.ends_search:
            text += '; the search ends here, and more may fit'
        return text


def largest_batch(built: BuiltTowers, memory_limit: typing.Optional[float] = None,
                  most: typing.Optional[int] = None) -> FittedBatch:
    """The largest batch that fits by the account: nothing is run.

    Args:
      built: the result of `build_towers`, at any batch size.
      memory_limit: bytes that a step may take of each memory (of a GPU's, or of the one memory that
        all CPUs of the process share), a whole number, such as `50e6`; None: all that the devices
        have.
      most: the largest batch to consider (the size of the data set, say), or None. The search ends
        at 65,536 examples a tower, and the result says so.

    Returns:
      `FittedBatch`: a multiple of the sum of the build's `shares`, of equal shards without them.

    Raises:
      OutOfMemoryError: not one example a tower, or a micro-batch, fits.
      InvalidArgumentError: `most` is less than one example a tower, or a micro-batch.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    limit = _checked_limit(memory_limit)
    if most is not None:
        check_count('most', most)
    return _largest_batch(built, limit or device_limit(built.devices), most)


def _largest_batch(built, limit, most):
    """`largest_batch` of checked arguments, by doubling and then by halves, to 1/64 of it."""
    examples_of_one = sum(built.plan.shares)  # the examples of a step in which the least part has 1
    micro_batches = 1 + max(tower.micro_batch for tower in built.towers)
    part = 'tower' if micro_batches == 1 else 'micro-batch'
    if most is not None and most < examples_of_one:
        raise InvalidArgumentError('most=%d examples leave some of %d %ss without one.' % (
            most, examples_of_one, part))
    end = MOST_PER_TOWER
    if most is not None:
        end = min(end, most // examples_of_one)
    account = memory_account(built, examples_of_one)
    if account.peak > limit:
        raise OutOfMemoryError(
            'not one example a %s fits: a step of %d takes %.1f MB by the account, and there '
            'are %.1f MB. The largest: %s.' % (
                part, examples_of_one, account.peak / 1e6, limit / 1e6, account.largest()))
    fitting, too_many = 1, end + 1
    while too_many - fitting > max(1, fitting // 64):
        guess = min(2 * fitting, (fitting + too_many) // 2)
        guessed = memory_account(built, guess * examples_of_one)
        if guessed.peak <= limit:
            fitting, account = guess, guessed
        else:
            too_many = guess
    return FittedBatch(
        batch_size=fitting * examples_of_one,
        per_tower=fitting * micro_batches * max(built.plan.shares), limit=limit, account=account,
        measured=None, micro_batches=micro_batches,
        ends_search=too_many > MOST_PER_TOWER)


def fit_batch_size(build: typing.Callable, first: int,
                   memory_limit: typing.Optional[float] = None,
                   say: typing.Optional[typing.Callable] = None,
                   config: typing.Optional[typing.Callable] = None,
                   most: typing.Optional[int] = None) -> FittedBatch:
    """The largest batch that fits, found by the account and confirmed by running a step.

    Args:
      build: called as `build(batch_size)`, under a graph of its own; returns `(built, start)`:
        the result of `build_towers` for real input, and a list of operations to be run once after
        the variables are initialized (the initializer of the input's iterator).
      first: batch size to build for the account: any that divides among the towers.
      memory_limit: see `largest_batch`.
      say: called with each line about what was found; None for silence.
      config: function from `built` to the `tf.ConfigProto` of a session; None for
        `session_config`'s.
      most: see `largest_batch`.

    Returns:
      `FittedBatch`; `measured` is None where TensorFlow's allocator does not count: all that is
      known then is that the step ran.

    Raises:
      OutOfMemoryError: nothing fits, or what should fit did not in several tries.
      InvalidArgumentError: an argument of another kind; `build` returns something else.
    """
    check_build(build, config)
    check_count('first', first)
    limit = _checked_limit(memory_limit)
    if most is not None:
        check_count('most', most)
    check_say(say, optional=True)
    say = say or (lambda line: None)
    with tf.Graph().as_default():
        built, _ = called_build(build, first)
        limit = limit or device_limit(built.devices)
        goal = limit
        for _ in range(_TRIES):
            fitted = _largest_batch(built, goal, most)._replace(limit=limit)
            try:
                fitted = fitted._replace(measured=_run(build, fitted.batch_size, config))
            except tf.errors.ResourceExhaustedError as error:
                if not is_out_of_memory(error):
                    raise
                say('batch %d ran out of memory: trying less' % fitted.batch_size)
                goal = int(min(goal, fitted.account.peak) * 0.9)
            else:
                if fitted.measured is None or fitted.measured.peak <= limit:
                    say(str(fitted))
                    return fitted
                say('%s: trying less' % (fitted,))
                goal = int(goal * min(0.95, limit / float(fitted.measured.peak)))
            unit = sum(built.plan.shares)
            most = max(unit, fitted.batch_size - unit)  # never the same one again
    raise OutOfMemoryError(
        'no batch was found that fits %.1f MB: %d were run, the last of %d examples. Give a '
        'batch size, or more memory.' % (limit / 1e6, _TRIES, fitted.batch_size))


def _run(build, batch_size, config):
    with tf.Graph().as_default():
        built, start = called_build(build, batch_size)
        try:
            return measure_memory(built, start=start, config=config(built) if config else None)
        except MeasurementError:
            return None


def _checked_limit(memory_limit):
    """`memory_limit` in bytes, an int; None for None. A float such as `50e6` may be whole, too."""
    if isinstance(memory_limit, numbers.Real) and not isinstance(memory_limit, numbers.Integral):
        check_number('memory_limit', memory_limit, least=1, expected=_BYTES)
        if memory_limit != int(memory_limit):
            raise InvalidArgumentError('memory_limit=%r: expected %s.' % (memory_limit, _BYTES))
        return int(memory_limit)
    if memory_limit is not None:
        check_count('memory_limit', memory_limit)
    return memory_limit


_BYTES = 'a whole number of bytes, such as 50e6, or None'


def memory_report(build: typing.Callable, batch_size: int,
                  memory_limit: typing.Optional[float] = None, path: typing.Optional[str] = None,
                  config: typing.Optional[typing.Callable] = None,
                  say: typing.Callable = print) -> None:
    """Predicts and measures a step's memory at 1/4, 1/2, 1 and 2 times a batch size.

    Args:
      build: as for `fit_batch_size`.
      batch_size: examples.
      memory_limit: bytes that a step may take; None: all that the devices have.
      path: name of the PNG to write, or None.
      config: function from `built` to the `tf.ConfigProto` of a session; None for
        `session_config`'s.
      say: called with each text: plan, account, a line for each batch size.

    Raises:
      MissingPackageError: a picture is wanted and matplotlib is not installed; nothing has been
        run by then.
      LogFileError: the picture cannot be written.
      InvalidArgumentError: an argument of another kind; `build` returns something else.
    """
    if path is not None:
        path = directory_name('path', path, 'the name of a file, or None')
        figure_class()
    check_build(build, config)
    check_count('batch_size', batch_size)
    limit = _checked_limit(memory_limit)
    check_say(say)
    with tf.Graph().as_default():
        built, _ = called_build(build, batch_size)
        say(str(built.plan))
        if limit is None:
            limit = device_limit(built.devices, config(built) if config else None)
        say(str(memory_account(built, batch_size)))
    unit = sum(built.plan.shares)
    accounts, measured = [], []
    for size in sorted({max(1, int(batch_size * factor) // unit) * unit
                        for factor in (0.25, 0.5, 1, 2)}):
        account, peak, text = _of_size(build, size, limit, config)
        accounts.append(account)
        if peak is not None:
            measured.append((size, peak))
        say(text)
    if path is not None:
        draw(accounts, path, measured, limit, 'memory of a step, %d tower%s' % (
            len(built.towers), '' if len(built.towers) == 1 else 's'))
        say('picture: %s' % path)


def _of_size(build, size, limit, config):
    """`(MemoryAccount, measured bytes or None, text)` of a step at a batch size."""
    with tf.Graph().as_default():
        built, start = called_build(build, size)
        account = memory_account(built, size)
        text = 'batch %d: predicted %.1f MB, ' % (size, account.peak / 1e6)
        if account.peak > limit:
            return account, None, text + 'more than the limit, %.1f MB: not run' % (limit / 1e6)
        try:
            found = measure_memory(built, start=start, config=config(built) if config else None)
        except tf.errors.ResourceExhaustedError as error:
            if not is_out_of_memory(error):
                raise
            return account, None, text + 'and it ran out of memory'
        except MeasurementError as error:
            return account, None, text + 'not measured: %s' % error
        return account, found.peak, found.against(account)


# ---- a step that runs out of memory --------------------------------------------------------------

_NODE = re.compile(r'\{\{node ([^}]+)\}\}|\[\[(?:node )?([^\s\]{]+)')


@contextlib.contextmanager
def out_of_memory_explained(built: BuiltTowers, directory: typing.Optional[str] = None,
                            memory_limit: typing.Optional[float] = None,
                            batch_size: typing.Optional[int] = None) -> typing.Iterator[None]:
    """A context in which a step that runs out of memory raises an `OutOfMemoryError` with advice.

    >>> with towers.out_of_memory_explained(built):  # around a MonitoredTrainingSession as well
    ...     session.run(built.train_op)

    Args:
      built: the result of `build_towers`.
      directory: of the run's checkpoints, or None.
      memory_limit: bytes of each memory; None: all that the devices have.
      batch_size: examples of the step, needed where the batch has no static size.

    Raises:
      OutOfMemoryError: in place of the `tf.errors.ResourceExhaustedError`, which is its cause.
      InvalidArgumentError: an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if directory is not None:
        directory_name('directory', directory, 'the name of a directory, or None')
    limit = _checked_limit(memory_limit)
    if batch_size is not None:
        check_count('batch_size', batch_size)
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if not is_out_of_memory(error):
            raise
        lines = [_request(error, built)]
        if batch_size is not None or built.plan.batch_size is not None:
            lines += _advice(built, batch_size, limit or device_limit(built.devices))
        checkpoint = tf.train.latest_checkpoint(directory) if directory else None
        if checkpoint:
            lines.append('Nothing of this step was saved; the run goes on from %s.' % checkpoint)
        raise OutOfMemoryError(' '.join(lines)) from error


def _request(error, built):
    """Where memory ran out, and what TensorFlow says of it: a text."""
    message = ' '.join(str(error.message).split('\n')[0].split())
    found = _NODE.search(str(error))
    name = getattr(getattr(error, 'op', None), 'name', None) or found and (
        found.group(1) or found.group(2))
    who = next(('Tower %d on %s' % (tower.index, short_name(tower.device))
                for tower in built.towers if name and tower.has(name)), 'The step')
    return '%s ran out of memory%s: %s.' % (who, ' in %s' % name if name else '', message)


def _advice(built, batch_size, limit):
    """Sentences: what a step takes, the largest batch that should fit, and what to do."""
    try:
        account = memory_account(built, batch_size)
    except InvalidArgumentError as error:  # a sparse batch
        return [str(error)]
    lines = ['A step of batch %d takes %.1f MB at its worst moment, by the account; there are %.1f '
             'MB. The largest of it: %s.' % (
                 account.batch_size, account.peak / 1e6, limit / 1e6, account.largest())]
    try:
        fitted = _largest_batch(built, limit, None)
    except OutOfMemoryError:
        return lines + ['No batch fits, not one example a tower.']
    pieces = max(2, -(-account.batch_size // fitted.batch_size))
    return lines + [
        'The largest batch that should fit: %d, %d a tower.' % (
            fitted.batch_size, fitted.per_tower),
        'Less memory for the same batch: memory=towers.Memory(accumulate=%d), or '
        "Memory(recompute='auto')%s." % (
            pieces, '; more devices, as towers or as stages of one' if any(
                map(is_gpu, built.devices)) else ' (CPUs share one memory)')]
