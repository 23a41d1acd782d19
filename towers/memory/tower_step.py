"""A step of finished towers as a `StepGraph`, at any batch size; and the shards, forward passes and
gradients in it.

If the towers were built with a batch of unknown size, their graph is copied, with a size written
into the operations that give the batch, and TensorFlow infers the shapes of the copy anew. If they
were built with another static size, the sizes of tensors computed from the batch are scaled.

Words of other modules used here: `built.towers` and `plan.shares` have an entry for each tower, or
for each micro-batch of each tower; `plan.remainder` is `'error'` where a batch has to divide by
these shares; `plan.batch_size` is the static size of the batch, or None; `tower.size` the number of
examples of a shard, an int or a tensor.

Its test is `tests/memory/test_step_graph.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.op_types import PLACEHOLDERS
from towers.memory.kernels import REUSES, passes_on
from towers.memory.node import Node, Output
from towers.memory.step_graph import StepGraph
from towers.model.objectives import all_pairs
from towers.shards.cut_batch import sizes_of_shards


def shard_sizes(built: BuiltTowers, batch_size: int) -> typing.List[int]:
    """List of the number of examples of each tower, or micro-batch, for a batch of `batch_size`.

    Raises:
      InvalidArgumentError: the batch does not divide among the towers.
    """
    num_parts = len(built.towers)
    has_micro_batches = num_parts > len(built.devices)
    parts = '%d %s' % (num_parts, 'micro-batches' if has_micro_batches else 'towers')
    unit = sum(built.plan.shares)  # size of the smallest batch with an example for each part
    if batch_size % unit and built.plan.remainder == 'error':
        raise InvalidArgumentError('batch_size=%d does not divide among %s: give a multiple of %d.'
                                   % (batch_size, parts, unit))
    sizes = sizes_of_shards(batch_size, built.plan.shares, built.plan.remainder).sizes
    if not all(sizes):
        raise InvalidArgumentError('batch_size=%d leaves some of %s without an example: give %d '
                                   'at least.' % (batch_size, parts, unit))
    return sizes


def shard_operations(built: BuiltTowers) -> typing.List[tf.Operation]:
    """List of the operations whose outputs are the towers' shards."""
    leaves = leaves_of([tower.inputs for tower in built.towers])
    return [tensor.op for tensor in leaves]


def fetches_of_step(built: BuiltTowers) -> typing.List[tf.Operation]:
    """List of the operations that a step fetches: the train op; without an optimizer the operations
    of losses, predictions and metrics."""
    if built.train_op is not None:
        return [built.train_op]
    results = [built.loss, built.predictions, built.metrics]
    return [tensor.op for tensor in _tensors_in(results)]


def step_of(built: BuiltTowers, batch_size: typing.Optional[int]) -> StepGraph:
    """The `StepGraph` of a step of the towers of a build.

    Args:
      built: the towers.
      batch_size: examples of the step; None for the static batch size of the towers.

    Raises:
      InvalidArgumentError: `batch_size` is None, and the towers have no static batch size; or the
        batch is sparse, and of unknown size.
    """
    fetches = fetches_of_step(built)
    static_size = built.plan.batch_size
    if batch_size is None:
        batch_size = static_size
    if batch_size is None:
        raise InvalidArgumentError(
            'batch_size=None, and the batch that the towers were built with has no static '
            'size: give a number of examples.')
    if batch_size == static_size:
        return StepGraph(fetches)  # the static shapes in the graph are the step's shapes
    if static_size is None:
        return _rebuilt(built, fetches, batch_size)
    return _scaled(built, fetches, batch_size)


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
    graph = _with_batch_size(fetches[0].graph, built, batch_size)
    shards = graph_walk.operations_named(graph, graph_walk.names_of(shard_operations(built)))
    elements_before_shards = _elements_before_shards(shards)

    def elements_of(tensor: tf.Tensor) -> typing.Optional[int]:
        """The number of elements of a tensor of the copy; None where it is not known."""
        return elements_before_shards.get(tensor.name, tensor.shape.num_elements())

    imported = [graph.get_operation_by_name(fetch.name) for fetch in fetches]
    return StepGraph(imported, elements_of)


