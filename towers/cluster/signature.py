"""What a worker is about to train, as a dict of JSON's types that is compared with worker 0's.

The program is described from the loss back to the inputs, variables and sources of data, and from
what the update writes back to the sums over the workers: a line for each operation with its type,
its inputs and its attributes. The first line that differs is named.

An operation's name, device and seeds do not count; nor do arrays and integers, which may be data or
a worker's number; nor do operations that were made before the inputs. Where the static sizes of the
inputs differ among workers, only types and inputs of operations are compared. Where a size is
static on one worker alone, TensorFlow itself makes other operations, and no operation is compared.
"""

import itertools
import re
import typing
import zlib

import tensorflow.compat.v1 as tf

from towers.cluster.machines import Machines, builds_of, number_of
from towers.gradients.gradient_pairs import tensors_of
from towers.graph.edit import Library
from towers.graph.graph_walk import names_of, operation_names
from towers.graph.op_types import VARIABLE_OPS
from towers.model.objectives import flat

_REDUCED = ('Collective', 'Horovod')
"""Beginnings of the types of operations that have the same results on all workers."""

# Types of operations that bring in data, and attributes with names, seeds, sizes and settings.
_SOURCE = re.compile('Iterator|Dequeue|Dataset|ReaderRead|ReadFile|^Placeholder|^Arg$|^_Arg$')
_NOT_COMPARED = frozenset(
    'seed seed2 shape shapes element_shape output_shapes message shared_name container frame_name '
    'stack_name tensor_array_name token config config_proto'.split())

# Texts about an entry that differs: its name, this worker's value, and worker 0's.
_VALUE_DIFFERS = 'its %s is %s, and that of worker 0 %s'
_VARIABLE_DIFFERS = 'its model is another one: variable %r is %s, and that of worker 0 %s'
_GRADIENT_DIFFERS = (
    'it trains other variables, or trains them otherwise: the gradient of %r is %s, and that of '
    'worker 0 %s. Make the same loss on every worker, in one order, such as that of '
    'sorted(names), with the same var_list')
_STATE_DIFFERS = ('its state that training reads is another one: %r is %s, and that of worker 0 %s')
_SERVER_DIFFERS = (
    'it spreads other variables over the servers: %r is on number %s, and that of worker 0, '
    'which gives it its value, on %s. Make the same variables on all workers, or what one of '
    'them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES]')


class _Line(typing.NamedTuple):
    """One operation of a program. It goes through JSON, and comes back as a list."""
    kind: str  # the type of the operation; 'variable'; or 'given', where the walk stops
    inputs: str  # '<number of a line>:<output>' of each input; the name of a variable
    attributes: str
    name: str  # for people; it is not compared


_NOTHING = _Line('nothing', 'nothing', 'nothing', 'nothing')  # in the place of a missing line
_NUM_COMPARED = 3  # the first fields of a line, all but the name
_NUM_COMPARED_OF_OTHER_SIZES = 2  # without the attributes, which have sizes in them


def signature(cluster: typing.Any, built: typing.Any,
              settings: typing.Optional[dict] = None) -> dict:
    """What has to be the same on all workers of a cluster: the settings, and all builds in the
    graph of the build `built`.

    Args:
      cluster: the `Cluster`.
      built: the `BuiltTowers` that is given to `join`.
      settings: {name: value} of what else the program says has to be the same, the argument of
        `join`; or None.
    """
    builds = builds_of(built)
    values = {
        'kind of cluster': cluster.kind,
        'list of workers': ', '.join(map(str, cluster.workers)),
        'list of parameter servers': ', '.join(cluster.ps),
        'synchronous': cluster.synchronous,
        'wire': cluster.wire,
        'buffer_mb': cluster.buffer_mb,
        'every': cluster.every,
        'compare': cluster.compare,
        'TensorFlow': tf.version.VERSION,  # 1.15 and 2.21 do not understand each other
        'number of builds with cluster=': len(builds),
        'build that is given to join': number_of(built)}
    compares_programs = cluster.num_workers > 1 and cluster.compare == 'program'
    return {'values': values, 'settings': dict(settings or {}),
            'builds': [_signature_of_build(each, compares_programs) for each in builds]}


