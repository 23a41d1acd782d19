"""The operations that an update is made by, to be compared among workers that each make it.

By variable their types count, and the attributes that change a number (`use_nesterov`), without an
order: neither names of operations nor the order in which they were made have to be the same. What
only hands a value on, or looks at it, does not count.
"""

import collections
import re
import zlib

import tensorflow.compat.v1 as tf

from towers.cluster.forward_nodes import HANDS_ON, Library, node_of
from towers.graph.variable_access import VARIABLE_OPS
from towers.tower.objectives import tensors_of

_MOST_SAID = 4  # operations in a message
_LONGEST = 100  # characters of an operation
_WRITES = re.compile('Assign|Apply|Scatter|Update')  # of a function, beside what it returns
_NONE = frozenset(['Const', 'Arg', '_Arg', 'NoOp']) | HANDS_ON | VARIABLE_OPS


def operations_of_updates(built, parts):
    """The operations of the update, where each worker makes it itself.

    Args:
      built: `BuiltTowers`.
      parts: what `parts_of_updates` returned.

    Returns:
      Dict of JSON's types: `operations`, list of `[[[operation, how often], …], names of
      variables]`; `shapes`, a text that differs where TensorFlow may make other operations, since
      it knows other dimensions of the gradients.
    """
    if not parts:
        return {}
    functions, by_operations = _Functions(), {}
    for name, operations in parts.items():
        counter = collections.Counter()
        for op in operations:
            functions.count(op.node_def, counter)
        by_operations.setdefault(tuple(sorted(counter.items())), []).append(name)
    shapes = sorted(
        '%s %s' % (variable.op.name, [_known(tensor) for tensor in tensors_of([(each, None)])])
        for each, variable in built.machines.combined)
    return {'operations': [[[list(each) for each in counted], names]
                           for counted, names in sorted(by_operations.items())],
            'shapes': '%08x' % (zlib.crc32('\n'.join(shapes).encode('utf-8')) & 0xffffffff)}


def difference_of_operations(own, other):
    """How a worker's `operations_of_updates`, `other`, differ from worker 0's: a clause, or None.
    """
    if not own or not other or own['shapes'] != other['shapes']:
        return None
    ours, theirs = [{name: dict(counted) for counted, names in each['operations']
                     for name in names} for each in (own, other)]
    for name in sorted(set(ours) & set(theirs)):
        mine, yours = [collections.Counter(each[name]) for each in (ours, theirs)]
        if mine != yours:
            return ('its update of %r is made by %s, and that of worker 0 by %s. Give the same '
                    'optimizer and transform_gradients on every worker' % (
                        name, _few(yours - mine), _few(mine - yours)))
    return None


def _few(counter):
    texts = ['%d %s' % (count, text) for text, count in sorted(counter.items())]
    return ', '.join(texts[:_MOST_SAID] + ['…'] * (len(texts) > _MOST_SAID)) or 'fewer operations'


def _known(tensor):
    shape = tensor.get_shape()
    return None if shape.ndims is None else [size is not None for size in shape.as_list()]


class _Functions:
    """The functions of the default graph: bodies of branches and loops, say."""

    def __init__(self):
        self._library, self._known = Library(tf.get_default_graph()), {}

    def count(self, node_def, counter):
        """Adds a node, and those in the functions that it calls, to a `Counter` of texts."""
        if node_def.op in _NONE or node_def.op.startswith(('Collective', 'Horovod')):
            return
        node = node_of(node_def, self._library)
        counter[' '.join([node.type] + node.settings)[:_LONGEST]] += 1
        for name in node.functions:
            counter.update(self._of(name))

    def _of(self, name):
        """`Counter` of what a function returns, and of what it writes."""
        if name not in self._known:
            self._known[name] = counter = collections.Counter()  # of one that calls itself
            function = self._library.function(name)
            nodes = {node.name: node for node in function.node_def}
            stack = [text.split(':')[0] for text in function.ret.values()] + [
                node.name for node in nodes.values()
                if _WRITES.search(node.op) or node_of(node, self._library).functions]
            seen = set()
            while stack:
                node = nodes.get(stack.pop())
                if node is None or node.name in seen:
                    continue
                seen.add(node.name)
                self.count(node, counter)
                inputs = [text.split(':')[0] for text in node.input if not text.startswith('^')]
                stack.extend(inputs[:1] if node.op == 'Print' else inputs)
        return self._known[name]
