"""Bad examples: named by file and place, or left out, counted, replaced."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
from datasets.bad_examples import Bad, Skipped
from image_files import (batches, cmyk, gif, jpeg, png, record, truncated, write_folder,
                         write_records)

GOOD = [(jpeg(50 * label), label) for label in range(4)]


def records(folder, bad=None, at=2, skip_bad=0, **options):
    examples = [(jpeg(20 * number), number % 4) for number in range(6)]
    if bad is not None:
        examples[at] = bad
    write_records(folder / 'train-00000-of-00001', examples)
    write_records(folder / 'test-00000-of-00001', GOOD)
    return datasets.get_dataset('tfrecords', str(folder), 4, skip_bad=skip_bad, augment='none',
                                **options)


@pytest.mark.parametrize('bad, text', [
    ((truncated(), 0), 'is a damaged JPEG: it ends before its end marker'),
    ((b'', 0), 'is empty'),
    ((b'GIF89a', 0), "is neither a JPEG nor a PNG: it begins with b'GIF89a'"),
    ((jpeg(9, channels=1), 0), r'has 1 channel, and 3 are expected; --convert_colors'),
    ((png(9)[:16] + b'\0\0\x4e\x20' * 2 + png(9)[24:], 0), 'is a PNG of 20000 x 20000 pixels, '
     'which would be decoded whole, and MOST_PIXELS of datasets/bad_examples.py is 100000000: '),
    ((png(9, channels=4), 0), 'has 4 channels, and 3'),
    ((jpeg(9), 4), r'has the label 4, which is not in 0 .. 3'),
    ((jpeg(9), -1), 'has the label -1'),
])
def test_what_is_bad_ends_the_step_and_is_named(tmp_path, bad, text):
    found = records(tmp_path, bad)
    if text == 'is empty':  # the pipeline's own, seconds each
        with pytest.raises(tf.errors.InvalidArgumentError):
            batches(found.train_batches(batch_size=6, seed=1, image_size=8), 1)
    with pytest.raises(datasets.BadExampleError, match=r'train-00000-of-00001, record 2 at byte '
                       r'\d+ .*' + text):
        found.find_bad('train', range(6))


@pytest.mark.slow
def test_the_next_good_one_takes_its_place_and_all_others_keep_theirs(tmp_path):
    good = records(tmp_path)
    labels = np.concatenate([found for _, found in batches(
        good.train_batches(batch_size=3, seed=1, image_size=8), 4)])
    images = np.concatenate([found for found, _ in batches(
        good.train_batches(batch_size=3, seed=1, image_size=8), 4)])
    order = batches(datasets.pipeline.example_order(6, 1).batch(12), 1)[0]
    assert labels.tolist() == (order % 4).tolist()
    skipping = records(tmp_path, (truncated(), 0), skip_bad=1)
    assert skipping.find_bad('train', range(6)) == 1
    assert skipping.find_bad('train', range(6)) == 0
    found = batches(skipping.train_batches(batch_size=3, seed=1, image_size=8), 4)
    expected = np.where(order == 2, 3, order)
    assert np.concatenate([part for _, part in found]).tolist() == (expected % 4).tolist()
    same = order != 2
    np.testing.assert_array_equal(np.concatenate([part for part, _ in found])[same], images[same])
    text = skipping.skipped.describe()
    assert text.startswith('skipped        1 bad example\n  ') and 'record 2 at byte' in text


CUT = jpeg(77, 40, 40)[:-9]  # the last of its blocks are missing
ENDS_BADLY = jpeg(77, 40, 40)[:-2] + b'\xff\xc4\0\0\xff\xd9'  # a wrong table after the last block


@pytest.mark.slow
def test_a_jpeg_that_is_cut_off_is_bad_whatever_part_of_it_is_wanted(tmp_path):
    image = tf.image.decode_and_crop_jpeg(CUT, [0, 0, 8, 8], channels=3)
    with tf.Session() as session:
        assert session.run(image).shape == (8, 8, 3)  # which is why it has to be looked for
    for number in range(6):
        write_folder(tmp_path, {'train/a/%d.jpg' % number: CUT if number == 2 else jpeg(number),
                                'test/a/%d.jpg' % number: CUT if number == 4 else jpeg(number)})
    good = datasets.get_dataset('folder', str(tmp_path))
    # A seed of which no crop comes to where the damage is would do as well.
    for made in (lambda: good.train_batches(batch_size=6, seed=1, image_size=8),
                 lambda: good.eval_batches(batch_size=6, image_size=8)):
        with tf.Graph().as_default(), pytest.raises(
                tf.errors.InvalidArgumentError, match='it ends before its end marker'):
            batches(made(), 1)
    found = datasets.get_dataset('folder', str(tmp_path), skip_bad=2)
    assert found.find_bad('train', range(6)) == found.find_bad('test', range(6)) == 1
    assert [bad[:3] for bad in found.skipped.examples] == [('train', 2, -1), ('test', 4, -1)]
    said = []
    assert datasets.check_data(good, said.append) == 2
    assert sum('it ends before its end marker' in line for line in said) == 2


@pytest.mark.slow
def test_a_gif_is_bad_though_the_decoder_of_pngs_takes_it(tmp_path):
    write_folder(tmp_path, {'%s/a/%d.png' % (split, number): gif() if number == bad else png(number)
                            for split, bad in (('train', 2), ('test', 1)) for number in range(4)})
    found = datasets.get_dataset('folder', str(tmp_path))
    for made in (found.train_batches(batch_size=4, seed=1, image_size=8),
                 found.eval_batches(batch_size=4, image_size=8)):
        with pytest.raises(tf.errors.InvalidArgumentError, match='is neither a JPEG nor a PNG: it '
                           "begins with b.{1,2}GIF89a"):
            batches(made, 1)
    found = datasets.get_dataset('folder', str(tmp_path), skip_bad=2)
    assert found.stream_probe(1, 4, 8).find_bad(0, 4) == found.find_bad('test', range(4)) == 1
    assert batches(found.eval_batches(batch_size=4, image_size=8), 1)[0][0].shape[0] == 3


def test_a_bad_test_image_is_left_out(tmp_path):
    found = records(tmp_path, skip_bad=1)
    write_records(tmp_path / 'test-00000-of-00001', GOOD[:2] + [(truncated(), 0)] + GOOD[3:])
    found = datasets.get_dataset('tfrecords', str(tmp_path), 4, skip_bad=1)
    assert found.find_bad('test', range(4)) == 1
    labels = [part for _, part in batches(found.eval_batches(batch_size=2, image_size=8))]
    assert np.concatenate(labels).tolist() == [0, 1, 3]


def test_one_more_than_allowed(tmp_path):
    skipped = Skipped(1)
    skipped.add(Bad('train', 3, 10, 'a, record 3 is empty'))
    skipped.add(Bad('train', 3, 11, 'a, record 3 is empty'))  # the same
    with pytest.raises(datasets.BadExampleError, match='a, record 4 is empty. 1 were left out '
                       'already, and --skip_bad=1 allows no more'):
        skipped.add(Bad('train', 4, 12, 'a, record 4 is empty'))
    with pytest.raises(datasets.BadExampleError, match='--skip_bad=10 would leave out'):
        Skipped(0).add(Bad('train', 4, 12, 'a, record 4 is empty'))


def test_each_file_that_is_lost_counts(tmp_path):
    """999 lost files of 1000 were one, and a run of what was left went on in silence."""
    write_records(tmp_path / 'train-00007-of-01000', GOOD)
    write_records(tmp_path / 'test-00000-of-00001', GOOD)

    def made(skip_bad):
        return datasets.get_dataset('tfrecords', str(tmp_path), 4, skip_bad=skip_bad)
    for skip_bad in (1, 998):
        with pytest.raises(datasets.BadExampleError) as caught:
            made(skip_bad)
        assert str(caught.value) == (
            '999 of the 1000 files %s/train-*-of-01000 are missing: those numbered 00000 to 00006, '
            '00008 to 00999. Copy them again. They count as 999, 0 were left out already, and '
            '--skip_bad=%d allows no more: see --mode=check_data.' % (tmp_path, skip_bad))
    assert made(999).skipped.describe().startswith('skipped        999 damaged files (what they ')
    said = []
    assert datasets.check_data(made(10 ** 6), said.append) == 999
    assert said[-1] == 'check          999 damaged files (what they have lost is not counted)'


@pytest.mark.slow
@pytest.mark.parametrize('encoded', [cmyk(), png(200, channels=4)])
def test_converted_colors(tmp_path, encoded):
    found = records(tmp_path, (encoded, 2), convert=True)
    found.find_bad('train', range(6))
    images, labels = batches(found.train_batches(batch_size=6, seed=1, image_size=8), 1)[0]
    assert images.shape == (6, 8, 8, 3) and sorted(labels) == [0, 0, 1, 1, 2, 3]


def test_check_data_counts_and_lists_what_is_bad(tmp_path):
    found = records(tmp_path, (truncated(), 0), skip_bad=100)
    path = tmp_path / 'test-00000-of-00001'
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # the last byte of the last record's data
    path.write_bytes(bytes(content))
    said = []
    assert datasets.check_data(found, said.append) == 2
    text = '\n'.join(said)
    assert 'train          5 images that can be used, 1 bad' in text
    assert '  classes      3 of 4, 0 to 2 images each' in text
    assert '  height       20 to 20 pixels, median 20' in text
    assert 'record 2 at byte' in text and 'checksum was made of' in text or 'tf.train.Ex' in text
    assert said[-1] == 'check          2 bad examples'


def test_what_a_record_has_instead_of_an_image(tmp_path):
    def features(**named):
        return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    of_bytes = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'a']))
    with tf.io.TFRecordWriter(str(tmp_path / 'train-00000-of-00001')) as writer:
        writer.write(features(**{'image/class/label': label, 'image': of_bytes}))
        writer.write(features(**{'image/class/label': label, 'image/encoded': label}))
        writer.write(record(jpeg(), 4))
        writer.write(b'no example at all')
    write_records(tmp_path / 'test-00000-of-00001', GOOD)
    found = datasets.get_dataset('tfrecords', str(tmp_path), 4)
    for number, text in enumerate([
            "has no feature 'image/encoded', but 'image', 'image/class/label'",
            "has a feature 'image/encoded' of the kind int64_list: expected bytes_list",
            'has the label 4, which is not in 0 .. 3: give --background_class where labels begin '
            'at 1, or more --num_classes', 'is no tf.train.Example']):
        with pytest.raises(datasets.DatasetError) as caught:
            found.look('train', number)
        assert str(caught.value).split(' ', 6)[-1].startswith(text)
    path = tmp_path / 'train-00000-of-00001'
    path.unlink()
    with pytest.raises(datasets.DatasetError) as caught:
        found.look('train', 0)
    assert str(caught.value) == (
        'Cannot read %s, record 0 at byte 0: No such file or directory.' % path)
