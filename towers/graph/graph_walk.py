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
    """The names of some operations, tensors or nodes: a set."""
    return {each.name for each in operations}


def operation_of(fetch: typing.Any) -> tf.Operation:
    """The operation that makes a tensor or holds a variable; an operation itself."""
    return getattr(fetch, 'op', fetch)


def operation_names(fetches: typing.Iterable) -> typing.Set[str]:
    """The names of the operations of some tensors and variables, or of operations: a set."""
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
    """The operations that make the inputs of an operation: a list, in the order of the inputs."""
    return [tensor.op for tensor in op.inputs]


def inputs_of(op: tf.Operation) -> typing.List[tf.Operation]:
    """The operations that an operation waits for, by data and by control edges: a list."""
    return producers_of(op) + list(op.control_inputs)


def reached(starts: typing.Iterable, following: typing.Callable) -> dict:
    """All that is reached from some operations, or tensors, these included: `{name: operation}`.

    `following` is a function from one of them to those that are next to it.
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
    """The names of the sources, and of those operations that depend on any of them: a set.

    The operations are in any order: TF 1's `tf.cond` makes the operation that brings in a tensor
    from outside after the operation that takes it. `control` says whether control edges count:
    True, False, or a function of the operation that waits.
    """
    takers = collections.defaultdict(list)
    for op in operations:
        control_counts = control(op) if callable(control) else control
        if control_counts:
            sources_of_op = inputs_of(op)
        else:
            sources_of_op = producers_of(op)
        for other in sources_of_op:
            takers[other.name].append(op)
    return set(reached(sources, lambda op: takers.get(op.name, ())))


def ancestors(tensors: typing.Iterable, ends: typing.Container[str] = ()) -> typing.Set[str]:
    """The names of the operations that compute some tensors: a set.

    Args:
      tensors: what is computed.
      ends: types of operations whose inputs do not count.
    """
    def producers_before(op):
        return () if op.type in ends else producers_of(op)
    return set(reached([tensor.op for tensor in tensors], producers_before))


def step_operations(fetches: typing.Iterable,
                    ends: typing.Container[str] = ()) -> typing.List[tf.Operation]:
    """All operations that a run executes, by data and by control edges: a list in no order.

    Args:
      fetches: the tensors and operations that are run.
      ends: names of operations; what only these wait for does not count.
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
    """Whether an operation draws random numbers, hence differs from tower to tower."""
    return (op.type in _RANDOM or op.type.startswith(_RANDOM_PREFIXES)
            or op.type.endswith('CandidateSampler'))


def has_seed(node: tf.NodeDef) -> bool:
    """Whether a node draws random numbers by a seed of its own (0, 0 stands for none)."""
    if 'seed' not in node.attr or 'seed2' not in node.attr:
        return False
    return node.attr['seed'].i != 0 or node.attr['seed2'].i != 0


def is_control_flow(op: tf.Operation) -> bool:
    """Whether an operation is in, enters or leaves a loop or a branch of control flow v1."""
    return compat.in_control_flow(op) or op.type in CONTROL_FLOW


def seed_position(op: tf.Operation) -> typing.Optional[int]:
    """Which input of a stateless random operation is its seed; None for any other operation."""
    if not op.type.startswith('Stateless'):
        return None
    names = [argument.name for argument in op.op_def.input_arg]
    return names.index('seed') if 'seed' in names else None


def operation_named(graph: tf.Graph, name: str) -> typing.Optional[tf.Operation]:
    """The operation of that name, or None."""
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None


def behind(tensor: tf.Tensor, types: typing.Container[str]) -> tf.Tensor:
    """The tensor that a chain of operations of these types, each by its first input, hands on."""
    while tensor.op.type in types:
        tensor = tensor.op.inputs[0]
    return tensor


# ---- the same value ------------------------------------------------------------------------------

_READS = LEAD_IN | {'ReadVariableOp'}


def is_computed_from(tensors: typing.Iterable, term: tf.Tensor) -> bool:
    """Whether any of `tensors` is computed from `term`, or from a tensor that computes the same:
    Keras makes the loss of a weight anew each time that a program asks for a layer's losses."""
    names_behind = ancestors(tensors)
    if term.op.name in names_behind:
        return True
    for name in sorted(names_behind):
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
        one = behind(one, _READS)
        other = behind(other, _READS)
        names = (one.name, other.name)
        if one.name == other.name or names in compared:
            continue
        compared.add(names)
        if _is_source(one.op) or not _is_same_function(one, other):
            return False
        stack.extend(zip(one.op.inputs, other.op.inputs))
    return True


def _is_source(op: tf.Operation) -> bool:
    """Whether the result of an operation does not follow from its inputs and attributes alone."""
    if op.type in VARIABLE_OPS or op.op_def.is_stateful:
        return True
    return not op.inputs and op.type != 'Const'


def _is_same_function(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether two tensors are the same output of operations that compute the same of inputs."""
    return (one.op.type == other.op.type and one.value_index == other.value_index
            and len(one.op.inputs) == len(other.op.inputs)
            and _attributes(one.op) == _attributes(other.op))


def _attributes(op: tf.Operation) -> typing.Dict[str, tf.AttrValue]:
    """What a kernel knows of its operation, hence not what TensorFlow notes (`_class`)."""
    return {name: value for name, value in op.node_def.attr.items() if not name.startswith('_')}


# ---- nests of tensors, and the memory that they take ---------------------------------------------

def leaves_of(nest: typing.Any) -> list:
    """The tensors of a nest of inputs, those of sparse ones by themselves: a list."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def fetches_in(nest: typing.Any) -> list:
    """The tensors, variables and operations of a nest, without its numbers: a list."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True)
            if isinstance(getattr(leaf, 'op', leaf), tf.Operation)]


def map_leaves(function: typing.Callable, nest: typing.Any) -> typing.Any:
    """`tf.nest.map_structure` that takes sparse tensors apart, and variables not."""
    def on_leaf(leaf):
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
