"""A step's graph as plain data, at any batch size: tensors of how many bytes on which device.

Where the towers were built with a batch of unknown size, the graph is imported into another one,
with the size written into the operations that the shards come from, and TensorFlow infers the
shapes anew. Where they were built with another size, what is computed from the batch is scaled.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.op_types import CONTROL_FLOW, CONTROL_FLOW_V2, PLACEHOLDERS, SIZES, VARIABLE_OPS
from towers.memory.kernels import REUSES, passes_on
from towers.memory.node import Node
from towers.model.objectives import all_pairs
from towers.shards.cut_batch import sizes_of_shards

_SHAPE_ONLY = SIZES | {'BroadcastGradientArgs'}
_NEVER_FOLDED = CONTROL_FLOW | CONTROL_FLOW_V2 | PLACEHOLDERS | VARIABLE_OPS | {'NoOp'}
_STRING_BYTES = 16  # of the object; its text is elsewhere


class StepGraph:
    """The operations that one run of some fetches executes.

    Attributes:
      nodes: list of the `Node`s, in the order in which their operations were made.
      by_name: {name: `Node`}.
      unknown: names of the operations with an output of unknown size; the size of their largest
        input is counted, which is a bound for operations that select a part of an input.
    """

    def __init__(self, fetches: list, elements_of: typing.Optional[typing.Callable] = None):
        """
        Args:
          fetches: operations or tensors of one graph.
          elements_of: function from a tensor to its number of elements, or to None if that is not
            known. Without such a function, static shapes say it.
        """
        ops = graph_walk.step_operations(fetches)
        all_operations = ops[0].graph.get_operations()
        index_by_name = {op.name: index for index, op in enumerate(all_operations)}
        ops.sort(key=lambda op: index_by_name[op.name])
        self.nodes = [Node(op, number) for number, op in enumerate(ops)]
        self.by_name = {node.name: node for node in self.nodes}
        self.unknown: typing.List[str] = []
        for node in self.nodes:
            self._connect(node)
        nodes_in_order = self._in_order()
        for node in nodes_in_order:
            self._measure(node, elements_of or _static_elements)
        # After all sizes: in a loop, a size may come after the operation that asks for it.
        for node in nodes_in_order:
            node.folded = _is_folded(node)
        _keep_order_of_folded(nodes_in_order)

    def _connect(self, node: Node) -> None:
        """Notes the nodes whose outputs a node takes, and those that it only waits for."""
        for tensor in node.op.inputs:
            node.inputs.append((self.by_name[tensor.op.name], tensor.value_index))
        for source in node.op.control_inputs:
            node.controls.append(self.by_name[source.name])

    def _in_order(self) -> typing.List[Node]:
        """List of the nodes, each after its inputs; in a loop, in the order in which the operations
        were made. A search depth first, without recursion."""
        seen = set()
        in_order = []
        for start in self.nodes:
            if start.number in seen:
                continue
            seen.add(start.number)
            # Nodes with what is left of their inputs; each node is an input of the one before it.
            path = [(start, iter(start.inputs))]
            while path:
                node, inputs_left = path[-1]
                unseen = (source for source, _ in inputs_left if source.number not in seen)
                source = next(unseen, None)
                if source is None:
                    in_order.append(node)
                    path.pop()
                else:
                    seen.add(source.number)
                    path.append((source, iter(source.inputs)))
        return in_order

    def _measure(self, node: Node, elements_of: typing.Callable) -> None:
        """Notes the static shape and the bytes of each output of a node."""
        for tensor in node.op.outputs:
            shape = tensor.shape
            node.shapes.append(tuple(shape.as_list()) if shape.is_fully_defined() else None)
            elements = 0 if _takes_no_memory(tensor) else elements_of(tensor)
            if elements is None:
                node.sizes.append(_bytes_of_largest_input(node))
                self.unknown.append(node.name)
                continue
            dtype = tensor.dtype.base_dtype
            bytes_of_element = _STRING_BYTES if dtype == tf.string else dtype.size
            node.sizes.append(elements * bytes_of_element)


def _static_elements(tensor: tf.Tensor) -> typing.Optional[int]:
    """The number of elements of a tensor; None where its shape is not static."""
    return tensor.shape.num_elements()


def _takes_no_memory(tensor: tf.Tensor) -> bool:
    """Whether a tensor takes no memory: a handle; or a batch norm's `reserve_space_3`, which takes
    some on GPUs only."""
    if tensor.dtype.base_dtype in (tf.resource, tf.variant):
        return True
    return tensor.op.type == 'FusedBatchNormV3' and tensor.value_index == 5


def _bytes_of_largest_input(node: Node) -> int:
    """Bytes of the largest input of a node, among those that have been measured."""
    sizes = [source.sizes[index] for source, index in node.inputs if index < len(source.sizes)]
    return max(sizes, default=0)


def _is_folded(node: Node) -> bool:
    """Whether TensorFlow computes a node once, before the step (constant folding): its inputs are
    constants, or it needs only the shape of inputs whose shape is static."""
    if node.type == 'Const':
        return True
    if not node.inputs:
        return False
    if node.type in _SHAPE_ONLY:
        return all(source.shapes[index] is not None for source, index in node.inputs)
    if node.type in _NEVER_FOLDED or node.op.op_def.is_stateful or not node.sizes:
        return False
    return all(source.folded for source, _ in node.inputs)


def _keep_order_of_folded(nodes: typing.List[Node]) -> None:
    """Makes the nodes that take folded constants wait for what the constants would wait for.

    A constant that is computed before the step waits for nothing in it.

    Args:
      nodes: all nodes, each after its inputs; their `controls` are changed.
    """
    # {number of a folded node: {number of a node that it waits for: this node}}
    awaited_by_folded: typing.Dict[int, typing.Dict[int, Node]] = {}
    for node in nodes:
        awaited: typing.Dict[int, Node] = {}
        for source, _ in node.inputs:
            awaited.update(awaited_by_folded.get(source.number, {}))
        for source in node.controls:
            if source.folded:
                awaited.update(awaited_by_folded.get(source.number, {}))
            else:
                awaited[source.number] = source
        if node.folded:
            awaited_by_folded[node.number] = awaited
        else:
            node.controls = list(awaited.values())


# ---- a step of some towers -----------------------------------------------------------------------

def shard_sizes(built: BuiltTowers, batch_size: int) -> typing.List[int]:
    """List of the number of examples of each tower, or micro-batch, for a batch of `batch_size`.

    Raises:
      InvalidArgumentError: the batch does not divide among the towers.
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


