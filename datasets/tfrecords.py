"""Random access to the records of TFRecord files, so that any order of them can be read.

TF's own reader goes through a file from its start, which leaves a shuffle buffer as the only source
of random order, and a buffer cannot be taken up where a stopped run left it. Here the places of
all records are found once (their lengths are in the files, 12 bytes a record to read), and a
record then takes one read at its place.

A record is: its length (uint64), a masked CRC-32C of these 8 bytes, the data, a masked CRC-32C of
the data; little-endian. The checksums of all lengths are compared, since a wrong length leads to a
wrong place: in the zeros that an interrupted copy leaves, each 16 bytes would be a record. Only
`is_intact` compares the checksum of the data.
"""

import concurrent.futures
import os
import struct
import tempfile
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError

_HEADER = struct.Struct('<QI')  # 12 bytes before the data
_FOOTER_BYTES = 4
_THREADS = 16  # that wait for a disk while they look for the places of records


class Records:
    """All records of some TFRecord files, numbered from 0 in the order of the files."""

    def __init__(self, paths: typing.Iterable[str]):
        """Finds the records.

        Raises:
          DatasetError: a file cannot be read, is no (uncompressed) TFRecord file, is empty or ends
            in the middle of a record.
        """
        self.paths = list(paths)
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            places_of_files = list(pool.map(_places, self.paths))
        counts = [len(places) for places in places_of_files]
        self._files = np.repeat(np.arange(len(counts)), counts)  # [n]: number of the file
        self._places = np.concatenate(places_of_files)  # [n, 2]: where the data begins; its length

    def __len__(self):
        return len(self._places)

    def name(self, number: int) -> str:
        """The name of record `number`, which stays the same when its folder is moved."""
        file, within = self._within(number)
        return '%s, record %d' % (os.path.basename(self.paths[file]), within)

    def where(self, number: int) -> str:
        """The file, the number in it and the offset of record `number`, for error texts."""
        file, within = self._within(number)
        begin = self._places[number][0] - _HEADER.size
        return '%s, record %d at byte %d' % (self.paths[file], within, begin)

    def _within(self, number):
        """`(number of its file, number within the file)` of a record."""
        file = self._files[number]
        first_of_file = int(np.searchsorted(self._files, file))
        return file, number - first_of_file

    def read(self, number: int, before: int = 0, after: int = 0) -> bytes:
        """The data of record `number`, with `before` bytes before it and `after` bytes after it.

        Raises:
          DatasetError: its file has gone, or has become shorter; the text begins with a verb, to
            follow the name of the file.
        """
        begin, length = (int(value) for value in self._places[number])
        try:
            # Opened anew each time: a thousand files kept open are more than many systems allow.
            with open(self.paths[self._files[number]], 'rb', buffering=0) as file:
                data = os.pread(file.fileno(), length + before + after, begin - before)
        except OSError as error:
            raise DatasetError('cannot be read: %s' % (error.strerror or error))
        if len(data) < length + before + after:
            raise DatasetError('cannot be read: the file has become shorter since it was opened')
        return data

    def is_intact(self, number: int) -> bool:
        """Whether record `number` has the checksums that are written with it. TensorFlow's own
        reader compares them."""
        with tempfile.NamedTemporaryFile(prefix='record') as file:
            file.write(self.read(number, _HEADER.size, _FOOTER_BYTES))
            file.flush()
            try:
                next(tf.io.tf_record_iterator(file.name))  # reads the one record
            except tf.errors.DataLossError:
                return False
        return True


def _places(path: str):
    """Where the data of each record of a file begins, and its length, int64 [records, 2].

    Raises:
      DatasetError: as `Records`.
    """
    try:
        with open(path, 'rb', buffering=0) as file:
            return np.array(_places_in(file.fileno(), path), np.int64)
    except DatasetError:  # which is also an `OSError`
        raise
    except OSError as error:
        raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))


def _places_in(descriptor: int, path: str) -> typing.List[typing.Tuple[int, int]]:
    """`(begin of the data, length)` of each record of an open file; `path` is for errors."""
    size = os.fstat(descriptor).st_size
    if not size:
        raise DatasetError('The file %s is empty. Copy it again.' % path)
    places = []
    begin = 0
    while begin < size:
        header = os.pread(descriptor, _HEADER.size, begin)
        if len(header) < _HEADER.size:
            raise _cut_off(path, begin, size)
        length = _length(path, header, begin)
        begin_of_data = begin + _HEADER.size
        end = begin_of_data + length + _FOOTER_BYTES
        if end > size:
            raise _cut_off(path, begin, size)
        places.append((begin_of_data, length))
        begin = end
    return places


def _cut_off(path: str, begin: int, size: int) -> DatasetError:
    """The error for a file that ends in the middle of a record."""
    return DatasetError('%s ends in the middle of the record that begins at byte %d: it has %d '
                        'bytes. Copy it again.' % (path, begin, size))


def _length(path: str, header: bytes, begin: int):
    """The length in the header of a record, if its checksum is right; else it raises an error. The
    record begins at byte `begin` of the file."""
    length, checksum = _HEADER.unpack(header)
    if masked_crc32c(header[:8]) == checksum:
        return length
    if begin == 0:
        raise DatasetError('%s is no TFRecord file, or a compressed one: the checksum of its first '
                           'record is wrong.' % path)
    raise DatasetError('%s is damaged at the record that begins at byte %d, whose length has '
                       'another checksum. Copy it again.' % (path, begin))


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum of some bytes: CRC-32C, rotated by 15 bits, plus a constant; of 32 bits.
    """
    crc = 0xffffffff
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xff]
    crc ^= 0xffffffff
    rotated = (crc >> 15) | (crc << 17)
    return (rotated + 0xa282ead8) & 0xffffffff


def _remainder(value: int):
    """The remainder of a byte by the polynomial of Castagnoli, which CRC-32C divides by; its bits
    are in reversed order, the lowest first."""
    for _ in range(8):
        lowest_bit = value & 1
        value >>= 1
        if lowest_bit:
            value ^= 0x82f63b78
    return value


_TABLE = [_remainder(value) for value in range(256)]
