"""The gradient noise scale: the batch beyond which more examples a step add little.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The gradients of
N equal shards of a batch of B examples, of which b = B / N each, give without another pass

    small = the mean of |G_k|^2,    big = |the mean of G_k|^2        G_k: of shard k's mean loss,
                                                                     with the regularization
    |G|^2 = (N big - small) / (N - 1)               an estimate of the true gradient's square
    S     = B (small - big) / (N - 1)               of the trace of one example's covariance
    noise scale = S / |G|^2

Of one step this is a rough figure, and may be negative: TensorBoard's smoothing is meant for it.
"""

import tensorflow.compat.v1 as tf

from towers.placement.variable_device import only_device


def noise_scale(built, squared_norm):
    """The noise scale of a training in examples, a float64 scalar.

    Args:
      built: `BuiltTowers`.
      squared_norm: function of a list of tensors or `IndexedSlices` to the sum of squares of their
        sum, a float64 scalar.

    Returns:
      It; None where the gradients do not tell it: of fewer than two shards, or of sizes that differ
      or are not known; of micro-batches, of which all gradients would be in memory at once; of
      several losses; of replicas.
    """
    towers = built.towers
    sizes = {tower.size for tower in towers}
    if (len(towers) < 2 or len(sizes) > 1 or not isinstance(towers[0].size, int)
            or any(tower.micro_batch for tower in towers) or isinstance(built.gradients, dict)):
        return None
    of_variable = {}
    for tower in towers:
        for gradient, variable in tower.gradients:
            if gradient is not None:
                of_variable.setdefault(variable.op.name, (variable, []))[1].append(gradient)
    if not of_variable or {len(parts) for _, parts in of_variable.values()} != {len(towers)}:
        return None
    # Each tower's gradient is its share of the sum: G_k is N times as large, as is their mean, but
    # for a factor that they have in common.
    of_towers, of_batch = [], []
    for variable, parts in of_variable.values():
        with built.placement.scope_of(variable):
            of_towers += [squared_norm([part]) for part in parts]
            of_batch.append(squared_norm(parts))
    with only_device(built.placement.main):
        count = len(towers)
        small, big = count * tf.add_n(of_towers), tf.add_n(of_batch)
        return count * sizes.pop() * (small - big) / (count * big - small)
