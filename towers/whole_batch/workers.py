"""The workers of a cluster that make a step together, as what exchanges values sees them.

`n_w` are the examples of worker w in a step, n those of all W workers.

Its tests are `tests/whole_batch/test_workers.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.placement.variable_device import only_device


class Workers(typing.NamedTuple):
    """This worker, and those that make a step with it."""
    num_workers: int  # W
    rank: int  # of this worker
    part: typing.Union[float, tf.Tensor]  # n_w / n of this worker; a tensor is a float64 scalar
    has_batch: typing.Optional[tf.Tensor]  # bool scalar, see `until_all_end`; None: always
    reduce: typing.Callable[[tf.Tensor], tf.Tensor]  # the sum of the workers' tensors, of one shape

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the tensors, of one shape, of all workers that have a batch: one message."""
        with only_device('/cpu:0'):
            if self.has_batch is not None:
                tensor = tf.where_v2(self.has_batch, tensor, tf.zeros_like(tensor))
            total = self.reduce(tensor)
        total.set_shape(tensor.shape)
        return total

    def concat(self, rows: tf.Tensor, begin: typing.Any, total: typing.Any) -> tf.Tensor:
        """The rows of all workers, each worker's after those of the workers before it: one message.

        Args:
          rows: [n, …] of this worker.
          begin: how many rows the workers before it have, an int or a scalar.
          total: how many rows all workers have.
        """
        missing = [[begin, total - tf.shape(rows)[0] - begin]]
        with only_device('/cpu:0'):
            return self.sum(tf.pad(rows, missing + [[0, 0]] * (rows.shape.ndims - 1)))
