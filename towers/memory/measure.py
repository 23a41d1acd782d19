"""The peak of a step's memory as TensorFlow's own allocators saw it, beside the account."""

import collections
import contextlib
import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import (check_config, check_feed, check_function, check_instance)
from towers.errors import InvalidArgumentError, MeasurementError, MissingPackageError
from towers.memory.account import KINDS, MemoryAccount
from towers.placement.devices import is_gpu, session_config, short_name
from towers.placement.numerics import use_precision
from towers.safe_files import written_whole

_SECONDS_TO_STOP = 2
_CGROUPS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


class MeasuredMemory(collections.namedtuple('MeasuredMemory', 'peaks moments batch_size')):
    """The peak of each allocator in a step.

    Attributes:
      peaks: dict from an allocator's device ('' for all CPUs of this process) to bytes.
      moments: dict from the same devices to the name of the operation that ran at the peak.
      batch_size: examples of the step, None where it is not known.
    """
    __slots__ = ()

    @property
    def peak(self) -> int:
        """The largest of the peaks."""
        return max(self.peaks.values())

    def against(self, account: MemoryAccount) -> str:
        """A line with the peak of a `MemoryAccount`, the measured peak, and the error."""
        check_instance('account', account, MemoryAccount, 'what memory_account returned')
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
      built: the result of `build_towers`.
      feed_dict: for `session.run`.
      session: a session whose variables are initialized; None: one is made, initialized and closed.
      start: operations that a session made here runs once after the initializers, such as the
        initializer of the input's iterator.
      config: `tf.ConfigProto` of a session made here; None for `session_config`'s.

    Returns:
      `MeasuredMemory`.

    Raises:
      MeasurementError: TensorFlow's allocator on CPUs does not count here.
      InvalidArgumentError: not the result of `build_towers`; an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    check_feed(feed_dict)
    check_config(config)
    is_other = isinstance(session, (type, tf.Operation))  # which have a method run, too
    if session is not None and (is_other or not hasattr(session, 'run')):
        raise InvalidArgumentError('session=%.80r of type %s: expected a tf.Session, or None.' % (
            session, type(session).__name__))
    start = _checked_start('start', start)
    step = built.train_op if built.train_op is not None else built.loss
    peaks, moments = {}, {}
    if config is None:
        config = use_precision(session_config(built.devices), built.precision, built.devices)
    with _initialized_session(built.loss.graph, config, start) if session is None else (
            contextlib.nullcontext(session)) as session:
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
    """A session that has run the initializers and `start`, with queues that are filled."""
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


def _checked_start(name, start):
    """`start` as a list of operations; raises `InvalidArgumentError`."""
    if not isinstance(start, (list, tuple)) or not all(
            isinstance(each, (tf.Operation, tf.Tensor)) for each in start):
        raise InvalidArgumentError('%s=%.80r of type %s: expected a list of operations, even for '
                                   'one: [iterator.initializer].' % (
                                       name, start, type(start).__name__))
    return list(start)


def peaks_of(metadata):
    """{device, '' for all CPUs: (bytes, name of the operation)}, of a FULL_TRACE run.

    An operation's record has the bytes in use at its end. While the operation ran, its scratch
    memory was in use, too: the difference of its own peak and the bytes that it left.
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
    found = re.search(r'/device:(\w+):(\d+)', device, re.IGNORECASE)
    return '/device:%s:%s' % (found.group(1).upper(), found.group(2)) if found else '/device:CPU:0'


def device_limit(devices, config=None):
    """Bytes that TensorFlow may use on the device with the least memory; all CPUs share theirs.

    GPUs are initialised by a session with this `config`; None for `session_config`'s.
    """
    limits, gpus = [], [device for device in devices if is_gpu(device)]
    if len(gpus) < len(devices):
        limits.append(_of_cpus())
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
    return min(limits)


def check_build(build, config):
    """Raises `InvalidArgumentError` for functions that `fit_batch_size` cannot call."""
    check_function('build', build, 1, 'a function from a batch size to (built, start)')
    if config is not None:
        check_function('config', config, 1, 'a function from built to a tf.ConfigProto, or None')


def called_build(build, batch_size):
    """`(built, start)` of a `build` function as `fit_batch_size` takes it; or raises."""
    made = build(batch_size)
    if not (type(made) in (list, tuple) and len(made) == 2 and isinstance(made[0], BuiltTowers)):
        raise InvalidArgumentError(
            'build(%d) returned %.80r of type %s: expected (built, start), what build_towers '
            'returned and a list of operations to be run once, such as [iterator.initializer].' % (
                batch_size, made, type(made).__name__))
    return made[0], _checked_start('start of build(%d)' % batch_size, made[1])


def is_out_of_memory(error: Exception) -> bool:
    """Whether a `ResourceExhaustedError` is about memory, and not, say, about a full disk."""
    return re.search('OOM|out of memory|allocat', str(error), re.IGNORECASE) is not None


def count_on_cpus():
    """Makes TensorFlow's allocator on CPUs count; to be called before the first session."""
    os.environ.setdefault('TF_CPU_ALLOCATOR_USE_BFC', 'true')


def draw(accounts, path, measured, limit, title):
    """Writes a PNG: the kinds of memory stacked, measured peaks as points, the limit as a line.

    Args:
      accounts: list of `MemoryAccount`, by their batch sizes.
      measured: list of `(batch size, bytes)`.
      limit: bytes that a step may take.
    """
    figure = figure_class()(figsize=(8.4, 4.8), dpi=110)  # pyplot's state is the program's
    axes = figure.add_subplot(111)
    fullest = [account.fullest() for account in accounts]
    batches = [account.batch_size for account in accounts]
    highest = max([each.peak for each in fullest] + [bytes_ for _, bytes_ in measured])
    unit, name = (1e9, 'GB') if highest >= 2e9 else (1e6, 'MB')
    kinds = [kind for kind in KINDS if any(each.kinds.get(kind) for each in fullest)]
    rows = [[each.kinds.get(kind, 0) / unit for each in fullest] for kind in kinds]
    axes.stackplot(batches, rows, labels=kinds, colors=map(KINDS.get, kinds), linewidth=0)
    axes.set_xlim(min(batches), max(batches))
    axes.plot(batches, [each.peak / unit for each in fullest], color='#333333', label='predicted')
    if measured:
        axes.plot([batch for batch, _ in measured], [bytes_ / unit for _, bytes_ in measured], 'o',
                  color='white', markeredgecolor='black', clip_on=False, zorder=5, label='measured')
    axes.axhline(limit / unit, color='#cc0000', linestyle='--',
                 label='limit, %.6g %s' % (limit / unit, name))  # it may be far above all else
    axes.set_ylim(0, (max(highest, limit) if limit < 3 * highest else highest) / unit * 1.08)
    axes.set_xticks(batches)
    axes.set_xlabel('batch size, examples of a step over all towers')
    axes.set_ylabel('memory at the worst moment, %s' % name)
    axes.set_title(title, fontsize=11, loc='left')
    axes.legend(loc='center left', bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    with written_whole(path, 'wb') as picture:
        figure.savefig(picture, bbox_inches='tight', format='png')


def figure_class():
    """The class of matplotlib's figures."""
    try:
        import matplotlib  # noqa: F401 pylint: disable=import-outside-toplevel,unused-import
        from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise MissingPackageError(
            'Plots need matplotlib: pip install matplotlib (the extra plots).') from None
    return Figure
