"""Random access to the records of TFRecord files, so that any order of them can be read.

TF's own reader goes through a file from its start, which leaves a shuffle buffer as the only source
of random order, and a buffer cannot be taken up where a stopped run left it. Here the places of
all records are found once (their lengths are in the files, 12 bytes a record to read), and a
record is then one read at its place.

A record is: its length (uint64), a masked CRC-32C of these 8 bytes, the data, a masked CRC-32C of
the data; little-endian. The checksums of all lengths are compared, for all records of a file at
once, since a length that is wrong leads anywhere: in the zeros that an interrupted copy leaves each
16 bytes would be a record. The data's own checksum is compared where that is asked for.
"""

import collections
import concurrent.futures
import functools
import glob
import itertools
import os
import re
import struct
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.damages import STRAY, TWICE, Damage
from datasets.errors import DatasetError
from datasets.record_sets import missing_of, same_files, strays_of

_HEADER = struct.Struct('<QI')  # 12 bytes before the data
_FOOTER_BYTES = 4
_AROUND = _HEADER.size + _FOOTER_BYTES  # bytes of a record beside its data
_HEADERS_TOGETHER = 2 ** 14  # that are compared with their checksums at once
_SEGMENT_BYTES = 2 ** 22  # that are compared with their checksums at a time
_THREADS = 16  # that wait for a disk while they look for the places of records


class Records:
    """All records of some TFRecord files, numbered from 0 in the order of the files' names."""

    def __init__(self, pattern, skip_damaged=False, paths=None):
        """Finds the records.

        Args:
          pattern: of the files' paths, such as '/data/imagenet/train-*', for `glob`.
          skip_damaged: list what is wrong with files in `damages`, as `Damage`s, and use the
            records before that; False: raise it.
          paths: those of the pattern's files that are meant; None: all.

        Raises:
          DatasetError: no such file, one that cannot be read, is no (uncompressed) TFRecord file,
            is empty or ends in the middle of a record; one of those that the names count
            (train-00000-of-00008) is missing, or leads by a link to another one; there is one
            beside them with another name (train-00000-of-00008.bak); or no record in all of them.
            Also with `skip_damaged`: two whole sets of files, such as train-*-of-00002 and
            train-*-of-00004.
        """
        self.paths = sorted(path for path in (glob.glob(pattern) if paths is None else paths)
                            if os.path.isfile(path))
        if not self.paths:
            raise DatasetError('There are no files %s: expected TFRecords of that name.'
                               % _unescaped(pattern))
        strays = strays_of(self.paths)
        self.paths = [path for path in self.paths if path not in strays]
        # Read, they would give examples twice; left out without a word, too few.
        self.damages = [
            Damage(STRAY % (path, os.path.basename(self.paths[0]))) for path in strays]
        self.damages += missing_of(self.paths)
        twice = same_files(self.paths)
        self.damages += [
            Damage(TWICE % (path, os.path.basename(twice[path]))) for path in sorted(twice)]
        self.paths = [path for path in self.paths if path not in twice]
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            found, damages = zip(*pool.map(_places, self.paths))
        self.damages += [Damage(damage) for damage in damages if damage is not None]
        if self.damages and not skip_damaged:
            raise DatasetError(self.damages[0].short or self.damages[0].text)
        counts = [len(places) for places in found]
        if not sum(counts):
            raise DatasetError('No record can be read of the %s %s. %s' % (
                'file' if len(self.paths) == 1 else '%d files' % len(self.paths),
                _unescaped(pattern), ' '.join(_kinds_of(damages, self.paths))))
        self._checker, self._checked = None, (0, 0, 0)
        self._files = np.repeat(np.arange(len(found), dtype=np.int32), counts)
        self._places = np.concatenate(found)  # [n, 2]: where the data begins, and its length

    def __len__(self):
        return len(self._places)

    def where(self, number):
        """The file, the number in it and the offset of record `number`, for error texts."""
        file = self._files[number]
        first = int(np.searchsorted(self._files, file))
        return '%s, record %d at byte %d' % (self.paths[file], number - first,
                                             self._places[number][0] - _HEADER.size)

    def read(self, number):
        """The data of record `number`, as bytes.

        Raises:
          DatasetError: its file has gone, or has become shorter.
        """
        path = self.paths[self._files[number]]
        begin, length = (int(value) for value in self._places[number])
        try:
            # Opened anew each time: a thousand files kept open are more than many systems allow.
            # A file object takes a third longer than the system's calls, microseconds an image.
            opened = os.open(path, os.O_RDONLY)
            try:
                data = os.pread(opened, length, begin)
            finally:
                os.close(opened)
        except OSError as error:
            raise DatasetError('Cannot read %s: %s.' % (self.where(number),
                                                        error.strerror or error))
        if len(data) < length:
            raise DatasetError('Cannot read %s: the file has become shorter since it was opened.'
                               % self.where(number))
        return data

    def is_intact(self, number):
        """Whether the data of record `number` has the checksum that is written behind it."""
        begin, intact, known = self._checked
        if not begin <= number < known:
            self._checked = begin, intact, known = self._check_from(number)
        return number < intact

    def _check_from(self, number):
        """`(number, intact, known)`: the records from `number` up to `intact` are intact, and those
        from there up to `known`, one or none, are not."""
        file = self._files[number]
        places = self._places[number:int(np.searchsorted(self._files, file, 'right'))]
        begin = int(places[0][0]) - _HEADER.size
        count = max(1, int(np.searchsorted(places[:, 0], begin + _SEGMENT_BYTES)))
        size = int(places[count - 1].sum()) + _FOOTER_BYTES - begin
        with open(self.paths[file], 'rb', buffering=0) as records:
            segment = os.pread(records.fileno(), size, begin)
        self._checker = self._checker or _Checker()
        intact = self._checker.count(segment)
        return number, number + intact, number + min(intact + 1, count)


