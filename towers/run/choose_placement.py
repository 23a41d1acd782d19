"""Where variables should live, found out by timing a few steps of each placement."""

import collections
import json
import os
import statistics
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_function, check_instance, check_number
from towers.errors import CheckpointError, InvalidArgumentError, TowersError
from towers.nonfinite import NonFiniteError, explained
from towers.placement.devices import resolve_devices, short_name
from towers.placement.tower_device import stages_of
from towers.reason import reason_of
from towers.run.run_lock import hold_directory

Trial = collections.namedtuple('Trial', 'train_op start config')
"""What is timed: the operation of a step, a list of operations to run once after the variables'
initial values (of the input's iterator), and the `tf.ConfigProto` of the session."""

RECORD = 'variable_device.json'


class Timing(collections.namedtuple('Timing', 'variable_device seconds problem')):
    """How one placement did.

    Attributes:
      variable_device: as `build_towers` takes it.
      seconds: list of seconds a step, one a turn; empty where it could not be run.
      problem: why not, or None.
    """
    __slots__ = ()

    @property
    def median(self):
        """Seconds a step."""
        return statistics.median(self.seconds)

    def __str__(self):
        name = '  %-16s ' % short_name(self.variable_device)
        if self.problem is not None:
            return name + 'not possible: ' + self.problem
        return name + '%8.2f ms a step (%.2f to %.2f)' % (
            1e3 * self.median, 1e3 * min(self.seconds), 1e3 * max(self.seconds))


class PlacementChoice(collections.namedtuple('PlacementChoice', 'variable_device reason timings')):
    """The placement that was taken; `print(choice)` is a small table.

    Attributes:
      variable_device: as `build_towers` takes it.
      reason: why, in words.
      timings: list of `Timing`, the simplest placement first.
    """
    __slots__ = ()

    def __str__(self):
        return '\n'.join(['variables on %s: %s' % (short_name(self.variable_device), self.reason)]
                         + [str(timing) for timing in self.timings])


def placement_candidates(devices: typing.Any) -> typing.List[str]:
    """The placements worth a try for towers on these devices, the simplest first.

    Args:
      devices: the towers' devices, as `resolve_devices` gives them.
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
    """Times a few steps of each placement and says which is fastest.

    Each candidate gets a graph and a session of its own; then they take turns, so that what else
    the machine does meets all of them alike. Nothing is written anywhere, and when it returns all
    sessions are closed. Until then there are as many sets of variables as there are candidates.

    The fastest by its median wins; but of those whose difference from it is within the spread of
    the turns (one's median lies between the other's least and greatest) it is the first in the
    list.

    Args:
      build: called once a candidate, as `build(variable_device)`, under a graph of its own; returns
        a `Trial`, with real input.
      candidates: list of placements as `build_towers(variable_device=)` takes them, the simplest
        first; see `placement_candidates`.
      turns: of each candidate.
      turn_seconds: how long a turn should take at least; it has one step at least, and 50 at most.
      warm_up: steps before the first turn.

    Returns:
      `PlacementChoice`. A candidate that cannot be built or run is in its table, with the reason.

    Raises:
      InvalidArgumentError: no candidates, one twice, or fewer than one turn or warm-up step.
      NonFiniteError: a step found a NaN or an infinity, which no other placement would mend.
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
        """Does it, or takes the candidate out; what no other placement would mend is raised."""
        try:
            return action(*arguments)
        except NonFiniteError:
            raise
        except _FAILURES as error:
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
    """The `PlacementChoice` that these timings, the simplest placement first, lead to."""
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


def recorded_choice(directory, devices, choose):
    """The placement of the run in a directory: the one that it began with, else a new choice.

    On other devices sums may be rounded otherwise, so a run that goes on, bit for bit, has to stay
    where it was, however fast the machine is today. The choice lies beside the checkpoints, in
    `variable_device.json`; with other towers it is made anew.

    Args:
      directory: of the checkpoints; made if need be, and held while this runs.
      devices: the towers' devices.
      choose: called without arguments where there is nothing to go by; returns a `PlacementChoice`.

    Returns:
      `(variable_device, text)`: text is to be shown.

    Raises:
      RunLockedError: another process has the directory.
      CheckpointError: the record cannot be read or written.
    """
    path = os.path.join(directory, RECORD)
    with hold_directory(directory):
        record = _read(path)
        if record is not None and record['devices'] == list(devices):
            return record['variable_device'], 'variables on %s: as this run began, see %s' % (
                short_name(record['variable_device']), path)
        choice = choose()
        _write(path, {'variable_device': choice.variable_device, 'devices': list(devices),
                      'reason': choice.reason, 'timings': [timing._asdict() for timing
                                                           in choice.timings]})
    return choice.variable_device, str(choice)


class _Runner:
    """One candidate's graph and session."""

    def __init__(self, warm_up):
        self.step_seconds = None
        self._warm_up = warm_up
        self._session = self._step = None
        self._number = 0

    def start(self, build, candidate):
        """Builds, initializes, and runs the first steps, the last of which gives `step_seconds`."""
        with tf.Graph().as_default() as graph:
            trial = build(candidate)
            check_instance('what build(%r) returned' % (candidate,), trial, Trial, 'a Trial')
            begin = [tf.global_variables_initializer(), tf.local_variables_initializer(),
                     tf.tables_initializer()]
            self._session = tf.Session(graph=graph, config=trial.config)
            for operation in begin + list(trial.start):
                self._session.run(operation)
            self._step = self._session.make_callable(trial.train_op)
            for _ in range(self._warm_up):
                self.step_seconds = self.time(1)

    def time(self, steps):
        """Seconds a step; raises `NonFiniteError` for what a check of the towers found."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._number += 1
            try:
                self._step()
            except tf.errors.InvalidArgumentError as error:
                raise explained(error, self._number) or error from None
        return (time.perf_counter() - begin) / steps

    def close(self):
        """Gives its memory back."""
        if self._session is not None:
            self._session.close()


# What a placement that does not suit a model or a machine ends in.
_FAILURES = (TowersError, tf.errors.OpError, ValueError, TypeError, RuntimeError)


def _within_spread(one, fastest):
    return (one is fastest or min(one.seconds) <= fastest.median
            or one.median <= max(fastest.seconds))


def _read(path):
    if not os.path.exists(path):
        return None
    try:
        with open(path) as opened:
            record = json.load(opened)
        if isinstance(record['variable_device'], str) and isinstance(record['devices'], list):
            return record
        reason = 'it names no placement'
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error
    raise CheckpointError('%s cannot be read (%s): delete it to choose anew, or name a '
                          'variable_device.' % (path, reason))


def _write(path, record):
    try:
        with open(path + '.new', 'w') as opened:
            json.dump(record, opened, indent=1)
        os.replace(path + '.new', path)
    except OSError as error:
        raise CheckpointError('%s cannot be written: %s.' % (path, error.strerror)) from error
