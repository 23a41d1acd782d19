"""Seeds of random operations, so that no two towers of all machines draw the same numbers.

A tower that is a clone of the first one has, for an op of seeds (s, s2) there,

    seed2 = crc32('s s2 tower k')

with its number k among the micro-batches of all machines' towers. A tower that is made by a call
of the model function has TensorFlow's own seeds, which a graph-level seed makes others in each
call. Where they are the first tower's (`tf.nn.dropout(x, seed=1)`), or another machine's first
tower has the same, it gets the seeds of a clone.
"""

import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.graph_walk import has_seed, rename_functions


class OwnSeeds:
    """Gives towers that were made by calls of the model function seeds of their own.

    Attributes:
      taken: list of what a step runs of the latest tower besides what the `Tower` has.
    """

    def __init__(self, parts_before, graph):
        """
        Args:
          parts_before: how many micro-batches the towers of the machines before this one have.
          graph: the `tf.Graph`.
        """
        self._before, self._graph, self.taken = parts_before, graph, []
        self._called = []  # (index, operations, taken)

    def note(self, index, operations):
        """Notes the latest tower, which was made by a call.

        Args:
          index: its number.
          operations: list of its operations, forward and backward.
        """
        self._called.append((index, operations, self.taken))

    def give(self, towers):
        """Changes seeds; only when clones were made, which have theirs from the first tower's.

        Args:
          towers: list of all `Tower`s.
        """
        if not self._before and len(self._called) < 2 or self._is_drawn_again(towers):
            return
        of_first = None
        for index, operations, taken in self._called:
            needed = {op.name for op in graph_walk.step_operations(
                _fetches(towers[index]) + taken)}
            draws = [op for op in operations if op.name in needed and has_seed(op.node_def)]
            if of_first is None:
                of_first = {_kind(op) for op in draws}
            for op in draws if self._before + index else ():
                if self._before or _kind(op) in of_first:
                    seed, seed2 = op.get_attr('seed'), op.get_attr('seed2')
                    compat.set_attribute(op, 'seed2', tf.AttrValue(
                        i=seed_of_tower(seed, seed2, self._before + index)))
            if self._before + index:
                self._change_functions(
                    [op for op in operations if op.name in needed], self._before + index)

    def _is_drawn_again(self, towers):
        """Whether a gradient that is yet to be made may draw the towers' numbers once more.

        A function with a gradient of its own, such as `tf.recompute_grad`, does so by the seeds
        that it knows, and has to get the same.
        """
        return not any(tower.pairs for tower in towers) and any(
            op.type == 'IdentityN' for _, operations, _ in self._called for op in operations)

    def _change_functions(self, operations, number):
        """The same within functions: branches and loops of control flow v2.

        There seeds count from zero, so that each call has those of the first tower.
        """
        callers = [op for op in operations if graph_walk.functions_of(op.node_def)]
        if not callers:
            return
        known = {each.signature.name: each
                 for each in self._graph.as_graph_def().library.function}
        drawing = _that_draw(known)
        names = {name: '%s__part_%d' % (name, number) for name in drawing}
        called = sorted(set().union(*[graph_walk.functions_of(op.node_def) for op in callers])
                        & drawing)
        library = tf.GraphDef()
        library.versions.CopyFrom(self._graph.graph_def_versions)
        for name in _all_called(called, known, drawing):
            function = library.library.function.add()
            function.CopyFrom(known[name])
            function.signature.name = names[name]
            for node in function.node_def:
                rename_functions(node, names)
                if has_seed(node):
                    node.attr['seed2'].i = seed_of_tower(
                        node.attr['seed'].i, node.attr['seed2'].i, number)
        if not library.library.function:
            return
        tf.import_graph_def(library, name='')
        for op in callers:
            node = op.node_def
            before = {key: value.SerializeToString() for key, value in node.attr.items()}
            rename_functions(node, names)
            for key, value in node.attr.items():
                if before[key] != value.SerializeToString():
                    compat.set_attribute(op, key, value)


def seed_of_tower(seed, seed2, tower):
    """The `seed2` of an op in another tower than the first one.

    It does not depend on the op's name: two ops with equal seeds have equal numbers there, too.
    """
    return zlib.crc32(('%d %d tower %d' % (seed, seed2, tower)).encode()) or 1


def _fetches(tower):
    leaves = tf.nest.flatten(
        [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
         [gradient for gradient, _ in tower.pairs]], expand_composites=True)
    return [leaf for leaf in leaves if hasattr(leaf, 'op') or isinstance(leaf, tf.Operation)]


def _kind(op):
    return op.type, op.get_attr('seed'), op.get_attr('seed2')


def _that_draw(known):
    """The names of the functions that draw by seeds, themselves or by those that they call."""
    found = {name for name, function in known.items() if any(map(has_seed, function.node_def))}
    grows = True
    while grows:
        before = len(found)
        found.update(name for name, function in known.items() if any(
            not found.isdisjoint(graph_walk.functions_of(node)) for node in function.node_def))
        grows = len(found) > before
    return found


def _all_called(names, known, drawing):
    """These functions and the drawing ones that they call: a list of names."""
    stack, seen = list(names), list(names)
    while stack:
        for node in known[stack.pop()].node_def:
            for name in sorted(graph_walk.functions_of(node) & drawing):
                if name not in seen:
                    seen.append(name)
                    stack.append(name)
    return seen