def shard_operations(built: BuiltTowers) -> typing.List[tf.Operation]:
    """List of the operations whose outputs are the towers' shards."""
    leaves = leaves_of([tower.inputs for tower in built.towers])
    return [tensor.op for tensor in leaves]


def step_of(built: BuiltTowers, batch_size: typing.Optional[int]) -> StepGraph:
    """The `StepGraph` of a step of some towers.

    Args:
      built: the towers.
      batch_size: examples of the step; None for the static batch size of the towers.

    Raises:
      InvalidArgumentError: None, and the towers have no static batch size; the batch is sparse, and
        of unknown size.
    """
    if built.train_op is not None:
        fetches = [built.train_op]
    else:
        fetches = [tensor.op for tensor in _tensors_in([built.loss, built.predictions])]
    static_size = built.plan.batch_size
    if static_size is None:
        if batch_size is None:
            raise InvalidArgumentError(
                'batch_size=None, and the batch that the towers were built with has no static '
                'size: give a number of examples.')
        return _rebuilt(built, fetches, batch_size)
    if batch_size is None or batch_size == static_size:
        return StepGraph(fetches)
    return _scaled(built, fetches, batch_size)


def _tensors_in(nest: typing.Any) -> typing.List[tf.Tensor]:
    """List of the tensors in a nest; anything else in it is left out."""
    return [leaf for leaf in tf.nest.flatten(nest) if isinstance(leaf, tf.Tensor)]


