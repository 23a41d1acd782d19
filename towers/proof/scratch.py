"""The scratch graph: the forward pass once more, for a batch of a large prime of examples.

TensorFlow's own shape inference then says where the examples are: a length that the prime divides
is theirs. The prime is the first one that divides no length and no integer constant of the forward
pass, so that no other length is taken for it. Lengths of the inputs that are not static, but for
that of the batch, are primes of their own, too. Nothing runs in this graph.
"""

import re
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.edit import Library
from towers.graph.graph_walk import leaves_of
from towers.graph.op_types import CONTROL_FLOW_V2, VARIABLE_OPS
from towers.graph.variable_access import read_from
from towers.proof.sizes import sizes_state
from towers.proof.states import (
    INDEPENDENT,
    TAKES_NO_OTHER_BATCH,
    Kind,
    Reason,
    Size,
    State,
    per_example,
    rows,
)

_FIRST_PRIME = 10007
# Lengths that are not static: each another prime; the same one for the same dimension of several
# inputs, or for all, since they may have to be equal; or none.
_LENGTHS = ('each', 'dimension', 'all', 'none')
_TO_LENGTHS = 3000  # no other length comes near that of the batch by a convolution or a slice
_MOST_DIMENSIONS = 16
_MOST_CUTS = 20  # operations that do not take a batch of another size


class Scratch(typing.NamedTuple):
    """The forward pass for a prime number of examples."""
    graph: tf.Graph
    examples: int  # the prime
    is_prime: bool  # False for the size that the program was built with
    given: typing.Dict[str, State]  # states of the tensors at which the forward pass begins
    cuts: typing.Dict[str, Reason]  # {name of an operation: why it does not take that batch}
    reads: typing.Dict[str, typing.List[str]]  # {tensor from outside: variables it is the value of}
    has_static_batch: bool  # whether the program's inputs have a static number of examples
    scalars: typing.List[str]  # placeholders of no known shape, which are taken for scalars


def make_scratch(operations: list, inputs: typing.Any,
                 examples: typing.Optional[int] = None) -> Scratch:
    """Imports operations of a forward pass, with the inputs of one more batch.

    Args:
      operations: list of `tf.Operation`s, all that the pass runs behind its inputs.
      inputs: nest of the tensors at which the batch enters.
      examples: how many examples the batch has; None for a prime.
    """
    prime = examples or _prime(operations)
    cuts: typing.Dict[str, Reason] = {}
    scalars = [op.name for op in operations
               if op.type == 'Placeholder' and op.outputs[0].shape.ndims is None]
    tries = list(_LENGTHS)
    while True:
        try:
            graph, given, reads = _imported(operations, inputs, prime, cuts, tries[0], scalars)
            has_static_batch = static_size(inputs) is not None
            return Scratch(graph, prime, examples is None, given, cuts, reads, has_static_batch,
                           scalars)
        except (ValueError, tf.errors.OpError) as error:
            if len(tries) > 1:
                del tries[0]
                continue
            if scalars:
                scalars = []
                continue
            if len(cuts) == len(operations):
                raise
            _cut(cuts, operations, str(error))


def _cut(cuts, operations, error):
    """Cuts the operation that an error of shape inference is about, or all where that is unknown or
    there are many."""
    name = _named_in(error, operations)
    is_found = name is not None and name not in cuts and len(cuts) < _MOST_CUTS
    for op in operations:
        if not is_found or op.name == name:
            cuts.setdefault(op.name, Reason(op.name, op.type, TAKES_NO_OTHER_BATCH))


def states_of_inputs(inputs: typing.Any) -> typing.Dict[str, State]:
    """{name of a tensor at which the batch enters: its state}."""
    return {leaf.name: _of_input(leaf, inputs, _FIRST_PRIME, _lengths('none', 1))[1]
            for leaf in leaves_of(inputs) if isinstance(leaf, tf.Tensor)}


def static_size(inputs: typing.Any) -> typing.Optional[int]:
    """The number of examples of a nest of tensors, where any of them says it; else None."""
    for leaf in tf.nest.flatten(inputs):
        shape = leaf.shape.as_list() if leaf is not None and leaf.shape.ndims else [None]
        if shape[0] is not None:
            return shape[0]
    return None


def _named_in(text, operations):
    """The name of the operation that an error of shape inference is about, or None."""
    names = {op.name for op in operations}
    found = re.findall(r"(?:for |node |Node: )['{]*(?:node )?([\w./>\\-]+)", text)
    return next((name for name in found if name in names), None)


def _prime(operations):
    """The first prime from `_FIRST_PRIME` on that divides no length and no integer constant."""
    numbers = set()
    for op in operations:
        for tensor in op.outputs:
            if tensor.shape.ndims:
                numbers.update(length for length in tensor.shape.as_list() if length)
        if op.type == 'Const' and op.outputs[0].dtype.is_integer:
            value = tf.get_static_value(op.outputs[0])
            if value is not None and value.size <= 64:
                numbers.update(abs(int(number)) for number in np.ravel(value) if number)
    large = [number for number in numbers if number >= _FIRST_PRIME]
    return next(prime for prime in _primes(_FIRST_PRIME)
                if all(number % prime for number in large))


