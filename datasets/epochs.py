"""What becomes of the last batch of an epoch, whose examples do not fill it.

    'carry'   the next epoch's first examples fill it: each example once an epoch, each batch full
    'drop'    the last n mod B examples of each epoch's order are left out
    'pad'     the first examples of the epoch's own order fill it, and count twice in that epoch
    'weight'  it is short, and its loss is the mean over those it has

A place in the stream of examples is counted in examples that training was given: one epoch is
`length` of them, n rounded down or up to whole batches for 'drop' and 'pad'.

Several workers share out the batches of one machine, see `dealt`.
"""

import numbers

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice
from towers.errors import InvalidArgumentError

REMAINDERS = ('carry', 'drop', 'pad', 'weight')
_INT64_MAX = 2 ** 63 - 1
_TOGETHER = 16


# AutoGraph would spend half a second on rewriting functions that have nothing for it.
plain_python = tf.autograph.experimental.do_not_convert


def dealt(stream, batch_size, share):
    """The part of an endless stream that worker w of W reads: every Wth batch, from the wth on.

    The batches that the W workers have in one step are, one after the other, the batch of
    W * batch_size examples that one machine would have. So nothing is read twice and nothing
    missed, and the count of examples that all have seen is the place of every one of them.

    Args:
      stream: a `tf.data.Dataset`; it is cut before anything is read or decoded.
      batch_size: examples a batch of one worker.
      share: `(w, W)`, 0 <= w < W.

    Returns:
      A `tf.data.Dataset` of the same elements, fewer of them.

    Raises:
      InvalidArgumentError: no such share.
    """
    worker, count = checked_share(share)
    if count == 1:
        return stream
    @plain_python
    def elements(*parts):
        return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])
    return stream.batch(batch_size, drop_remainder=True).shard(count, worker).flat_map(elements)


def read_together(elements, read):
    """The elements that a function makes of several elements at once.

    A call of Python takes some 0.25 ms of a pipeline, most of it for waiting and waking: one for
    16 examples is a sixth of what decoding them takes less than one for each.

    Args:
      elements: a `tf.data.Dataset` whose elements are tuples of scalars, or a scalar.
      read: function from as many tensors [n] to a tuple of tensors [n, …], n at most 16.
    """
    return elements.batch(_TOGETHER).map(plain_python(read), tf.data.experimental.AUTOTUNE).apply(
        tf.data.experimental.unbatch())


def checked_share(share):
    """`(w, W)`: the number of a worker, and how many there are.

    Raises:
      InvalidArgumentError: it is something else.
    """
    if (not isinstance(share, (tuple, list)) or len(share) != 2
            or any(isinstance(each, bool) or not isinstance(each, numbers.Integral)
                   for each in share) or not 0 <= share[0] < share[1]):
        raise InvalidArgumentError(
            'Got share=%r, expected (number of the worker, from 0, and count of workers).'
            % (share,))
    return tuple(share)


def of_workers(num_examples, batch_size, remainder, share):
    """The `Epochs` of workers that have `batch_size` examples a step each."""
    _, count = checked_share(share)
    return Epochs(num_examples, count * batch_size, remainder, share)


class Epochs:
    """How n examples become batches of B, epoch after epoch.

    Attributes:
      length: examples that training is given in an epoch.
      is_static: whether every batch has B examples.
    """

    def __init__(self, num_examples, batch_size, remainder='carry', share=(0, 1)):
        """
        Args:
          num_examples: n, at least 1.
          batch_size: B, at least 1: of all workers together.
          remainder: one of `REMAINDERS`.
          share: `(w, W)`: `batches` are those of worker w of W, of B / W examples, see `dealt`.

        Raises:
          InvalidArgumentError: an unknown `remainder`; with 'drop', fewer examples than a batch;
            no such share, or one with 'weight', where a batch may not do for all workers.
        """
        check_choice('remainder', remainder, REMAINDERS)
        self._share = checked_share(share)
        if self._share[1] > 1 and remainder == 'weight':
            raise InvalidArgumentError(
                "remainder='weight' ends an epoch with a batch that may not do for all %d workers: "
                "choose another remainder." % self._share[1])
        self._examples, self._batch = num_examples, batch_size
        self.is_static = remainder != 'weight'
        self.length = num_examples
        if remainder == 'drop':
            self.length -= num_examples % batch_size
            if not self.length:
                raise InvalidArgumentError(
                    "remainder='drop' leaves nothing of %d examples in batches of %d: take smaller "
                    "batches, or another remainder." % (num_examples, batch_size))
        elif remainder == 'pad':
            self.length += -num_examples % batch_size

    def steps(self, begin, end):
        """How many steps it takes from one place of the stream to have given all examples before
        another, an int; 0 where that is done already.

        `begin` may be any place: of a run that resumes with another batch size it is no multiple of
        this one, and its batches begin at the place itself.
        """
        if self.is_static:
            return max(0, -(-(end - begin) // self._batch))
        first, following = self._rest_of_epoch(begin)
        if end <= following:
            return max(0, -(-(end - begin) // self._batch))
        whole, rest = divmod(end - following, self.length)
        return first + whole * self._steps_an_epoch() - (-rest // self._batch)

    def place_after(self, begin, steps):
        """The place in the stream after so many steps from `begin`, which may be any place."""
        if self.is_static:
            return begin + steps * self._batch
        first, following = self._rest_of_epoch(begin)
        if steps < first:
            return begin + steps * self._batch
        whole, rest = divmod(steps - first, self._steps_an_epoch())
        return following + whole * self.length + rest * self._batch

    def _rest_of_epoch(self, place):
        """`(steps, place)`: those from a place to the end of its epoch, and where that is."""
        following = (place // self.length + 1) * self.length
        return -(-(following - place) // self._batch), following

    def _steps_an_epoch(self):
        return -(-self.length // self._batch)

    def batches(self, of_epoch, first_example=0, example=None, read=None):
        """The elements of of_epoch(0), then those of of_epoch(1), …, from a place on, in batches.

        Args:
          of_epoch: function from an epoch, an int64 scalar, to a nest of tensors [n, …].
          first_example: the place, an int or a scalar integer tensor.
          example: function that is called with each element; None leaves them as they are.
          read: function that is called before that with some elements together, see
            `read_together`.
        """
        def examples(elements):
            if read is not None:
                elements = read_together(elements, read)
            return elements if example is None else elements.map(
                plain_python(example), tf.data.experimental.AUTOTUNE)
        if self.is_static:
            own = self._batch // self._share[1]
            stream = self._of_epochs(lambda elements: elements, of_epoch, first_example)
            return examples(dealt(stream, own, self._share)).batch(own, drop_remainder=True)
        return self._of_epochs(lambda elements: examples(elements).batch(self._batch), of_epoch,
                               first_example)

    def _of_epochs(self, elements_of, of_epoch, first_example):
        first_example = tf.cast(first_example, tf.int64)
        first_epoch, within = first_example // self.length, first_example % self.length

        def rows(tensor):
            if self.length <= self._examples:
                return tensor[:self.length]
            return tf.gather(tensor, tf.range(self.length) % self._examples)

        @plain_python
        def one(epoch):
            elements = tf.data.Dataset.from_tensor_slices(
                tf.nest.map_structure(rows, of_epoch(epoch)))
            return elements_of(elements.skip(tf.where(
                tf.equal(epoch, first_epoch), within, tf.zeros_like(within))))
        return tf.data.Dataset.range(first_epoch, _INT64_MAX).flat_map(one)
