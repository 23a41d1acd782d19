"""Moves bodies of loops and branches of control flow v2 along with what runs them.

The operations of a function have devices of their own: those of the scopes that it was made in.
"""

from towers.errors import ModelFunctionError
from towers.graph.library import Library, call_others, renamed


class MovedFunctions:
    """Gives operations that are moved from device to device functions that are there, too."""

    def __init__(self, graph):
        self._library = Library(graph)
        self._made = {}  # (name, source, target): name of the moved function

    def move(self, op, source, target):
        """Has an operation call copies of its functions in which one device is another.

        Args:
          op: an operation; where it calls none that has operations on `source`, it stays as it is.
          source, target: canonical names of devices.

        Raises:
          ModelFunctionError: the operation is the call of a `Defun`, which has its name.
        """
        called = [] if source == target else self._library.called_by(op.node_def)
        names = {name: self._moved(name, source, target) for name in called}
        if all(name == other for name, other in names.items()):
            return
        if op.type in names:
            raise ModelFunctionError(
                "stages='auto': operation %s calls the function %s, which is on %s itself: name "
                'the stages in the model function, by towers.stage(number).' % (
                    op.name, op.type, source))
        call_others(op, names)

    def _moved(self, name, source, target):
        """The name of a copy of a function on another device; its own where it needs none."""
        if (name, source, target) in self._made:
            return self._made[name, source, target]
        self._made[name, source, target] = name  # where functions call each other in a circle
        function = self._library.function(name)
        names = {each: self._moved(each, source, target) for node in function.node_def
                 for each in self._library.called_by(node)}
        if any(each != other for each, other in names.items()) or any(
                node.device == source for node in function.node_def):
            names[name] = '%s__moved_%d' % (name, len(self._made))
            copy = renamed(function, names)
            for node in copy.node_def:
                if node.device == source:
                    node.device = target
            self._library.add([copy])
            self._made[name, source, target] = names[name]
        return self._made[name, source, target]
