"""Sets of files that count themselves by their names."""

import pytest

from datasets import record_sets


@pytest.mark.parametrize('names, missing', [
    (['train-00000-of-00002', 'train-00001-of-00002'], []),
    (['train-00001-of-00003'], ['2 of the 3 files /d/train-*-of-00003 are missing: '
                                '/d/train-00000-of-00003, /d/train-00002-of-00003. Copy them']),
    (['flowers_train_%05d-of-00005.tfrecord' % each for each in (0, 1, 3, 4)],
     ['1 of the 5 files /d/flowers_train_*-of-00005.tfrecord is missing: '
      '/d/flowers_train_00002-of-00005.tfrecord. Copy it']),
    (['a_train_0_of_2.tfrecords', 'b_train_0_of_1.tfrecords', 'b_train_1_of_2.tfrecords'],
     ['1 of the 2 files /d/a_train_*_of_2.tfrecords is missing: /d/a_train_1_of_2.tfrecords. Copy',
      '1 of the 2 files /d/b_train_*_of_2.tfrecords is missing: /d/b_train_0_of_2.tfrecords. Copy'
      ]),
    (['train-1-of-2', 'train-2-of-2'], []),  # some count from 1
    (['train-2-of-2'], ['1 of the 2 files /d/train-*-of-2 is missing: /d/train-1-of-2. Copy']),
    (['train2014000-of-002', 'train2014001-of-002', 'train2017000-of-001'], []),
    (['train-0-of-2-8f3a.tfrecord', 'train-1-of-2-b01c.tfrecord'], []),
    (['train-0-of-2-8f3a.tfrecord'], ['1 of the 2 files /d/train-*-of-2*.tfrecord is missing: '
                                      '/d/train-1-of-2*.tfrecord. Copy']),
    (['train-0', 'train-of-2', 'train-5'], [])])
def test_files_that_the_names_of_others_count(names, missing):
    found = record_sets.missing_of(['/d/' + name for name in names])
    assert len(found) == len(missing)
    for text, begin in zip(found, missing):
        assert text.startswith(begin)


@pytest.mark.parametrize('names, strays', [
    (['train-0-of-2', 'train-1-of-2'], []), (['train-1-of-2', 'train-2-of-2'], []),
    (['train-0-of-2', 'train-1-of-2', 'train-2-of-2'], ['train-2-of-2']),
    (['train-1-of-2', 'train-2-of-2', 'train-3-of-2'], ['train-3-of-2']),
    (['train-0-of-2', 'train-1-of-2', 'train-7-of-9'], ['train-7-of-9']),
    (['train-0-of-2', 'train-7-of-9'], []),  # which is the set, nothing says: both lack files
    (['a-0-of-1', 'b-0-of-2'], []), (['a-0-of-1', 'a-0-of-2.gz'], ['a-0-of-2.gz']),
    (['a', 'b'], []), (['a', 'b-0-of-1'], ['a'])])
def test_files_that_belong_to_no_set(names, strays):
    assert record_sets.strays_of(['/d/' + name for name in names]) == [
        '/d/' + name for name in strays]
