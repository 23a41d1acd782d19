"""What a copy of tower 0 is imported from: its graph as a `tf.GraphDef`, its functions, and what
stands in tower k for each thing that tower 0 reads from outside, or has of its own:

    shard 0, and its weight    ->  shard k, and its weight
    a variable                 ->  the tower's replica, or the tower's own state, or itself
    anything else              ->  itself: tables, queues, iterators, placeholders are shared
"""

import tensorflow.compat.v1 as tf

from towers import nonfinite
from towers.errors import CloneError, SharedVariableError
from towers.graph.edit import group_in_node, without_writes
from towers.graph.graph_walk import has_seed
from towers.graph.library import Library, functions_of, rename_functions, renamed, with_callers
from towers.graph.variable_access import read_from, variable_op
from towers.placement.tower_device import moved, overlaps
from towers.tower.stateless_random import key_of, seed_of_tower

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


class CopiedFunctions:
    """The functions that some nodes of a tower call, and copies of those that need one."""

    def __init__(self, nodes, graph, device, left_alone=None):
        """
        Args:
          nodes: list of `tf.NodeDef`.
          graph: the graph of the nodes.
          device: the tower's device.
          left_alone: {name of a node: positions of the variables that its functions are not to
            write, from the last (-1)}.
        """
        self._device = device
        self._moves, self.copied, self._gradients = {}, set(), []
        library = Library(graph)
        self._functions = library.reached_from(nodes)
        if not self._functions:
            return
        for node in nodes:
            for name in library.called_by(node) if node.name in (left_alone or ()) else ():
                self._functions[name] = without_writes(
                    library.function(name), left_alone[node.name])
                self.copied.add(name)
        for name, function in self._functions.items():
            self._moves[name] = self._that_move(function)
        self.copied = with_callers(self.copied.union(
            name for name, function in self._functions.items()
            if self._moves[name] or any(map(has_seed, function.node_def))), self._functions)
        self._gradients = [each for each in library.gradients()
                           if each.function_name in self.copied]

    def names_in(self, scope):
        """{name: name of its copy} of the functions that differ in the tower of a name scope."""
        return {name: '%s__%s' % (name, scope.strip('/').replace('/', '_'))
                for name in self.copied}

    def add_to(self, library, names, device, new_seed):
        """Adds the functions that differ for a tower to the library of its `tf.GraphDef`.

        Args:
          library: a `FunctionDefLibrary`.
          names: as `names_in` gave them.
          device: the tower's device.
          new_seed: function from `(seed, seed2)` to the seed2 of the copy.
        """
        for name in sorted(self.copied):
            function = renamed(self._functions[name], names)
            for node in function.node_def:
                if has_seed(node):
                    node.attr['seed2'].i = new_seed(node.attr['seed'].i, node.attr['seed2'].i)
                if node.name in self._moves[name]:
                    node.device = moved(node.device, self._device, device)
            library.function.extend([function])
        for each in self._gradients:
            gradient = library.gradient.add()
            gradient.function_name = names[each.function_name]
            gradient.gradient_func = names.get(each.gradient_func, each.gradient_func)

    def _that_move(self, function):
        """Names of the nodes of a function that move to the copy's device.

        What reads a variable, an argument of the function, stays where the variable is.
        """
        resources = {argument.name for argument in function.signature.input_arg
                     if argument.type == tf.resource.as_datatype_enum}
        return {node.name for node in function.node_def
                if node.device and overlaps(node.device, self._device)
                and (functions_of(node) or resources.isdisjoint(node.input))}


class Substitution:
    """The substitution of one tower."""

    def __init__(self, number, tensors, variables):
        """
        Args:
          number: k, of the tower (or of its micro-batch among those of all towers), from 1.
          tensors: {name of a tensor: the tensor of tower k}.
          variables: {name of a variable: the variable of tower k}.
        """
        self.number = number
        self._tensors, self._variables = tensors, variables
        # Each of these tensors is the only one of its operation.
        self._operations = {name.split(':')[0]: tensor.op for name, tensor in tensors.items()}
        self._operations.update((name, variable.op) for name, variable in variables.items())

    def operation(self, op):
        """The operation that tower k waits for, or is colocated with, in place of one of tower 0.
        """
        return self._operations.get(op.name, op)

    def tensor(self, tensor):
        """The tensor that tower k reads in place of one from outside of tower 0.

        Raises:
          SharedVariableError: the tensor was computed from a variable of tower 0 alone.
        """
        if tensor.name in self._tensors:
            return self._tensors[tensor.name]
        sources = [op.name for op in read_from(tensor) if op.name in self._variables]
        if not sources:
            return tensor
        other = self._variables[sources[0]]
        if variable_op(tensor) is not None:
            return other.op.outputs[0]
        if len(sources) == 1 and tensor.shape.is_compatible_with(other.shape):
            with tf.device(other.device):
                return other.value()
        raise SharedVariableError(
            'variable %s is of each tower, and %s, made from it outside of the model function, is '
            'of the first: read the variable within the model function.' % (
                sources[0], tensor.name))
