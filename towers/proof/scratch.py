"""The scratch graph: the forward pass once more, for a batch of a large prime of examples.

TensorFlow's own shape inference then says where the examples are: a length that the prime divides
is theirs. The prime is the first one that divides no length and no integer constant of the forward
pass, so that no other length is taken for it (`stand_ins`). Nothing runs in this graph.
"""

import re
import typing

import tensorflow.compat.v1 as tf

from towers.graph.edit import Library
from towers.graph.graph_walk import leaves_of
from towers.graph.op_types import CONTROL_FLOW_V2, VARIABLE_OPS
from towers.graph.variable_access import read_from
from towers.proof.stand_ins import (
    KINDS_OF_LENGTHS,
    Lengths,
    Readings,
    StandIn,
    lengths_of,
    prime_for,
    stand_in_of,
    static_size,
)
from towers.proof.states import INDEPENDENT, TAKES_NO_OTHER_BATCH, Kind, Reason, State

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


class _Attempt(typing.NamedTuple):
    """What an import takes for granted, which shape inference may contradict."""
    lengths: str  # one of `KINDS_OF_LENGTHS`
    scalars: typing.List[str]  # names of placeholders of no known shape that it takes for scalars


def make_scratch(operations: typing.List[tf.Operation], inputs: typing.Any,
                 examples: typing.Optional[int] = None,
                 readings: typing.Optional[Readings] = None) -> Scratch:
    """Imports operations of a forward pass, with the inputs of one more batch.

    Shape inference may refuse what an attempt takes for granted: two lengths that are not static
    may have to be equal. Then the next attempt takes less for granted. After the last one, the
    operations that it refuses are cut, one by one: they do not take a batch of another size.

    Args:
      operations: list of `tf.Operation`s, all that the pass runs behind its inputs.
      inputs: nest of the tensors at which the batch enters.
      examples: how many examples the batch has; None for a prime.
      readings: constants that are read as computed from the number of examples.
    """
    scalars = [op.name for op in operations
               if op.type == 'Placeholder' and op.outputs[0].shape.ndims is None]
    attempts = [_Attempt(lengths, scalars) for lengths in KINDS_OF_LENGTHS]
    if scalars:
        attempts.append(_Attempt('none', []))
    forward_pass = _ForwardPass(
        operations, inputs, examples or prime_for(operations), readings or {})
    cuts: typing.Dict[str, Reason] = {}
    attempt = attempts.pop(0)
    while True:
        try:
            scratch = forward_pass.imported(attempt, cuts)
        except (ValueError, tf.errors.OpError) as error:
            if attempts:
                attempt = attempts.pop(0)
            elif len(cuts) < len(operations):
                _cut(cuts, operations, str(error))
            else:
                raise
        else:
            return scratch._replace(is_prime=examples is None)


def _cut(cuts: typing.Dict[str, Reason], operations: typing.List[tf.Operation], error: str) -> None:
    """Cuts the operation that an error of shape inference is about, or all where that is unknown or
    there are many."""
    name = _named_in(error, operations)
    is_found = name is not None and name not in cuts and len(cuts) < _MOST_CUTS
    for op in operations:
        if not is_found or op.name == name:
            cuts.setdefault(op.name, Reason(op.name, op.type, TAKES_NO_OTHER_BATCH))


def _named_in(error: str, operations: typing.List[tf.Operation]) -> typing.Optional[str]:
    """The name of the operation that an error of shape inference is about, or None."""
    names = {op.name for op in operations}
    for name in re.findall(r"(?:for |node |Node: )['{]*(?:node )?([\w./>\\-]+)", error):
        if name in names:
            return name
    return None


