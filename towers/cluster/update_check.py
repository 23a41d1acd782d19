"""What the update of a ring, or of Horovod, may not be computed from, since every worker makes it.

Gradient noise, a rate that a Python function returns, the time, or a tensor of the model's forward
pass would be another one on each worker, and their weights would drift apart without an error.
"""

import re

import tensorflow.compat.v1 as tf

from towers.cluster.forward_nodes import node_of
from towers.errors import ClusterError
from towers.graph.graph_walk import is_random
from towers.graph.library import Library

_DIFFERS = re.compile('PyFunc|Timestamp|Iterator|Dequeue|ReaderRead|ReadFile|Unstage|BarrierTake')


def check_update(operations, models):
    """Raises `ClusterError` for an operation that gives each worker another value for the update.

    Args:
      operations: list of the operations that compute the update from the sums over the workers.
      models: names of the operations of the forward pass.
    """
    library = Library(tf.get_default_graph())
    for op in operations:
        # The towers' shards are placeholders with a default.
        is_shard = op.type == 'PlaceholderWithDefault' and op.name in models and (
            op.outputs[0].shape.ndims != 0)
        if is_shard or _differs(op, library):
            raise ClusterError(
                '%r (%s) has a part in the update, which every worker makes by itself: each would '
                'have another value, and their weights would drift apart. Compute the update from '
                'gradients, variables and the global step (noise by tf.random.stateless_normal('
                'shape, seed=[1, global_step])); or let UPDATE_OPS write that value to a variable, '
                "and read the variable, which then has worker 0's value." % (op.name, op.type))


def _differs(op, library):
    """Whether an operation, or one in the functions that it calls, differs by worker."""
    nodes = [op.node_def] + [node for function in library.reached_from([op.node_def]).values()
                             for node in function.node_def]
    return any(is_random(node) or _DIFFERS.search(node.type)
               for node in (node_of(each, library) for each in nodes))
