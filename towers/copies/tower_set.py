"""The towers of a build, and what they were made of."""

import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded
from towers.capture.stage_cuts import StageCuts
from towers.gradients.backward_pass import TowerGradients
from towers.gradients.tower import Tower
from towers.graph.waits import Wait
from towers.model.losses import Losses
from towers.model.request import Request
from towers.recompute.rewrite import Recomputed
from towers.roles.ownership import Roles
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
      step: what all workers of a cluster share in a step, which `Cluster.begin_step` gives; None
        for this machine alone.
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
    step: typing.Any
    exchanged: typing.List[tf.Tensor]
    cuts: typing.Optional[StageCuts] = None
    slots: typing.Sequence[tf.Variable] = ()
    copies: typing.Sequence[typing.Callable] = ()

    @property
    def has_one_shard(self) -> bool:
        """Whether all examples of a step are in one shard, on a single tower. In a cluster this
        needs workers that make steps of their own, as on asynchronous parameter servers."""
        return len(self.towers) == 1 and self.request.has_whole_batch
