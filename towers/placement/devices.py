"""The devices of the towers, from what a caller says of them.

`resolve_devices` comes first; below it are the checks of devices, and names for texts.
"""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_flag, is_whole_number
from towers.errors import DeviceError, InvalidArgumentError
from towers.placement.tower_device import (
    StagedDevices,
    all_devices,
    stages_of,
    stages_of_all,
    type_and_index,
    without_localhost,
)

MOST_TOWERS = 10000  # a larger count is a typing error, and its list would fill the memory


def visible_gpus() -> typing.Tuple[str, ...]:
    """Names of the GPUs that TensorFlow may use, without initialising any of them.

    TensorFlow numbers the GPUs that `CUDA_VISIBLE_DEVICES` leaves, from 0 on. So the names are
    `/device:GPU:0`, `/device:GPU:1`, … without holes.
    """
    physical = tf.config.experimental.list_physical_devices('GPU')
    return _first_names('GPU', len(physical))


def _first_names(device_type: str, count: int) -> typing.Tuple[str, ...]:
    """The names of the first devices of a type: `('/device:GPU:0', '/device:GPU:1')` for two GPUs.
    """
    return tuple('/device:%s:%d' % (device_type, index) for index in range(count))


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
      devices a `StagedDevices`. `Devices` that are given are returned as they are, whatever `check`
      and `allow_repeated` say.

    Raises:
      DeviceError: no such device, a device named twice, a name that TF cannot parse, or no name.
      InvalidArgumentError: a count below 1, or a value of another type.
    """
    check_flag('check', check)
    check_flag('allow_repeated', allow_repeated)
    if isinstance(devices, Devices):  # an earlier call has checked them by its own arguments
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
    if is_whole_number(devices):
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
        return _first_names('CPU', count)
    if check and count > len(gpus):
        raise DeviceError('devices=%d, but %s: ask for fewer, or name the devices (CPUs too).'
                          % (count, _visible_devices_text(gpus)))
    return _first_names('GPU', count)


def _named_devices(devices: typing.Union[str, typing.Sequence]) -> typing.Tuple[str, ...]:
    """The canonical name of each tower's device, from a list of names or a text such as
    `'/gpu:0,/gpu:1'`.

    Raises `DeviceError` for no tower, and for towers with different numbers of devices: a stage of
    the model would have a device in one tower and none in another.
    """
    entries = devices.split(',') if isinstance(devices, str) else devices
    names = tuple(map(_device_of_tower, entries))
    stage_counts = {len(stages_of(name)) for name in names}  # empty without any tower
    have_same_count = len(stage_counts) == 1
    if not have_same_count:
        raise DeviceError('devices=%.80r: expected one device or more (None for every visible '
                          'GPU), and as many devices for each tower.' % (devices,))
    return names


def _device_of_tower(entry: typing.Any) -> str:
    """The canonical name of a tower's device; a `StagedDevices` for a tower with several devices.

    Args:
      entry: what the caller gave for the tower: a name, names joined by `+`, a list of names, or a
        `StagedDevices`. Anything else is refused.
    """
    if isinstance(entry, StagedDevices):
        names = list(entry.stages)
    elif isinstance(entry, str):
        names = entry.split('+')
    elif isinstance(entry, (list, tuple)) and entry:
        names = list(entry)
    else:
        names = [entry]  # `canonical_device` refuses it: an empty list, or a value of another type
    canonical = list(map(canonical_device, names))
    if len(canonical) == 1:
        return canonical[0]
    return StagedDevices(canonical)


def canonical_device(name: str) -> str:
    """The name of a device as `op.device` spells it: `'/device:GPU:1'` for `'/gpu:1'`.

    Raises `DeviceError` for a value that is not the name of one device.
    """
    if not _is_one_device(name):
        raise DeviceError("%.80r is not the name of one device: expected '/gpu:0', '/cpu:1' or "
                          "'/job:worker/task:0/gpu:0', with a number." % (name,))
    return without_localhost(name.strip())  # so that one device has one spelling


def _is_one_device(name: typing.Any) -> bool:
    """Whether a value is the name of one device. `'/gpu'`, say, is not: it means every GPU."""
    try:
        device_type, index = type_and_index(name.strip())
    except (ValueError, AttributeError, TypeError):  # a text that is no device, or no text
        return False
    return device_type is not None and index is not None and index >= 0


def _check_repeated(names: typing.Sequence[str], devices: typing.Any,
                    allow_repeated: bool) -> None:
    """Raises `DeviceError` for a device that is named twice.

    Args:
      names: the canonical name of each tower's device.
      devices: what the caller gave, for the message.
      allow_repeated: whether two towers may share a device. Two stages of one tower may not.
    """
    for tower_device in names:
        _check_each_once(stages_of(tower_device), devices, 'give each stage a device of its own.')
    if not allow_repeated:
        _check_each_once(
            stages_of_all(names), devices,
            'give each tower a device of its own, or pass resolve_devices(…, allow_repeated=True) '
            'to put several on one.')


def _check_each_once(names: typing.Iterable[str], devices: typing.Any, what_to_do: str) -> None:
    """Raises `DeviceError` for a device that is in `names` twice.

    Args:
      names: the canonical names of devices.
      devices: what the caller gave, for the message.
      what_to_do: the end of the message.
    """
    for name, count in sorted(collections.Counter(names).items()):
        if count > 1:
            raise DeviceError('%s is named %d times in devices=%.80r: %s' % (
                short_name(name), count, devices, what_to_do))


def _check_exists(name: str, gpus: typing.Sequence[str]) -> None:
    """Raises `DeviceError` for a device that this process does not have.

    Args:
      name: the canonical name of the device.
      gpus: the visible GPUs.
    """
    reason = _why_missing(name, gpus)
    if reason is not None:
        raise DeviceError(
            '%s does not exist: %s. Name another device, or pass resolve_devices(…, check=False) '
            'to build the graph for another machine.' % (short_name(name), reason))


def _why_missing(name: str, gpus: typing.Sequence[str]) -> typing.Optional[str]:
    """Says in an error why this process does not have a device; None for a device that it has.

    Args:
      name: the canonical name of the device.
      gpus: the visible GPUs.
    """
    spec = tf.DeviceSpec.from_string(name)
    # The canonical name of a device of this process has none of these fields.
    is_of_cluster = spec.job is not None or spec.task or spec.replica
    if is_of_cluster:
        return 'without a cluster the one job of this program is localhost'
    if _is_on_this_machine(spec, is_visible_gpu=name in gpus):
        return None
    return _visible_devices_text(gpus)


def _is_on_this_machine(spec: tf.DeviceSpec, is_visible_gpu: bool) -> bool:
    """Whether a session of this process can have a device.

    Args:
      spec: the type and the number of the device.
      is_visible_gpu: whether it is one of the visible GPUs.
    """
    if spec.device_type == 'CPU':
        return True  # a session makes as many CPU devices as its config says
    if spec.device_type == 'GPU':
        return is_visible_gpu
    physical = tf.config.experimental.list_physical_devices(spec.device_type)  # TPUs, say
    return spec.device_index < len(physical)


def _visible_devices_text(gpus: typing.Sequence[str]) -> str:
    """Says in an error which GPUs are visible, and what limits them: `CUDA_VISIBLE_DEVICES`."""
    names = ', '.join(map(short_name, gpus)) or 'no GPU'
    text = 'TensorFlow sees %s here' % names
    limit = os.environ.get('CUDA_VISIBLE_DEVICES')
    if limit is None:
        return text
    return '%s (CUDA_VISIBLE_DEVICES=%s)' % (text, limit)


def check_variable_device(name: str, devices: typing.Sequence[str]) -> None:
    """Raises `DeviceError` for a device of variables that does not exist in a session with the
    config for these towers.

    A CPU device beyond the first exists only if the session makes it, and `session_config` has
    the session make as many as the towers need.

    Args:
      name: the device, which the caller has named in `VariablePlacement`.
      devices: the devices of the towers.
    """
    _check_exists(name, visible_gpus())
    spec = tf.DeviceSpec.from_string(name)
    num_cpus = session_cpus(devices)
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


def has_gpus(devices: typing.Iterable[str]) -> bool:
    """Whether any stage of a tower is on a GPU.

    Args:
      devices: the devices of the towers.
    """
    return any(map(is_gpu, all_devices(devices)))


def cpu_indices(devices: typing.Iterable[str]) -> typing.Set[int]:
    """The numbers of the CPU devices that the towers have, stages included: {1, 3} for `/cpu:1`
    and `/cpu:3`. Devices of other types are left out."""
    indices = set()
    for name in all_devices(devices):
        spec = tf.DeviceSpec.from_string(name)
        if spec.device_type == 'CPU':
            indices.add(spec.device_index)
    return indices


def session_cpus(devices: typing.Iterable[str]) -> int:
    """How many CPU devices a session has to have for these towers: 4 for `/cpu:1` and `/cpu:3`,
    since a session numbers its devices from 0 without holes; 1 for towers on GPUs."""
    return max(cpu_indices(devices), default=0) + 1
