"""The builds of one graph that train over the machines of a cluster, such as the two of a GAN.

`join` is given one of them. What the workers compare, and what worker 0 gives to the others, is of
all: a second build with its variables in another order would add up gradients of different ones.
"""

import tensorflow.compat.v1 as tf

from towers.errors import ClusterError

_KEY = ('__towers_builds_of_clusters',)
"""Of a collection of the graph. TensorFlow writes those with a string for a key into checkpoints'
graphs, as it does not its own with such a tuple."""


def record_build(built):
    """Records a build in its graph, for `builds_of`."""
    tf.add_to_collection(_KEY, built)


def builds_of(built):
    """List of all builds over machines in the graph of a build, in the order they were made."""
    with built.train_op.graph.as_default():
        return list(tf.get_collection(_KEY))


def shared_variables(built):
    """List of the variables that all workers have with the graph of a build, sorted by name.

    What is trained is the same on all workers, whatever collection it is in.
    """
    variables = {variable.op.name: variable for variable in tf.global_variables() + [
        variable for each in builds_of(built) for _, variable in each.gradients]}
    return [variables[name] for name in sorted(variables)]


def shared_scope(name):
    """The name of a scope for what workers share by its name; of each build another one.

    It stands at the root of the graph: the caller's name scope may be one of each worker
    (`tf.name_scope('worker_%d' % rank)`), and each would wait for ever for what it alone has.

    Args:
      name: a name, the same on all workers.

    Returns:
      A text for `tf.name_scope`, which ends with a slash.
    """
    count = len(tf.get_collection(_KEY))
    return '%s%s/' % (name, '_%d' % count if count else '')


def check_goes_with_others(cluster):
    """Raises `ClusterError` for one more build of parameter servers in this graph."""
    if cluster.kind == 'ps' and tf.get_collection(_KEY):
        raise ClusterError(
            'this graph has a build with cluster= already, and parameter servers take one a graph: '
            "use kind='ring', which takes several.")
