"""What a kind of cluster consists of: the values by which an engine and the rest of the room meet.

An engine is a module such as `ring`, with an `ENGINE`. Where several workers make one step, the
engine's `begin_step` gives an `EngineStep` before this machine's towers have losses. `combine` of
the `EngineStep` gives `EngineGradients` when the towers have gradients.

Its tests are those of the engines, such as `tests/cluster/test_ring.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.whole_batch.workers import Workers

Pairs = typing.List[typing.Tuple[typing.Any, tf.Variable]]
"""Gradients, each a tensor or `tf.IndexedSlices`, with their variables."""


class EngineGradients(typing.NamedTuple):
    """The gradients with which a worker makes its update."""
    gradients: Pairs  # in a ring and by Horovod the same bits on all workers
    conditions: typing.List[tf.Operation]
    """What every write of a step waits for: on the chief of parameter servers the arrival of all
    gradients, since the other workers read the variables until then; with `Cluster(active=…)` the
    proof that a worker has data."""
    begin_session: typing.Callable = lambda session: None  # lets the steps of a session be made
    operation_of_step: typing.Callable = lambda update: update
    """`f(update)`: the operation of a step of this worker."""


class EngineStep(typing.NamedTuple):
    """A step of several workers before its gradients."""
    combine: typing.Callable
    """`f(gradients, loss, values)`: `EngineGradients`, see `StepOfWorkers.combine`."""
    loss_weight: typing.Union[float, tf.Tensor] = 1.  # by which this worker's losses are multiplied
    workers: typing.Optional[Workers] = None  # None where workers exchange no values


class Engine(typing.NamedTuple):
    """What makes a kind of cluster work; `cluster.cluster` has the list of all."""
    name: str  # in words
    arguments: typing.List[str]  # names of the arguments of `Cluster` that some kinds do not have
    begin_step: typing.Callable
    """`f(cluster, weighting)`, where several workers make one step: its `EngineStep`."""
    broadcast: typing.Any
    """`f(cluster, variables)`: the operation by which all workers get the values of worker 0; None
    where the variables are on servers."""
    configure: typing.Callable
    """`f(cluster, config)`: adds to a `tf.ConfigProto` what sessions need."""
    place: typing.Optional[typing.Callable] = None
    """`f()`: `(number of workers, rank of this worker)`, as the engine's launcher says; None where
    workers have addresses."""
    gathered: typing.Any = None
    """`f(text, config)`: takes the text of this worker, and the `tf.ConfigProto` of its sessions;
    returns the texts of all workers, by rank. None where workers have addresses, by which they
    meet."""
    connect: typing.Callable = lambda cluster, graph, target, config: None
    """`f(cluster, graph, target, config)`: completes the graph of the builds when the servers of
    all workers are there, for sessions of that target and `tf.ConfigProto`."""