class _Checker:
    """Compares records with their checksums by TensorFlow's own reader, as fast as it reads."""

    def __init__(self):
        with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
            self._path = tf.placeholder(tf.string, [])
            self._iterator = tf.data.make_initializable_iterator(
                tf.data.TFRecordDataset(self._path))
            step = self._iterator.get_next().op
        self._session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={'GPU': 0}))
        self._next = self._session.make_callable(step)

    def count(self, segment):
        """How many records are as written, of the bytes of some, up to the first that is not."""
        count = 0
        with tempfile.NamedTemporaryFile(prefix='records') as file:
            file.write(segment)
            file.flush()
            self._session.run(self._iterator.initializer, {self._path: file.name})
            try:
                while True:
                    self._next()
                    count += 1
            except (tf.errors.DataLossError, tf.errors.OutOfRangeError):
                return count


def _kinds_of(damages, paths):
    """Of each kind of damage, the first file's text and how many more files have it; a list.

    Args:
      damages: texts, one for each of the paths, or None.
    """
    kinds = collections.OrderedDict()
    for damage, path in zip(damages, paths):
        if damage is not None:
            kinds.setdefault(re.sub(r'\d+', '', damage.replace(path, '')), []).append(damage)
    return [same[0] + (' (%d more like it.)' % (len(same) - 1) if len(same) > 1 else '')
            for same in kinds.values()]


def _unescaped(pattern):
    """A pattern without what `glob.escape` adds, for error texts."""
    return re.sub(r'\[([*?[])\]', r'\1', pattern)


