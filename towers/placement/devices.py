"""The devices of the towers, and the config of a session that has these devices."""

import collections
import numbers
import os
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import MOST_INT32, check_count, check_flag, check_number
from towers.errors import DeviceError, InvalidArgumentError
from towers.placement.tower_device import StagedDevices, all_devices, stages_of

MOST_TOWERS = 10000  # a larger count is a slip of the keyboard, and its list fills the memory
_CHOICE_OF_TENSORFLOW = "TensorFlow's choice of"


def visible_gpus() -> typing.Tuple[str, ...]:
    """Names of the GPUs that TensorFlow may use, without initialising any of them.

    TensorFlow numbers what `CUDA_VISIBLE_DEVICES` leaves from 0, so these are
    `/device:GPU:0`, `/device:GPU:1`, … without holes.
    """
    return tuple('/device:GPU:%d' % index for index in
                 range(len(tf.config.experimental.list_physical_devices('GPU'))))


class Devices(tuple):
    """The devices of the towers, one string a tower, such as `('/device:GPU:0', '/device:GPU:1')`.

    Attributes:
      checked: whether the devices were checked to exist on this machine.
    """

    checked: bool

    def __new__(cls, names: typing.Iterable[str], checked: bool) -> 'Devices':
        """Makes the tuple of the devices' canonical names."""
        devices = super(Devices, cls).__new__(cls, names)
        devices.checked = checked
        return devices


def resolve_devices(devices: typing.Union[None, int, str, typing.Sequence] = None,
                    check: bool = True, allow_repeated: bool = False) -> Devices:
    """The device of each tower, in TF's canonical spelling.

    >>> built = towers.build_towers(model_fn, inputs, optimizer, towers.resolve_devices(
    ...     ['/gpu:0', '/gpu:1'], check=False))  # a graph for another machine

    Args:
      devices: None (every visible GPU, else one CPU); a count (that many GPUs where there are
        any, else that many virtual CPUs); or names in any order and with holes:
        `['/gpu:0', '/gpu:2']`, `'/cpu:0,/cpu:1'`, `'/job:worker/task:1/gpu:0'`. A tower may have
        several devices, one for each stage of its model: `[['/gpu:0', '/gpu:1'],
        ['/gpu:2', '/gpu:3']]`, `'/gpu:0+/gpu:1,/gpu:2+/gpu:3'`; see `stage`.
      check: whether a named GPU has to exist here, and no name may have another job or task than
        this process. CPUs beyond the first are virtual: the session makes them, with the config of
        `session_config`. False lets a graph for another machine, or for a cluster, be built.
      allow_repeated: whether two towers may run on one device.

    Returns:
      `Devices`, a tuple of strings such as `'/device:GPU:0'`, one a tower; for a tower with several
      devices a `StagedDevices`. `Devices` that are given are returned as they are.

    Raises:
      DeviceError: no such device, a device named twice, a name that TF cannot parse, or no name.
      InvalidArgumentError: a count below 1, or a value of another type.
    """
    check_flag('check', check)
    check_flag('allow_repeated', allow_repeated)
    if isinstance(devices, Devices):
        return devices
    return Devices(_canonical_names(devices, check, allow_repeated), check)


def _canonical_names(devices: typing.Any, check: bool,
                     allow_repeated: bool) -> typing.Tuple[str, ...]:
    """The canonical name of each tower's device.

    Args:
      devices, check, allow_repeated: the arguments of `resolve_devices`.
    """
    gpus = visible_gpus()
    if devices is None:
        return gpus or ('/device:CPU:0',)
    is_count = isinstance(devices, numbers.Integral) and not isinstance(devices, bool)
    if is_count:
        return _first_devices(int(devices), gpus, check)
    if not isinstance(devices, (str, list, tuple)):
        raise InvalidArgumentError(
            'devices=%.80r: expected None, a number of devices, or device names such as '
            "['/gpu:0', '/gpu:2']." % (devices,))
    names = _named_devices(devices)
    _check_repeated(names, devices, allow_repeated)
    if check:
        for name in all_devices(names):
            _check_exists(name, gpus)
    return names


def _named_devices(devices: typing.Union[str, typing.Sequence]) -> typing.Tuple[str, ...]:
    """The canonical name of each tower's device, from a list of names or a text such as
    `'/gpu:0,/gpu:1'`.

    Raises `DeviceError` for no tower, and for towers with different numbers of devices: a stage of
    the model would have a device in one tower and none in another.
    """
    entries = devices.split(',') if isinstance(devices, str) else devices
    names = tuple(_devices_of_tower(entry) for entry in entries)
    stage_counts = {len(stages_of(name)) for name in names}
    if len(stage_counts) != 1:
        raise DeviceError('devices=%.80r: expected one device or more (None for every visible '
                          'GPU), and as many devices for each tower.' % (devices,))
    return names


