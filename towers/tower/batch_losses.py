"""Losses that one device computes from the whole batch otherwise than as a mean over examples.

A tower has a part of the batch. Where a loss divides by a number that is counted in the batch,
takes a root of its mean, or multiplies examples with each other, the mean of the towers' losses is
not the loss of the batch. The plan tells what a graph shows of that; `check_towers` measures it.
"""

from towers.graph import graph_walk
from towers.graph.op_types import CHOICES, QUOTIENTS, SAME_NUMBERS, SIZES, SUMS
from towers.tower.batch_values import is_batch_value

_LINEAR = SAME_NUMBERS | SUMS | CHOICES | {'Neg', 'Mul'}
_BENT = frozenset(['Sqrt', 'Rsqrt', 'Square', 'Pow', 'Log', 'Log1p', 'Exp', 'Reciprocal', 'Inv'])


def whole_batch_line(recorded):
    """The plan's line about such a loss: a text, or None.

    Args:
      recorded: `Recorded`, whose output has a loss, or a dict of losses.
    """
    losses = recorded.output.loss
    by_value = graph_walk.reachable_from(
        recorded.sources, [op for op in recorded.operations if op.type not in SIZES
                             and not is_batch_value(op)])
    found = []
    for loss in losses.values() if isinstance(losses, dict) else [losses]:
        found += _in_scalars(loss, by_value)
        needed = graph_walk.ancestors([loss])
        found += [('multiplies examples with each other', op.name) for op in recorded.operations
                  if op.type == 'MatMul' and op.name in needed
                  and all(tensor.op.name in by_value for tensor in op.inputs)]
    if not found:
        return None
    more = '' if len(found) == 1 else ' and %d more' % (len(found) - 1)
    return ('the loss %s (%s%s), and each tower has its shard alone: N towers are not one device; '
            'see towers.batch_sum' % (found[0] + (more,)))


def _in_scalars(loss, by_value):
    """`[(text, name of the operation)]` of what a loss does to scalars of all examples."""
    stack, seen, found = [loss], set(), []
    while stack:
        op = stack.pop().op
        if op.name in seen or op.name not in by_value:
            continue
        seen.add(op.name)
        inputs = [tensor for tensor in op.inputs if tensor.shape.ndims == 0]
        if op.type in QUOTIENTS:
            if op.inputs[1].op.name in by_value and op.inputs[1].shape.ndims == 0:
                found.append(('divides by a number that is counted in the shard', op.name))
            stack.append(op.inputs[0])
        elif op.type in _BENT and inputs:
            found.append(('has a %s of a mean over the shard' % op.type, op.name))
        elif op.type in _LINEAR:
            stack.extend(inputs)
    return found