def _elements_before_shards(shards: typing.Iterable[tf.Operation]
                            ) -> typing.Dict[str, typing.Optional[int]]:
    """`{name of a tensor that the batch was cut into: its number of elements}`.

    The batch is cut into pieces whose sizes are computed in the step, so that shape inference does
    not know them. Each shard is a `placeholder_with_default` whose default is a piece. The shard
    has a static size, and the piece has the same size.

    Args:
      shards: the operations whose outputs are the shards, with static shapes.
    """
    elements = {}
    for shard in shards:
        if shard.type == 'PlaceholderWithDefault':
            cut_tensor = shard.inputs[0]
            elements[cut_tensor.name] = shard.outputs[0].shape.num_elements()
    return elements


def _with_batch_size(graph: tf.Graph, built: BuiltTowers, batch_size: int) -> tf.Graph:
    """Copies a graph, and gives the batch and its shards static sizes in place of unknown sizes.
    TensorFlow infers all other shapes of the copy from these sizes.

    Args:
      graph: the graph of the towers.
      built: the towers.
      batch_size: examples of the whole batch.
    """
    # {name of an operation that gives examples: how many}
    before_shards = graph_walk.ancestors(leaves_of([tower.inputs for tower in built.towers]))
    sizes = dict.fromkeys(before_shards, batch_size)
    for tower, size in zip(built.towers, shard_sizes(built, batch_size)):
        sizes.update(dict.fromkeys(graph_walk.operation_names(leaves_of(tower.inputs)), size))
    graph_def = graph.as_graph_def()
    for node in graph_def.node:
        if node.name in sizes:
            _set_number_of_examples(node, sizes[node.name])
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(graph_def, name='')
    return copy


def _set_number_of_examples(node: tf.NodeDef, size: int) -> None:
    """Writes a number of examples into the shapes in the attributes of a node: the shape of a
    placeholder (a shard is a placeholder with a default), or the shapes of an operation that takes
    the batch out of an iterator."""
    if node.op in PLACEHOLDERS:
        _set_first_dimension(node.attr['shape'].shape, size)
        return
    # A data set before the iterator is left as it is: its elements may be single examples.
    is_dataset = node.op.endswith(('Dataset', 'DatasetV2'))
    if 'output_shapes' in node.attr and not is_dataset:
        for shape in node.attr['output_shapes'].list.shape:
            _set_first_dimension(shape, size)


def _set_first_dimension(shape: typing.Any, size: int) -> None:
    """Gives the first dimension of a `TensorShapeProto` a size, if its size is unknown, for which
    TensorFlow writes -1."""
    if not shape.unknown_rank and shape.dim and shape.dim[0].size == -1:
        shape.dim[0].size = size


