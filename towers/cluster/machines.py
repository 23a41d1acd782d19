"""What every combination of gradients over machines does, and the builds of a graph that have one.

A worker without data gives no gradient, a machine's gradient has a weight, and what has to be the
same on all workers is recorded for the comparison. Several builds of one graph, such as the two of
a GAN, train in a ring and by Horovod: `join` is given one of them, and what the workers compare,
and what worker 0 gives to the others, is of all.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.graph.variable_access import Writes
from towers.placement.variable_device import only_device

_NO_GRADIENT = 'TowersGradientOverMachines'
_BUILDS = ('__towers_builds_of_clusters',)
"""Of a collection of the graph. TensorFlow writes those with a string for a key into checkpoints'
graphs, as it does not its own with such a tuple."""


class Machines:
    """Combines the gradients of one build over machines; for `Cluster.machines`.

    Attributes:
      kinds: `kinds_of` the gradients of this machine.
      combined: list of `(gradient, variable)`, what `combine` returned.
      sums: names of the operations of `combined` where all workers make one step together; else
        empty.
      gates: list of operations that every write of a step waits for, of the optimizer and of
        updates that ride on the train op. On the chief of synchronous parameter servers all
        gradients of all workers have come then, since the others read what it writes. With
        `active` they also say that a worker has data. Else empty: nobody else reads what this
        worker writes.
      begin: operation to be run when a session has begun, without which no step is made; or None.
      redirect: function to be called when the program has made all of its operations, see
        `write_order`; or None.
      connection: `Connection` of this worker while it is a member; else None.
      written: dict from names of variables to the operations by which the update of each worker
        writes them; empty where the chief alone makes it.
      model: names of the operations of the model that the update waits for.
      state: list of the variables that worker 0 gives to the others in each step.
    """
    kinds, combined, gates, begin, redirect = (), (), (), None, None
    written, model, state, connection = {}, frozenset(), (), None
    sums = frozenset()

    def combine(self, gradients, loss=None):
        """The gradients for the update.

        Args:
          gradients: list of `(gradient, variable)` of this machine's towers, combined.
          loss: of this machine's batch. It reads the weights before any machine changes them.

        Returns:
          Such a list; in a ring and by Horovod the same on every worker bit for bit. A gradient of
          these, for an optimizer of second order, is a `ClusterError`: TensorFlow would go on to
          this machine's part alone, or to none.
        """
        self.kinds = kinds_of(gradients)
        if self._cluster.active is not None and self._cluster.num_workers > 1:
            gradients = data_end.of_batches(gradients, self._cluster.active)
        self.combined = self._over_machines(gradients, loss)
        if self._cluster.synchronous and self._cluster.num_workers > 1 and (
                not self._cluster.has_local_steps):
            self.combined = [(without_gradient(gradient), variable)
                             for gradient, variable in self.combined]
            self.sums = frozenset(getattr(gradient, 'values', gradient).op.name
                                  for gradient, _ in self.combined)
        return self.combined

    @property
    def same_examples(self):
        """This machine's number of examples, if all machines need the same number; else None."""
        return self._shares.same_examples

    def join(self, connection):
        """Notes that this worker is a member, by its `Connection`."""
        self.connection = connection

    def begin_session(self, session):
        """Lets the steps of a session be made; called when it has begun."""
        if self.begin is not None:
            session.run(self.begin)

    def note_update(self, update, before):
        """Records what the update writes, for the comparison of the workers.

        Args:
          update: the operation that updates the weights.
          before: list of the tensors and operations of the model that the optimizer waits for.
        """
        self.model = frozenset(op.name for op in step_operations(before))
        known = {variable.op.name for variable in tf.global_variables() + [
            variable for _, variable in self.combined]}
        finder, self.written = Writes(tf.get_default_graph()), {}
        for op in step_operations([update]):
            for name in finder.of(op) if op.name not in self.model else ():
                if name in known:
                    self.written.setdefault(name, []).append(op)

    def note(self, built, redirect):
        """Records the build, when it is complete, for `builds_of`.

        Args:
          built: `BuiltTowers`.
          redirect: see the class.
        """
        self.redirect = redirect
        tf.add_to_collection(_BUILDS, built)


