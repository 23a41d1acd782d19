"""The gradients of a build over machines, its step, and the builds of a graph that have these.

Several builds of one graph, such as the two of a GAN, train in a ring and by Horovod: `join` is
given one of them, and takes in all.
"""

import collections
import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.worker_step import Shares, without_gradient
from towers.errors import ClusterError
from towers.graph.graph_walk import ancestors, reachable_from, step_operations
from towers.graph.order import Frames, to_wait_for
from towers.graph.variable_access import Writes, is_variable, read_from, variable_op
from towers.placement.variable_device import only_device
from towers.tower.gradient_pairs import rows_once, tensors_of

BUILDS = ('__towers_builds_of_clusters',)
"""Of a collection of the graph. TensorFlow writes those with a string for a key into checkpoints'
graphs, as it does not its own with such a tuple."""


Engine = collections.namedtuple(
    'Engine', 'name arguments combine broadcast configure place gathered', defaults=(None, None))
Engine.__doc__ = """What makes a kind of cluster work; `cluster.cluster` has the list of all.

Fields:
  name: in words.
  arguments: names of the arguments of `Cluster` that are of this kind, and not of all.
  combine: function of a `Cluster`, gradients and `Shares`, where several workers make one step:
    what becomes of the gradients, a `Combined`.
  broadcast: function of a `Cluster` and variables that makes the operation by which all workers get
    those of worker 0; None where servers have them.
  configure: function of a `Cluster` and a `tf.ConfigProto`, to which it adds what sessions need.
  place: None where workers have addresses; else function that gives `(their number, this rank)`.
  gathered: and function that gives the texts of all workers, by rank, from that of this one.
"""

Combined = collections.namedtuple('Combined', 'gradients gates begin_session step', defaults=(
    lambda session: None, lambda update: update))
Combined.__doc__ = """What becomes of a machine's gradients: `gradients`, `gates`, `begin_session`
as in `Machines`; `step` is a function from the update to the operation of a step."""


class Machines:
    """The gradients of one build over machines, and its step; made by `Cluster.combine`.

    Attributes:
      own: list of `(gradient, variable)` of this machine's towers.
      gradients: such a list, for the update; in a ring and by Horovod the same bits on all workers.
      names_of_sums: of the operations of `gradients`, if all workers make one step; else empty.
      gates: list of operations that every write of a step waits for: on the chief of parameter
        servers the arrival of all gradients, until which the other workers read the variables; with
        `active` the proof that a worker has data.
      same_examples: this machine's number of examples, if all need the same number; else None.
      updates_here: whether this worker makes the update; with `served_rank` the chief alone does.
      begin_session: function by which a session lets its steps be made.
      connection: `Connection` of this worker when it has become a member; else None.

    And of the step, when it is made:

      redirect: function to call when the graph is complete, see `tower.write_order`.
      written: dict from names of variables to the operations by which the update writes them.
      model: names of the operations of the model that the update waits for.
      state: list of the variables that worker 0 gives to the others in each step.
    """
    written, model, state, connection = {}, frozenset(), (), None

    def __init__(self, cluster, gradients, loss, examples, reduction):
        shares = Shares(cluster, examples, reduction, loss)
        self._cluster = cluster
        self.own, self.same_examples = gradients, shares.same_examples
        self.updates_here, self.names_of_sums = not cluster.served_rank, frozenset()
        if cluster.active is not None and cluster.num_workers > 1:
            gradients = worker_step.empty_at_end(gradients, cluster.active)
        combine = _of_this_worker if cluster.workers_a_step == 1 else cluster.engine.combine
        self.gradients, self.gates, self.begin_session, self._step = combine(
            cluster, gradients, shares)
        if cluster.workers_a_step > 1:
            self.gradients = [(without_gradient(each), variable)
                              for each, variable in self.gradients]
            self.names_of_sums = frozenset(
                getattr(each, 'values', each).op.name for each, _ in self.gradients)

    def note(self, built):
        """Records the complete build in its graph, for `builds_of`."""
        tf.add_to_collection(BUILDS, built)

    def step(self, update, before, replicated, redirect):
        """The operation of a step, with the operation `update` where this worker makes it.

        `before` is a list of what the optimizer waits for in the model, `replicated` the names of
        variables of which this worker's towers have replicas."""
        self.redirect = redirect or (lambda: None)
        self.model = frozenset(op.name for op in step_operations(before))
        known = {variable.op.name for variable in tf.global_variables() + [
            variable for _, variable in self.gradients]}
        self.written = _writes_of(Writes(update.graph), known, [
            op for op in step_operations([update]) if op.name not in self.model])
        if self._cluster.has_copies and self._cluster.workers_a_step > 1:
            update, self.state = _share_state(self._cluster, self, update, before, replicated)
        return self._step(update)


