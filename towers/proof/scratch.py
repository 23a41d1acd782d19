"""The scratch graph: the forward pass once more, for a batch of a large prime of examples.

TensorFlow's own shape inference then says where the examples are: along the dimensions whose
lengths the prime divides. The prime is the first one that divides no length and no integer constant
of the forward pass, so that no other length is taken for it (`stand_ins`). Nothing runs in this
graph.

A placeholder stands for each tensor that the operations take from outside of the forward pass. For
an input of the batch, the placeholder has the prime as its first length.
"""

import re
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.edit import Library
from towers.graph.graph_walk import leaves_of, names_of
from towers.graph.op_types import CONTROL_FLOW_V2, VARIABLE_OPS
from towers.graph.variable_access import read_from
from towers.proof.stand_ins import (
    KINDS_OF_LENGTHS,
    Lengths,
    SizeConstants,
    StandIn,
    have_unknown_lengths,
    lengths_of,
    prime_for,
    stand_in_of,
    static_size,
)
from towers.proof.states import INDEPENDENT, TAKES_NO_OTHER_BATCH, Kind, Reason, State

_MOST_LEFT_OUT = 20
"""How many operations are left out one by one, each after one more import; then all are left
out."""

REFUSALS = (ValueError, tf.errors.OpError)
"""What an import raises where shape inference refuses an operation."""

_LeftOut = typing.Dict[str, Reason]
"""{name of an operation that is not imported: why it takes no batch of another size}"""


class Scratch(typing.NamedTuple):
    """The forward pass for a prime number of examples."""
    graph: tf.Graph
    # the prime; or the size that the program was built with
    examples: int
    # False for the size that the program was built with
    is_prime: bool
    # {name of a tensor of `graph` at which the forward pass begins: its state}
    initial_states: typing.Dict[str, State]
    # the operations of the program that `graph` lacks
    left_out: _LeftOut
    # {name of a placeholder for a tensor from outside: names of the variables whose value it is}
    variables_read: typing.Dict[str, typing.List[str]]
    # whether the program's inputs have a static number of examples
    has_static_batch: bool
    # whether primes stand for lengths of inputs, beside the number of examples
    has_stand_ins: bool
    # names of placeholders of no known shape, which are taken for scalars
    assumed_scalars: typing.List[str]
    # names of the operations to which the program gave a gradient of its own
    with_own_gradient: typing.AbstractSet[str]


class _Attempt(typing.NamedTuple):
    """What an import takes for granted, which shape inference may contradict."""
    kind_of_lengths: str  # what stands for lengths that are not static: of `KINDS_OF_LENGTHS`
    assumed_scalars: typing.List[str]  # names of placeholders of no known shape


def make_scratch(forward_pass: 'ForwardPass', examples: typing.Optional[int] = None,
                 size_constants: typing.Optional[SizeConstants] = None) -> Scratch:
    """Imports the operations of a forward pass, for a batch of another size, without the operations
    that shape inference refuses for this size.

    Args:
      forward_pass: `ForwardPass`.
      examples: how many examples the batch has; None for a prime.
      size_constants: the constants that are taken for multiples of the number of examples.
    """
    batch = _Batch(forward_pass, examples, size_constants or {})
    scratch = _imported_whole(batch)
    if scratch is not None:
        return scratch
    takes_least_for_granted = _attempts(forward_pass)[-1]
    return _imported_as_far_as_possible(batch, takes_least_for_granted)


def make_whole_scratch(forward_pass: 'ForwardPass') -> typing.Optional[Scratch]:
    """Imports all operations of a forward pass, for a prime number of examples; None where shape
    inference refuses any of them."""
    return _imported_whole(_Batch(forward_pass, examples=None, size_constants={}))


def _imported_whole(batch: '_Batch') -> typing.Optional[Scratch]:
    """Imports a forward pass for a batch; None where shape inference refuses any operation.

    Shape inference may refuse what an attempt takes for granted: two lengths that are not static
    may have to be equal, and get different primes. Then the next attempt takes less for granted.
    """
    for attempt in _attempts(batch.forward_pass):
        try:
            return batch.imported(attempt, left_out={})
        except REFUSALS:
            continue
    return None


