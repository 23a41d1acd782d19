"""The gradients of a build over machines, its step, and the builds of a graph that have these.

A `StepOfWorkers` is made before this machine's towers have gradients: it weights their losses, and
exchanges values of the forward pass. Its `combine` gives an `Exchange`, which combines the
gradients with those of the other machines; `completed` gives `Machines`, the complete value, when
the update is there. Several builds of one graph, such as the two of a GAN, train in a ring and by
Horovod: `join` is given one of them, and takes in all.
"""

import functools
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.worker_step import Weighting, without_gradient
from towers.errors import ClusterError
from towers.gradients.gradient_pairs import rows_once, tensors_of
from towers.graph.graph_walk import ancestors, names_of, reachable_from, step_operations
from towers.graph.order import Frames, operations_to_await
from towers.graph.variable_access import Writes, is_variable, read_from, variable_op
from towers.placement.variable_device import only_device
from towers.whole_batch.workers import Workers

BUILDS = ('__towers_builds_of_clusters',)
"""The key of the collection of builds. TensorFlow writes collections with a string for a key into
checkpoints' graphs, as it does not its own with such a tuple."""

_CONNECTION = ('__towers_connection',)  # the key of the collection with the graph's `Connection`

Pairs = typing.List[typing.Tuple[typing.Any, tf.Variable]]
"""Gradients, each a tensor or `tf.IndexedSlices`, with their variables."""


class EngineGradients(typing.NamedTuple):
    """The gradients with which a worker makes its update, as a kind of cluster gives them."""
    gradients: Pairs  # in a ring and by Horovod the same bits on all workers
    conditions: typing.List[tf.Operation]
    """What every write of a step waits for: on the chief of parameter servers the arrival of all
    gradients, until which the other workers read the variables; with `Cluster(active=…)` the proof
    that a worker has data."""
    begin_session: typing.Callable = lambda session: None  # lets the steps of a session be made
    operation_of_step: typing.Callable = lambda update: update
    """`f(update)`: the operation of a step of this worker."""


class EngineStep(typing.NamedTuple):
    """A step of several workers before its gradients, as a kind of cluster begins it."""
    combine: typing.Callable
    """`f(gradients, loss, values)`: `EngineGradients`, see `StepOfWorkers.combine`."""
    loss_weight: typing.Union[float, tf.Tensor] = 1.  # by which this worker's losses are multiplied
    workers: typing.Optional[Workers] = None  # None where they exchange no values


class Engine(typing.NamedTuple):
    """What makes a kind of cluster work; `cluster.cluster` has the list of all."""
    name: str  # in words
    arguments: typing.List[str]  # names of the arguments of `Cluster` that are not of all kinds
    begin_step: typing.Callable
    """`f(cluster, weighting)`, where several workers make one step: its `EngineStep`."""
    broadcast: typing.Any
    """`f(cluster, variables)`: the operation by which all workers get those of worker 0; None where
    servers have them."""
    configure: typing.Callable
    """`f(cluster, config)`: adds to a `tf.ConfigProto` what sessions need."""
    place: typing.Optional[typing.Callable] = None
    """None where workers have addresses; else `f()`: `(their number, the rank of this one)`."""
    gathered: typing.Any = None
    """With `place`: `f(text)`: the texts of all workers, by rank, from that of this one."""


class StepOfWorkers:
    """A step of the workers of a cluster, before its gradients; made by `Cluster.begin_step`.

    Attributes:
      loss_weight: by which this worker's losses are multiplied, a float or a float64 scalar, so
        that the sum of the workers' gradients is that of all: n_w / n for the mean, W n_w / n for
        the sum. 1. where its gradients are multiplied, or not added up with others'.
      workers: the `Workers` that values of the forward pass are exchanged with; None if with none.
      same_examples: this machine's number of examples, if all need the same number; else None.
    """

    def __init__(self, cluster: typing.Any, examples: typing.Any, reduction: str):
        """Begins a step; the arguments are those of `Cluster.begin_step`."""
        weighting = Weighting(cluster, examples, reduction)
        step = EngineStep(functools.partial(_of_this_worker, cluster))
        if cluster.workers_a_step > 1:
            step = cluster.engine.begin_step(cluster, weighting)
        self.loss_weight = step.loss_weight
        self.workers = step.workers
        self.same_examples = weighting.same_examples
        self._cluster = cluster
        self._combine = step.combine

    def combine(self, gradients: Pairs, loss: typing.Optional[tf.Tensor],
                values: typing.Sequence[tf.Tensor] = ()) -> 'Exchange':
        """The `Exchange` of this machine's gradients with the other machines.

        Args:
          gradients: `(gradient, variable)` pairs over this machine's towers, whose losses have the
            factor `loss_weight`.
          loss: of this machine's batch, without that factor; or None.
          values: exchanged values that each step computes: when all data end, no worker leaves the
            step before them, for which others wait.
        """
        combine = functools.partial(self._combine, loss=loss, values=values)
        return Exchange(self._cluster, gradients, self.same_examples, combine, values)


