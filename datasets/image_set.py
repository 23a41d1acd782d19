"""Images of any size in files, as batches for training and evaluation.

All that is random depends on the seed, the epoch and the example alone, and the order of examples
on the seed and the epoch (`epochs.epoch_order`): a run that is taken up at example i goes on as if
it had never stopped. A read is at a random place of a file: keep the files on an SSD, or in
memory.

Memory: `_PREFETCHED` batches that are ready, the batch in the making, and 16 encoded images for
each of TensorFlow's parallel calls, which are as many as there are processors.

Its test is tests/datasets/test_sets.py.
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
from towers.errors import InvalidArgumentError, counted, shown

_PREFETCHED = 2  # batches


class _Read(typing.NamedTuple):
    """n examples that were read; or one example, whose tensors have no dimension n."""
    encoded: tf.Tensor  # string [n]
    labels: tf.Tensor  # int64 [n]
    wrong: tf.Tensor  # string [n]: what is wrong with each, '' for nothing


class ImageSet:
    """A data set of encoded images.

    Attributes:
      name, num_classes: labels are 0 .. num_classes - 1.
      image_shape: (None, None, 3): images differ in size.
      classes: names of the classes, or None.
      sources: dict from 'train' and 'test' to `RecordImages` or `FolderImages`.
      numbers: dict from 'train' and 'test' to the numbers of the images in their source, int64 [n].
        In the place of each training image that the list of bad examples leaves out, it has the
        next good image.
      left_out: how many images the list of bad examples leaves out.
    """

    image_shape = (None, None, 3)

    def __init__(self, name: str, sources: typing.Dict[str, typing.Any], num_classes: int,
                 classes: typing.Optional[typing.List[str]] = None, augment: str = 'inception',
                 bad_list: typing.Optional[str] = None, counted_in: typing.Optional[str] = None):
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
        self.name = name
        self.num_classes = num_classes
        self.classes = classes
        self.sources = sources
        self._augment = augment
        self._counted_in = counted_in
        bad = read_list(bad_list) if bad_list else set()
        self.numbers = {}
        self.left_out = 0
        for split, source in sources.items():
            good = self._good_numbers(split, bad)
            if not len(good):
                raise DatasetError('%s leaves out all images of the %s set.' % (bad_list, split))
            self.left_out += len(source) - len(good)
            if split == 'train':
                self.numbers[split] = _with_next_ones(good, len(source))
            else:
                self.numbers[split] = good
        if self.left_out != len(bad):  # the list has names that no image has
            raise DatasetError('%s names %s, and %s has %d of them: let --mode=check_data '
                               'write it anew.' % (bad_list, counted(len(bad), 'example'), name,
                                                   self.left_out))

    def _good_numbers(self, split, bad):
        """The numbers, int64 [n], of the images of a split whose names are not in the set `bad`."""
        numbers = range(len(self.sources[split]))
        if bad:
            numbers = [number for number in numbers if self.listed_name(split, number) not in bad]
        return np.array(numbers, np.int64)

    @property
    def num_examples(self) -> typing.Dict[str, int]:
        """A dict from 'train' and 'test' to numbers of images."""
        return {split: len(numbers) for split, numbers in self.numbers.items()}

    def with_images(self, images: typing.Dict[str, tuple]) -> 'ImageSet':
        """This data set with other images. `images` is {split: (source, numbers)}, with the numbers
        of the images in the source."""
        other = copy.copy(self)
        for split, (source, numbers) in images.items():
            other.sources = dict(other.sources, **{split: source})
            other.numbers = dict(other.numbers, **{split: numbers})
        return other

    def train_batches(self, batch_size: int, seed: int, image_size: int, channels: int = 3,
                      first_example: typing.Any = 0, shift: int = 0, remainder: str = 'carry',
                      share: typing.Tuple[int, int] = (0, 1)) -> tf.data.Dataset:
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
        _, workers = share
        order = epoch_order(count, seed)

        def epochs_and_places(epoch: tf.Tensor) -> tuple:
            """For each example of an epoch the epoch, and the index of the example in `numbers`."""
            return tf.fill([count], epoch), order(epoch)

        def read(epochs: tf.Tensor, places: tf.Tensor) -> tuple:
            """Reads several examples at once; returns the arguments of `_example` for them."""
            encoded, labels, wrong = self._read('train', places)
            return epochs, places, encoded, labels, wrong
        with tf.device('/cpu:0'):
            epochs = Epochs(count, batch_size * workers, remainder)
            batches = epochs.batches(epochs_and_places, first_example, share,
                                     self._example(self._augment, seed, image_size), read)
            return batches.prefetch(_PREFETCHED)

    def eval_batches(self, batch_size: int, image_size: int, channels: int = 3) -> tf.data.Dataset:
        """The test images once, in order: the central 87.5 % of each, scaled.

        Images that the list leaves out are missing. The last batch may be short.

        Args and raised errors: as for `train_batches`.
        """
        _check(channels, 0)
        numbers = self.numbers['test']

        def read(places: tf.Tensor) -> tuple:
            """Reads several examples at once."""
            # A plain tuple: `tf.data` calls `example` with its fields one by one, but with a named
            # tuple as one argument.
            return tuple(self._read('test', places))

        @plain_python
        def example(*read: tf.Tensor) -> tuple:
            """The image and the label of an example, from the fields of a `_Read`."""
            encoded, label = _checked(_Read(*read))
            return preprocessing.central_image(encoded, image_size), label
        with tf.device('/cpu:0'):
            examples = read_together(tf.data.Dataset.range(len(numbers)), read)
            examples = examples.map(example, tf.data.experimental.AUTOTUNE)
            # If no batch is short, `drop_remainder` drops none, and makes the batch's shape static.
            is_even = len(numbers) % batch_size == 0
            return examples.batch(batch_size, drop_remainder=is_even).prefetch(_PREFETCHED)

    def names_digest(self, split: str) -> str:
        """8 hexadecimal digits of a hash of the names of a split's files. By these digits a run
        that goes on sees whether the files are the same."""
        names = '\0'.join(self.sources[split].names())
        return hashlib.sha256(names.encode('utf-8', 'surrogateescape')).hexdigest()[:8]

    def listed_name(self, split: str, number: int) -> str:
        """The name of an example in a list of bad examples, such as `train/daisy/1.jpg`."""
        return shown('%s/%s' % (split, self.sources[split].name(number)))

    def where(self, split: str, number: int) -> str:
        """File, and place in it, of an example."""
        return self.sources[split].where(number)

    def look(self, split: str, number: int) -> typing.Tuple[typing.Tuple[int, int], int]:
        """Reads and decodes one example; returns `((height, width), label)`.

        Args:
          split: 'train' or 'test'.
          number: the number of the example in its source.

        Raises:
          DatasetError: the example is bad, or its record has another checksum, which training does
            not compare; names file, place and what is wrong.
        """
        source = self.sources[split]
        try:
            encoded, label = self._image(source, number)
            if not source.is_intact(number):
                raise DatasetError('does not have the bytes that its checksum was made of')
            return decoded_size(encoded), int(label)
        except DatasetError as error:
            raise DatasetError('%s %s' % (source.where(number), error))

    def _image(self, source: typing.Any, number: int):
        """`(encoded, label)` of an example.

        Raises:
          DatasetError: it cannot be used; the text begins with a verb, to follow the name of the
            file.
        """
        encoded, label = source.image(number)
        # TensorFlow's decoders and losses do not find all of this, see `wrong_bytes`.
        wrong = wrong_bytes(encoded) or self._wrong_label(label)
        if wrong:
            raise DatasetError(wrong)
        return encoded, label

    def _wrong_label(self, label: int):
        """Describes what is wrong with a label; '' if all is well."""
        if 0 <= label < self.num_classes:
            return ''
        text = 'has the label %d, which is not in 0 .. %d' % (label, self.num_classes - 1)
        if self._counted_in:
            text += ', by the classes that %s lists' % self._counted_in
        if self.name == 'tfrecords' and label >= 0:
            text += ': give --background_class where labels begin at 1, or more --num_classes'
        return text

    def _example(self, augment: str, seed: int, image_size: int):
        """Returns a function from an epoch, the index of an example in `numbers` and the fields of
        its `_Read` to `(image, label)`."""
        def example(epoch: tf.Tensor, place: tf.Tensor, *read: tf.Tensor) -> tuple:
            """The image, cut out and distorted at random, and the label of an example."""
            encoded, label = _checked(_Read(*read))
            # `epoch_order` uses the seeds [seed, 0], [seed, 1], …. Here each example of each epoch
            # has one of [seed, -1], [seed, -2], …, so that no random numbers are repeated.
            number = epoch * len(self.numbers['train']) + place
            seed_pair = tf.stack([tf.constant(seed, tf.int64), -1 - number])
            draws = tf.random.stateless_uniform([preprocessing.TRAIN_DRAWS], seed=seed_pair)
            return preprocessing.random_image(encoded, draws, image_size, augment), label
        return example

    def _read(self, split, places):
        """Reads the examples of a split at some places, int64 [n]; returns a `_Read`.

        For a bad example it returns what is wrong. It raises no error, since that would be an error
        of all n examples.
        """
        source = self.sources[split]
        numbers = self.numbers[split]

        def read(places: np.ndarray) -> tuple:
            """The fields of a `_Read`, as arrays."""
            encoded = []
            labels = []
            wrong = []
            for number in numbers[places]:
                try:
                    image, label = self._image(source, number)
                    fault = ''
                except DatasetError as error:
                    image = b''
                    label = 0
                    fault = '%s %s' % (shown(source.where(number)), error)
                encoded.append(image)
                labels.append(label)
                wrong.append(fault.encode('utf-8'))
            return np.array(encoded, object), np.array(labels, np.int64), np.array(wrong, object)
        examples = tf.numpy_function(read, [places], [tf.string, tf.int64, tf.string],
                                     name='read_examples')
        return _Read(*[tf.ensure_shape(tensor, [None]) for tensor in examples])


def _with_next_ones(good, count):
    """For each number below `count` the number itself, if it is among the `good` numbers; else the
    next good number. The first good number is the next after the last.

    With the good numbers [1, 2] and the count 4 this is [1, 1, 2, 1].
    """
    indices = np.searchsorted(good, np.arange(count))  # in `good`, of the number or the next larger
    return good[indices % len(good)]


def _checked(example: _Read):
    """The encoded image and the label of a `_Read` example that can be used; else the step fails.
    """
    # The raw operation: `tf.Assert` puts a `tf.cond` around it, which costs more than the check.
    valid = tf.raw_ops.Assert(condition=tf.equal(example.wrong, ''), data=[example.wrong],
                              summarize=3)
    with tf.control_dependencies([valid]):
        return tf.identity(example.encoded), tf.identity(example.labels)


def _check(channels: int, shift: int):
    """Raises `InvalidArgumentError` for arguments that do not fit images in files."""
    if channels != 3:
        raise InvalidArgumentError('These are images of 3 channels, and the network is for %r: '
                                   "choose another, such as model='inception_v3'." % channels)
    if shift:
        raise InvalidArgumentError('These images are cut out at random already: leave '
                                   '--augment_shift=%r out.' % shift)