def _attempts(forward_pass: 'ForwardPass') -> typing.List[_Attempt]:
    """The attempts to import a forward pass, in the order in which they take less for granted.

    Placeholders of no known shape are taken for scalars, such as a learning rate. The last attempt
    takes nothing for granted: neither this, nor primes for lengths that are not static.
    """
    assumed_scalars = []
    for op in graph_walk.of_types(forward_pass.operations, ['Placeholder']):
        if op.outputs[0].shape.ndims is None:
            assumed_scalars.append(op.name)
    if have_unknown_lengths(forward_pass.inputs):
        attempts = [_Attempt(kind, assumed_scalars) for kind in KINDS_OF_LENGTHS]
    else:
        attempts = [_Attempt('none', assumed_scalars)]  # there is no length to stand for
    if assumed_scalars:
        attempts.append(_Attempt('none', assumed_scalars=[]))
    return attempts


def _imported_as_far_as_possible(batch: '_Batch', attempt: _Attempt) -> Scratch:
    """Imports a forward pass for a batch without the operations that shape inference refuses.

    An import ends at the first operation that is refused: so there is one more import for each
    operation that is left out.
    """
    operations = batch.forward_pass.operations
    left_out: _LeftOut = {}
    while True:
        try:
            return batch.imported(attempt, left_out)
        except REFUSALS as error:
            nothing_is_left = len(left_out) == len(operations)
            if nothing_is_left:  # so this is no refusal of an operation
                raise
            _leave_out(_refused(str(error), operations, left_out), left_out)


def _refused(error: str, operations: typing.List[tf.Operation],
             left_out: _LeftOut) -> typing.List[tf.Operation]:
    """The operations to leave out after an error of shape inference: the operation that the error
    names; all, if the error names no operation that was imported, or if `_MOST_LEFT_OUT` operations
    were left out before."""
    name = _named_in(error, names_of(operations))
    if name is None or name in left_out or len(left_out) >= _MOST_LEFT_OUT:
        return operations
    return graph_walk.with_names(operations, [name])


def _leave_out(operations: typing.List[tf.Operation], left_out: _LeftOut) -> None:
    """Adds operations to the operations that are left out."""
    for op in operations:
        left_out.setdefault(op.name, Reason(op.name, op.type, TAKES_NO_OTHER_BATCH))


def _named_in(error: str, names: typing.Set[str]) -> typing.Optional[str]:
    """Which of some operations an error of shape inference is about; None if the error names none.

    TensorFlow writes `for 'a/MatMul' (op: 'MatMul')`, or `{{node a/MatMul}}`, depending on its
    version.
    """
    for name in re.findall(r"(?:for |node |Node: )['{]*(?:node )?([\w./>\\-]+)", error):
        if name in names:
            return name
    return None


class ForwardPass:
    """The operations of a forward pass, to be imported into scratch graphs. The pass of a static
    batch is imported into several: the prime, and the `GraphDef` of all operations, are the same
    for all of them, and are computed once.

    Attributes:
      operations: list of the operations: all that the pass runs behind its inputs.
      inputs: nest of the tensors at which the batch enters.
      input_names: the names of these tensors.
    """

    def __init__(self, operations: typing.List[tf.Operation], inputs: typing.Any):
        """The arguments are the attributes of these names."""
        leaves = leaves_of(inputs)
        self.operations = operations
        self.inputs = inputs
        self.input_names = names_of(leaves)
        self._program = leaves[0].graph
        self._prime: typing.Optional[int] = None
        self._whole_extract: typing.Optional[_Extract] = None

    @property
    def prime(self) -> int:
        """The prime number of examples: see `prime_for`."""
        if self._prime is None:
            self._prime = prime_for(self.operations)
        return self._prime

    def extract(self, left_out: _LeftOut) -> '_Extract':
        """The operations as a `GraphDef`, without the operations that are left out."""
        if left_out:
            return self._make_extract(left_out)
        if self._whole_extract is None:
            self._whole_extract = self._make_extract(left_out)
        return self._whole_extract

    def _make_extract(self, left_out: _LeftOut) -> '_Extract':
        """Makes what `extract` returns."""
        imported = graph_walk.without_names(self.operations, left_out)
        extract = _Extract(self.input_names, names_of(imported))
        for op in imported:
            extract.add(op)
        functions = Library(self._program).reached_from(extract.graph_def.node)
        extract.graph_def.library.function.extend(functions.values())
        extract.graph_def.versions.CopyFrom(self._program.graph_def_versions)
        return extract


