"""Which TFRecord files are to train and to test on, and whether all are there."""

import os

import pytest

import datasets
from datasets.record_files import record_paths


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
    (['train-7-of-999999999999999', 'test-0-of-1'], '{} has 1 files train-*-of-999999999999999'),
    (['train-0-of-2', 'train-1-of-2', 'train-2-of-2', 'test-0-of-1'], '{} has 3 files '
     'train-*-of-2, and the names count 2: '),
    (['train-0-of-1', 'train-0-of-1.bak', 'test-0-of-1'], 'train-0-of-1 and train-0-of-1.bak of {} '
     'are of two sets of files, which would give examples twice: move those of one set away.')])
def test_files_that_are_no_whole_set(tmp_path, names, text):
    with pytest.raises(datasets.DatasetError) as caught:
        splits(tmp_path, names)
    assert str(caught.value).startswith(text.format(tmp_path))
