"""What a worker is about to train, as a dict of JSON's types that is compared with worker 0's.

The program is described from the loss back to the inputs, variables and sources of data, and from
what the update writes back to the sums over the workers: a line for each operation with its type,
its inputs and its attributes. The first line that differs is named.

An operation's name, device and seeds do not count; nor do arrays and integers, which may be data or
a worker's number; nor what was made before the inputs. Where the static sizes of the inputs differ
among workers, types and inputs alone are compared; where a size is known to one worker alone,
TensorFlow itself makes other operations, and nothing is compared.
"""

import itertools
import re
import typing
import zlib

import tensorflow.compat.v1 as tf

from towers.cluster.machines import Machines, builds_of, number_of
from towers.gradients.gradient_pairs import tensors_of
from towers.graph.edit import Library
from towers.graph.graph_walk import names_of
from towers.graph.op_types import VARIABLE_OPS
from towers.model.objectives import flat

_REDUCED = ('Collective', 'Horovod')  # begin types of operations with equal results on all workers
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
    kind: str  # its type; 'variable'; or 'given', of what is not looked into
    inputs: str  # numbers of lines and outputs; of a variable its name
    attributes: str
    name: str


_NOTHING = _Line('nothing', 'nothing', 'nothing', 'nothing')


def signature(cluster: typing.Any, built: typing.Any,
              settings: typing.Optional[dict] = None) -> dict:
    """What has to be the same on all workers of a `cluster`, of all builds in the graph of `built`;
    `settings` as for `join`."""
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
            'builds': [_of_build(each, compares_programs) for each in builds]}


def _of_build(built: typing.Any, compares_programs: bool) -> dict:
    """What has to be the same of one build; of the operations if `compares_programs`."""
    machines = built.machines
    inputs = [tensor for tensor in
              tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
              if isinstance(tensor, tf.Tensor)]
    return {
        'values': {'number of towers': len(built.devices),
                   'reduction': built.plan.reduction,
                   'number of examples a step': machines.exchange.same_examples or 'not fixed',
                   'optimizer': built.plan.line('optimizer')},
        'variables': {variable.op.name: _type_and_shape(variable) for variable in built.variables},
        'gradients': _gradient_texts(machines),
        'state': {variable.op.name: 'sent' for variable in machines.state},
        'shapes': [_static_sizes(tensor) for tensor in inputs],
        'loss': _lines_of_loss(built, inputs) if compares_programs else [],
        'update': _lines_of_update(machines) if compares_programs else []}


def _type_and_shape(variable: tf.Variable) -> str:
    """The type and shape of a variable as a text."""
    return '%s %s' % (variable.dtype.base_dtype.name, variable.get_shape())


def _gradient_texts(machines: Machines) -> typing.Dict[str, str]:
    """The gradient of each variable as a text, with its position: those of several workers meet by
    their place in a message, or on a server."""
    texts = {}
    for position, (gradient, variable) in enumerate(machines.exchange.own):
        kind = 'dense'
        if isinstance(gradient, tf.IndexedSlices):
            kind = 'sparse'
            if machines.exchange.same_examples is not None:  # a ring sends a static number as it is
                kind += ' [%s rows]' % gradient.indices.shape.num_elements()
        texts[variable.op.name] = '%s %s, number %d' % (
            kind, gradient.dtype.base_dtype.name, position)
    return texts


def _static_sizes(tensor: tf.Tensor) -> typing.Optional[list]:
    """The shape of a tensor as a list, with None for a size that is not static; None for no
    shape."""
    return None if tensor.shape.ndims is None else tensor.shape.as_list()


