"""The memory that a step may take: a limit that the caller gives, or what the devices have."""

import numbers
import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_number
from towers.errors import InvalidArgumentError
from towers.placement.devices import is_gpu
from towers.placement.session_config import session_config

_BYTES = 'a whole number of bytes, such as 50e6, or None'
# The memory limit of the process's control group, in version 2 and in version 1 of control groups.
_CGROUPS = ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes')


def checked_limit(memory_limit: typing.Optional[float]) -> typing.Optional[int]:
    """The argument `memory_limit` as an int.

    Args:
      memory_limit: bytes: an int, or a float with a whole value, such as `50e6`; None for no limit.

    Returns:
      Bytes; None for None.

    Raises:
      InvalidArgumentError: it is no number of bytes.
    """
    if memory_limit is None:
        return None
    is_integer = isinstance(memory_limit, numbers.Integral)
    is_real = isinstance(memory_limit, numbers.Real)  # True for integers also
    if is_real and not is_integer:
        check_number('memory_limit', memory_limit, least=1, expected=_BYTES)
        if memory_limit != int(memory_limit):
            raise InvalidArgumentError('memory_limit=%r: expected %s.' % (memory_limit, _BYTES))
    else:
        check_count('memory_limit', memory_limit)  # also refuses a value that is no number
    return int(memory_limit)


def device_limit(devices: typing.Sequence[str],
                 config: typing.Optional[tf.ConfigProto] = None) -> int:
    """Bytes that TensorFlow may use on the device with the least memory.

    Args:
      devices: the devices of the towers. All CPUs share one memory.
      config: `tf.ConfigProto` of a session that initialises the GPUs and asks for their limits;
        None for the config of `session_config`.

    Returns:
      Bytes.
    """
    limits = []
    gpus = [device for device in devices if is_gpu(device)]
    has_cpus = len(gpus) < len(devices)
    if has_cpus:
        limits.append(_limit_of_cpus())
    if gpus:
        limits += _limits_of_gpus(gpus, config or session_config(gpus))
    return min(limits)


def _limits_of_gpus(gpus: typing.Sequence[str], config: tf.ConfigProto) -> typing.List[int]:
    """Bytes that TensorFlow may use on each of some GPUs, as a session with this config says."""
    limits = []
    with tf.Session(graph=tf.Graph(), config=config) as session:
        for device in session.list_devices():
            # Its name is '/job:localhost/replica:0/task:0/device:GPU:0'.
            if device.name.endswith(tuple(gpus)):
                limits.append(device.memory_limit_bytes)
    return limits


def _limit_of_cpus() -> int:
    """Bytes of the machine's memory, or of the process's control group if that has less."""
    limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
    for path in _CGROUPS:
        try:
            with open(path) as opened:
                limits.append(int(opened.read()))
        except (OSError, ValueError):  # no such file, or 'max' in it: no limit
            continue
    return min(limits)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a `ResourceExhaustedError` is about memory, and not, say, about a full disk."""
    return re.search('OOM|out of memory|allocat', str(error), re.IGNORECASE) is not None
