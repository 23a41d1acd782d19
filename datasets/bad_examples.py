"""Examples that cannot be used: what is wrong with them, and the list of those to leave out.

`--mode=check_data` decodes every example, and writes the bad ones to a list, a line each: the name
of the example, a tab, and what is wrong. A run that is given the list takes the next good example
of the files in the place of each, so that a batch is full, every other example keeps its place in
the stream, and a run that resumes goes on as if it had never stopped. Without a list a bad example
ends the run by an error.
"""

import collections
import functools

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from towers.errors import shown
from towers.safe_files import read_data, written_whole

MOST_PIXELS = 10 ** 8  # decoded 300 MB, for each processor at once

_JPEG, _PNG = b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n'
_JPEG_END, _PNG_END = b'\xff\xd9', b'IEND'
_SCAN, _FRAMES = b'\xda', (b'\xc0', b'\xc1', b'\xc2')  # segments of a JPEG
_MOST_BYTES = 2 ** 28  # of a list
_LISTED = 20  # classes


def read_list(path):
    """The names of the examples that a list leaves out, a set.

    Raises:
      DatasetError: the file cannot be read, or is no such list.
    """
    try:
        data = read_data(path, _MOST_BYTES)
        lines = None if data is None else data.decode('utf-8').splitlines()
    except (OSError, ValueError) as error:
        raise DatasetError('Cannot read the list of bad examples %s: %s.' % (path, error))
    if lines is None or any('\t' not in line for line in lines):
        raise DatasetError('%s is no list of bad examples: expected lines of a name, a tab and '
                           'what is wrong, as --mode=check_data writes them.' % path)
    return {line.partition('\t')[0] for line in lines}


def check_data(dataset, say=print, bad_list=None):
    """Reads and decodes every example, and says what there is: classes, sizes, bad examples.

    Args:
      dataset: as of `datasets.get_dataset`.
      say: called with each line.
      bad_list: path of the list of bad examples to write; None: none.

    Returns:
      How many examples are bad.

    Raises:
      DatasetError: it is no set of files.
      LogFileError: the list cannot be written.
    """
    listed = []
    for split in ('train', 'test'):
        labels, sizes, bad = _looked_at(dataset, split)
        for line in _report(split, labels, sizes, bad, dataset.num_classes,
                            getattr(dataset, 'classes', None)):
            say(line)
        listed += bad
    say('check          %s' % ('every example can be used' if not listed else '%d bad example%s' % (
        len(listed), '' if len(listed) == 1 else 's')))
    if bad_list is not None:
        with written_whole(bad_list, advice='Make room or make the directory writable.') as lines:
            lines.write(''.join('%s\t%s\n' % (shown(name), shown(text)) for name, text in listed))
        say('list           %s' % shown(bad_list))
    return len(listed)


def _looked_at(dataset, split):
    """`(labels, sizes, bad)`: counts of labels, and of (height, width); and pairs of a bad
    example's name in a list and what is wrong."""
    labels, sizes, bad = collections.Counter(), collections.Counter(), []
    if hasattr(dataset, 'look'):
        for number in range(len(dataset.sources[split])):
            try:
                size, label = dataset.look(split, number)
            except DatasetError as error:
                bad.append((dataset.listed_name(split, number), str(error)))
                continue
            sizes[size] += 1
            labels[label] += 1
    elif hasattr(dataset, 'load'):
        images, found = dataset.load(split)
        good = (found >= 0) & (found < dataset.num_classes) & np.isfinite(images).all((1, 2, 3))
        bad = [('%s/%d' % (split, number), 'example %d of the %s set has the label %d, or pixels '
                'that are not finite' % (number, split, found[number]))
               for number in np.flatnonzero(~good)]
        labels.update(found[good].tolist())
        sizes[images.shape[1:3]] += int(good.sum())
    else:
        raise DatasetError('%s is no set of files that could be checked.' % dataset.name)
    return labels, sizes, bad


