"""The largest batch that fits: by the account only, or confirmed by running a step."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance, check_say
from towers.errors import InvalidArgumentError, MeasurementError, OutOfMemoryError
from towers.memory.account import memory_account
from towers.memory.account_table import MemoryAccount
from towers.memory.limits import checked_limit, device_limit, is_out_of_memory
from towers.memory.measure import (
    MeasuredMemory,
    called_build,
    check_build,
    config_of,
    measure_memory,
)

# The search ends at this number of examples for each tower; with shares or micro-batches, for the
# smallest shard or micro-batch.
MOST_PER_TOWER = 1 << 16
_TRIES = 6  # the most steps that are run until one fits


class FittedBatch(typing.NamedTuple):
    """The largest batch that fits; `print(fitted)` says why.

    Attributes:
      batch_size: examples of a step, over all towers.
      per_tower: examples of each tower, in all its micro-batches; with `shares`, of the tower with
        the largest share.
      limit: bytes of memory that a step may take.
      account: `MemoryAccount` of that batch.
      measured: `MeasuredMemory`; None where no step was run, or TensorFlow counted no memory.
      micro_batches: how many micro-batches each tower's examples are cut into.
      ends_search: whether the search has ended at its bound, 65,536 examples a tower, so that more
        may fit.
    """
    batch_size: int
    per_tower: int
    limit: int
    account: MemoryAccount
    measured: typing.Optional[MeasuredMemory]
    micro_batches: int
    ends_search: bool

    def __str__(self):
        """The batch, and its memory beside the limit."""
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
      memory_limit: bytes that a step may take, a whole number such as `50e6`. The limit is for the
        memory of each GPU, or for the one memory that all CPUs of the process share. None: all the
        memory that the devices have.
      most: the largest batch to consider (the size of the data set, say), or None. The search ends
        at 65,536 examples a tower, and the result says so.

    Returns:
      `FittedBatch`. With `shares`, such as 3 and 1, its batch is a multiple of their sum, here of
      4; else it divides evenly among the towers.

    Raises:
      OutOfMemoryError: a batch of one example a tower, or a micro-batch, does not fit.
      InvalidArgumentError: `most` is less than one example a tower, or a micro-batch.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    limit = checked_limit(memory_limit)
    if most is not None:
        check_count('most', most)
    if limit is None:
        limit = device_limit(built.devices)
    return _largest_batch(built, limit, most)


def _largest_batch(built: BuiltTowers, limit: int, most: typing.Optional[int]) -> FittedBatch:
    """Finds the largest batch that fits by the account; see `largest_batch`.

    Args:
      built: the towers.
      limit: bytes that a step may take.
      most: the largest batch to consider; or None.

    Raises:
      OutOfMemoryError: a batch of one example a tower, or a micro-batch, does not fit.
      InvalidArgumentError: `most` is less than one example a tower, or a micro-batch.
    """
    # The number of examples of the smallest batch in which each tower, or micro-batch, has an
    # example. The sizes of the batches that are tried are multiples of it.
    unit = sum(built.plan.shares)
    # `micro_batch` is the index of a micro-batch in its tower.
    micro_batches = 1 + max(tower.micro_batch for tower in built.towers)
    place = 'tower' if micro_batches == 1 else 'micro-batch'
    if most is not None and most < unit:
        num_places = len(built.towers)  # there is an entry for each micro-batch of each tower
        raise InvalidArgumentError('most=%d examples leave some of %d %ss without one.' % (
            most, num_places, place))
    account = memory_account(built, unit)
    if account.peak > limit:
        raise OutOfMemoryError(
            'not one example a %s fits: a step of %d takes %.1f MB by the account, and there '
            'are %.1f MB. The largest: %s.' % (
                place, unit, account.peak / 1e6, limit / 1e6, account.largest()))
    most_units = MOST_PER_TOWER
    if most is not None:
        most_units = min(most_units, most // unit)
    found = _search(built, unit, account, limit, most_units)
    # The share of a tower, or of each of its micro-batches: with shares 3 and 1, one unit has 3
    # examples for each micro-batch of the first tower.
    largest_share = max(built.plan.shares)
    # The search's own bound has stopped it, and neither the limit nor `most`.
    stopped_by_bound = found.all_fit and most_units == MOST_PER_TOWER
    return FittedBatch(
        batch_size=found.units * unit,
        per_tower=found.units * largest_share * micro_batches, limit=limit,
        account=found.account, measured=None, micro_batches=micro_batches,
        ends_search=stopped_by_bound)


class _Found(typing.NamedTuple):
    """The largest batch that a search has found to fit."""
    units: int
    account: MemoryAccount
    all_fit: bool  # whether all batches that were tried fit


def _search(built: BuiltTowers, unit: int, account: MemoryAccount, limit: int,
            most_units: int) -> _Found:
    """Finds the largest batch that fits: by doubling, then by bisection, to 1/64 of its size.

    Args:
      built: the towers.
      unit: the batches that are tried are multiples of it.
      account: the account of a batch of one unit, which fits.
      limit: bytes that a step may take.
      most_units: the largest multiple to try.
    """
    units_that_fit = 1
    too_many_units = most_units + 1
    all_fit = True
    while too_many_units - units_that_fit > max(1, units_that_fit // 64):
        half_way = (units_that_fit + too_many_units) // 2
        guess = min(2 * units_that_fit, half_way)
        account_of_guess = memory_account(built, guess * unit)
        if account_of_guess.peak <= limit:
            units_that_fit = guess
            account = account_of_guess
        else:
            too_many_units = guess
            all_fit = False
    return _Found(units_that_fit, account, all_fit)


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
      say: called with a line about each batch that was run; None for silence.
      config: function from `built` to the `tf.ConfigProto` of a session; None for
        `session_config`'s.
      most: see `largest_batch`.

    Returns:
      `FittedBatch`; `measured` is None where TensorFlow's allocator does not count memory: then it
      is only known that the step ran.

    Raises:
      OutOfMemoryError: no batch fits by the account; or several batches that fit by the account
        were run, and none of these steps stayed within the limit.
      InvalidArgumentError: an argument of another kind; `build` returns something else.
    """
    check_build(build, config)
    check_count('first', first)
    limit = checked_limit(memory_limit)
    if most is not None:
        check_count('most', most)
    check_say(say, optional=True)
    say = say or (lambda line: None)
    with tf.Graph().as_default():
        built, _ = called_build(build, first)
        if limit is None:
            limit = device_limit(built.devices)
        return _confirmed_batch(built, limit, most, say,
                                run=lambda batch_size: _run(build, batch_size, config))


