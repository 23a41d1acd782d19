"""The towers of a build, and what they were made of.

Its test is tests/placement/test_shared_reads.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.record import Recorded
from towers.capture.stage_cuts import StageCuts
from towers.gradients.backward_pass import TowerGradients
from towers.gradients.tower import Tower
from towers.graph.waits import Wait
from towers.model.losses import Losses
from towers.model.request import Request
from towers.placement.shared_reads import can_be_shared, reads_to_share, variable_of
from towers.placement.tower_device import all_devices
from towers.recompute.rewrite import Recomputed
from towers.roles.variable_roles import Roles
from towers.shards.cut_batch import CutBatch


class TowerSet(typing.NamedTuple):
    """The towers of a build, one for each of the request's parts, and what they were made of.

    Attributes:
      request: `Request` of the build.
      batch: the shards of the towers.
      towers: list of the towers, in the order of the request's parts.
      recorded: the call of the model function on shard 0, or the import of a finished
        model.
      losses: the losses of tower 0.
      gradients: the `TowerGradients` that differentiated the losses.
      roles: the roles of the variables.
      waits: the control edges by which the towers write shared variables in the right order.
      recomputed: what the backward pass of tower 0 recomputes: a `Recomputed` for each loss.
      how_built: the plan's line about calls and copies.
      step_of_workers: the step that the workers of a cluster make together (`StepOfWorkers`),
        which `Cluster.begin_step` gives; None for this machine alone.
      exchanged: the values of the whole batch that `exchange` has made.
      cuts: how the model was cut into stages; None where it was not.
      slots: the variables that the model function's own optimizers have made.
      copies: for each other tower, a function from a tensor of tower 0 to its copy.
    """
    request: Request
    batch: CutBatch
    towers: typing.List[Tower]
    recorded: Recorded
    losses: Losses
    gradients: TowerGradients
    roles: Roles
    waits: typing.List[Wait]
    recomputed: typing.List[Recomputed]
    how_built: str
    step_of_workers: typing.Any
    exchanged: typing.List[tf.Tensor]
    cuts: typing.Optional[StageCuts] = None
    slots: typing.Sequence[tf.Variable] = ()
    copies: typing.Sequence[typing.Callable] = ()

    @property
    def has_one_shard(self) -> bool:
        """Whether all examples of a step are in one shard, on a single tower. In a cluster this
        needs workers that make steps of their own, as on asynchronous parameter servers."""
        return len(self.towers) == 1 and self.request.has_whole_batch


def share_reads_in_towers(tower_set: TowerSet) -> None:
    """Makes all operations of a tower take a weight that the forward pass does not write from one
    read, so that the weight is sent to the tower once a step.

    The micro-batches of a tower then take what its first one has read: until the backward pass of a
    micro-batch begins, the tower needs most of the weights anyway. With `copies='reuse'` the
    gradients of the L2 losses, which tower 0 has for all towers, take the read of their own tower.
    """
    recorded = tower_set.recorded
    devices = all_devices(tower_set.request.devices)
    for reads in reads_to_share(recorded.operations, recorded.owned, devices).values():
        handle = variable_of(reads[0]).outputs[0]
        readers = [op for op in handle.consumers() if can_be_shared(op)]
        reads_of_towers: typing.Dict[int, tf.Operation] = {}  # by the index of the tower
        for part in tower_set.towers:
            for read in part.own(readers):
                reads_of_towers.setdefault(part.index, read)
        for part in tower_set.towers:
            if part.index in reads_of_towers:
                _take_from(reads_of_towers[part.index], readers, part)


def _take_from(shared: tf.Operation, readers: typing.Iterable[tf.Operation], part: Tower) -> None:
    """Makes the operations of a micro-batch that take a value of `readers` take that of `shared`.
    """
    for read in readers:
        if read is not shared:
            takers = part.own(read.outputs[0].consumers())
            compat.replace_tensor(read.outputs[0], shared.outputs[0], takers)
