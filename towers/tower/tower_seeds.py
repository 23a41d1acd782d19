"""Seeds of random operations, so that no two towers of all machines draw the same numbers.

A copy of tower 0 has, for an op of seeds (s, s2) there,

    seed2 = crc32('s s2 tower k')

with its number k among the micro-batches of all machines' towers.
"""

import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.graph_walk import has_seed
from towers.graph.library import Library, call_others, renamed, with_callers


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
    library = Library(graph)
    callers = [op for op in operations if library.called_by(op.node_def)]
    functions = library.reached_from([op.node_def for op in callers])
    drawing = with_callers([name for name, function in functions.items()
                            if any(map(has_seed, function.node_def))], functions)
    names = {name: '%s__part_%d' % (name, number) for name in drawing}
    copies = [renamed(functions[name], names) for name in sorted(drawing)]
    for node in [node for function in copies for node in function.node_def]:
        if has_seed(node):
            node.attr['seed2'].i = seed_of_tower(
                node.attr['seed'].i, node.attr['seed2'].i, number)
    if copies:
        library.add(copies)
    for op in callers if copies else ():
        call_others(op, names)


def seed_of_tower(seed, seed2, tower):
    """The `seed2` of an op in another tower than the first one.

    It does not depend on the op's name: two ops with equal seeds have equal numbers there, too.
    """
    return zlib.crc32(('%d %d tower %d' % (seed, seed2, tower)).encode()) or 1
