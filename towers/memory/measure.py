"""The peak of a step's memory as TensorFlow's own allocators saw it, beside the account."""

import contextlib
import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_config, check_feed, check_function, check_instance
from towers.errors import InvalidArgumentError, MeasurementError
from towers.memory.account_table import MemoryAccount
from towers.memory.tower_step import fetches_of_step
from towers.placement.devices import is_gpu, short_name
from towers.placement.numerics import use_precision
from towers.placement.session_config import session_config

_SECONDS_TO_STOP = 2  # for each thread that fills a queue
_UNTRACED_STEPS = 2  # the first steps allocate memory that stays
_TRACED_STEPS = 2

# TensorFlow's names of the allocators of a GPU's own memory: 'GPU_0_bfc', and 'gpu_async_0' for
# CUDA's pool. 'gpu_host_bfc' is none of these: it hands out pinned memory of the host.
_ALLOCATOR_OF_GPU = re.compile(r'gpu_(async_)?\d', re.IGNORECASE)


class MeasuredMemory(typing.NamedTuple):
    """The peak of each allocator in a step.

    Attributes:
      peaks: dict from an allocator's device ('' for all CPUs of this process) to bytes.
      moments: dict from the same devices to the name of the operation that ran at the peak.
      batch_size: examples of the step, None where it is not known.
    """
    peaks: typing.Dict[str, int]
    moments: typing.Dict[str, str]
    batch_size: typing.Optional[int]

    @property
    def peak(self) -> int:
        """The largest of the peaks."""
        return max(self.peaks.values())

    def against(self, account: MemoryAccount) -> str:
        """A line with the peak of a `MemoryAccount`, the measured peak, and the error."""
        check_instance('account', account, MemoryAccount, 'what memory_account returned')
        batch_size = '?' if account.batch_size is None else account.batch_size
        relative_error = account.peak / float(self.peak) - 1.
        return 'batch %s: predicted %.1f MB, measured %.1f MB, error %+.1f %%' % (
            batch_size, account.peak / 1e6, self.peak / 1e6, 100 * relative_error)

    def __str__(self):
        """A line for each allocator."""
        lines = []
        for device, peak in sorted(self.peaks.items()):
            lines.append('%-10s %9.1f MB in use at the most, at %s' % (
                short_name(device) or 'CPUs', peak / 1e6, self.moments[device]))
        return '\n'.join(lines)


class _Peak(typing.NamedTuple):
    """The worst moment of an allocator."""
    bytes: int
    operation: str  # name of the operation that ran then