class Exchange:
    """The gradients of one build over machines; made by `StepOfWorkers.combine`.

    Attributes:
      own: list of `(gradient, variable)` of this machine's towers.
      gradients: such a list, for the update, see `EngineGradients`.
      conditions: what every write of a step waits for, see `EngineGradients`.
      names_of_sums: of the operations of `gradients`, and of values of the whole batch, if all
        workers make one step; else empty.
      same_examples: this machine's number of examples, if all need the same number; else None.
      updates_here: whether this worker makes the update; with `served_rank` the chief alone does.
      begin_session: function by which a session lets its steps be made.
    """

    def __init__(self, cluster: typing.Any, gradients: Pairs,
                 same_examples: typing.Optional[int], combine: typing.Callable,
                 values: typing.Sequence[tf.Tensor]):
        """Combines the gradients over the machines.

        Args:
          cluster: the `Cluster`.
          gradients: as for `StepOfWorkers.combine`.
          same_examples: see the class.
          combine: function of gradients that gives the `EngineGradients`.
          values: as for `StepOfWorkers.combine`.
        """
        self._cluster = cluster
        self.own = gradients
        self.same_examples = same_examples
        self.updates_here = not cluster.served_rank
        if cluster.active is not None and cluster.num_workers > 1:
            gradients = worker_step.empty_at_end(gradients, cluster.active)
        exchanged = combine(gradients)
        self.gradients = exchanged.gradients
        self.conditions = exchanged.conditions
        self.begin_session = exchanged.begin_session
        self._operation_of_step = exchanged.operation_of_step  # a function of the update
        self.names_of_sums: typing.FrozenSet[str] = frozenset()
        if cluster.workers_a_step > 1:
            self.gradients = [(without_gradient(gradient), variable)
                              for gradient, variable in self.gradients]
            sums: typing.List[typing.Any] = [gradient for gradient, _ in self.gradients]
            sums += values
            self.names_of_sums = frozenset(getattr(each, 'values', each).op.name for each in sums)

    def completed(self, update: tf.Operation, awaited: typing.Sequence,
                  replicated: typing.Container[str],
                  redirect: typing.Optional[typing.Callable]) -> 'Machines':
        """The complete `Machines` of the build.

        Args:
          update: the operation of the update, where this worker makes it.
          awaited: what the optimizer waits for in the model: losses, and update ops that run
            with the update.
          replicated: names of the variables of which this worker's towers have replicas.
          redirect: function that makes operations which wait for skippable updates wait for what
            always runs, see `roles.update_order`; None where no update can be skipped.
        """
        model_operations = frozenset(op.name for op in step_operations(awaited))
        variables = tf.global_variables() + [variable for _, variable in self.gradients]
        update_operations = [op for op in step_operations([update])
                             if op.name not in model_operations]
        written = _writes_of(Writes(update.graph), {each.op.name for each in variables},
                             update_operations)
        state: typing.List[tf.Variable] = []
        if self._cluster.has_copies and self._cluster.workers_a_step > 1:
            sharing = _SharedState(self, update, model_operations)
            state = sharing.variables(replicated)
            if state:
                update = sharing.shared(self._cluster, state, update, awaited)
        return Machines(exchange=self, train_op=self._operation_of_step(update),
                        redirect=redirect or (lambda: None), written=written,
                        model_operations=model_operations, state=state)


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
    state: typing.List[tf.Variable]  # that worker 0 gives to the others in each step

    @property
    def updates_here(self) -> bool:
        """Whether this worker makes the update."""
        return self.exchange.updates_here

    def note(self, built: typing.Any) -> None:
        """Records the complete build, which has these machines, in its graph, for `builds_of`."""
        tf.add_to_collection(BUILDS, built)


