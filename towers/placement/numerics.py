"""Half precision and XLA for a tower's operations, and whether TensorFlow applied them.

Half precision is a pass of grappler, which the session's config switches on: it casts what goes
into convolutions and matrix products, and leaves variables, sums and losses in float32. If the pass
changes nothing, at most TF's log says so; the audit of a step reports it.

XLA compiles each tower's forward and backward pass for its own device.
"""

import collections
import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_choice, check_instance
from towers.errors import PrecisionError
from towers.graph.graph_walk import is_random_type
from towers.placement.devices import is_gpu, resolve_devices

PRECISIONS = ('float32', 'bf16', 'fp16')
"""Values of `precision=`: 32-bit floats; bfloat16, on CPUs; float16, on GPUs."""

# {(precision, kind of the towers' devices): the field of `RewriterConfig` that switches the rewrite
# on}. `auto_mixed_precision_cpu` is left out: it only rounds, between products in float32, and on
# TF 2.15 and 2.21 it ends the process with a segmentation fault when a convolution with batch norm
# is run forwards.
_REWRITE_FIELDS = {('fp16', 'GPU'): 'auto_mixed_precision',
                   ('bf16', 'CPU'): 'auto_mixed_precision_onednn_bfloat16'}
_DTYPES = {'fp16': tf.float16, 'bf16': tf.bfloat16}


def use_precision(config: tf.ConfigProto, precision: str, devices: typing.Any) -> tf.ConfigProto:
    """Switches on, in a session's config, TensorFlow's rewrite of graphs to half precision.

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
    # Only the spelling is checked: `build_towers` has checked the towers' devices, which may be
    # devices of another machine. Here it only matters whether the devices are GPUs.
    resolved = resolve_devices(devices, check=False, allow_repeated=True)
    if precision != 'float32':
        rewrites = config.graph_options.rewrite_options
        setattr(rewrites, rewrite_field(precision, resolved), rewrites.ON)
    return config


def rewrite_field(precision: str, devices: typing.Sequence[str]) -> str:
    """The field of `RewriterConfig` that switches the rewrite to a precision on.

    Args:
      precision: `'bf16'` or `'fp16'`.
      devices: the towers' devices.

    Raises `PrecisionError` if this TensorFlow has no such rewrite for these devices.
    """
    num_gpus = sum(map(is_gpu, devices))
    if 0 < num_gpus < len(devices):
        raise PrecisionError(
            'precision=%r, and the towers are on GPUs and CPUs: TensorFlow rewrites for the one '
            'kind or for the other. Use float32, or devices of one kind.' % precision)
    kind = 'GPU' if num_gpus else 'CPU'
    field = _REWRITE_FIELDS.get((precision, kind))
    # An older TensorFlow lacks some of these fields.
    known_fields = tf.ConfigProto().graph_options.rewrite_options.DESCRIPTOR.fields_by_name
    if field is None or field not in known_fields:
        raise PrecisionError(
            'precision=%r: TensorFlow %s has no rewrite to it that works on %ss. Use float32; or '
            'fp16 on GPUs, bf16 on CPUs with TensorFlow 2.15 or later.' % (
                precision, tf.version.VERSION, kind))
    return field


def converted_operations(run_metadata: tf.RunMetadata, precision: str) -> collections.Counter:
    """Counts the operations that a step ran in a precision, casts to it included.

    Args:
      run_metadata: the metadata of a step with `tf.RunOptions(output_partition_graphs=True)`.
      precision: `'bf16'` or `'fp16'`.

    Returns:
      `Counter` by the type of the operation. A fused operation, such as oneDNN's `_MklMatMul` or
      grappler's `_FusedConv2D`, counts as the operation that it computes (`MatMul`, `Conv2D`).
    """
    dtype_code = _DTYPES[precision].as_datatype_enum  # its number in a node's attributes
    counts: collections.Counter = collections.Counter()
    for node in _nodes_of_step(run_metadata):
        computed = compat.computed_operation(node.op)  # None for a node that only moves tensors
        if computed is not None and _has_dtype(node, dtype_code):
            counts[computed] += 1
    return counts


def _nodes_of_step(run_metadata: tf.RunMetadata) -> typing.List[tf.NodeDef]:
    """List of the nodes that a step ran; each device has a graph of its own."""
    nodes: typing.List[tf.NodeDef] = []
    for graph in run_metadata.partition_graphs:
        nodes.extend(graph.node)
    return nodes


def _has_dtype(node: tf.NodeDef, dtype_code: int) -> bool:
    """Whether an operation computes in the type of this code, or casts to it."""
    for name in ('T', 'DstT'):  # the attributes with the type of the inputs, and of a cast's result
        # To read an attribute that is not there would add it, so `in` comes first.
        if name in node.attr and node.attr[name].type == dtype_code:
            return True
    return False


@contextlib.contextmanager
def compiled(enabled: bool) -> typing.Iterator[None]:
    """The scope in which to make a tower whose operations, and their gradients, XLA compiles.

    This is `tf.xla.experimental.jit_scope`. The session-wide `global_jit_level` needs TF_XLA_FLAGS
    on CPUs, and on TF 2.15 and later puts operations of several virtual CPUs into one cluster; such
    a cluster fails ("Multiple CPU devices").

    Left out are random operations, for which XLA draws other numbers; initial values, which are
    computed once; and reads and writes of variables, which stay on the variables' devices.

    Args:
      enabled: whether XLA compiles; False makes a scope without effect.
    """
    if not enabled:
        yield
        return
    with tf.xla.experimental.jit_scope(_is_to_be_compiled):
        yield


def describe_xla(devices: typing.Sequence[str]) -> str:
    """The plan's line about XLA for towers on these devices."""
    text = "each tower's forward and backward pass, but for random operations"
    if not all(map(is_gpu, devices)):
        # In benchmarks/precision_and_xla.py a step with XLA took 1.4 to 6 times as long, with
        # oneDNN's kernels beside XLA.
        text += '; on CPUs that was slower in every model measured'
    return text


def xla_clusters(run_metadata: tf.RunMetadata) -> collections.Counter:
    """Counts the clusters of operations that XLA has compiled in a step.

    Args:
      run_metadata: the metadata of a step with `tf.RunOptions(output_partition_graphs=True)`.

    Returns:
      `Counter` by device, such as `'/device:CPU:1'`.
    """
    clusters: collections.Counter = collections.Counter()
    for node in _nodes_of_step(run_metadata):
        if node.op == '_XlaRun':  # one such operation runs one cluster
            # Without '/job:localhost/replica:0/task:0', which the runtime puts before it.
            _, _, type_and_number = node.device.partition('/device:')
            clusters['/device:' + type_and_number] += 1
    return clusters


# The beginnings of the types of operations that XLA does not compile: stateless random operations,
# which take a seed as an input, and operations that use a variable.
_NOT_COMPILED = ('Stateless', 'Var', 'ReadVariable', 'Assign', 'Resource')


def _is_to_be_compiled(node: tf.NodeDef) -> bool:
    """Whether XLA is to compile an operation: no random operation, no operation that uses a
    variable, and no initial value. The docstring of `compiled` has the reasons."""
    if is_random_type(node.op) or node.op.startswith(_NOT_COMPILED):
        return False
    # The scopes in which `tf.get_variable` and `tf.Variable` make initial values.
    is_initial_value = '/Initializer/' in node.name or '/initial_value' in node.name
    return not is_initial_value