def _signature_of_build(built: typing.Any, compares_programs: bool) -> dict:
    """What has to be the same on all workers in one build. If `compares_programs`, this includes
    the operations by which the loss and the update are computed."""
    leaves = tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
    inputs = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    loss = []
    update = []
    if compares_programs:
        loss = _lines_of_loss(built, inputs)
        update = _lines_of_update(built.machines)
    return {
        'values': _values_of_build(built),
        'variables': {variable.op.name: _type_and_shape(variable) for variable in built.variables},
        'gradients': _gradient_texts(built.machines),
        # Only the names count.
        'state': {variable.op.name: 'sent' for variable in built.machines.state},
        'shapes': [_static_sizes(tensor) for tensor in inputs],
        'loss': loss,
        'update': update}


def _values_of_build(built: typing.Any) -> dict:
    """{what it is: a number or word of a build that has to be the same on all workers}."""
    return {'number of towers': len(built.devices),
            'reduction': built.plan.reduction,
            'number of examples a step': built.machines.exchange.same_examples or 'not fixed',
            'optimizer': built.plan.line('optimizer')}


def _type_and_shape(variable: tf.Variable) -> str:
    """The type and shape of a variable as a text."""
    return '%s %s' % (variable.dtype.base_dtype.name, variable.get_shape())


def _gradient_texts(machines: Machines) -> typing.Dict[str, str]:
    """The gradient of each variable as a text, such as `'dense float32, number 3'`. The text has
    the gradient's number, since workers add up the gradients that are at the same place of their
    messages."""
    texts = {}
    have_equal_batches = machines.exchange.same_examples is not None
    for position, (gradient, variable) in enumerate(machines.exchange.own):
        kind = 'dense'
        if isinstance(gradient, tf.IndexedSlices):
            kind = 'sparse'
            if have_equal_batches:  # a ring sends a static number of rows in a message of that size
                kind += ' [%s rows]' % gradient.indices.shape.num_elements()
        texts[variable.op.name] = '%s %s, number %d' % (
            kind, gradient.dtype.base_dtype.name, position)
    return texts


def _static_sizes(tensor: tf.Tensor) -> typing.Optional[list]:
    """The shape of a tensor as a list, with None for a size that is not static; None for a shape of
    unknown rank."""
    return None if tensor.shape.ndims is None else tensor.shape.as_list()


# ---- the difference between two signatures -------------------------------------------------------

def difference(first: dict, other: dict) -> typing.Optional[str]:
    """How a worker's signature differs from worker 0's.

    Args:
      first: the signature of worker 0.
      other: the signature of the other worker.

    Returns:
      A clause about the other worker; None if they are the same.
    """
    found = (_different_entry(_VALUE_DIFFERS, first['values'], other['values'])
             or _different_entry(_VALUE_DIFFERS, first['settings'], other['settings']))
    if found:
        return found
    # Both have as many builds: their number is one of the values.
    for position, (first_build, other_build) in enumerate(zip(first['builds'], other['builds'])):
        found = _difference_of_builds(first_build, other_build)
        if found:
            place = 'in build %d of the graph ' % position if len(first['builds']) > 1 else ''
            return place + found
    return _difference_of_servers(first.get('servers', {}), other.get('servers', {}))


def _difference_of_builds(first: dict, other: dict) -> typing.Optional[str]:
    """How a build of another worker differs from worker 0's, the `first`: a clause, or None."""
    return (_different_entry(_VALUE_DIFFERS, first['values'], other['values'])
            or _different_entry(_VARIABLE_DIFFERS, first['variables'], other['variables'])
            or _different_entry(_GRADIENT_DIFFERS, first['gradients'], other['gradients'])
            or _different_operation('loss', first, other)
            or _different_entry(_STATE_DIFFERS, first['state'], other['state'])
            or _different_operation('update', first, other))


def _difference_of_servers(first: typing.Dict[str, int],
                           other: typing.Dict[str, int]) -> typing.Optional[str]:
    """How another worker spreads variables over the servers otherwise than worker 0, the `first`: a
    clause, or None. Only the chief may have more variables, for its evaluation say."""
    has_servers = bool(first)
    if not has_servers:
        return None
    # The chief's own variables are left out. A variable that the other worker alone has is a
    # difference: the chief gives the variables their values, and would give this variable none.
    in_both = {name: first[name] for name in sorted(first) if name in other}
    return _different_entry(_SERVER_DIFFERS, in_both, other)


