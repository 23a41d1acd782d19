"""Images of any size in files, as batches for training and evaluation.

All that is random depends on the seed, the epoch and the example alone, and the order of examples
on the seed and the epoch (`epochs.epoch_order`): a run that is taken up at example i goes on as if
it had never stopped. A read is at a random place of a file: keep the files on an SSD, or in
memory.

Memory: `_PREFETCHED` batches that are ready, the one in the making, and 16 encoded images for each
of TensorFlow's parallel calls, which are as many as there are processors.
"""

import copy
import hashlib
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from datasets import preprocessing
from datasets.bad_examples import decoded_size, read_list, wrong_bytes
from datasets.epochs import Epochs, epoch_order, plain_python, read_together
from datasets.errors import DatasetError
from towers.errors import InvalidArgumentError, shown

_PREFETCHED = 2  # batches


class ImageSet:
    """A data set of encoded images.

    Attributes:
      name, num_classes: labels are 0 .. num_classes - 1.
      image_shape: (None, None, 3): images differ in size.
      classes: names of the classes, or None.
      sources: dict from 'train' and 'test' to `RecordImages` or `FolderImages`.
      numbers: dict likewise to the numbers, in the source, of the images, int64 [n]. In the place
        of a training image that the list of bad examples leaves out is the next good one.
      left_out: how many images the list of bad examples leaves out.
    """

    image_shape = (None, None, 3)

    def __init__(self, name, sources, num_classes, classes=None, augment='inception',
                 bad_list=None, counted_in=None):
        """
        Args:
          name, sources, num_classes, classes: the attributes.
          augment: see `preprocessing.random_image`.
          bad_list: path of the list of examples to leave out, see `bad_examples`; or None.
          counted_in: path of the file that says how many classes there are, for errors; or None.

        Raises:
          DatasetError: the list cannot be read, names an example that is not there, or leaves out
            all images of a split.
        """
        self.name, self.num_classes, self.classes = name, num_classes, classes
        self.sources, self._augment, self._counted_in = sources, augment, counted_in
        bad = read_list(bad_list) if bad_list else set()
        self.numbers = {split: self._taken(split, bad, bad_list) for split in sources}
        self.left_out = sum(len(source) - len(np.unique(self.numbers[split]))
                            for split, source in sources.items())
        if self.left_out != len(bad):
            raise DatasetError('%s names %d examples, and %s has %d of them: let --mode=check_data '
                               'write it anew.' % (bad_list, len(bad), name, self.left_out))

    def _taken(self, split, bad, bad_list):
        """The `numbers` of a split."""
        count = len(self.sources[split])
        good = np.array([number for number in range(count) if not bad
                         or self.listed_name(split, number) not in bad], np.int64)
        if not len(good):
            raise DatasetError('%s leaves out all images of the %s set.' % (bad_list, split))
        return good if split == 'test' else good[
            np.searchsorted(good, np.arange(count)) % len(good)]

    @property
    def num_examples(self) -> typing.Dict[str, int]:
        """A dict from 'train' and 'test' to numbers of images."""
        return {split: len(numbers) for split, numbers in self.numbers.items()}

    def with_images(self, images: typing.Dict[str, tuple]) -> 'ImageSet':
        """This data set with other images: a dict from a split to a source, and the numbers in it
        of the images."""
        other = copy.copy(self)
        for split, (source, numbers) in images.items():
            other.sources = dict(other.sources, **{split: source})
            other.numbers = dict(other.numbers, **{split: numbers})
        return other

    def train_batches(self, batch_size, seed, image_size, channels=3, first_example=0, shift=0,
                      remainder='carry', share=(0, 1)):
        """Batches for ever, in the order of `epochs.epoch_order`.

        Args:
          batch_size, seed, first_example, remainder, share: as for `ArraySet.train_batches`.
          image_size: height and width in pixels.
          channels: 3.
          shift: 0; images are cut out at random instead.

        Returns:
          A `tf.data.Dataset` of `(images, labels)`: float32 [batch_size, image_size, image_size, 3]
          in -1..1, as the inceptions want them, and int64 [batch_size].

        Raises:
          InvalidArgumentError: an argument makes no sense.
        """
        _check(channels, shift)
        count = len(self.numbers['train'])
        order = epoch_order(count, seed)
        with tf.device('/cpu:0'):
            return Epochs(count, batch_size * share[1], remainder).batches(
                lambda epoch: (tf.fill([count], epoch), order(epoch)), first_example, share,
                self._example(self._augment, seed, image_size),
                lambda epochs, places: (epochs, places) + self._read('train', places)
                ).prefetch(_PREFETCHED)

    def eval_batches(self, batch_size: int, image_size: int, channels: int = 3) -> tf.data.Dataset:
        """The test images once, in order: the central 87.5 % of each, scaled.

        Images that the list leaves out are missing. The last batch may be short.

        Args and raised errors: as for `train_batches`.
        """
        _check(channels, 0)
        numbers = self.numbers['test']

        @plain_python
        def example(*read):
            encoded, label = _checked(*read)
            return preprocessing.central_image(encoded, image_size), label
        with tf.device('/cpu:0'):
            examples = read_together(
                tf.data.Dataset.range(len(numbers)), lambda places: self._read(
                    'test', places)).map(example, tf.data.experimental.AUTOTUNE)
            return examples.batch(batch_size, drop_remainder=len(numbers) % batch_size == 0
                                  ).prefetch(_PREFETCHED)

    def names_digest(self, split: str) -> str:
        """8 hexadecimal digits: others where the names of a split's files are others."""
        names = '\0'.join(self.sources[split].names())
        return hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()[:8]

    def listed_name(self, split: str, number: int) -> str:
        """The name of an example in a list of bad ones, such as `train/daisy/1.jpg`."""
        return shown('%s/%s' % (split, self.sources[split].name(number)))

    def where(self, split: str, number: int) -> str:
        """File, and place in it, of an example."""
        return self.sources[split].where(number)

    def look(self, split: str, number: int) -> tuple:
        """Reads and decodes one example: `((height, width), label)`.

        Args:
          split: 'train' or 'test'.
          number: of the example.

        Raises:
          DatasetError: it is bad, or a record does not have its checksum, which training does not
            compare; names file, place and what is wrong.
        """
        source = self.sources[split]
        try:
            encoded, label = self._image(source, number)
            if not source.is_intact(number):
                raise DatasetError('does not have the bytes that its checksum was made of')
            return decoded_size(encoded), int(label)
        except DatasetError as error:
            raise DatasetError('%s %s' % (source.where(number), error))

    def _image(self, source, number):
        """`(encoded, label)` of an example.

        Raises:
          DatasetError: it cannot be used; the text goes on after its place.
        """
        encoded, label = source.image(number)
        wrong = wrong_bytes(encoded) or self._wrong_label(label)  # that the decoders might take
        if wrong:
            raise DatasetError(wrong)
        return encoded, label

    def _wrong_label(self, label):
        """What is wrong with a label; '' for nothing."""
        return '' if 0 <= label < self.num_classes else (
            'has the label %d, which is not in 0 .. %d%s%s' % (
                label, self.num_classes - 1,
                ', by the classes that %s lists' % self._counted_in if self._counted_in else '',
                '' if self.name != 'tfrecords' or label < 0 else
                ': give --background_class where labels begin at 1, or more --num_classes'))

    def _example(self, augment, seed, image_size):
        """Function from the epoch, the place in it and what was read to an image and its label."""
        def example(epoch, place, *read):
            encoded, label = _checked(*read)
            # Epochs of the order are counted up from 0: no seed pair serves both.
            number = -1 - (epoch * len(self.numbers['train']) + place)
            draws = tf.random.stateless_uniform(
                [preprocessing.TRAIN_DRAWS], seed=tf.stack([tf.constant(seed, tf.int64), number]))
            return preprocessing.random_image(encoded, draws, image_size, augment), label
        return example

    def _read(self, split, places):
        """`(encoded, labels, wrong)`, [n] each, of the examples at some places, int64 [n].

        `wrong` says what is wrong with an example, '' for nothing: an error would be that of all n
        examples.
        """
        source, numbers = self.sources[split], self.numbers[split]

        def read(places):
            found = []
            for number in numbers[places]:
                try:
                    found.append(self._image(source, number) + ('',))
                except DatasetError as error:
                    found.append((b'', 0, '%s %s' % (shown(source.where(number)), error)))
            encoded, labels, wrong = zip(*found)
            return (np.array(encoded, object), np.array(labels, np.int64),
                    np.array([text.encode('utf-8') for text in wrong], object))
        read_ones = tf.numpy_function(read, [places], [tf.string, tf.int64, tf.string],
                                      name='read_examples')
        return tuple(tf.ensure_shape(each, [None]) for each in read_ones)


def _checked(encoded, label, wrong):
    """The encoded image and the label of an example that can be used; else the step fails."""
    # The op itself: tf.Assert puts a tf.cond around it, which costs more than the check.
    valid = tf.raw_ops.Assert(condition=tf.equal(wrong, ''), data=[wrong], summarize=3)
    with tf.control_dependencies([valid]):
        return tf.identity(encoded), tf.identity(label)


def _check(channels, shift):
    if channels != 3:
        raise InvalidArgumentError('These are images of 3 channels, and the network is for %r: '
                                   "choose another, such as model='inception_v3'." % channels)
    if shift:
        raise InvalidArgumentError('These images are cut out at random already: leave '
                                   '--augment_shift=%r out.' % shift)
