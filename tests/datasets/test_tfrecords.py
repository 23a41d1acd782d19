"""Random access to TFRecords: the right bytes, and what a damaged file says."""

import os
import re
import struct

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from datasets import DatasetError
from datasets import tfrecords
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
    data = np.frombuffer(b'123456789', np.uint8)
    masked = ((0xe3069283 >> 15 | 0xe3069283 << 17) + 0xa282ead8) & 0xffffffff
    assert masked_crc32c(data) == masked
    assert masked_crc32c(np.stack([data, data], 1)).tolist() == [masked] * 2


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
        Records(str(tmp_path / 'train-*'))


def test_an_empty_file_and_a_missing_shard_among_others(folder):
    os.rename(str(folder / 'train-00000-of-00002'), str(folder / 'train-00000-of-00004'))
    os.rename(str(folder / 'train-00001-of-00002'), str(folder / 'train-00001-of-00004'))
    (folder / 'train-00002-of-00004').write_bytes(b'')
    with pytest.raises(DatasetError, match=r'1 of the 4 files|train-\*-of'):
        Records(str(folder / 'train-*'))
    records = Records(str(folder / 'train-*'), skip_damaged=True)
    assert len(records) == 4 and len(records.damages) == 2
    assert 'missing: ' in records.damages[0].text
    assert 'train-00003-of-00004' in records.damages[0].text
    assert records.damages[1].text == (
        'The file %s/train-00002-of-00004 is empty. Copy it again.' % folder)


@pytest.mark.parametrize('stray', ['train-00001-of-00002.bak', 'train-00001-of-00002~',
                                   'train-00002-of-00002', 'train-00001-of-00004'])
def test_a_file_beside_counted_ones_whose_name_does_not_fit(folder, stray):
    """Read, it would give examples twice."""
    write(folder / stray, RECORDS[2:])
    with pytest.raises(DatasetError) as caught:
        Records(str(folder / 'train-*'))
    assert str(caught.value) == (
        '%s/%s does not fit the names of the other files, such as train-00000-of-00002: move it '
        'away, or name it as they are' % (folder, stray))
    records = Records(str(folder / 'train-*'), skip_damaged=True)
    assert len(records) == len(RECORDS) and len(records.damages) == 1


@pytest.mark.parametrize('link', [os.symlink, os.link])
def test_a_shard_that_is_a_link_to_another_one(folder, link):
    """Its examples were there twice, and those of the shard that it stands for not at all."""
    path, other = (str(folder / ('train-%05d-of-00002' % number)) for number in (0, 1))
    os.remove(other)
    link(path, other)
    with pytest.raises(DatasetError) as caught:
        Records(str(folder / 'train-*'))
    assert str(caught.value) == (
        '%s is the same file as train-00000-of-00002, by a link, and its examples would be there '
        'twice: put the file in its place that has this name, or remove it' % other)
    records = Records(str(folder / 'train-*'), skip_damaged=True)
    assert [records.read(number) for number in range(len(records))] == RECORDS[:2]
    assert len(records.damages) == 1
    os.remove(other)
    os.rename(path, str(folder / 'elsewhere'))
    os.symlink(str(folder / 'elsewhere'), path)  # a link to what is no shard of the set is none
    write(folder / 'train-00001-of-00002', RECORDS[2:])
    assert len(Records(str(folder / 'train-*'))) == len(RECORDS)


def test_a_record_whose_file_has_gone_or_shrunk_is_named(folder):
    records = Records(str(folder / 'train-*'))
    path = folder / 'train-00001-of-00002'
    path.write_bytes(path.read_bytes()[:-20])
    assert records.read(2) == RECORDS[2]
    with pytest.raises(DatasetError, match='^Cannot read %s, record 1 at byte 5016: the file has '
                       'become shorter since it was opened' % path):
        records.read(3)
    path.unlink()
    with pytest.raises(DatasetError, match='^Cannot read %s, record 0 at byte 0: No such file' % (
            path,)):
        records.read(2)


def test_checksums_of_records_in_any_order(tmp_path, monkeypatch):
    """Python's checksum took 5 MB/s; TensorFlow's reader stops at the first that is wrong."""
    monkeypatch.setattr(tfrecords, '_SEGMENT_BYTES', 6000)
    write(tmp_path / 'train-0', RECORDS + RECORDS)
    write(tmp_path / 'train-1', RECORDS)
    content = bytearray((tmp_path / 'train-0').read_bytes())
    for place in (16 + 12, 19 + 16 + 12 + 300, 5069 + 35 + 5016 + 12 + 3):
        content[place] ^= 1  # the data of records 1, 2 and 7, the latter's within its checksum
    (tmp_path / 'train-0').write_bytes(bytes(content))
    records = Records(str(tmp_path / 'train-*'))
    assert [records.is_intact(number) for number in range(12)] == [
        number not in (1, 2, 7) for number in range(12)]
    assert [number for number in (11, 7, 3, 2, 8, 0, 1) if not records.is_intact(number)] == [
        7, 2, 1]


