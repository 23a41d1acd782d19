"""Counts a session's steps, examples and seconds, without fetching the global step each time."""

import collections
import time

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_step_variable


class StepCounts(collections.namedtuple('StepCounts', [
        'global_step', 'batch_size', 'examples_per_epoch', 'last_step', 'examples'],
                                        defaults=(None, None, None))):
    """What a run counts its steps and examples by: one argument for all hooks that show or log it.

        counts = towers.StepCounts(global_step, 32, examples_per_epoch=1000, last_step=500)
        hook = towers.SummaryHook(summaries, counts, logdir)

    Attributes:
      global_step: the variable that counts steps.
      batch_size: examples a step, an int of at least 1.
      examples_per_epoch: examples in one pass over the data, above 0; `SummaryHook` needs none.
      last_step: the step at which training ends, an int of at least 1; None where no hook needs it.
      examples: the variable that counts examples, for runs whose batch size has changed on the way;
        None: the step times `batch_size`.
    """
    __slots__ = ()


Mark = collections.namedtuple('Mark', 'seconds examples waited')
"""A point of a run: seconds of training, examples, and seconds of waiting for input, so far."""


class StepClock:
    """Counts the runs of a session as steps, and the seconds that they take.

    To fetch the global step costs more than all other work of a hook in most steps, and fetched
    with the update it may be the value before or after it. So a hook counts the runs, acts on the
    count, and reads the exact step (`read`) only where it has something to write. Where runs are
    not steps (several runs make a step, or other operations are run in the session) the count is
    ahead; `read` corrects it, and the hook waits for its step (`passed` is False).

    Attributes:
      step: the step that the latest run has finished, as counted.
      examples: examples of all steps so far, as counted.
      batch_size: examples a step.
    """

    _UNTIMED_RUNS = 2  # which build kernels and optimise the graph

    def __init__(self, counts):
        """
        Args:
          counts: `StepCounts`.

        Raises:
          InvalidArgumentError: a batch size below 1, or no variable of the default graph.
        """
        check_count('batch_size', counts.batch_size)
        check_step_variable(counts.global_step)
        self._counters = {'step': counts.global_step}
        if counts.examples is not None:
            check_step_variable(counts.examples, 'examples')
            self._counters['examples'] = counts.examples
        self.step = self.examples = 0
        self.batch_size = counts.batch_size
        self._runs = 0
        self._latest = self._start = self._waited = 0.
        self._away = self._away_since = 0.

    def restart(self, session):
        """Takes over the step of a session that was made anew, and begins to measure again."""
        self.read(session)
        self._runs = 0
        self._waited = self._away = self._away_since = 0.

    def comes_to(self, every, last=None):
        """Whether the coming step is a multiple of `every`, or is `last`."""
        step = self.step + 1
        return step % every == 0 or step == last

    def passed(self, since, every, last=None):
        """Whether a multiple of `every`, or `last`, is among the steps after `since`."""
        return self.step > since and (self.step // every > since // every or self.step == last)

    def count(self, waited=0.):
        """Counts a run that has just ended, and the seconds that it has waited for its input."""
        self.step += 1
        self.examples += self.batch_size
        self._runs += 1
        self._latest = time.perf_counter()
        self._waited += waited
        self._away += self._away_since
        self._away_since = 0.
        if self._runs == self._UNTIMED_RUNS:
            self._start, self._away, self._waited = self._latest, 0., 0.

    @property
    def mark(self):
        """`Mark` at the end of the latest run; None until the end of the second one.

        The first two runs build kernels and optimise the graph, for the fetches of most steps and
        of some: their time is no measure.
        """
        if self._runs < self._UNTIMED_RUNS:
            return None
        return Mark(self._latest - self._start - self._away, self.examples, self._waited)

    def read(self, session):
        """Reads step and examples from a `tf.Session` without hooks, and corrects the counts."""
        values = session.run(self._counters)
        self.step = int(values['step'])
        self.examples = int(values.get('examples', self.step * self.batch_size))

    def away(self, seconds):
        """Leaves seconds since the latest run out of the marks: an evaluation, a checkpoint."""
        self._away_since += seconds


class SaveListener(tf.train.CheckpointSaverListener):
    """Calls a function before each checkpoint, and leaves the time of both out of a clock."""

    def __init__(self, clock, before_save=None):
        """
        Args:
          clock: a `StepClock`.
          before_save: function of the step; or None.
        """
        self._clock = clock
        self._before_save = before_save
        self._began = None

    def before_save(self, session, global_step_value):
        """Calls the function, before the variables are read."""
        self._began = time.perf_counter()
        if self._before_save is not None:
            self._before_save(global_step_value)

    def after_save(self, session, global_step_value):
        """Tells the clock how long the checkpoint took."""
        if self._began is not None:
            self._clock.away(time.perf_counter() - self._began)
            self._began = None


def rate(begin, end):
    """Examples a second from one `Mark` to another, a float above 0.

    None if one of them is None, or the second is not later and of more examples (a `read` between
    them may have reduced the count).
    """
    if (begin is None or end is None or end.seconds <= begin.seconds
            or end.examples <= begin.examples):
        return None
    return (end.examples - begin.examples) / (end.seconds - begin.seconds)


def share_waited(begin, end):
    """The share of the time from one `Mark` to another that was waiting, 0..1; None as `rate`."""
    if rate(begin, end) is None:
        return None
    return min(1., (end.waited - begin.waited) / (end.seconds - begin.seconds))