def _confirmed_batch(built: BuiltTowers, limit: int, most: typing.Optional[int],
                     say: typing.Callable,
                     run: typing.Callable[[int], '_Trial']) -> FittedBatch:
    """Runs a step of the largest batch that fits by the account; where that step takes more than
    the limit, runs a step of a smaller batch, and so on.

    Args:
      built: the towers.
      limit: bytes that a step may take.
      most: the largest batch to consider; or None.
      say: called with a line about each step.
      run: function that runs a step of a batch size.

    Raises `OutOfMemoryError` if none of `_TRIES` steps fits.
    """
    unit = sum(built.plan.shares)
    # The largest peak that the account of the next batch may have. It is the limit at first, and
    # less after a step that has taken more than its account says.
    accounted_limit = limit
    for _ in range(_TRIES):
        fitted = _largest_batch(built, accounted_limit, most)
        trial = run(fitted.batch_size)
        fitted = fitted._replace(limit=limit, measured=trial.measured)
        if trial.ran_out_of_memory:
            say('batch %d ran out of memory: trying less' % fitted.batch_size)
            # How many bytes were missing is not known: the next account has to be a tenth less.
            accounted_limit = int(fitted.account.peak * 0.9)
        elif trial.measured is not None and trial.measured.peak > limit:
            say('%s: trying less' % (fitted,))
            # Less by the factor of the error, and by 5 % at least, so that few tries are enough.
            factor = min(0.95, limit / float(trial.measured.peak))
            accounted_limit = int(accounted_limit * factor)
        else:
            say(str(fitted))
            return fitted
        # The next batch is smaller than this one. Only the smallest batch, of one unit, may be run
        # again, as long as its account is within `accounted_limit`.
        most = max(unit, fitted.batch_size - unit)
    raise OutOfMemoryError(
        'no batch was found that fits %.1f MB: %d were run, the last of %d examples. Give a '
        'batch size, or more memory.' % (limit / 1e6, _TRIES, fitted.batch_size))


class _Trial(typing.NamedTuple):
    """A step that was run in order to see whether its batch fits."""
    ran_out_of_memory: bool
    measured: typing.Optional[MeasuredMemory]  # None where TensorFlow does not count memory


def _run(build: typing.Callable, batch_size: int,
         config: typing.Optional[typing.Callable]) -> _Trial:
    """Runs a step of `build(batch_size)`, and measures its memory.

    Args:
      build, config: the arguments of `fit_batch_size`.
      batch_size: examples of the step.
    """
    with tf.Graph().as_default():
        built, start = called_build(build, batch_size)
        try:
            measured = measure_memory(built, start=start, config=config_of(built, config))
        except MeasurementError:  # the step has run, and TensorFlow has counted nothing
            return _Trial(ran_out_of_memory=False, measured=None)
        except tf.errors.ResourceExhaustedError as error:
            if not is_out_of_memory(error):
                raise
            return _Trial(ran_out_of_memory=True, measured=None)
        return _Trial(ran_out_of_memory=False, measured=measured)
