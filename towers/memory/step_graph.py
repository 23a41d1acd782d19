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
from towers.model.objectives import all_pairs
from towers.shards.cut_batch import sizes_of_shards

_SHAPE_ONLY = SIZES | {'BroadcastGradientArgs'}
_NEVER_FOLDED = CONTROL_FLOW | CONTROL_FLOW_V2 | PLACEHOLDERS | VARIABLE_OPS | {'NoOp'}
_STRING_BYTES = 16  # of the object; its text is elsewhere


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
        """Begins without inputs and sizes, which `StepGraph` fills in."""
        self.op = op
        self.name = op.name
        self.type = op.type
        self.device = op.device or '/device:CPU:0'
        self.number = number
        self.inputs: typing.List[typing.Tuple['Node', int]] = []
        self.controls: typing.List['Node'] = []
        self.sizes: typing.List[int] = []
        self.shapes: typing.List[typing.Optional[tuple]] = []
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
        places = {op.name: place for place, op in enumerate(ops[0].graph.get_operations())}
        ops.sort(key=lambda op: places[op.name])
        self.nodes = [Node(op, number) for number, op in enumerate(ops)]
        self.by_name = {node.name: node for node in self.nodes}
        self.unknown: typing.List[str] = []
        for node in self.nodes:
            self._connect(node)
        nodes_in_order = self._in_order()
        for node in nodes_in_order:
            self._measure(node, elements_of or _static_elements)
        # In a loop a size may come after the operation that asks for it.
        for node in nodes_in_order:
            node.folded = _is_folded(node)
        _keep_order_of_folded(nodes_in_order)

    def _connect(self, node: Node) -> None:
        """Notes the nodes that a node takes, and those that it waits for."""
        for tensor in node.op.inputs:
            node.inputs.append((self.by_name[tensor.op.name], tensor.value_index))
        for source in node.op.control_inputs:
            node.controls.append(self.by_name[source.name])

    def _in_order(self) -> typing.List[Node]:
        """The nodes, inputs first; in a loop, in the order in which the operations were made."""
        seen = set()
        in_order = []
        for start in self.nodes:
            if start.number in seen:
                continue
            seen.add(start.number)
            path = [(start, iter(start.inputs))]  # each node is an input of the one before it
            while path:
                node, inputs_left = path[-1]
                source = next((each for each, _ in inputs_left if each.number not in seen), None)
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


def _takes_no_memory(tensor) -> bool:
    """Whether a tensor is a handle, or `reserve_space_3`, which takes some memory on GPUs only."""
    if tensor.dtype.base_dtype in (tf.resource, tf.variant):
        return True
    return tensor.op.type == 'FusedBatchNormV3' and tensor.value_index == 5


def _bytes_of_largest_input(node) -> int:
    """Bytes of the largest input of a node, of those that have been measured."""
    sizes = [source.sizes[index] for source, index in node.inputs if index < len(source.sizes)]
    return max(sizes, default=0)


def _is_folded(node) -> bool:
    """Whether TensorFlow computes a node once, before the step, since its inputs are constants."""
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
    """Moves control inputs of folded constants to the operations that take the constants."""
    # Number of a folded node: {number: Node} that it waits for.
    waits: typing.Dict[int, typing.Dict[int, Node]] = {}
    for node in nodes:
        found: typing.Dict[int, Node] = {}
        for source, _ in node.inputs:
            found.update(waits.get(source.number, {}))
        for source in node.controls:
            if source.folded:
                found.update(waits.get(source.number, {}))
            else:
                found[source.number] = source
        if node.folded:
            waits[node.number] = found
        else:
            node.controls = list(found.values())


# ---- a step of some towers -----------------------------------------------------------------------

def shard_sizes(built: BuiltTowers, batch_size: int) -> typing.List[int]:
    """The number of examples of each tower, or micro-batch, for a batch of `batch_size`.

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
    """The operations that towers take their shards from: a list."""
    leaves = leaves_of([tower.inputs for tower in built.towers])
    return [tensor.op for tensor in leaves]


def step_of(built: BuiltTowers, batch_size: typing.Optional[int]) -> StepGraph:
    """The `StepGraph` of a step at a batch size; None for the static one.

    Raises:
      InvalidArgumentError: there is no static one; the batch is sparse, and of unknown size.
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
    """The tensors of a nest, without what else is in it."""
    return [leaf for leaf in tf.nest.flatten(nest) if isinstance(leaf, tf.Tensor)]


