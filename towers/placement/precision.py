"""Half precision by TensorFlow's own graph rewrite: which devices have it, and whether it acted.

The rewrite is a pass of grappler, which the session's config switches on: it casts what goes into
convolutions and matrix products, and leaves variables, sums and losses in float32. Where it changes
nothing, only TF's log says so, if anything; the audit of a step does, see `converted_operations`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_choice, check_instance
from towers.errors import PrecisionError
from towers.placement.devices import is_gpu, resolve_devices

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
    check_choice('precision', precision, PRECISIONS)
    devices = resolve_devices(devices, check=False, allow_repeated=True)
    if precision != 'float32':
        setattr(config.graph_options.rewrite_options, rewrite_field(precision, devices),
                config.graph_options.rewrite_options.ON)
    return config


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
