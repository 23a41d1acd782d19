"""Random access to TFRecords: the right bytes, and what a damaged file says."""

import struct

import pytest
import tensorflow.compat.v1 as tf

from datasets import DatasetError
from datasets.tfrecords import Records, masked_crc32c

RECORDS = [b'', b'one', b'x' * 5000, b'\x00\x01']


def write(path, records, **options):
    with tf.io.TFRecordWriter(str(path), **options) as writer:
        for record in records:
            writer.write(record)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / 'train-00001-of-00002', RECORDS[2:])
    write(tmp_path / 'train-00000-of-00002', RECORDS[:2])
    write(tmp_path / 'validation-00000-of-00001', [b'other'])
    return tmp_path


def test_checksum_is_that_of_tfrecords():
    # CRC-32C of '123456789' is 0xe3069283.
    data = b'123456789'
    masked = ((0xe3069283 >> 15 | 0xe3069283 << 17) + 0xa282ead8) & 0xffffffff
    assert masked_crc32c(data) == masked


@pytest.mark.parametrize('size, place', [
    # The four records begin at bytes 0, 16, 35 and 5051: 16 bytes each beside their data.
    (5068, 5051), (5060, 5051), (5050, 35), (40, 35), (30, 16), (10, 0)])
def test_half_a_record(tmp_path, size, place):
    write(tmp_path / 'train-0', RECORDS)
    content = (tmp_path / 'train-0').read_bytes()
    assert len(content) == 5069
    (tmp_path / 'train-0').write_bytes(content[:size])
    with pytest.raises(DatasetError, match='ends in the middle of the record that begins at byte '
                                           '%d: it has %d bytes' % (place, size)):
        Records([str(tmp_path / 'train-0')])


def test_a_record_whose_file_has_gone_or_shrunk(folder):
    records = Records(sorted(map(str, folder.glob('train-*'))))
    path = folder / 'train-00001-of-00002'
    path.write_bytes(path.read_bytes()[:-20])
    assert records.read(2) == RECORDS[2]
    with pytest.raises(DatasetError, match='has become shorter since it was opened'):
        records.read(3)
    path.unlink()
    with pytest.raises(DatasetError, match='No such file'):
        records.read(2)


def test_checksums_of_records_in_any_order(tmp_path):
    write(tmp_path / 'train-0', RECORDS + RECORDS)
    content = bytearray((tmp_path / 'train-0').read_bytes())
    for place in (16 + 12, 19 + 16 + 12 + 300, 5069 + 35 + 5016 + 12 + 3):
        content[place] ^= 1  # the data of records 1, 2 and 7, the latter's within its checksum
    (tmp_path / 'train-0').write_bytes(bytes(content))
    records = Records([str(tmp_path / 'train-0')])
    assert [number for number in (7, 3, 6, 2, 0, 1, 4, 5) if not records.is_intact(number)] == [
        7, 2, 1]


@pytest.mark.parametrize('content, text', [
    (b'\x1f\x8b\x08' + b'\0' * 40, 'train-0 is no TFRecord file, or a compressed one: the checksum '
     'of its first record is wrong.'),
    (b'', 'The file .*train-0 is empty. Copy it again.')])
def test_a_file_that_is_none(tmp_path, content, text):
    (tmp_path / 'train-0').write_bytes(content)
    with pytest.raises(DatasetError, match=text):
        Records([str(tmp_path / 'train-0')])


@pytest.mark.parametrize('cut, place', [(5051, 5051), (5000, 5051), (5055, 5051), (31, 35)])
def test_zeros_at_the_end_are_no_records(tmp_path, cut, place):
    """An interrupted copy into space that was taken before: each 16 bytes would be a record."""
    write(tmp_path / 'train-0', RECORDS + [b'x' * 2000])
    content = (tmp_path / 'train-0').read_bytes()
    (tmp_path / 'train-0').write_bytes(content[:cut] + bytes(len(content) - cut))
    with pytest.raises(DatasetError, match='is damaged at the record that begins at byte %d, .*'
                       'Copy it again' % place):
        Records([str(tmp_path / 'train-0')])


def test_a_length_is_compared_though_it_leads_to_another_record(tmp_path):
    """One record would swallow the next, and none be missing at the end of the file."""
    write(tmp_path / 'train-0', RECORDS)
    content = bytearray((tmp_path / 'train-0').read_bytes())
    content[16:24] = struct.pack('<Q', 3 + 16 + 5000)
    (tmp_path / 'train-0').write_bytes(bytes(content))
    with pytest.raises(DatasetError, match='damaged at the record that begins at byte 16, whose '
                       'length has another checksum'):
        Records([str(tmp_path / 'train-0')])
