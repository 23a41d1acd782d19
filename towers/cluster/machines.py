"""What every combination of gradients over machines does, and the builds of a graph that have one.

A worker without data gives no gradient, a machine's gradient has a weight, and what has to be the
same on all workers is recorded for the comparison. Several builds of one graph, such as the two of
a GAN, train in a ring and by Horovod: `join` is given one of them, and what the workers compare,
and what worker 0 gives to the others, is of all.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.cluster.session_steps import SessionBegun
from towers.cluster.shared_state import share_state
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.graph.variable_access import Writes
from towers.placement.variable_device import only_device
from towers.reduce.sparse_rows import rows_once

_NO_GRADIENT = 'TowersGradientOverMachines'
_BUILDS = ('__towers_builds_of_clusters',)
"""Of a collection of the graph. TensorFlow writes those with a string for a key into checkpoints'
graphs, as it does not its own with such a tuple."""


class Machines:
    """The gradients of one build over machines, and its step; made by `Cluster.combine`.

    A subclass for a kind of cluster says how several workers make one step:

        _combined(gradients, shares, loss) -> (gradients, gates, function that begins a session)

    and, where every worker has the variables, how all get those of worker 0; else `_step_of_all`:

        broadcast(variables) -> operation

    Attributes:
      own: list of `(gradient, variable)` of this machine's towers.
      gradients: such a list, for the update; in a ring and by Horovod the same on every worker bit
        for bit. A gradient of these, for an optimizer of second order, is a `ClusterError`:
        TensorFlow would go on to this machine's part alone, or to none.
      sums: names of the operations of `gradients` where all workers make one step together; else
        empty.
      gates: list of operations that every write of a step waits for, of the optimizer and of
        updates that ride on the train op. On the chief of synchronous parameter servers all
        gradients of all workers have come then, since the others read what it writes. With
        `active` they also say that a worker has data. Else empty: nobody else reads what this
        worker writes.
      same_examples: this machine's number of examples, if all need the same number; else None.
      updates_here: whether this worker makes the update; of synchronous parameter servers the chief
        alone does.
      connection: `Connection` of this worker while it is a member; else None.

    And of the step, when it is made:

      redirect: function to be called when the program has made all of its operations, see
        `reduce.update_order`; or None.
      written: dict from names of variables to the operations by which the update of each worker
        writes them; empty where the chief alone makes it.
      model: names of the operations of the model that the update waits for.
      state: list of the variables that worker 0 gives to the others in each step.
    """
    redirect, written, model, state, connection = None, {}, frozenset(), (), None

    def __init__(self, cluster, gradients, loss, examples, reduction):
        """See `Cluster.combine`."""
        shares = Shares(cluster, examples, reduction)
        self._cluster, self.own, self.same_examples = cluster, gradients, shares.same_examples
        self.updates_here, self.sums = not cluster.served_rank, frozenset()
        if cluster.active is not None and cluster.num_workers > 1:
            gradients = data_end.of_batches(gradients, cluster.active)
        if cluster.workers_a_step == 1:
            self.gradients, self.gates, self._begin = _of_this_worker(cluster, gradients)
            return
        gradients, self.gates, self._begin = self._combined(gradients, shares, loss)
        self.gradients = [(without_gradient(each), variable) for each, variable in gradients]
        self.sums = frozenset(getattr(each, 'values', each).op.name for each, _ in self.gradients)

    def step(self, update, before, replicated=(), redirect=None):
        """The operation of a step, with the update where this worker makes it.

        Args:
          update: the operation that updates the weights.
          before: list of the tensors and operations of the model that the optimizer waits for.
          replicated: names of the variables of which this worker's towers have replicas.
          redirect: see the class.
        """
        self.redirect = redirect
        if self._cluster.served_rank is None:
            self.model = frozenset(op.name for op in step_operations(before))
            self.written = _written(update, self.model, self.gradients)
        if self._cluster.workers_a_step == 1:
            return update
        update, self.state = self._step_of_all(update, before, replicated)
        return update

    def _step_of_all(self, update, before, replicated):
        """`(operation of a step of all workers, list of the variables that worker 0 gives them)`.
        """
        return share_state(update, before, self.own, self.gradients,
                           lambda variable: self.broadcast([variable]), replicated)

    def counted(self, examples):
        """The number of examples that this worker adds to the count of all workers in a step."""
        return examples * self._cluster.workers_a_step if self.updates_here else 0

    def note(self, built):
        """Records the complete build in its graph, for `builds_of`."""
        tf.add_to_collection(_BUILDS, built)

    def join(self, connection):
        """Notes that this worker is a member, by its `Connection`."""
        self.connection = connection

    def begin_session(self, session):
        """Lets the steps of a session be made; called when it has begun."""
        if self._begin is not None:
            self._begin(session)


def _of_this_worker(cluster, gradients):
    """As `Machines._combined`, for an update by the gradients of this worker alone."""
    gradients, gates = data_end.own_data(cluster, rows_once(gradients))
    if cluster.num_workers == 1:
        return gradients, gates, None
    begun = SessionBegun()
    return (data_end.after(begun.check(), gradients), gates,
            lambda session: session.run(begun.begin))


def _written(update, model, gradients):
    """{name of a variable: the operations of the update, but for the model's, that write it}."""
    known = {variable.op.name for variable in tf.global_variables() + [
        variable for _, variable in gradients]}
    finder, written = Writes(tf.get_default_graph()), {}
    for op in step_operations([update]):
        for name in finder.of(op) if op.name not in model else ():
            if name in known:
                written.setdefault(name, []).append(op)
    return written


class Shares:
    """The weight of a machine's gradient: w = n_w / n for the mean, W n_w / n for the sum.

    n_w are the examples of worker w, n those of all W workers in the step. With the same number on
    each worker, w is 1 / W for the mean and 1 for the sum, and nothing has to be multiplied. A
    worker that is not active has n_w = 0.

    Attributes:
      is_mean: whether the reduction is `'mean'`.
      are_weighted: whether the weights differ from step to step.
      same_examples: n_w where it has to be the same on all workers, else None.
      constant: the weight with the same number of examples on each worker, a float.
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
        self.same_examples = None if self.are_weighted else examples
        self.constant = 1. / cluster.num_workers if self.is_mean else 1.
        self._cluster, self._examples = cluster, examples

    def own_examples(self):
        """n_w as a float64 scalar."""
        examples = tf.cast(self._examples, tf.float64)
        if self._cluster.active is not None:
            examples *= tf.cast(self._cluster.active, tf.float64)
        return examples

    def of_all(self, total):
        """The weight of one example, a float64 scalar, from all workers' number n; of 0: of 1."""
        return (1. if self.is_mean else float(self._cluster.num_workers)) / tf.maximum(total, 1.)

    def weight(self, total):
        """The weight of this machine, a float64 scalar, from n."""
        return self.own_examples() * self.of_all(total)


def builds_of(built):
    """List of all builds over machines in the graph of a build, in the order they were made."""
    with built.train_op.graph.as_default():
        return list(tf.get_collection(_BUILDS))


def count_builds():
    """How many builds over machines the graph has."""
    return len(tf.get_collection(_BUILDS))


def shared_variables(built):
    """List of the variables that all workers have with the graph of a build, sorted by name.

    What is trained is the same on all workers, whatever collection it is in.
    """
    variables = {variable.op.name: variable for variable in tf.global_variables() + [
        variable for each in builds_of(built) for _, variable in each.gradients]}
    return [variables[name] for name in sorted(variables)]


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
