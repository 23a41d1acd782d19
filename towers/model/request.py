"""`Request`: the checked arguments of a `build_towers` call, grouped by what they are about.

Its test is tests/api/test_options.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.model.requested import (
    BatchSplit,
    KeptResults,
    ModelCall,
    NumericsFields,
    Training,
)
from towers.placement.devices import Devices
from towers.placement.variable_device import Placement


class Request(typing.NamedTuple):
    """The arguments of one `build_towers` call, checked; `checked_request` makes it.

    Attributes:
      call: the model, and how its variables are found.
      training: what is trained, and which gradients and updates a step has.
      split: how the batch is cut into parts.
      devices: the devices of the towers.
      placement: the devices of the variables.
      numerics: precision, loss scale (with fp16, the default `LossScale` in the place of None), and
        checks.
      memory: which results of the forward pass are kept for the backward pass, and in which order.
      cluster: `Cluster`, the machines that train the same model; None without a cluster. Its type
        is in a room above this one.
    """

    call: ModelCall
    training: Training
    split: BatchSplit
    devices: Devices
    placement: Placement
    numerics: NumericsFields
    memory: KeptResults
    cluster: typing.Any

    @property
    def factor(self) -> float:
        """The factor of the batch's mean loss: 1 with `'mean'`, the number of towers with `'sum'`.
        """
        return 1. if self.training.reduction == 'mean' else float(len(self.devices))

    @property
    def towers_of_update(self) -> int:
        """How many towers, on all machines, give gradients to one update."""
        num_towers = len(self.devices)
        if self.cluster is not None:
            num_towers *= self.cluster.workers_a_step
        return num_towers

    @property
    def num_parts_of_call(self) -> int:
        """The number of parts of the batch that are made from one call of the model function."""
        if self.call.copies == 'clone':
            return len(self.split.parts)
        return 1

    @property
    def trains_with_machines(self) -> bool:
        """Whether the machines of a cluster train together; False for an evaluation, which one
        machine makes alone."""
        return self.cluster is not None and bool(self.training.objectives)

    @property
    def has_whole_batch(self) -> bool:
        """Whether this machine has all examples of a step: True without a cluster; and where each
        worker takes steps of its own, as on asynchronous parameter servers."""
        return self.cluster is None or self.cluster.workers_a_step == 1

    @property
    def parts_of_batch(self) -> int:
        """How many parts the batch of a step has, on all machines that train together."""
        num_parts = len(self.split.parts)
        if self.trains_with_machines:
            num_parts *= self.cluster.num_workers
        return num_parts

    @property
    def has_equal_workers(self) -> bool:
        """Whether a static size of this machine's batch is the size of every machine's batch."""
        if self.cluster is None:
            return True
        some_may_lack_data = self.cluster.active is not None
        return not self.cluster.uneven and not some_may_lack_data

    @property
    def random_step(self) -> typing.Optional[tf.Variable]:
        """The step that random ops draw by; None where random ops are left as they are."""
        return self.training.global_step if self.numerics.stateless_random else None

    @property
    def served_rank(self) -> typing.Optional[int]:
        """The index of this worker, where several workers make one step together on parameter
        servers; else None."""
        return None if self.cluster is None else self.cluster.served_rank

    @property
    def has_copies(self) -> bool:
        """Whether each worker of a cluster has its own copy of the variables, as in a ring."""
        return self.cluster is not None and self.cluster.has_copies

    @property
    def no_batch_values(self) -> typing.Optional[str]:
        """Why the parts of the batch cannot exchange values in this build; None if they can."""
        if self.split.accumulate > 1:
            return ('a tower has %d micro-batches, which are not there at the same time: build '
                    'without micro-batches (Memory, Pipeline)' % self.split.accumulate)
        return self.cluster.no_batch_values if self.trains_with_machines else None