def _primes(start):
    number = start
    while True:
        if all(number % divisor for divisor in range(2, int(number ** .5) + 1)):
            yield number
        number += 1


def _lengths(kind, prime):
    """A function of a dimension that gives its length, or None."""
    primes = _primes(prime + _TO_LENGTHS)
    if kind == 'none':
        return lambda dimension: None
    if kind == 'each':
        return lambda dimension: next(primes)
    first = [next(primes) for _ in range(_MOST_DIMENSIONS)]
    return lambda dimension: first[dimension if kind == 'dimension' else 0]


def _imported(operations, inputs, prime, cuts, kind_of_lengths, scalars):
    """`(graph, {name of a tensor: its state}, reads of Scratch)`."""
    leaves = {leaf.name: leaf for leaf in leaves_of(inputs)}
    inside = {op.name for op in operations if op.name not in cuts}
    part, outside = tf.GraphDef(), {}
    program = leaves_of(inputs)[0].graph
    part.versions.CopyFrom(program.graph_def_versions)
    for op in operations:
        if op.name in inside:
            _add_node(part, op, inside, leaves, outside)
    for node in part.node:
        if node.name in scalars:
            node.attr['shape'].shape.CopyFrom(tf.TensorShape([]).as_proto())
    functions = Library(program).reached_from(part.node)
    part.library.function.extend(functions.values())
    graph, given, reads = tf.Graph(), {}, {}
    lengths = _lengths(kind_of_lengths, prime)
    with graph.as_default():
        replaced = {}
        for key, tensor in outside.items():
            shape, state = tensor.shape, INDEPENDENT
            if tensor.name in leaves:
                shape, state = _of_input(tensor, inputs, prime, lengths)
            elif tensor.op.name in cuts:
                shape = tf.TensorShape(None)
                state = State(Kind.UNKNOWN, reason=cuts[tensor.op.name])
            stand_in = tf.placeholder(tensor.dtype.base_dtype, shape, key)
            replaced[key + ':0'] = stand_in
            given[stand_in.name] = state
            reads[stand_in.name] = [source.name for source in read_from(tensor)]
        tf.import_graph_def(part, input_map=replaced, name='')
    return graph, given, reads


def leave_out_shapes(node: tf.NodeDef) -> None:
    """Leaves the attributes of a node out that TensorFlow keeps for itself, and the shapes that
    loops and branches of control flow v2 had for the program's batch."""
    for name in [name for name in node.attr if name.startswith('_')]:
        del node.attr[name]
    if node.op in CONTROL_FLOW_V2 and 'output_shapes' in node.attr:
        del node.attr['output_shapes']


def _add_node(part, op, inside, leaves, outside):
    """Adds an operation, and the variables that it takes from outside, to a `GraphDef`."""
    node = part.node.add()
    node.CopyFrom(op.node_def)
    node.device = ''
    leave_out_shapes(node)
    del node.input[:]
    for tensor in op.inputs:
        source = tensor.op
        if source.type in VARIABLE_OPS and source.name not in inside:
            inside.add(source.name)
            _add_node(part, source, inside, leaves, outside)
        if source.name in inside and tensor.name not in leaves:
            node.input.append(tensor.name)
        else:
            key = 'from_' + re.sub(r'[^A-Za-z0-9_.]', '.', tensor.name)
            outside[key] = tensor
            node.input.append(key)


def _of_input(tensor, inputs, prime, lengths):
    """`(shape with a prime number of examples, state)` of a tensor at which the batch enters."""
    for leaf in tf.nest.flatten(inputs):
        if isinstance(leaf, tf.SparseTensor) and tensor.name in (
                leaf.indices.name, leaf.values.name, leaf.dense_shape.name):
            return _of_sparse_input(tensor, leaf, prime)
    shape = tensor.shape.as_list() if tensor.shape.ndims is not None else None
    if not shape:
        return tensor.shape, INDEPENDENT if shape == [] else State(
            Kind.UNKNOWN, reason=Reason(tensor.op.name, tensor.op.type, 'has no static rank'))
    shape = [lengths(dimension) if length is None else length
             for dimension, length in enumerate(shape)]
    return tf.TensorShape([prime] + shape[1:]), per_example(0)


def _of_sparse_input(tensor, leaf, prime):
    rows_of = leaf.values.name
    if tensor.name == leaf.values.name:
        return tensor.shape, rows(0, rows_of)
    if tensor.name == leaf.indices.name:
        return tensor.shape, State(Kind.PLACES, rows_of=rows_of)
    shape = leaf.shape.as_list() if leaf.shape.ndims is not None else [None]
    if None in shape[1:]:
        return tensor.shape, State(Kind.UNKNOWN, reason=Reason(
            tensor.op.name, tensor.op.type, 'is a shape that is not static'))
    return tensor.shape, sizes_state([Size(0, 1)] + [Size(length) for length in shape[1:]])
