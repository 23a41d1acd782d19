"""Examples that cannot be used: what is wrong with them, and the list of those to leave out.

`--mode=check_data` decodes every example, and writes the bad ones to a list, a line each: the name
of the example, a tab, and what is wrong. A run that is given the list takes the next good example
of the files in the place of each, so that a batch is full, every other example keeps its place in
the stream, and a run that resumes goes on as if it had never stopped. Without a list a bad example
ends the run by an error.
"""

import re

import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from towers.errors import shown
from towers.safe_files import read_data, written_whole

MOST_PIXELS = 10 ** 8  # of a PNG: decoded 300 MB, for each processor at once

_JPEG, _PNG = b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n'
_JPEG_END, _PNG_END = b'\xff\xd9', b'IEND'
_MARKER = re.compile(b'\xff+([^\x00\xff])')
_END_OF_IMAGE, _SCAN = 0xd9, 0xda
_WITHOUT_LENGTH = {0x01, 0xd8}.union(range(0xd0, 0xd8))
_MOST_BYTES = 2 ** 28  # of a list


def read_list(path):
    """The names of the examples that a list leaves out, a set.

    Raises:
      DatasetError: the file cannot be read, or is no such list.
    """
    try:
        data = read_data(path, _MOST_BYTES)
        if data is None:
            raise DatasetError('There is no list of bad examples %s: --mode=check_data with the '
                               'same flag writes it.' % path)
        lines = data.decode('utf-8').splitlines()
    except (OSError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError('Cannot read the list of bad examples %s: %s.' % (path, error))
    if any('\t' not in line for line in lines):
        raise DatasetError('%s is no list of bad examples: expected lines of a name, a tab and what '
                           'is wrong, as --mode=check_data writes them.' % path)
    return {line.partition('\t')[0] for line in lines}


def write_list(path, bad):
    """Writes a list.

    Args:
      path: of the file.
      bad: pairs of the name of an example and what is wrong.

    Raises:
      LogFileError: the file cannot be written.
    """
    with written_whole(path, advice='Make room or make the directory writable.') as lines:
        lines.write(''.join('%s\t%s\n' % (shown(name), shown(text)) for name, text in bad))


def wrong_bytes(encoded):
    """What is wrong with the bytes of an image by their beginning and end; '' for nothing.

    It takes a fifth of a microsecond. The decoders are no judges of it: that of PNGs takes a GIF of
    one picture as well, and that of a part of a JPEG does not come to its end. A file that was not
    copied to its end is the commonest damage.
    """
    if encoded.startswith(_JPEG):
        return _cut_off('JPEG') if _is_cut_off(encoded) else ''
    if encoded.startswith(_PNG):
        width, height = (int.from_bytes(encoded[at:at + 4], 'big') for at in (16, 20))
        if width * height > MOST_PIXELS:
            return ('is a PNG of %d x %d pixels, which would be decoded whole, and MOST_PIXELS of '
                    'datasets/bad_examples.py is %d: make it smaller, or a JPEG, of which parts '
                    'are decoded' % (width, height, MOST_PIXELS))
        return '' if _PNG_END in encoded[-16:] or _PNG_END in encoded else _cut_off('PNG')
    return ('is neither a JPEG nor a PNG: it begins with %r' % encoded[:8] if encoded else
            'is empty')


def _cut_off(kind):
    return ('is a damaged %s: it ends before its end marker, as a file that was copied in part '
            'does' % kind)


def _is_cut_off(encoded):
    """Whether a JPEG ends before its end marker.

    Bytes after the marker do not matter, as they do not to the decoder: zeros that fill a block, a
    maker's notes. A marker in the header does not count, such as that of a thumbnail.
    """
    if encoded.endswith(_JPEG_END):
        return False
    if encoded.endswith(b'\0') and encoded.rstrip(b'\0').endswith(_JPEG_END):
        return False
    # In the compressed data a byte ff is followed by 00 or the number of a restart.
    return encoded.find(_JPEG_END, _scan(encoded)) < 0


def _scan(encoded):
    """Where the compressed data of a JPEG begin; its length if it ends before."""
    place = len(_JPEG) - 1
    while True:
        marker = _MARKER.search(encoded, place)
        if marker is None:
            return len(encoded)
        code = marker.group(1)[0]
        if code == _END_OF_IMAGE:  # no image at all: the decoder says so
            return marker.start()
        place = marker.end()
        if code not in _WITHOUT_LENGTH:
            place += int.from_bytes(encoded[place:place + 2], 'big')
            if code == _SCAN:
                return place


class Prober:
    """Decodes single images, to tell what is wrong with them."""

    def __init__(self):
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device('/cpu:0'):
            self._encoded = tf.placeholder(tf.string, [])
            self._header = tf.image.extract_jpeg_shape(self._encoded)
            self._jpeg = tf.image.decode_jpeg(self._encoded, channels=3).op
            self._png = tf.shape(tf.image.decode_png(self._encoded))
        self._session = None

    def size(self, encoded):
        """Height, width and channels of an image, which is decoded whole.

        Raises:
          DatasetError: it cannot be used; the text goes on after the image's name.
        """
        wrong = wrong_bytes(encoded)
        if wrong:
            raise DatasetError(wrong)
        if self._session is None:
            self._session = tf.Session(graph=self._graph, config=tf.ConfigProto(
                device_count={'GPU': 0}))
        jpeg = encoded.startswith(_JPEG)
        try:
            # The channels by the header: of CMYK the decoder makes another number.
            size = self._session.run(self._header if jpeg else self._png, {self._encoded: encoded})
            if jpeg:
                self._session.run(self._jpeg, {self._encoded: encoded})
        except tf.errors.OpError as error:
            # TensorFlow puts its traceback before the reason, and the operation's name after it.
            reason = error.message.split(' [[')[0].rstrip().split('\n')[-1].rstrip('.')[:120]
            raise DatasetError('is a damaged %s: %s' % ('JPEG' if jpeg else 'PNG', reason))
        return tuple(int(each) for each in size)