def test_two_whole_sets_are_not_read_as_one(folder):
    """Of 4 files what was of 2: each example would be there twice."""
    for number in range(4):
        write(folder / ('train-%05d-of-00004' % number), RECORDS[:1])
    for skip in (False, True):
        with pytest.raises(DatasetError, match=(
                'train-\\*-of-00002 and %s/train-\\*-of-00004 are two whole sets' % folder)):
            Records(str(folder / 'train-*'), skip)
    os.rename(str(folder / 'train-00003-of-00004'), str(folder / 'elsewhere'))
    left = Records(str(folder / 'train-*'), True)  # three of four are no set beside a whole one
    assert len(left) == len(RECORDS) and len(left.damages) == 3
    for number in range(3):
        os.rename(str(folder / ('train-%05d-of-00004' % number)),
                  str(folder / ('train-more-%05d-of-00003' % number)))
    assert len(Records(str(folder / 'train-*'))) == len(RECORDS) + 3


@pytest.mark.parametrize('together, cut, records, place', [
    # The four records begin at bytes 0, 16, 35 and 5051.
    (1, 5051, 3, 5051), (2, 5000, 2, 35), (2 ** 14, 5055, 3, 5051), (2, 31, 1, 16)])
def test_zeros_at_the_end_are_no_records(tmp_path, monkeypatch, together, cut, records, place):
    """An interrupted copy into space that was taken before: each 16 bytes would be a record."""
    monkeypatch.setattr(tfrecords, '_HEADERS_TOGETHER', together)
    write(tmp_path / 'train-0', RECORDS + [b'x' * 2000])
    size = len((tmp_path / 'train-0').read_bytes())
    content = (tmp_path / 'train-0').read_bytes()[:cut]
    (tmp_path / 'train-0').write_bytes(content + bytes(size - cut))
    found = Records(str(tmp_path / 'train-*'), skip_damaged=True)
    assert [found.read(number) for number in range(len(found))] == RECORDS[:records]
    assert len(found.damages) == 1
    assert re.search('is damaged at the record that begins at byte %d[:,] .*Copy it again' % place,
                     found.damages[0].text)


def test_a_length_is_compared_though_it_leads_to_another_record(tmp_path):
    """One record would swallow the next, and none be missing at the end of the file."""
    write(tmp_path / 'train-0', RECORDS)
    content = bytearray((tmp_path / 'train-0').read_bytes())
    content[16:24] = struct.pack('<Q', 3 + 16 + 5000)
    (tmp_path / 'train-0').write_bytes(bytes(content))
    with pytest.raises(DatasetError, match='damaged at the record that begins at byte 16, whose '
                       'length has another checksum'):
        Records(str(tmp_path / 'train-*'))


@pytest.mark.parametrize('kind, text', [
    ('GZIP', r'train-0 is no TFRecord file, or a compressed one: the checksum of its first record '
             r'is wrong\. \(2 more like it\.\)$'),
    ('ZLIB', r'train-0 is no TFRecord .*\(2 more like it\.\)$'),
    ('empty', r'The file .*train-0 is empty\. Copy it again\. \(2 more like it\.\)$'),
    ('short', r'train-0 ends in the middle of the record that begins at byte 0: it has \d+ bytes\. '
              r'Copy it again\. \(2 more like it\.\)$'),
    ('each its own', r'train-0 is no TFRecord file.*wrong\. The file .*train-1 is empty\. Copy it '
                     r'again\. .*train-2 ends in the middle of .* Copy it again\.$')])
def test_a_set_without_a_record_that_can_be_read_says_why(tmp_path, kind, text):
    for number in range(3):
        path = tmp_path / ('train-%d' % number)
        how = kind if kind != 'each its own' else ('GZIP', 'empty', 'short')[number]
        if how in ('GZIP', 'ZLIB'):
            write(path, RECORDS, options=tf.io.TFRecordOptions(compression_type=how))
        else:
            write(path, [] if how == 'empty' else [b'x' * (50 + number)])
        if how == 'short':
            path.write_bytes(path.read_bytes()[:30 + number])
    with pytest.raises(DatasetError, match=r'^No record can be read of the 3 files .*train-\*\. .*'
                       + text):
        Records(str(tmp_path / 'train-*'), skip_damaged=True)
