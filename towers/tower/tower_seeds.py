"""Seeds of random operations, so that no two towers of all machines draw the same numbers.

A copy of tower 0 has, for an op of seeds (s, s2) there,

    seed2 = crc32('s s2 tower k')

with its number k among the micro-batches of all machines' towers.
"""

import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.graph_walk import has_seed, rename_functions


def give_seeds_of_tower(operations, fetches, number, graph):
    """Changes the seeds of a tower's random operations, where another tower has the same.

    It is for the first tower of a further machine, and for a further call of the model function.

    Args:
      operations: list of the tower's operations, forward and backward.
      fetches: the tensors and operations that a step runs of them.
      number: the tower's number among those of all machines.
      graph: their graph.
    """
    needed = {op.name for op in graph_walk.step_operations(fetches)}
    operations = [op for op in operations if op.name in needed]
    for op in operations:
        if has_seed(op.node_def):
            compat.set_attribute(op, 'seed2', tf.AttrValue(i=seed_of_tower(
                op.get_attr('seed'), op.get_attr('seed2'), number)))
    _change_functions(operations, number, graph)


def _change_functions(operations, number, graph):
    """The same within functions: branches and loops of control flow v2."""
    callers = [op for op in operations if graph_walk.functions_of(op.node_def)]
    if not callers:
        return
    known = {each.signature.name: each
             for each in graph.as_graph_def().library.function}
    drawing = _that_draw(known)
    names = {name: '%s__part_%d' % (name, number) for name in drawing}
    called = sorted(set().union(*[graph_walk.functions_of(op.node_def) for op in callers])
                    & drawing)
    library = tf.GraphDef()
    library.versions.CopyFrom(graph.graph_def_versions)
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
