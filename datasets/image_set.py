"""Images of any size in files, as batches for training and evaluation.

All that is random depends on the seed, the epoch and the example alone, and the order of examples
on the seed and the epoch (`pipeline.example_order`): a run that is taken up at example i goes on as
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
from datasets.bad_examples import Bad, Prober, Skipped, wrong_bytes
from datasets.epochs import Epochs, of_workers, plain_python, read_together
from datasets.errors import BadExampleError, DatasetError
from datasets.pipeline import epoch_order
from datasets.stream_probe import StreamProbe, name_of
from towers.errors import InvalidArgumentError, shown

_PREFETCHED = 2  # batches


class ImageSet:
    """A data set of encoded images.

    Attributes:
      name, num_classes: labels are 0 .. num_classes - 1.
      image_shape: (None, None, 3): images differ in size.
      num_examples: a dict from 'train' and 'test' to numbers of images.
      classes: names of the classes, or None.
      skipped: `Skipped`.
    """

    image_shape = (None, None, 3)

    def __init__(self, name, sources, num_classes, classes=None, augment='inception', convert=False,
                 skip_bad=0, counted_in=None):
        """
        Args:
          name: what it is called.
          sources: dict from 'train' and 'test' to `RecordImages` or `FolderImages`.
          num_classes: how many there are.
          classes: names of the classes, or None.
          augment: see `preprocessing.random_image`.
          convert: see `preprocessing.decoded_part`.
          skip_bad: how many bad examples may be left out.
          counted_in: path of the file that says how many classes there are, for errors; or None.
        """
        self.name, self.num_classes, self.classes = name, num_classes, classes
        self.skipped = Skipped(skip_bad)
        self._sources, self._augment, self._convert = sources, augment, convert
        self._counted_in = counted_in
        self._prober = Prober()
        for split in sorted(sources):
            for damage in sources[split].damages:
                self.skipped.add(Bad(split, None, -1, shown(damage.text), count=damage.count),
                                 shown(damage.short))
        self.num_examples = {split: len(source) for split, source in sources.items()}

    def source(self, split):
        """The source of a split."""
        return self._sources[split]

    def with_sources(self, sources):
        """This data set with other sources of some splits; before any example was looked at."""
        other = copy.copy(self)
        other._sources = dict(self._sources, **sources)
        other.num_examples = {split: len(source) for split, source in other._sources.items()}
        return other

    def train_batches(self, batch_size, seed, image_size, channels=3, first_example=0, shift=0,
                      remainder='carry', share=(0, 1)):
        """Batches for ever, in the order of `pipeline.example_order`.

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

        What is known to be bad is left out. The last batch may be short.

        Args and raised errors: as for `train_batches`.
        """
        _check(channels, 0)
        numbers = self.good_numbers('test')

        @plain_python
        def example(*read):
            encoded, label = self._checked(*read)
            return preprocessing.central_image(encoded, image_size, channels, self._convert), label
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
                image_size, channels, self._convert)
            return image[0, 0, 0]

        def augment(*read):
            return self._train_example(seed, image_size, channels, *read)[0][0, 0, 0]

        def staged(example):
            with tf.device('/cpu:0'):
                epochs = Epochs(self.num_examples['train'], batch_size, remainder)
                return epochs.batches(
                    self._places(seed, epochs.length), 0, example,
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

    def good_numbers(self, split):
        """List of the numbers of a split's examples that are not known to be bad."""
        bad = self.skipped.numbers(split)
        return [number for number in range(self.num_examples[split]) if number not in bad]

    def find_bad(self, split, numbers):
        """Looks at examples, and leaves out those that are bad: how many were found.

        A test image is bad where an evaluation could not take it: whether any may be left out does
        not change which ones are counted. Of a training image all has to be decodable, since a
        crop may take any part of it. (Not so in a run, see `stream_probe`.)

        Args:
          split: 'train' or 'test'.
          numbers: of the examples.

        Raises:
          DatasetError: they are too many; names the first one that is.
        """
        before = len(self.skipped.examples)
        for number in numbers:
            good = None
            while good is None:  # the next good one, if this one is bad, takes its place at once
                looked_at = self.stand_in(split, number)
                try:
                    good = self.look(split, looked_at, whole=split == 'train')
                except DatasetError as error:
                    self.skipped.add(Bad(split, looked_at, -1, str(error),
                                         name_of(self.where(split, looked_at))))
        return len(self.skipped.examples) - before

    def stream_probe(self, seed, length, image_size, channels=3):
        """The `StreamProbe` of a training.

        Args:
          seed, image_size, channels: as for `train_batches`.
          length: examples that training is given in an epoch, see `Epochs`.
        """
        return StreamProbe(self, seed, length, lambda *element: self._train_example(
            seed, image_size, channels, *(each[0] for each in self._numbered_reader('train')(
                *(tf.reshape(each, [1]) for each in element)))))

    def where(self, split, number):
        """File, and place in it, of an example."""
        return self._sources[split].where(number)

    def look(self, split, number, checksum=False, whole=True):
        """Reads and decodes one example: `((height, width, channels), label)`.

        Args:
          split: 'train' or 'test'.
          number: of the example.
          checksum: compare a record with its checksum as well, which training does not.
          whole: decode all of a JPEG; False: the part that an evaluation takes.

        Raises:
          DatasetError: it is bad; names file, place and what is wrong.
        """
        source = self._sources[split]
        where = shown(source.where(number))  # as errors have it
        try:
            encoded, label = source.image(number)
            if checksum and not source.is_intact(number):
                raise DatasetError('does not have the bytes that its checksum was made of')
            if not 0 <= label < self.num_classes:
                raise DatasetError('has the label %d, which is not in 0 .. %d%s%s' % (
                    label, self.num_classes - 1,
                    ', by the classes that %s lists' % self._counted_in if self._counted_in else '',
                    '' if self.name != 'tfrecords' or label < 0 else
                    ': give --background_class where labels begin at 1, or more --num_classes'))
            return self._prober.size(encoded, 3, self._convert, whole), int(label)
        except DatasetError as error:
            text = str(error)
            named = where.split(', record ')[0] in text  # as that of a file that has gone
            raise DatasetError(text if named else '%s %s' % (where, text))

    def _training(self, batch_size, seed, image_size, channels, first_example, shift, remainder,
                  share, example):
        _check(channels, shift)
        epochs = of_workers(self.num_examples['train'], batch_size, remainder, share)
        with tf.device('/cpu:0'):
            return epochs.batches(
                self._places(seed, epochs.length), first_example,
                lambda *read: example(seed, image_size, channels, *read),
                self._numbered_reader('train')).prefetch(_PREFETCHED)

    def _places(self, seed, length):
        """Function from an epoch to `(places, epochs, numbers)` of its examples, int64 [n] each.

        Args:
          seed: of the order.
          length: examples that training is given in an epoch. One that is given twice in an epoch
            has its first place both times.
        """
        count = self.num_examples['train']
        order = epoch_order(count, seed)
        return lambda epoch: (epoch * length + tf.range(count, dtype=tf.int64),
                              tf.fill([count], epoch), order(epoch))

    def _train_example(self, seed, image_size, channels, epoch, number, *read):
        encoded, label = self._checked(*read)
        draws = _draws(seed, epoch, number, self.num_examples['train'])
        return preprocessing.random_image(encoded, draws, image_size, channels, self._augment,
                                          self._convert), label

    def _reader(self, split):
        """Function from numbers of examples and their places in the stream, int64 [n] each, to
        `(encoded, labels, wrong)`, [n] each.

        They are of the examples, or of the good ones in their place. `wrong` says what is wrong
        with an example, '' for nothing: an error would be that of all n examples.
        """
        source = self._sources[split]

        def read(numbers, places):
            known, found = self.skipped.since(split), []
            for number, place in zip(numbers, places):
                try:
                    encoded, label = source.image(self.stand_in(split, number, place, known))
                    # What the decoders might take, and `look` calls bad.
                    wrong = wrong_bytes(encoded)
                    if not 0 <= label < self.num_classes:
                        wrong = 'the label %d is not in 0 .. %d' % (label, self.num_classes - 1)
                    found.append((encoded, label, wrong))
                except DatasetError as error:
                    found.append((b'', 0, str(error)))
            encoded, labels, wrong = zip(*found)
            return (np.array(encoded, object), np.array(labels, np.int64),
                    np.array([text.encode('utf-8') for text in wrong], object))

        def reader(numbers, places=None):
            read_ones = tf.numpy_function(
                read, [numbers, tf.zeros_like(numbers) if places is None else places],
                [tf.string, tf.int64, tf.string], name='read_examples')
            return tuple(tf.ensure_shape(each, [None]) for each in read_ones)
        return reader

    def _numbered_reader(self, split):
        """`_reader` that takes places, epochs and numbers, and returns the latter two as well."""
        reader = self._reader(split)
        return lambda places, epochs, numbers: (epochs, numbers) + reader(numbers, places)

    def _checked(self, encoded, label, wrong):
        """The encoded image and the label of an example that can be used; else the step fails."""
        # The op itself: tf.Assert puts a tf.cond around it, which costs more than the check.
        valid = tf.raw_ops.Assert(condition=tf.equal(wrong, ''), data=[wrong], summarize=3)
        with tf.control_dependencies([valid]):
            return tf.identity(encoded), tf.identity(label)

    def stand_in(self, split, number, place=None, known=None):
        """The number of the example itself, or of the next good one: an int.

        Args:
          split: 'train' or 'test'.
          number: of the example.
          place: in the stream, of training examples: later ones may be left out from there on;
            None: after all of them.
          known: `skipped.since(split)`, from before; or None.

        Raises:
          BadExampleError: all are left out there.
        """
        count = self.num_examples[split]
        known = self.skipped.since(split) if known is None else known
        for following in range(count):
            other = int(number + following) % count
            if other not in known or (place is not None and place < known[other]):
                return other
        first = next(each.text for each in self.skipped.examples
                     if each.split == split and each.number is not None)
        raise BadExampleError('All %d images of the %s set are bad; the first: %s. See '
                              '--mode=check_data.' % (count, split, first.rstrip('.')))


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