def _of_this_worker(cluster: typing.Any, gradients: Pairs, loss: typing.Any,
                    values: typing.Any) -> EngineGradients:
    """The `EngineGradients` of a worker that makes its update by its own gradients alone: a single
    one, an asynchronous one, or one in local steps."""
    del loss, values  # for steps of several workers
    gradients = rows_once(gradients)
    conditions = []
    if cluster.active is not None:
        ended = worker_step.raise_at_end(cluster.active < .5)
        conditions = [ended]
        gradients = worker_step.after(ended, gradients)
    if cluster.num_workers == 1:
        return EngineGradients(gradients, conditions)
    guard = worker_step.session_guard()
    gradients = worker_step.after(guard.check, gradients)
    return EngineGradients(gradients, conditions, guard.begin)


def _writes_of(finder: Writes, names: typing.Set[str], operations: typing.Iterable[tf.Operation]
               ) -> typing.Dict[str, typing.List[tf.Operation]]:
    """Those of the operations that write a variable, by its name.

    Args:
      finder: of the graph's writes.
      names: of the variables to look for.
      operations: to look among.
    """
    writes: typing.Dict[str, typing.List[tf.Operation]] = {}
    for op in operations:
        for name in names.intersection(finder.of(op)):
            writes.setdefault(name, []).append(op)
    return writes


