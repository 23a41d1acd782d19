"""What the losses and the update of a worker are computed by, to be compared with worker 0's.

Workers with the same variables add up their gradients whatever losses these are of. So the program
is described from the losses back to the inputs, the variables and the sources of data, and from
what the update writes back to the sums over the workers: a line for each operation, with its type,
attributes and inputs. The first line that differs is named.

An operation's name, its device and its seeds do not count; nor does what only hands a value on or
looks at it. Of constants in a loss single numbers of a floating type count: arrays and integers
may be data, or a worker's number. Nor does what was made before the towers, such as a pipeline.

Constants and attributes may follow the shapes of the inputs. Where those differ among workers, the
operations alone are compared; where a dimension is known to one worker alone, TensorFlow itself
makes other operations, and nothing is.
"""

import collections
import itertools
import re
import zlib

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import step_operations
from towers.graph.library import Library
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_writes import Writes
from towers.tower.objectives import flat, tensors_of

ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers: counts, say."""

_HANDS_ON = frozenset([
    'Identity', 'IdentityN', 'Snapshot', 'CheckNumerics', 'CheckNumericsV2', 'Print', 'EnsureShape',
    'ReadVariableOp', 'PreventGradient', 'RefIdentity'])
_SOURCE = re.compile('Iterator|Dequeue|Dataset|ReaderRead|ReadFile|^Placeholder|^Arg$|^_Arg$')
"""Types of operations that bring in data: what is before them does not count."""

_NO_NUMBERS = frozenset([
    'seed', 'seed2', 'shape', 'shapes', 'element_shape', 'output_shapes', 'Tshape', 'message',
    'shared_name', 'container', 'frame_name', 'parallel_iterations', 'token', 'tensor_array_name',
    'use_cudnn_on_gpu', 'use_locking', 'validate_indices', 'validate_shape', 'grad_a', 'grad_b',
    'debug_name', 'allowed_devices', 'config', 'config_proto', 'executor_type', 'value', 'dtype'])
_MOST_NUMBERS = 64  # of a constant whose numbers are said
_LONGEST = 200  # characters of an operation


def signature_of_loss(built):
    """What is to be compared of the losses, a dict of JSON's types; see `difference_of_signatures`.

    Args:
      built: `BuiltTowers`.

    Returns:
      Dict: `shapes`, of the first tower's inputs and of what else it takes from outside; `lines`,
      dict from `'loss'` to a list of `[type, inputs, attributes, name]`.
    """
    tower = built.towers[0]
    losses = [each for each in flat(tower.data_loss) if each is not None]
    inputs = [tensor for tensor in tf.nest.flatten(tower.inputs, expand_composites=True)
              if isinstance(tensor, tf.Tensor)]
    names = {tensor.op.name for tensor in inputs}
    operations = [op.name for op in losses[0].graph.get_operations()]
    lines = _Lines(losses[0].graph, names, set(
        itertools.takewhile(lambda name: name not in names, operations)))
    found = lines.of(_LOSS, losses)
    return {'shapes': [_shape(tensor) for tensor in inputs + lines.captured],
            'lines': {_LOSS: found}}


def signature_of_update(update, before, combined):
    """What is to be compared of an update that each worker makes; see `difference_of_signatures`.

    Args:
      update: the operation that updates the weights.
      before: list of the tensors and operations of the model that the optimizer waits for.
      combined: list of `(gradient, variable)`: the sums over the workers, before
        `transform_gradients`.

    Returns:
      Dict as of `signature_of_loss`, with lines by variable, of those that it writes.
    """
    models = {op.name for op in step_operations(before)}
    trained = {variable.op.name for _, variable in combined}
    known = trained | {variable.op.name for variable in tf.global_variables()}
    writes, writing = Writes(tf.get_default_graph()), {}
    for op in step_operations([update]):
        for name in writes.of(op) if op.name not in models else ():
            if name in known:
                writing.setdefault(name, []).append(op)
    sums = tensors_of(combined)
    lines = _Lines(tf.get_default_graph(), {tensor.op.name for tensor in sums}, models, True)
    # What several variables share stands at the first of them; trained ones, which all workers
    # have, come first.
    names = sorted(writing, key=lambda name: (name not in trained, name))
    return {'shapes': [[size is not None for size in _shape(tensor) or ()] for tensor in sums],
            'lines': {name: lines.of(name, writing[name]) for name in names}}


def difference_of_signatures(own, other):
    """How a worker's signature, `other`, differs from worker 0's, `own`: a clause, or None."""
    if not own or not other or _known(own) != _known(other):
        return None
    compared = 3 if own['shapes'] == other['shapes'] else 2
    for label in sorted(set(own['lines']) & set(other['lines'])):
        for ours, theirs in itertools.zip_longest(own['lines'][label], other['lines'][label],
                                                  fillvalue=['nothing', '', '', '']):
            if ours[:compared] != theirs[:compared]:
                here, there = _in_words(theirs), _in_words(ours)
                return (_OF_LOSS if label == _LOSS else _OF_UPDATE % str(label)) % (
                    here, there + ' of other inputs' * (here == there))
    return None


_LOSS = 'loss'
_OF_LOSS = ('its model is another one: its loss is computed by %s, and that of worker 0 by %s. '
            'Have every worker make the same operations in the same order, such as that of '
            'sorted(names), and not that of a set')
_OF_UPDATE = ('its update of %r is computed by %%s, and that of worker 0 by %%s. Give the same '
              'optimizer, learning rate and transform_gradients on every worker')


def _in_words(line):
    kind, _, attributes, name = line
    return ' '.join([kind] + [attributes] * bool(attributes))[:_LONGEST] + (
        ' (%r)' % str(name) if name else '')


def _known(signature):
    return [shape and [bool(size) for size in shape] for shape in signature['shapes']]


def _shape(tensor):
    shape = tensor.get_shape()
    return None if shape.ndims is None else shape.as_list()


class _Lines:
    """Describes the operations of a graph, each once.

    Attributes:
      captured: list of the tensors from outside that were met.
    """

    def __init__(self, graph, ends, outside, is_update=False):
        """
        Args:
          graph: `tf.Graph`.
          ends: names of operations that are not looked into: inputs, or sums over the workers.
          outside: names of the operations that were made before what is described.
          is_update: whether all constants count.
        """
        self.captured = []
        self._ends, self._outside, self._is_update = ends, outside, is_update
        self._places = {}  # names of operations -> where their lines are
        self._library = Library(graph)
        self._texts = {}  # names of functions -> texts of their bodies

    def of(self, label, ends):
        """List of `[type, inputs, attributes, name]` of what operations or tensors come from."""
        lines, queue = [], collections.deque()

        def place(op):
            if op.name not in self._places:
                self._places[op.name] = '%s %d' % (label if self._is_update else '', len(seen))
                seen.append(op)
                queue.append(op)
            return self._places[op.name]
        seen = []
        for end in ends:
            place(self._source(end)[0] if isinstance(end, tf.Tensor) else end)
        while queue:
            op = queue.popleft()
            (kind, attributes), is_leaf = self._said(op)
            taken = [self._source(tensor) for tensor in ([] if is_leaf else op.inputs)]
            inputs = ' '.join('%s:%d' % (place(source), output) for source, output in taken)
            lines.append([kind, op.name if kind == 'variable' else inputs, attributes, op.name])
        return lines

    def _source(self, tensor):
        """`(operation, output)` that a tensor has its value from."""
        seen = set()
        while tensor.op.type in _HANDS_ON and tensor.op.name not in seen and not (
                tensor.op.name in self._ends or not tensor.op.inputs):
            if tensor.op.type.startswith('Identity') and (
                    '_gradient_op_type' in tensor.op.node_def.attr):
                break  # what the gradient is, is said by it
            seen.add(tensor.op.name)
            tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == 'IdentityN' else 0]
        return tensor.op, tensor.value_index

    def _said(self, op):
        """`((type, attributes), whether that is all)`."""
        if op.name in self._ends or op.type.startswith(ADDED_UP):
            return ('given', ''), True
        if op.type in VARIABLE_OPS:
            return ('variable', ''), True
        if op.type == 'Const':
            self.captured.extend(op.outputs if op.name in self._outside else ())
            return ('Const', self._constant(op.get_attr('value'))), True
        if op.name in self._outside or not self._is_update and _SOURCE.search(op.type):
            self.captured.extend(op.outputs)
            return ('given', ''), True
        return self._node(op.node_def), False

    def _node(self, node):
        """`(type, attributes)` of a `NodeDef`."""
        called = self._library.called_by(node)
        texts = []
        for name in sorted(node.attr):
            if name not in _NO_NUMBERS and (name[0] != '_' or name == '_gradient_op_type'):
                texts.append('%s=%s' % (name, self._attribute(node.attr[name])))
        texts += ['calls ' + self._body(node.op)] if node.op in called else []
        return 'call' if node.op in called else node.op, ' '.join(texts)

    def _attribute(self, value):
        kind = value.WhichOneof('value')
        if kind == 'func':
            return self._body(value.func.name)
        if kind == 'list' and value.list.func:
            return ','.join(self._body(each.name) for each in value.list.func)
        if kind == 'type':
            return tf.as_dtype(value.type).name
        if kind in ('b', 'i', 'f'):
            return '%.9g' % value.f if kind == 'f' else str(getattr(value, kind))
        if kind == 's':  # functions with a gradient are numbered in the order they are made
            return re.sub(r'\d+$', '', value.s.decode('utf-8', 'replace'))
        return re.sub(r'\s+', ' ', str(value)).strip()

    def _body(self, name):
        """A checksum of a function's operations."""
        definition = self._library.function(name)
        if definition is None or name in self._texts:
            return self._texts.get(name, 'unknown')
        self._texts[name] = 'itself'  # of one that calls itself
        places = {each.name: 'argument %d' % number for number, each in
                  enumerate(definition.signature.input_arg)}
        places.update((node.name, str(number)) for number, node in enumerate(definition.node_def))
        texts = []
        for node in definition.node_def:
            text = ('Const', self._constant(node.attr['value'].tensor)
                    ) if node.op == 'Const' else self._node(node)
            texts.append(' '.join(text + tuple(
                places.get(each.partition(':')[0], '') + each.partition(':')[2]
                for each in node.input if each[0] != '^')))
        self._texts[name] = '%08x' % zlib.crc32('\n'.join(texts).encode('utf-8'))
        return self._texts[name]

    def _constant(self, constant):
        """The number, or numbers, of a constant where they count, as a text; else its type."""
        kind = tf.as_dtype(constant.dtype)
        if not (self._is_update and (kind.is_floating or kind.is_integer or kind.is_bool)) and (
                constant.tensor_shape.dim or not kind.is_floating):
            return kind.name
        value = tf.make_ndarray(constant).astype('float64')
        if value.size > _MOST_NUMBERS:
            return '%s of %d numbers, checksum %08x' % (
                kind.name, value.size, zlib.crc32(value.tobytes()))
        return '%s %s' % (kind.name, ', '.join('%.9g' % each for each in value.reshape(-1)))
