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

import concurrent.futures
import functools
import itertools
import os
import struct
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError

_HEADER = struct.Struct('<QI')  # 12 bytes before the data
_FOOTER_BYTES = 4
_AROUND = _HEADER.size + _FOOTER_BYTES  # bytes of a record beside its data
_HEADERS_TOGETHER = 2 ** 14  # that are compared with their checksums at once
_THREADS = 16  # that wait for a disk while they look for the places of records


class Records:
    """All records of some TFRecord files, numbered from 0 in the order of the files."""

    def __init__(self, paths):
        """Finds the records.

        Raises:
          DatasetError: a file cannot be read, is no (uncompressed) TFRecord file, is empty or ends
            in the middle of a record.
        """
        self.paths = list(paths)
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(_places, self.paths))
        self._checker = None
        self._files = np.repeat(np.arange(len(found), dtype=np.int32),
                                [len(places) for places in found])
        self._places = np.concatenate(found)  # [n, 2]: where the data begins, and its length

    def __len__(self):
        return len(self._places)

    def name(self, number):
        """The name of record `number` that stays when its folder is moved."""
        file, within = self._within(number)
        return '%s, record %d' % (os.path.basename(self.paths[file]), within)

    def where(self, number):
        """The file, the number in it and the offset of record `number`, for error texts."""
        file, within = self._within(number)
        return '%s, record %d at byte %d' % (self.paths[file], within,
                                             self._places[number][0] - _HEADER.size)

    def _within(self, number):
        file = self._files[number]
        return file, number - int(np.searchsorted(self._files, file))

    def read(self, number):
        """The data of record `number`, as bytes.

        Raises:
          DatasetError: its file has gone, or has become shorter.
        """
        return self._read(number, 0, 0)

    def _read(self, number, before, after):
        """The data, with so many bytes that stand before and after it."""
        begin, length = (int(value) for value in self._places[number])
        begin, length = begin - before, length + before + after
        try:
            # Opened anew each time: a thousand files kept open are more than many systems allow.
            # A file object takes a third longer than the system's calls, microseconds an image.
            opened = os.open(self.paths[self._files[number]], os.O_RDONLY)
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
        self._checker = self._checker or _Checker()
        return self._checker.is_intact(self._read(number, _HEADER.size, _FOOTER_BYTES))


class _Checker:
    """Compares records with their checksums by TensorFlow's own reader."""

    def __init__(self):
        with tf.Graph().as_default() as graph, tf.device('/cpu:0'):
            self._path = tf.placeholder(tf.string, [])
            self._iterator = tf.data.make_initializable_iterator(
                tf.data.TFRecordDataset(self._path))
            self._step = self._iterator.get_next().op
        self._session = tf.Session(graph=graph, config=tf.ConfigProto(device_count={'GPU': 0}))

    def is_intact(self, record):
        """Whether the bytes of a record, header and checksums included, are as written."""
        with tempfile.NamedTemporaryFile(prefix='record') as file:
            file.write(record)
            file.flush()
            self._session.run(self._iterator.initializer, {self._path: file.name})
            try:
                self._session.run(self._step)
            except tf.errors.DataLossError:
                return False
        return True


def _places(path):
    """Where the data of each record of a file begins, and its length, int64 [records, 2].

    Raises:
      DatasetError: as `Records`.
    """
    parts = []
    try:
        size = os.path.getsize(path)
        if not size:
            raise DatasetError('The file %s is empty. Copy it again.' % path)
        with open(path, 'rb', buffering=0) as records:
            chain = _chain(records.fileno(), size)
            while True:
                found = list(itertools.islice(chain, _HEADERS_TOGETHER))
                if not found:
                    return np.concatenate(parts)
                begins, headers = zip(*found)
                begins = np.array(begins, np.int64)
                lengths, is_right = _lengths(headers)
                left = np.maximum(size - begins - _AROUND, -1)  # for data; the longest is 2^64 - 1
                good = is_right & (left >= 0) & (lengths <= left.astype(np.uint64))
                if not good.all():
                    raise DatasetError(_damage(path, size, int(begins[good.argmin()]),
                                               is_right[good.argmin()]))
                parts.append(np.stack([begins + _HEADER.size, lengths.astype(np.int64)], 1))
    except OSError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))


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


def _damage(path, size, begin, is_right):
    """What is wrong with the record that begins at a byte, a text.

    Args:
      path, size, begin: of the file; its bytes; the place.
      is_right: whether a length with its checksum stands there, or the file ends there.
    """
    if begin == 0 and not is_right:
        return ('%s is no TFRecord file, or a compressed one: the checksum of its first record is '
                'wrong.' % path)
    return '%s %s the record that begins at byte %d%s. Copy it again.' % (
        (path, 'ends in the middle of', begin, ': it has %d bytes' % size) if is_right else
        (path, 'is damaged at', begin, ', whose length has another checksum'))


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
