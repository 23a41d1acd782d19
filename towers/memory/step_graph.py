"""A step's graph as plain data, at any batch size: tensors of how many bytes on which device.

Where the towers were built with a batch of unknown size, the graph is imported into another one,
with the size written into the operations that the shards come from, and TensorFlow infers the
shapes anew. Where they were built with another size, what is computed from the batch is scaled.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.op_types import CONTROL_FLOW, CONTROL_FLOW_V2, PLACEHOLDERS, SIZES, VARIABLE_OPS
from towers.memory.simulation import REUSES, passes_on
from towers.tower.objectives import all_pairs
from towers.tower.shards import sizes_of_shards

_SHAPE_ONLY = SIZES | {'BroadcastGradientArgs'}
_NEVER_FOLDED = CONTROL_FLOW | CONTROL_FLOW_V2 | PLACEHOLDERS | VARIABLE_OPS | {'NoOp'}


class Node:
    """One operation of a step.

    Attributes:
      op, name, type, device: the `tf.Operation`, and what it says.
      number: the node's place in `StepGraph.nodes`.
      inputs: list of `(Node, output number)`.
      controls: list of `Node`s that the operation only waits for.
      sizes: bytes of each output.
      shapes: static shape of each output, a tuple, or None where a dimension is not known.
      folded: whether it is a constant before the step begins.
    """
    __slots__ = ('name', 'type', 'device', 'op', 'inputs', 'controls', 'sizes', 'shapes', 'folded',
                 'number')

    def __init__(self, op: tf.Operation, number: int):
        self.op, self.name, self.type, self.number = op, op.name, op.type, number
        self.device = op.device or '/device:CPU:0'
        self.inputs, self.controls, self.sizes, self.shapes = [], [], [], []
        self.folded = False


class StepGraph:
    """The operations that one run of some fetches executes.

    Attributes:
      nodes: list of `Node`s; each comes after its inputs, but for the back edges of loops.
      by_name: dict from names to `Node`s.
      unknown: names of the operations with an output of unknown size; the size of their largest
        input is counted, which is a bound for operations that select a part of an input.
    """

    def __init__(self, fetches: list, elements_of: typing.Optional[typing.Callable] = None):
        """
        Args:
          fetches: operations or tensors of one graph.
          elements_of: function from a tensor to its number of elements, or None; None to count the
            elements of static shapes.
        """
        ops = graph_walk.step_operations(fetches)
        order = {op.name: number for number, op in enumerate(ops[0].graph.get_operations())}
        ops.sort(key=lambda op: order[op.name])
        self.nodes = [Node(op, number) for number, op in enumerate(ops)]
        self.by_name = {node.name: node for node in self.nodes}
        self.unknown = []
        for node in self.nodes:
            node.inputs = [(self.by_name[tensor.op.name], tensor.value_index)
                           for tensor in node.op.inputs]
            node.controls = [self.by_name[other.name] for other in node.op.control_inputs]
        in_order = self._in_order()
        for node in in_order:
            self._measure(node, elements_of or (lambda tensor: tensor.shape.num_elements()))
        for node in in_order:  # in a loop a size may come after the operation that asks for it
            node.folded = _is_folded(node)
        _keep_order_of_folded(in_order)

    def _in_order(self):
        """The nodes, inputs first; in a loop, in the order in which the operations were made."""
        done, result = set(), []
        for start in self.nodes:
            stack = [(start, iter(start.inputs))] if start.number not in done else []
            done.add(start.number)
            while stack:
                node, rest = stack[-1]
                for other, _ in rest:
                    if other.number not in done:
                        done.add(other.number)
                        stack.append((other, iter(other.inputs)))
                        break
                else:
                    stack.pop()
                    result.append(node)
        return result

    def _measure(self, node, elements_of):
        for tensor in node.op.outputs:
            dtype, shape = tensor.dtype.base_dtype, tensor.shape
            node.shapes.append(tuple(shape.as_list()) if shape.is_fully_defined() else None)
            # Handles take no memory; `reserve_space_3` some on GPUs only.
            elements = 0 if dtype in (tf.resource, tf.variant) or (
                node.type, tensor.value_index) == ('FusedBatchNormV3', 5) else elements_of(tensor)
            if elements is not None:
                node.sizes.append(elements * (16 if dtype == tf.string else dtype.size))
                continue
            node.sizes.append(max([other.sizes[index] for other, index in node.inputs
                                   if index < len(other.sizes)] + [0]))
            self.unknown.append(node.name)


def _is_folded(node):
    if node.type == 'Const':
        return True
    if node.type in _SHAPE_ONLY and node.inputs:
        return all(other.shapes[index] is not None for other, index in node.inputs)
    return (bool(node.inputs) and node.type not in _NEVER_FOLDED
            and not node.op.op_def.is_stateful and bool(node.sizes)
            and all(other.folded for other, _ in node.inputs))


def _keep_order_of_folded(nodes):
    """Moves control inputs of folded constants to the operations that take the constants."""
    waits = {}  # number of a folded operation: {number: Node} that it waits for
    for node in nodes:
        found = {}
        for other, _ in node.inputs:
            if other.folded:
                found.update(waits.get(other.number, {}))
        for other in node.controls:
            found.update(waits.get(other.number, {}) if other.folded else {other.number: other})
        if node.folded:
            waits[node.number] = found
        else:
            node.controls = list(found.values())


# ---- a step of some towers -----------------------------------------------------------------------

def shard_sizes(built, batch_size):
    """The number of examples of each tower for a batch of `batch_size`: list of ints.

    Raises `InvalidArgumentError` for a batch that does not divide among the towers.
    """
    count = len(built.towers)
    parts = '%d %s' % (count, 'towers' if count == len(built.devices) else 'micro-batches')
    unit = sum(built.plan.shares)
    if batch_size % unit and built.plan.remainder == 'error':
        raise InvalidArgumentError('batch_size=%d does not divide among %s: give a multiple of %d.'
                                   % (batch_size, parts, unit))
    sizes, _ = sizes_of_shards(batch_size, built.plan.shares, built.plan.remainder)
    if not all(sizes):
        raise InvalidArgumentError('batch_size=%d leaves some of %s without an example: give %d '
                                   'at least.' % (batch_size, parts, unit))
    return sizes


def shard_operations(built) -> typing.List[tf.Operation]:
    """The operations that towers take their shards from: a list."""
    return [tensor.op for tower in built.towers for tensor in leaves_of(tower.inputs)]


def step_of(built, batch_size):
    """The `StepGraph` of a step at a batch size; None for the static one.

    Raises:
      InvalidArgumentError: there is no static one; the batch is sparse, and of unknown size.
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
        return _rebuilt(built, fetches, batch_size)
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

    def elements_of(tensor):
        count = tensor.shape.num_elements()
        if not count or (tensor.op.name, tensor.value_index) in fixed:
            return count
        return count * batch_size // static if tensor.op.name in of_examples else count
    return StepGraph(fetches, elements_of)


