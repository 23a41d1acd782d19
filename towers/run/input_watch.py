"""Measures in the graph how long a step waits for its input: in any session, on any device.

Where a step reads its input by operations (an iterator's `get_next`, a queue's `dequeue`), the time
of their end is noted, and the begin and end of the step:

    waited = end of the last of these operations - begin of the step
             (of one that comes after work on another one's batch: end - end of that work)
    share  = sum of waited / sum of (end of the step - begin of the step)

Towers with staged inputs read the next batch while they compute, and then update, so for them

    waited = max(0, time when the next batch is there - time when loss and gradients are)

Where a step is fed through placeholders, the program makes the batch between the steps:

    waited = begin of the step - end of the step before
    share  = sum of waited / sum of (waited + end of the step - begin of the step)

The train op waits for additions to a variable that counts these seconds. That costs some
microseconds a step; nothing has to be fetched, and no further batch is read.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count, check_graph_mode, check_instance, check_say
from towers.errors import InvalidArgumentError
from towers.graph.frames import Frames
from towers.graph.graph_walk import reachable_from, step_operations
from towers.run.step_clock import SaveListener
from towers.run.step_loop import OccasionalHook
from towers.tower.staged_input import StagedInputs

# Shares of waiting from which TensorFlow's profiler calls a run highly and moderately input-bound.
HIGHLY, MODERATELY = 0.2, 0.05

_READS = frozenset([
    'IteratorGetNext', 'IteratorGetNextSync', 'IteratorGetNextAsOptional',
    'MultiDeviceIteratorGetNextFromShard', 'QueueDequeue', 'QueueDequeueV2', 'QueueDequeueMany',
    'QueueDequeueManyV2', 'QueueDequeueUpTo', 'QueueDequeueUpToV2', 'Unstage'])

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
      reads: list of names of the operations that read a step's input; empty if the step is fed.
    """

    def __init__(self, train_op: typing.Any, staged: typing.Any = None):
        """
        Args:
          train_op: the operation (or tensor) of a step.
          staged: `BuiltTowers.staged`, of towers with staged inputs; else None.

        Raises:
          InvalidArgumentError: `train_op` is no operation of the default graph, or it, or the
            operations that read its input, are within a `tf.cond` or `tf.while_loop`.
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
        step = step_operations([op])
        ahead = staged is not None and staged.read is not None
        reads = [] if staged is not None else _reads(step)
        takers = _takers(reads, step)
        begins, ends = {}, {}
        self.reads = [staged.read.name] if ahead else [read.name for read in reads]
        # Beside an iterator, examples are fed, and not the rate of learning or of dropout.
        self._is_fed = staged is None and not reads or any(
            op.type in ('Placeholder', 'PlaceholderV2') and op.outputs[0].shape.ndims != 0
            for op in step)
        with tf.device(None), tf.device('/cpu:0'), tf.control_dependencies(None), \
                tf.name_scope('input_watch/'):
            # In no collection: it is not saved, and only `initializer` initializes it.
            self._counts = tf.Variable(tf.zeros([4], tf.float64), trainable=False, collections=[],
                                       use_resource=True, name='counts')
            latest_end = tf.Variable(tf.zeros([], tf.float64), trainable=False, collections=[],
                                     use_resource=True, name='latest_end')
            # Times when a step began and when it had its input, noted while it goes on.
            begun, read = (tf.Variable(tf.zeros([], tf.float64), trainable=False, collections=[],
                                       use_resource=True, name=name) for name in ('begun', 'read'))
            self._marks = [begun.read_value(), read.read_value()]
            self.initializer = tf.group(self._counts.initializer, latest_end.initializer,
                                        begun.initializer, read.initializer)
            self._value = self._counts.read_value()
            begin = tf.timestamp(name='begin')
            gap = begin - latest_end.read_value()
            work = _before(op)
            if ahead:
                is_staged = _time_after([staged.staged], 'staged')
                waited = tf.maximum(is_staged - _time_after([staged.work], 'worked'), 0.)
            elif reads:
                turns = _turns(takers, step)
                begins.update((read, begin) for read in turns[0])
                begins.update((read, _time_after(_before(read), 'ready'))
                              for turn in turns[1:] for read in turn)
                ends.update((read, _time_after([read], 'read')) for read in reads)
                waited = tf.add_n([tf.reduce_max(tf.stack(
                    [ends[read] - begins[read] for read in turn])) for turn in turns])
            else:
                waited = tf.zeros([], tf.float64)
            end = _time_after(work or reads, 'end')
            with tf.control_dependencies([end, gap]):
                noted = [self._counts.assign_add(tf.stack([
                    waited, end - begin, tf.where(gap < begin, gap, tf.zeros_like(gap)),
                    tf.ones([], tf.float64)])).op, latest_end.assign(end).op]
            noted += [begun.assign(begin).op, read.assign(
                is_staged if ahead else tf.reduce_max(tf.stack(list(ends.values()) or [begin]))).op]
        # Else the runtime could read before `begin`, and the reading would seem to take no time.
        for each in step if staged is not None else ():
            if each.type == 'StageSize':
                compat.add_control_inputs(each, [begin.op])
        for read in reads:
            compat.add_control_inputs(read, [begins[read].op])
            # Else the end could be noted long after it: a thread with more than one operation to do
            # takes the newest first, and the towers' work is newer than the note.
            for taker in takers[read]:
                compat.add_control_inputs(taker, [ends[read].op])
        for taker in _takers([staged.staged], step)[staged.staged] if ahead else ():
            compat.add_control_inputs(taker, [is_staged.op])
        # Else a step could begin with work that keeps all threads, and `begin` be noted after it.
        for taker in _takers_of_fed(step) if self._is_fed else ():
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
                 say: typing.Callable = print, staged: typing.Any = None):
        """
        Args:
          train_op: as for `InputWatch`; or what `build_towers` returned.
          every_steps: steps from one line to the next.
          say: called with each line; None: no lines, where other hooks show the share.
          staged: as for `InputWatch`; taken from what `build_towers` returned, if that is given.

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


