"""Questions about a finished graph: which operations were made, what depends on what; and nests of
tensors, inputs and outputs."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import CONTROL_FLOW, LEAD_IN, VARIABLE_OPS


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
    """Set of the names of some operations, tensors or nodes."""
    return {each.name for each in operations}


def operation_of(fetch: typing.Any) -> tf.Operation:
    """The operation that computes a tensor, or that is a variable's; an operation itself."""
    return getattr(fetch, 'op', fetch)


def operation_names(fetches: typing.Iterable) -> typing.Set[str]:
    """Set of the names of the operations of some tensors, variables or operations."""
    return {operation_of(fetch).name for fetch in fetches}


def by_name(operations: typing.Iterable) -> dict:
    """`{name: operation}` of some operations, tensors or nodes."""
    return {each.name: each for each in operations}


def variables_by_name(variables: typing.Iterable[tf.Variable]) -> typing.Dict[str, tf.Variable]:
    """`{name of its operation: variable}` of some variables."""
    return {variable.op.name: variable for variable in variables}


def in_order_of_names(operations: typing.Mapping[str, typing.Any]) -> list:
    """The values of a dict by names, in the order of the names."""
    return [operations[name] for name in sorted(operations)]


def producers_of(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations that compute the inputs of an operation, in the inputs' order."""
    return [tensor.op for tensor in op.inputs]


def inputs_of(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations that an operation waits for, by data and by control edges."""
    return producers_of(op) + list(op.control_inputs)


def reached(starts: typing.Iterable, following: typing.Callable) -> dict:
    """Walks through a graph from some operations, or tensors.

    Args:
      starts: where to begin.
      following: function from an operation to those that the walk goes on to, such as
        `producers_of`.

    Returns:
      `{name: operation}` of all that is reached, the starts included.
    """
    stack = list(starts)
    found = {start.name: start for start in stack}
    while stack:
        for neighbour in following(stack.pop()):
            if neighbour.name not in found:
                found[neighbour.name] = neighbour
                stack.append(neighbour)
    return found


def reachable_from(
        sources: typing.Iterable[tf.Operation], operations: typing.Iterable[tf.Operation],
        control: typing.Union[bool, typing.Callable] = False) -> typing.Set[str]:
    """Finds what depends on some operations, directly or not.

    Args:
      sources: the operations to depend on.
      operations: those among which is searched, in any order: TF 1's `tf.cond` makes the operation
        that brings in a tensor from outside after the operation that takes it.
      control: whether control edges count: True, False, or a function of the operation that waits.

    Returns:
      Set of the names of the sources and of the operations that depend on any of them.
    """
    followers = collections.defaultdict(list)  # by name
    for op in operations:
        control_counts = control(op) if callable(control) else control
        if control_counts:
            inputs = inputs_of(op)
        else:
            inputs = producers_of(op)
        for source in inputs:
            followers[source.name].append(op)
    return set(reached(sources, lambda op: followers.get(op.name, ())))


def ancestors(tensors: typing.Iterable, ends: typing.Container[str] = ()) -> typing.Set[str]:
    """Finds the operations that some tensors are computed from, without control edges.

    Args:
      tensors: what is computed.
      ends: types of operations at which the search stops: their inputs do not count.

    Returns:
      Set of the names of these operations, with those that give the tensors themselves.
    """
    def producers_before(op):
        return () if op.type in ends else producers_of(op)
    return set(reached([tensor.op for tensor in tensors], producers_before))


def step_operations(fetches: typing.Iterable,
                    ends: typing.Container[str] = ()) -> typing.List[tf.Operation]:
    """Finds all operations that `session.run(fetches)` executes.

    Args:
      fetches: tensors, variables and operations.
      ends: names of operations at which the search stops: what only these wait for does not count.

    Returns:
      List of operations, in no order.
    """
    def inputs_before(op):
        return () if op.name in ends else inputs_of(op)
    fetched = [operation_of(fetch) for fetch in fetches]
    return list(reached(fetched, inputs_before).values())


# ---- what an operation is ------------------------------------------------------------------------

# The last four draw, and yet do not call themselves stateful: regions to pool, noise around images.
_RANDOM = frozenset(['TruncatedNormal', 'ParameterizedTruncatedNormal', 'Multinomial',
                     'RngReadAndSkip', 'FractionalMaxPool', 'FractionalAvgPool', 'ExtractGlimpse',
                     'ExtractGlimpseV2'])
_RANDOM_PREFIXES = ('Random', 'StatefulRandom', 'StatefulUniform', 'StatefulStandardNormal',
                    'StatefulTruncatedNormal', 'SampleDistortedBoundingBox')


def is_random(op: tf.Operation) -> bool:
    """Whether an operation draws random numbers by a generator, so that each run gives others.
    Stateless random operations are not meant: see `seed_position`."""
    return (op.type in _RANDOM or op.type.startswith(_RANDOM_PREFIXES)
            or op.type.endswith('CandidateSampler'))


def has_seed(node: tf.NodeDef) -> bool:
    """Whether a node draws random numbers by a seed in its attributes; (0, 0) stands for none."""
    if 'seed' not in node.attr or 'seed2' not in node.attr:
        return False
    return node.attr['seed'].i != 0 or node.attr['seed2'].i != 0


def is_control_flow(op: tf.Operation) -> bool:
    """Whether an operation is in, enters or leaves a loop or a branch of control flow v1."""
    return compat.in_control_flow(op) or op.type in CONTROL_FLOW


def seed_position(op: tf.Operation) -> typing.Optional[int]:
    """The index of the input of a stateless random operation that is its seed; None for any other
    operation."""
    if not op.type.startswith('Stateless'):
        return None
    names = [argument.name for argument in op.op_def.input_arg]
    return names.index('seed') if 'seed' in names else None


def operation_named(graph: tf.Graph, name: str) -> typing.Optional[tf.Operation]:
    """The operation of a graph that has this name; None if there is none."""
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None


def source_through(tensor: tf.Tensor, types: typing.Container[str]) -> tf.Tensor:
    """The tensor that reaches `tensor` through operations of these types: goes back by the first
    input of each, as long as the operation is of one of the types.

    For types `('Identity',)`, `identity(identity(x))` gives x, and x gives x.
    """
    while tensor.op.type in types:
        tensor = tensor.op.inputs[0]
    return tensor


# ---- the same value ------------------------------------------------------------------------------

_READS = LEAD_IN | {'ReadVariableOp'}


def is_computed_from(tensors: typing.Iterable, term: tf.Tensor) -> bool:
    """Whether any of `tensors` is computed from `term`, or from a tensor that computes the same.

    Needed since Keras makes the loss of a weight anew each time that a program asks for a layer's
    losses: the total loss has one of these tensors, and the collection of losses another.
    """
    upstream = ancestors(tensors)
    if term.op.name in upstream:
        return True
    for name in sorted(upstream):
        op = term.graph.get_operation_by_name(name)
        if op.type != term.op.type:
            continue
        candidate = op.outputs[term.value_index]
        if candidate.shape.ndims == term.shape.ndims and _is_same(term, candidate):
            return True
    return False


def _is_same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether the same operations compute two tensors from the same variables."""
    stack = [(one, other)]
    compared = set()
    while stack:
        one, other = stack.pop()
        one = source_through(one, _READS)
        other = source_through(other, _READS)
        names = (one.name, other.name)
        if one.name == other.name or names in compared:
            continue
        compared.add(names)
        if _is_source(one.op) or not _is_same_function(one, other):
            return False
        stack.extend(zip(one.op.inputs, other.op.inputs))
    return True


def _is_source(op: tf.Operation) -> bool:
    """Whether an operation gives more than its inputs and attributes say: a variable, a
    placeholder, a random number."""
    if op.type in VARIABLE_OPS or op.op_def.is_stateful:
        return True
    return not op.inputs and op.type != 'Const'


def _is_same_function(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether two tensors are the same function of the inputs of their operations."""
    if one.op.type != other.op.type or one.value_index != other.value_index:
        return False
    if len(one.op.inputs) != len(other.op.inputs):
        return False
    return _attributes(one.op) == _attributes(other.op)


def _attributes(op: tf.Operation) -> typing.Dict[str, tf.AttrValue]:
    """{name: value} of the attributes that the kernel computes by, without TensorFlow's own, such
    as `_class`."""
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith('_')}


# ---- nests of tensors, and the memory that they take ---------------------------------------------

def leaves_of(nest: typing.Any) -> list:
    """List of the tensors in a nest; a sparse tensor counts as its three tensors, None is left out.
    """
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def fetches_in(nest: typing.Any) -> list:
    """List of the tensors, variables and operations in a nest, without numbers and None."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True)
            if isinstance(getattr(leaf, 'op', leaf), tf.Operation)]


def map_leaves(function: typing.Callable, nest: typing.Any) -> typing.Any:
    """Calls a function on each tensor, operation and variable in a nest: `tf.nest.map_structure`
    that takes sparse tensors apart, but not variables.

    Args:
      function: of one tensor, operation or variable.
      nest: the nest. None and numbers in it stay as they are.

    Returns:
      A nest of the same structure, with what the function has returned.
    """
    def on_leaf(leaf: typing.Any) -> typing.Any:
        """The function's result for a leaf; for sparse and ragged ones, of their tensors."""
        if leaf is None:
            return None
        if isinstance(leaf, (tf.Tensor, tf.Operation) + compat.VARIABLE_TYPES):
            return function(leaf)
        if isinstance(leaf, tf.IndexedSlices):
            return tf.IndexedSlices(
                on_leaf(leaf.values), on_leaf(leaf.indices), on_leaf(leaf.dense_shape))
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            return tf.nest.map_structure(on_leaf, leaf, expand_composites=True)
        return leaf  # a number, say
    return tf.nest.map_structure(on_leaf, nest)


def bytes_of(value: typing.Union[tf.Tensor, tf.Variable]) -> int:
    """The size of a tensor or a variable; 0 where its shape is not known."""
    return (value.get_shape().num_elements() or 0) * value.dtype.base_dtype.size
