"""The sizes of a step's tensors at another batch size than the towers were built with.

Built with a batch of unknown size: the graph is imported into another one, with the size written
into the operations that the shards come from, and TensorFlow infers the shapes anew. Built with a
batch of static size: constants in many places of the graph were made from that size, so the sizes
of the tensors that hold the batch are scaled instead. These tensors are found by following the
graph from the shards on, operation by operation.
"""

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.nests import leaves_of
from towers.graph.op_types import PLACEHOLDERS
from towers.tower.shards import sizes_of_shards

# Operations whose output has no batch dimension, whatever their inputs are.
_CONTRACT = frozenset([
    'BiasAddGrad', 'Conv2DBackpropFilter', 'Conv3DBackpropFilterV2', 'L2Loss', 'Shape', 'ShapeN',
    'DepthwiseConv2dNativeBackpropFilter', 'Size', 'Rank', 'UnsortedSegmentSum', 'ScatterNd',
    'BroadcastGradientArgs', 'InvertPermutation'])
# Operations of which only the first output has a batch dimension.
_FIRST_OUTPUT = ('FusedBatchNorm', 'FusedBatchNormGrad')
_REDUCTIONS = frozenset(['All', 'Any', 'ArgMax', 'ArgMin', 'Max', 'Mean', 'Min', 'Prod', 'Sum'])
# Operations that make a tensor of a given shape.
_SHAPED = frozenset(['BroadcastTo', 'Const', 'Fill', 'Tile', 'OnesLike', 'ZerosLike'])
_WHOLE = -1  # stands for the batch of all towers; other numbers for the shard of that tower


def shards_of(built):
    """The number of examples that each tower was built with: list of ints, None if not static."""
    return [tower.size if isinstance(tower.size, int) else None for tower in built.towers]


def shard_sizes(built, batch_size):
    """The number of examples of each tower for a batch of `batch_size`: list of ints.

    Raises:
      InvalidArgumentError: the batch does not divide among the towers.
    """
    count = len(built.towers)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidArgumentError('batch_size=%r: expected a number of examples, 1 at least.'
                                   % (batch_size,))
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


class ScaledSizes:
    """Numbers of elements at another batch size; called with a tensor.

    >>> StepGraph(fetches, size_of=ScaledSizes(built, fetches, 256))
    """

    def __init__(self, built, fetches, batch_size):
        """
        Args:
          built: `BuiltTowers`, whose batch has a static size.
          fetches: operations.
          batch_size: examples.
        """
        self._old = shards_of(built)
        self._new = shard_sizes(built, batch_size)
        self._old_batch, self._new_batch = built.plan.batch_size, batch_size
        self._towers = built.towers
        self._batch = {}  # name of a tensor: the tower whose number of examples is in its shape
        operations = graph_walk.step_operations(fetches)
        order = {op.name: number for number, op in enumerate(operations[0].graph.get_operations())}
        operations.sort(key=lambda op: order[op.name])
        shards = {op.name: number for number, ops in enumerate(shard_operations(built))
                  for op in ops}
        sources = graph_walk.ancestors([tensor for ops in shard_operations(built) for op in ops
                                        for tensor in op.outputs])
        for op in operations:
            if op.name in shards:
                self._mark(op, shards[op.name])
            elif op.name in sources:
                self._mark_source(op)
            else:
                self._follow(op)

    def __call__(self, tensor):
        elements = tensor.shape.num_elements()
        tower = self._batch.get(tensor.name)
        if elements is None or tower is None:
            return elements
        return elements // self._examples(tower) * (
            self._new_batch if tower == _WHOLE else self._new[tower])

    def _examples(self, tower):
        return self._old_batch if tower == _WHOLE else self._old[tower]

    def _mark(self, op, tower, outputs=None):
        for tensor in op.outputs[:outputs]:
            elements = tensor.shape.num_elements()
            if elements and elements % self._examples(tower) == 0:
                self._batch[tensor.name] = tower

    def _mark_source(self, op):
        """Marks an operation before the shards: it has the whole batch, or a tower's part of it."""
        for tensor in op.outputs:
            first = tensor.shape.as_list()[0] if tensor.shape.ndims else None
            if first == self._old_batch:
                self._batch[tensor.name] = _WHOLE
            elif first in self._old and any(other.name in self._batch for other in op.inputs):
                self._batch[tensor.name] = self._old.index(first)

    def _follow(self, op):
        towers = {self._batch[tensor.name] for tensor in op.inputs if tensor.name in self._batch}
        if op.type in _CONTRACT:
            return
        if not towers:
            self._made_here(op)
            return
        tower = towers.pop() if len(towers) == 1 else _WHOLE
        if op.type == 'MatMul':
            one, other = [tensor.name in self._batch for tensor in op.inputs[:2]]
            if not (one and not op.get_attr('transpose_a') or other and op.get_attr('transpose_b')):
                return
        if op.type in _REDUCTIONS and self._reduces_first(op):
            return
        self._mark(op, tower, 1 if op.type.startswith(_FIRST_OUTPUT) else None)

    @staticmethod
    def _reduces_first(op):
        axes = tf.get_static_value(op.inputs[1])
        rank = op.inputs[0].shape.ndims
        return axes is None or rank is None or any(
            int(axis) % max(rank, 1) == 0 for axis in axes.reshape([-1]))

    def _made_here(self, op):
        """Notes an operation without the batch among its inputs whose static shape has it."""
        if not (op.type in _SHAPED or graph_walk.is_random(op) or op.type.startswith('Stateless')):
            return
        for number, tower in enumerate(self._towers):
            if tower.has(op.name):
                for tensor in op.outputs:
                    shape = tensor.shape.as_list() if tensor.shape.ndims else [None]
                    if shape[0] == self._old[number] and (
                            op.type != 'Const' or len(shape) > 1 and _is_one_value(op)):
                        self._batch[tensor.name] = number


def _is_one_value(op):
    """Whether a constant is one number, repeated."""
    value = op.get_attr('value')
    return len(value.tensor_content) <= 16 and value.ByteSize() < 64