def forward_pass(built):
    """Names of the operations of all towers' forward passes."""
    return graph_walk.ancestors([
        tensor for tower in built.towers for tensor in tf.nest.flatten(
            [tower.data_loss, tower.loss, tower.predictions]) if isinstance(tensor, tf.Tensor)])


def gradients_in(step, built, forward):
    """The gradients of parameters in a `StepGraph`, their parts and sums: set of `(name, output)`.

    The names of `forward` are those of `forward_pass`.
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
        if passes_on(node) or node.type in REUSES:
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
    """The `StepGraph` of the fetches in a copy of the graph whose batch has a static size."""
    if any(isinstance(leaf, tf.SparseTensor) for tower in built.towers
           for leaf in tf.nest.flatten(tower.inputs)):
        raise InvalidArgumentError(
            'the batch is sparse, and of no static size: the memory of a step depends on its '
            'values. Use measure_memory, or inputs of a static batch size.')
    sizes = {leaf.op.name: count for tower, count in zip(
        built.towers, shard_sizes(built, batch_size)) for leaf in leaves_of(tower.inputs)}
    graph_def = fetches[0].graph.as_graph_def()
    before = graph_walk.ancestors([tensor for op in shard_operations(built)
                                   for tensor in op.outputs])
    for node in graph_def.node:
        if node.name in sizes and node.op == 'PlaceholderWithDefault':
            _set_first(node.attr['shape'].shape, sizes[node.name])
        elif node.name in before and node.name not in sizes:
            if node.op in PLACEHOLDERS:
                _set_first(node.attr['shape'].shape, batch_size)
            elif 'output_shapes' in node.attr and not node.op.endswith(('Dataset', 'DatasetV2')):
                for shape in node.attr['output_shapes'].list.shape:
                    _set_first(shape, batch_size)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name='')
    given = {}  # elements of the parts that the batch is cut into, which no inference can know
    for op in map(graph.get_operation_by_name, sizes):
        if op.type == 'PlaceholderWithDefault':
            given[op.inputs[0].name] = op.outputs[0].shape.num_elements()
    return StepGraph([graph.get_operation_by_name(fetch.name) for fetch in fetches],
                     lambda tensor: given.get(tensor.name, tensor.shape.num_elements()))


def _set_first(shape, size):
    if not shape.unknown_rank and shape.dim and shape.dim[0].size == -1:
        shape.dim[0].size = size
