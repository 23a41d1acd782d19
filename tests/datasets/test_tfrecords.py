"""Random access to TFRecords: the right bytes, and what a damaged file says."""

import os
import struct

import pytest
import tensorflow.compat.v1 as tf

from datasets import DatasetError
from datasets.record_files import record_paths
from datasets.tfrecords import Records, masked_crc32c

RECORDS = [b'', b'one', b'x' * 5000, b'\x00\x01']


def write(path, records, **options):
    with tf.io.TFRecordWriter(str(path), **options) as writer:
        for record in records:
            writer.write(record)


def test_checksum_is_that_of_tfrecords():
    # CRC-32C of '123456789' is 0xe3069283.
    masked = ((0xe3069283 >> 15 | 0xe3069283 << 17) + 0xa282ead8) & 0xffffffff
    assert masked_crc32c(b'123456789') == masked


def cut(size):
    return lambda content: content[:size]


def zeros_from(place):
    """An interrupted copy into space that was taken before: each 16 bytes would be a record."""
    return lambda content: content[:place] + bytes(len(content) - place)


def with_length(place, length):
    """One record would swallow the next, and none be missing at the end of the file."""
    return lambda content: content[:place] + struct.pack('<Q', length) + content[place + 8:]


HALF = 'ends in the middle of the record that begins at byte %d: it has %d bytes. Copy it again'
DAMAGED = 'is damaged at the record that begins at byte %d, whose length has another checksum. Copy'


# The four records begin at bytes 0, 16, 35 and 5051: 16 bytes each beside their data.
@pytest.mark.parametrize('damage, text', [
    (cut(5068), HALF % (5051, 5068)), (cut(30), HALF % (16, 30)), (cut(10), HALF % (0, 10)),
    (zeros_from(5051), DAMAGED % 5051), (zeros_from(31), DAMAGED % 35),
    (with_length(16, 3 + 16 + 5000), DAMAGED % 16),
    (lambda content: b'\x1f\x8b\x08' + b'\0' * 40, 'train-0 is no TFRecord file, or a compressed '
     'one: the checksum of its first record is wrong.'),
    (cut(0), 'The file .*train-0 is empty. Copy it again.')])
def test_a_damaged_file_is_named(tmp_path, damage, text):
    write(tmp_path / 'train-0', RECORDS)
    content = (tmp_path / 'train-0').read_bytes()
    assert len(content) == 5069
    (tmp_path / 'train-0').write_bytes(damage(content))
    with pytest.raises(DatasetError, match=text):
        Records([str(tmp_path / 'train-0')])


def test_a_record_whose_file_has_gone_or_shrunk(tmp_path):
    for number, data in enumerate((RECORDS[:2], RECORDS[2:])):
        write(tmp_path / ('train-%d' % number), data)
    records, path = Records(sorted(map(str, tmp_path.glob('train-*')))), tmp_path / 'train-1'
    path.write_bytes(path.read_bytes()[:-20])
    assert records.read(1) == b'one' and records.read(2) == RECORDS[2]
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


# ---- Which TFRecord files are to train and to test on, and whether all are there -----------------

def splits(folder, names):
    """Names of the files of each split, of a folder with empty files of these names."""
    for name in names:
        (folder / name).write_bytes(b'')
    paths = record_paths(str(folder))
    return [[os.path.basename(path) for path in paths[split]] for split in ('train', 'test')]


@pytest.mark.parametrize('train, test, others', [
    (['train-00000-of-00002', 'train-00001-of-00002'], ['validation-00000-of-00001'],
     ['test-00000-of-00001']),
    (['flowers_train_00000-of-00001.tfrecord'], ['flowers_validation_00000-of-00001.tfrecord'],
     ['all_test.tfrecord']),
    (['x_train_0_of_1', 'y_train_0_of_1'], ['x_test_0_of_1'], []),
    (['train-1-of-2', 'train-2-of-2'], ['test-1-of-1'], []),  # some count from 1
    # The word right before the number counts, whatever is before it.
    (['re_test_flowers_train_0-of-1'], ['re_train_flowers_test_0-of-1'], []),
    (['train.tfrecord'], ['flowers_test_v2.tfrecords'], [])])
def test_names(tmp_path, train, test, others):
    assert splits(tmp_path, train + test + others + ['train_config.json', 'labels.txt']) == [
        train, test]


@pytest.mark.parametrize('names, text', [
    ([], 'There are no TFRecords to train on in {}: expected names such as train-00000-of-00005.'),
    (['train-0-of-1'], 'There are no TFRecords to test on in {}: expected names such as '
     'validation-00000-of-00005 or test-00000-of-00005.'),
    (['train-00001-of-00003', 'test-0-of-1'], '{} has 1 files train-*-of-00003, and the names '
     'count 3, from 0 on: number 0 is missing: copy those that are missing again, or move'),
    (['train-0-of-2', 'train-1-of-2', 'train-2-of-2', 'test-0-of-1'], '{} has 3 files '
     'train-*-of-2, and the names count 2: '),
    (['train-0-of-1', 'train-0-of-1.bak', 'test-0-of-1'], 'train-0-of-1 and train-0-of-1.bak of {} '
     'are of two sets of files, which would give examples twice: move those of one set away.')])
def test_files_that_are_no_whole_set(tmp_path, names, text):
    with pytest.raises(DatasetError) as caught:
        splits(tmp_path, names)
    assert str(caught.value).startswith(text.format(tmp_path))