def difference(own: dict, other: dict) -> typing.Optional[str]:
    """How a worker's signature `other` differs from worker 0's, `own`: a clause, or None."""
    found = (_other_entry(_VALUE_DIFFERS, own['values'], other['values'])
             or _other_entry(_VALUE_DIFFERS, own['settings'], other['settings']))
    if found:
        return found
    for position, (own_build, other_build) in enumerate(zip(own['builds'], other['builds'])):
        found = _other_build(own_build, other_build)
        if found:
            place = 'in build %d of the graph ' % position if len(own['builds']) > 1 else ''
            return place + found
    own_servers = own.get('servers', {})  # the chief may have more
    other_servers = other.get('servers', {})
    if not own_servers:
        return None
    in_both = {name: own_servers[name] for name in sorted(own_servers) if name in other_servers}
    return _other_entry(_SERVER_DIFFERS, in_both, other_servers)


def _other_build(own: dict, other: dict) -> typing.Optional[str]:
    """How a build of another worker differs from worker 0's, `own`: a clause, or None."""
    return (_other_entry(_VALUE_DIFFERS, own['values'], other['values'])
            or _other_entry(_VARIABLE_DIFFERS, own['variables'], other['variables'])
            or _other_entry(_GRADIENT_DIFFERS, own['gradients'], other['gradients'])
            or _other_operation('loss', own, other)
            or _other_entry(_STATE_DIFFERS, own['state'], other['state'])
            or _other_operation('update', own, other))


def _other_entry(text: str, own: dict, other: dict) -> typing.Optional[str]:
    """The text about the first entry of another worker's dict that is not that of worker 0's,
    `own`; or None."""
    for name in list(own) + list(other):
        if own.get(name) != other.get(name):
            return text % (name, other.get(name, 'missing'), own.get(name, 'missing'))
    return None


def _other_operation(section: str, own: dict, other: dict) -> typing.Optional[str]:
    """The text about the first operation of a section that is not that of worker 0's build, `own`;
    or None. With other sizes of the inputs, attributes do not count."""
    if not own[section] or not other[section]:
        return None
    if _known_sizes(own['shapes']) != _known_sizes(other['shapes']):
        return None
    num_compared = 3 if own['shapes'] == other['shapes'] else 2  # the first fields of a line
    pairs = itertools.zip_longest(own[section], other[section], fillvalue=_NOTHING)
    for own_line, other_line in pairs:
        if list(own_line[:num_compared]) != list(other_line[:num_compared]):
            return ('its program is another one: its %s is computed by %s, and that of worker 0 by '
                    '%s. Run one program with the same flags, which makes its operations in one '
                    "order, such as that of sorted(names); or give Cluster compare='variables'" % (
                        section, _line_text(other_line), _line_text(own_line)))
    return None


def _known_sizes(shapes: list) -> list:
    """Which sizes of each shape are static."""
    return [shape and [size is not None for size in shape] for shape in shapes]


def _line_text(line: typing.Sequence[str]) -> str:
    """A line of a signature for people."""
    kind, _, attributes, name = line
    return '%s %s (%s)' % (kind, attributes[:200] or 'of other inputs', name)


def _lines_of_loss(built: typing.Any, inputs: typing.List[tf.Tensor]) -> typing.List[_Line]:
    """The lines from the losses of a build back to its inputs."""
    losses = [loss.op for loss in flat(built.towers[0].data_loss) if loss is not None]
    input_names = {tensor.op.name for tensor in inputs}
    operations = losses[0].graph.get_operations()
    before = itertools.takewhile(lambda op: op.name not in input_names, operations)
    return _lines(losses, input_names, names_of(before), ())


def _lines_of_update(machines: Machines) -> typing.List[_Line]:
    """The lines from what the update writes back to the sums over the workers."""
    writes = []
    for _, operations in sorted(machines.written.items()):
        writes += sorted(operations, key=lambda op: op.name)
    sums = {tensor.op.name for tensor in tensors_of(machines.exchange.gradients)}
    return _lines(writes, sums, machines.model_operations, _REDUCED)


