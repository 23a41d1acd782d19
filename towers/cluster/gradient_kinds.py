"""Which gradients a worker adds up with those of the others, to be compared among all workers.

Gradients of several workers meet by their place in a message (ring), or by the number of gradients
that a sum waits for (parameter servers). Where a worker has other ones, or has them in another
order, the gradients of different variables would be added up, or a worker would wait for ever.
The order is that of the variables, since a backward pass computes the gradients of the last ones
first: in an order of names the first message would wait for the end of the backward pass.
"""

import tensorflow.compat.v1 as tf


def kinds_of(cluster, gradients):
    """What has to be the same on all workers of these gradients.

    Args:
      cluster: `Cluster`.
      gradients: list of `(gradient, variable)` of this machine.

    Returns:
      List of `[name of the variable, kind]`. It is in the order of the gradients where each worker
      makes the update from the sums: there a global norm, too, is rounded by the order. On
      parameter servers it is in the order of names, since sums are told apart by name there; and
      an asynchronous worker applies its own gradients, be they dense or sparse.
    """
    kinds = []
    for gradient, variable in gradients:
        kind = gradient.dtype.base_dtype.name
        if cluster.kind != 'ps' or cluster.synchronous:
            kind = '%s %s' % (
                'sparse' if isinstance(gradient, tf.IndexedSlices) else 'dense', kind)
        kinds.append([variable.op.name, kind])
    return kinds if cluster.kind != 'ps' else sorted(kinds)


def difference_of_kinds(own, other):
    """How a worker's `kinds_of`, `other`, differ from worker 0's, `own`: a clause, or None."""
    ours, theirs = dict(own), dict(other)
    for name in list(ours) + list(theirs):
        if ours.get(name) != theirs.get(name):
            return ('it trains other variables, or trains them otherwise: the gradient of %r is '
                    '%s, and that of worker 0 %s. Have the loss computed from the same variables '
                    'in the same way on every worker, with the same var_list' % (
                        name, theirs.get(name, 'missing'), ours.get(name, 'missing')))
    for (our_name, _), (their_name, _) in zip(own, other):
        if our_name != their_name:
            return ('its variables are in another order: %r is before %r, and on worker 0 behind '
                    'it. Gradients travel in this order: make the variables, or list them in '
                    'var_list, in one order on all workers, such as that of sorted(names), and '
                    'not in that of a set' % (their_name, our_name))
    return None