class _SharedState:
    """The state that the model writes and training reads, which worker 0 gives to the others.

    A codebook, centers of classes, a learning rate that falls with the loss: every worker writes
    its copy from its own batch. So worker 0's value goes to the others after all of the model's
    writes, and before the update, whose reads wait for it. State that training only writes, such as
    moving averages, needs no message, nor does what the update writes.
    """

    def __init__(self, exchange: Exchange, update: tf.Operation,
                 model_operations: typing.FrozenSet[str]):
        """
        Args:
          exchange: of the build.
          update: the operation of its update.
          model_operations: names of the operations of the model that the update waits for.
        """
        self._finder = Writes(tf.get_default_graph())
        self._model_operations = model_operations
        self._step = step_operations([update])
        self._sums = tensors_of(exchange.gradients)
        self._own_gradients = tensors_of(exchange.own)
        before_update = model_operations | names_of(step_operations(self._sums))
        self._update_operations = [op for op in self._step if op.name not in before_update]
        trained = [variable for _, variable in exchange.own]
        self._trained_names = {variable.op.name for variable in trained}
        self._variables = {variable.op.name: variable
                           for variable in tf.global_variables() + trained}
        operations = [op for op in self._step if op.name in model_operations]
        self._writes = _writes_of(self._finder, self._names_read() & set(self._variables),
                                  operations)

    def _names_read(self) -> typing.Set[str]:
        """Names of what training reads: for gradients, by the optimizer, and what is trained."""
        names = ancestors(self._own_gradients) | self._trained_names
        for op in self._update_operations:
            for tensor in op.inputs:
                names.update(source.name for source in read_from(tensor))
        return names

    def variables(self, replicated: typing.Container[str]) -> typing.List[tf.Variable]:
        """The variables of the state, by name; raises `ClusterError` for state that cannot be
        given to the others in time. `replicated` are the names of the variables
        of which towers have replicas."""
        if self._writes:
            self._check_trained(replicated)
            self._check_reads()
        return [self._variables[name] for name in sorted(self._writes)]

    def shared(self, cluster: typing.Any, state: typing.List[tf.Variable], update: tf.Operation,
               awaited: typing.Sequence) -> tf.Operation:
        """The operation of the step: the update, which waits for the values of worker 0.

        Args:
          cluster: the `Cluster`.
          state: what `variables` returned.
          update: the operation of the update.
          awaited: the losses and update ops that the optimizer waits for.
        """
        waits_for = self._last_writes(awaited) + [tensor.op for tensor in self._sums]
        with only_device('/cpu:0'), tf.name_scope('shared_state'):
            for variable in state:
                with tf.control_dependencies(waits_for):
                    waits_for = [cluster.engine.broadcast(cluster, [variable])]
        for op in self._update_operations:
            if any(_held_variable(tensor) in self._writes for tensor in op.inputs):
                compat.add_control_inputs(op, waits_for)
        return tf.group(update, *waits_for)

    def _last_writes(self, before: typing.Sequence) -> typing.List[tf.Operation]:
        """The operations to wait for so that the model has written the state: those that come after
        a write, among the losses and updates `before` the optimizer."""
        writes = sum(self._writes.values(), [])
        after_writes = reachable_from(writes, self._step, control=True)
        waits_for: typing.List[tf.Operation] = []
        for fetch in before:
            op = getattr(fetch, 'op', fetch)
            if op.name in after_writes:
                waits_for.extend(operations_to_await(op, self._finder))
        return waits_for

    def _check_trained(self, replicated: typing.Container[str]) -> None:
        """Raises `ClusterError` for a trained variable that the model writes where the other
        workers cannot get the value in time: into replicas, or within the forward pass."""
        forward = names_of(step_operations(self._own_gradients))
        for name in sorted(self._trained_names.intersection(self._writes)):
            writes = self._writes[name]
            if name in replicated:
                raise ClusterError(
                    "VariablePlacement('replicated'), and the model writes the trained variable %r "
                    '(%r), on each worker for itself. Use another placement.' % (
                        name, writes[0].name))
            for op in writes:
                if op.name in forward:
                    raise ClusterError(
                        'the forward pass writes the trained variable %r (%r): each worker would '
                        'compute with its own value. Put the update into the collection '
                        "UPDATE_OPS, or return it in 'updates'." % (name, op.name))

    def _check_reads(self) -> None:
        """Raises `ClusterError` for a value of the state that the update takes, and that may be
        this worker's own."""
        early_names = self._names_before_gradients()
        frames = Frames(self._update_operations)
        for op in self._update_operations:
            # What was made before the gradients the program may run at any time.
            is_late = op.name not in early_names and frames.is_outside(op)
            for tensor in op.inputs:
                for name in self._early_values(tensor, is_late):
                    if name in self._writes:
                        raise ClusterError(
                            'variable %r is written by the model of each worker and read by %r, '
                            'for the update of the weights, at a time that cannot be told. Give '
                            'the optimizer the variable itself (use_resource=True), or read it in '
                            'transform_gradients by read_value().' % (name, op.name))

    def _names_before_gradients(self) -> typing.Set[str]:
        """Names of the operations that were made before the first gradient."""
        gradient_names = {tensor.op.name for tensor in self._own_gradients}
        operations = tf.get_default_graph().get_operations()
        early = itertools.takewhile(lambda op: op.name not in gradient_names, operations)
        return names_of(early)

    def _early_values(self, tensor: tf.Tensor, is_late: bool) -> typing.List[str]:
        """Names of the variables whose values an input of the update may have from before the
        message; `is_late` says whether the operation that takes it comes after that for sure."""
        held = _held_variable(tensor)
        if held is not None:
            return [] if is_late else [held]
        if tensor.op.name in self._model_operations:
            return [source.name for source in read_from(tensor)]
        return []


def _held_variable(tensor: tf.Tensor) -> typing.Optional[str]:
    """The name of the variable whose handle or reference a tensor is; else None."""
    source = variable_op(tensor) if is_variable(tensor) else None
    return None if source is None else source.name


def builds_of(built: typing.Any) -> typing.List[typing.Any]:
    """All builds over machines in the graph of a build, in their order."""
    return built.train_op.graph.get_collection(BUILDS)


def number_of(built: typing.Any) -> int:
    """The position of a build among `builds_of` its graph."""
    return [each.machines.exchange for each in builds_of(built)].index(built.machines.exchange)


def note_connection(built: typing.Any, connection: typing.Any) -> None:
    """Records in the graph of a build that this worker has joined the cluster by a `Connection`."""
    built.train_op.graph.get_collection_ref(_CONNECTION)[:] = [connection]


def connection_of(built: typing.Any) -> typing.Any:
    """The `Connection` by which this worker has joined with the builds of this graph; or None."""
    connections = built.train_op.graph.get_collection(_CONNECTION)
    return connections[0] if connections else None


def shared_variables(built: typing.Any) -> typing.List[tf.Variable]:
    """List of the variables that all workers have, global or trained, sorted by name."""
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    for each in builds_of(built):
        variables.update((variable.op.name, variable) for _, variable in each.gradients)
    return [variables[name] for name in sorted(variables)]
