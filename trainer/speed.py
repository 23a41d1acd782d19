"""How fast a run is: examples a second, and how long its steps wait for their batches.

    rate          (examples_2 - examples_1) / (seconds_2 - seconds_1)
    share waited  (waited_2 - waited_1) / (seconds_2 - seconds_1)

between two marks of a run. Its seconds leave out the first two steps, in which TensorFlow builds
kernels and optimises the graph, evaluations and checkpoints.
"""

import time
import typing

import tensorflow.compat.v1 as tf


class StepCounts(typing.NamedTuple):
    """What a run counts by."""
    global_step: tf.Variable
    batch_size: int  # examples of a step, over all machines
    examples_per_epoch: int  # of one pass over the data
    last_step: int  # at which training ends
    examples: tf.Variable  # that training was given so far


class Mark(typing.NamedTuple):
    """A point of a run."""
    seconds: float  # of training so far
    examples: int
    waited: float  # seconds of waiting for input


class StepClock:
    """Counts the runs of a session as steps, and the seconds that they take.

    Fetched with the update, the global step may be that before or after it: so a hook counts the
    runs in `step` and `examples`, and reads them (`read`) only where it has something to show.
    """

    _UNTIMED_RUNS = 2  # which build kernels and optimise the graph

    def __init__(self, counts: StepCounts):
        self._counts = counts
        self.step = 0
        self.examples = 0
        self._runs = 0
        self._start = 0.  # of the measurement, by the clock
        self._latest = 0.  # the end of the latest run, by the clock
        self._waited = 0.  # seconds of waiting for input since the start
        # Seconds since the start that marks leave out: evaluations, checkpoints; up to the latest
        # run, and since that run.
        self._away = 0.
        self._away_since = 0.

    def restart(self, session: tf.Session) -> None:
        """Takes over the step of a session that was made anew, and begins to measure again."""
        self.read(session)
        self._runs = 0
        self._waited = 0.
        self._away = 0.
        self._away_since = 0.

    def count(self, waited: float = 0.) -> None:
        """Counts a run that has just ended, and the seconds that it has waited for its input."""
        self.step += 1
        self.examples += self._counts.batch_size
        self._runs += 1
        self._latest = time.perf_counter()
        self._waited += waited
        self._away += self._away_since
        self._away_since = 0.
        if self._runs == self._UNTIMED_RUNS:
            self._start = self._latest
            self._away = 0.
            self._waited = 0.

    @property
    def mark(self) -> typing.Optional[Mark]:
        """`Mark` at the end of the latest run; None until the end of the second one."""
        if self._runs < self._UNTIMED_RUNS:
            return None
        return Mark(self._latest - self._start - self._away, self.examples, self._waited)

    def read(self, session: tf.Session) -> None:
        """Reads step and examples from a `tf.Session` without hooks, and corrects the counts."""
        step, examples = session.run([self._counts.global_step, self._counts.examples])
        self.step = int(step)
        self.examples = int(examples)

    def away(self, seconds: float) -> None:
        """Leaves seconds since the latest run out of the marks: an evaluation, a checkpoint."""
        self._away_since += seconds


def rate(begin: typing.Optional[Mark], end: typing.Optional[Mark]) -> typing.Optional[float]:
    """Examples a second between two marks.

    Args:
      begin: the earlier mark, or None.
      end: the later mark, or None.

    Returns:
      The rate; None if a mark is None, or there is nothing between the two.
    """
    if begin is None or end is None or end.seconds <= begin.seconds:
        return None
    return (end.examples - begin.examples) / (end.seconds - begin.seconds) or None


def share_waited(begin: typing.Optional[Mark],
                 end: typing.Optional[Mark]) -> typing.Optional[float]:
    """The share of the time between two marks that was waiting for input.

    Args:
      begin: the earlier mark, or None.
      end: the later mark, or None.

    Returns:
      The share, 0 to 1; None where `rate` is None.
    """
    if begin is None or end is None or rate(begin, end) is None:
        return None
    return min(1., (end.waited - begin.waited) / (end.seconds - begin.seconds))


class TimedBatch(typing.NamedTuple):
    """A batch, and how long a step waits for it."""
    batch: typing.Any  # nest of tensors
    waited: typing.Optional[tf.Tensor]  # seconds, a float64 scalar


def timed_batch(iterator: typing.Any, is_timed: bool = True) -> TimedBatch:
    """Reads the next batch of an iterator, and measures how long a step waits for it.

    Args:
      iterator: of `tf.data`, in graph mode.
      is_timed: whether to measure; TensorFlow refuses to tell the time in a step whose operations
        are deterministic.

    Returns:
      `TimedBatch`: the batch, and the seconds; None for the seconds unless `is_timed`.
    """
    if not is_timed:
        return TimedBatch(iterator.get_next(), None)
    asked = tf.timestamp(name='asked_for_input')
    with tf.control_dependencies([asked]):
        batch = iterator.get_next()
    parts = tf.nest.flatten(batch, expand_composites=True)
    with tf.control_dependencies(parts):
        there = tf.timestamp(name='input_is_there')
    # The towers take tensors that come after that: else their work, which takes all threads,
    # could begin before it.
    with tf.control_dependencies([there]):
        passed = [tf.identity(part) for part in parts]
    batch = tf.nest.pack_sequence_as(batch, passed, expand_composites=True)
    return TimedBatch(batch, there - asked)
