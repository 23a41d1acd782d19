"""Which split a TFRecord file is of, by its name."""

import os

import pytest

import datasets
from datasets.record_names import record_paths


def splits(folder, names):
    """Names of the files of each split, of a folder with empty files of these names."""
    for name in names:
        (folder / name).write_bytes(b'')
    return [[os.path.basename(path) for path in record_paths(str(folder), split)[1]]
            for split in ('train', 'test')]


@pytest.mark.parametrize('train, test, neither', [
    (['train-00000-of-00002', 'train-00001-of-00002'], ['validation-00000-of-00001'],
     ['x_train_00000-of-00001', 'test-00000-of-00001', 'labels.txt']),
    (['train-all'], ['test-all'], ['x_test_all']),
    (['flowers_train_00000-of-00005.tfrecord'], ['flowers_validation_00000-of-00001.tfrecord'],
     ['flowers_test_00000-of-00001.tfrecord']),
    (['x_train_00000_of_00001'], ['x_test_00000_of_00001'], []),
    (['flowers_train_v2_00000-of-00001'], ['flowers_test_v2_00000-of-00001'], []),
    # Prefixes that have such a word.
    (['re_train_flowers_train_00000-of-00001.tfrecord'],
     ['re_train_flowers_validation_00000-of-00001.tfrecord'], []),
    (['x_test_a_train_00000-of-00001'], ['x_test_a_test_00000-of-00001'], []),
    (['test-a_train_00000-of-00001'], ['test-a_validation_00000-of-00001'],
     ['test-a_test_00000-of-00001']),
    (['train-a_train_00000-of-00001'], ['train-a_test_00000-of-00001'], []),
    # What comes after the number says nothing.
    (['a_train_00000-of-00001_test_b'], ['a_test_00000-of-00001_train_b'], []),
    # The word right before the number counts, whatever is before it, and however it is joined.
    (['train_validation_train-00000-of-00001'], ['train_validation_validation-00000-of-00001'], []),
    (['train_00000-of-00001.tfrecord'], ['validation_00000-of-00001.tfrecord'], []),
    (['x_test_a_train-00000-of-00001'], ['train-a_test-00000-of-00001'], []),
    (['x_train-0.tfrecord'], ['test_0.tfrecord'], ['train_config.json', 'x_test-log.txt']),
    # Only where there are none of the usual names.
    (['x_train_00000-of-00001'], ['test-00000-of-00001'],
     ['y_train-00000-of-00001', 'train_00000-of-00001', 'test_00000-of-00001']),
    ([], [], ['train_config.json', 'x_train-log', 'flowers_train.tfrecord']),
    ([], [], ['train', 'trains-00000-of-00001', 'mytrain_00000-of-00001', 'x_training_1'])])
def test_names(tmp_path, train, test, neither):
    assert splits(tmp_path, train + test + neither) == [train, test]


@pytest.mark.parametrize('name', ['re_train_flowers_validation_x.tfrecord',
                                  'a_test_b_train_c_00000-of-00001', 'train-a_test_b',
                                  'train_validation_data-00000-of-00002'])
def test_a_name_of_both_splits(tmp_path, name):
    with pytest.raises(datasets.DatasetError, match='%s is to train on and to test on by its name: '
                       'expected train, validation or test right before' % name):
        splits(tmp_path, [name])


@pytest.mark.parametrize('names, has', [
    ([], 'The folder is empty.'),
    (['flowers_train.tfrecord', 'a'], 'The folder has a, flowers_train.tfrecord.'),
    (['validation-00000-of-00001', 'b.txt', '.hidden'], 'The folder has b.txt.'),
    (list('abcdefgh'), 'The folder has a, b, c, d, e and 3 more.')])
def test_no_files_of_a_split_says_which_names_and_what_is_there(tmp_path, names, has):
    for name in names:
        (tmp_path / name).write_bytes(b'')
    with pytest.raises(datasets.DatasetError) as error:
        datasets.get_dataset('tfrecords', str(tmp_path), 3)
    assert str(error.value) == (
        'There are no files %s/train-* to train on: expected TFRecords named train-*, *_train_*, '
        'or with a number train_00000-of-00005, *_train-00000-of-00005. %s' % (tmp_path, has))
