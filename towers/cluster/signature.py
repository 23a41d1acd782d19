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
import zlib

import tensorflow.compat.v1 as tf

from towers.cluster.machines import builds_of
from towers.graph.edit import Library
from towers.graph.op_types import VARIABLE_OPS
from towers.tower.gradient_pairs import tensors_of
from towers.tower.objectives import flat

_ADDED_UP = ('Collective', 'Horovod')  # begin types of operations with equal results on all workers
# Types of operations that bring in data, and attributes with names, seeds, sizes and settings.
_SOURCE = re.compile('Iterator|Dequeue|Dataset|ReaderRead|ReadFile|^Placeholder|^Arg$|^_Arg$')
_NO_NUMBERS = frozenset(
    'seed seed2 shape shapes element_shape output_shapes message shared_name container frame_name '
    'stack_name tensor_array_name token config config_proto'.split())


def signature(cluster, built, settings=None):
    """What has to be the same on all workers, of all builds in the graph of `built`; `settings` as
    for `join`."""
    builds = builds_of(built)
    return {
        'kind of cluster': cluster.kind, 'list of workers': list(cluster.workers),
        'list of parameter servers': list(cluster.ps), 'synchronous': cluster.synchronous,
        'wire': cluster.wire, 'buffer_mb': cluster.buffer_mb, 'every': cluster.every,
        'compare': cluster.compare,
        'TensorFlow': tf.version.VERSION,  # 1.15 and 2.21 do not understand each other's messages
        'number of builds with cluster=': len(builds),
        'build that is given to join': [
            each.machines is built.machines for each in builds].index(True),
        '_settings': dict(settings or {}), '_builds': [_of_build(cluster, each) for each in builds]}


def _of_build(cluster, built):
    machines = built.machines
    inputs = [each for each in tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
              if isinstance(each, tf.Tensor)]
    compares = cluster.num_workers > 1 and cluster.compare == 'program'
    return {
        'number of towers': len(built.devices), 'reduction': built.plan.reduction,
        'number of examples a step': machines.same_examples,
        'optimizer': built.plan.line('optimizer'),
        '_variables': [[variable.op.name, '%s %s' % (variable.dtype.base_dtype.name,
                                                     variable.get_shape())]
                       for variable in built.variables],
        # Those of several workers meet by their place in a message, or on a server.
        '_gradients': [[variable.op.name, '%s %s, number %d' % (
            'sparse' if isinstance(gradient, tf.IndexedSlices) else 'dense',
            gradient.dtype.base_dtype.name, place)]
                       for place, (gradient, variable) in enumerate(machines.own)],
        '_state': [[variable.op.name, 'sent'] for variable in machines.state],
        '_shapes': [None if each.shape.ndims is None else each.shape.as_list() for each in inputs],
        '_loss': _lines_of_loss(built, inputs) if compares else [],
        '_update': _lines_of_update(machines) if compares and machines.written else []}


def difference(own, other):
    """How a worker's signature `other` differs from worker 0's, `own`: a clause, or None."""
    why = _of_values(own, other) or _of_values(own['_settings'], other['_settings'])
    for number, (ours, theirs) in enumerate(zip(own['_builds'], other['_builds'])):
        found = None if why else _of_builds(ours, theirs)
        if found:
            why = ('in build %d of the graph ' % number if len(own['_builds']) > 1 else '') + found
    mine, theirs = own.get('servers', {}), other.get('servers', {})  # the chief may have more
    return why or _of_names(
        'it spreads other variables over the servers: %r is on number %s, and that of worker 0, '
        'which gives it its value, on %s. Make the same variables on all workers, or what one of '
        'them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES]',
        {name: mine[name] for name in sorted(mine) if name in theirs}, theirs if mine else {})


def _of_builds(own, other):
    return (_of_values(own, other)
            or _of_names('its model is another one: variable %r is %s, and that of worker 0 %s',
                         own['_variables'], other['_variables'])
            or _of_names('it trains other variables, or trains them otherwise: the gradient of %r '
                         'is %s, and that of worker 0 %s. Make the same loss on every worker, in '
                         'one order, such as that of sorted(names), with the same var_list',
                         own['_gradients'], other['_gradients'])
            or _of_lines('loss', own, other)
            or _of_names('its state that training reads is another one: %r is %s, and that of '
                         'worker 0 %s', own['_state'], other['_state'])
            or _of_lines('update', own, other))


