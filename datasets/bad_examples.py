"""Examples that cannot be used: what is wrong with them, and the list of examples to leave out.

`--mode=check_data` decodes every example, and writes the bad ones to a list, a line each: the name
of the example, a tab, and what is wrong. A run that is given the list takes the next good example
of the files in the place of each bad example. So each batch is full, every other example keeps its
place in the stream, and a run that resumes goes on as if it had never stopped. Without a list a bad
example ends the run by an error.
"""

import collections
import functools
import re
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from towers.errors import counted, shown
from towers.safe_files import read_data, written_whole

MOST_PIXELS = 10 ** 8  # decoded they take 300 MB, and each processor decodes an image at once

_JPEG = b'\xff\xd8\xff'
_JPEG_END = b'\xff\xd9'
_PNG = b'\x89PNG\r\n\x1a\n'
_PNG_END = b'IEND'
# Kinds of segments of a JPEG: the last before the compressed data, and the three that say the size.
_SCAN = b'\xda'
_FRAMES = (b'\xc0', b'\xc1', b'\xc2')
_MOST_BYTES = 2 ** 28  # of a list
_MOST_CLASSES = 20  # a report has a line for at most so many


class _Found(typing.NamedTuple):
    """The result of a look at the examples of a split.

    Attributes:
      labels: the number of usable examples of each label.
      sizes: the number of usable examples of each (height, width).
      bad: list of `(name of a bad example in the list, text about what is wrong with it)`.
    """
    labels: typing.Counter[int]
    sizes: typing.Counter[typing.Tuple[int, int]]
    bad: typing.List[typing.Tuple[str, str]]


class _JpegHeader(typing.NamedTuple):
    """The segments before the compressed data of a JPEG.

    Attributes:
      height, width: the size in pixels; 0 where the segments do not say it.
      end: the index of the first byte after them.
    """
    height: int
    width: int
    end: int


def read_list(path: str) -> typing.Set[str]:
    """The names of the examples that a list leaves out.

    Raises:
      DatasetError: the file cannot be read, or is no such list.
    """
    try:
        data = read_data(path, _MOST_BYTES)
        lines = [] if data is None else data.decode('utf-8').splitlines()
    except (OSError, ValueError) as error:
        raise DatasetError('Cannot read the list of bad examples %s: %s.' % (path, error))
    if data is None or not all('\t' in line for line in lines):
        raise DatasetError('%s is no list of bad examples: expected lines of a name, a tab and '
                           'what is wrong, as --mode=check_data writes them.' % path)
    return {line.partition('\t')[0] for line in lines}


def check_data(dataset: typing.Any, say: typing.Callable[[str], None] = print,
               bad_list: typing.Optional[str] = None) -> int:
    """Reads and decodes every example, and says what there is: classes, sizes, bad examples.

    Args:
      dataset: a data set of `datasets.get_dataset`.
      say: called with each line.
      bad_list: path of the list of bad examples to write; None to write no list.

    Returns:
      The number of bad examples.

    Raises:
      DatasetError: the data set has no files.
      LogFileError: the list cannot be written.
    """
    bad = []
    for split in ('train', 'test'):
        found = _examples_of(dataset, split)
        for line in _report(split, found, dataset.num_classes, getattr(dataset, 'classes', None)):
            say(line)
        bad += found.bad
    if not bad:
        say('check          every example can be used')
    else:
        say('check          %d bad example%s' % (len(bad), '' if len(bad) == 1 else 's'))
    if bad_list is not None:
        with written_whole(bad_list, advice='Make room or make the directory writable.') as lines:
            for name, text in bad:
                lines.write('%s\t%s\n' % (shown(name), shown(text)))
        say('list           %s' % shown(bad_list))
    return len(bad)


def _examples_of(dataset: typing.Any, split: str) -> _Found:
    """Looks at every example of a split."""
    if hasattr(dataset, 'look'):  # an `ImageSet`
        return _examples_in_files(dataset, split)
    if hasattr(dataset, 'load'):  # an `ArraySet`
        return _examples_in_arrays(dataset, split)
    raise DatasetError('%s is no set of files that could be checked.' % dataset.name)


def _examples_in_files(dataset: typing.Any, split: str) -> _Found:
    """Looks at every file or record of a split."""
    found = _Found(collections.Counter(), collections.Counter(), [])
    for number in range(len(dataset.sources[split])):
        try:
            size, label = dataset.look(split, number)
        except DatasetError as error:
            found.bad.append((dataset.listed_name(split, number), str(error)))
            continue
        found.sizes[size] += 1
        found.labels[label] += 1
    return found


def _examples_in_arrays(dataset: typing.Any, split: str) -> _Found:
    """Looks at every example of a split of a data set in memory."""
    images, labels = dataset.load(split)
    is_class = (labels >= 0) & (labels < dataset.num_classes)
    is_good = is_class & np.isfinite(images).all((1, 2, 3))
    bad = []
    for number in np.flatnonzero(~is_good):
        bad.append(('%s/%d' % (split, number),
                    'example %d of the %s set has the label %d, or pixels that are not finite' % (
                        number, split, labels[number])))
    sizes = collections.Counter({images.shape[1:3]: int(is_good.sum())})
    return _Found(collections.Counter(labels[is_good].tolist()), sizes, bad)


