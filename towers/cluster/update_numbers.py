"""The numbers that an update computes with, to be compared among workers that each make it.

A custom optimizer writes a weight by operations of any kind, such as `v.assign(v - rate * g)`; what
of it is a learning rate, nothing tells. So all constants count that stand between the gradients and
what the step writes, by variable and without an order: neither names of operations nor the order in
which they were made have to be the same.
"""

import collections
import zlib

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import functions_of
from towers.graph.variable_access import VARIABLE_OPS

_MOST_NUMBERS = 64  # of a constant whose numbers are compared one by one
_MOST_SAID = 5  # numbers in a message


def constants_of_updates(parts):
    """The constants of the update, where each worker makes it itself.

    Args:
      parts: what `parts_of_updates` returned.

    Returns:
      List of `[constants, names of variables]`, both sorted lists of strings. A text stands for a
      number. Empty where the chief makes the one update for all.
    """
    functions, by_constants = _Functions(), {}
    for name, operations in parts.items():
        constants = _constants(operations, functions)
        by_constants.setdefault(tuple(sorted(constants)), []).append(name)
    return [[list(constants), names] for constants, names in sorted(by_constants.items())]


def difference_of_constants(own, other):
    """How a worker's `constants_of_updates`, `other`, differ from worker 0's: a clause, or None."""
    ours, theirs = [{name: constants for constants, names in each for name in names}
                    for each in (own, other)]
    for name in sorted(set(ours) & set(theirs)):
        mine, yours = [collections.Counter(each[name]) for each in (ours, theirs)]
        if mine != yours:
            return ('its update of %r computes with %s, and that of worker 0 with %s' % (
                name, _few(yours - mine), _few(mine - yours)))
    return None


def _few(numbers):
    numbers = sorted(numbers.elements())
    return ', '.join(numbers[:_MOST_SAID] + ['…'] * (len(numbers) > _MOST_SAID)) or (
        'fewer numbers')


def _constants(operations, functions):
    """Texts of the constants among some operations, and in the functions that they call."""
    found = []
    for op in operations:
        if op.type == 'Const':
            found += _texts(op.get_attr('value'))
        elif op.type not in VARIABLE_OPS:
            found += functions.constants(op.node_def)
    return found


def _texts(constant):
    value = tf.make_ndarray(constant)
    if constant.dtype == tf.bfloat16.as_datatype_enum:
        value = value.astype('float32')
    if value.dtype.kind not in 'biuf':
        return []
    if value.size > _MOST_NUMBERS:
        return ['%d numbers (checksum %08x)' % (value.size, zlib.crc32(value.tobytes()))]
    return ['%.9g' % each for each in value.reshape(-1).tolist()]


class _Functions:
    """The functions of the default graph: bodies of branches and loops, say."""

    def __init__(self):
        self._graph, self._known = tf.get_default_graph(), None

    def constants(self, node):
        """Texts of the constants in the functions that a node calls, and in those they call."""
        stack, seen, found = [node], set(), []
        while stack:
            for name in functions_of(stack.pop()) - seen:
                seen.add(name)
                for inner in self._nodes(name):
                    if inner.op == 'Const':
                        found += _texts(inner.attr['value'].tensor)
                    else:
                        stack.append(inner)
        return found

    def _nodes(self, name):
        if self._known is None:
            self._known = {each.signature.name: each.node_def for each in
                           self._graph.as_graph_def().library.function}
        return self._known.get(name, ())
