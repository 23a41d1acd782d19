"""Images of any size in files, as batches for training and evaluation.

All that is random depends on the seed, the epoch and the example alone, and the order of examples
on the seed and the epoch (`pipeline.epoch_order`): a run that is taken up at example i goes on as
if it had never stopped. A read is at a random place of a file: keep the files on an SSD, or in
memory.

Memory: `_PREFETCHED` batches that are ready, the one in the making, and 16 encoded images for each
of TensorFlow's parallel calls, which are as many as there are processors.
"""

import collections
import copy
import hashlib

import numpy as np
import tensorflow.compat.v1 as tf

from datasets import preprocessing
from datasets.bad_examples import Prober, read_list, wrong_bytes
from datasets.epochs import Epochs, of_workers, plain_python, read_together
from datasets.errors import DatasetError
from datasets.pipeline import epoch_order
from towers.errors import InvalidArgumentError, shown

_PREFETCHED = 2  # batches


class ImageSet:
    """A data set of encoded images.

    Attributes:
      name, num_classes: labels are 0 .. num_classes - 1.
      image_shape: (None, None, 3): images differ in size.
      num_examples: a dict from 'train' and 'test' to numbers of images; those left out count.
      classes: names of the classes, or None.
      left_out: how many images the list of bad examples leaves out.
    """

    image_shape = (None, None, 3)

    def __init__(self, name, sources, num_classes, classes=None, augment='inception',
                 bad_list=None, counted_in=None):
        """
        Args:
          name: of the data set.
          sources: dict from 'train' and 'test' to `RecordImages` or `FolderImages`.
          num_classes: how many there are.
          classes: names of the classes, or None.
          augment: see `preprocessing.random_image`.
          bad_list: path of the list of examples to leave out, see `bad_examples`; or None.
          counted_in: path of the file that says how many classes there are, for errors; or None.

        Raises:
          DatasetError: the list cannot be read, names an example that is not there, or leaves out
            all images of a split.
        """
        self.name, self.num_classes, self.classes = name, num_classes, classes
        self._sources, self._augment, self._counted_in = sources, augment, counted_in
        self._prober = Prober()
        self.num_examples = {split: len(source) for split, source in sources.items()}
        bad = read_list(bad_list) if bad_list else set()
        self._good = {split: self._good_numbers(split, bad, bad_list) for split in sources}
        self.left_out = sum(self.num_examples[split] - len(numbers)
                            for split, numbers in self._good.items())
        if self.left_out != len(bad):
            raise DatasetError(
                '%s names %d examples, and %s has %d of them: let --mode=check_data write it anew '
                'for these files.' % (bad_list, len(bad), name, self.left_out))

    def _good_numbers(self, split, bad, bad_list):
        """The numbers of the images of a split that the list does not leave out, int64 [n]."""
        if not bad:
            return np.arange(self.num_examples[split])
        good = [number for number in range(self.num_examples[split])
                if self.listed_name(split, number) not in bad]
        if not good:
            raise DatasetError('%s leaves out all images of the %s set.' % (bad_list, split))
        return np.array(good, np.int64)

    def listed_name(self, split, number):
        """The name of an example in a list of bad ones, such as `train/daisy/1.jpg`."""
        return shown('%s/%s' % (split, self._sources[split].name(number)))

    def good_images(self, split):
        """The source of a split, and the numbers of its images that no list leaves out."""
        return self._sources[split], self._good[split]

    def with_sources(self, sources):
        """This data set with other sources of some splits, of which nothing is left out."""
        other = copy.copy(self)
        other._sources = dict(self._sources, **sources)
        other.num_examples = {split: len(source) for split, source in other._sources.items()}
        other._good = dict(self._good, **{split: np.arange(len(source))
                                          for split, source in sources.items()})
        return other

    def train_batches(self, batch_size, seed, image_size, channels=3, first_example=0, shift=0,
                      remainder='carry', share=(0, 1)):
        """Batches for ever, in the order of `pipeline.epoch_order`.

        Args:
          batch_size, seed, first_example, remainder, share: as for `pipeline.train_batches`.
          image_size: height and width in pixels.
          channels: 1 or 3.
          shift: 0; images are cut out at random instead.

        Returns:
          A `tf.data.Dataset` of `(images, labels)`: float32 [batch_size, image_size, image_size,
          channels] in -1..1, as the inceptions want them, and int64 [batch_size].

        Raises:
          InvalidArgumentError: an argument makes no sense.
        """
        return self._training(batch_size, seed, image_size, channels, first_example, shift,
                              remainder, share, self._train_example)

    def eval_batches(self, batch_size, image_size, channels=3):
        """The test images once, in order: the central 87.5 % of each, scaled.

        Images that the list leaves out are missing. The last batch may be short.

        Args and raised errors: as for `train_batches`.
        """
        _check(channels, 0)
        numbers = self._good['test']

        @plain_python
        def example(*read):
            encoded, label = self._checked(*read)
            return preprocessing.central_image(encoded, image_size, channels), label
        with tf.device('/cpu:0'):
            examples = read_together(
                tf.data.Dataset.from_tensor_slices(np.asarray(numbers, np.int64)),
                self._reader('test')).map(example, tf.data.experimental.AUTOTUNE)
            return examples.batch(batch_size, drop_remainder=len(numbers) % batch_size == 0
                                  ).prefetch(_PREFETCHED)

    def stages(self, batch_size, seed, image_size, channels=3, remainder='carry'):
        """The training pipeline up to each of its stages, to measure them by.

        Args: as for `train_batches`.

        Returns:
          `OrderedDict` from 'read', 'decode', 'augment' and 'batch' to `tf.data.Dataset`s. The last
          is the whole pipeline; of the others an element stands for `batch_size` examples.
        """
        def read(epoch, number, *read):
            encoded, label = self._checked(*read)
            return tf.cast(tf.strings.length(encoded), tf.int64) + label

        def decode(epoch, number, *read):
            encoded, _ = self._checked(*read)
            # The same part of the image, and nothing done to it.
            draws = _draws(seed, epoch, number, self.num_examples['train'])
            image = preprocessing.decoded_part(
                encoded, lambda height, width: preprocessing.random_window(draws, height, width),
                image_size, channels)
            return image[0, 0, 0]

        def augment(*read):
            return self._train_example(seed, image_size, channels, *read)[0][0, 0, 0]

        def staged(example):
            with tf.device('/cpu:0'):
                epochs = Epochs(self.num_examples['train'], batch_size, remainder)
                return epochs.batches(
                    self._order(seed), 0, example,
                    self._numbered_reader('train')).prefetch(_PREFETCHED)
        found = collections.OrderedDict([('read', staged(read)), ('decode', staged(decode))])
        if self._augment != 'none':
            found['augment'] = staged(augment)
        found['batch'] = self.train_batches(batch_size, seed, image_size, channels,
                                            remainder=remainder)
        return found

    def not_taken(self, split):
        """Paths of what stands among the images of a split and is left alone, for its name."""
        return getattr(self._sources[split], 'others', [])

    def names_digest(self, split):
        """8 hexadecimal digits: others where the files of a split, by their names, are others."""
        names = '\0'.join(self._sources[split].names())
        return hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()[:8]

    def where(self, split, number):
        """File, and place in it, of an example."""
        return self._sources[split].where(number)

    def look(self, split, number):
        """Reads and decodes one example: `((height, width, channels), label)`.

        Args:
          split: 'train' or 'test'.
          number: of the example.

        Raises:
          DatasetError: it is bad, or a record does not have its checksum, which training does not
            compare; names file, place and what is wrong.
        """
        source = self._sources[split]
        where = shown(source.where(number))  # as errors have it
        try:
            encoded, label = source.image(number)
            if not source.is_intact(number):
                raise DatasetError('does not have the bytes that its checksum was made of')
            wrong = self._wrong_label(label)
            if wrong:
                raise DatasetError(wrong)
            return self._prober.size(encoded), int(label)
        except DatasetError as error:
            text = str(error)
            named = where.split(', record ')[0] in text  # as that of a file that has gone
            raise DatasetError(text if named else '%s %s' % (where, text))

    def _wrong_label(self, label):
        """What is wrong with a label; '' for nothing."""
        return '' if 0 <= label < self.num_classes else (
            'has the label %d, which is not in 0 .. %d%s%s' % (
                label, self.num_classes - 1,
                ', by the classes that %s lists' % self._counted_in if self._counted_in else '',
                '' if self.name != 'tfrecords' or label < 0 else
                ': give --background_class where labels begin at 1, or more --num_classes'))

    def _training(self, batch_size, seed, image_size, channels, first_example, shift, remainder,
                  share, example):
        _check(channels, shift)
        epochs = of_workers(self.num_examples['train'], batch_size, remainder, share)
        with tf.device('/cpu:0'):
            return epochs.batches(
                self._order(seed), first_example,
                lambda *read: example(seed, image_size, channels, *read),
                self._numbered_reader('train')).prefetch(_PREFETCHED)

    def _order(self, seed):
        """Function from an epoch to `(epochs, numbers)` of its examples, int64 [n] each."""
        count = self.num_examples['train']
        order = epoch_order(count, seed)
        return lambda epoch: (tf.fill([count], epoch), order(epoch))

    def _train_example(self, seed, image_size, channels, epoch, number, *read):
        encoded, label = self._checked(*read)
        draws = _draws(seed, epoch, number, self.num_examples['train'])
        return preprocessing.random_image(encoded, draws, image_size, channels, self._augment), label

    def _reader(self, split):
        """Function from numbers of examples, int64 [n], to `(encoded, labels, wrong)`, [n] each.

        The next good example stands in for one that is left out. `wrong` says what is wrong with
        an example, '' for nothing: an error would be that of all n examples.
        """
        source, good = self._sources[split], self._good[split]

        def read(numbers):
            found = []
            for number in good[np.searchsorted(good, numbers) % len(good)]:
                try:
                    encoded, label = source.image(number)
                    # What the decoders might take, and `look` calls bad.
                    wrong = wrong_bytes(encoded) or self._wrong_label(label)
                    if wrong:
                        wrong = '%s %s' % (shown(source.where(number)), wrong)
                    found.append((encoded, label, wrong))
                except DatasetError as error:
                    found.append((b'', 0, str(error)))
            encoded, labels, wrong = zip(*found)
            return (np.array(encoded, object), np.array(labels, np.int64),
                    np.array([text.encode('utf-8') for text in wrong], object))

        def reader(numbers):
            read_ones = tf.numpy_function(read, [numbers], [tf.string, tf.int64, tf.string],
                                          name='read_examples')
            return tuple(tf.ensure_shape(each, [None]) for each in read_ones)
        return reader

    def _numbered_reader(self, split):
        """`_reader` that takes epochs and numbers, and returns these as well."""
        reader = self._reader(split)
        return lambda epochs, numbers: (epochs, numbers) + reader(numbers)

    def _checked(self, encoded, label, wrong):
        """The encoded image and the label of an example that can be used; else the step fails."""
        # The op itself: tf.Assert puts a tf.cond around it, which costs more than the check.
        valid = tf.raw_ops.Assert(condition=tf.equal(wrong, ''), data=[wrong], summarize=3)
        with tf.control_dependencies([valid]):
            return tf.identity(encoded), tf.identity(label)


def _draws(seed, epoch, number, count):
    """Random numbers of an example in an epoch: float32 [TRAIN_DRAWS] in [0, 1)."""
    # Epochs of the order are counted up from 0: no seed pair serves both.
    place = -1 - (epoch * count + number)
    return tf.random.stateless_uniform([preprocessing.TRAIN_DRAWS],
                                       seed=tf.stack([tf.constant(seed, tf.int64), place]))


def _check(channels, shift):
    if channels != 3:
        raise InvalidArgumentError('These are images of 3 channels, and the network is for %r: '
                                   "choose another, such as model='inception_v3'." % channels)
    if shift:
        raise InvalidArgumentError('These images are cut out at random already: leave '
                                   '--augment_shift=%r out.' % shift)