def forward_pass(built: BuiltTowers) -> typing.Set[str]:
    """Set of the names of the operations of all towers' forward passes."""
    results = [[tower.data_loss, tower.loss, tower.predictions] for tower in built.towers]
    return graph_walk.ancestors(_tensors_in(results))


# ---- which tensors are gradients of variables

def gradients_in(step: StepGraph, built: BuiltTowers,
                 forward: typing.Set[str]) -> typing.Set[typing.Tuple[str, int]]:
    """Finds the outputs in a step that are gradients of variables, their parts or their sums.

    Args:
      step: a step of the towers.
      built: the towers.
      forward: names of the operations of the forward passes, see `forward_pass`.

    Returns:
      Set of `(name of an operation, index of its output)`.
    """
    ends = []
    for gradient in _all_gradients(built):
        if gradient.op.name in step.by_name:
            ends.append((step.by_name[gradient.op.name], gradient.value_index))
    return _in_the_memory_of(ends, forward) | _made_from(ends, step, forward)


def _all_gradients(built: BuiltTowers) -> typing.List[tf.Tensor]:
    """List of the gradients of all towers and their combinations; for a sparse one, its values."""
    pairs = []
    for tower in built.towers:
        pairs += tower.pairs
    pairs += all_pairs(built.gradients)
    gradients = [gradient for gradient, _ in pairs if gradient is not None]
    return [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in gradients]


def _in_the_memory_of(ends: typing.List[typing.Tuple[Node, int]], forward: typing.Set[str]
                      ) -> typing.Set[typing.Tuple[str, int]]:
    """Finds the outputs upstream of gradients that are in the same memory, or may be.

    Args:
      ends: the gradients, as `(node, index of its output)`.
      forward: names of the operations of the forward passes, at which the search ends.

    Returns:
      Set of `(name of an operation, index of its output)`, with the gradients themselves.
    """
    found = set()
    stack = list(ends)
    while stack:
        node, output = stack.pop()
        if (node.name, output) in found or node.name in forward:
            continue
        found.add((node.name, output))
        if passes_on(node) or node.type in REUSES:
            for source, index in node.inputs:
                if source.sizes[index] == node.sizes[output]:
                    stack.append((source, index))
    return found


def _made_from(ends: typing.List[typing.Tuple[Node, int]], step: StepGraph,
               forward: typing.Set[str]) -> typing.Set[typing.Tuple[str, int]]:
    """Finds the outputs downstream of gradients: their combination, and what is done with that.

    Args:
      ends: the gradients, as `(node, index of its output)`.
      step: the step.
      forward: names of the operations of the forward passes, which do not count.

    Returns:
      Set of `(name of an operation, index of its output)`.
    """
    gradients = {(node.number, output) for node, output in ends}
    takers = []
    for node in step.nodes:
        if any((source.number, index) in gradients for source, index in node.inputs):
            takers.append(node.op)
    found = set()
    for name in graph_walk.reachable_from(takers, [node.op for node in step.nodes]) - forward:
        for output in range(len(step.by_name[name].sizes)):
            found.add((name, output))
    return found


# ---- a step at another batch size than the static one

def _scaled(built: BuiltTowers, fetches: list, batch_size: int) -> StepGraph:
    """The `StepGraph` of the fetches at another batch size than the static one: the sizes of what
    is computed from the batch are scaled, but for the gradients of variables.

    Args:
      built: the towers.
      fetches: the operations that a step runs.
      batch_size: examples of the step.
    """
    static_size = built.plan.batch_size
    step = StepGraph(fetches)
    gradients = gradients_in(step, built, forward_pass(built))
    from_batch = _computed_from_batch(step, built)

    def elements_of(tensor: tf.Tensor) -> typing.Optional[int]:
        """The elements that a tensor has at the other batch size."""
        count = tensor.shape.num_elements()
        is_gradient = (tensor.op.name, tensor.value_index) in gradients
        if not count or is_gradient or tensor.op.name not in from_batch:
            return count
        return count * batch_size // static_size
    return StepGraph(fetches, elements_of)


