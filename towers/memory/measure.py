"""The peak of a step's memory, as TensorFlow's own allocators saw it, and what devices have."""

import collections
import contextlib
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_config, check_feed, check_fetches, check_instance)
from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError, MeasurementError
from towers.placement.devices import is_gpu, session_config, short_name
from towers.placement.numerics import use_precision


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
                   session: typing.Optional[tf.Session] = None, start: typing.Sequence = (),
                   config: typing.Optional[tf.ConfigProto] = None) -> MeasuredMemory:
    """Runs a few steps and says how much memory they took.

    Args:
      built: what `build_towers` returned.
      feed_dict: for `session.run`.
      session: a session whose variables are initialized; None: one is made, initialized and closed.
      start: operations that a session made here runs once after the initializers, such as the
        initializer of the input's iterator.
      config: `tf.ConfigProto` of a session made here; None for `session_config`'s.

    Returns:
      `MeasuredMemory`.

    Raises:
      MeasurementError: TensorFlow's allocator on CPUs does not count here.
      InvalidArgumentError: not what `build_towers` returned; an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'what build_towers returned')
    check_feed(feed_dict)
    check_config(config)
    if session is not None and (isinstance(session, type) or not hasattr(session, 'run')):
        raise InvalidArgumentError('session=%.80r of type %s: expected a tf.Session, or None.' % (
            session, type(session).__name__))
    start = checked_start('start', start)
    step = built.train_op if built.train_op is not None else built.loss
    peaks, moments = {}, {}
    with contextlib.ExitStack() as stack:
        if session is None:
            if config is None:
                config = use_precision(session_config(built.devices), built.precision,
                                       built.devices)
            session = stack.enter_context(_initialized_session(built.loss.graph, config, start))
        for _ in range(2):  # the first steps allocate memory that stays
            session.run(step, feed_dict)
        for _ in range(2):
            metadata = tf.RunMetadata()
            session.run(step, feed_dict, run_metadata=metadata,
                        options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))
            for device, (bytes_, name) in peaks_of(metadata).items():
                if bytes_ > peaks.get(device, 0):
                    peaks[device], moments[device] = bytes_, name
    if not peaks:
        raise MeasurementError(
            'TensorFlow counted no memory: its plain allocator on CPUs does not. Set '
            'TF_CPU_ALLOCATOR_USE_BFC=true in the environment before the program starts.')
    return MeasuredMemory(peaks, moments, built.plan.batch_size)


@contextlib.contextmanager
def _initialized_session(graph, config, start):
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


_CGROUPS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


def device_limit(devices, config=None):
    """Bytes that TensorFlow may use on the device with the least memory; all CPUs share theirs.

    GPUs among the devices are initialised, as by a session.

    Args:
      devices: list of canonical names.
      config: `tf.ConfigProto` of the session to run on the devices; None for `session_config`'s.
    """
    limits = []
    if any(not is_gpu(device) for device in devices):
        limits.append(_of_cpus())
    gpus = [device for device in devices if is_gpu(device)]
    if gpus:
        with tf.Session(graph=tf.Graph(), config=config or session_config(gpus)) as session:
            limits += [device.memory_limit_bytes for device in session.list_devices()
                       if any(device.name.endswith(gpu) for gpu in gpus)]
    return min(limits)


def _of_cpus():
    limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
    for path in _CGROUPS:
        try:
            with open(path) as opened:
                limits.append(int(opened.read()))
        except (OSError, ValueError):  # another kind of control group, or 'max'
            continue
    if os.environ.get('TF_CPU_ALLOCATOR_USE_BFC', '').lower() in ('1', 'true'):
        pool = os.environ.get('TF_CPU_BFC_MEM_LIMIT_IN_MB', '')
        if pool.isdigit():
            limits.append(int(pool) << 20)
    return min(limits)