class _ForwardPass:
    """The operations of a forward pass, to be imported into a scratch graph."""

    def __init__(self, operations: typing.List[tf.Operation], inputs: typing.Any, examples: int,
                 readings: Readings):
        """Args:
          operations: list of the operations.
          inputs: nest of the tensors at which the batch enters.
          examples: the number of examples in the scratch graph.
          readings: constants that are others for another batch.
        """
        self._readings = readings
        self._operations = operations
        self._inputs = inputs
        self._examples = examples
        leaves = leaves_of(inputs)
        self._program = leaves[0].graph
        self._leaves = {leaf.name for leaf in leaves}

    def imported(self, attempt: _Attempt, cuts: typing.Dict[str, Reason]) -> Scratch:
        """Imports the operations.

        Args:
          attempt: what is taken for granted.
          cuts: {name of an operation that is left out: why}.

        Raises:
          ValueError, tf.errors.OpError: shape inference refuses an operation.
        """
        given: typing.Dict[str, State] = {}
        names = {op.name for op in self._operations if op.name not in cuts}
        part = _Part(self._leaves, names)
        for op in self._operations:
            if op.name not in cuts:
                part.add(op)
        for node in part.graph_def.node:
            if node.name in attempt.scalars:
                node.attr['shape'].shape.CopyFrom(tf.TensorShape([]).as_proto())
            if node.op == 'TensorArrayV3':
                self._leave_out_lengths(node)
            if node.name in self._readings:
                read = self._readings[node.name]
                node.attr['value'].tensor.CopyFrom(read.of_batch(self._examples))
                given[node.name + ':0'] = read.state
        functions = Library(self._program).reached_from(part.graph_def.node)
        part.graph_def.library.function.extend(functions.values())
        part.graph_def.versions.CopyFrom(self._program.graph_def_versions)
        lengths = lengths_of(attempt.lengths, self._examples)
        input_map = {}
        reads = {}
        graph = tf.Graph()
        with graph.as_default():
            for key, tensor in part.outside.items():
                stand_in = self._stand_in(tensor, cuts, lengths)
                placeholder = tf.placeholder(tensor.dtype.base_dtype, stand_in.shape, key)
                input_map[key + ':0'] = placeholder
                given[placeholder.name] = stand_in.state
                reads[placeholder.name] = [source.name for source in read_from(tensor)]
            tf.import_graph_def(part.graph_def, input_map=input_map, name='')
        has_static_batch = static_size(self._inputs) is not None
        return Scratch(
            graph, self._examples, is_prime=True, given=given, cuts=cuts, reads=reads,
            has_static_batch=has_static_batch, scalars=attempt.scalars)

    def _leave_out_lengths(self, node: tf.NodeDef) -> None:
        """Leaves the lengths out of the shape of an array's elements that may be those of a static
        batch, such as 50 in [50, 8]."""
        size = static_size(self._inputs)
        for dimension in node.attr['element_shape'].shape.dim:
            if size is not None and dimension.size % size == 0:
                dimension.size = -1

    def _stand_in(self, tensor: tf.Tensor, cuts: typing.Dict[str, Reason],
                  lengths: Lengths) -> StandIn:
        """What stands for a tensor from outside of the imported operations: an input of the batch,
        the result of an operation that is cut, or what is the same on every tower."""
        if tensor.name in self._leaves:
            return stand_in_of(tensor, self._inputs, self._examples, lengths)
        if tensor.op.name in cuts:
            state = State(Kind.UNKNOWN, reason=cuts[tensor.op.name])
            return StandIn(tf.TensorShape(None), state)
        return StandIn(tensor.shape, INDEPENDENT)


class _Part:
    """A part of the program's graph: operations, and the tensors that they take from outside.

    Attributes:
      graph_def: `tf.GraphDef` with the operations; a tensor from outside has the name of a key.
      outside: {key: tensor of the program}.
    """

    def __init__(self, leaves: typing.Set[str], names: typing.Set[str]):
        """Args:
          leaves: names of the tensors at which the batch enters, which are outside.
          names: the names of the operations of the part.
        """
        self.graph_def = tf.GraphDef()
        self.outside: typing.Dict[str, tf.Tensor] = {}
        self._names = names
        self._leaves = leaves

    def add(self, op: tf.Operation) -> None:
        """Adds an operation, and the variables that it takes from outside."""
        node = self.graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.device = ''
        leave_out_shapes(node)
        del node.input[:]
        for tensor in op.inputs:
            source = tensor.op
            if source.type in VARIABLE_OPS and source.name not in self._names:
                self._names.add(source.name)
                self.add(source)
            if source.name in self._names and tensor.name not in self._leaves:
                node.input.append(tensor.name)
            else:
                key = 'from_' + re.sub(r'[^A-Za-z0-9_.]', '.', tensor.name)
                self.outside[key] = tensor
                node.input.append(key)


def leave_out_shapes(node: tf.NodeDef) -> None:
    """Leaves the attributes of a node out that TensorFlow keeps for itself, and the shapes that
    loops and branches of control flow v2 had for the program's batch."""
    for name in [name for name in node.attr if name.startswith('_')]:
        del node.attr[name]
    if node.op in CONTROL_FLOW_V2 and 'output_shapes' in node.attr:
        del node.attr['output_shapes']
