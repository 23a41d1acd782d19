"""The endless stream of training examples, in an order that can be taken up anywhere.

The stream is epoch 0 in an order of its own, then epoch 1 in another, and so on. The order of
epoch e is

    keys  = stateless_uniform([n], seed=[seed, e], 0 <= key < 2^62)      (Philox 4x32-10)
    order = the indices of `keys`, largest first; of equal keys the lower index first

and depends on nothing but n, the seed and e. (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3". `shuffle(seed).repeat()` depends on ids of graph ops, hence on the rest of the program
and on TensorFlow's version.) Example i of the stream is therefore the same image whatever the batch
size and the number of towers, in every version of TensorFlow, and in a run that starts at example i
because the one before it was stopped there.

The last batch of an epoch, whose examples do not fill it:

    'carry'   the next epoch's first examples fill it: each example once an epoch, each batch full
    'drop'    the last n mod B examples of each epoch's order are left out

Its test is tests/datasets/test_arrays.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice
from towers.errors import InvalidArgumentError

REMAINDERS = ('carry', 'drop')
_KEY_RANGE = 2 ** 62  # a power of two: the modulo in stateless_uniform favours no key
_INT64_MAX = 2 ** 63 - 1
_TOGETHER = 16  # elements that one call of Python reads

# AutoGraph would spend half a second on functions in which there is nothing for it to rewrite.
plain_python = tf.autograph.experimental.do_not_convert


def epoch_order(num_examples: int, seed: int) -> typing.Callable[[tf.Tensor], tf.Tensor]:
    """The function from an epoch, an int64 scalar, to its order: int64 [n], see the
    docstring of the module.

    Args:
      num_examples: n, at least 1.
      seed: an int, -2^63 <= seed < 2^63. Two seeds share no epoch's order, except by chance.
    """
    def order(epoch: tf.Tensor) -> tf.Tensor:
        """The order of an epoch: the examples by the size of their random keys."""
        seed_pair = tf.stack([tf.constant(seed, tf.int64), epoch])
        keys = tf.random.stateless_uniform(
            [num_examples], seed=seed_pair, minval=0, maxval=_KEY_RANGE, dtype=tf.int64)
        return tf.cast(tf.math.top_k(keys, k=num_examples).indices, tf.int64)
    return order


class Epochs:
    """How n examples become batches of B, epoch after epoch.

    A place in the stream is counted in examples that training was given.

    Attributes:
      length: examples that training is given in an epoch.
    """

    def __init__(self, num_examples: int, batch_size: int, remainder: str = 'carry'):
        """
        Args:
          num_examples: n, at least 1.
          batch_size: B, at least 1: of all workers together.
          remainder: one of `REMAINDERS`.

        Raises:
          InvalidArgumentError: an unknown `remainder`; with 'drop', fewer examples than a batch.
        """
        check_choice('remainder', remainder, REMAINDERS)
        self._batch = batch_size
        self.length = num_examples
        if remainder == 'drop':
            self.length -= num_examples % batch_size
            if not self.length:
                raise InvalidArgumentError(
                    "remainder='drop' leaves nothing of %d examples in batches of %d: take smaller "
                    "batches, or another remainder." % (num_examples, batch_size))

    def steps(self, begin: int, end: int) -> int:
        """The number of steps from the place `begin` of the stream until all examples before the
        place `end` were given; 0 if `begin` is at `end`, or after it."""
        full_steps, rest = divmod(end - begin, self._batch)
        last_step = 1 if rest else 0
        return max(0, full_steps + last_step)

    def place_after(self, begin: int, steps: int) -> int:
        """The place in the stream after so many steps from `begin`, which may be any place."""
        return begin + steps * self._batch

    def batches(self, of_epoch: typing.Callable[[tf.Tensor], typing.Any],
                first_example: typing.Any = 0, share: typing.Tuple[int, int] = (0, 1),
                example: typing.Optional[typing.Callable] = None,
                read: typing.Optional[typing.Callable] = None) -> tf.data.Dataset:
        """The elements of of_epoch(0), of of_epoch(1), and so on, from a place on, in batches.

        The batches that W workers have in one step are, one after the other, the batch that one
        machine would have: nothing is read twice, and the place is the same for all workers.

        Args:
          of_epoch: function from an epoch, an int64 scalar, to a nest of tensors [n, …].
          first_example: the place, an int or a scalar integer tensor.
          share: `(w, W)`: the part of worker w of W, of B / W examples a batch.
          example: function that is called with each element; None leaves the elements unchanged.
          read: function that is called before `example`, with up to 16 elements together; or None.
            A call of Python takes 0.25 ms of a pipeline, most of it for waiting and waking.
        """
        worker, workers = share
        worker_batch_size = self._batch // workers
        first_example = tf.cast(first_example, tf.int64)
        first_epoch = first_example // self.length
        within = first_example % self.length

        @plain_python
        def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            """The elements of an epoch; of the first epoch the elements from `first_example` on."""
            # With 'drop', training is given less than all n examples of an epoch.
            given = tf.nest.map_structure(lambda tensor: tensor[:self.length], of_epoch(epoch))
            skipped = tf.where(tf.equal(epoch, first_epoch), within, tf.zeros_like(within))
            return tf.data.Dataset.from_tensor_slices(given).skip(skipped)
        elements = tf.data.Dataset.range(first_epoch, _INT64_MAX).flat_map(one_epoch)
        if workers > 1:
            # The batches of the workers take turns, and each worker takes its own. This comes
            # before anything is read or decoded, so no worker reads the examples of another.
            batches = elements.batch(worker_batch_size, drop_remainder=True)
            elements = batches.shard(workers, worker).apply(tf.data.experimental.unbatch())
        if read is not None:
            elements = read_together(elements, read)
        if example is not None:
            elements = elements.map(plain_python(example), tf.data.experimental.AUTOTUNE)
        # The stream does not end: no batch is dropped, and the shape becomes static.
        return elements.batch(worker_batch_size, drop_remainder=True)


def read_together(elements: tf.data.Dataset, read: typing.Callable) -> tf.data.Dataset:
    """The elements that `read` makes of several elements at once, see `Epochs.batches`."""
    groups = elements.batch(_TOGETHER).map(plain_python(read), tf.data.experimental.AUTOTUNE)
    return groups.apply(tf.data.experimental.unbatch())
