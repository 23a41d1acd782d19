"""The run of `check_towers` on several workers, of a ring, parameter servers or Horovod.

Words of `cluster/` used here: a cluster `is_served` where its variables are on parameter servers,
one copy of each for all workers; the chief is worker 0; `rank` is the number of a worker.

Its test is tests/inspect/test_check_machines.py.
"""

import json
import multiprocessing.pool
import threading
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.build import build_towers
from towers.api.built import BuiltTowers
from towers.cluster.addresses import free_ports
from towers.cluster.cluster import Cluster
from towers.cluster.horovod import gathered_lines
from towers.cluster.member import join
from towers.cluster.servers import start_server
from towers.errors import ClusterError, failing_on
from towers.inspect.check_runs import (
    Assignments,
    InitialValues,
    Program,
    TrainedTowers,
    assignments_of,
    constants,
    map_arrays,
    sum_of_tower_losses,
    train,
)
from towers.inspect.comparison import Numbers
from towers.placement.session_config import session_config

_PATIENCE = 120.  # seconds that the other workers wait for the chief to begin


class Machines(typing.NamedTuple):
    """The workers of `check_towers(cluster=…)`.

    Attributes:
      kind: the kind of cluster, as `Cluster` takes it.
      shares: the workers' proportions of a batch.
      num_towers: how many towers each worker has.
    """

    kind: str
    shares: typing.Tuple[int, ...]
    num_towers: int


Work = typing.Callable[[Cluster], TrainedTowers]
"""A function that trains the towers of a worker; the `Cluster` says which worker."""


class _WorkerLosses(typing.NamedTuple):
    """The losses of one worker.

    Attributes:
      by_step: the losses of the worker's batch, by their names in `Numbers`.
      sum_over_towers: the sum of its towers' losses in the first step.
    """

    by_step: typing.Dict[str, float]
    sum_over_towers: float


def run_machines(program: Program, machines: Machines, sizes: typing.Sequence[int],
                 initial: InitialValues) -> TrainedTowers:
    """Trains on several workers.

    Args:
      program: what is trained.
      machines: the workers.
      sizes: how many of the inputs' examples each worker has.
      initial: the values with which training begins.

    Returns:
      Worker 0's numbers, with the mean of all workers' losses, weighted by their examples; and the
      proof of worker 0's plan, which is about all workers.
    """
    begun = threading.Event()

    def work(cluster: Cluster) -> TrainedTowers:
        """Trains one worker on its examples."""
        batch = _examples_of_worker(program.inputs, sizes, cluster.rank)
        return _train(cluster, program._replace(inputs=batch), machines.num_towers, dict(initial),
                      begun)

    are_uneven = len(set(sizes)) > 1
    if machines.kind == 'horovod':
        losses, trained = _by_horovod(machines, work, are_uneven)
    else:
        losses, trained = _on_servers(machines, work, are_uneven)
    mean_losses = {}
    for step in trained.numbers.losses:
        weighted = [size * of_worker.by_step[step] for size, of_worker in zip(sizes, losses)]
        mean_losses[step] = sum(weighted) / sum(sizes)
    sum_of_losses = sum(of_worker.sum_over_towers for of_worker in losses)
    numbers = trained.numbers._replace(losses=mean_losses, sum_of_losses=sum_of_losses)
    return trained._replace(numbers=numbers)


def _examples_of_worker(inputs: typing.Any, sizes: typing.Sequence[int], rank: int) -> typing.Any:
    """The examples of the worker of a rank: worker 0 has the first `sizes[0]` examples, worker 1
    has the next `sizes[1]`, and so on.

    Args:
      inputs: a nest of arrays [n, …].
      sizes: how many examples each worker has.
      rank: the index of the worker.
    """
    begin = sum(sizes[:rank])
    end = begin + sizes[rank]
    return map_arrays(lambda leaf: np.asarray(leaf)[begin:end], inputs)


def _losses_of(numbers: Numbers) -> _WorkerLosses:
    """The losses among a worker's numbers."""
    by_step = {step: float(loss) for step, loss in numbers.losses.items()}
    return _WorkerLosses(by_step, float(numbers.sum_of_losses))


