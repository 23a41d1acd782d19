"""What the update of a ring, or of Horovod, may not be computed from, since every worker makes it.

Gradient noise, a rate that a Python function returns, the time, or a tensor of the model's forward
pass would be another one on each worker, and their weights would drift apart without an error.
"""

import collections
import re

import tensorflow.compat.v1 as tf

from towers.errors import ClusterError
from towers.graph.graph_walk import functions_of, is_random

_DIFFERS = re.compile('PyFunc|Timestamp|Iterator|Dequeue|ReaderRead|ReadFile|Unstage|BarrierTake')


def check_update(operations, models):
    """Raises `ClusterError` for an operation that gives each worker another value for the update.

    Args:
      operations: list of the operations that compute the update from the sums over the workers.
      models: names of the operations of the forward pass.
    """
    library = None
    for op in operations:
        # The towers' shards are placeholders with a default.
        is_shard = op.type == 'PlaceholderWithDefault' and op.name in models and (
            op.outputs[0].shape.ndims != 0)
        if library is None and functions_of(op.node_def):
            library = {each.signature.name: each for each in
                       tf.get_default_graph().as_graph_def().library.function}
        if is_shard or _differs(op.node_def, library, set()):
            raise ClusterError(
                '%r (%s) has a part in the update, which every worker makes by itself: each would '
                'have another value, and their weights would drift apart. Compute the update from '
                'gradients, variables and the global step (noise by tf.random.stateless_normal('
                'shape, seed=[1, global_step])); or let UPDATE_OPS write that value to a variable, '
                "and read the variable, which then has worker 0's value." % (op.name, op.type))


def _differs(node_def, library, seen):
    """Whether an operation, or one in the functions that it calls, differs by worker."""
    if _DIFFERS.search(node_def.op) or is_random(_Node(node_def.op)):
        return True
    called = [name for name in functions_of(node_def) if name in (library or ()) and (
        name not in seen)]
    seen.update(called)
    return any(_differs(each, library, seen) for name in called
               for each in library[name].node_def)


_Node = collections.namedtuple('_Node', 'type')  # what `is_random` looks at
