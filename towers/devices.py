"""Which devices the towers run on, and the session config that such a graph wants."""

import os

import tensorflow.compat.v1 as tf

from towers.errors import DeviceError, InvalidArgumentError


def visible_gpus():
    """Names of the GPUs that TensorFlow may use, without initialising any of them.

    TensorFlow numbers what `CUDA_VISIBLE_DEVICES` leaves from 0, so these are
    `/device:GPU:0`, `/device:GPU:1`, … without holes. `device_lib.list_local_devices()` would
    answer the same question by creating every device, memory pools included.
    """
    return tuple('/device:GPU:%d' % index for index in
                 range(len(tf.config.experimental.list_physical_devices('GPU'))))


def resolve_devices(devices=None, check=True, allow_repeated=False):
    """The device of each tower, in TF's canonical spelling.

    Args:
      devices: None (every visible GPU, else one CPU); a count (that many GPUs where there are
        any, else that many virtual CPUs); or names in any order and with holes:
        `['/gpu:0', '/gpu:2']`, `'/cpu:0,/cpu:1'`, `'/job:worker/task:1/gpu:0'`.
      check: whether a named GPU has to exist here. CPUs beyond the first are virtual: the
        session makes them, with the config of `session_config`. False lets a graph for another
        machine be built; so does a `/job:`, whose machine cannot be looked into from here.
      allow_repeated: whether two towers may run on one device.

    Returns:
      A tuple of strings such as `'/device:GPU:0'`, one a tower.

    Raises:
      DeviceError: no such device, one that is named twice, a name that TF cannot parse, or none.
      InvalidArgumentError: a count below 1, or a type that is none of the above.
    """
    gpus = visible_gpus()
    if devices is None:
        return gpus or ('/device:CPU:0',)
    if isinstance(devices, bool) or not isinstance(devices, (int, str, list, tuple)):
        raise InvalidArgumentError(
            'devices=%r: expected None, a number of devices, or device names such as '
            "['/gpu:0', '/gpu:2']." % (devices,))
    if isinstance(devices, int):
        return _first_devices(devices, gpus, check)
    names = devices.split(',') if isinstance(devices, str) else devices
    resolved = tuple(canonical_device(name) for name in names)
    if not resolved:
        raise DeviceError('devices=%r names no device: name at least one, or pass None for every '
                          'visible GPU (one CPU where there is none).' % (devices,))
    repeated = sorted(name for name in set(resolved) if resolved.count(name) > 1)
    if repeated and not allow_repeated:
        raise DeviceError('%s is named %d times in devices=%r: give each tower a device of its '
                          'own, or pass allow_repeated_devices=True to put several on one.'
                          % (short_name(repeated[0]), resolved.count(repeated[0]), devices))
    if check:
        for name in resolved:
            _check_exists(name, gpus)
    return resolved


def canonical_device(name):
    """`'/gpu:1'` as `'/device:GPU:1'`, the spelling of `op.device`; raises `DeviceError`."""
    try:
        spec = tf.DeviceSpec.from_string(name.strip())
    except (ValueError, AttributeError, TypeError):
        spec = None
    if (spec is None or spec.device_type is None or spec.device_index is None
            or spec.device_index < 0):
        raise DeviceError("%r is not the name of one device: expected '/gpu:0', '/cpu:1' or "
                          "'/job:worker/task:0/gpu:0', with a number." % (name,))
    if spec.job == 'localhost':  # how TF names this machine's devices where it lists them
        spec = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
    return spec.to_string()


def check_variable_device(name):
    """Raises `DeviceError` for a GPU that is not on this machine.

    Any number of CPU devices may be there: the session's `device_count` says.
    """
    _check_exists(name, visible_gpus())


def short_name(device):
    """`'/device:GPU:1'` as `'/gpu:1'`, for people."""
    return device.replace('/device:GPU:', '/gpu:').replace('/device:CPU:', '/cpu:')


def is_gpu(device):
    """Whether a canonical device name is a GPU's."""
    return tf.DeviceSpec.from_string(device).device_type == 'GPU'


def default_variable_device(devices):
    """Where variables live unless the caller says: the CPU, or the GPU when there is just one.

    A single GPU that holds its own variables saves a copy of every parameter and gradient over
    the bus; with more devices the CPU is the one place that all of them reach.
    """
    if len(devices) == 1:
        return devices[0]
    spec = tf.DeviceSpec.from_string(devices[0])
    return tf.DeviceSpec(job=spec.job, replica=spec.replica, task=spec.task,
                         device_type='CPU', device_index=0).to_string()


