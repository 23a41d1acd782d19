"""The config of a session: CPU devices, threads, GPU memory and graph optimization for towers."""

import os
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import MOST_INT32, check_count, check_flag, check_number
from towers.graph.graph_walk import devices_of
from towers.placement.devices import cpu_indices, has_gpus, resolve_devices, session_cpus
from towers.placement.tower_device import all_devices, type_and_index

_FIRST_CPU = '/device:CPU:0'  # which every session has
_CHOICE_OF_TENSORFLOW = "TensorFlow's choice of"  # in the plan, for a number of threads of 0


def session_config(devices: typing.Union[None, int, str, typing.Sequence] = None,
                   allow_growth: bool = True, intra_op_threads: typing.Optional[int] = None,
                   inter_op_threads: typing.Optional[int] = None,
                   memory_fraction: typing.Optional[float] = None) -> tf.ConfigProto:
    """The `ConfigProto` for sessions of a graph with towers on these devices.

    With GPUs TF may move an op that has no kernel for its device (integers, strings). With only
    CPUs a misplaced op is an error. With only CPUs, the graph is also optimised once instead of
    twice, and without the optimizers of memory and layout, whose time grows with the towers: this
    halves the time of the first run of 8 InceptionResNet-v2 towers and costs no speed and no
    memory.

    Args:
      devices: the argument of `build_towers`; or the `devices` of the towers that it returned.
      allow_growth: let GPU memory grow with use instead of taking all of it at the start.
      intra_op_threads: threads of one op. None: `OMP_NUM_THREADS` where it is set; else 1 for at
        least as many CPU towers as cores, which run side by side; else TF's own choice (0). All
        sessions of a process share the threads that are made first. On TF 2 a `tf.data` input with
        functions makes them, or a sharded saver, as of a `MonitoredTrainingSession`: then set
        `tf.config.threading` at the beginning of the program. The plan says if they are made.
      inter_op_threads: ops that may run at once. None: TF's own choice (0).
      memory_fraction: the most of each GPU's memory that the process takes, above 0 and up to 1
        (`per_process_gpu_memory_fraction`). None: all of it.

    Returns:
      A new `tf.ConfigProto`, yours to change.

    Raises:
      DeviceError: see `resolve_devices`.
      InvalidArgumentError: see `resolve_devices`; also for a negative thread count, and for a
        `memory_fraction` that is no fraction.
    """
    check_flag('allow_growth', allow_growth)
    _check_threads('intra_op_threads', intra_op_threads)
    _check_threads('inter_op_threads', inter_op_threads)
    if memory_fraction is not None:
        check_number('memory_fraction', memory_fraction, above=0, most=1,
                     expected="a part of a GPU's memory, above 0 and up to 1, or None")
    # Only the spelling is checked: a config may be made for another machine, and towers that share
    # a device need no other config. `build_towers` checks the devices of its towers.
    names = all_devices(resolve_devices(devices, check=False, allow_repeated=True))
    if intra_op_threads is None:
        intra_op_threads = _default_intra_op_threads(num_cpu_devices=len(cpu_indices(names)))
    # A field that is given None keeps its default.
    config = tf.ConfigProto(
        device_count={'CPU': session_cpus(names)},
        allow_soft_placement=has_gpus(names),
        intra_op_parallelism_threads=intra_op_threads,
        inter_op_parallelism_threads=inter_op_threads,
        gpu_options=tf.GPUOptions(allow_growth=bool(allow_growth),
                                  per_process_gpu_memory_fraction=memory_fraction))
    if not has_gpus(names):
        _shorten_graph_optimization(config)
    return config


def _check_threads(name: str, threads: typing.Optional[int]) -> None:
    """Raises `InvalidArgumentError` unless an argument is None or a number of threads.

    Args:
      name: the name of the argument, for the message.
      threads: its value.
    """
    if threads is not None:
        check_count(name, threads, least=0, most=MOST_INT32)


def _default_intra_op_threads(num_cpu_devices: int) -> int:
    """The number of threads of one operation, where the caller gives none.

    That is `OMP_NUM_THREADS`, if it is set. Else it is 1 if there are at least as many CPU devices
    as cores: the devices compute side by side, so that all cores have work. Else the number is 0:
    TensorFlow's choice. All devices of a process share these threads: with fewer than there are
    cores, and few devices, some cores would have no work.
    """
    from_environment = os.environ.get('OMP_NUM_THREADS', '').strip()
    if from_environment.isdigit() and int(from_environment) > 0:
        return int(from_environment)
    num_cores = os.cpu_count() or 1  # None where Python cannot tell
    is_a_core_for_each = num_cpu_devices > 1 and num_cpu_devices >= num_cores
    return 1 if is_a_core_for_each else 0


def _shorten_graph_optimization(config: tf.ConfigProto) -> None:
    """Switches off, in a config for CPUs alone, the passes of graph optimization that take long at
    the first run of many towers, and make no step faster or smaller there."""
    rewrites = config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = rewrites.ONE  # else TensorFlow does all passes twice
    rewrites.memory_optimization = rewrites.NO_MEM_OPT  # its time grows with the towers
    rewrites.layout_optimizer = rewrites.OFF  # it only changes operations on GPUs
    compat.switch_off_graph_dialect(rewrites)  # a translation to MLIR and back


def config_of_towers(graph: typing.Optional[tf.Graph] = None) -> typing.Optional[tf.ConfigProto]:
    """The `session_config` for the devices that the operations of a graph ask for, for a session
    whose caller gives no config.

    Args:
      graph: the graph; None for the default graph.

    Returns:
      The config; None where the operations ask for `/cpu:0` only, or for no device.
    """
    if graph is None:
        graph = tf.get_default_graph()
    names = _devices_asked_for(graph.get_operations())
    if names <= {_FIRST_CPU}:
        return None
    return session_config(sorted(names))


def _devices_asked_for(operations: typing.Iterable[tf.Operation]) -> typing.Set[str]:
    """The canonical names, without jobs, of the devices that operations ask for."""
    names = set()
    for device in devices_of(operations):
        type_and_number = type_and_index(device)
        if None not in type_and_number:  # as for '', or a job alone
            names.add('/device:%s:%s' % type_and_number)
    return names


def needs_config(devices: typing.Sequence[str]) -> bool:
    """Whether a session has these devices of towers only with `session_config`: a CPU other than
    `/cpu:0` is among them. A device of a cluster, whose name begins with a job, does not count."""
    cpus = {name for name in all_devices(devices) if name.startswith('/device:CPU:')}
    return not cpus <= {_FIRST_CPU}


def describe_config(config: tf.ConfigProto, devices: typing.Sequence[str]) -> str:
    """The plan's text about a session's config: its threads, and on GPUs its memory.

    Args:
      config: the config.
      devices: the devices of the towers.
    """
    asked = config.intra_op_parallelism_threads
    has_no_effect = asked and compat.threads_made() not in (None, asked)
    line = '%s intra-op%s and %s inter-op threads' % (
        asked or _CHOICE_OF_TENSORFLOW,
        ' (of no effect: this process has made its threads, see tf.config.threading)'
        if has_no_effect else '',
        config.inter_op_parallelism_threads or _CHOICE_OF_TENSORFLOW)
    if not has_gpus(devices):
        return line
    gpu_options = config.gpu_options
    growth = 'as it is needed' if gpu_options.allow_growth else 'all at once'
    line += '; GPU memory ' + growth
    if gpu_options.per_process_gpu_memory_fraction:
        line += ', %g of it at the most' % gpu_options.per_process_gpu_memory_fraction
    return line
