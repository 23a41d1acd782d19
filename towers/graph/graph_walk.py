"""Questions about a finished graph: which operations were made, what depends on what; and nests of
tensors, inputs and outputs."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import CONTROL_FLOW


class Recording:
    """The operations that a block of code adds to a graph, in the order in which they were made."""

    def __init__(self, graph: tf.Graph):
        """Records what is added to `graph` while the context is open."""
        self._graph = graph
        self.operations: typing.List[tf.Operation] = []

    def __enter__(self):
        self._start = len(self._graph.get_operations())
        return self

    def so_far(self) -> typing.List[tf.Operation]:
        """The operations that were made since the block began."""
        return self._graph.get_operations()[self._start:]

    def __exit__(self, *unused_exception):
        self.operations = self.so_far()


def names_of(operations: typing.Iterable) -> typing.Set[str]:
    """Set of the names of operations, tensors or nodes."""
    return {each.name for each in operations}


def devices_of(operations: typing.Iterable) -> typing.Set[str]:
    """Set of the devices that operations, or nodes, ask for, with '' for those that ask for none.
    """
    return {each.device for each in operations}


def operation_of(fetch: typing.Any) -> tf.Operation:
    """The operation that computes a tensor, or that makes a variable; for an operation, itself."""
    return getattr(fetch, 'op', fetch)


def operation_names(fetches: typing.Iterable) -> typing.Set[str]:
    """Set of the names of the operations that compute tensors, or make variables; an operation
    among `fetches` counts itself."""
    return names_of(map(operation_of, fetches))


def by_name(operations: typing.Iterable) -> dict:
    """`{name: operation}`, from operations, tensors or nodes."""
    return {each.name: each for each in operations}


def variables_by_name(variables: typing.Iterable[tf.Variable]) -> typing.Dict[str, tf.Variable]:
    """`{name of its operation: variable}`, from variables."""
    return {variable.op.name: variable for variable in variables}


def in_order_of_names(operations: typing.Mapping[str, typing.Any]) -> list:
    """The values of a dict by names, in the order of the names, so that two builds of a program
    give the same order."""
    return [operations[name] for name in sorted(operations)]


def with_names(operations: typing.Iterable, names: typing.Container[str]) -> list:
    """List of the operations, or tensors, that have one of these names."""
    return [each for each in operations if each.name in names]


def without_names(operations: typing.Iterable, names: typing.Container[str]) -> list:
    """List of the operations, or tensors, that have none of these names."""
    return [each for each in operations if each.name not in names]


def producers_of(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations that compute the inputs of an operation, in the inputs' order."""
    return [tensor.op for tensor in op.inputs]


def of_types(operations: typing.Iterable[tf.Operation],
             types: typing.Container[str]) -> typing.List[tf.Operation]:
    """List of the operations whose type is one of `types`."""
    return [op for op in operations if op.type in types]


def tensors_taken(operations: typing.Iterable[tf.Operation]) -> typing.List[tf.Tensor]:
    """List of the tensors that operations take as inputs, in the order of the operations. A tensor
    is in the list as often as it is taken."""
    tensors: typing.List[tf.Tensor] = []
    for op in operations:
        tensors.extend(op.inputs)
    return tensors


def tensors_made(operations: typing.Iterable[tf.Operation]) -> typing.List[tf.Tensor]:
    """List of the tensors that operations compute, in the order of the operations."""
    tensors: typing.List[tf.Tensor] = []
    for op in operations:
        tensors.extend(op.outputs)
    return tensors


