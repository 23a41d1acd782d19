"""Which step a hooked session is at and how fast it goes, without asking it at every step."""

import collections
import time

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_step_variable

Mark = collections.namedtuple('Mark', 'seconds examples')
"""A point of a run: seconds of training and examples so far; differences of two give rates."""


class StepClock:
    """Counts the runs of a session as steps, and the time they take.

    Fetching the global step costs more than all else that a hook does in most steps, and what is
    fetched along with the update may be the step before it or after it. So a hook counts, acts on
    the count, and asks the session (`read`) only where it has something to write. Where runs and
    steps are not the same, as with several runs a step or with other things that are run in the
    session, `read` puts the count right, and the hook finds that its step is yet to come.

    Attributes:
      step: the step that the latest run has finished, as counted.
      examples: examples in all steps so far.
    """

    _UNTIMED_RUNS = 2

    def __init__(self, global_step, batch_size, examples=None):
        """
        Args:
          global_step: the variable that counts steps.
          batch_size: examples a step, an int of at least 1.
          examples: variable that counts examples, for runs whose batch size changed on the way;
            None: the step times `batch_size`.

        Raises:
          InvalidArgumentError: a batch size below 1.
        """
        check_count('batch_size', batch_size)
        check_step_variable(global_step)
        if examples is not None:
            check_step_variable(examples, 'examples')
        self.step = self.examples = 0
        self.batch_size = batch_size
        self._counters = {'step': global_step}
        if examples is not None:
            self._counters['examples'] = examples
        self._runs = 0
        self._latest = self._start = 0.
        self._away = self._away_since = 0.

    def restart(self, session):
        """Starts from the step that the session was restored to."""
        self.read(session)
        self._runs = 0
        self._away = self._away_since = 0.

    def comes_to(self, every, last=None):
        """Whether the next step is a multiple of `every`, or is `last`."""
        step = self.step + 1
        return step % every == 0 or step == last

    def passed(self, since, every, last=None):
        """Whether the step has come to a multiple of `every`, or to `last`, after step `since`."""
        return self.step > since and (self.step // every > since // every or self.step == last)

    def count(self):
        """Counts one run, which has just ended."""
        self.step += 1
        self.examples += self.batch_size
        self._runs += 1
        self._latest = time.perf_counter()
        self._away += self._away_since
        self._away_since = 0.
        if self._runs == self._UNTIMED_RUNS:
            self._start, self._away = self._latest, 0.

    @property
    def mark(self):
        """`Mark` at the end of the latest run; None until the end of the second one.

        The first two build kernels and optimise the graph, with and without what is fetched now and
        then: they are no measure of anything.
        """
        if self._runs < self._UNTIMED_RUNS:
            return None
        return Mark(self._latest - self._start - self._away, self.examples)

    def read(self, session):
        """Asks the session for the step and the examples; `session` is a raw one, without hooks."""
        values = session.run(self._counters)
        self.step = int(values['step'])
        self.examples = int(values.get('examples', self.step * self.batch_size))

    def away(self, seconds):
        """Leaves time out of the marks: of an evaluation or a checkpoint since the latest run."""
        self._away_since += seconds


class SaveListener(tf.train.CheckpointSaverListener):
    """Calls a function before each checkpoint, and leaves the time of both out of a clock.

    For the `listeners` of `tf.train.CheckpointSaverHook`. The function is given the step.
    """

    def __init__(self, clock, before_save=None):
        self._clock = clock
        self._before_save = before_save
        self._began = None

    def before_save(self, session, global_step_value):
        """Called when the values are about to be written."""
        self._began = time.perf_counter()
        if self._before_save is not None:
            self._before_save(global_step_value)

    def after_save(self, session, global_step_value):
        """Called when the checkpoint is complete."""
        if self._began is not None:
            self._clock.away(time.perf_counter() - self._began)
            self._began = None


def rate(begin, end):
    """Examples a second from one `Mark` to another, above 0; None without time or examples.

    It is None also where a `read` between the marks has reduced the count.
    """
    if (begin is None or end is None or end.seconds <= begin.seconds
            or end.examples <= begin.examples):
        return None
    return (end.examples - begin.examples) / (end.seconds - begin.seconds)