def _different_entry(text: str, first: dict, other: dict) -> typing.Optional[str]:
    """The text about the first entry in which another worker's dict differs from worker 0's dict,
    the `first`; None if there is no such entry."""
    for name in list(first) + list(other):
        if first.get(name) != other.get(name):
            return text % (name, other.get(name, 'missing'), first.get(name, 'missing'))
    return None


def _different_operation(section: str, first: dict, other: dict) -> typing.Optional[str]:
    """The text about the first operation in which another worker's build differs from worker 0's;
    None if there is no such operation, or if the operations are not compared.

    Args:
      section: of the build: `'loss'` or `'update'`.
      first: the build of worker 0.
      other: the build of the other worker.
    """
    compares_programs = first[section] and other[section]  # else [], as with compare='variables'
    if not compares_programs:
        return None
    # Where a size is static, TensorFlow makes fewer operations, for gradients say. So the lists of
    # operations of one program differ, if a size is static on one worker alone.
    have_same_static_sizes = _known_sizes(first['shapes']) == _known_sizes(other['shapes'])
    if not have_same_static_sizes:
        return None
    num_compared = _NUM_COMPARED
    if first['shapes'] != other['shapes']:  # as batches of uneven workers do
        num_compared = _NUM_COMPARED_OF_OTHER_SIZES
    pairs = itertools.zip_longest(first[section], other[section], fillvalue=_NOTHING)
    for first_line, other_line in pairs:
        # A line of worker 0's comes through JSON as a list.
        if list(first_line[:num_compared]) != list(other_line[:num_compared]):
            return ('its program is another one: its %s is computed by %s, and that of worker 0 by '
                    '%s. Run one program with the same flags, which makes its operations in one '
                    "order, such as that of sorted(names); or give Cluster compare='variables'" % (
                        section, _line_text(other_line), _line_text(first_line)))
    return None


def _known_sizes(shapes: list) -> list:
    """Which sizes of each shape are static: a list of bools; None for a shape of unknown rank."""
    known: list = []
    for shape in shapes:
        if shape is None:
            known.append(None)
        else:
            known.append([size is not None for size in shape])
    return known


def _line_text(line: typing.Sequence[str]) -> str:
    """A line that differs, for people. If it has no attributes, its inputs differ."""
    kind, _, attributes, name = line
    return '%s %s (%s)' % (kind, attributes[:200] or 'of other inputs', name)


# ---- the lines of a program ----------------------------------------------------------------------

def _lines_of_loss(built: typing.Any, inputs: typing.List[tf.Tensor]) -> typing.List[_Line]:
    """The lines from the losses of a build back to its `inputs`."""
    losses = [loss.op for loss in flat(built.towers[0].data_loss)]
    input_names = operation_names(inputs)
    operations = losses[0].graph.get_operations()
    # Operations made before the inputs may belong to the reading of this worker's data.
    made_before = itertools.takewhile(lambda op: op.name not in input_names, operations)
    # `reduced=()`: the walk goes on through sums over the workers, such as the sums of a batch norm
    # in sync: the model computes their summands.
    return _Program(losses, known=input_names, outside=names_of(made_before), reduced=()).lines()


def _lines_of_update(machines: Machines) -> typing.List[_Line]:
    """The lines from what the update writes back to the sums over the workers."""
    writes = []
    for _, operations in sorted(machines.written.items()):
        writes += sorted(operations, key=lambda op: op.name)
    gradient_names = operation_names(tensors_of(machines.exchange.gradients))
    # The walk stops at the model: a loss that an update takes is compared by `_lines_of_loss`.
    return _Program(writes, known=gradient_names, outside=machines.model_operations,
                    reduced=_REDUCED).lines()