def takers_of_results(operations: typing.Iterable[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations that take a tensor which one of `operations` computes. An operation is
    in the list once for each of these tensors."""
    takers: typing.List[tf.Operation] = []
    for tensor in tensors_made(operations):
        takers.extend(tensor.consumers())
    return takers


def inputs_of(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations that an operation waits for, by data and by control edges."""
    return producers_of(op) + list(op.control_inputs)


def reached(starts: typing.Iterable, following: typing.Callable) -> dict:
    """Walks through a graph from some operations, or tensors.

    Args:
      starts: where to begin.
      following: function from an operation to the operations that the walk goes on to, such as
        `producers_of`; or from a tensor to tensors.

    Returns:
      `{name: operation}` of all that is reached, the starts included.
    """
    to_visit = list(starts)
    found = by_name(to_visit)
    while to_visit:
        for neighbour in following(to_visit.pop()):
            if neighbour.name not in found:
                found[neighbour.name] = neighbour
                to_visit.append(neighbour)
    return found


def reachable_from(
        sources: typing.Iterable[tf.Operation], operations: typing.Iterable[tf.Operation],
        control: bool = False) -> typing.Set[str]:
    """Finds what depends on some operations, directly or not.

    Args:
      sources: the operations to depend on.
      operations: the operations to search, in any order: TF 1's `tf.cond` makes the operation that
        brings in a tensor from outside after the operation that takes it.
      control: whether an operation also depends on what it waits for by a control edge.

    Returns:
      Set of the names of the sources and of the operations that depend on any of them.
    """
    followers = collections.defaultdict(list)  # {name of an operation: what depends on it directly}
    for op in operations:
        if control:
            inputs = inputs_of(op)
        else:
            inputs = producers_of(op)
        for source in inputs:
            followers[source.name].append(op)

    def followers_of(op: tf.Operation) -> typing.Sequence[tf.Operation]:
        return followers.get(op.name, ())
    return set(reached(sources, followers_of))


def ancestors(tensors: typing.Iterable, ends: typing.Container[str] = ()) -> typing.Set[str]:
    """Finds the operations that tensors are computed from, directly or not. Control edges do not
    count, since no value goes over them.

    Args:
      tensors: the tensors.
      ends: types of operations at which the search stops: their inputs do not count.

    Returns:
      Set of the names of these operations, and of the operations whose results the tensors are.
    """
    def producers_before(op: tf.Operation) -> typing.Sequence[tf.Operation]:
        if op.type in ends:
            return ()
        return producers_of(op)
    return set(reached(map(operation_of, tensors), producers_before))


def step_operations(fetches: typing.Iterable,
                    ends: typing.Container[str] = ()) -> typing.List[tf.Operation]:
    """Finds all operations that `session.run(fetches)` executes.

    Args:
      fetches: tensors, variables and operations.
      ends: names of operations at which the search stops: an operation that only these wait for
        does not count.

    Returns:
      List of operations, in no order.
    """
    def inputs_before(op: tf.Operation) -> typing.Sequence[tf.Operation]:
        if op.name in ends:
            return ()
        return inputs_of(op)
    return list(reached(map(operation_of, fetches), inputs_before).values())


# ---- what an operation is ------------------------------------------------------------------------

# The last four draw regions to pool, or noise around images. TensorFlow does not declare these four
# as stateful.
_RANDOM = frozenset(['TruncatedNormal', 'ParameterizedTruncatedNormal', 'Multinomial',
                     'RngReadAndSkip', 'FractionalMaxPool', 'FractionalAvgPool', 'ExtractGlimpse',
                     'ExtractGlimpseV2'])
_RANDOM_PREFIXES = ('Random', 'StatefulRandom', 'StatefulUniform', 'StatefulStandardNormal',
                    'StatefulTruncatedNormal', 'SampleDistortedBoundingBox')


def is_random(op: tf.Operation) -> bool:
    """Whether an operation draws random numbers by a generator of its own, so that each step draws
    other numbers. A stateless random operation computes its numbers from a seed that is an input of
    it, and does not count."""
    return is_random_type(op.type)


def is_random_type(op_type: str) -> bool:
    """Whether operations of a type draw random numbers by a generator of their own."""
    if op_type in _RANDOM or op_type.startswith(_RANDOM_PREFIXES):
        return True
    return op_type.endswith('CandidateSampler')


def has_seed(node: tf.NodeDef) -> bool:
    """Whether a node draws random numbers by a seed in its attributes, and not by one that each
    session draws anew. TensorFlow writes (0, 0) where the program has given no seed."""
    if 'seed' not in node.attr or 'seed2' not in node.attr:
        return False
    seeds = (node.attr['seed'].i, node.attr['seed2'].i)
    return seeds != (0, 0)


def is_control_flow(op: tf.Operation) -> bool:
    """Whether an operation is in, enters or leaves a loop or a branch of control flow v1."""
    return compat.in_control_flow(op) or op.type in CONTROL_FLOW


def seed_position(op: tf.Operation) -> typing.Optional[int]:
    """The index of the input of a stateless random operation that is its seed; None for any other
    operation."""
    if not op.type.startswith('Stateless'):
        return None
    for position, argument in enumerate(op.op_def.input_arg):
        if argument.name == 'seed':
            return position
    return None  # `StatelessIf`, say, which draws nothing


def operation_named(graph: tf.Graph, name: str) -> typing.Optional[tf.Operation]:
    """The operation of a graph that has this name; None if there is none."""
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None


def operations_named(graph: tf.Graph,
                     names: typing.Iterable[str]) -> typing.List[tf.Operation]:
    """List of the operations of a graph that have these names, in the order of the names."""
    return list(map(graph.get_operation_by_name, names))


def indices_by_name(operations: typing.Iterable[tf.Operation]) -> typing.Dict[str, int]:
    """{name of an operation: its index in `operations`}."""
    return {op.name: index for index, op in enumerate(operations)}


def source_through(tensor: tf.Tensor, types: typing.Container[str]) -> tf.Tensor:
    """The tensor that reaches `tensor` through operations of these types: goes back by the first
    input of each, as long as the operation is of one of the types.

    For types `('Identity',)`, `identity(identity(x))` gives x, and x gives x.
    """
    while tensor.op.type in types:
        tensor = tensor.op.inputs[0]
    return tensor


# ---- nests of tensors, and the memory that they take ---------------------------------------------

def leaves_of(nest: typing.Any) -> list:
    """List of the tensors in a nest; a sparse tensor counts as its three tensors, None is left out.
    """
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def fetches_in(nest: typing.Any) -> list:
    """List of the tensors, variables and operations in a nest, without numbers and None."""
    found = []
    for leaf in tf.nest.flatten(nest, expand_composites=True):
        has_operation = isinstance(operation_of(leaf), tf.Operation)  # a number has none
        if has_operation:
            found.append(leaf)
    return found


def map_leaves(function: typing.Callable, nest: typing.Any) -> typing.Any:
    """Calls a function on each tensor, operation and variable in a nest.

    `tf.nest.map_structure` takes sparse and ragged tensors for leaves; with `expand_composites` it
    takes them apart, and variables as well. Here sparse and ragged tensors are taken apart: their
    tensors are leaves. A variable is a leaf itself.

    Args:
      function: from a tensor, an operation or a variable to anything.
      nest: the nest. None and numbers in it stay as they are.

    Returns:
      A nest of the same structure, with what the function has returned.
    """
    def on_leaf(leaf: typing.Any) -> typing.Any:
        """The function's result for a leaf; of a sparse or ragged tensor, for its tensors."""
        if isinstance(leaf, (tf.Tensor, tf.Operation) + compat.VARIABLE_TYPES):
            return function(leaf)
        if isinstance(leaf, tf.IndexedSlices):  # whose `dense_shape` may be None
            return tf.IndexedSlices(
                on_leaf(leaf.values), on_leaf(leaf.indices), on_leaf(leaf.dense_shape))
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            return tf.nest.map_structure(on_leaf, leaf, expand_composites=True)
        return leaf  # a number, or None
    return tf.nest.map_structure(on_leaf, nest)


def bytes_of(value: typing.Union[tf.Tensor, tf.Variable]) -> int:
    """The size of a tensor or a variable; 0 where its shape is not static."""
    num_elements = value.get_shape().num_elements() or 0  # None for a shape that is not static
    return num_elements * value.dtype.base_dtype.size
