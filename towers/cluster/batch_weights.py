"""The weight of each machine's gradient in the gradient of a step."""

import tensorflow.compat.v1 as tf


class Shares:
    """The weight of a machine's gradient: w = n_w / n for the mean, W n_w / n for the sum.

    n_w are the examples of worker w, n those of all W workers in the step. With the same number on
    each worker, w is 1 / W for the mean and 1 for the sum, and nothing has to be multiplied. A
    worker that is not active has n_w = 0.

    Attributes:
      is_mean: whether the reduction is `'mean'`.
      are_weighted: whether the weights differ from step to step.
    """

    def __init__(self, cluster, examples, reduction):
        """
        Args:
          cluster: `Cluster`.
          examples: n_w: an int, or an int scalar tensor.
          reduction: `'mean'` or `'sum'`.
        """
        self.is_mean = reduction == 'mean'
        self.are_weighted = (cluster.uneven or cluster.active is not None
                             or not isinstance(examples, int))
        self._cluster, self._examples = cluster, examples

    @property
    def same_examples(self):
        """n_w where it has to be the same on all workers, else None."""
        return None if self.are_weighted else self._examples

    def own_examples(self):
        """n_w as a float64 scalar."""
        examples = tf.cast(self._examples, tf.float64)
        if self._cluster.active is not None:
            examples *= tf.cast(self._cluster.active, tf.float64)
        return examples

    def weight(self, total):
        """The weight, a float64 scalar, from `total`, all workers' examples n; 0 where n is 0."""
        factor = 1. if self.is_mean else float(self._cluster.num_workers)
        return factor * self.own_examples() / tf.maximum(total, 1.)

    def constant(self):
        """The weight with the same number of examples on each worker, a float."""
        return 1. / self._cluster.num_workers if self.is_mean else 1.
