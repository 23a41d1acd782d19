"""The `tf.GraphDef` that is imported for a clone: the first tower's, adapted to each tower."""

import tensorflow.compat.v1 as tf

from towers import nonfinite
from towers.clone.limits import CannotClone
from towers.graph.graph_walk import functions_of, has_seed, rename_functions
from towers.graph.scopes import inside_text
from towers.tower.tower_seeds import seed_of_tower
from towers.tower.stateless_random import key_of


class Template:
    """Clones of nodes, with names relative to the name scope of their tower.

    Devices, colocations and control inputs from outside are left out: an import cannot set them.

    Attributes:
      graph_def: the `tf.GraphDef` to be imported; `adapt` changes it for the next clone.
      outside: {name of a tensor from outside: its name in `graph_def`}.
      controls: list of `(name, names of operations from outside that it waits for)`.
      colocated: list of `(name, its colocation groups)`.
    """

    def __init__(self, nodes, root, functions, random_keys, graph, called):
        """
        Args:
          nodes: {name: `tf.NodeDef`} of the operations to be cloned, in order.
          root: the name scope of their tower.
          functions: `ClonedFunctions` of these nodes.
          random_keys: {name of a constant that holds a seed: name of the random op}.
          graph: the graph of the nodes.
          called: `NamesOnOneMachine`.

        Raises:
          CannotClone: the nodes are too large.
        """
        self._nodes, self._root, self._functions = nodes, root, functions
        self._random_keys, self._graph_seed, self._names = random_keys, graph.seed, called
        self._in_text = inside_text(root)
        self.graph_def = tf.GraphDef()
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        self._called = {name: name for name in self._functions.cloned}  # and as the template says
        self.outside, self.controls, self.colocated = {}, [], []
        self._texts = []  # (function that sets a text, the text in the first tower)
        self._seeds, self._keys, self._messages, self._callers = [], [], [], []
        for name, original in nodes.items():
            node = self.graph_def.node.add()
            node.CopyFrom(original)
            node.name = name[len(self._root):]
            if self._in_text.search(node.name):
                self._texts.append((_setter(node, 'name'), node.name))
            node.device = ''
            self._take_inputs(node, name, original)
            groups = colocation(node)
            if groups:
                del node.attr['_class']
                self.colocated.append((name, groups))
            self._note_attributes(node, name)
        if self.graph_def.ByteSize() >= 2 ** 31 - 2 ** 20:
            raise CannotClone('its graph is larger than 2 GB')

    def _take_inputs(self, node, name, original):
        del node.input[:]
        waits_for = []
        for text in original.input:
            producer = producer_of(text)
            if producer in self._nodes:
                text = text.replace(self._root, '', 1)
                if self._in_text.search(text):
                    self._texts.append((_element_setter(node.input, len(node.input)), text))
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
            return
        if node.op == 'Const' and node.attr['dtype'].type == tf.string.as_datatype_enum:
            strings = node.attr['value'].tensor.string_val  # of an assertion, say
            self._note_texts((_element_setter(strings, i), text) for i, text in enumerate(strings))
        for value in node.attr.values():
            # Frames of loops, names of TensorArrays and of what else is told apart by them.
            if value.WhichOneof('value') == 's' and value.s:
                self._note_texts([(_setter(value, 's'), value.s)])
        if '_XlaScope' in node.attr:  # XLA makes one cluster of what has one scope
            value = node.attr['_XlaScope']
            value.s += b'_' + self._root.encode()
            self._texts.append((_setter(value, 's'), value.s))

    def _note_texts(self, texts):
        for setter, text in texts:
            try:
                decoded = text.decode()
            except UnicodeDecodeError:
                continue
            if self._in_text.search(decoded):
                self._texts.append((setter, text))

    def adapt(self, index, root, device):
        """Changes `graph_def` into the graph of the tower of this number, name scope and device."""
        for setter, text in self._texts:
            setter(self._in_text.sub(root, text) if isinstance(text, str)
                   else self._in_text.sub(root, text.decode()).encode())

        def new_seed(seed, seed2):
            return seed_of_tower(seed, seed2, self._names.parts_before + index)

        for value, seed, seed2 in self._seeds:
            value.i = new_seed(seed, seed2)
        names, library = self._functions.for_clone(root, device, new_seed)
        del self.graph_def.library.function[:]
        self.graph_def.library.function.extend(library)
        exchange = {self._called[name]: names[name] for name in names}
        for node in self._callers:
            rename_functions(node, exchange)
        self._called = names
        for tensor, random_op in self._keys:
            key = key_of(self._in_text.sub(root, random_op), self._graph_seed, self._names)
            tensor.CopyFrom(tf.make_tensor_proto(key, tf.int64, []))
        for value, message in self._messages:
            value.s = nonfinite.message_of_tower(message, index).encode()


def producer_of(text):
    """The operation that an input of a NodeDef comes from: of 'a:1' and of '^a' it is a."""
    return text.lstrip('^').split(':')[0]


def colocation(node):
    """The colocation groups of a NodeDef, as strings 'loc:@name'."""
    if '_class' not in node.attr:
        return []
    return [group.decode() for group in node.attr['_class'].list.s
            if group.startswith(b'loc:@')]


def _setter(message, field):
    return lambda text: setattr(message, field, text)


def _element_setter(texts, position):
    def set_element(text):
        texts[position] = text
    return set_element
