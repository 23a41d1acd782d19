"""Convolutions of a shard without examples, in evaluation.

A batch of fewer examples than towers leaves towers without one. On CPUs TensorFlow 2 computes
convolutions by oneDNN, whose result for an empty batch has the shape of its input,
`[0, height, width, channels]` of the images and not of the feature maps, so that the next layer
fails: "input depth must be evenly divisible by filter depth: 3 vs 32". (`MklConvOp::Compute` in
mkl_conv_ops.cc; seen on 2.15 and 2.21. 1.15 and GPUs do not have this.)

So an empty batch gets one example of zeros before a convolution, and the result loses it again.
What stands between, `[n, ...]` to `[n, ...]` example by example, is a region: it gets the zeros
once and loses them once, and grappler still joins the convolutions, biases, batch norms and
activations in it.

    images --pad--> Conv2D --> BiasAdd --> Relu --> Conv2D --cut--> Reshape

Convolutions in loops and branches are left as they are.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.placement.tower_device import device_like

_CONVOLUTIONS = frozenset(['Conv2D', 'Conv3D', 'DepthwiseConv2dNative'])
_ONE_INPUT = frozenset([
    'BiasAdd', 'Elu', 'FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3', 'Identity',
    'LeakyRelu', 'MaxPool', 'MaxPool3D', 'AvgPool', 'AvgPool3D', 'Relu', 'Relu6', 'Selu'])
_SUMS = frozenset(['Add', 'AddV2', 'AddN'])
_PADS = frozenset(['Pad', 'PadV2', 'MirrorPad'])


def keep_shapes_of_empty_shards(towers, size):
    """Makes the convolutions of towers that may be without an example keep their shapes.

    Call this when the towers' results have been merged: what reads a region is made to read it
    without the zeros.

    Args:
      towers: list of `Tower`s, built for evaluation.
      size: examples in the batch: an int, or an int32 scalar.

    Returns:
      List of the towers, whose predictions have no zeros either.
    """
    if isinstance(size, int) and size >= len(towers):
        return towers
    operations = tf.get_default_graph().get_operations()
    return towers[:1] + [_without_zeros(tower, operations) for tower in towers[1:]]


def _without_zeros(tower, operations):
    sources = [leaf.op for leaf in tf.nest.flatten(tower.inputs, expand_composites=True)
               if leaf is not None]
    reached = graph_walk.reachable_from(sources, operations)
    with tf.name_scope('%sempty_shard/' % tower.name_scope):
        found = _find_regions([op for op in operations if op.name in reached])
        cut = {name: _cut(result, images) for name, (result, images) in found.left.items()}
    for op, position in found.readers:
        compat.replace_input(op, position, cut[op.inputs[position].name])
    return tower._replace(predictions=tf.nest.map_structure(
        lambda leaf: cut.get(getattr(leaf, 'name', None), leaf), tower.predictions,
        expand_composites=True))


_Regions = collections.namedtuple('_Regions', 'left readers')
"""The regions of a tower.

Fields:
  left: dict from the names of the tensors in regions that may be read from outside to pairs of the
    tensor and the tensor before its region, `images` above.
  readers: list of `(operation, position)`: the inputs outside of regions that such tensors are.
"""


def _find_regions(operations):
    """Puts the zeros into one tower: `_Regions` of its operations, in the order of their making."""
    images, padded = {}, {}  # tensors before regions, by name; the same with an example at least
    results, before = {}, {}  # tensors in regions, by name; the names of those before them
    handed_on = set()  # (name of an operation, position): inputs that keep the zeros
    for op in operations:
        result = op.outputs[0] if op.outputs else None
        if result is None or result.shape.ndims is None or compat.in_control_flow(op):
            continue
        positions = _batches(op)
        sources = {before.get(op.inputs[position].name) for position in positions}
        if op.type in _CONVOLUTIONS and sources == {None}:
            source = op.inputs[0]
            if source.shape.ndims is None:
                continue
            if source.name not in images:
                images[source.name] = source
                padded[source.name] = _with_an_example(source, op)
            compat.replace_input(op, 0, padded[source.name])
            sources = {source.name}
        if len(sources) == 1 and sources != {None}:
            results[result.name], before[result.name] = result, sources.pop()
            handed_on.update((op.name, position) for position in positions)
    left, readers = {}, []
    for name, result in results.items():
        takers = {op.name: op for op in result.consumers()}.values()
        outside = [(op, position) for op in takers for position, tensor in enumerate(op.inputs)
                   if tensor.name == name and (op.name, position) not in handed_on]
        readers += outside
        if outside:
            left[name] = result, images[before[name]]
    return _Regions(left, readers)


def _batches(op):
    """The positions of the inputs `[n, ...]` of an operation whose result is `[n, ...]`.

    Returns:
      List of ints; empty for an operation that is not known to take example by example.
    """
    if op.type in _CONVOLUTIONS or op.type in _ONE_INPUT:
        return [] if op.type.startswith('FusedBatchNorm') and op.get_attr('is_training') else [0]
    if op.type in _SUMS:
        return list(range(len(op.inputs)))
    if op.type == 'ConcatV2':
        axis, ndims = tf.get_static_value(op.inputs[-1]), op.outputs[0].shape.ndims
        return [] if axis is None or not axis % ndims else list(range(len(op.inputs) - 1))
    if op.type in _PADS:
        paddings = tf.get_static_value(op.inputs[1])
        return [] if paddings is None or paddings[0].any() else [0]
    return []


def _with_an_example(batch, op):
    """The batch `[n, ...]`, not copied; or one example of zeros where n is 0. On `op`'s device."""
    with tf.device(None), tf.device(device_like(op)):
        missing = tf.cast(tf.equal(tf.shape(batch)[:1], 0), tf.int32)
        paddings = tf.pad(missing[tf.newaxis], [[0, batch.shape.ndims - 1], [1, 0]])
        padded, shape = tf.pad(batch, paddings), [None] + batch.shape.as_list()[1:]
        if batch.shape.as_list()[0] == 0:
            # The graph now says 1, and the convolution, made for 0, could not be connected with it.
            return tf.placeholder_with_default(padded, shape)
        return tf.ensure_shape(padded, shape)


def _cut(result, images):
    """A tensor of a region with as many examples as the tensor before the region."""
    with tf.device(None), tf.device(device_like(result.op)):
        cut = result[:tf.shape(images)[0]]
        cut.set_shape(images.shape[:1].concatenate(result.shape[1:]))
        return cut