def _scaled(built: BuiltTowers, fetches: list, batch_size: int) -> StepGraph:
    """The `StepGraph` of the fetches at a batch size other than the static size: the sizes of
    tensors computed from the batch are scaled, except the gradients of variables.

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
        """The number of elements that a tensor has at the other batch size."""
        elements = tensor.shape.num_elements()
        # A gradient has the shape of its variable, at any batch size.
        is_gradient = tensor.name in gradients
        grows_with_batch = tensor.op.name in from_batch and not is_gradient
        if elements is None or not grows_with_batch:
            return elements
        return elements * batch_size // static_size

    return StepGraph(fetches, elements_of)


def _computed_from_batch(step: StepGraph, built: BuiltTowers) -> typing.Set[str]:
    """Set of the names of the operations whose results are taken to grow with the batch: the batch,
    its shards, all operations downstream of the shards, and operations that are computed before the
    step and whose result is as long as a shard.

    Args:
      step: a step at the static batch size.
      built: the towers.
    """
    shards = shard_operations(built)
    names = graph_walk.reachable_from(shards, step.operations)
    names |= graph_walk.names_of(graph_walk.step_operations(shards))  # the batch itself
    # Where the shape of the shard is static, `tf.ones_like(shard)` fills a tensor of this shape
    # and takes nothing from the shard: only its length tells that it grows with the batch. A
    # `Const` is left out, since the model's own constant may have this length by chance.
    shard_sizes_in_graph = {tower.size for tower in built.towers}
    for node in step.nodes:
        is_computed_before_step = node.folded and node.type != 'Const'
        if is_computed_before_step and _first_dimension(node) in shard_sizes_in_graph:
            names.add(node.name)
    return names


def _first_dimension(node: Node) -> typing.Optional[int]:
    """The static size of the first dimension of a node's first output; None for a number, and
    where its shape is not known."""
    shape = node.shapes[0]
    return shape[0] if shape else None


def forward_pass(built: BuiltTowers) -> typing.Set[str]:
    """Set of the names of the operations of all towers' forward passes, up to the loss as the model
    has made it (`loss`), and as it is differentiated (`data_loss`)."""
    results = [[tower.loss, tower.data_loss, tower.predictions] for tower in built.towers]
    return graph_walk.ancestors(_tensors_in(results))


def _tensors_in(nest: typing.Any) -> typing.List[tf.Tensor]:
    """List of the tensors in a nest; its other leaves are left out."""
    return [leaf for leaf in tf.nest.flatten(nest) if isinstance(leaf, tf.Tensor)]


def gradients_in(step: StepGraph, built: BuiltTowers,
                 forward: typing.Set[str]) -> typing.Set[str]:
    """Finds the tensors in a step that are gradients of variables: the gradients of each tower, the
    terms that these are added up from, and all tensors computed from these gradients, such as their
    sum over the towers.

    Args:
      step: a step of the towers.
      built: the towers.
      forward: names of the operations of the forward passes, see `forward_pass`.

    Returns:
      Set of the names of the tensors.
    """
    gradients = []
    for tensor in _gradient_tensors(built):
        # A gradient that the update does not need is not computed in a step.
        if tensor.op.name in step.by_name:
            gradients.append(Output(step.by_name[tensor.op.name], tensor.value_index))
    return _in_the_memory_of(gradients, forward) | _made_from(gradients, step, forward)


def _gradient_tensors(built: BuiltTowers) -> typing.List[tf.Tensor]:
    """List of the gradients of each tower, and of the combined gradients. A sparse gradient is in
    the list as the tensor of its rows."""
    pairs = []
    for tower in built.towers:
        pairs += tower.pairs
    pairs += all_pairs(built.gradients)
    tensors = []
    for gradient, _ in pairs:
        if isinstance(gradient, tf.IndexedSlices):
            tensors.append(gradient.values)
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


def _in_the_memory_of(gradients: typing.List[Output],
                      forward: typing.Set[str]) -> typing.Set[str]:
    """Finds the gradients, and the tensors before them that are, or may be, in the same memory.

    For a gradient `AddN(a, b)`, whose kernel writes over one of its inputs, these tensors are the
    `AddN`, a and b; if a is the `Reshape` of a product, also the product.

    Args:
      gradients: the gradients.
      forward: names of the operations of the forward passes, whose tensors do not count.

    Returns:
      Set of the names of the tensors.
    """
    def sources_in_memory(output: Output) -> typing.List[Output]:
        """The inputs of an output's node in whose memory the output may be."""
        may_be_in_input = passes_on(output.node) or output.node.type in REUSES
        if not may_be_in_input:
            return []
        return [source for source in output.node.inputs if source.size == output.size]

    found = graph_walk.reached(gradients, sources_in_memory)
    return {name for name, output in found.items() if output.node.name not in forward}


def _made_from(gradients: typing.List[Output], step: StepGraph,
               forward: typing.Set[str]) -> typing.Set[str]:
    """Finds the tensors that are computed from gradients: the combined gradients, and all tensors
    computed from these.

    Args:
      gradients: the gradients.
      step: the step.
      forward: names of the operations of the forward passes, whose tensors do not count.

    Returns:
      Set of the names of the tensors.
    """
    outputs = set(gradients)
    takers = [node.op for node in step.nodes if not outputs.isdisjoint(node.inputs)]
    names_after = graph_walk.reachable_from(takers, step.operations)
    found: typing.Set[str] = set()
    for name in names_after - forward:
        found |= graph_walk.names_of(step.by_name[name].outputs)
    return found