class _Batch:
    """A forward pass for a batch of some size, to be imported into a scratch graph.

    Attributes:
      forward_pass: `ForwardPass`.
    """

    def __init__(self, forward_pass: ForwardPass, examples: typing.Optional[int],
                 size_constants: SizeConstants):
        """Args:
          forward_pass: `ForwardPass`.
          examples: the number of examples in the scratch graph; None for a prime.
          size_constants: the constants that are taken for multiples of the number of examples.
        """
        self.forward_pass = forward_pass
        self._is_prime = examples is None
        self._examples = examples or forward_pass.prime
        self._size_constants = size_constants

    def imported(self, attempt: _Attempt, left_out: _LeftOut) -> Scratch:
        """Imports the operations into a new graph.

        Args:
          attempt: what is taken for granted.
          left_out: the operations that are not imported.

        Raises:
          ValueError, tf.errors.OpError: shape inference refuses an operation.
        """
        extract = self.forward_pass.extract(left_out)
        graph_def = tf.GraphDef()
        graph_def.CopyFrom(extract.graph_def)  # another scratch graph may be made of the extract
        self._edit_nodes(graph_def, attempt)
        lengths = lengths_of(attempt.kind_of_lengths, self._examples)
        initial_states = self._states_of_size_constants(graph_def)
        variables_read: typing.Dict[str, typing.List[str]] = {}
        input_map = {}  # {name of an input from outside, in the `GraphDef`: its placeholder}
        graph = tf.Graph()
        with graph.as_default():
            for key, tensor in extract.outside.items():
                stand_in = self._stand_in(tensor, left_out, lengths)
                placeholder = tf.placeholder(tensor.dtype.base_dtype, stand_in.shape, name=key)
                input_map[key + ':0'] = placeholder
                initial_states[placeholder.name] = stand_in.state
                # The forward pass may take the value of a variable that was read before it.
                variables = read_from(tensor)
                variables_read[placeholder.name] = [variable.name for variable in variables]
            tf.import_graph_def(graph_def, input_map=input_map, name='')
        return Scratch(
            graph=graph, examples=self._examples, is_prime=self._is_prime,
            initial_states=initial_states, left_out=left_out, variables_read=variables_read,
            has_static_batch=static_size(self.forward_pass.inputs) is not None,
            has_stand_ins=attempt.kind_of_lengths != 'none',
            assumed_scalars=attempt.assumed_scalars, with_own_gradient=extract.with_own_gradient)

    def _edit_nodes(self, graph_def: tf.GraphDef, attempt: _Attempt) -> None:
        """Changes what nodes say of the size of the program's batch, or of shapes that are taken
        for granted, for the batch of the scratch graph."""
        for node in graph_def.node:
            if node.name in attempt.assumed_scalars:  # a placeholder
                node.attr['shape'].shape.CopyFrom(tf.TensorShape([]).as_proto())
            if node.op == 'TensorArrayV3':
                self._make_lengths_unknown(node)
            if node.name in self._size_constants:  # a `Const`
                value = self._size_constants[node.name].of_batch(self._examples)
                node.attr['value'].tensor.CopyFrom(value)

    def _make_lengths_unknown(self, node: tf.NodeDef) -> None:
        """In the element shape of a `TensorArray`, makes unknown each length that is a multiple of
        the static batch size, since the length may come from that size: with 50 examples, the 50 of
        [50, 8], and the 150 of [150, 4] after a reshape."""
        batch_size = static_size(self.forward_pass.inputs)
        if batch_size is None:
            return
        for dimension in node.attr['element_shape'].shape.dim:
            if dimension.size % batch_size == 0:
                dimension.size = -1  # TensorFlow's sign for a length that is not known

    def _states_of_size_constants(self, graph_def: tf.GraphDef) -> typing.Dict[str, State]:
        """{name of a tensor: its state} of the constants that are taken for multiples of the number
        of examples, as far as they are in a `GraphDef`."""
        states = {}
        for node in graph_def.node:
            if node.name in self._size_constants:
                states[node.name + ':0'] = self._size_constants[node.name].state
        return states

    def _stand_in(self, tensor: tf.Tensor, left_out: _LeftOut, lengths: Lengths) -> StandIn:
        """What stands for a tensor from outside of the imported operations.

        Args:
          tensor: an input of the batch, the result of an operation that is left out, or a tensor
            that is the same on every tower.
          left_out: the operations that are not imported.
          lengths: what stands for lengths that are not static.
        """
        if tensor.name in self.forward_pass.input_names:
            return stand_in_of(tensor, self.forward_pass.inputs, self._examples, lengths)
        if tensor.op.name in left_out:
            state = State(Kind.UNKNOWN, reason=left_out[tensor.op.name])
            return StandIn(tf.TensorShape(None), state)
        return StandIn(tensor.shape, INDEPENDENT)