def _report(split, labels, sizes, bad, num_classes, classes):
    """The report on a split, line by line."""
    count = sum(labels.values())
    yield '%-14s %s images that can be used, %d bad' % (split, '{:,}'.format(count), len(bad))
    if count:
        counts = [labels[label] for label in range(num_classes)]
        yield '  classes      %d of %d, %d to %d images each' % (
            sum(number > 0 for number in counts), num_classes, min(counts), max(counts))
        present = [(label, number) for label, number in enumerate(counts)
                   if number or num_classes <= _LISTED]
        for label, number in present[:_LISTED]:
            yield '    %5d %-20s %s' % (label, shown(classes[label]) if classes else '',
                                        '{:,}'.format(number))
        if len(present) > _LISTED:
            yield '    ... %d more' % (len(present) - _LISTED)
        for name, values in zip(('height', 'width'), zip(*sizes.elements())):
            yield '  %-12s %d to %d pixels, median %d' % (
                name, min(values), max(values), np.median(values))
    for _, text in bad:
        yield '  bad          %s' % text


def wrong_bytes(encoded):
    """What is wrong with the bytes of an image by their beginning and end; '' for nothing.

    The decoders are no judges of it: that of PNGs takes a GIF of one picture as well, and that of a
    part of a JPEG does not come to its end. A file that was not copied to its end is the commonest
    damage.
    """
    if encoded.startswith(_JPEG):
        height, width, place = _jpeg_header(encoded)
        # Bytes after the marker do not matter, as they do not to the decoder; in the compressed
        # data a byte ff is followed by 00 or the number of a restart.
        kind, is_whole = 'JPEG', encoded.find(_JPEG_END, place) >= 0
    elif encoded.startswith(_PNG):
        width, height = (int.from_bytes(encoded[at:at + 4], 'big') for at in (16, 20))
        kind, is_whole = 'PNG', _PNG_END in encoded
    else:
        return ('is neither a JPEG nor a PNG: it begins with %r' % encoded[:8] if encoded else
                'is empty')
    if width * height > MOST_PIXELS:
        return ('is a %s of %d x %d pixels, and MOST_PIXELS of datasets/bad_examples.py is %d: '
                'make it smaller' % (kind, width, height, MOST_PIXELS))
    return '' if is_whole else ('is a damaged %s: it ends before its end marker, as a file that '
                                'was copied in part does' % kind)


def _jpeg_header(encoded):
    """Height and width of a JPEG, 0 where it does not say, and the place where its header ends.

    The header may hold a JPEG of its own, a thumbnail.
    """
    height, width, place = 0, 0, 2
    while encoded[place:place + 1] == b'\xff' and encoded[place + 1:place + 2] != _SCAN:
        if encoded[place + 1:place + 2] in _FRAMES:
            height, width = (int.from_bytes(encoded[place + at:place + at + 2], 'big')
                             for at in (5, 7))
        place += 2 + int.from_bytes(encoded[place + 2:place + 4], 'big')  # a segment
    return height, width, place


@functools.lru_cache(maxsize=None)
def _decoder():
    """Function from the bytes of an image to its height and width, which decodes it whole."""
    with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
        encoded = tf.placeholder(tf.string, [])
        # It decodes JPEGs as well.
        size = tf.shape(tf.image.decode_png(encoded, channels=3))[:2]
    return tf.Session(graph=graph, config=tf.ConfigProto(
        device_count={'GPU': 0})).make_callable(size, [encoded])


def decoded_size(encoded):
    """Height and width of an image, which is decoded whole.

    Raises:
      DatasetError: it is damaged; the text goes on after the image's name.
    """
    try:
        return tuple(_decoder()(encoded).tolist())
    except tf.errors.OpError as error:
        # TensorFlow puts its traceback before the reason, and the operation's name after it.
        reason = error.message.split(' [[')[0].rstrip().split('\n')[-1].rstrip('.')[:120]
        raise DatasetError('is a damaged %s: %s' % (
            'JPEG' if encoded.startswith(_JPEG) else 'PNG', reason))