def _computed_from_batch(step: StepGraph, built: BuiltTowers) -> typing.Set[str]:
    """Set of the names of the operations whose results grow with the batch."""
    shards = shard_operations(built)
    names = graph_walk.reachable_from(shards, [node.op for node in step.nodes])
    names |= graph_walk.names_of(graph_walk.step_operations(shards))
    sizes = [tower.size for tower in built.towers]
    for node in step.nodes:
        if not node.folded or node.type == 'Const' or not node.shapes:
            continue
        shape = node.shapes[0]
        if shape and shape[0] in sizes:  # zeros and the like, as long as a shard
            names.add(node.name)
    return names


def _rebuilt(built: BuiltTowers, fetches: list, batch_size: int) -> StepGraph:
    """The `StepGraph` of the fetches for a batch of unknown size, from a copy of the graph in which
    the batch has a static size.

    Args:
      built: the towers.
      fetches: the operations that a step runs.
      batch_size: examples of the step.
    """
    leaves = tf.nest.flatten([tower.inputs for tower in built.towers])
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        raise InvalidArgumentError(
            'the batch is sparse, and of no static size: the memory of a step depends on its '
            'values. Use measure_memory, or inputs of a static batch size.')
    sizes = {}  # {name of an operation whose output is a shard: examples of the shard}
    for tower, size in zip(built.towers, shard_sizes(built, batch_size)):
        for tensor in leaves_of(tower.inputs):
            sizes[tensor.op.name] = size
    graph_def = fetches[0].graph.as_graph_def()
    _set_batch_size(graph_def, built, sizes, batch_size)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name='')
    # {name of a part that the batch is cut into: its elements}, which no shape inference can know
    cut_elements = {}
    for name in sizes:
        op = graph.get_operation_by_name(name)
        if op.type == 'PlaceholderWithDefault':
            cut_elements[op.inputs[0].name] = op.outputs[0].shape.num_elements()

    def elements_of(tensor: tf.Tensor) -> typing.Optional[int]:
        return cut_elements.get(tensor.name, tensor.shape.num_elements())
    return StepGraph([graph.get_operation_by_name(fetch.name) for fetch in fetches], elements_of)


def _set_batch_size(graph_def: tf.GraphDef, built: BuiltTowers, sizes: typing.Dict[str, int],
                    batch_size: int) -> None:
    """Writes the size of the batch, and of its shards, into the shapes of a `GraphDef`.

    Args:
      graph_def: the graph of the towers, which is changed.
      built: the towers.
      sizes: {name of an operation whose output is a shard: examples of the shard}.
      batch_size: examples of the whole batch.
    """
    before_shards = graph_walk.ancestors(leaves_of([tower.inputs for tower in built.towers]))
    for node in graph_def.node:
        if node.name in sizes:
            if node.op == 'PlaceholderWithDefault':
                _set_first(node.attr['shape'].shape, sizes[node.name])
            continue
        if node.name not in before_shards:
            continue
        is_dataset = node.op.endswith(('Dataset', 'DatasetV2'))
        if node.op in PLACEHOLDERS:
            _set_first(node.attr['shape'].shape, batch_size)
        elif 'output_shapes' in node.attr and not is_dataset:
            for shape in node.attr['output_shapes'].list.shape:
                _set_first(shape, batch_size)


def _set_first(shape: typing.Any, size: int) -> None:
    """Gives the first dimension of a `TensorShapeProto` a size, if its size is unknown."""
    if not shape.unknown_rank and shape.dim and shape.dim[0].size == -1:
        shape.dim[0].size = size
