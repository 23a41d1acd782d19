"""The operations of a graph, and those in the body of a function, as `forward_digest` sees them.

What only passes a value on, or looks at it, is passed over: `source` gives what it hands on. The
seeds of random operations are left out, as are attributes that change no number.
"""

import collections
import itertools
import re

import tensorflow.compat.v1 as tf

from towers.graph.op_types import VARIABLE_OPS


HANDS_ON = frozenset([
    'Identity', 'IdentityN', 'Snapshot', 'CheckNumerics', 'CheckNumericsV2', 'Print', 'EnsureShape',
    'DebugIdentity', 'DebugIdentityV2', 'DebugIdentityV3', 'ReadVariableOp', 'PreventGradient',
    'RefIdentity'])
_SOURCE = re.compile('Iterator|Dequeue|Dataset|ReaderRead|ReadFile|^Placeholder|^Arg$|^_Arg$')
"""Types of operations that bring in data: what is before them does not count."""

_CALLS = {'StatelessIf': 'If', 'StatelessCase': 'Case', 'StatelessWhile': 'While',
          'StatefulPartitionedCall': 'PartitionedCall'}
"""Types that differ by whether a function has a state: it prints something, say."""

_BESIDE = {'If': 1, 'Case': 1}  # inputs that no function takes

_SEEDS = {'StatelessRandomGetKeyCounter': 0, 'StatelessRandomGetKeyCounterAlg': 0,
          'StatelessMultinomial': 2, 'StatelessSampleDistortedBoundingBox': 3}
"""Which input is the seed; of all other stateless operations input 1 is it, or the key made of it.
"""

_NO_NUMBERS = frozenset([
    'seed', 'seed2', 'shape', 'shapes', 'element_shape', 'output_shapes', 'Tshape', 'message',
    'shared_name', 'container', 'frame_name', 'parallel_iterations', 'is_constant', 'token',
    'tensor_array_name', 'use_cudnn_on_gpu', 'use_locking', 'validate_indices', 'validate_shape',
    'grad_a', 'grad_b', 'debug_name', 'allowed_devices', 'config', 'config_proto', 'executor_type',
    'is_stateless', 'dynamic_size', 'clear_after_read', 'identical_element_shapes', 'value',
    'infer_shape', 'Toutput_types'])
_FOR_GRADIENTS = frozenset(['OptionalFromValue', 'OptionalNone'])  # of branches
_OF_CALLS = frozenset(['T', 'Tin', 'Tout', 'Tcond'])  # as many as are handed on

Node = collections.namedtuple('Node', [
    'type', 'attributes', 'settings', 'inputs', 'functions', 'num_arguments', 'is_counted'])
"""An operation.

Fields:
  type: its type.
  attributes: list of texts of all that changes what it computes.
  settings: those of them that are no types of numbers.
  inputs: list of `(key, output)`.
  functions: list of names of functions that it calls.
  num_arguments: how many of its last inputs these take.
  is_counted: whether it counts as an operation of its type.
"""


def _leaf(kind, *attributes):
    return Node(kind, list(attributes), [], [], [], 0, False)


class _Nodes:
    """What the operations of a graph and of a function have in common."""

    def __init__(self, library):
        self._library = library
        self._numbers = {}  # keys of constants -> texts

    def number(self, key):
        """The value of a constant as a text, or None; after `node` or `source` gave the key."""
        if key not in self._numbers:
            self._numbers[key] = self._number(key)
        return self._numbers[key]

    def source(self, edge):
        """The `(key, output)` that an output has its value from."""
        seen = set()
        while edge not in seen:
            seen.add(edge)
            before = self._handed_on(edge)
            if before is None:
                break
            edge = before
        return edge

    def _node(self, node_def, inputs):
        kind = node_def.op
        functions = sorted(self._library.called_by(node_def), key=_places(node_def))
        if functions:
            kind = 'PartitionedCall' if kind in functions else _CALLS.get(kind, kind)
        if kind.startswith('Stateless'):
            seed = _SEEDS.get(kind, 1)
            inputs = inputs[:seed] + inputs[seed + 1:]
        attributes, settings = [], []
        for name in sorted(node_def.attr):
            if name in _NO_NUMBERS or functions and name in _OF_CALLS or (
                    name[0] == '_' and name != '_gradient_op_type'):
                continue
            text = _text(node_def.attr[name])
            if text is not None:
                attributes.append('%s=%s' % (name, text[0]))
                if text[1]:
                    settings.append(attributes[-1])
        arguments = len(inputs) - _BESIDE.get(kind, 0) if functions else 0
        return Node(kind, attributes, settings, inputs, functions, arguments, True)


def node_of(node_def, library):
    """The `Node` of a `NodeDef`, without its inputs."""
    return _Nodes(library)._node(node_def, [])