def _devices_of_tower(entry: typing.Any) -> str:
    """The canonical name of a tower's device; a `StagedDevices` for a tower with several devices.

    Args:
      entry: what the caller gave for the tower: a name, names joined by `+`, a list of names, or a
        `StagedDevices`. Anything else is refused.
    """
    if hasattr(entry, 'stages'):
        names = list(entry.stages)
    elif isinstance(entry, str):
        names = entry.split('+')
    elif isinstance(entry, (list, tuple)) and entry:
        names = list(entry)
    else:
        names = [entry]  # which `canonical_device` refuses
    canonical = [canonical_device(name) for name in names]
    return canonical[0] if len(canonical) == 1 else StagedDevices(canonical)


def _check_repeated(names: typing.Sequence[str], devices: typing.Any,
                    allow_repeated: bool) -> None:
    """Raises `DeviceError` for a device that is named twice.

    Args:
      names: the canonical name of each tower's device.
      devices: what the caller gave, for the message.
      allow_repeated: whether two towers may share a device. Two stages of one tower may not.
    """
    counts: collections.Counter = collections.Counter()
    for device in names:
        counts.update(stages_of(device))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if not repeated:
        return
    are_between_towers = all(map(_has_different_stages, names))
    if allow_repeated and are_between_towers:
        return
    raise DeviceError('%s is named %d times in devices=%.80r: give each tower a device of its '
                      'own, or pass resolve_devices(…, allow_repeated=True) to put several on '
                      'one.' % (short_name(repeated[0]), counts[repeated[0]], devices))


def _has_different_stages(device: str) -> bool:
    """Whether all stages of a tower are on different devices."""
    return len(set(stages_of(device))) == len(stages_of(device))


def canonical_device(name: str) -> str:
    """The name of a device as `op.device` spells it: `'/device:GPU:1'` for `'/gpu:1'`.

    Raises `DeviceError` for what is not the name of one device.
    """
    try:
        spec = tf.DeviceSpec.from_string(name.strip())
    except (ValueError, AttributeError, TypeError):
        spec = tf.DeviceSpec()  # no device
    if not _is_one_device(spec):
        raise DeviceError("%.80r is not the name of one device: expected '/gpu:0', '/cpu:1' or "
                          "'/job:worker/task:0/gpu:0', with a number." % (name,))
    is_of_this_process = spec.job == 'localhost' and not spec.task and not spec.replica
    if is_of_this_process:
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def _is_one_device(spec: tf.DeviceSpec) -> bool:
    """Whether a device name has a type and an index; without them it would mean several devices."""
    if spec.device_type is None or spec.device_index is None:
        return False
    return spec.device_index >= 0


def check_variable_device(name: str, devices: typing.Sequence[str]) -> None:
    """Raises `DeviceError` for a device of variables that does not exist in a session with the
    config for these towers.

    Args:
      name: the device, which the caller has named in `VariablePlacement`.
      devices: the devices of the towers.
    """
    _check_exists(name, visible_gpus())
    spec = tf.DeviceSpec.from_string(name)
    num_cpus = session_config(devices).device_count['CPU']
    if spec.device_type == 'CPU' and spec.device_index >= num_cpus:
        raise DeviceError(
            'VariablePlacement(%r): the session of these towers has /cpu:0 to /cpu:%d. Name one of '
            'them; or pass resolve_devices(…, check=False) and a config with '
            "device_count={'CPU': %d}." % (short_name(name), num_cpus - 1, spec.device_index + 1))


def check_one_stage(call: str, devices: typing.Sequence[str]) -> None:
    """Raises `DeviceError` if a tower has several devices; `call` names the public function that
    does not know stages, for the message."""
    for device in devices:
        num_stages = len(stages_of(device))
        if num_stages > 1:
            raise DeviceError(
                '%s: %s is one tower on %d devices: expected one device for each, since this call '
                'does not know stages. Give the loss of the model to towers.build_towers, which '
                'takes such devices.' % (call, short_name(device), num_stages))


def short_name(device: str) -> str:
    """The name of a tower's device in short, for texts: `'/gpu:1'` for `'/device:GPU:1'`; for a
    tower with several devices `'/gpu:0+/gpu:1'`."""
    names = '+'.join(stages_of(device))
    return names.replace('/device:GPU:', '/gpu:').replace('/device:CPU:', '/cpu:')


