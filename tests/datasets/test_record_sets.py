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
    (['train-0-of-2-8f3a.tfrecord', 'train-1-of-2-b01c.tfrecord'], []),
    (['train-0-of-2-8f3a.tfrecord'], ['1 of the 2 files /d/train-*-of-2*.tfrecord is missing: '
                                      '/d/train-1-of-2*.tfrecord. Copy']),
    (['train-0', 'train-of-2', 'train-5'], [])])
def test_files_that_the_names_of_others_count(names, missing):
    found = record_sets.missing_of(['/d/' + name for name in names])
    assert len(found) == len(missing)
    for damage, begin in zip(found, missing):
        assert damage.text.startswith(begin) and damage.short == damage.text


def test_many_missing_files_are_ranges_of_numbers_and_in_an_error_not_all():
    # Of 0 .. 99 there are 7 and, from 50 on, the even ones: 75 - 1 = 74 are missing, in 1 to 6 and
    # so on. The last of 26 ranges is 99.
    numbers = [7] + list(range(50, 100, 2))
    damage, = record_sets.missing_of(['/d/train-%03d-of-100.x' % each for each in numbers])
    assert damage.count == 74
    assert damage.text == (
        '74 of the 100 files /d/train-*-of-100.x are missing: those numbered 000 to 006, 008 to '
        '049, %s. Copy them again.' % ', '.join('%03d' % each for each in range(51, 100, 2)))
    # 7 + 42 and 6 more numbers are said.
    assert damage.short == (
        '74 of the 100 files /d/train-*-of-100.x are missing: those numbered 000 to 006, 008 to '
        '049, 051, 053, 055, 057, 059, 061 and 19 more. Copy them again.')
    damage, = record_sets.missing_of(['/d/train-1-of-5', '/d/train-5-of-5'])  # counted from 1
    assert damage.count == 3 and damage.text.startswith(
        '3 of the 5 files /d/train-*-of-5 are missing: /d/train-2-of-5, /d/train-3-of-5, ')
    damage, = record_sets.missing_of(['/d/train-7-of-999999999999999'])  # no memory for each
    assert damage.count == 999999999999998


@pytest.mark.parametrize('names, strays', [
    (['train-1-of-2', 'train-2-of-2'], []),
    (['train-0-of-2', 'train-1-of-2', 'train-2-of-2'], ['train-2-of-2']),
    (['train-1-of-2', 'train-2-of-2', 'train-3-of-2'], ['train-3-of-2']),
    (['train-0-of-2', 'train-1-of-2', 'train-7-of-9'], ['train-7-of-9']),
    (['train-0-of-2', 'train-7-of-9'], []),  # which is the set, nothing says: both lack files
    (['a-0-of-1', 'b-0-of-2'], []), (['a-0-of-1', 'a-0-of-2.gz'], ['a-0-of-2.gz']),
    (['a', 'b'], []), (['a', 'b-0-of-1'], ['a'])])
def test_files_that_belong_to_no_set(names, strays):
    assert record_sets.strays_of(['/d/' + name for name in names]) == [
        '/d/' + name for name in strays]
