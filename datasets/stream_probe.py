"""Single examples of the stream of training, tried by the pipeline's own operations.

An example is bad where the pipeline fails at it: at its place in the stream, with the part of the
image that is drawn there. So which examples a run leaves out, and from which place on, depends on
the files, the seed and the size of the images alone: not on the batches, on what else is bad in
one, or on how far ahead inputs are read. (Whether all of an image can be decoded is another
question, which `--mode=check_data` answers: most crops of an image with a wrong byte near its end
are good, and are used.)
"""

import collections
import os

import tensorflow.compat.v1 as tf

from datasets.bad_examples import Bad, Change, short_reason
from datasets.errors import DatasetError
from datasets.pipeline import epoch_order
from towers.errors import shown

_EPOCHS_KEPT = 2  # of 1.28 million examples 10 MB each; a batch may reach from one to the next

Element = collections.namedtuple('Element', 'place epoch number')
"""What the pipeline knows of an example before it reads it: place in the stream, epoch, number. One
that is given twice in an epoch, to fill the last batch, has its first place both times."""


def name_of(where):
    """The name of an example that stays when the folder of the data is moved: the file in its
    class folder, or the file of records and the place in it.

    Args:
      where: path of a file; and the place in it, of a record.
    """
    parts = where.split(os.sep)
    return os.sep.join(parts[-1:] if ', record ' in parts[-1] else parts[-2:])


class StreamOrder:
    """Which example is at a place of the stream."""

    def __init__(self, count, seed, length):
        """
        Args:
          count: of examples.
          seed: of the order.
          length: examples that training is given in an epoch, see `Epochs`.
        """
        self._count, self._length = count, length
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device('/cpu:0'):
            self._epoch = tf.placeholder(tf.int64, [])
            self._order = epoch_order(count, seed)(self._epoch)
        self._orders = collections.OrderedDict()

    def at(self, place):
        """The `Element` at a place."""
        epoch, within = divmod(place, self._length)
        within %= self._count
        if epoch not in self._orders:
            with tf.Session(graph=self._graph, config=_on_cpu()) as session:
                self._orders[epoch] = session.run(self._order, {self._epoch: epoch})
            if len(self._orders) > _EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return Element(epoch * self._length + within, epoch, int(self._orders[epoch][within]))


class StreamProbe:
    """Tries the examples of a stream one by one; see `ImageSet.stream_probe`."""

    def __init__(self, dataset, seed, length, example):
        """
        Args:
          dataset: `ImageSet`.
          seed, length: as for `StreamOrder`.
          example: function from place, epoch and number, int64 scalar tensors, to the tensors that
            the pipeline makes of it.
        """
        self._dataset, self._example = dataset, example
        self._order = StreamOrder(dataset.num_examples['train'], seed, length)
        self._session = None  # most runs need none

    def find_bad(self, begin, end):
        """Leaves out the bad examples between two places of the stream: how many there are.

        Raises:
          BadExampleError: they are too many; names the first one that is.
        """
        skipped = self._dataset.skipped
        before = len(skipped.examples)
        for place in range(begin, end):
            bad = self._bad_at(place)
            while bad is not None:  # what takes its place may be bad as well
                skipped.add(bad)
                bad = self._bad_at(place)
        return len(skipped.examples) - before

    def look_again(self, bad):
        """What has become of an example that was bad: a `Bad`, with its file and what is wrong as
        they are now, where it is still bad; else a `Change`.

        It is still bad where it cannot be decoded whole, or not what was drawn of it at its place.

        Args:
          bad: `Bad` of the training examples of this seed, as found in an earlier run.
        """
        try:
            if not 0 <= bad.number < self._dataset.num_examples['train']:
                raise IndexError(bad.number)
            where = self._dataset.where('train', bad.number)
            if bad.name and bad.name != name_of(where):
                raise IndexError(bad.number)
            self._dataset.look('train', bad.number)
        except IndexError:
            return Change(False, '%s: that is no longer example %d' % (
                bad.text.rstrip('.'), bad.number))
        except DatasetError as error:
            return bad._replace(text=str(error), name=name_of(where))
        if bad.position >= 0:
            found = self._bad_at(bad.position)
            if found is not None and found.number == bad.number:
                return bad._replace(text=found.text, name=found.name)
        return Change(True, '%s is good now' % shown(where))

    def _bad_at(self, place):
        """The `Bad` that the pipeline would meet at a place; None where it can go on."""
        element = self._order.at(place)
        number = self._dataset.stand_in('train', element.number, element.place)
        try:
            self._try(element)
            return None
        except tf.errors.OpError as error:
            where = self._dataset.where('train', number)
            text = '%s cannot be used: %s' % (shown(where), short_reason(error.message))
        try:
            self._dataset.look('train', number)  # which says it better
        except DatasetError as error:
            text = str(error)
        return Bad('train', number, element.place, text, name_of(where))

    def _try(self, element):
        if self._session is None:
            with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
                self._given = Element(*(tf.placeholder(tf.int64, []) for _ in Element._fields))
                self._made = [tensor.op for tensor in self._example(*self._given)]
            self._session = tf.Session(graph=graph, config=_on_cpu())
        self._session.run(self._made, dict(zip(self._given, element)))


def _on_cpu():
    return tf.ConfigProto(device_count={'GPU': 0})
