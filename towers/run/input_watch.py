"""Measures in the graph how long a step waits for its input: in any session, on any device.

Where a step reads its input by operations (an iterator's `get_next`, a queue's `dequeue`), the time
of their end is noted, and the begin and end of the step:

    waited = end of the last of these operations - begin of the step
             (of one that comes after work on another one's batch: end - end of that work)
    share  = sum of waited / sum of (end of the step - begin of the step)

Where a step is fed through placeholders, the program makes the batch between the steps:

    waited = begin of the step - end of the step before
    share  = sum of waited / sum of (waited + end of the step - begin of the step)

A step that neither reads nor is fed (random numbers, data in a constant) waits for nothing. The
train op waits for additions to a variable that counts these seconds. That costs some microseconds a
step; nothing has to be fetched. No further batch is read: a step that is fed what
would be computed from a batch does not read it, see `input_notes`, and has not waited for it.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count, check_graph_mode, check_instance, check_say
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import step_operations
from towers.run.input_notes import (ReadNotes, are_examples_fed, arrivals, reads_of,
                                    takers_of_fed, time_after, time_variable)
from towers.run.step_clock import SaveListener
from towers.run.step_loop import OccasionalHook

# Shares of waiting from which TensorFlow's profiler calls a run highly and moderately input-bound.
HIGHLY, MODERATELY = 0.2, 0.05

Reading = collections.namedtuple('Reading', 'waited in_steps between steps')
"""The counts since the initializer: seconds waited, within steps, between steps; and steps."""


class Span(collections.namedtuple('Span', 'waited seconds steps')):
    """Some steps of a run.

    Attributes:
      waited: seconds that they waited for input.
      seconds: seconds that they took.
      steps: how many they are.
    """
    __slots__ = ()

    @property
    def share(self):
        """The share of the seconds that was waiting, 0..1; None if there are no seconds."""
        return min(max(self.waited / self.seconds, 0.), 1.) if self.seconds > 0 else None


NOTHING = Reading(0., 0., 0., 0)


class InputWatch:
    """Counts in the graph how long its steps wait for input. Make it before the session.

        watch = towers.InputWatch(train_op)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), watch.initializer])
            ...
            print(watch.span(watch.read(session)).share)

    Attributes:
      initializer: operation that sets all counts to 0, to be run before the first step.
      reads: list of names of the operations that read a step's input; empty if the step is fed, or
        has its input in memory.
    """

    def __init__(self, train_op: typing.Any):
        """
        Args:
          train_op: the operation (or tensor) of a step.

        Raises:
          InvalidArgumentError: `train_op` is no operation of the default graph, or it, or the
            operations that read its input, are within a `tf.cond` or `tf.while_loop`; or it reads
            the input itself.
        """
        check_graph_mode('an InputWatch')
        op = getattr(train_op, 'op', train_op)
        if not isinstance(op, tf.Operation):
            raise InvalidArgumentError('train_op=%.80r: expected the operation of a step, such as '
                                       'built.train_op.' % (train_op,))
        if op.graph is not tf.get_default_graph():
            raise InvalidArgumentError('train_op is %r of another graph than the default one.'
                                       % op.name)
        if compat.in_control_flow(op):
            raise InvalidArgumentError('train_op is %r, within a tf.cond or tf.while_loop, which '
                                       'nothing can be added to: watch the operation that contains '
                                       'it.' % op.name)
        step = step_operations([op])
        reads = reads_of(op, step)
        self.reads = [read.name for read in reads]
        self._is_fed = are_examples_fed(step, bool(reads))
        with tf.device(None), tf.device('/cpu:0'), tf.control_dependencies(None), \
                tf.name_scope('input_watch/'):
            # In no collection: it is not saved, and only `initializer` initializes it.
            self._counts = tf.Variable(tf.zeros([4], tf.float64), trainable=False, collections=[],
                                       use_resource=True, name='counts')
            # When a step ended; and when it began, and had its input, noted while it goes on.
            latest_end, begun = time_variable('latest_end'), time_variable('begun')
            initializers = [each.initializer for each in (self._counts, latest_end, begun)]
            self._value = self._counts.read_value()
            begin = tf.timestamp(name='begin')
            gap = begin - latest_end.read_value()
            end = time_after(arrivals(op), 'end')
            self._marks, noted = [begun.read_value()] * 2, [begun.assign(begin).op]
            waited = tf.zeros([], tf.float64)
            if reads:
                notes = ReadNotes(reads, step, begin)
                waited = notes.waited(op, end)
                self._marks[1] = notes.latest(self._marks[0])
                initializers += notes.initializers
            self.initializer = tf.group(*initializers)
            with tf.control_dependencies([end, gap]):
                noted += [self._counts.assign_add(tf.stack([
                    waited, end - begin, tf.where(gap < begin, gap, tf.zeros_like(gap)),
                    tf.ones([], tf.float64)])).op, latest_end.assign(end).op]
        # Else a step could begin with work that keeps all threads, and `begin` be noted after it.
        for taker in takers_of_fed(step) if self._is_fed else ():
            compat.add_control_inputs(taker, [begin.op])
        compat.add_control_inputs(op, noted)

    def read(self, session):
        """The `Reading` of a `tf.Session` (of a `MonitoredSession` the hooks would count a step).
        """
        waited, in_steps, between, steps = session.run(self._value)
        return Reading(float(waited), float(in_steps), float(between), int(steps))

    def read_marks(self, session):
        """When the latest step began, and when one last had all of its input, in seconds since 1970
        (`time.time`). May be called while a step is under way.
        """
        return session.run(self._marks)

    def span(self, reading, since=NOTHING, away=0.):
        """The `Span` from one `Reading` to another.

        Args:
          reading: the later one.
          since: the earlier one. A reading of an earlier session, whose count began at 0 as well,
            is left out of account.
          away: seconds between steps that were no waiting: evaluations, checkpoints.
        """
        if reading.steps < since.steps:
            since = NOTHING
        waited, seconds = reading.waited - since.waited, reading.in_steps - since.in_steps
        if self._is_fed:
            between = max(reading.between - since.between - away, 0.)
            waited, seconds = waited + between, seconds + between
        return Span(waited, seconds, reading.steps - since.steps)


class InputWatchHook(OccasionalHook):
    """Says every so many steps which share of the time was waiting for input.

        with tf.train.MonitoredSession(hooks=[towers.InputWatchHook(train_op)]) as session: ...

    Attributes:
      watch: `InputWatch`.
      latest_share: share of waiting in the latest line, 0..1; None before the first line.
      away_seconds: sum of the seconds given to `away`.
      listener: a `CheckpointSaverListener` for the hook that saves, which leaves the time of
        checkpoints out: where steps are fed, the time between them counts as waiting.
    """

    def __init__(self, train_op: typing.Any, every_steps: typing.Optional[int] = 100,
                 say: typing.Callable = print):
        """
        Args:
          train_op: as for `InputWatch`; or what `build_towers` returned.
          every_steps: steps from one line to the next.
          say: called with each line; None: no lines, where other hooks show the share.

        Raises:
          InvalidArgumentError: `every_steps` below 1, or as `InputWatch`.
        """
        check_count('every_steps', every_steps)
        check_say(say, optional=True)
        self.watch = InputWatch(getattr(train_op, 'train_op', train_op))
        self.latest_share = None
        self.away_seconds = 0.
        self.listener = SaveListener(self)
        self._every_steps = every_steps
        self._say = say
        self._runs = 0
        self._window = Window(self)

    def after_create_session(self, session, coord):
        """Sets all counts to 0."""
        session.run(self.watch.initializer)
        self._runs = 0

    def after_run(self, run_context, run_values):
        """Counts the step, and says the share where a line is due."""
        due = self.is_due()
        self._runs += 1
        if due:
            self._tell(run_context.session)

    def is_due(self):
        """Whether a line is due after the coming step."""
        return self._say is not None and (self._runs + 1) % self._every_steps == 0

    def step_done(self, fetched):
        """Counts a step after which no line is due."""
        self._runs += 1

    def end(self, session):
        """Says the share of the steps since the latest line."""
        if self._say is not None:
            self._tell(session)

    def away(self, seconds):
        """Leaves these seconds between steps out of the waiting: an evaluation or a checkpoint."""
        self.away_seconds += seconds

    def evaluated(self, step, results, seconds=0., name='test'):
        """Leaves the seconds of an evaluation out of the waiting, see `EvaluationHook`."""
        self.away(seconds)

    def _tell(self, session):
        span = self._window.next(session)
        if not span.steps or span.share is None:
            return
        self.latest_share = span.share
        self._say('input          %.0f %% of the time of %d step%s was waiting for input (%.3g of '
                  '%.3g ms a step): %s' % (
                      100 * span.share, span.steps, '' if span.steps == 1 else 's',
                      1e3 * span.waited / span.steps, 1e3 * span.seconds / span.steps,
                      describe_share(span.share)))


class Window:
    """Consecutive spans of an `InputWatchHook`'s steps, each from the end of the one before."""

    def __init__(self, hook):
        self._hook = hook
        self._since, self._away = NOTHING, 0.

    def next(self, session):
        """The `Span` since the last call, or since the session was made."""
        hook = self._hook
        reading, away = hook.watch.read(session), hook.away_seconds
        span = hook.watch.span(reading, self._since, away - self._away)
        self._since, self._away = reading, away
        return span


def checked_watch(input_watch):
    """A `Window` of an `InputWatchHook`; None of None.

    Raises:
      InvalidArgumentError: something else.
    """
    if input_watch is None:
        return None
    check_instance('input_watch', input_watch, InputWatchHook, 'an InputWatchHook')
    return Window(input_watch)


def describe_share(share):
    """The words of TensorFlow's profiler for a run with this share of waiting.

    They are those of the whole percentage, which stands beside them.
    """
    share = round(100 * share) / 100
    if share >= HIGHLY:
        return 'highly input-bound'
    return 'moderately input-bound' if share >= MODERATELY else 'not input-bound'
