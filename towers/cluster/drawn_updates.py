"""Random numbers, or data, in the update of a ring, where every worker makes the update itself.

Gradient noise, or an optimizer that adds noise, draws after the gradients were added up over the
workers. Each worker would draw numbers of its own, and its weights would drift away from those of
the others without an error. So they would by an update that is computed from a worker's own batch.
"""

import tensorflow.compat.v1 as tf

from towers.cluster.step_writes import ADDED_UP
from towers.errors import ClusterError
from towers.graph.graph_walk import is_random, step_operations
from towers.graph.variable_writes import Writes
from towers.tower.objectives import tensors_of

_READS = ('IteratorGetNext', 'QueueDequeue', 'Reader')
"""Beginnings of types of operations that read data."""


def seeds_of_updates(built):
    """The seeds of the random operations that the update of the trained variables draws from.

    Workers with the same seeds draw the same numbers, as long as all of them make the same steps.

    Args:
      built: `BuiltTowers` of a cluster whose workers each make the update.

    Returns:
      A text, the same for updates that draw alike; '' where none draws.

    Raises:
      ClusterError: an operation draws without a seed, or reads a batch.
    """
    seeds = []
    for op in _after_the_sum(built):
        if op.type.startswith(_READS):
            raise ClusterError(
                'the update is computed from what %r (%s) reads, after the gradients were added up '
                'over the workers: each worker reads other data, and their weights would drift '
                'apart. Let UPDATE_OPS write it to a variable, and read the variable, which then '
                "has worker 0's value." % (op.name, op.type))
        if not is_random(op):
            continue
        if op.type.startswith('Stateless'):
            continue  # its seed is an input
        given = [op.get_attr(name) for name in ('seed', 'seed2') if name in op.node_def.attr]
        if not any(given):
            raise ClusterError(
                '%r (%s) draws random numbers for the update, after the gradients were added up '
                'over the workers: each worker would draw others, and their weights would drift '
                'apart. Draw them by a stateless operation from the step, such as '
                'tf.random.stateless_normal(shape, seed=[1, global_step]).' % (op.name, op.type))
        seeds.append('%s %s' % (op.type, ' '.join(map(str, given))))
    return ', '.join(sorted(seeds))


def _after_the_sum(built):
    """The operations that compute the update from the sums over the workers; a list."""
    step = {op.name for op in step_operations([built.train_op])}
    writes = Writes(tf.get_default_graph())
    stack = [op for _, variable in built.gradients for op in writes.to(variable)
             if op.name in step]
    seen = {op.name: op for op in stack}
    # The sums themselves: how many rows they have of this worker's is a number of its own.
    sums = {tensor.op.name for tensor in tensors_of(built.machines.combined)}
    while stack:
        op = stack.pop()
        # `tf.Print` returns its first input, and shows the others.
        for tensor in op.inputs[:1] if op.type == 'Print' else op.inputs:
            other = tensor.op
            if other.name not in seen and other.name not in sums and not other.type.startswith(
                    ADDED_UP):
                seen[other.name] = other
                stack.append(other)
    return list(seen.values())
