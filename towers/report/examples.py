"""The number of examples of a traced step."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.gradients.tower import Tower

Output = typing.Tuple[str, int]
"""The name of an operation, and the index of one of its outputs."""


def examples_of_step(built: BuiltTowers, metadata: tf.RunMetadata) -> typing.Optional[int]:
    """The number of examples of a traced step.

    It is the static size of the batch. Where that is not known, it is the sum of the first
    dimensions of the shards, as the step has made them.

    Args:
      built: the result of `build_towers`.
      metadata: the metadata of a step that was run with `trace_level=tf.RunOptions.FULL_TRACE`.

    Returns:
      The number; None where neither the graph nor the trace tells it.
    """
    if built.plan.batch_size is not None:
        return built.plan.batch_size
    dimensions = _first_dimensions(metadata)
    num_examples = 0
    for tower in built.towers:
        size = _size_of_shard(tower, dimensions)
        if size is None:
            return None
        # With remainder='weight' a shard without an example holds one, as padding.
        may_be_padding = built.plan.remainder == 'weight' and size == 1
        if may_be_padding:
            return None
        num_examples += size
    return num_examples


def _first_dimensions(metadata: tf.RunMetadata) -> typing.Dict[Output, int]:
    """The first dimension of each output of the trace that is no scalar."""
    dimensions = {}
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            for output in node.output:
                shape = output.tensor_description.shape
                if shape.dim:
                    dimensions[node.node_name, output.slot] = shape.dim[0].size
    return dimensions


def _size_of_shard(tower: Tower, dimensions: typing.Dict[Output, int]) -> typing.Optional[int]:
    """The number of rows of a tower's shard; None where the trace has no dense tensor of it."""
    for leaf in tf.nest.flatten(tower.inputs):
        if isinstance(leaf, tf.Tensor) and (leaf.op.name, leaf.value_index) in dimensions:
            return dimensions[leaf.op.name, leaf.value_index]
    return None