def _places(path):
    """`(places, damage)`: where the data of each record of a file begins, and its length, int64
    [records, 2]; and what is wrong after that, or None."""
    parts, damage = [np.zeros([0, 2], np.int64)], None
    try:
        size = os.path.getsize(path)
        if not size:
            damage = 'The file %s is empty. Copy it again.' % path
        with open(path, 'rb', buffering=0) as records:
            chain = _chain(records.fileno(), size)
            while damage is None:
                found = list(itertools.islice(chain, _HEADERS_TOGETHER))
                if not found:
                    break
                begins, headers = zip(*found)
                begins = np.array(begins, np.int64)
                lengths, is_right = _lengths(headers)
                left = np.maximum(size - begins - _AROUND, -1)  # for data; the longest is 2^64 - 1
                good = is_right & (left >= 0) & (lengths <= left.astype(np.uint64))
                count = len(good) if good.all() else int(good.argmin())
                parts.append(np.stack([begins[:count] + _HEADER.size,
                                       lengths[:count].astype(np.int64)], 1))
                if count < len(good):
                    damage = _damage(path, size, int(begins[count]), headers[count],
                                     is_right[count])
            places = np.concatenate(parts)
            if damage is not None and len(places) and not any(headers[count]):
                last = int(places[-1].sum())
                if not any(os.pread(records.fileno(), _FOOTER_BYTES, last)):
                    # The zeros began in this record, in the place of its checksum at least.
                    damage = _damage(path, size, int(places[-1, 0]) - _HEADER.size, b'\0', False)
                    parts = [places[:-1]]
    except OSError as error:
        damage = 'Cannot read %s: %s.' % (path, error.strerror or error)
    return np.concatenate(parts), damage


def _chain(descriptor, size):
    """The place and the 12 bytes of each record's header, as far as the lengths lead; the last
    header may be cut off."""
    begin = 0
    while begin < size:
        header = os.pread(descriptor, _HEADER.size, begin)
        yield begin, header
        if len(header) < _HEADER.size:
            return
        begin += _AROUND + _HEADER.unpack(header)[0]


def _lengths(headers):
    """`(lengths, is_right)` of some headers: uint64 [n]; bool [n], whether it has that checksum.

    Of one that is cut off the length is the largest, and right: the file ends in it.
    """
    whole = np.array([len(header) == _HEADER.size for header in headers])
    parts = np.frombuffer(b''.join(header.ljust(_HEADER.size, b'\0') for header in headers),
                          [('length', '<u8'), ('checksum', '<u4')])
    lengths = parts['length'].astype(np.uint64)
    of_each = parts['length'].copy().view(np.uint8).reshape([-1, 8]).T
    return (np.where(whole, lengths, np.uint64(2 ** 64 - 1)),
            ~whole | (masked_crc32c(of_each) == parts['checksum']))


def _damage(path, size, begin, header, is_right):
    """What is wrong with the record that begins at a byte, a text.

    Args:
      path, size, begin: of the file; its bytes; the place.
      header: its bytes there.
      is_right: whether they are a length with its checksum, or the file ends there.
    """
    if begin == 0 and not is_right:
        return ('%s is no TFRecord file, or a compressed one: the checksum of its first record is '
                'wrong.' % path)
    if is_right:
        what, more = 'ends in the middle of', ': it has %d bytes' % size
    elif any(header):
        what, more = 'is damaged at', ', whose length has another checksum'
    else:
        what, more = 'is damaged at', ': zeros follow, as in a file that was copied in part'
    return '%s %s the record that begins at byte %d%s. Copy it again.' % (path, what, begin, more)


def masked_crc32c(data):
    """TFRecord's checksum: CRC-32C (Castagnoli), rotated by 15 bits, plus a constant.

    Args:
      data: uint8 [bytes], or [bytes, n] for n checksums at once.

    Returns:
      int, or uint64 [n].
    """
    crc, table = np.full(data.shape[1:], 0xffffffff, np.uint64), _crc_table()
    for byte in data:
        crc = crc >> _EIGHT ^ table[(crc ^ byte) & _BYTE]
    crc = crc ^ _WORD
    return (crc >> np.uint64(15) | crc << np.uint64(17)) + np.uint64(0xa282ead8) & _WORD


_EIGHT, _BYTE, _WORD = np.uint64(8), np.uint64(0xff), np.uint64(0xffffffff)


@functools.lru_cache(maxsize=None)
def _crc_table():
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = (table >> np.uint64(1)) ^ (table & np.uint64(1)) * np.uint64(0x82f63b78)
    return table
