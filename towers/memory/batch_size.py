"""A step's graph at any batch size.

Where the towers were built with a batch of unknown size, the graph is imported into another one,
with the size written into the operations that the shards come from, and TensorFlow infers the
shapes anew. Where they were built with another size, what is computed from the batch is scaled.
"""

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.op_types import PLACEHOLDERS
from towers.memory import kernels
from towers.memory.step_graph import StepGraph
from towers.tower.objectives import all_pairs
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
    """The operations that towers take their shards from: a list."""
    return [tensor.op for tower in built.towers for tensor in leaves_of(tower.inputs)]


def step_of(built, batch_size):
    """The `StepGraph` of a step at a batch size; None for the static one.

    Raises:
      InvalidArgumentError: there is no static one.
    """
    static = built.plan.batch_size
    fetches = [built.train_op] if built.train_op is not None else [
        tensor.op for tensor in tf.nest.flatten([built.loss, built.predictions])
        if isinstance(tensor, tf.Tensor)]
    if static is None:
        if batch_size is None:
            raise InvalidArgumentError(
                'batch_size=None, and the batch that the towers were built with has no static '
                'size: give a number of examples.')
        fetches, given = _rebuilt(built, fetches, batch_size)
        return StepGraph(fetches, size_of=lambda tensor: (
            given[tensor.name] if tensor.name in given else tensor.shape.num_elements()))
    step = StepGraph(fetches)
    if batch_size is None or batch_size == static:
        return step
    fixed, shards = gradients_in(step, built, forward_pass(built)), shard_operations(built)
    of_examples = graph_walk.reachable_from(shards, [node.op for node in step.nodes]).union(
        op.name for op in graph_walk.step_operations(shards))
    sizes = [tower.size for tower in built.towers]
    of_examples.update(  # zeros and the like, as long as a shard
        node.name for node in step.nodes if node.folded and node.type != 'Const'
        and node.shapes and node.shapes[0] and node.shapes[0][0] in sizes)

    def size_of(tensor):
        count = tensor.shape.num_elements()
        if not count or (tensor.op.name, tensor.value_index) in fixed:
            return count
        return count * batch_size // static if tensor.op.name in of_examples else count
    return StepGraph(fetches, size_of=size_of)


def forward_pass(built):
    """Names of the operations of all towers' forward passes."""
    return graph_walk.ancestors([
        tensor for tower in built.towers for tensor in tf.nest.flatten(
            [tower.data_loss, tower.loss, tower.predictions]) if isinstance(tensor, tf.Tensor)])


def gradients_in(step, built, forward):
    """The gradients of parameters in a step, their parts and their sums: set of `(name, output)`.

    Args:
      step: `StepGraph`.
      built: `BuiltTowers`.
      forward: names of the operations of the forward passes.
    """
    gradients = [getattr(gradient, 'values', gradient) for pairs in [
        tower.pairs for tower in built.towers] + [all_pairs(built.gradients)]
                 for gradient, _ in pairs]
    ends = [(step.by_name[gradient.op.name], gradient.value_index) for gradient in gradients
            if gradient is not None and gradient.op.name in step.by_name]
    found, stack = set(), list(ends)
    while stack:  # backwards, as far as it is the same memory
        node, output = stack.pop()
        if (node.name, output) in found or node.name in forward:
            continue
        found.add((node.name, output))
        if kernels.passes_on(node) or node.type in kernels.REUSES:
            stack.extend((other, index) for other, index in node.inputs
                         if other.sizes[index] == node.sizes[output])
    # Forwards: the combination, and what is done with gradients.
    taken = {(node.number, output) for node, output in ends}
    takers = [node.op for node in step.nodes
              if any((other.number, output) in taken for other, output in node.inputs)]
    found.update((name, output) for name in graph_walk.reachable_from(
        takers, [node.op for node in step.nodes]) - forward
                 for output in range(len(step.by_name[name].sizes)))
    return found


def _rebuilt(built, fetches, batch_size):
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
    ranks = _shapes_of_sparse(built)
    sizes = {leaf.op.name: count for tower, count in zip(
        built.towers, shard_sizes(built, batch_size)) for leaf in leaves_of(tower.inputs)
             if leaf.op.name not in ranks}
    graph_def = fetches[0].graph.as_graph_def()
    before = graph_walk.ancestors([tensor for op in shard_operations(built)
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
