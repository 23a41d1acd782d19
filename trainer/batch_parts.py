"""How the flags divide a batch: among towers, by --shares, and into their micro-batches.

Its test is tests/trainer/test_trainer_job.py.
"""

import typing

import towers
from towers.errors import counted
from towers.shards.cut_batch import checked_shares
from trainer.flags import FLAGS


def shares_of_towers() -> typing.Optional[list]:
    """The whole numbers in --shares; None for equal parts.

    A share that is no whole number stays a text, which `build_towers` refuses.
    """
    shares: list = []
    for share in filter(None, FLAGS.shares.split(',')):
        shares.append(int(share) if share.isdecimal() else share)
    return shares or None


def parts_of_batch(num_towers: int) -> int:
    """The number that must divide a batch: the sum of `shares`, times the micro-batches of a tower.

    Args:
      num_towers: the number of towers; without `shares` each has the share 1.
    """
    shares = checked_shares(shares_of_towers(), num_towers, 'towers')
    return sum(shares) * FLAGS.accumulate * FLAGS.micro_batches


def check_batch(batch_size: int, num_towers: int) -> None:
    """Raises `InvalidArgumentError` unless the batch divides into the micro-batches of all towers.

    Args:
      batch_size: examples a step on this machine.
      num_towers: the number of towers of this machine.
    """
    parts = parts_of_batch(num_towers)
    if batch_size % parts == 0:
        return
    among = counted(num_towers, 'tower')
    micro_batches = FLAGS.accumulate * FLAGS.micro_batches
    if micro_batches > 1:
        among += ' of %d micro-batches' % micro_batches
    raise towers.InvalidArgumentError(
        '--batch_size=%d does not divide among %s: give a multiple of %d' % (
            batch_size, among, parts))