def _on_servers(machines: Machines, work: Work, uneven: bool
                ) -> typing.Tuple[typing.List[_WorkerLosses], TrainedTowers]:
    """Trains each worker in a thread of this process, with a server of TensorFlow's.

    Args:
      machines: the workers.
      work: function that trains one worker.
      uneven: whether workers have batches of different sizes.

    Returns:
      `(losses, trained)`: the losses of each worker; and the `TrainedTowers` of worker 0.
    """
    num_workers = len(machines.shares)
    num_servers = 1 if machines.kind == 'ps' else 0
    # One call for all: a second call could give the same ports as free.
    ports = free_ports(num_workers + num_servers)
    addresses = ['127.0.0.1:%d' % port for port in ports]

    def cluster_of(job: str, rank: int) -> Cluster:
        """The cluster, as this member of it sees it."""
        return Cluster(machines.kind, addresses[:num_workers], addresses[num_workers:], job, rank,
                       uneven=uneven)

    def rank_and_towers(rank: int) -> typing.Tuple[int, TrainedTowers]:
        """Trains the worker of a rank, which starts its own server."""
        return rank, work(cluster_of('worker', rank))

    servers = []  # the parameter servers, kept until the workers are done
    for rank in range(num_servers):
        cluster = cluster_of('ps', rank)
        servers.append(start_server(cluster, cluster.session_config(tf.ConfigProto())))
    with multiprocessing.pool.ThreadPool(num_workers) as threads:
        # `imap_unordered` waits for no other thread after an error.
        trained = dict(threads.imap_unordered(rank_and_towers, range(num_workers)))
    del servers
    return [_losses_of(trained[rank].numbers) for rank in range(num_workers)], trained[0]


def _by_horovod(machines: Machines, work: Work, uneven: bool
                ) -> typing.Tuple[typing.List[_WorkerLosses], TrainedTowers]:
    """Trains the worker of this process, one of the processes that Horovod's launcher started.

    Args:
      machines: the workers.
      work: function that trains one worker.
      uneven: whether workers have batches of different sizes.

    Returns:
      `(losses, trained)`: the losses of each worker; and the `TrainedTowers` of this worker.
    """
    cluster = Cluster('horovod', uneven=uneven)
    num_workers = len(machines.shares)
    if cluster.num_workers != num_workers:
        raise ClusterError('shares of %d workers, and Horovod has %d: start this program with '
                           '`horovodrun -np %d python …`, or pass as many shares.' % (
                               num_workers, cluster.num_workers, num_workers))
    trained = work(cluster)
    # Each worker gets the lines of all workers.
    lines_of_workers = gathered_lines(json.dumps(_losses_of(trained.numbers)),
                                      tf.ConfigProto())
    return [_WorkerLosses(*json.loads(line)) for line in lines_of_workers], trained


def _train(cluster: Cluster, program: Program, num_towers: int,
           initial: typing.Dict[str, typing.Any], begun: threading.Event) -> TrainedTowers:
    """Trains the towers of one worker.

    Args:
      cluster: the `Cluster` of this worker.
      program: what is trained, on this worker's part of the batch.
      num_towers: how many towers this worker has.
      initial: the values with which training begins, by the names of the variables.
      begun: the event that the chief sets when its variables have the initial values. On parameter
        servers the other workers wait for it; elsewhere each worker sets its own variables.
    """
    with tf.Graph().as_default():
        optimizer = program.make_optimizer()
        built = build_towers(
            program.model_fn, constants(program.inputs), optimizer, num_towers, program.reduction,
            remainder='weight', global_step=tf.train.get_global_step(), cluster=cluster,
            **program.options)
        # Made dense here: `train` would do it in a graph that the session has finalized.
        pairs = [(tf.convert_to_tensor(gradient), variable)
                 for gradient, variable in built.gradients]
        sum_of_losses = sum_of_tower_losses(built)
        # Each variable has the same name on one device.
        names = {variable.op.name: variable.op.name for variable in tf.global_variables()}
        begin = _beginning(cluster, built, assignments_of(initial, names), begun)
        # The workers are threads of this process: without `on_lost`, the loss of one worker would
        # end the process.
        with failing_on('on worker %d' % cluster.rank), join(
                cluster, built, session_config(built.devices),
                on_lost=lambda error: None) as member, member.session() as session:
            session.run_step_fn(begin)
            numbers = train(session, built.loss, pairs, built.train_op, program.steps, names,
                            sum_of_losses)
            return TrainedTowers(numbers, built.plan.line('one device'))


def _beginning(cluster: Cluster, built: BuiltTowers, assignments: Assignments,
               begun: threading.Event) -> typing.Callable:
    """A function for `run_step_fn` that gives the variables their initial values, before the first
    step.

    Args:
      cluster, begun: the arguments of `_train`.
      built: the towers of this worker.
      assignments: the assignments of the initial values.
    """
    refresh = []  # gives the replicas of the other towers the values that were assigned
    if built.replicas is not None:
        refresh.append(built.replicas.refresh())
    variables_are_the_chiefs = cluster.is_served and not cluster.is_chief

    def begin(step_context: typing.Any) -> None:
        """Sets the variables of this worker; or waits for the chief, where the chief sets them."""
        if variables_are_the_chiefs:
            begun.wait(_PATIENCE)
            return
        # `step_context.session` is the session without hooks: this is no step.
        step_context.session.run(assignments.operations, assignments.fed)
        step_context.session.run(refresh)
        begun.set()

    return begin
