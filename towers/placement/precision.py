"""Half precision by TensorFlow's own graph rewrite: which devices have it, and whether it acts.

The rewrite is a pass of grappler, which the session's config switches on: it casts what goes into
convolutions and matrix products, and leaves variables, sums and losses in float32. Where it changes
nothing, only TF's log says so, if anything; so it is tried out here before it is promised.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_choice, check_instance
from towers.errors import PrecisionError
from towers.placement.devices import is_gpu, resolve_devices, session_config, short_name

PRECISIONS = ('float32', 'bf16', 'fp16')
"""What `precision=` takes: 32-bit floats; bfloat16, on CPUs; float16, on GPUs."""

# (precision, on GPUs?) -> fields of `RewriterConfig` that do it, today's name first.
_FIELDS = {
    ('fp16', True): ('auto_mixed_precision',),
    # `auto_mixed_precision_cpu` is left out: it only rounds, between products in float32, and on TF
    # 2.15 and 2.21 it ends the process with a segmentation fault when a convolution with batch
    # norm is run forwards.
    ('fp16', False): (),
    ('bf16', False): ('auto_mixed_precision_onednn_bfloat16', 'auto_mixed_precision_mkl'),
    ('bf16', True): (),
}
_DTYPES = {'fp16': tf.float16, 'bf16': tf.bfloat16}
# Flags of /proc/cpuinfo for instructions that multiply in bfloat16, on x86 and on ARM.
_BF16_INSTRUCTIONS = ('avx512_bf16', 'amx_bf16', 'bf16')


def use_precision(config: tf.ConfigProto, precision: str, devices: typing.Any) -> tf.ConfigProto:
    """Switches the rewrite on in a session's config.

    Args:
      config: `tf.ConfigProto`, changed in place.
      precision: `'float32'` (no rewrite), `'bf16'` or `'fp16'`.
      devices: the towers' devices, as in `BuiltTowers.devices`.

    Returns:
      The config.

    Raises:
      InvalidArgumentError: another precision.
      PrecisionError: this TensorFlow has no such rewrite for these devices.
    """
    check_instance('config', config, tf.ConfigProto, 'a tf.ConfigProto')
    check_precision(precision)
    devices = resolve_devices(devices, check=False, allow_repeated=True)
    if precision != 'float32':
        setattr(config.graph_options.rewrite_options, rewrite_field(precision, devices),
                config.graph_options.rewrite_options.ON)
    return config


def check_precision(precision):
    """Raises `InvalidArgumentError` unless `precision` is one of `PRECISIONS`."""
    check_choice('precision', precision, PRECISIONS)


def rewrite_field(precision, devices):
    """The field of `RewriterConfig` that rewrites for these devices; see `use_precision`."""
    gpus = {is_gpu(device) for device in devices}
    if len(gpus) > 1:
        raise PrecisionError(
            'precision=%r, and the towers are on GPUs and CPUs: TensorFlow rewrites for the one '
            'kind or for the other. Use float32, or devices of one kind.' % precision)
    on_gpus = gpus.pop()
    known = [descriptor.name for descriptor in
             tf.ConfigProto().graph_options.rewrite_options.DESCRIPTOR.fields]
    for field in _FIELDS[precision, on_gpus]:
        if field in known:
            return field
    raise PrecisionError(
        'precision=%r: TensorFlow %s has no rewrite to it that works on %s. Use float32; or fp16 '
        'on GPUs, bf16 on CPUs with TensorFlow 2.15 or later.' % (
            precision, tf.version.VERSION, 'GPUs' if on_gpus else 'CPUs'))


def try_precision(precision, devices):
    """Finds out whether the rewrite changes a matrix product on the first of these devices.

    Args:
      precision: `'bf16'` or `'fp16'`.
      devices: the towers' devices; they have to exist.

    Returns:
      One line: the rewrite's name, and known faults of it here.

    Raises:
      PrecisionError: there is no such rewrite, or it changes nothing here.
    """
    field = rewrite_field(precision, devices)
    found = _converted_in_a_product(precision, devices)
    on_gpu = is_gpu(devices[0])
    if not found:
        raise PrecisionError(
            'precision=%r: the rewrite %s of TensorFlow %s changes nothing on %s%s. Or use '
            'float32.' % (precision, field, tf.version.VERSION, short_name(devices[0]), (
                ', which needs a GPU of compute capability 7.0 or higher' if on_gpu else
                ', where oneDNN is off: set TF_ENABLE_ONEDNN_OPTS=1 before the program starts')))
    text = "TensorFlow's rewrite " + field
    if not on_gpu and not _cpu_has(_BF16_INSTRUCTIONS):
        text += '; this CPU has no instructions for it, so expect it to be slower than float32'
    return text


def converted_operations(run_metadata, precision):
    """Counts by type of the operations that a step ran in that precision, casts to it included.

    An operation that the runtime exchanged for one of its own (oneDNN's `_MklMatMul`, grappler's
    `_FusedConv2D`) counts as what it computes: `MatMul`, `Conv2D`. So the counts do not depend on
    the instructions that the CPU has.

    Args:
      run_metadata: of a step that was run with `tf.RunOptions(output_partition_graphs=True)`.
      precision: `'bf16'` or `'fp16'`.
    """
    code = _DTYPES[precision].as_datatype_enum
    kinds = (compat.computed_operation(node.op) for graph in run_metadata.partition_graphs
             for node in graph.node if code in _types(node))
    return collections.Counter(kind for kind in kinds if kind is not None)


def _types(node):
    # Asked for by `in` first: reading an attribute that is missing adds it to the message.
    return [node.attr[name].type for name in ('T', 'DstT') if name in node.attr]


def _converted_in_a_product(precision, devices):
    # As the program's own session: TF keeps the thread pool of a process's first one for all.
    config = session_config(devices)
    config.allow_soft_placement = True
    use_precision(config, precision, devices)
    metadata = tf.RunMetadata()
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        with tf.device(devices[0] if is_gpu(devices[0]) else '/cpu:0'):
            sides = [tf.placeholder(tf.float32, [64, 64]) for _ in range(2)]
            product = tf.matmul(tf.nn.relu(tf.matmul(*sides)), sides[0])
        session.run(product, {side: [[0.] * 64] * 64 for side in sides},
                    tf.RunOptions(output_partition_graphs=True), metadata)
    return converted_operations(metadata, precision)


def _cpu_has(flags):
    try:
        with open('/proc/cpuinfo') as cpuinfo:
            words = set(cpuinfo.read().split())
    except OSError:
        return True  # no Linux: nothing is known against it
    return not words.isdisjoint(flags)