def forward_pass(built: BuiltTowers) -> typing.Set[str]:
    """Names of the operations of all towers' forward passes."""
    results = [[tower.data_loss, tower.loss, tower.predictions] for tower in built.towers]
    return graph_walk.ancestors(_tensors_in(results))


# ---- which tensors are gradients of variables

def gradients_in(step: StepGraph, built: BuiltTowers,
                 forward: typing.Set[str]) -> typing.Set[typing.Tuple[str, int]]:
    """The gradients of parameters in a step, their parts and sums: set of `(name, output)`.

    Args:
      step: a step of the towers.
      built: the towers.
      forward: names of the operations of the forward passes, see `forward_pass`.
    """
    ends = []
    for gradient in _all_gradients(built):
        if gradient.op.name in step.by_name:
            ends.append((step.by_name[gradient.op.name], gradient.value_index))
    return _in_the_memory_of(ends, forward) | _made_from(ends, step, forward)


def _all_gradients(built: BuiltTowers) -> typing.List[tf.Tensor]:
    """The gradients of all towers and their combinations: a list; of sparse ones the values."""
    pairs = []
    for tower in built.towers:
        pairs += tower.pairs
    pairs += all_pairs(built.gradients)
    gradients = [gradient for gradient, _ in pairs if gradient is not None]
    return [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            for gradient in gradients]


def _in_the_memory_of(ends: typing.List[typing.Tuple[Node, int]], forward: typing.Set[str]
                      ) -> typing.Set[typing.Tuple[str, int]]:
    """The outputs, `(name, output)`, that gradients are made in: the same memory, or as large.

    `ends` are the gradients, pairs of a `Node` and the number of its output.
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
    """The outputs, `(name, output)`, of the combination and of what is done with gradients."""
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
    """The `StepGraph` of the fetches, whose tensors are scaled from the static batch size."""
    static_size = built.plan.batch_size
    step = StepGraph(fetches)
    gradients = gradients_in(step, built, forward_pass(built))
    from_batch = _computed_from_batch(step, built)

    def elements_of(tensor: tf.Tensor):
        count = tensor.shape.num_elements()
        is_gradient = (tensor.op.name, tensor.value_index) in gradients
        if not count or is_gradient or tensor.op.name not in from_batch:
            return count
        return count * batch_size // static_size
    return StepGraph(fetches, elements_of)


def _computed_from_batch(step: StepGraph, built: BuiltTowers) -> typing.Set[str]:
    """Names of the operations whose results grow with the batch: a set."""
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
    """The `StepGraph` of the fetches in a copy of the graph whose batch has a static size."""
    leaves = tf.nest.flatten([tower.inputs for tower in built.towers])
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves):
        raise InvalidArgumentError(
            'the batch is sparse, and of no static size: the memory of a step depends on its '
            'values. Use measure_memory, or inputs of a static batch size.')
    sizes = {}  # name of an operation that a tower takes its shard from: examples
    for tower, size in zip(built.towers, shard_sizes(built, batch_size)):
        for tensor in leaves_of(tower.inputs):
            sizes[tensor.op.name] = size
    graph_def = fetches[0].graph.as_graph_def()
    _set_batch_size(graph_def, built, sizes, batch_size)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name='')
    cut_elements = {}  # of the parts that the batch is cut into, which no inference can know
    for name in sizes:
        op = graph.get_operation_by_name(name)
        if op.type == 'PlaceholderWithDefault':
            cut_elements[op.inputs[0].name] = op.outputs[0].shape.num_elements()

    def elements_of(tensor: tf.Tensor):
        return cut_elements.get(tensor.name, tensor.shape.num_elements())
    return StepGraph([graph.get_operation_by_name(fetch.name) for fetch in fetches], elements_of)


def _set_batch_size(graph_def: tf.GraphDef, built: BuiltTowers, sizes: typing.Dict[str, int],
                    batch_size: int) -> None:
    """Writes the size of the batch, and of its shards, into the shapes of a `GraphDef`.

    Args:
      graph_def: of the graph of the towers.
      built: the towers.
      sizes: dict from the names of the operations that the shards come from to their examples.
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
    """Gives the first dimension of a `TensorShapeProto` a size, where it has none."""
    if not shape.unknown_rank and shape.dim and shape.dim[0].size == -1:
        shape.dim[0].size = size
