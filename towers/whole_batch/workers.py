"""The workers of a cluster that make a step together, for the exchange of values between them.

`n_w` is the number of examples of worker w in a step, n the number of examples of all W workers. A
*message* is one operation that all workers run, see `towers/cluster/`.

Its tests are `tests/whole_batch/test_workers.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.placement.variable_device import only_device


class Workers(typing.NamedTuple):
    """This worker, and the workers that make a step with it."""
    num_workers: int  # W
    rank: int  # of this worker
    fraction: typing.Union[float, tf.Tensor]
    """n_w / n of this worker; a float64 scalar where only a step knows it."""
    has_batch: typing.Optional[tf.Tensor]
    """Whether the data of this worker go on in a step, a bool scalar; None where they always do.
    A worker without a batch also runs the messages, since the other workers wait in them."""
    add_up: typing.Callable[[tf.Tensor], tf.Tensor]
    """`f(tensor)`: the sum of the tensors of all workers, which are of one shape; one message. All
    other messages, such as `concat`'s, are made of such a sum."""

    @property
    def have_equal_batches(self) -> bool:
        """Whether all workers have the same number of examples in every step, and so the `fraction`
        1 / W."""
        return isinstance(self.fraction, float)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the tensors of all workers that have a batch; one message. The tensors are of
        one shape."""
        with only_device('/cpu:0'):
            if self.has_batch is not None:
                tensor = tf.where_v2(self.has_batch, tensor, tf.zeros_like(tensor))
            total = self.add_up(tensor)
        total.set_shape(tensor.shape)
        return total

    def concat(self, rows: tf.Tensor, num_before: typing.Any, num_rows: typing.Any) -> tf.Tensor:
        """The rows of all workers, in the order of their ranks; one message.

        It is a sum: each worker puts zeros in the places of the other workers' rows.

        Args:
          rows: the rows of this worker.
          num_before: how many rows the workers of lower rank have, an int or a scalar.
          num_rows: how many rows all workers have, an int or a scalar.
        """
        num_after = num_rows - tf.shape(rows)[0] - num_before
        zeros = [[num_before, num_after]] + [[0, 0]] * (rows.shape.ndims - 1)
        with only_device('/cpu:0'):
            return self.sum(tf.pad(rows, zeros))
