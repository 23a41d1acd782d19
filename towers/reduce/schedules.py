"""The order in which a stage of a pipeline runs the passes of its micro-batches.

A micro-batch has a forward and a backward pass through each stage. `stage_order` lists the passes
of one stage alone: a pass waits for passes of other stages since it takes their tensors.
"""

import typing

SCHEDULES = ('one_forward_one_backward', 'all_forward')
"""Names of orders, see `stage_order`."""

FORWARD = 'forward'
BACKWARD = 'backward'


class Pass(typing.NamedTuple):
    """A pass of a micro-batch through a stage."""
    direction: str  # `FORWARD` or `BACKWARD`
    micro_batch: int  # its index in the tower


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
    forward = [Pass(FORWARD, index) for index in range(micro_batches)]
    backward = [Pass(BACKWARD, index) for index in range(micro_batches)]
    if schedule == 'all_forward':
        return forward + backward[::-1]
    # The stage runs as many forward passes ahead as it may keep activations of. From then on each
    # backward pass makes room for a forward pass, as long as there are any: for 4 micro-batches, 2
    # of them kept, F0 F1, B0 F2, B1 F3, B2, B3.
    num_ahead = kept_at_once(schedule, stage, num_stages, micro_batches)
    order = forward[:num_ahead]
    for index in range(micro_batches):
        order.append(backward[index])
        next_forward = num_ahead + index
        if next_forward < micro_batches:
            order.append(forward[next_forward])
    return order


def kept_at_once(schedule: typing.Optional[str], stage: int, num_stages: int, micro_batches: int
                 ) -> int:
    """The largest number of micro-batches whose activations a stage keeps at the same time.

    With `'one_forward_one_backward'`, the first gradient arrives at stage s of K after the forward
    passes of K - s micro-batches: the last stage has its own gradient after one forward pass.

    Args:
      schedule: the order of the micro-batches.
      stage: the index of the stage.
      num_stages: the number of stages of a tower.
      micro_batches: the number of micro-batches of a tower.
    """
    if schedule == 'all_forward':
        return micro_batches
    return min(num_stages - stage, micro_batches)
