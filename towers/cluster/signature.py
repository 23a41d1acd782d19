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
_NOT_COMPARED = frozenset(
    'seed seed2 shape shapes element_shape output_shapes message shared_name container frame_name '
    'stack_name tensor_array_name token config config_proto'.split())
_VALUE = 'its %s is %s, and that of worker 0 %s'


def signature(cluster, built, settings=None):
    """What has to be the same on all workers, of all builds in the graph of `built`; `settings` as
    for `join`."""
    builds = builds_of(built)
    return {
        'values': {
            'kind of cluster': cluster.kind,
            'list of workers': ', '.join(map(str, cluster.workers)),
            'list of parameter servers': ', '.join(cluster.ps), 'synchronous': cluster.synchronous,
            'wire': cluster.wire, 'buffer_mb': cluster.buffer_mb, 'every': cluster.every,
            'compare': cluster.compare,
            'TensorFlow': tf.version.VERSION,  # 1.15 and 2.21 do not understand each other
            'number of builds with cluster=': len(builds),
            'build that is given to join': [
                each.machines is built.machines for each in builds].index(True)},
        'settings': dict(settings or {}), 'builds': [_of_build(cluster, each) for each in builds]}


def _of_build(cluster, built):
    machines = built.machines
    inputs = [each for each in tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
              if isinstance(each, tf.Tensor)]
    compares = cluster.num_workers > 1 and cluster.compare == 'program'
    return {
        'values': {'number of towers': len(built.devices), 'reduction': built.plan.reduction,
                   'number of examples a step': machines.same_examples or 'not fixed',
                   'optimizer': built.plan.line('optimizer')},
        'variables': {variable.op.name: '%s %s' % (variable.dtype.base_dtype.name,
                                                   variable.get_shape())
                      for variable in built.variables},
        # Those of several workers meet by their place in a message, or on a server.
        'gradients': {variable.op.name: '%s %s, number %d' % (
            'sparse' if isinstance(gradient, tf.IndexedSlices) else 'dense',
            gradient.dtype.base_dtype.name, place)
                      for place, (gradient, variable) in enumerate(machines.own)},
        'state': {variable.op.name: 'sent' for variable in machines.state},
        'shapes': [None if each.shape.ndims is None else each.shape.as_list() for each in inputs],
        'loss': _lines_of_loss(built, inputs) if compares else [],
        'update': _lines_of_update(machines) if compares else []}


def difference(own, other):
    """How a worker's signature `other` differs from worker 0's, `own`: a clause, or None."""
    why = (_other_entry(_VALUE, own['values'], other['values'])
           or _other_entry(_VALUE, own['settings'], other['settings']))
    for number, (ours, theirs) in enumerate(zip(own['builds'], other['builds'])):
        found = None if why else _other_build(ours, theirs)
        if found:
            why = ('in build %d of the graph ' % number if len(own['builds']) > 1 else '') + found
    mine, theirs = own.get('servers', {}), other.get('servers', {})  # the chief may have more
    return why or _other_entry(
        'it spreads other variables over the servers: %r is on number %s, and that of worker 0, '
        'which gives it its value, on %s. Make the same variables on all workers, or what one of '
        'them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES]',
        {name: mine[name] for name in sorted(mine) if name in theirs}, theirs if mine else {})


def _other_build(own, other):
    return (_other_entry(_VALUE, own['values'], other['values'])
            or _other_entry('its model is another one: variable %r is %s, and that of worker 0 %s',
                            own['variables'], other['variables'])
            or _other_entry('it trains other variables, or trains them otherwise: the gradient of '
                            '%r is %s, and that of worker 0 %s. Make the same loss on every '
                            'worker, in one order, such as that of sorted(names), with the same '
                            'var_list', own['gradients'], other['gradients'])
            or _other_operation('loss', own, other)
            or _other_entry('its state that training reads is another one: %r is %s, and that of '
                            'worker 0 %s', own['state'], other['state'])
            or _other_operation('update', own, other))


def _other_entry(text, own, other):
    for name in list(own) + list(other):
        if own.get(name) != other.get(name):
            return text % (name, other.get(name, 'missing'), own.get(name, 'missing'))
    return None


def _other_operation(section, own, other):
    known = [[shape and [size is not None for size in shape] for shape in each['shapes']]
             for each in (own, other)]
    ours, theirs = own[section], other[section]
    if not ours or not theirs or known[0] != known[1]:
        return None
    compared = 3 if own['shapes'] == other['shapes'] else 2
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
            if name in _NOT_COMPARED or value.HasField('func') or value.list.func or (
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