def measure_memory(built: BuiltTowers, feed_dict: typing.Optional[dict] = None, *,
                   session: typing.Optional[tf.Session] = None, start: typing.Sequence = (),
                   config: typing.Optional[tf.ConfigProto] = None) -> MeasuredMemory:
    """Runs a few steps and says how much memory they took.

    Args:
      built: the result of `build_towers`.
      feed_dict: for `session.run`.
      session: a session whose variables are initialized; None: this function makes a session,
        initializes its variables, and closes it.
      start: operations that a session made here runs once after the initializers, such as the
        initializer of the input's iterator.
      config: `tf.ConfigProto` of a session made here; None for `session_config`'s.

    Returns:
      `MeasuredMemory`.

    Raises:
      MeasurementError: TensorFlow's allocator on CPUs does not count memory here.
      InvalidArgumentError: `built` is not the result of `build_towers`; an argument
        of another kind.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    check_feed(feed_dict)
    check_config(config)
    first_operations = _checked_start('start', start)
    if session is not None:
        _check_session(session)
        running: typing.ContextManager = contextlib.nullcontext(session)  # left open
    else:
        running = _initialized_session(built, config, first_operations)
    with running as open_session:
        peaks = _peaks_of_steps(open_session, fetches_of_step(built), feed_dict)
    if not peaks:
        raise MeasurementError(
            'TensorFlow counted no memory: its plain allocator on CPUs does not. Set '
            'TF_CPU_ALLOCATOR_USE_BFC=true in the environment before the program starts.')
    return MeasuredMemory(
        peaks={device: peak.bytes for device, peak in peaks.items()},
        moments={device: peak.operation for device, peak in peaks.items()},
        batch_size=built.plan.batch_size)


def _check_session(session: typing.Any) -> None:
    """Raises `InvalidArgumentError` for a value that is no session. Every session, also a hooked
    session, has a method `run`. A class or an operation has a `run` that runs no step."""
    is_other = isinstance(session, (type, tf.Operation))
    if is_other or not hasattr(session, 'run'):
        raise InvalidArgumentError('session=%.80r of type %s: expected a tf.Session, or None.' % (
            session, type(session).__name__))


def _peaks_of_steps(session: tf.Session, step: typing.List[tf.Operation],
                    feed_dict: typing.Optional[dict]) -> typing.Dict[str, _Peak]:
    """Runs a few steps, and finds the worst moment of each allocator.

    Args:
      session: an initialized session.
      step: the operations that `session.run` runs in a step.
      feed_dict: what `session.run` is fed.

    Returns:
      {device, '' for all CPUs: `_Peak`}; {} where TensorFlow does not count memory.
    """
    for _ in range(_UNTRACED_STEPS):
        session.run(step, feed_dict)
    peaks: typing.Dict[str, _Peak] = {}
    for _ in range(_TRACED_STEPS):
        metadata = tf.RunMetadata()
        session.run(step, feed_dict, run_metadata=metadata,
                    options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))
        for device, peak in peaks_of(metadata).items():
            _note_peak(peaks, device, peak)
    return peaks


def _note_peak(peaks: typing.Dict[str, _Peak], device: str, peak: _Peak) -> None:
    """Puts the peak of a device into `peaks`, unless `peaks` has a higher peak of the device."""
    if device not in peaks or peak.bytes > peaks[device].bytes:
        peaks[device] = peak


@contextlib.contextmanager
def _initialized_session(built: BuiltTowers, config: typing.Optional[tf.ConfigProto],
                         first_operations: typing.List[tf.Operation]
                         ) -> typing.Iterator[tf.Session]:
    """The context of a session that has run its initializers, and whose queues are being filled.

    Args:
      built: the towers, whose graph the session runs.
      config: the config of the session; None for `session_config`'s, with the towers' precision.
      first_operations: operations that the session runs after the initializers.
    """
    graph = fetches_of_step(built)[0].graph
    if config is None:
        config = use_precision(session_config(built.devices), built.precision, built.devices)
    with tf.Session(graph=graph, config=config) as session:
        with graph.as_default():
            initializers = [tf.global_variables_initializer(), tf.local_variables_initializer(),
                            tf.tables_initializer()]
        for operation in initializers + first_operations:
            session.run(operation)
        coordinator = tf.train.Coordinator()
        threads = []
        if graph.get_collection(tf.GraphKeys.QUEUE_RUNNERS):
            # Without queues there would be nothing but a warning that queues are deprecated.
            with graph.as_default():
                threads = tf.train.start_queue_runners(session, coordinator)
        try:
            yield session
        finally:
            coordinator.request_stop()  # closes the queues, so that the threads end
            for thread in threads:
                thread.join(_SECONDS_TO_STOP)


def _checked_start(name: str, start: typing.Any) -> typing.List[tf.Operation]:
    """The argument `start` as a list; raises `InvalidArgumentError` if it is no list of operations.

    Args:
      name: how the message calls the argument.
      start: its value.
    """
    is_list = isinstance(start, (list, tuple))
    if not is_list or not all(isinstance(each, (tf.Operation, tf.Tensor)) for each in start):
        raise InvalidArgumentError('%s=%.80r of type %s: expected a list of operations, even for '
                                   'one: [iterator.initializer].' % (
                                       name, start, type(start).__name__))
    return list(start)


def peaks_of(metadata: tf.RunMetadata) -> typing.Dict[str, _Peak]:
    """Finds the worst moment of each allocator in the metadata of a FULL_TRACE run.

    Returns:
      {device, '' for all CPUs: `_Peak`}.
    """
    peaks: typing.Dict[str, _Peak] = {}
    for use in uses_of(metadata):
        _note_peak(peaks, use.device, _Peak(use.bytes, use.operation))
    return peaks


class MemoryUse(typing.NamedTuple):
    """The memory in use while an operation ran.

    Attributes:
      device: the device whose memory is in use, '' for all CPUs.
      bytes: the bytes in use at the operation's end, plus the operation's scratch memory.
      operation: the name of the operation.
      end: when the operation ended, microseconds on the clock of the trace.
    """
    device: str
    bytes: int
    operation: str
    end: int


def uses_of(metadata: tf.RunMetadata) -> typing.Iterator[MemoryUse]:
    """Yields the memory in use while each operation of a FULL_TRACE run ran, in no order.

    TensorFlow's record of an operation has the bytes in use at its end. While the operation ran,
    its scratch memory was also in use: the operation's own peak minus the bytes that it left.
    """
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            end = node.all_start_micros + node.all_end_rel_micros
            for memory in node.memory:
                in_use = memory.allocator_bytes_in_use
                if not in_use:
                    continue  # an allocator that does not count
                scratch = max(0, memory.peak_bytes - memory.live_bytes)
                name = _device_of(memory.allocator_name, device.device)
                yield MemoryUse(name, in_use + scratch, node.node_name, end)


def _device_of(allocator_name: str, device: str) -> str:
    """The device whose memory an allocator hands out; '' for the memory that all CPUs share.

    Args:
      allocator_name: the name of the allocator in a record.
      device: the device of the recorded operation. An operation on a GPU may also use memory of the
        CPUs.
    """
    short = _short(device)
    is_on_gpu = is_gpu(short)
    uses_memory_of_gpu = _ALLOCATOR_OF_GPU.match(allocator_name) is not None
    return short if is_on_gpu and uses_memory_of_gpu else ''


def _short(device: str) -> str:
    """The device without its job and stream: `'/device:GPU:0'` for
    `'/job:localhost/replica:0/task:0/device:GPU:0/stream:all'`."""
    found = re.search(r'/device:(\w+):(\d+)', device, re.IGNORECASE)
    if found is None:  # a record of the host, such as '/host:CPU'
        return '/device:CPU:0'
    return '/device:%s:%s' % (found.group(1).upper(), found.group(2))


# ---- a function that builds towers at a batch size -----------------------------------------------

def check_build(build: typing.Any, config: typing.Any) -> None:
    """Raises `InvalidArgumentError` if `fit_batch_size` cannot call its `build` or its `config`.

    Args:
      build, config: the arguments of `fit_batch_size`.
    """
    check_function('build', build, 1, 'a function from a batch size to (built, start)')
    if config is not None:
        check_function('config', config, 1, 'a function from built to a tf.ConfigProto, or None')


def called_build(build: typing.Callable,
                 batch_size: int) -> typing.Tuple[BuiltTowers, typing.List[tf.Operation]]:
    """Calls the function `build` of `fit_batch_size`.

    Args:
      build: the function.
      batch_size: its argument.

    Returns:
      `(built, start)`: the `BuiltTowers`, and a list of operations to run once.

    Raises:
      InvalidArgumentError: `build` returned something else.
    """
    made = build(batch_size)
    is_pair = type(made) in (list, tuple) and len(made) == 2  # a `BuiltTowers` is also a tuple
    if not is_pair or not isinstance(made[0], BuiltTowers):
        raise InvalidArgumentError(
            'build(%d) returned %.80r of type %s: expected (built, start), what build_towers '
            'returned and a list of operations to be run once, such as [iterator.initializer].' % (
                batch_size, made, type(made).__name__))
    return made[0], _checked_start('start of build(%d)' % batch_size, made[1])


def config_of(built: BuiltTowers,
              config: typing.Optional[typing.Callable]) -> typing.Optional[tf.ConfigProto]:
    """The `tf.ConfigProto` that the caller's function `config` makes for towers; None without such
    a function."""
    return None if config is None else config(built)


def count_on_cpus() -> None:
    """Makes TensorFlow's allocator on CPUs count memory; to be called before the first session."""
    os.environ.setdefault('TF_CPU_ALLOCATOR_USE_BFC', 'true')
