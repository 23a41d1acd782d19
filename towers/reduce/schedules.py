"""The order in which a stage of a pipeline runs the passes of its micro-batches.

A micro-batch has a forward and a backward pass through each stage. `stage_order` lists the passes
of one stage; the passes of other stages, from which it takes tensors, come before by the data.
"""

import typing

SCHEDULES = ('one_forward_one_backward', 'all_forward')
"""Names of orders, see `stage_order`."""

FORWARD = 'forward'
BACKWARD = 'backward'

Pass = typing.Tuple[str, int]
"""A pass of a stage: `FORWARD` or `BACKWARD`, and the index of the micro-batch."""


def stage_order(schedule: typing.Optional[str], stage: int, num_stages: int, micro_batches: int
                ) -> typing.List[Pass]:
    """The passes of a stage in the order in which it runs them.

    `'all_forward'`: all forward passes, then all backward passes, the last micro-batch's first. The
    activations of all micro-batches are kept at the same time (Huang et al. 2019, GPipe).
    `'one_forward_one_backward'`: backward and forward passes take turns, as soon as a micro-batch's
    gradient arrives. Stage s of K keeps the activations of at most K - s micro-batches
    (Narayanan et al. 2019, PipeDream). Both keep each of K stages waiting for
    (K - 1) / (M + K - 1) of the time, for M micro-batches and stages of equal length.

    Args:
      schedule: the order of the micro-batches; None stands for `'one_forward_one_backward'`.
      stage: the index of the stage.
      num_stages: the number of stages of a tower.
      micro_batches: the number of micro-batches of a tower.
    """
    if schedule == 'all_forward':
        forward = [(FORWARD, index) for index in range(micro_batches)]
        backward = [(BACKWARD, index) for index in reversed(range(micro_batches))]
        return forward + backward
    # The stage runs as many forward passes ahead as it may keep activations of. From then on each
    # backward pass makes room for a forward pass.
    num_ahead = kept_at_once(schedule, stage, num_stages, micro_batches)
    order = [(FORWARD, index) for index in range(num_ahead)]
    for index in range(micro_batches):
        order.append((BACKWARD, index))
        if num_ahead + index < micro_batches:
            order.append((FORWARD, num_ahead + index))
    return order


def kept_at_once(schedule: typing.Optional[str], stage: int, num_stages: int, micro_batches: int
                 ) -> int:
    """The largest number of micro-batches whose activations a stage keeps at the same time.

    Args:
      schedule: the order of the micro-batches.
      stage: the index of the stage.
      num_stages: the number of stages of a tower.
      micro_batches: the number of micro-batches of a tower.
    """
    if schedule == 'all_forward':
        return micro_batches
    return min(num_stages - stage, micro_batches)