def _report(split, found, num_classes, classes):
    """Yields the lines of the report on a split.

    Args:
      split: 'train' or 'test'.
      found: the `_Found` of the split.
      num_classes: labels are 0 .. num_classes - 1.
      classes: the names of the classes, or None.
    """
    count = sum(found.labels.values())
    yield '%-14s %s that can be used, %d bad' % (split, counted(count, 'image'), len(found.bad))
    if count:
        counts = [found.labels[label] for label in range(num_classes)]
        with_images = num_classes - counts.count(0)
        yield '  classes      %d of %d, %d to %s each' % (
            with_images, num_classes, min(counts), counted(max(counts), 'image'))
        yield from _lines_of_classes(counts, classes)
        sizes = list(found.sizes.elements())  # (height, width), as often as images have it
        yield _range('height', [height for height, _ in sizes])
        yield _range('width', [width for _, width in sizes])
    for _, text in found.bad:
        yield '  bad          %s' % text


def _lines_of_classes(counts: typing.List[int], classes: typing.Optional[typing.List[str]]):
    """Yields a line for each class. Of more than `_MOST_CLASSES` classes only the first that have
    images get one, and a last line says how many more have images.

    Args:
      counts: the number of images of each class.
      classes: the names of the classes, or None.
    """
    labels = list(range(len(counts)))
    if len(labels) > _MOST_CLASSES:
        labels = [label for label in labels if counts[label]]
    for label in labels[:_MOST_CLASSES]:
        name = shown(classes[label]) if classes else ''
        yield '    %5d %-20s %s' % (label, name, '{:,}'.format(counts[label]))
    if len(labels) > _MOST_CLASSES:
        yield '    ... %d more' % (len(labels) - _MOST_CLASSES)


def _range(name: str, sides: typing.Sequence[int]) -> str:
    """The line about the heights, or the widths, of images."""
    return '  %-12s %d to %d pixels, median %d' % (name, min(sides), max(sides), np.median(sides))


def wrong_bytes(encoded: bytes) -> str:
    """Describes what is wrong with the beginning or end of an image's bytes; '' if all is well.

    The decoders do not find this: TensorFlow's decoder of PNGs decodes a GIF of one picture as
    well. In training only a part of a JPEG is decoded, so the decoder does not see that the end is
    missing; and a file that was not copied to its end is the commonest damage.
    """
    if not encoded:
        return 'is empty'
    if encoded.startswith(_JPEG):
        kind = 'JPEG'
        header = _jpeg_header(encoded)
        height = header.height
        width = header.width
        # More bytes may follow the end marker, as the decoder allows. The compressed data cannot
        # hold it by chance: there the byte ff is followed by 00, or by the number of a restart.
        is_whole = encoded.find(_JPEG_END, header.end) >= 0
    elif encoded.startswith(_PNG):
        kind = 'PNG'
        # The first segment is the header: 4 bytes length, 'IHDR', width, height.
        width = int.from_bytes(encoded[16:20], 'big')
        height = int.from_bytes(encoded[20:24], 'big')
        is_whole = _PNG_END in encoded
    else:
        # Without quotes and backslashes: TensorFlow's assertions put more backslashes before them.
        begin = re.sub(rb'[^ -~]|[\'"\\]', b'.', encoded[:10]).decode('ascii')
        return 'is neither a JPEG nor a PNG: it begins with %s' % begin
    if width * height > MOST_PIXELS:
        return ('is a %s of %d x %d pixels, and MOST_PIXELS of datasets/bad_examples.py is %d: '
                'make it smaller' % (kind, width, height, MOST_PIXELS))
    if not is_whole:
        return ('is a damaged %s: it ends before its end marker, as a file that was copied in part '
                'does' % kind)
    return ''


def _jpeg_header(encoded: bytes):
    """The `_JpegHeader` of an encoded image.

    It goes from segment to segment, since a segment may hold a whole JPEG, a thumbnail. A segment
    is the byte ff, its kind (1 byte), its length without these two bytes (2 bytes), and its
    content. The content of a frame is the precision (1 byte), the height (2 bytes), the width (2
    bytes), and more.
    """
    height = 0
    width = 0
    place = 2  # after the two bytes that begin every JPEG
    while encoded[place:place + 1] == b'\xff':
        kind = encoded[place + 1:place + 2]
        if kind == _SCAN:
            break
        if kind in _FRAMES:
            height = int.from_bytes(encoded[place + 5:place + 7], 'big')
            width = int.from_bytes(encoded[place + 7:place + 9], 'big')
        length = int.from_bytes(encoded[place + 2:place + 4], 'big')
        place += 2 + length
    return _JpegHeader(height, width, place)


@functools.lru_cache(maxsize=None)
def _decoder():
    """Function from the bytes of an image to its height and width, which decodes it whole."""
    with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
        encoded = tf.placeholder(tf.string, [])
        # `decode_png` decodes JPEGs as well.
        size = tf.shape(tf.image.decode_png(encoded, channels=3))[:2]
    session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={'GPU': 0}))
    return session.make_callable(size, [encoded])


def decoded_size(encoded: bytes) -> typing.Tuple[int, int]:
    """Height and width of an image, which is decoded whole.

    Raises:
      DatasetError: the image is damaged; the text begins with a verb, to follow the image's name.
    """
    try:
        return tuple(_decoder()(encoded).tolist())
    except tf.errors.OpError as error:
        # TensorFlow puts its traceback before the reason, and the operation's name after it.
        reason = error.message.split(' [[')[0].rstrip().split('\n')[-1].rstrip('.')[:120]
        kind = 'JPEG' if encoded.startswith(_JPEG) else 'PNG'
        raise DatasetError('is a damaged %s: %s' % (kind, reason))
