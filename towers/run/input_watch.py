"""How long a step waits for its input, measured in the graph: in any session, on any device.

Where a step reads its input by operations (an iterator's `get_next`, a queue's `dequeue`), it notes
the time before and after them, and its own begin and end:

    waited = end of the last of these operations - begin of the step
    share  = sum of waited / sum of (end of the step - begin of the step)

Towers whose inputs are staged read the next batch while they work, so for them

    waited = max(0, when the next batch is there - when the rest of the step is done)

Where a step is fed through placeholders, the program makes the batch between the steps:

    waited = begin of the step - end of the step before,   share = waited / (waited + in steps)

The notes are additions to a variable that the train op waits for: some microseconds a step, nothing
to fetch, and no batch read that the step itself would not read.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count, check_graph_mode, check_instance, check_say
from towers.errors import InvalidArgumentError
from towers.graph.frames import Frames
from towers.graph.graph_walk import step_operations
from towers.run.step_clock import SaveListener
from towers.run.step_loop import OccasionalHook
from towers.tower.staged_input import StagedInputs

# Shares of the steps' time from which on TensorFlow's own profiler calls a run so.
HIGHLY, MODERATELY = 0.2, 0.05

_READS = frozenset([
    'IteratorGetNext', 'IteratorGetNextSync', 'IteratorGetNextAsOptional',
    'MultiDeviceIteratorGetNextFromShard', 'QueueDequeue', 'QueueDequeueV2', 'QueueDequeueMany',
    'QueueDequeueManyV2', 'QueueDequeueUpTo', 'QueueDequeueUpToV2', 'Unstage'])

Reading = collections.namedtuple('Reading', 'waited in_steps between steps')
"""What was counted so far, in seconds; `between` is the time from one step to the next."""



class Span(collections.namedtuple('Span', 'waited seconds steps')):
    """Some steps: how long they waited for input, how long they took, how many they were."""
    __slots__ = ()

    @property
    def share(self):
        """The share of the time that was waiting, in 0..1; None of no time."""
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
      initializer: operation that sets all counts to 0; run it before the first step.
      reads: names of the operations that a step reads its input by; empty for one that is fed.
    """

    def __init__(self, train_op: typing.Any, staged: typing.Any = None):
        """
        Args:
          train_op: the operation (or tensor) of a step.
          staged: `BuiltTowers.staged` of towers with staged inputs; or None.

        Raises:
          InvalidArgumentError: `train_op` is none of this graph, or is within a `tf.cond` or
            `tf.while_loop`, where nothing can be added to it.
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
        if staged is not None:
            check_instance('staged', staged, StagedInputs, 'BuiltTowers.staged, or None')
        reads = [] if staged is not None else _reads(op)
        ahead = staged is not None and staged.read is not None
        self.reads = [staged.read.name] if ahead else [read.name for read in reads]
        self._is_fed = staged is None and not reads
        with tf.device(None), tf.device('/cpu:0'), tf.control_dependencies(None), \
                tf.name_scope('input_watch/'):
            # No collection: not saved, not the model's, and nobody else initializes it.
            self._counts = tf.Variable(tf.zeros([4], tf.float64), trainable=False, collections=[],
                                       use_resource=True, name='counts')
            latest_end = tf.Variable(tf.zeros([], tf.float64), trainable=False, collections=[],
                                     use_resource=True, name='latest_end')
            self.initializer = tf.group(self._counts.initializer, latest_end.initializer)
            self._value = self._counts.read_value()
            begin = tf.timestamp(name='begin')
            gap = begin - latest_end.read_value()
            work = [each.op for each in op.inputs] + list(op.control_inputs)
            if ahead:
                waited = tf.maximum(_time_after([staged.read, staged.staged], 'staged')
                                    - _time_after([staged.work], 'worked'), 0.)
            elif reads:
                waited = _time_after(reads, 'read') - begin
            else:
                waited = tf.zeros([], tf.float64)
            end = _time_after(work or reads, 'end')
            with tf.control_dependencies([end, gap]):
                noted = [self._counts.assign_add(tf.stack([
                    waited, end - begin, tf.where(gap < begin, gap, tf.zeros_like(gap)),
                    tf.ones([], tf.float64)])).op, latest_end.assign(end).op]
        # What the runtime could start before `begin` would count as having taken no time.
        first = reads if staged is None else [
            each for each in step_operations([op]) if each.type == 'StageSize']
        for each in first:
            compat.add_control_inputs(each, [begin.op])
        compat.add_control_inputs(op, noted)

    def read(self, session):
        """`Reading` of a session: a raw one, not a monitored one, whose hooks would count it."""
        waited, in_steps, between, steps = session.run(self._value)
        return Reading(float(waited), float(in_steps), float(between), int(steps))

    def span(self, reading, since=NOTHING, away=0.):
        """What was counted from one `Reading` to another.

        Args:
          reading: the later one.
          since: the earlier one; of another session, which counted for itself, it does not matter.
          away: seconds between steps that were no waiting: of evaluations, checkpoints.

        Returns:
          `Span`.
        """
        if reading.steps < since.steps:
            since = NOTHING
        waited, seconds = reading.waited - since.waited, reading.in_steps - since.in_steps
        if self._is_fed:
            waited = max(reading.between - since.between - away, 0.)
            seconds += waited
        return Span(waited, seconds, reading.steps - since.steps)


class InputWatchHook(OccasionalHook):
    """Says every so many steps what share of the time went by waiting for input.

        with tf.train.MonitoredSession(hooks=[towers.InputWatchHook(train_op)]) as session: ...

    Attributes:
      watch: `InputWatch`.
      latest_share: of the steps of the latest line, 0..1; None before it.
      away_seconds: what `away` was told in all.
      listener: a `CheckpointSaverListener` for the hook that saves: where steps are fed, the time
        between them is the waiting, and checkpoints are not.
    """

    def __init__(self, train_op: typing.Any, every_steps: typing.Optional[int] = 100,
                 say: typing.Callable = print, staged: typing.Any = None):
        """
        Args:
          train_op: as for `InputWatch`; or what `build_towers` returned.
          every_steps: steps from one line to the next.
          say: called with each line; None for none, where other hooks show the share.
          staged: as for `InputWatch`; with what `build_towers` returned it is known.

        Raises:
          InvalidArgumentError: `every_steps` below 1, or as `InputWatch`.
        """
        check_count('every_steps', every_steps)
        check_say(say, optional=True)
        if hasattr(train_op, 'train_op'):
            train_op, staged = train_op.train_op, train_op.staged
        self.watch = InputWatch(train_op, staged)
        self.latest_share = None
        self.away_seconds = 0.
        self.listener = SaveListener(self)
        self._every_steps = every_steps
        self._say = say
        self._runs = 0
        self._window = Window(self)

    def after_create_session(self, session, coord):
        """Starts to count."""
        session.run(self.watch.initializer)
        self._runs = 0

    def after_run(self, run_context, run_values):
        """Counts the step, and says how much of the time went by waiting."""
        due = self.is_due()
        self._runs += 1
        if due:
            self._tell(run_context.session)

    def is_due(self):
        """Whether the coming step is one to say something after."""
        return self._say is not None and (self._runs + 1) % self._every_steps == 0

    def step_done(self, fetched):
        """Counts a step that nothing is said of."""
        self._runs += 1

    def end(self, session):
        """Says what is left to be said."""
        if self._say is not None:
            self._tell(session)

    def away(self, seconds):
        """Leaves time between steps out of the waiting, as of an evaluation or a checkpoint."""
        self.away_seconds += seconds

    def evaluated(self, step, results, seconds=0., name='test'):
        """Leaves the time of an evaluation out, see `EvaluationHook`."""
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
    """One span of steps after another, each from where the one before it ended."""

    def __init__(self, hook):
        self._hook = hook
        self._since, self._away = NOTHING, 0.

    def next(self, session):
        """`Span` since the last call, or the begin."""
        hook = self._hook
        reading, away = hook.watch.read(session), hook.away_seconds
        span = hook.watch.span(reading, self._since, away - self._away)
        self._since, self._away = reading, away
        return span


def checked_watch(input_watch):
    """A `Window` of an `InputWatchHook`, or None of None; `InvalidArgumentError` for all else."""
    if input_watch is None:
        return None
    check_instance('input_watch', input_watch, InputWatchHook, 'an InputWatchHook')
    return Window(input_watch)


def describe_share(share):
    """What TensorFlow's profiler calls a run that waits for input for so much of its time."""
    if share >= HIGHLY:
        return 'highly input-bound'
    return 'moderately input-bound' if share >= MODERATELY else 'not input-bound'


def _reads(op):
    """The operations that a step reads its input by, but for those that it may leave out."""
    step = step_operations([op])
    found = [each for each in step
             if each.type in _READS and not _is_token(each)]
    if not found:
        return []
    frames = Frames(step)
    certain = [each for each in found if frames.always_runs(each)]
    if not certain:
        raise InvalidArgumentError(
            'the step reads its input, %r, within a tf.cond or tf.while_loop, where the time that '
            'it takes cannot be noted: watch a step that reads outside of it.' % found[0].name)
    return sorted(certain, key=lambda each: each.name)


def _is_token(op):
    """Whether a queue holds no examples but one number: `SyncReplicasOptimizer`'s tokens."""
    return (op.type.startswith('QueueDequeue') and len(op.outputs) == 1
            and op.outputs[0].dtype.is_integer and op.outputs[0].shape.ndims == 0)


def _time_after(operations, name):
    with tf.control_dependencies(operations):
        return tf.timestamp(name=name)
