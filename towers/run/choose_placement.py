"""Chooses where variables live, by timing a few steps of each placement."""

import collections
import contextlib
import statistics
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_function, check_instance, check_number
from towers.errors import InvalidArgumentError, TowersError
from towers.memory.measure import filled_queues
from towers.nonfinite import NonFiniteError, explained
from towers.placement.devices import resolve_devices, short_name
from towers.placement.tower_device import stages_of
from towers.tensorflow_errors import is_of_input, reason_of

Trial = collections.namedtuple('Trial', 'train_op start config')
"""A training to be timed.

Fields:
  train_op: the operation of a step.
  start: list of operations to run once after the variables' initializers, such as the iterator's.
  config: `tf.ConfigProto` of the session.
"""

class Timing(collections.namedtuple('Timing', 'variable_device seconds problem')):
    """The measurement of one placement; `str(timing)` is its line of the table.

    Attributes:
      variable_device: as `VariablePlacement` takes a device.
      seconds: list of floats, seconds a step in each turn; empty where the placement failed.
      problem: the reason of the failure, a string; or None.
    """
    __slots__ = ()

    @property
    def median(self):
        """Seconds a step, the median of the turns."""
        return statistics.median(self.seconds)

    def __str__(self):
        name = '  %-16s ' % short_name(self.variable_device)
        if self.problem is not None:
            return name + 'not possible: ' + self.problem
        return name + '%8.2f ms a step (%.2f to %.2f)' % (
            1e3 * self.median, 1e3 * min(self.seconds), 1e3 * max(self.seconds))


class PlacementChoice(collections.namedtuple('PlacementChoice', 'variable_device reason timings')):
    """The placement that was chosen; `print(choice)` is a small table.

    Attributes:
      variable_device: as `VariablePlacement` takes a device.
      reason: why, in words.
      timings: list of the `Timing`s of all candidates, in their order.
    """
    __slots__ = ()

    def __str__(self):
        return '\n'.join(['variables on %s: %s' % (short_name(self.variable_device), self.reason)]
                         + [str(timing) for timing in self.timings])


def placement_candidates(devices: typing.Any) -> typing.List[str]:
    """The placements worth a try for towers on these devices, the simplest first.

    Args:
      devices: the towers' devices, as `build_towers` takes them.

    Returns:
      List of `variable_device`s: the CPU, the first tower's device, `'balanced'`, and, of several
      towers, `'replicated'` (of towers that are stages, `'stage'`).
    """
    devices = resolve_devices(devices, check=False)
    candidates = ['/device:CPU:0', str(devices[0]), 'balanced']
    if len(stages_of(devices[0])) > 1:
        candidates.append('stage')
    elif len(devices) > 1:
        candidates.append('replicated')
    return sorted(set(candidates), key=candidates.index)


