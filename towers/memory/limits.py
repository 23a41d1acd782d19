"""How much memory a device has."""

import os

import tensorflow.compat.v1 as tf

from towers.placement.devices import is_gpu, session_config

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
