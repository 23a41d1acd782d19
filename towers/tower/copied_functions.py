"""Functions that the operations of a tower call: bodies of loops and branches in control flow v2.

A function without random numbers and devices serves all towers. A function with random numbers or
devices needs a copy in each tower, and so does a function that calls it, or that writes variables
which the first tower writes for all.
"""

import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import CloneError
from towers.graph.edit import group_of, without_writes
from towers.graph.graph_walk import has_seed
from towers.graph.library import Library, renamed, with_callers
from towers.placement.tower_device import follows_tower, moved, overlaps


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

        Raises:
          CloneError: a function that cannot be copied.
        """
        self._graph, self._device = graph, device
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
        """Names of the nodes of a function that move to the copy's device."""
        name, found, operations = function.signature.name, set(), None
        for node in function.node_def:
            if not (node.device and overlaps(node.device, self._device)):
                continue
            if operations is None:
                operations = compat.function_operations(self._graph, name)
            # Where an argument of the function has a node's name, the node's name is numbered.
            op = operations.get(node.name) or operations.get(re.sub(r'_\d+$', '', node.name))
            op = _that_leads(op if op is not None and op.type == node.op else None, operations)
            follows = None if op is None else _follows(op)
            if follows is None:
                raise CloneError(
                    'function %s: operation %s is on %s for a reason of its own: pass '
                    "copies='reuse'." % (name, node.name, node.device))
            if follows:
                found.add(node.name)
        return found


def _follows(op):
    """As `follows_tower`, also for operations that TensorFlow puts with others, by device name."""
    follows = follows_tower(op)
    if follows is None and any(tensor.dtype == tf.resource for tensor in op.inputs):
        return False  # a read, which is on its variable's device
    if follows is None and op.type == 'NoOp' and op.control_inputs:
        return _follows(op.control_inputs[0])  # tf.group, on the device of what it groups
    return follows


def _that_leads(op, operations):
    """The last operation of the chain of colocations that begins at `op`.

    `op` itself where it is colocated with none; None where the chain leaves the function.
    """
    while op is not None:
        groups = group_of(op)
        if op.name in groups:
            break
        op = operations.get(groups[0])
    return op
