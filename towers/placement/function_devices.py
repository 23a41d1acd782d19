"""Moves bodies of loops and branches of control flow v2 along with what runs them.

The operations of a function have devices of their own: those of the scopes that it was made in.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.graph_walk import functions_of


class MovedFunctions:
    """Gives operations that are moved from device to device functions that are there, too."""

    def __init__(self, graph):
        self._graph = graph
        self._known = None  # {name: FunctionDef}, of the graph as it is at the first use
        self._made = {}  # (name, source, target): name of the moved function

    def move(self, op, source, target):
        """Has an operation call copies of its functions in which one device is another.

        Args:
          op: an operation; where it calls none that has operations on `source`, it stays as it is.
          source, target: canonical names of devices.

        Raises:
          ModelFunctionError: the operation is the call of a `Defun`, which has its name.
        """
        if source == target or not functions_of(op.node_def):
            return
        if self._known is None:
            self._known = {each.signature.name: each for each in
                           self._graph.as_graph_def().library.function}
        called = functions_of(op.node_def) & set(self._known)
        names = {name: self._moved(name, source, target) for name in called}
        if all(name == other for name, other in names.items()):
            return
        if op.type in names:
            raise ModelFunctionError(
                "stages='auto': operation %s calls the function %s, which is on %s itself: name "
                'the stages in the model function, by towers.stage(number).' % (
                    op.name, op.type, source))
        for attribute, value in op.node_def.attr.items():
            before = value.SerializeToString()
            _rename(value, names)
            if value.SerializeToString() != before:
                compat.set_attribute(op, attribute, value)

    def _moved(self, name, source, target):
        """The name of a copy of a function on another device; its own where it needs none."""
        if (name, source, target) in self._made:
            return self._made[name, source, target]
        self._made[name, source, target] = name  # where functions call each other in a circle
        function = self._known[name]
        inner = set().union(*map(functions_of, function.node_def)) & set(self._known)
        names = {each: self._moved(each, source, target) for each in inner}
        if any(each != other for each, other in names.items()) or any(
                node.device == source for node in function.node_def):
            definition = tf.GraphDef()
            definition.versions.CopyFrom(self._graph.graph_def_versions)
            copy = definition.library.function.add()
            copy.CopyFrom(function)
            moved = '%s__moved_%d' % (name, len(self._made))
            copy.signature.name = moved
            for node in copy.node_def:
                node.op = names.get(node.op, node.op)
                if node.device == source:
                    node.device = target
                for value in node.attr.values():
                    _rename(value, names)
            with self._graph.as_default():
                tf.import_graph_def(definition, name='')
            self._made[name, source, target] = moved
            self._known[moved] = copy
        return self._made[name, source, target]


def _rename(value, names):
    """Exchanges names of functions in the value of an attribute."""
    kind = value.WhichOneof('value')
    for each in [value.func] if kind == 'func' else value.list.func if kind == 'list' else ():
        each.name = names.get(each.name, each.name)