def _of_this_worker(cluster, gradients, unused_shares):
    """The `Combined` for an update by the gradients of this worker alone, whose data may end."""
    gradients, gates = rows_once(gradients), []
    if cluster.active is not None:
        gates = [worker_step.raise_at_end(cluster.active < .5)]
        gradients = worker_step.after(gates[0], gradients)
    if cluster.num_workers == 1:
        return Combined(gradients, gates)
    check, begin = worker_step.session_begun()
    return Combined(worker_step.after(check, gradients), gates, begin)


def _writes_of(finder, names, operations):
    """{name of a variable: those of the operations that write it}, for the variables `names`."""
    writes = {}
    for op in operations:
        for name in names.intersection(finder.of(op)):
            writes.setdefault(name, []).append(op)
    return writes


def _share_state(cluster, machines, update, before, replicated):
    """Gives worker 0's state to the other workers, where the model writes it and training reads it:
    `(operation of the step, list of the variables that worker 0 gives to the others in it)`.

    A codebook, centers of classes, a learning rate that falls with the loss: every worker writes
    its copy from its own batch. So worker 0's value goes to the others after all of the model's
    writes, and before the update, whose reads wait for it. State that training only writes, such as
    moving averages, needs no message, nor does what the update writes.
    """
    finder, step, model = Writes(tf.get_default_graph()), step_operations([update]), machines.model
    sums, own = tensors_of(machines.gradients), machines.own
    trained = [variable for _, variable in own]
    behind = model | {op.name for op in step_operations(sums)}
    of_update = [op for op in step if op.name not in behind]
    known = {variable.op.name: variable for variable in tf.global_variables() + trained}
    trained = {variable.op.name for variable in trained}
    read = ancestors(tensors_of(own)).union(trained, [
        each.name for op in of_update for tensor in op.inputs for each in read_from(tensor)])
    writes = _writes_of(finder, read.intersection(known), [op for op in step if op.name in model])
    if not writes:
        return update, []
    _check_trained(writes, trained, replicated, tensors_of(own))
    _check_reads(writes, model, of_update, own)
    reached = reachable_from([op for each in writes.values() for op in each], step, control=True)
    waits_for = [each for op in (getattr(end, 'op', end) for end in before) if op.name in reached
                 for each in to_wait_for(op, finder)] + [tensor.op for tensor in sums]
    with only_device('/cpu:0'), tf.name_scope('shared_state'):
        for name in sorted(writes):
            with tf.control_dependencies(waits_for):
                waits_for = [cluster.engine.broadcast(cluster, [known[name]])]
    for op in of_update:
        if any(_held(tensor) in writes for tensor in op.inputs):
            compat.add_control_inputs(op, waits_for)
    return tf.group(update, *waits_for), [known[name] for name in sorted(writes)]


def _held(tensor):
    """The name of the variable whose handle or reference a tensor is; else None."""
    source = variable_op(tensor) if is_variable(tensor) else None
    return None if source is None else source.name


def _check_trained(writes, trained, replicated, gradients):
    forward = {op.name for op in step_operations(gradients)}
    for name in sorted(trained.intersection(writes)):
        if name in replicated:
            raise ClusterError(
                "VariablePlacement('replicated'), and the model writes the trained variable %r "
                '(%r), on each worker for itself. Use another placement.' % (
                    name, writes[name][0].name))
        for op in writes[name]:
            if op.name in forward:
                raise ClusterError(
                    'the forward pass writes the trained variable %r (%r): each worker would '
                    'compute with its own value. Put the update into the collection UPDATE_OPS, or '
                    "return it in 'updates'." % (name, op.name))


def _check_reads(writes, model, of_update, own):
    """Raises for a value of the state that the update takes, and that may be this worker's own."""
    gradients = {tensor.op.name for tensor in tensors_of(own)}
    # What was made before the gradients the program may run at any time.
    first = {op.name for op in itertools.takewhile(
        lambda op: op.name not in gradients, tf.get_default_graph().get_operations())}
    frames = Frames(of_update)
    for op in of_update:
        is_late = op.name not in first and frames.is_outside(op)
        for tensor in op.inputs:
            held = _held(tensor)
            if held is not None:
                taken = [] if is_late else [held]
            else:
                taken = [each.name for each in read_from(tensor)] if tensor.op.name in model else []
            for name in writes.keys() & set(taken):
                raise ClusterError(
                    'variable %r is written by the model of each worker and read by %r, for the '
                    'update of the weights, at a time that cannot be told. Give the optimizer the '
                    'variable itself (use_resource=True), or read it in transform_gradients by '
                    'read_value().' % (name, op.name))


def builds_of(built):
    """List of all builds over machines in the graph of a build, in their order."""
    return built.train_op.graph.get_collection(BUILDS)


def shared_variables(built):
    """List of the variables that all workers have, global or trained, sorted by name."""
    variables = {variable.op.name: variable for variable in tf.global_variables() + [
        variable for each in builds_of(built) for _, variable in each.gradients]}
    return [variables[name] for name in sorted(variables)]