def choose_variable_device(build: typing.Callable, candidates: typing.Sequence, turns: int = 5,
                           turn_seconds: float = 0.3, warm_up: int = 3) -> PlacementChoice:
    """Times a few steps of each placement and chooses one.

    Each candidate has a graph and a session of its own, and all of them take turns, so that other
    load on the machine slows all of them alike. Memory holds the variables of all candidates at a
    time. No file is written, and all sessions are closed at the end.

    Chosen is the first candidate in the list that is as fast as the fastest one: the candidate with
    the least median, or one that differs from it by less than the spread of the turns (its least
    time is at most the fastest median, or its median at most the fastest one's greatest time).

    Args:
      build: called once a candidate, as `build(variable_device)`, under a graph of its own; returns
        a `Trial`, with real input.
      candidates: list of placements as `VariablePlacement` takes a device, the simplest
        first; see `placement_candidates`.
      turns: how many each candidate has.
      turn_seconds: length of a turn, within 1 to 50 steps of the fastest candidate.
      warm_up: steps of each candidate before its first turn.

    Returns:
      `PlacementChoice`. Candidates that cannot be built or run are in its table, with the reason.

    Raises:
      InvalidArgumentError: no candidates, one twice, or fewer than one turn or warm-up step.
      NonFiniteError: a step found a NaN or an infinity, which no other placement would mend.
      tf.errors.OpError: an iterator could not give a batch, nor would it to another placement.
      Exception: what the first candidate raised, if none can be run.
    """
    check_function('build', build, 1, 'a function from a placement to a Trial')
    if not isinstance(candidates, (list, tuple)):
        raise InvalidArgumentError('candidates=%.80r: expected a list of placements.'
                                   % (candidates,))
    for name, value in (('turns', turns), ('warm_up', warm_up)):
        check_count(name, value)
    check_number('turn_seconds', turn_seconds, least=0, expected='seconds')
    if not candidates or any(each in candidates[:place] for place, each in enumerate(candidates)):
        raise InvalidArgumentError(
            'candidates=%r: expected different placements, one at least.' % (candidates,))
    runners = collections.OrderedDict((candidate, _Runner(warm_up)) for candidate in candidates)
    failures, seconds = {}, {candidate: [] for candidate in candidates}

    def attempt(candidate, action, *arguments):
        """What `action` returns; or None if it failed, and the candidate is out of the choice."""
        try:
            return action(*arguments)
        except NonFiniteError:
            raise
        except _FAILURES as error:
            if is_of_input(error):  # it is nothing about the placement
                raise
            failures[candidate] = error
            runners.pop(candidate).close()
            if not runners:
                raise failures[candidates[0]]
            return None
    try:
        for candidate in candidates:
            attempt(candidate, runners[candidate].start, build, candidate)
        steps = max(1, min(50, int(turn_seconds / min(
            runner.step_seconds for runner in runners.values()))))
        for turn in range(turns):
            for candidate in list(runners) if turn % 2 == 0 else list(runners)[::-1]:
                seconds[candidate].append(attempt(candidate, runners[candidate].time, steps))
    finally:
        for runner in runners.values():
            runner.close()
    return decide([
        Timing(candidate, [] if candidate in failures else seconds[candidate],
               reason_of(failures[candidate])[:200] if candidate in failures else None)
        for candidate in candidates])


def decide(timings):
    """The `PlacementChoice` that follows from a list of `Timing`s, the simplest placement first."""
    run = [timing for timing in timings if timing.problem is None]
    fastest = min(run, key=lambda timing: timing.median)
    taken = next(timing for timing in run if _within_spread(timing, fastest))
    if len(run) == 1:
        reason = 'the only one that is possible' if len(timings) > 1 else 'the only one there is'
    elif taken is fastest:
        reason = 'the fastest'
    else:
        reason = 'no slower than %s beyond the spread of the turns, and simpler' % short_name(
            fastest.variable_device)
    return PlacementChoice(taken.variable_device, reason, timings)


class _Runner:
    """One candidate's graph and session.

    Attributes:
      step_seconds: of the last step of the warm-up; None before `start`.
    """

    def __init__(self, warm_up):
        self.step_seconds = None
        self._warm_up = warm_up
        self._session = self._step = None
        self._open = contextlib.ExitStack()
        self._number = 0

    def start(self, build, candidate):
        """Builds the candidate's `Trial`, initializes it, and runs the warm-up."""
        with tf.Graph().as_default() as graph:
            trial = build(candidate)
            check_instance('what build(%r) returned' % (candidate,), trial, Trial, 'a Trial')
            begin = [tf.global_variables_initializer(), tf.local_variables_initializer(),
                     tf.tables_initializer()]
            self._session = tf.Session(graph=graph, config=trial.config)
            for operation in begin + list(trial.start):
                self._session.run(operation)
            self._open.enter_context(filled_queues(self._session))
            self._step = self._session.make_callable(trial.train_op)
            for _ in range(self._warm_up):
                self.step_seconds = self.time(1)

    def time(self, steps):
        """Runs steps; returns seconds a step.

        Raises:
          NonFiniteError: `Numerics(check_numerics=True)` found a NaN or an infinity.
        """
        begin = time.perf_counter()
        for _ in range(steps):
            self._number += 1
            try:
                self._step()
            except tf.errors.InvalidArgumentError as error:
                raise explained(error, self._number) or error from None
        return (time.perf_counter() - begin) / steps

    def close(self):
        """Closes the session."""
        self._open.close()
        if self._session is not None:
            self._session.close()


# Errors of a placement that does not suit the model or the machine.
_FAILURES = (TowersError, tf.errors.OpError, ValueError, TypeError, RuntimeError)


def _within_spread(one, fastest):
    """Whether the times of one `Timing` overlap with the median of the other."""
    return (one is fastest or min(one.seconds) <= fastest.median
            or one.median <= max(fastest.seconds))
