"""The gradients of a build over machines, its step, and the list of such builds in a graph.

A `StepOfWorkers` is made before this machine's towers have gradients: it weights their losses, and
exchanges values of the forward pass. Its `combine` gives an `Exchange`, which combines the
gradients with the gradients of the other machines. Its `completed` gives `Machines`, the complete
value, when the update is there. Several builds of one graph, such as the two builds of a GAN, can
train in a ring and by Horovod: `join` is given one of these builds, and takes in all.

Words of `Cluster` used here: `workers_a_step` workers' gradients are in an update, 1 where each
worker steps by itself; a cluster `has_copies` of the variables, one on each worker, in a ring and
by Horovod; a worker has a `served_rank` where several make one step on parameter servers; `active`
is not None if the data of a worker may end before the data of others.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.cluster import worker_step
from towers.cluster.engine import EngineGradients, EngineStep, Pairs
from towers.cluster.shared_state import SharedState, writes_of
from towers.cluster.worker_step import Weighting, without_gradient
from towers.gradients.gradient_pairs import rows_once, variables_of
from towers.graph.graph_walk import (
    Recording,
    names_of,
    operation_names,
    step_operations,
    variables_by_name,
    without_names,
)
from towers.graph.variable_access import Writes

BUILDS = ('__towers_builds_of_clusters',)
"""The key of the collection of builds. TensorFlow writes a collection whose key is a string into
the graphs of checkpoints; it leaves out a collection with such a tuple for a key, as some of its
own have."""

_CONNECTION = ('__towers_connection',)  # the key of the collection with the graph's `Connection`


class StepOfWorkers:
    """A step of the workers of a cluster, before its gradients; made by `Cluster.begin_step`.

    Attributes:
      loss_weight: by which this worker's losses are multiplied, a float or a float64 scalar, see
        `Weighting`; 1. where its gradients are multiplied instead, or are not added up with the
        gradients of other workers.
      workers: the `Workers` with which values of the forward pass are exchanged; None if no values
        are exchanged.
      same_examples: this machine's number of examples, if all need the same number; else None.
    """

    def __init__(self, cluster: typing.Any, examples: typing.Any, reduction: str):
        """Begins a step; the arguments are those of `Cluster.begin_step`."""
        with Recording(tf.get_default_graph()) as begin:
            weighting = Weighting(cluster, examples, reduction)
            # A single worker does, an asynchronous worker, and a worker in local steps.
            updates_by_own_gradients = cluster.workers_a_step == 1
            if updates_by_own_gradients:
                step = EngineStep(functools.partial(_gradients_of_this_worker, cluster))
            else:
                step = cluster.engine.begin_step(cluster, weighting)
        self.loss_weight = step.loss_weight
        self.workers = step.workers
        self.same_examples = weighting.same_examples
        self._cluster = cluster
        self._combine = step.combine
        self._names_of_begin = names_of(begin.operations)

    def combine(self, gradients: Pairs, loss: typing.Optional[tf.Tensor],
                values: typing.Sequence[tf.Tensor] = ()) -> 'Exchange':
        """The `Exchange` of this machine's gradients with the other machines.

        Args:
          gradients: `(gradient, variable)` pairs over this machine's towers, whose losses have the
            factor `loss_weight`.
          loss: of this machine's batch, without that factor; or None.
          values: the sums over the workers that the forward pass computes in each step. The
            operation that ends the training waits for them: a worker that ended before one of
            them would leave the others waiting in it.
        """
        combine = functools.partial(self._combine, loss=loss, values=values)
        return Exchange(self._cluster, gradients, self.same_examples, combine, values,
                        self._names_of_begin)


class Exchange:
    """The gradients of one build over machines; made by `StepOfWorkers.combine`.

    Attributes:
      cluster: the `Cluster`.
      own: list of `(gradient, variable)` of this machine's towers.
      gradients: list of `(gradient, variable)` for the update, see `EngineGradients`.
      conditions: what every write of a step waits for, see `EngineGradients`.
      names_of_sums: names of the operations that give sums over all workers: of `gradients`, and of
        values of the whole batch; empty where each worker steps by itself.
      same_examples: this machine's number of examples, if all need the same number; else None.
      names_of_begin: names of the operations that begin the step, before the towers: by these the
        workers tell each other how many examples they have.
      updates_here: whether this worker makes the update.
      begin_session: function of a session, which lets the steps of the session be made.
    """

    def __init__(self, cluster: typing.Any, gradients: Pairs,
                 same_examples: typing.Optional[int], combine: typing.Callable,
                 values: typing.Sequence[tf.Tensor], names_of_begin: typing.AbstractSet[str]):
        """Combines the gradients over the machines.

        Args:
          cluster: the `Cluster`.
          gradients: as for `StepOfWorkers.combine`.
          same_examples: see the class.
          combine: function of gradients that gives the `EngineGradients`.
          values: as for `StepOfWorkers.combine`.
          names_of_begin: see the class.
        """
        self.cluster = cluster
        self.names_of_begin = names_of_begin
        self.own = gradients
        self.same_examples = same_examples
        # Where several workers make one step on parameter servers, the chief alone updates.
        makes_step_on_servers = cluster.served_rank is not None
        leaves_update_to_chief = makes_step_on_servers and not cluster.is_chief
        self.updates_here = not leaves_update_to_chief
        data_may_end = cluster.active is not None
        if data_may_end and cluster.num_workers > 1:  # a single worker stops when its data end
            gradients = worker_step.empty_at_end(gradients, cluster.active)
        combined = combine(gradients)
        self.gradients = combined.gradients
        self.conditions = combined.conditions
        self.begin_session = combined.begin_session
        self._operation_of_step = combined.operation_of_step  # a function of the update
        self.names_of_sums: typing.FrozenSet[str] = frozenset()
        are_sums_over_workers = cluster.workers_a_step > 1
        if are_sums_over_workers:
            # A derivative of the sums would be the derivative of this machine's summands alone.
            self.gradients = [(without_gradient(gradient), variable)
                              for gradient, variable in self.gradients]
            self.names_of_sums = _names_of_sums(self.gradients, values)

    def completed(self, update: tf.Operation, awaited: typing.Sequence,
                  replicated: typing.Container[str],
                  redirect: typing.Optional[typing.Callable]) -> 'Machines':
        """The `Machines` of the build, when its update is there.

        Args:
          update: the operation of the update. A worker that leaves the update to the chief has the
            same operation, and never runs it.
          awaited: what the optimizer waits for in the model: losses, and update ops that run
            with the update.
          replicated: names of the variables of which this worker's towers have replicas.
          redirect: function that makes operations which wait for skippable updates wait for what
            always runs, see `roles.update_order`; None where no update can be skipped.
        """
        model_operations = frozenset(names_of(step_operations(awaited)))
        written = self._writes_of_update(update, model_operations)
        state: typing.List[tf.Variable] = []
        if self._needs_state_of_worker_0():
            shared_state = SharedState(self.own, self.gradients, update, model_operations)
            state = shared_state.variables(replicated)
            if state:
                update = shared_state.sent_before_update(self.cluster, update, awaited)
        return Machines(exchange=self, train_op=self._operation_of_step(update),
                        redirect=redirect or _redirect_nothing, written=written,
                        model_operations=model_operations, state=state)

    def _writes_of_update(self, update: tf.Operation, model_operations: typing.Container[str]
                          ) -> typing.Dict[str, typing.List[tf.Operation]]:
        """The operations by which the update writes global and trained variables, by the name of
        the variable. Operations of the model, which have the names `model_operations`, are no part
        of the update."""
        variable_names = operation_names(tf.global_variables() + variables_of(self.gradients))
        update_operations = without_names(step_operations([update]), model_operations)
        return writes_of(Writes(update.graph), variable_names, update_operations)

    def _needs_state_of_worker_0(self) -> bool:
        """Whether the update has to read worker 0's values of the model's state, which each worker
        writes from its own batch. It has to where each worker makes the one update of all workers:
        by their own states, their updates would differ. It has not to where all workers share the
        variables on servers, nor where a worker makes steps of its own, by its own state."""
        updates_of_all = self.cluster.workers_a_step > 1
        return self.cluster.has_copies and updates_of_all


def _names_of_sums(gradients: Pairs, values: typing.Sequence[tf.Tensor]) -> typing.FrozenSet[str]:
    """Names of the operations that give sums over all workers: the combined gradients, and the
    `values` of the forward pass. Of a sparse gradient it is the operation that gives the gradient's
    values."""
    names = [tensor.op.name for tensor in values]
    for gradient, _ in gradients:
        value: typing.Any = getattr(gradient, 'values', gradient)
        names.append(value.op.name)
    return frozenset(names)


def _redirect_nothing() -> None:
    """Takes the place of `Machines.redirect` in a build without updates that may be skipped."""


class Machines(typing.NamedTuple):
    """The gradients of one build over machines, and its step."""
    exchange: Exchange
    train_op: tf.Operation  # the operation of a step
    redirect: typing.Callable
    """Function to call when the graph is complete: makes operations that wait for skippable updates
    wait for what always runs, see `roles.update_order`."""
    written: typing.Dict[str, typing.List[tf.Operation]]
    """From names of variables to the operations by which the update writes them."""
    model_operations: typing.FrozenSet[str]
    """Names of the operations of the model that the update waits for."""
    state: typing.List[tf.Variable]  # whose values worker 0 gives to the others in each step

    @property
    def updates_here(self) -> bool:
        """Whether this worker makes the update."""
        return self.exchange.updates_here

    def note(self, built: typing.Any) -> None:
        """Records the complete build, which has these machines, in its graph, for `builds_of`."""
        tf.add_to_collection(BUILDS, built)


def _gradients_of_this_worker(cluster: typing.Any, gradients: Pairs, loss: typing.Any,
                              values: typing.Any) -> EngineGradients:
    """The gradients of a worker that makes its update by its own gradients alone: of a single
    worker, an asynchronous one, or one in local steps; see `StepOfWorkers.combine`."""
    del loss, values  # which are for steps of several workers
    # An optimizer's kernel adds up rows of one index in any order: bits would differ between runs.
    gradients = rows_once(gradients)
    conditions = []
    data_may_end = cluster.active is not None
    if data_may_end:
        ended = worker_step.raise_at_end(cluster.active < .5)
        conditions = [ended]
        gradients = worker_step.after(ended, gradients)
    if cluster.num_workers == 1:  # it begins with its own values: any session will do
        return EngineGradients(gradients, conditions)
    # Several workers begin with the values of worker 0, though each steps by itself: no step is
    # made in a session that has not begun with these values.
    guard = worker_step.session_guard()
    gradients = worker_step.after(guard.check, gradients)
    return EngineGradients(gradients, conditions, begin_session=guard.begin)


def builds_of(built: typing.Any) -> typing.List[typing.Any]:
    """All builds over machines in the graph of a build, in the order of making."""
    return built.train_op.graph.get_collection(BUILDS)


def number_of(built: typing.Any) -> int:
    """The position of a build among `builds_of` its graph."""
    # A build is a tuple, and to compare tuples would compare their tensors. Each build has an
    # `Exchange` of its own, which is equal to itself alone.
    exchanges = [each.machines.exchange for each in builds_of(built)]
    return exchanges.index(built.machines.exchange)


def note_connection(built: typing.Any, connection: typing.Any) -> None:
    """Records in the graph of a build that this worker has joined the cluster by a `Connection`."""
    built.train_op.graph.get_collection_ref(_CONNECTION)[:] = [connection]


def connection_of(built: typing.Any) -> typing.Any:
    """The `Connection` by which this worker has joined with the builds of this graph; or None."""
    connections = built.train_op.graph.get_collection(_CONNECTION)
    return connections[0] if connections else None


def on_own_devices(built: typing.Any, run_metadata: tf.RunMetadata) -> tf.RunMetadata:
    """The metadata of a step with the names that this worker's devices have in the graph of a
    build: in a session of a cluster they begin with the worker's job and task.

    Args:
      built: the result of `build_towers`, with or without a cluster.
      run_metadata: of a step.
    """
    if built.machines is None:
        return run_metadata
    task = built.machines.exchange.cluster.own_task
    renamed = tf.RunMetadata()
    renamed.CopyFrom(run_metadata)
    for partition in renamed.partition_graphs:
        for node in partition.node:
            node.device = _on_this_process(node.device, task)
    for stats in renamed.step_stats.dev_stats:
        stats.device = _on_this_process(stats.device, task)
    return renamed


def _on_this_process(device: str, task: str) -> str:
    """The name of a device of a task in a process without a cluster; other names stay."""
    if device.startswith(task + '/'):
        return '/job:localhost/replica:0/task:0' + device[len(task):]
    return device


def shared_variables(built: typing.Any) -> typing.List[tf.Variable]:
    """List of the variables that all workers have, global or trained, sorted by name."""
    variables = tf.global_variables()
    for each in builds_of(built):
        variables += variables_of(each.gradients)
    by_name = variables_by_name(variables)
    return [by_name[name] for name in sorted(by_name)]