def _reads(step):
    """The operations of a step that read its input, without those in branches and loops; a list.

    Raises:
      InvalidArgumentError: all of them are in branches or loops.
    """
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


def _before(op):
    """The operations that an operation waits for; a list."""
    return [tensor.op for tensor in op.inputs] + list(op.control_inputs)


def _takers(reads, step):
    """{each operation of `reads`: list of the operations of the step that wait for it}."""
    found = {read.name: [] for read in reads}
    for op in step:
        for name in {each.name for each in _before(op)}:
            if name in found:
                found[name].append(op)
    return {read: found[read.name] for read in reads}


def _takers_of_fed(step):
    """The operations of a step that take what is fed to it; a list.

    A tower's own placeholder has its shard of another one by default, which is computed.
    """
    fed = [op for op in step if op.type.startswith('Placeholder')]
    takers = _takers(fed, step)
    after = reachable_from([taker for op in fed for taker in takers[op]], step)
    return [taker for op in fed if op.name not in after for taker in takers[op]]


def _turns(takers, step):
    """Lists of the operations that read: those of each list come after some of the list before."""
    turns, reads = [], list(takers)
    while reads:
        after = reachable_from([op for read in reads for op in takers[read]], step, control=True)
        turns.append([read for read in reads if read.name not in after])
        reads = [read for read in reads if read.name in after]
    return turns


def _is_token(op):
    """Whether a queue holds no examples but one number: `SyncReplicasOptimizer`'s tokens."""
    return (op.type.startswith('QueueDequeue') and len(op.outputs) == 1
            and op.outputs[0].dtype.is_integer and op.outputs[0].shape.ndims == 0)


def _time_after(operations, name):
    """The time when these operations are done, a float64 scalar tensor in seconds."""
    with tf.control_dependencies(operations):
        return tf.timestamp(name=name)