def is_gpu(device: str) -> bool:
    """Whether a canonical device name is a GPU's."""
    return tf.DeviceSpec.from_string(device).device_type == 'GPU'


def default_variable_device(devices: typing.Sequence[str]) -> str:
    """The device of variables where the caller names none.

    That is the CPU, which all GPUs can reach. With one tower it is the tower's own device, so that
    no variable has to be sent to it.
    """
    if len(devices) == 1:
        return str(devices[0])
    spec = tf.DeviceSpec.from_string(devices[0])
    return tf.DeviceSpec(job=spec.job, replica=spec.replica, task=spec.task,
                         device_type='CPU', device_index=0).to_string()


def session_config(devices: typing.Union[None, int, str, typing.Sequence] = None,
                   allow_growth: bool = True, intra_op_threads: typing.Optional[int] = None,
                   inter_op_threads: typing.Optional[int] = None,
                   memory_fraction: typing.Optional[float] = None) -> tf.ConfigProto:
    """The `ConfigProto` for sessions of a graph with towers on these devices.

    With GPUs TF may move an op that has no kernel for its device (integers, strings). With only
    CPUs a misplaced op is an error; and the graph is optimised once instead of twice,
    and without the optimizers of memory and layout, whose time grows with the towers: that halves
    the time of the first run of 8 InceptionResNet-v2 towers and costs no speed and no memory.

    Args:
      devices: the argument of `build_towers`; or the `devices` of what it returned.
      allow_growth: let GPU memory grow with use instead of taking all of it at the start.
      intra_op_threads: threads of one op. None: `OMP_NUM_THREADS` where it is set; else, for
        two or more CPU towers, the cores divided among them (at least 1), since towers already
        run side by side; else TF's own choice (0).
      inter_op_threads: ops that may run at once. None: TF's own choice (0).
      memory_fraction: the most of each GPU's memory that the process takes, above 0 and up to 1
        (`per_process_gpu_memory_fraction`). None: all of it.

    Returns:
      A new `tf.ConfigProto`, yours to change.

    Raises:
      DeviceError, InvalidArgumentError: see `resolve_devices`; also for a negative thread count; a
        `memory_fraction` that is no fraction.
    """
    check_flag('allow_growth', allow_growth)
    _check_threads('intra_op_threads', intra_op_threads)
    _check_threads('inter_op_threads', inter_op_threads)
    if memory_fraction is not None:
        check_number('memory_fraction', memory_fraction, above=0, most=1,
                     expected="a part of a GPU's memory, above 0 and up to 1, or None")
    names = all_devices(resolve_devices(devices, check=False, allow_repeated=True))
    has_gpus = any(map(is_gpu, names))
    cpu_indices = {tf.DeviceSpec.from_string(name).device_index
                   for name in names if not is_gpu(name)}
    if intra_op_threads is None:
        intra_op_threads = _default_intra_op_threads(num_cpus=len(cpu_indices))
    config = tf.ConfigProto(
        device_count={'CPU': max(cpu_indices, default=0) + 1},
        allow_soft_placement=has_gpus,
        intra_op_parallelism_threads=int(intra_op_threads),
        inter_op_parallelism_threads=int(inter_op_threads or 0))
    config.gpu_options.allow_growth = bool(allow_growth)
    if memory_fraction is not None:
        config.gpu_options.per_process_gpu_memory_fraction = float(memory_fraction)
    if not has_gpus:
        _shorten_graph_optimization(config)
    return config


def _check_threads(name: str, threads: typing.Optional[int]) -> None:
    """Raises `InvalidArgumentError` unless an argument of this name is None or a number of threads.
    """
    if threads is not None:
        check_count(name, threads, least=0, most=MOST_INT32)


def _shorten_graph_optimization(config: tf.ConfigProto) -> None:
    """Switches off, in a config, the passes of graph optimization that gain nothing on CPUs; see
    `session_config`."""
    rewrites = config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = rewrites.ONE
    rewrites.memory_optimization = rewrites.NO_MEM_OPT
    rewrites.layout_optimizer = rewrites.OFF  # it only changes operations on GPUs
    compat.switch_off_graph_dialect(rewrites)