def _of_values(own, other):
    for name in sorted(set(own) | set(other)):
        if name[0] != '_' and name != 'servers' and own.get(name) != other.get(name):
            here, there = ['not given' if value is None else ', '.join(map(str, value)) or 'empty'
                           if isinstance(value, list) else str(value)
                           for value in (other.get(name), own.get(name))]
            return 'its %s is %s, and that of worker 0 %s' % (name, here, there)
    return None


def _of_names(text, own, other):
    ours, theirs = dict(own), dict(other)
    for name in list(ours) + list(theirs):
        if ours.get(name) != theirs.get(name):
            return text % (name, theirs.get(name, 'missing'), ours.get(name, 'missing'))
    return None


def _of_lines(section, own, other):
    known = [[shape and [size is not None for size in shape] for shape in each['_shapes']]
             for each in (own, other)]
    ours, theirs = own['_' + section], other['_' + section]
    if not ours or not theirs or known[0] != known[1]:
        return None
    compared = 3 if own['_shapes'] == other['_shapes'] else 2
    for lines in itertools.zip_longest(theirs, ours, fillvalue=['nothing'] * 4):
        if lines[0][:compared] != lines[1][:compared]:
            return ('its program is another one: its %s is computed by %s, and that of worker 0 by '
                    '%s. Run one program with the same flags, which makes its operations in one '
                    "order, such as that of sorted(names); or give Cluster compare='variables'" % (
                        (section,) + tuple(
                            '%s %s (%s)' % (kind, attributes[:200] or 'of other inputs', name)
                            for kind, _, attributes, name in lines)))
    return None


def _lines_of_loss(built, inputs):
    losses = [each.op for each in flat(built.towers[0].data_loss) if each is not None]
    names = {each.op.name for each in inputs}
    before = itertools.takewhile(lambda op: op.name not in names, losses[0].graph.get_operations())
    return _lines_of(losses, names, {op.name for op in before})


def _lines_of_update(machines):
    ends = [op for _, writes in sorted(machines.written.items())
            for op in sorted(writes, key=lambda each: each.name)]
    return _lines_of(ends, {tensor.op.name for tensor in tensors_of(machines.gradients)},
                     machines.model)


def _lines_of(ends, known, outside):
    """List of `[type, inputs, attributes, name]` of all operations that the `ends` come from. By
    name, those `known` are inputs or sums over the workers, those `outside` were made before."""
    texts, lines, order, places = _Texts(ends[0].graph), [], [], {}

    def place(op):
        if op.name not in places:
            places[op.name] = len(order)
            order.append(op)
        return places[op.name]
    for op in ends:
        place(op)
    for op in order:  # which grows
        if op.type in VARIABLE_OPS:
            lines.append(['variable', op.name, '', op.name])
        elif op.name in known or op.type.startswith(_ADDED_UP) or op.type != 'Const' and (
                op.name in outside or _SOURCE.search(op.type)):
            lines.append(['given', '', '', op.name])
        else:
            inputs = ['%d:%d' % (place(each.op), each.value_index) for each in op.inputs]
            lines.append([op.type, ' '.join(inputs), texts.attributes(op.node_def), op.name])
    return lines


class _Texts:
    """The attributes of operations as texts, with a checksum of each function that they call."""

    def __init__(self, graph):
        self._library, self._bodies = Library(graph), {}

    def attributes(self, node):
        """The attributes of a `NodeDef` that count; of a constant its type, or its number."""
        if node.op == 'Const':
            constant = node.attr['value'].tensor
            kind = tf.as_dtype(constant.dtype)
            return kind.name if constant.tensor_shape.dim or not kind.is_floating else (
                '%s %.9g' % (kind.name, float(tf.make_ndarray(constant))))
        texts = ['calls %08x' % self._checksum(name) for name in self._library.called_by(node)]
        for name, value in sorted(node.attr.items()):
            if name in _NO_NUMBERS or value.HasField('func') or value.list.func or (
                    name[0] == '_' and name != '_gradient_op_type'):
                continue
            text = tf.as_dtype(value.type).name if value.type else str(value)
            if name[0] == '_':  # gradients of their own are numbered in the order they are made
                text = re.sub(r'\d+', '', text)
            texts.append('%s=%s' % (name, re.sub(r'\s+', ' ', text).strip()))
        return ' '.join(texts)

    def _checksum(self, name):
        """Of a function's operations, whose inputs are numbered in the order they are made."""
        if name not in self._bodies:
            self._bodies[name] = 0  # of one that calls itself
            body = [(node.op, self.attributes(node), [
                re.sub(r'_\d+', '', each) for each in node.input if each[0] != '^'])
                    for node in self._library.function(name).node_def]
            self._bodies[name] = zlib.crc32(repr(body).encode('utf-8'))
        return self._bodies[name]