class GraphNodes(_Nodes):
    """The operations of a graph, by name.

    Attributes:
      captured: list of the tensors from outside of the tower that were met.
    """

    def __init__(self, graph, inputs, library):
        """
        Args:
          graph: `tf.Graph`.
          inputs: list of the tower's inputs.
          library: `Library` of the graph.
        """
        super(GraphNodes, self).__init__(library)
        self.captured = []
        self._inputs = {tensor.op.name for tensor in inputs}
        self._operations = {op.name: op for op in graph.get_operations()}
        # Made before the tower's inputs.
        self._outside = set(itertools.takewhile(lambda name: name not in self._inputs,
                                                self._operations))

    def node(self, key):
        """The `Node` of a key."""
        op = self._operations[key]
        if key in self._inputs:
            return _leaf('input')
        if op.type in VARIABLE_OPS:
            return _leaf('variable', key)
        outside = key in self._outside or _SOURCE.search(op.type)
        if op.type == 'Const' and (self.number(key) is not None or not outside):
            return _leaf('Const', op.outputs[0].dtype.name, self.number(key) or 'any')
        if outside:
            self.captured.extend(op.outputs)
            return _leaf('outside')
        return self._node(op.node_def, [(each.op.name, each.value_index) for each in op.inputs])

    def _number(self, key):
        op = self._operations[key]
        if op.type != 'Const':
            return None
        return _value(op.get_attr('value'))

    def _handed_on(self, edge):
        op = self._operations[edge[0]]
        if op.type not in HANDS_ON or edge[0] in self._inputs or not op.inputs:
            return None
        if op.type in ('Identity', 'IdentityN') and '_gradient_op_type' in op.node_def.attr:
            return None  # what the gradient is, is said by it
        before = op.inputs[edge[1] if op.type == 'IdentityN' else 0]
        return before.op.name, before.value_index


class FunctionNodes(_Nodes):
    """The operations in the body of a function, by name; arguments by their position.

    Attributes:
      ends: list of `(key, output)` of what it returns, but for arguments that it hands on, and for
        what it keeps for the backward pass.
      taken: set of the positions of arguments that were met.
    """

    def __init__(self, definition, library):
        """
        Args:
          definition: a `FunctionDef`.
          library: `Library` of the graph.
        """
        super(FunctionNodes, self).__init__(library)
        self.taken = set()
        self._nodes = {node.name: node for node in definition.node_def}
        self._arguments = {each.name: position for position, each in
                           enumerate(definition.signature.input_arg)}
        ends = [self.source(self._edge(definition.ret[each.name]))
                for each in definition.signature.output_arg]
        self.ends = [end for end in ends if end[0] not in self._arguments
                     and self._nodes[end[0]].op not in _FOR_GRADIENTS]

    def node(self, key):
        """The `Node` of a key."""
        if key in self._arguments:
            self.taken.add(self._arguments[key])
            return _leaf('argument')
        node = self._nodes[key]
        if node.op == 'Const':
            return _leaf('Const', tf.as_dtype(node.attr['dtype'].type).name,
                         self.number(key) or 'any')
        if _SOURCE.search(node.op):
            return _leaf('outside')
        return self._node(node, self._inputs_of(node))

    def _inputs_of(self, node):
        return [self._edge(text) for text in node.input if not text.startswith('^')]

    @staticmethod
    def _edge(text):
        key, _, output = text.partition(':')
        return key, output

    def _number(self, key):
        node = self._nodes.get(key)
        if node is None or node.op != 'Const':
            return None
        return _value(node.attr['value'].tensor)

    def _handed_on(self, edge):
        node = self._nodes.get(edge[0])
        if node is None or node.op not in HANDS_ON or '_gradient_op_type' in node.attr and (
                node.op in ('Identity', 'IdentityN')):
            return None
        inputs = self._inputs_of(node)
        return inputs[int(edge[1].rpartition(':')[2] or 0) if node.op == 'IdentityN' else 0]


def _places(node_def):
    """A function that sorts the names of a node's functions by the attributes they stand in."""
    places = {}
    for name in sorted(node_def.attr):
        value = node_def.attr[name]
        for each in [value.func] if value.WhichOneof('value') == 'func' else value.list.func:
            places.setdefault(each.name, len(places))
    return lambda name: places.get(name, -1)


def _value(constant):
    """The number of a scalar constant of a floating type, as a text; None of any other constant.

    What has an axis may be data, and an integer the number of a row or of a worker.
    """
    if constant.tensor_shape.dim or not tf.as_dtype(constant.dtype).is_floating:
        return None
    return '%.9g' % float(tf.make_ndarray(constant))


def _text(value):
    """`(text, whether it is no type of numbers)` of an attribute; None where it says nothing."""
    kind = value.WhichOneof('value')
    if kind == 'type':
        return tf.as_dtype(value.type).name, False
    if kind == 'f':
        return '%.9g' % value.f, True
    if kind == 'i':
        return '%d' % value.i, True
    if kind == 'b':
        return str(value.b), True
    if kind == 's':
        # Functions with a gradient of their own are numbered in the order in which they are made.
        return re.sub(r'\d+$', '', value.s.decode('utf-8', 'replace')), True
    if kind == 'list':
        each = value.list
        numbers = ['%d' % i for i in each.i] + ['%.9g' % f for f in each.f] + [
            str(b) for b in each.b] + [s.decode('utf-8', 'replace') for s in each.s]
        if numbers:
            return ','.join(numbers), True
        return ','.join(str(each) for each in each.type), False
    return None
