"""What an update is computed by, to be compared among workers that each make it.

By variable: the types of the operations between the sums of the gradients and what the step writes,
their attributes (`use_nesterov`), and the constants that they take (a learning rate, the decay of a
moment). Neither names nor an order count. What only passes a value on, or looks at it, does not
count, nor what the forward pass computes, see `forward_digest`.
"""

import collections
import zlib

import tensorflow.compat.v1 as tf

from towers.cluster.forward_nodes import HANDS_ON, node_of
from towers.graph.graph_walk import step_operations
from towers.graph.library import Library
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_writes import Writes
from towers.tower.objectives import tensors_of

ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers: counts, say."""

_MOST_SAID = 4  # operations in a message
_MOST_NUMBERS = 64  # of a constant whose numbers are compared one by one
_LONGEST = 100  # characters of an operation
_NO_OPERATION = frozenset(['Const', 'Arg', '_Arg', 'NoOp']) | HANDS_ON | VARIABLE_OPS


def update_digest(update, before, combined):
    """What is to be compared of an update, a dict of JSON's types; see `difference_of_updates`.

    Args:
      update: the operation that updates the weights.
      before: list of the tensors and operations of the model that the optimizer waits for.
      combined: list of `(gradient, variable)`: the sums over the workers, before
        `transform_gradients`.

    Returns:
      Dict: `operations`, list of `[[[text, how often], …], names of variables]`; `shapes`, a text
      that differs where TensorFlow may make other operations, since it knows other dimensions of
      the gradients.
    """
    models = {op.name for op in step_operations(before)}
    trained = {variable.op.name for _, variable in combined}
    known = trained | {variable.op.name for variable in tf.global_variables()}
    writes, writing = Writes(tf.get_default_graph()), {}
    for op in step_operations([update]):
        for name in writes.of(op) if op.name not in models else ():
            if name in known:
                writing.setdefault(name, []).append(op)
    # What several variables share counts for the first of them; trained ones come first.
    texts, by_texts = _Texts(models | {tensor.op.name for tensor in tensors_of(combined)}), {}
    for name in sorted(writing, key=lambda name: (name not in trained, name)):
        counted = texts.of(writing[name])
        by_texts.setdefault(tuple(sorted(counted.items())), []).append(name)
    shapes = sorted('%s %s' % (variable.op.name, [_known(tensor) for tensor in tensors_of(
        [(gradient, None)])]) for gradient, variable in combined)
    return {'operations': [[[list(each) for each in counted], names]
                           for counted, names in sorted(by_texts.items())],
            'shapes': '%08x' % zlib.crc32('\n'.join(shapes).encode('utf-8'))}


def difference_of_updates(own, other):
    """How a worker's `update_digest`, `other`, differs from worker 0's: a clause, or None."""
    if not own or not other or own['shapes'] != other['shapes']:
        return None
    ours, theirs = [{name: dict(counted) for counted, names in each['operations']
                     for name in names} for each in (own, other)]
    for name in sorted(set(ours) & set(theirs)):
        mine, yours = [collections.Counter(each[name]) for each in (ours, theirs)]
        if mine != yours:
            return ('its update of %r is computed by %s, and that of worker 0 by %s. Give the same '
                    'optimizer, learning rate and transform_gradients on every worker' % (
                        name, _few(yours - mine), _few(mine - yours)))
    return None


def _few(counter):
    texts = ['%d %s' % (count, text) for text, count in sorted(counter.items())]
    return ', '.join(texts[:_MOST_SAID] + ['…'] * (len(texts) > _MOST_SAID)) or 'fewer operations'


def _known(tensor):
    shape = tensor.get_shape()
    return None if shape.ndims is None else [size is not None for size in shape.as_list()]


class _Texts:
    """Says operations in words, each once."""

    def __init__(self, ends):
        """
        Args:
          ends: names of operations that are not looked at, nor what they are computed from.
        """
        self._seen, self._functions = set(ends), {}
        self._library = Library(tf.get_default_graph())

    def of(self, operations):
        """`Counter` of the texts of some operations, and of those that they are computed from."""
        found, stack = collections.Counter(), list(operations)
        while stack:
            op = stack.pop()
            if op.name in self._seen or op.type.startswith(ADDED_UP):
                continue
            self._seen.add(op.name)
            # `tf.Print` returns its first input, and shows the others.
            inputs = [each.op for each in (op.inputs[:1] if op.type == 'Print' else op.inputs)]
            self._count(op.node_def, [each.get_attr('value') for each in inputs
                                      if each.type == 'Const'], found)
            stack.extend(inputs)
        return found

    def _count(self, node_def, constants, found):
        node = node_of(node_def, self._library)
        if node.type not in _NO_OPERATION:
            found[' '.join([node.type] + node.settings)[:_LONGEST]] += 1
        found.update('%s with %s' % (node.type, number)
                     for constant in constants for number in _numbers(constant))
        for name in node.functions:
            found.update(self._of_function(name))

    def _of_function(self, name):
        """`Counter` of the texts of the operations in a function, such as a branch."""
        if name not in self._functions:
            self._functions[name] = found = collections.Counter()  # of one that calls itself
            nodes = {node.name: node for node in self._library.function(name).node_def}
            for node in nodes.values():
                inputs = [nodes.get(text.split(':')[0]) for text in node.input]
                self._count(node, [each.attr['value'].tensor for each in inputs
                                   if each is not None and each.op == 'Const'], found)
        return self._functions[name]


def _numbers(constant):
    """The numbers of a constant, as texts."""
    value = tf.make_ndarray(constant)
    if constant.dtype == tf.bfloat16.as_datatype_enum:
        value = value.astype('float32')
    if value.dtype.kind not in 'biuf':
        return []
    if value.size > _MOST_NUMBERS:
        return ['%d numbers (checksum %08x)' % (value.size, zlib.crc32(value.tobytes()))]
    return ['%.9g' % each for each in value.reshape(-1).tolist()]