def _default_intra_op_threads(num_cpus: int) -> int:
    """The number of threads of one operation, where the caller gives none.

    That is `OMP_NUM_THREADS`, if it is set. Else several CPU devices share the cores: on 8 cores
    each of 4 devices gets 2 threads. Else it is 0, by which TensorFlow chooses itself.
    """
    from_environment = os.environ.get('OMP_NUM_THREADS', '').strip()
    if from_environment.isdigit() and int(from_environment) > 0:
        return int(from_environment)
    if num_cpus > 1:
        return max(1, (os.cpu_count() or 1) // num_cpus)
    return 0


def describe_config(config: tf.ConfigProto, devices: typing.Sequence[str]) -> str:
    """The plan's text about a session's config: its threads, and on GPUs its memory.

    Args:
      config: the config.
      devices: the devices of the towers.
    """
    line = '%s intra-op and %s inter-op threads' % (
        config.intra_op_parallelism_threads or _CHOICE_OF_TENSORFLOW,
        config.inter_op_parallelism_threads or _CHOICE_OF_TENSORFLOW)
    if not any(is_gpu(device) for device in devices):
        return line
    gpu_options = config.gpu_options
    line += '; GPU memory ' + ('as it is needed' if gpu_options.allow_growth else 'all at once')
    if gpu_options.per_process_gpu_memory_fraction:
        line += ', %g of it at the most' % gpu_options.per_process_gpu_memory_fraction
    return line


def config_of_towers(graph: typing.Optional[tf.Graph] = None) -> typing.Optional[tf.ConfigProto]:
    """The `session_config` for the devices that the operations of a graph ask for.

    Args:
      graph: the graph; None for the default graph.

    Returns:
      The config; None where the operations ask for `/cpu:0` only, or for no device.
    """
    operations = (graph or tf.get_default_graph()).get_operations()
    names = set()
    for device in {op.device for op in operations}:
        spec = tf.DeviceSpec.from_string(device)
        if spec.device_type is not None and spec.device_index is not None:
            names.add('/device:%s:%d' % (spec.device_type, spec.device_index))
    if names <= {'/device:CPU:0'}:
        return None
    return session_config(sorted(names))


def needs_config(devices: typing.Sequence[str]) -> bool:
    """Whether a session needs `session_config` to have these devices: some are virtual CPUs."""
    return any(name.startswith('/device:CPU:') and name != '/device:CPU:0'
               for name in all_devices(devices))


def _first_devices(count: int, gpus: typing.Sequence[str], check: bool) -> typing.Tuple[str, ...]:
    """The canonical names of the first `count` GPUs, or of so many virtual CPUs.

    Args:
      count: the number of devices.
      gpus: the visible GPUs; where there are none, CPUs are taken.
      check: whether so many GPUs have to exist.
    """
    if not 0 < count <= MOST_TOWERS:
        raise InvalidArgumentError('devices=%d: expected at least one device, and at most %d.' % (
            count, MOST_TOWERS))
    if not gpus:
        return tuple('/device:CPU:%d' % index for index in range(count))
    if check and count > len(gpus):
        raise DeviceError('devices=%d, but %s: ask for fewer, or name the devices (CPUs too).'
                          % (count, _visible_devices_text(gpus)))
    return tuple('/device:GPU:%d' % index for index in range(count))


def _check_exists(name: str, gpus: typing.Sequence[str]) -> None:
    """Raises `DeviceError` for a device that this process does not have.

    Args:
      name: the canonical name of the device.
      gpus: the visible GPUs.
    """
    spec = tf.DeviceSpec.from_string(name)
    is_in_cluster = spec.job is not None or spec.task or spec.replica
    if not is_in_cluster and _is_here(spec, name in gpus):
        return
    if is_in_cluster:
        reason = 'without a cluster the one job of this program is localhost'
    else:
        reason = _visible_devices_text(gpus)
    raise DeviceError(
        '%s does not exist: %s. Name another device, or pass resolve_devices(…, check=False) '
        'to build the graph for another machine.' % (short_name(name), reason))


def _is_here(spec: tf.DeviceSpec, is_visible_gpu: bool) -> bool:
    """Whether this process has a device. Any number of CPUs exists, since they are virtual; of
    other types, such as TPU, there are as many as TensorFlow lists."""
    if spec.device_type == 'CPU':
        return True
    if spec.device_type == 'GPU':
        return is_visible_gpu
    physical = tf.config.experimental.list_physical_devices(spec.device_type)
    return spec.device_index < len(physical)


def _visible_devices_text(gpus: typing.Sequence[str]) -> str:
    """Says in an error which GPUs are visible, and what limits them: `CUDA_VISIBLE_DEVICES`."""
    text = 'TensorFlow sees %s here' % (', '.join(map(short_name, gpus)) or 'no GPU')
    limit = os.environ.get('CUDA_VISIBLE_DEVICES')
    if limit is None:
        return text
    return '%s (CUDA_VISIBLE_DEVICES=%s)' % (text, limit)