class _Program:
    """The operations that some operations are computed from, each with a number. A walk through the
    graph finds them, from each operation to its inputs."""

    def __init__(self, starts: typing.List[tf.Operation], known: typing.Container[str],
                 outside: typing.Container[str], reduced: typing.Tuple[str, ...]):
        """
        Args:
          starts: the operations where the walk begins.
          known: names of operations at which the walk stops: the inputs, or the gradients over all
            workers.
          outside: names of further operations at which the walk stops: the operations made before
            the inputs, or the model's operations. Constants among these are compared even so.
          reduced: beginnings of the types of operations at which the walk stops, since they have
            the same results on all workers; () for none.
        """
        self._known = known
        self._outside = outside
        self._reduced = reduced
        self._texts = _Texts(starts[0].graph)
        self._order: typing.List[tf.Operation] = []  # grows while `lines` goes through it
        self._numbers: typing.Dict[str, int] = {}  # of the operations, by name
        for op in starts:
            self._number_of(op)

    def lines(self) -> typing.List[_Line]:
        """A line for each operation; the number of an operation is the index of its line."""
        lines = []
        for op in self._order:
            lines.append(self._line(op))
        return lines

    def _number_of(self, op: tf.Operation) -> int:
        """The number of an operation's line; a new operation gets the next number."""
        if op.name not in self._numbers:
            self._numbers[op.name] = len(self._order)
            self._order.append(op)
        return self._numbers[op.name]

    def _line(self, op: tf.Operation) -> _Line:
        """The line of an operation. Its inputs get numbers here, and by that lines, too."""
        if op.type in VARIABLE_OPS:  # variables are compared by their names
            return _Line(kind='variable', inputs=op.name, attributes='', name=op.name)
        if self._stops_at(op):
            return _Line(kind='given', inputs='', attributes='', name=op.name)
        inputs = []
        for tensor in op.inputs:
            inputs.append('%d:%d' % (self._number_of(tensor.op), tensor.value_index))
        return _Line(kind=op.type, inputs=' '.join(inputs),
                     attributes=self._texts.attributes(op.node_def), name=op.name)

    def _stops_at(self, op: tf.Operation) -> bool:
        """Whether the walk stops at an operation: at data, sums over the workers, and the like."""
        if op.name in self._known or op.type.startswith(self._reduced):
            return True
        if op.type == 'Const':  # it has no inputs; its value is compared, wherever it was made
            return False
        return op.name in self._outside or bool(_SOURCE.search(op.type))


class _Texts:
    """The attributes of operations as texts, with a checksum of each function that they call."""

    def __init__(self, graph: tf.Graph):
        self._library = Library(graph)
        self._checksums: typing.Dict[str, int] = {}  # of functions, by name

    def attributes(self, node: tf.NodeDef) -> str:
        """The attributes of a `NodeDef` that are compared, and a checksum of each function that it
        calls; for a constant the text of `_constant`."""
        if node.op == 'Const':
            return self._constant(node.attr['value'].tensor)
        texts = ['calls %08x' % self._checksum(name) for name in self._library.called_by(node)]
        for name, value in sorted(node.attr.items()):
            if self._is_compared(name, value):
                texts.append('%s=%s' % (name, self._value(name, value)))
        return ' '.join(texts)

    def _constant(self, constant: typing.Any) -> str:
        """The type of a constant, a `TensorProto`; for a single floating number also the number.
        The numbers of an array, or an integer, are left out: they may be data."""
        dtype = tf.as_dtype(constant.dtype)
        if constant.tensor_shape.dim or not dtype.is_floating:
            return dtype.name
        return '%s %.9g' % (dtype.name, float(tf.make_ndarray(constant)))

    def _is_compared(self, name: str, value: tf.AttrValue) -> bool:
        """Whether an attribute is compared. The names of functions are not: TensorFlow gives them
        numbers. Nor are TensorFlow's own attributes, which begin with `_`, but for the name of a
        custom gradient."""
        if name in _NOT_COMPARED or value.HasField('func') or value.list.func:
            return False
        return not name.startswith('_') or name == '_gradient_op_type'

    def _value(self, name: str, value: tf.AttrValue) -> str:
        """The value of an attribute as a text."""
        text = tf.as_dtype(value.type).name if value.type else str(value)
        if name == '_gradient_op_type':  # the name of a custom gradient, with a number
            text = re.sub(r'\d+', '', text)
        return re.sub(r'\s+', ' ', text).strip()

    def _checksum(self, name: str) -> int:
        """The checksum of the operations of a function."""
        if name not in self._checksums:
            self._checksums[name] = 0  # for a call of the function within its own body
            body = []
            for node in self._library.function(name).node_def:
                body.append((node.op, self.attributes(node), self._inputs(node)))
            self._checksums[name] = zlib.crc32(repr(body).encode('utf-8'))
        return self._checksums[name]

    def _inputs(self, node: tf.NodeDef) -> typing.List[str]:
        """The inputs of a node of a function, without the numbers that TensorFlow gives them in the
        order of making: `'add_3:z:0'` becomes `'add:z:0'`. Control edges, such as `'^add_3'`, are
        left out."""
        tensors = [each for each in node.input if not each.startswith('^')]
        return [re.sub(r'_\d+', '', each) for each in tensors]
