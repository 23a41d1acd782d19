"""Gives operations and variables of a tower the names that they have on one device.

Some variables are named after an operation or a scope: `<name of the tensor>/<average>`,
`scope + 'average'`, `op.name.replace('/', '_')`. In tower 0 such names would contain `tower_0/`.

TensorFlow numbers a name that is taken. If the program has made an `fc` before the towers, the
model's `fc` becomes `fc_1` on one device, and so it does in the tower.
"""

import re

import tensorflow.compat.v1 as tf

_SEPARATORS = '_-.'
"""Characters that programs put in place of '/' in a name."""


_BUILDS = ('towers_builds',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


class ModelsNames:
    """Takes a tower's scope out of names."""

    def __init__(self, graph, root, outer, instead, owned):
        """
        Args:
          graph: the graph.
          root: the name scope of the tower's operations, such as `'tower_1/'`; or `outer`, where
            the tower has no scope of its own.
          outer: the name scope around all towers: `''`, or for example `'train/'`.
          instead: the scope that one device has in place of `root`.
          owned: set of the names of operations that are parts of variables.
        """
        self._graph, self._root, self._outer = graph, root, outer
        self._instead, self._owned = instead, owned
        self._joined = {separator: set() for separator in _SEPARATORS}
        self._looked_at = 0  # how many of the graph's operations are in `_joined`

    def take(self, names):
        """Makes names count as taken in the tower, whose scope is the current one.

        Args:
          names: list of names without the tower's scope, as `names_of` gives them.
        """
        if self._root != self._outer:
            for name in names:
                self._graph.unique_name(name)

    def numbered(self, name):
        """The name of a variable that is made in the current scope, numbered if it is taken.

        The variable is made outside of the tower's scope, where the tower's operations take no
        names. From now on the name is taken.
        """
        if self._root == self._outer or not name:
            return name
        inside = self._graph.unique_name(name)
        scope = self._graph.get_name_scope()
        return inside[len(scope) + 1:] if scope else inside

    def without_tower(self, text):
        """The text without the tower's scope; the model's own scope of that name stays."""
        if self._root == self._outer:
            return text
        if self._root in text:
            text = re.sub(r'(?<![^/])' + re.escape(self._root), self._in_place_of_scope, text)
        for separator in _SEPARATORS:
            joined = self._root.replace('/', separator)
            if joined in text:
                text = re.sub(r'(?<![A-Za-z0-9])' + re.escape(joined),
                              lambda found, by=separator: self._in_place_of_joined(found, by), text)
        return text

    def _in_place_of_scope(self, found):
        rest = found.string[found.end():]
        if self._starts_with_operation(rest) or not found.start() and not self._is_models_own():
            return self._instead
        return found.group()

    def _in_place_of_joined(self, found, separator):
        self._look_at_operations()
        rest = found.string[found.end():]
        if any(rest[:end] in self._joined[separator] for end in _ends_of_parts(rest)):
            return self._instead.replace('/', separator)
        return found.group()

    def _is_models_own(self):
        """Whether the model has opened a scope of the tower's name in the tower."""
        name = self._root[len(self._outer):].rstrip('/')
        with self._graph.name_scope(None):
            inside = self._root + name
            return (self._graph.unique_name(inside, mark_as_used=False) != inside
                    or tf.get_variable_scope().name == self._root.rstrip('/'))

    def _starts_with_operation(self, text):
        """Whether the tower has an operation whose name a text starts with."""
        for end in _ends_of_parts(text):
            name = self._root + text[:end]
            try:
                self._graph.get_operation_by_name(name)
            except (KeyError, ValueError):
                continue
            if name not in self._owned:
                return True
        return False

    def _look_at_operations(self):
        operations = self._graph.get_operations()
        for op in operations[self._looked_at:]:
            if op.name.startswith(self._root):
                name = op.name[len(self._root):]
                for end in [found.start() for found in re.finditer('/', name)] + [len(name)]:
                    for separator, joined in self._joined.items():
                        joined.add(name[:end].replace('/', separator))
        self._looked_at = len(operations)


def note_build(graph, start):
    """Notes that the operations of a graph from number `start` on belong to a build."""
    graph.add_to_collection(_BUILDS, (start, len(graph.get_operations())))


def of_the_program(graph):
    """List of the operations that were made so far outside of all builds."""
    operations, begin, found = graph.get_operations(), 0, []
    for start, end in graph.get_collection(_BUILDS):
        found += operations[begin:start]
        begin = max(begin, end)
    return found + operations[begin:]


def names_of(operations, outer):
    """The names of operations and of their scopes, within one scope: a list without that scope.

    Args:
      operations: list of operations.
      outer: the scope, such as `'train/'`; or `''`.
    """
    names = {}
    for op in operations:
        if op.name.startswith(outer):
            name = op.name[len(outer):]
            for found in re.finditer('/', name):
                names[name[:found.start()]] = None
            names[name] = None
    return list(names)


def _ends_of_parts(text):
    return [found.start() for found in re.finditer(r'\b|_', text)] + [len(text)]