def session_config(devices=None, allow_growth=True, intra_op_threads=None, inter_op_threads=None,
                   soft_placement=None, quick_start=None):
    """The `ConfigProto` that a graph with towers on these devices wants.

    Args:
      devices: as for `build_towers`; or the `devices` of what it returned.
      allow_growth: let GPU memory grow with use instead of taking all of it at the start.
      intra_op_threads: threads of one op. None: `OMP_NUM_THREADS` where it is set; else, for
        two or more CPU towers, the cores divided among them (at least 1), since towers already
        run side by side; else TF's own choice (0).
      inter_op_threads: ops that may run at once. None: TF's own choice (0).
      soft_placement: may TF move an op to a device that has a kernel for it? None: with GPUs
        only, where integer and string ops have no kernel. With CPUs alone a misplaced op is
        then an error instead of a silent move.
      quick_start: optimise the graph once instead of twice, and without the memory optimizer, whose
        time grows faster than the number of towers. None: with CPUs alone, where it halves the time
        of the first run of 8 InceptionResNet-v2 towers and costs no speed and no memory; with GPUs
        that was not measured.

    Returns:
      A new `tf.ConfigProto`, yours to change.

    Raises:
      DeviceError, InvalidArgumentError: as `resolve_devices`; a thread count that is negative.
    """
    names = resolve_devices(devices, check=False, allow_repeated=True)
    for flag, value in (('intra_op_threads', intra_op_threads),
                        ('inter_op_threads', inter_op_threads)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)
                                  or value < 0):
            raise InvalidArgumentError('%s=%r: expected a number of threads, 0 for TF\'s own '
                                       'choice.' % (flag, value))
    if soft_placement is None:
        soft_placement = any(is_gpu(name) for name in names)
    cpus = [tf.DeviceSpec.from_string(name).device_index for name in names if not is_gpu(name)]
    if intra_op_threads is None:
        intra_op_threads = _default_intra_op_threads(len(set(cpus)))
    config = tf.ConfigProto(
        device_count={'CPU': max(cpus + [0]) + 1},
        allow_soft_placement=soft_placement,
        intra_op_parallelism_threads=intra_op_threads,
        inter_op_parallelism_threads=inter_op_threads or 0)
    config.gpu_options.allow_growth = allow_growth
    if quick_start is None:
        quick_start = not any(is_gpu(name) for name in names)
    if quick_start:
        rewrites = config.graph_options.rewrite_options
        rewrites.meta_optimizer_iterations = rewrites.ONE
        rewrites.memory_optimization = rewrites.NO_MEM_OPT
    return config


def _default_intra_op_threads(num_cpu_towers):
    from_environment = os.environ.get('OMP_NUM_THREADS', '').strip()
    if from_environment.isdigit() and int(from_environment) > 0:
        return int(from_environment)
    if num_cpu_towers < 2:
        return 0
    return max(1, (os.cpu_count() or 1) // num_cpu_towers)


def _first_devices(count, gpus, check):
    if count < 1:
        raise InvalidArgumentError('devices=%d: expected at least one device.' % count)
    if not gpus:
        return tuple('/device:CPU:%d' % index for index in range(count))
    if check and count > len(gpus):
        raise DeviceError('devices=%d, but %s: ask for fewer, or name the devices (CPUs too).'
                          % (count, _what_there_is(gpus)))
    return tuple('/device:GPU:%d' % index for index in range(count))


def _check_exists(name, gpus):
    spec = tf.DeviceSpec.from_string(name)
    if spec.device_type == 'CPU' or spec.job is not None:
        return
    exists = name in gpus if is_gpu(name) else spec.device_index < len(
        tf.config.experimental.list_physical_devices(spec.device_type))
    if not exists:
        raise DeviceError('%s does not exist: %s. Name another device, or pass '
                          'check_devices=False to build the graph for another machine.'
                          % (short_name(name), _what_there_is(gpus)))


def _what_there_is(gpus):
    limit = os.environ.get('CUDA_VISIBLE_DEVICES')
    because = '' if limit is None else ' (CUDA_VISIBLE_DEVICES=%s)' % limit
    if not gpus:
        return 'TensorFlow sees no GPU here' + because
    return 'TensorFlow sees %s here%s' % (', '.join(short_name(gpu) for gpu in gpus), because)