class _Extract:
    """Operations of the program's graph, and the tensors that they take from outside.

    Attributes:
      graph_def: `tf.GraphDef` with the operations; their inputs from outside have keys as names.
      outside: {key: tensor of the program}.
      with_own_gradient: names of the operations to which the program gave a gradient of its own.
    """

    def __init__(self, input_names: typing.Set[str], names: typing.Set[str]):
        """Args:
          input_names: names of the tensors at which the batch enters; they are outside, even where
            the operation that computes them is to be added.
          names: the names of the operations that are to be added.
        """
        self.graph_def = tf.GraphDef()
        self.outside: typing.Dict[str, tf.Tensor] = {}
        self.with_own_gradient: typing.Set[str] = set()
        self._names = names
        self._input_names = input_names

    def add(self, op: tf.Operation) -> None:
        """Adds an operation, and the variables that it takes from outside.

        Its device is left out, since nothing runs; so are the operations that it waits for.
        """
        node = self.graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.device = ''
        # Both `tf.custom_gradient` and `gradient_override_map` set this attribute.
        if '_gradient_op_type' in node.attr:
            self.with_own_gradient.add(op.name)
        leave_out_shapes(node)
        del node.input[:]
        for tensor in op.inputs:
            self._add_variable(tensor.op)
            node.input.append(self._input_name(tensor))

    def _add_variable(self, source: tf.Operation) -> None:
        """Adds the operation that computes an input, if it is a variable, so that shape inference
        knows the variable's shape at its reads."""
        if source.type in VARIABLE_OPS and source.name not in self._names:
            self._names.add(source.name)
            self.add(source)

    def _input_name(self, tensor: tf.Tensor) -> str:
        """What a node calls an input: the tensor's name; for a tensor from outside, a key."""
        if tensor.op.name in self._names and tensor.name not in self._input_names:
            return tensor.name
        key = 'from_' + re.sub(r'[^A-Za-z0-9_.]', '.', tensor.name)
        self.outside[key] = tensor
        return key


def leave_out_shapes(node: tf.NodeDef) -> None:
    """Leaves out what a node says of the shapes of its results, which are for the program's batch.

    TensorFlow keeps the shapes in `_output_shapes`, and in `output_shapes` of loops and branches of
    control flow v2. All attributes whose names begin with `_`, TensorFlow's own, are removed, and
    not `_output_shapes` alone: `_class` may name operations that are not imported, and TensorFlow
    would refuse the import.
    """
    for name in [name for name in node.attr if name.startswith('_')]:
        del node.attr[name]
    if node.op in CONTROL_FLOW_V2 and 'output_shapes' in node.attr:
        del node.attr['output_shapes']
