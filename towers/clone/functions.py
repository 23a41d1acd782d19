"""Functions that the operations of a tower call: bodies of loops and branches in control flow v2.

A function without random numbers and devices serves all towers. A function with random numbers or
devices needs a clone in each tower, and so does a function that calls it.
"""

import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.clone.limits import CannotClone, check_state
from towers.graph.graph_walk import functions_of, has_seed, rename_functions
from towers.placement.tower_device import follows_tower, moved, overlaps


class ClonedFunctions:
    """The functions that some nodes of a tower call, and clones of those that need one."""

    def __init__(self, nodes, graph, device):
        """
        Args:
          nodes: list of `tf.NodeDef`.
          graph: the graph of the nodes.
          device: the tower's device.

        Raises:
          CannotClone: a function that cannot be cloned.
        """
        self._graph, self._device = graph, device
        self._library, self._moves, self.cloned = {}, {}, set()
        called = set().union(*map(functions_of, nodes)) if nodes else set()
        if not called:
            return
        definitions = graph.as_graph_def().library
        known = {each.signature.name: each for each in definitions.function}
        stack = [name for name in called if name in known]
        while stack:
            name = stack.pop()
            if name in self._library:
                continue
            self._library[name] = known[name]
            for node in known[name].node_def:
                check_state(node, 'function %s: operation' % name)
                stack.extend(each for each in functions_of(node) if each in known)
        for name, function in self._library.items():
            self._moves[name] = self._that_move(function)
        self._find_cloned()
        with_gradient = self.cloned & {each.function_name for each in definitions.gradient}
        if with_gradient:
            raise CannotClone('function %s has a gradient function' % min(with_gradient))

    def for_clone(self, scope, device, new_seed):
        """The functions that differ for a cloned tower, and their names there.

        Args:
          scope: name scope of the cloned tower.
          device: the cloned tower's device.
          new_seed: function from `(seed, seed2)` to the seed2 of the clone.

        Returns:
          `(names, library)`: dict from names to names of the clones; a list of the clones, each a
          `FunctionDef` of a `tf.GraphDef`.
        """
        names = {name: '%s__%s' % (name, scope.strip('/').replace('/', '_'))
                 for name in self.cloned}
        library = []
        for name in sorted(self.cloned):
            function = tf.GraphDef().library.function.add()
            function.CopyFrom(self._library[name])
            function.signature.name = names[name]
            for node in function.node_def:
                rename_functions(node, names)
                if has_seed(node):
                    node.attr['seed2'].i = new_seed(node.attr['seed'].i, node.attr['seed2'].i)
                if node.name in self._moves[name]:
                    node.device = moved(node.device, self._device, device)
            library.append(function)
        return names, library

    def _that_move(self, function):
        """Names of the nodes of a function that move to the cloned tower's device."""
        name, found, operations = function.signature.name, set(), None
        for node in function.node_def:
            if not (node.device and overlaps(node.device, self._device)):
                continue
            if operations is None:
                operations = compat.function_operations(self._graph, name)
            # Where an argument of the function has a node's name, the node's name is numbered.
            op = operations.get(node.name) or operations.get(re.sub(r'_\d+$', '', node.name))
            op = _that_leads(op if op is not None and op.type == node.op else None, operations)
            follows = None if op is None else follows_tower(op)
            if follows is None and op is not None and any(
                    tensor.dtype == tf.resource for tensor in op.inputs):
                follows = False  # a read, which TensorFlow puts on its variable's device, by name
            if follows is None:
                raise CannotClone('function %s: operation %s is on %s for a reason of its own'
                                  % (name, node.name, node.device))
            if follows:
                found.add(node.name)
        return found

    def _find_cloned(self):
        self.cloned = {name for name, function in self._library.items()
                       if self._moves[name] or any(map(has_seed, function.node_def))}
        before = None
        while before != len(self.cloned):
            before = len(self.cloned)
            self.cloned |= {name for name, function in self._library.items()
                            if any(functions_of(node) & self.cloned
                                   for node in function.node_def)}


def _that_leads(op, operations):
    """The last operation of the chain of colocations that begins at `op`.

    `op` itself where it is colocated with none; None where the chain leaves the function.
    """
    while op is not None:
        groups = [group.decode()[len('loc:@'):] for group in op.colocation_groups()]
        if op.name in groups:
            break
        op = operations.get(groups[0])
    return op