def _lines(ends: typing.List[tf.Operation], known: typing.Container[str],
           outside: typing.Container[str], reduced: typing.Tuple[str, ...]) -> typing.List[_Line]:
    """A line for each operation that the `ends` come from.

    Args:
      ends: operations.
      known: names of inputs, or of sums over the workers.
      outside: names of what was made before, and is not looked into but for constants.
      reduced: beginnings of the types of operations whose results are equal on all workers, which
        are not looked into; none where these are of values of the whole batch.
    """
    texts = _Texts(ends[0].graph)
    order: typing.List[tf.Operation] = []  # grows while it is gone through
    numbers: typing.Dict[str, int] = {}

    def number_of_line(op: tf.Operation) -> int:
        """The number of the operation's line; a new operation gets the next one."""
        if op.name not in numbers:
            numbers[op.name] = len(order)
            order.append(op)
        return numbers[op.name]

    def is_given(op: tf.Operation) -> bool:
        """Whether an operation is not looked into: data, sums over the workers, and the like."""
        if op.name in known or op.type.startswith(reduced):
            return True
        return op.type != 'Const' and (op.name in outside or bool(_SOURCE.search(op.type)))
    for op in ends:
        number_of_line(op)
    lines = []
    for op in order:
        if op.type in VARIABLE_OPS:
            lines.append(_Line('variable', op.name, '', op.name))
        elif is_given(op):
            lines.append(_Line('given', '', '', op.name))
        else:
            inputs = ['%d:%d' % (number_of_line(tensor.op), tensor.value_index)
                      for tensor in op.inputs]
            lines.append(_Line(op.type, ' '.join(inputs), texts.attributes(op.node_def), op.name))
    return lines


class _Texts:
    """The attributes of operations as texts, with a checksum of each function that they call."""

    def __init__(self, graph: tf.Graph):
        self._library = Library(graph)
        self._checksums: typing.Dict[str, int] = {}  # of functions, by name

    def attributes(self, node: tf.NodeDef) -> str:
        """The attributes of a `NodeDef` that count; of a constant its type, or its number."""
        if node.op == 'Const':
            return self._constant(node.attr['value'].tensor)
        texts = ['calls %08x' % self._checksum(name) for name in self._library.called_by(node)]
        for name, value in sorted(node.attr.items()):
            if self._counts(name, value):
                texts.append('%s=%s' % (name, self._value(name, value)))
        return ' '.join(texts)

    def _constant(self, constant: typing.Any) -> str:
        """The type of a `TensorProto`; of one floating number that, too."""
        dtype = tf.as_dtype(constant.dtype)
        if constant.tensor_shape.dim or not dtype.is_floating:
            return dtype.name
        return '%s %.9g' % (dtype.name, float(tf.make_ndarray(constant)))

    def _counts(self, name: str, value: tf.AttrValue) -> bool:
        """Whether an attribute has to be the same: no name of a function, and none of TensorFlow's
        own but for that of a custom gradient."""
        if name in _NOT_COMPARED or value.HasField('func') or value.list.func:
            return False
        return not name.startswith('_') or name == '_gradient_op_type'

    def _value(self, name: str, value: tf.AttrValue) -> str:
        """The value of an attribute as a text."""
        text = tf.as_dtype(value.type).name if value.type else str(value)
        if name == '_gradient_op_type':  # they are numbered in the order they are made
            text = re.sub(r'\d+', '', text)
        return re.sub(r'\s+', ' ', text).strip()

    def _checksum(self, name: str) -> int:
        """The checksum of a function's operations, whose inputs are numbered in the order they are
        made."""
        if name not in self._checksums:
            self._checksums[name] = 0  # of one that calls itself
            body = []
            for node in self._library.function(name).node_def:
                inputs = [re.sub(r'_\d+', '', each) for each in node.input if each[0] != '^']
                body.append((node.op, self.attributes(node), inputs))
            self._checksums[name] = zlib.crc32(repr(body).encode('utf-8'))
        return self._checksums[name]
