"""The peak of a step's memory, as TensorFlow's own allocators saw it."""

import collections
import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_config, check_count, check_feed, check_fetches,
                              check_instance)
from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError, MeasurementError
from towers.placement.devices import is_gpu, session_config, short_name
from towers.placement.precision import use_precision
from towers.tensorflow_errors import reason_of


class MeasuredMemory(collections.namedtuple('MeasuredMemory', 'peaks moments batch_size')):
    """The peak of each allocator in a step.

    Attributes:
      peaks: dict from an allocator's device ('' for all CPUs of this process) to bytes.
      moments: dict from the same devices to the name of the operation that ran at the peak.
      batch_size: examples of the step, None where it is not known.
    """
    __slots__ = ()

    @property
    def peak(self):
        """The largest of the peaks, in bytes, an int."""
        return max(self.peaks.values())

    def against(self, account):
        """A line with the peak of a `MemoryAccount`, the measured peak, and the error."""
        return 'batch %s: predicted %.1f MB, measured %.1f MB, error %+.1f %%' % (
            '?' if account.batch_size is None else account.batch_size, account.peak / 1e6,
            self.peak / 1e6, 100 * (account.peak / float(self.peak) - 1.))

    def __str__(self):
        return '\n'.join('%-10s %9.1f MB in use at the most, at %s' % (
            short_name(device) or 'CPUs', bytes_ / 1e6, self.moments[device])
            for device, bytes_ in sorted(self.peaks.items()))


def measure_memory(built: BuiltTowers, feed_dict: typing.Optional[dict] = None, *,
                   session: typing.Optional[tf.Session] = None, warm_up: int = 2, steps: int = 2,
                   start: typing.Sequence = (),
                   config: typing.Optional[tf.ConfigProto] = None) -> MeasuredMemory:
    """Runs a few steps and says how much memory they took.

    Args:
      built: what `build_towers` returned.
      feed_dict: for `session.run`.
      session: a session whose variables are initialized; None: one is made, initialized and closed.
      warm_up: steps before the measured ones, at least 1: the first steps allocate memory that
        stays.
      steps: how many steps are measured; the largest peak counts.
      start: operations that a session made here runs once after the initializers, such as the
        initializer of the input's iterator.
      config: `tf.ConfigProto` of a session made here; None for `session_config`'s.

    Returns:
      `MeasuredMemory`.

    Raises:
      MeasurementError: TensorFlow's allocator on CPUs does not count here; a step lacks its input.
      InvalidArgumentError: not what `build_towers` returned; an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'what build_towers returned')
    check_count('warm_up', warm_up)
    check_count('steps', steps)
    check_feed(feed_dict)
    check_config(config)
    if session is not None and (isinstance(session, type) or not hasattr(session, 'run')):
        raise InvalidArgumentError('session=%.80r of type %s: expected a tf.Session, or None.' % (
            session, type(session).__name__))
    start = checked_start('start', start)
    step = built.train_op if built.train_op is not None else built.loss
    peaks, moments = {}, {}
    with explained_input(), contextlib.ExitStack() as stack:
        if session is None:
            if config is None:
                config = use_precision(session_config(built.devices), built.precision,
                                       built.devices)
            session = stack.enter_context(initialized_session(built.loss.graph, config, start))
        for metadata in traced_steps(session, step, feed_dict, warm_up, steps):
            for device, (bytes_, name) in peaks_of(metadata).items():
                if bytes_ > peaks.get(device, 0):
                    peaks[device], moments[device] = bytes_, name
    if not peaks:
        raise MeasurementError(
            'TensorFlow counted no memory: its plain allocator on CPUs does not. Set '
            'TF_CPU_ALLOCATOR_USE_BFC=true in the environment before the program starts.')
    return MeasuredMemory(peaks, moments, built.plan.batch_size)


@contextlib.contextmanager
def initialized_session(graph, config, start):
    """A session of a graph, initialized, with queues that are filled; closed at the end.

    Args:
      graph: `tf.Graph`.
      config: `tf.ConfigProto`.
      start: operations that it runs after the initializers.
    """
    with tf.Session(graph=graph, config=config) as session:
        with graph.as_default():
            begin = [tf.global_variables_initializer(), tf.local_variables_initializer(),
                     tf.tables_initializer()]
        for operation in begin + start:
            session.run(operation)
        coordinator, threads = tf.train.Coordinator(), []
        if graph.get_collection(tf.GraphKeys.QUEUE_RUNNERS):  # else only a deprecation warning
            with graph.as_default():
                threads = tf.train.start_queue_runners(session, coordinator)
        try:
            yield session
        finally:
            coordinator.request_stop()  # closes the queues, so that the threads end
            for thread in threads:
                thread.join(_SECONDS_TO_STOP)


_SECONDS_TO_STOP = 2


def traced_steps(session, step, feed_dict, warm_up, steps):
    """Runs some steps, then yields the `tf.RunMetadata` of each of `steps` more, traced in full."""
    for _ in range(warm_up):
        session.run(step, feed_dict)
    for _ in range(steps):
        metadata = tf.RunMetadata()
        session.run(step, feed_dict, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
                    run_metadata=metadata)
        yield metadata


@contextlib.contextmanager
def explained_input():
    """A context in which a step that lacks its input ends in a `MeasurementError` that says how."""
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        raise MeasurementError('the input ended before the steps were run: give it more batches, '
                               'by .repeat(), or fewer steps= and warm_up=.') from error
    except tf.errors.FailedPreconditionError as error:
        raise MeasurementError('something of the model is not initialized (%.300s): pass start='
                               '[iterator.initializer], say.' % reason_of(error)) from error
    except tf.errors.InvalidArgumentError as error:
        if 'must feed a value' not in str(error):
            raise
        raise MeasurementError('%.300s: pass feed_dict= with a batch.' % (
            reason_of(error),)) from error


def checked_start(name, start):
    """A list of operations that a session runs once, after the initializers.

    Raises:
      InvalidArgumentError: `start` is no list of operations.
    """
    if not isinstance(start, (list, tuple)):
        raise InvalidArgumentError('%s=%.80r of type %s: expected a list of operations, even for '
                                   'one: [iterator.initializer].' % (
                                       name, start, type(start).__name__))
    if start:
        check_fetches(name, start, 'a list of operations, such as [iterator.initializer]')
    return list(start)


def peaks_of(metadata):
    """The most that each allocator had in use in a step.

    An operation's record has the bytes in use at its end. While the operation ran, its scratch
    memory was in use, too: the difference of its own peak and the bytes that it left.

    Args:
      metadata: `tf.RunMetadata` of a run with FULL_TRACE.

    Returns:
      dict from the device, '' for the CPUs of this process, to `(bytes, name of the operation)`.
    """
    found = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for memory in node.memory:
                in_use = memory.allocator_bytes_in_use
                if not in_use:
                    continue
                in_use += max(0, memory.peak_bytes - memory.live_bytes)
                name = _short(device.device) if 'gpu' in memory.allocator_name.lower() and is_gpu(
                    _short(device.device)) else ''
                if in_use > found.get(name, (0, ''))[0]:
                    found[name] = in_use, node.node_name
    return found


def _short(device):
    """'/job:localhost/replica:0/task:0/device:GPU:0' and its streams as '/device:GPU:0'."""
    index = device.upper().find('/DEVICE:')
    if index < 0:
        return '/device:CPU:0'
    kind, number = device[index + len('/device:'):].split('/')[0].split(':')[:2]
    return '/device:%s:%s' % (kind.upper(), number)
