"""Whether contenders did the same work: the first losses, and what became of the weights."""

LOSS_TOLERANCE = 2e-3  # relative; of float32 sums in another order, over a few steps
CHANGE_TOLERANCE = 2e-2
# A deep network with batch norm multiplies rounding. One program under two sets of kernels
# (ResNet-50, oneDNN on and off): losses 1e-5 to 2e-3 apart, the change's length 2e-4, its
# direction 0.1.
DEEP_LOSS_TOLERANCE = 5e-3
DEEP_DIRECTION_TOLERANCE = 0.3


def difference(reference, other, first_loss_only=False, tolerance=LOSS_TOLERANCE,
               direction_tolerance=CHANGE_TOLERANCE):
    """What differs between two contenders, in words, or None.

    Args:
      reference: dict with `losses`, one a step, and `checksum` as `programs.checksum` gives it.
      other: the same of the contender that is checked.
      first_loss_only: only the first step is comparable (the floor's processes update weights of
        their own; one device sees batch-norm statistics of the whole batch).
      tolerance: relative, of the losses.
      direction_tolerance: of the change along one direction, relative to its length.
    """
    count = 1 if first_loss_only else len(reference['losses'])
    if len(other['losses']) < count:
        return 'only %d of %d losses' % (len(other['losses']), count)
    for step, (expected, got) in enumerate(zip(reference['losses'][:count], other['losses']), 1):
        if not abs(got - expected) <= tolerance * abs(expected):  # so that NaN differs
            return 'loss of step %d is %.6g, not %.6g' % (step, got, expected)
    if first_loss_only:
        return None
    length = reference['checksum']['change']
    for what, near in (('change', CHANGE_TOLERANCE), ('projection', direction_tolerance)):
        expected, got = reference['checksum'][what], other['checksum'][what]
        if not abs(got - expected) <= near * length:
            return '%s of the weights is %.6g, not %.6g' % (what, got, expected)
    return None