class Shares:
    """The weight of a machine's gradient: w = n_w / n for the mean, W n_w / n for the sum.

    n_w are the examples of worker w, n those of all W workers in the step. With the same number on
    each worker, w is 1 / W for the mean and 1 for the sum, and nothing has to be multiplied. A
    worker that is not active has n_w = 0.

    Attributes:
      is_mean: whether the reduction is `'mean'`.
      are_weighted: whether the weights differ from step to step.
    """

    def __init__(self, cluster, examples, reduction):
        """
        Args:
          cluster: `Cluster`.
          examples: n_w: an int, or an int scalar tensor.
          reduction: `'mean'` or `'sum'`.
        """
        self.is_mean = reduction == 'mean'
        self.are_weighted = (cluster.uneven or cluster.active is not None
                             or not isinstance(examples, int))
        self._cluster, self._examples = cluster, examples

    @property
    def same_examples(self):
        """n_w where it has to be the same on all workers, else None."""
        return None if self.are_weighted else self._examples

    def own_examples(self):
        """n_w as a float64 scalar."""
        examples = tf.cast(self._examples, tf.float64)
        if self._cluster.active is not None:
            examples *= tf.cast(self._cluster.active, tf.float64)
        return examples

    def weight(self, total):
        """The weight, a float64 scalar, from `total`, all workers' examples n; 0 where n is 0."""
        factor = 1. if self.is_mean else float(self._cluster.num_workers)
        return factor * self.own_examples() / tf.maximum(total, 1.)

    def constant(self):
        """The weight with the same number of examples on each worker, a float."""
        return 1. / self._cluster.num_workers if self.is_mean else 1.


def kinds_of(gradients):
    """List of `[name of the variable, kind]` of a machine's gradients, a list of pairs.

    Gradients of several workers meet by their place in a message (ring), or by the number of
    gradients that a sum waits for (parameter servers): of other variables, or in another order,
    those of different variables would be added up, or a worker would wait for ever.
    """
    return [[variable.op.name, ('sparse ' if isinstance(gradient, tf.IndexedSlices) else 'dense ')
             + gradient.dtype.base_dtype.name] for gradient, variable in gradients]


def builds_of(built):
    """List of all builds over machines in the graph of a build, in the order they were made."""
    with built.train_op.graph.as_default():
        return list(tf.get_collection(_BUILDS))


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
    count = len(tf.get_collection(_BUILDS))
    return '%s%s/' % (name, '_%d' % count if count else '')


def check_goes_with_others(cluster):
    """Raises `ClusterError` for one more build of parameter servers in this graph."""
    if cluster.kind == 'ps' and tf.get_collection(_BUILDS):
        raise ClusterError(
            'this graph has a build with cluster= already, and parameter servers take one a graph: '
            "use kind='ring', which takes several.")


def without_gradient(gradient, beside=None):
    """The same gradient, dense or sparse, which cannot be differentiated.

    Args:
      gradient: a tensor, or `IndexedSlices`.
      beside: where it is not computed from the variables, in TensorFlow's eyes, such as what comes
        from a server: this machine's part of it, by which TensorFlow finds the way to them.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            without_gradient(gradient.values, None if beside is None else beside.values),
            gradient.indices, gradient.dense_shape)
    compat.register_gradient(_NO_GRADIENT, _refuse_gradient)
    with only_device(gradient.device or None), gradient.graph.gradient_override_map(
            {'Identity': _NO_GRADIENT, 'IdentityN': _NO_GRADIENT}):
        return tf.identity(gradient) if beside is None else tf.identity_n([gradient, beside])[0]


def _refuse_gradient(op, *unused_gradients):
    raise ClusterError(
        'a gradient of %r, the gradient over several machines, is taken: it would be of one '
        "machine's examples. Take second derivatives in the model function, of its loss, and put "
        'them into the loss; or train on one machine.' % op.name)
