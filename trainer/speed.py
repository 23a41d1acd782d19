"""How fast a run is: examples a second, and how long its steps wait for their batches.

    rate          (examples_2 - examples_1) / (seconds_2 - seconds_1)
    share waited  (waited_2 - waited_1) / (seconds_2 - seconds_1)

between two marks of a run. The seconds leave out evaluations, checkpoints, and the first two steps,
in which TensorFlow builds kernels and optimizes the graph. Tests are in
tests/trainer/test_progress.py.
"""

import time
import typing

import tensorflow.compat.v1 as tf


class StepCounts(typing.NamedTuple):
    """The counts of a run: its variables, and how much a step and an epoch are.

    Attributes:
      global_step: the variable that counts steps.
      batch_size: examples of a step, over all machines.
      examples_per_epoch: examples of one pass over the data.
      last_step: the step at which training ends.
      examples: the variable that counts the examples of all steps.
    """
    global_step: tf.Variable
    batch_size: int
    examples_per_epoch: int
    last_step: int
    examples: tf.Variable


class Mark(typing.NamedTuple):
    """A point in time of a run.

    Attributes:
      seconds: seconds of training so far.
      examples: examples so far.
      waited: seconds of waiting for input so far.
    """
    seconds: float
    examples: int
    waited: float


class StepClock:
    """Counts each run of a session as a step, and measures the time of the steps.

    A global step that is fetched with the update may be the step before or after the update. So a
    hook counts runs, and reads the exact step (`read`) only when it has something to show.

    Attributes:
      step: the number of steps done.
      examples: the number of examples of these steps.
    """

    _UNTIMED_RUNS = 2  # in these TensorFlow builds kernels and optimizes the graph

    def __init__(self, counts: StepCounts):
        """`counts` are the counts of the run."""
        self._counts = counts
        self.step = 0
        self.examples = 0
        self._runs = 0
        self._start = 0.  # the time at which the measurement began
        self._latest = 0.  # the time at which the latest run ended
        self._waited = 0.  # seconds of waiting for input since the start
        # Seconds of evaluations and checkpoints, which marks leave out. An evaluation comes after
        # the end of a run, so its seconds are not in the time up to this end: they wait in
        # `_away_after_latest` until the next run has ended.
        self._away_before_latest = 0.
        self._away_after_latest = 0.

    def restart(self, session: tf.Session) -> None:
        """Takes over the step of a session that was made anew, and begins to measure again."""
        self.read(session)
        self._runs = 0
        self._waited = 0.
        self._away_before_latest = 0.
        self._away_after_latest = 0.

    def count(self, waited: float = 0.) -> None:
        """Counts a run that has just ended, and the seconds that it has waited for its input."""
        self.step += 1
        self.examples += self._counts.batch_size
        self._runs += 1
        self._latest = time.perf_counter()
        self._waited += waited
        self._away_before_latest += self._away_after_latest
        self._away_after_latest = 0.
        if self._runs == self._UNTIMED_RUNS:  # the measurement begins where this run has ended
            self._start = self._latest
            self._away_before_latest = 0.
            self._waited = 0.

    @property
    def mark(self) -> typing.Optional[Mark]:
        """The `Mark` of the end of the latest run; None until the end of the second run, whose mark
        is at 0 seconds."""
        if self._runs < self._UNTIMED_RUNS:
            return None
        seconds = self._latest - self._start - self._away_before_latest
        return Mark(seconds, self.examples, self._waited)

    def read(self, session: tf.Session) -> None:
        """Reads step and examples from a `tf.Session` without hooks, and corrects the counts."""
        step, examples = session.run([self._counts.global_step, self._counts.examples])
        self.step = int(step)
        self.examples = int(examples)

    def away(self, seconds: float) -> None:
        """Leaves the time of an evaluation or a checkpoint, in seconds, out of the marks."""
        self._away_after_latest += seconds


def rate(begin: typing.Optional[Mark], end: typing.Optional[Mark]) -> typing.Optional[float]:
    """Examples a second between two marks.

    Args:
      begin: the earlier mark, or None.
      end: the later mark, or None.

    Returns:
      The rate, above 0; None if a mark is None, or no time or no examples are between the two.
    """
    if begin is None or end is None or end.seconds <= begin.seconds:
        return None
    examples = end.examples - begin.examples
    if not examples:
        return None
    return examples / (end.seconds - begin.seconds)


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
    # Two clocks measure the two times, TensorFlow's in the step and Python's beside it: where
    # nearly all of the time was waiting, the quotient may be a little above 1.
    return min(1., (end.waited - begin.waited) / (end.seconds - begin.seconds))


class TimedBatch(typing.NamedTuple):
    """A batch, and how long a step waits for it.

    Attributes:
      batch: a nest of tensors.
      waited: the seconds, a float64 scalar; None if they are not measured.
    """
    batch: typing.Any
    waited: typing.Optional[tf.Tensor]


def timed_batch(iterator: typing.Any, is_timed: bool = True) -> TimedBatch:
    """Reads the next batch of an iterator, and measures how long a step waits for it.

    Args:
      iterator: an iterator of `tf.data`, in graph mode.
      is_timed: whether to measure; with deterministic operations TensorFlow refuses to tell the
        time in a step.
    """
    if not is_timed:
        return TimedBatch(iterator.get_next(), None)
    begin = tf.timestamp(name='asked_for_input')
    with tf.control_dependencies([begin]):
        batch = iterator.get_next()
    # `expand_composites` makes a leaf of each tensor of which a `SparseTensor` consists.
    leaves = tf.nest.flatten(batch, expand_composites=True)
    with tf.control_dependencies(leaves):
        end = tf.timestamp(name='input_is_there')
    # The towers get tensors that wait for the second time stamp. Else the work of the towers, which
    # takes all threads, could begin before this time stamp is taken.
    with tf.control_dependencies([end]):
        leaves_after_end = [tf.identity(leaf) for leaf in leaves]
    batch = tf.nest.pack_sequence_as(batch, leaves_after_end, expand_composites=True)
    return TimedBatch(batch, end - begin)
