"""How a cost grows: the slope of a line through logarithms."""

import numpy as np


def slope(sizes, costs):
    """Exponent p of cost ~ size^p, by least squares on logarithms: 1 is linear, 0 constant.

    Raises:
      ValueError: fewer than two different sizes, or a value that is not positive.
    """
    sizes, costs = np.asarray(sizes, float), np.asarray(costs, float)
    if len(set(sizes)) < 2 or len(sizes) != len(costs):
        raise ValueError('a slope needs two sizes or more, and as many costs')
    if not (np.all(sizes > 0) and np.all(costs > 0)):
        raise ValueError('sizes and costs have to be positive: %s, %s' % (sizes, costs))
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def large_half(sizes):
    """The indices of the larger half of sizes, at least two: constants hide growth at small ones.
    """
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    return order[min(len(order) // 2, max(0, len(order) - 2)):]
