"""The `tf.GraphDef` that is imported for a copy: tower 0's, adapted to each tower."""

import tensorflow.compat.v1 as tf

from towers import nonfinite
from towers.errors import CloneError
from towers.graph.edit import group_in_node
from towers.graph.graph_walk import has_seed
from towers.graph.library import functions_of, rename_functions
from towers.tower.tower_seeds import seed_of_tower
from towers.tower.stateless_random import key_of

_TOLD_APART_BY = ('frame_name', 'stack_name', 'tensor_array_name', '_XlaScope')
"""Attributes by which TensorFlow tells loops, stacks, arrays and XLA's clusters apart."""


class Template:
    """Copies of nodes, with names relative to the scope that the towers are built in.

    Devices, colocations and control inputs from outside are left out: an import cannot set them.

    Attributes:
      graph_def: the `tf.GraphDef` to be imported; `adapt` changes it for the next copy.
      outside: {name of a tensor from outside: its name in `graph_def`}.
      controls: list of `(name, names of operations from outside that it waits for)`.
      colocated: list of `(name, names of the operations that it is colocated with)`.
    """

    def __init__(self, nodes, scope, functions, random_keys, graph, names):
        """
        Args:
          nodes: {name: `tf.NodeDef`} of the operations to be copied, in order.
          scope: the name scope that the towers are built in, `''` or such as `'train/'`.
          functions: `CopiedFunctions` of these nodes.
          random_keys: {name of a constant that holds a seed: name of the random op}.
          graph: the graph of the nodes.
          names: `NamesOnOneMachine`.

        Raises:
          CloneError: the nodes are too large.
        """
        self._nodes, self._scope, self._functions = nodes, scope, functions
        self._random_keys, self._graph_seed, self._names = random_keys, graph.seed, names
        self.graph_def = tf.GraphDef()
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        self._called = {name: name for name in self._functions.copied}  # and as the template says
        self.outside, self.controls, self.colocated = {}, [], []
        self._texts, self._seeds, self._keys, self._messages, self._callers = [], [], [], [], []
        for name, original in nodes.items():
            node = self.graph_def.node.add()
            node.CopyFrom(original)
            node.name = self.relative(name)
            node.device = ''
            self._take_inputs(node, name, original)
            groups = group_in_node(node)
            if groups:
                del node.attr['_class']
                self.colocated.append((name, groups))
            self._note_attributes(node, name)
        if self.graph_def.ByteSize() >= 2 ** 31 - 2 ** 20:
            raise CloneError('the graph of a tower is larger than 2 GB, which TensorFlow cannot '
                             "import: pass copies='reuse'.")

    def relative(self, name):
        """A name without the scope that the towers are built in."""
        return name[len(self._scope):] if name.startswith(self._scope) else 'outside/' + name

    def _take_inputs(self, node, name, original):
        del node.input[:]
        waits_for = []
        for text in original.input:
            producer = producer_of(text)
            if producer in self._nodes:
                text = text.replace(producer, self.relative(producer), 1)
            elif text.startswith('^'):
                waits_for.append(producer)
                continue
            else:
                tensor = text if ':' in text else text + ':0'
                text = self.outside.setdefault(tensor, '__outside__/%d:0' % len(self.outside))
            node.input.append(text)
        if waits_for:
            self.controls.append((name, waits_for))

    def _note_attributes(self, node, name):
        if self._called and any(each in self._called for each in functions_of(node)):
            self._callers.append(node)
        if has_seed(node):
            self._seeds.append((node.attr['seed2'], node.attr['seed'].i, node.attr['seed2'].i))
        if name in self._random_keys:
            self._keys.append((node.attr['value'].tensor, self._random_keys[name]))
        if node.op == 'CheckNumerics':
            self._messages.append((node.attr['message'], node.attr['message'].s.decode()))
        for key in _TOLD_APART_BY:
            if key in node.attr and node.attr[key].s:
                self._texts.append((node.attr[key], node.attr[key].s))

    def adapt(self, index, root, device):
        """Changes `graph_def` into the graph of the tower of this number, name scope and device."""
        for value, text in self._texts:
            value.s = root.encode() + text

        def new_seed(seed, seed2):
            return seed_of_tower(seed, seed2, self._names.parts_before + index)

        for value, seed, seed2 in self._seeds:
            value.i = new_seed(seed, seed2)
        names = self._functions.names_in(root)
        del self.graph_def.library.function[:]
        del self.graph_def.library.gradient[:]
        self._functions.add_to(self.graph_def.library, names, device, new_seed)
        exchange = {self._called[name]: names[name] for name in names}
        for node in self._callers:
            rename_functions(node, exchange)
        self._called = names
        for tensor, random_op in self._keys:
            key = key_of(root + self.relative(random_op), self._graph_seed, self._names)
            tensor.CopyFrom(tf.make_tensor_proto(key, tf.int64, []))
        for value, message in self._messages:
            value.s = nonfinite.message_of_tower(message, index).encode()


def producer_of(text):
    """The operation that an input of a NodeDef comes from: of 'a:1' and of '^a' it is a."""
    return text.lstrip('^').split(':')[0]
