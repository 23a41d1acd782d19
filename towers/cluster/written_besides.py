"""Whether a program writes what its steps read, apart from them: clips the weights, for example.

The chief of synchronous parameter servers then has to have done so before another worker begins the
next step.
"""

from towers.graph import graph_walk
from towers.graph.variable_access import VARIABLE_OPS
from towers.graph.variable_writes import Writes


def written_besides(graph, variables, built):
    """Names of the variables that a step takes, and that something else in the graph writes.

    What runs after the step, or between two steps, cannot be told apart: both count. Initial values
    and those of a checkpoint do not, nor do the updates of towers that ride on no train op.

    Args:
      graph: a `tf.Graph`.
      variables: list of the variables that all workers share.
      built: `BuiltTowers`.

    Returns:
      A sorted list.
    """
    step = graph_walk.step_operations([built.train_op])
    initial = {variable.initializer.name for variable in variables}
    taken = {op.name for op in step if op.type in VARIABLE_OPS}
    taken &= {variable.op.name for variable in variables}
    step += graph_walk.step_operations([each for tower in built.towers for each in tower.updates])
    others, writes, found = initial | {op.name for op in step}, Writes(graph), set()
    for op in graph.get_operations():
        if op.name not in others and not _restores(op):
            found.update(taken.intersection(writes.of(op)))
    return sorted(found)


def _restores(op):
    """Whether an operation writes what was read from a checkpoint."""
    value = op.inputs[-1].op if op.inputs else op
    while value.type in ('Identity', 'Reshape', 'Cast'):
        value = value.inputs[0].op
    return value.type == 'RestoreV2'
