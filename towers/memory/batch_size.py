"""A step's graph at a batch size, where the towers were built with a batch of unknown size.

The graph is imported into another one, with the size written into the operations that the shards
come from, and TensorFlow infers the shapes anew.
"""

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.nests import leaves_of
from towers.graph.op_types import PLACEHOLDERS
from towers.tower.shards import sizes_of_shards


def shard_sizes(built, batch_size):
    """The number of examples of each tower for a batch of `batch_size`: list of ints.

    Raises:
      InvalidArgumentError: the batch does not divide among the towers.
    """
    count = len(built.towers)
    parts = '%d %s' % (count, 'towers' if count == len(built.devices) else 'micro-batches')
    unit = sum(built.plan.shares)
    if batch_size % unit and built.plan.remainder == 'error':
        raise InvalidArgumentError('batch_size=%d does not divide among %s: give a multiple of %d.'
                                   % (batch_size, parts, unit))
    sizes = sizes_of_shards(batch_size, built.plan.shares, built.plan.remainder)
    if not all(sizes):
        raise InvalidArgumentError('batch_size=%d leaves some of %s without an example: give %d '
                                   'at least.' % (batch_size, parts, unit))
    return sizes


def shard_operations(built):
    """The operations that towers take their shards from: a list of operations for each tower."""
    return [[tensor.op for tensor in leaves_of(tower.inputs)] for tower in built.towers]


def rebuilt(built, fetches, batch_size):
    """The same fetches in a copy of the graph in which the batch has the size `batch_size`.

    Args:
      built: `BuiltTowers`, whose batch has no static size.
      fetches: operations.
      batch_size: an int.

    Returns:
      `(fetches, given)`: operations of the copy, which they keep alive; and a dict from names of
      tensors to their numbers of elements, for the parts that the batch is cut into: shape
      inference cannot know these.
    """
    sizes, ranks = dict(), _shapes_of_sparse(built)
    for ops, count in zip(shard_operations(built), shard_sizes(built, batch_size)):
        sizes.update((op.name, count) for op in ops if op.name not in ranks)
    graph_def = fetches[0].graph.as_graph_def()
    before = graph_walk.ancestors([tensor for ops in shard_operations(built) for op in ops
                                   for tensor in op.outputs])
    for node in graph_def.node:
        if node.name in sizes and node.op == 'PlaceholderWithDefault':
            _set_first(node.attr['shape'].shape, sizes[node.name])
        elif node.name in before and node.name not in sizes and node.name not in ranks:
            if node.op in PLACEHOLDERS:
                _set_first(node.attr['shape'].shape, batch_size)
            elif 'output_shapes' in node.attr and not node.op.endswith(('Dataset', 'DatasetV2')):
                for shape in node.attr['output_shapes'].list.shape:
                    _set_first(shape, batch_size)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name='')
        given = {}
        for name in sizes:
            op = graph.get_operation_by_name(name)
            if op.type == 'PlaceholderWithDefault':
                given[op.inputs[0].name] = op.outputs[0].shape.num_elements()
        return [graph.get_operation_by_name(fetch.name) for fetch in fetches], given


def _shapes_of_sparse(built):
    """Names of the operations that the shapes of sparse inputs come from, shards' and the batch's.

    Where such a shape is of unknown length, that length is a rank, and no number of examples.
    """
    names = set()
    for tower in built.towers:
        for leaf in tf.nest.flatten(tower.inputs):
            tensor = leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else None
            while tensor is not None:
                op = tensor.op
                names.add(op.name)
                position = _SHAPE_POSITION.get(op.type)
                tensor = op.inputs[position] if position is not None else None
    return names


# Operations that hand on the shape of a sparse tensor, and which of their inputs it is.
_SHAPE_POSITION = {'Identity': 0, 'PlaceholderWithDefault': 0, 'SparseSlice': 2}


def _set_first(shape, size):
    if not shape.unknown_rank and shape.dim and shape.dim[0].size == -1:
        shape.dim[0].size = size
