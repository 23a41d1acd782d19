"""Random access to the records of TFRecord files, so that any order of them can be read.

TF's own reader goes through a file from its start, which leaves a shuffle buffer as the only source
of random order, and a buffer cannot be taken up where a stopped run left it. Here the places of
all records are found once (their lengths are in the files, 12 bytes a record to read), and a
record is then one read at its place.

A record is: its length (uint64), a masked CRC-32C of these 8 bytes, the data, a masked CRC-32C of
the data; little-endian. The data's own checksum is not verified.
"""

import concurrent.futures
import glob
import os
import struct

import numpy as np

from datasets.errors import DatasetError

_HEADER = struct.Struct('<QI')  # 12 bytes before the data
_FOOTER_BYTES = 4
_THREADS = 16  # that wait for a disk while they look for the places of records


class Records:
    """All records of some TFRecord files, numbered from 0 in the order of the files' names."""

    def __init__(self, pattern):
        """Finds the records.

        Args:
          pattern: of the files' paths, such as '/data/imagenet/train-*'.

        Raises:
          DatasetError: no such file, one that cannot be read, is no (uncompressed) TFRecord file
            or ends in the middle of a record; or no record in all of them.
        """
        self.paths = sorted(path for path in glob.glob(pattern) if os.path.isfile(path))
        if not self.paths:
            raise DatasetError('There are no files %s: expected TFRecords of that name.' % pattern)
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(_places, self.paths))
        counts = [len(places) for places in found]
        if not sum(counts):
            raise DatasetError('The files %s hold no records.' % pattern)
        self._files = np.repeat(np.arange(len(found), dtype=np.int32), counts)
        self._places = np.concatenate(found)  # [n, 2]: where the data begins, and its length

    def __len__(self):
        return len(self._places)

    def read(self, number):
        """The data of record `number`, as bytes.

        Raises:
          DatasetError: its file has gone, or has become shorter.
        """
        path = self.paths[self._files[number]]
        begin, length = (int(value) for value in self._places[number])
        try:
            # Opened anew each time: a thousand files kept open are more than many systems allow.
            with open(path, 'rb', buffering=0) as records:
                data = os.pread(records.fileno(), length, begin)
        except OSError as error:
            raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))
        if len(data) < length:
            raise DatasetError('%s has become shorter since it was opened.' % path)
        return data


def _places(path):
    """Where the data of each record of a file begins, and its length: int64 [records, 2]."""
    places = []
    try:
        size = os.path.getsize(path)
        with open(path, 'rb', buffering=0) as records:
            begin = 0
            while begin < size:
                header = os.pread(records.fileno(), _HEADER.size, begin)
                length, checksum = (_HEADER.unpack(header) if len(header) == _HEADER.size
                                    else (size, None))
                # A whole file would take long to check; its first record tells what it is.
                if begin == 0 and checksum is not None and masked_crc32c(header[:8]) != checksum:
                    raise DatasetError('%s is no TFRecord file, or a compressed one: the checksum '
                                       'of its first record is wrong.' % path)
                end = begin + _HEADER.size + length + _FOOTER_BYTES
                if end > size:
                    raise DatasetError(
                        '%s ends in the middle of the record that begins at byte %d: it has %d '
                        'bytes. Copy it again.' % (path, begin, size))
                places.append((begin + _HEADER.size, length))
                begin = end
    except OSError as error:
        raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))
    return np.array(places, np.int64).reshape([-1, 2])


def masked_crc32c(data):
    """TFRecord's checksum: CRC-32C (Castagnoli), rotated by 15 bits, plus a constant."""
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82f63b78 if crc & 1 else 0)
    crc ^= 0xffffffff
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff
