"""The largest batch that fits: by the account only, or confirmed by running a step."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance, check_say
from towers.errors import InvalidArgumentError, MeasurementError, OutOfMemoryError
from towers.memory.account import MemoryAccount, memory_account
from towers.memory.limits import checked_limit, device_limit, is_out_of_memory
from towers.memory.measure import (
    MeasuredMemory,
    called_build,
    check_build,
    config_of,
    measure_memory,
)

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
    limit = checked_limit(memory_limit)
    if most is not None:
        check_count('most', most)
    return _largest_batch(built, limit or device_limit(built.devices), most)


def _largest_batch(built: BuiltTowers, limit: int, most: typing.Optional[int]) -> FittedBatch:
    """Finds the largest batch that fits: by doubling, then by bisection, to 1/64 of its size.

    Args:
      built: the towers.
      limit: bytes that a step may take.
      most: the argument of `largest_batch`.

    Raises:
      OutOfMemoryError, InvalidArgumentError: see `largest_batch`.
    """
    # The examples of a step in which the smallest shard, or micro-batch, has one.
    examples_of_one = sum(built.plan.shares)
    micro_batches = 1 + max(tower.micro_batch for tower in built.towers)
    place = 'tower' if micro_batches == 1 else 'micro-batch'
    if most is not None and most < examples_of_one:
        raise InvalidArgumentError('most=%d examples leave some of %d %ss without one.' % (
            most, examples_of_one, place))
    end = MOST_PER_TOWER
    if most is not None:
        end = min(end, most // examples_of_one)
    account = memory_account(built, examples_of_one)
    if account.peak > limit:
        raise OutOfMemoryError(
            'not one example a %s fits: a step of %d takes %.1f MB by the account, and there '
            'are %.1f MB. The largest: %s.' % (
                place, examples_of_one, account.peak / 1e6, limit / 1e6, account.largest()))
    fitting = 1  # examples of the smallest shard
    too_many = end + 1
    while too_many - fitting > max(1, fitting // 64):
        guess = min(2 * fitting, (fitting + too_many) // 2)
        guessed = memory_account(built, guess * examples_of_one)
        if guessed.peak <= limit:
            fitting = guess
            account = guessed
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
    limit = checked_limit(memory_limit)
    if most is not None:
        check_count('most', most)
    check_say(say, optional=True)
    say = say or (lambda line: None)
    with tf.Graph().as_default():
        built, _ = called_build(build, first)
        if limit is None:
            limit = device_limit(built.devices)
        unit = sum(built.plan.shares)
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
            most = max(unit, fitted.batch_size - unit)  # never the same one again
    raise OutOfMemoryError(
        'no batch was found that fits %.1f MB: %d were run, the last of %d examples. Give a '
        'batch size, or more memory.' % (limit / 1e6, _TRIES, fitted.batch_size))


def _run(build: typing.Callable, batch_size: int, config: typing.Optional[typing.Callable]
         ) -> typing.Optional[MeasuredMemory]:
    """Runs a step of `build(batch_size)`, and measures its memory.

    Args:
      build, config: the arguments of `fit_batch_size`.
      batch_size: examples of the step.

    Returns:
      `MeasuredMemory`; None where TensorFlow does not count memory.
    """
    with tf.Graph().as_default():
        built, start = called_build(build, batch_size)
        try:
            return measure_memory(built, start=start, config=config_of(built, config))
        except MeasurementError:
            return None
