"""Bad examples: named by file and place, listed, left out, replaced."""

import os
import shutil
import struct
import tempfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
from datasets.bad_examples import wrong_bytes
from datasets.epochs import epoch_order
from image_files import (batches, cmyk, jpeg, png, record, write_folder, write_records)

GOOD = [(jpeg(50 * label), label) for label in range(4)]
CUT = jpeg(77, 40, 40)[:-9]  # the last of its blocks are missing
TRUNCATED = jpeg()[:60]  # ends in its header


def records(folder, bad=None, at=2, **options):
    examples = [(jpeg(20 * number), number % 4) for number in range(6)]
    if bad is not None:
        examples[at] = bad
    write_records(folder / 'train-00000-of-00001', examples)
    write_records(folder / 'test-00000-of-00001', GOOD)
    return datasets.get_dataset('tfrecords', str(folder), 4, augment='none', **options)


@pytest.mark.slow
@pytest.mark.parametrize('bad, text', [
    ((CUT, 0), 'is a damaged JPEG: it ends before its end marker'),
    ((png(9)[:-20], 0), 'is a damaged PNG: it ends before its end marker'),
    ((b'GIF89a' + bytes(30), 0), 'is neither a JPEG nor a PNG: it begins with GIF89a'),
    ((b'', 0), 'is empty'),
    ((png(9)[:16] + b'\0\0\x4e\x20' * 2 + png(9)[24:], 0), 'is a PNG of 20000 x 20000 pixels, '
     'and MOST_PIXELS of datasets/bad_examples.py is 100000000: make it smaller'),
    ((jpeg(9).replace(struct.pack('>HH', 20, 30), b'\x4e\x20' * 2), 0), 'is a JPEG of 20000 x '),
    ((jpeg(9), 4), r'has the label 4, which is not in 0 .. 3'),
    ((jpeg(9), -1), 'has the label -1')])
def test_a_bad_example_ends_the_step_and_is_named(tmp_path, bad, text):
    found = records(tmp_path, bad)
    named = 'train-00000-of-00001, record 2 at byte '
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        batches(found.train_batches(batch_size=6, seed=1, image_size=8), 1)
    assert named in str(caught.value)
    with pytest.raises(datasets.DatasetError, match=named + r'\d+ .*' + text):
        found.look('train', 2)


def noisy(progressive):
    image = np.random.RandomState(3).randint(0, 256, [40, 56, 3]).astype(np.uint8)
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(tf.image.encode_jpeg(image, progressive=progressive))


def with_thumbnail(encoded):
    """With a JPEG of its own in a segment of the header, where cameras put a small picture."""
    inner = jpeg(9)
    return encoded[:2] + b'\xff\xe1' + struct.pack('>H', 2 + len(inner)) + inner + encoded[2:]


@pytest.mark.parametrize('encoded', [jpeg(9, channels=1), noisy(False), noisy(True),
                                     with_thumbnail(jpeg())],
                         ids=['gray', 'noisy', 'progressive', 'thumbnail'])
def test_a_jpeg_is_cut_off_where_the_decoder_of_the_whole_says_so(encoded):
    body, end = encoded[:-2], b'\xff\xd9'
    whole = [encoded, encoded + b'\0' * 99, encoded + b'SEFT' * 9, encoded + encoded[:50],
             body + b'\xff' + end, encoded + b'\xff', body[:-9] + end]
    cut = [body, body + b'\xff', body + b'\xff' + b'\0' * 9, body[:len(body) - 40], body + b'\n',
           encoded[:60], encoded[:200], encoded[:4]]
    assert [wrong_bytes(each) for each in whole] == [''] * len(whole)
    assert all('ends before its end marker' in wrong_bytes(each) for each in cut)
    with tf.Graph().as_default(), tf.Session() as session:
        given = tf.placeholder(tf.string, [])
        decoded = session.make_callable(tf.image.decode_jpeg(given).op, [given])
        for each in whole:
            decoded(each)
        for each in cut:
            with pytest.raises(tf.errors.InvalidArgumentError):
                decoded(each)


def test_the_next_good_one_takes_its_place_and_all_others_keep_theirs(tmp_path):
    good = records(tmp_path)
    images, labels = (np.concatenate(part) for part in zip(*batches(
        good.train_batches(batch_size=3, seed=1, image_size=8), 4)))
    with tf.Session() as session:
        order = np.concatenate(session.run([epoch_order(6, 1)(tf.constant(epoch, tf.int64))
                                            for epoch in (0, 1)]))
    assert labels.tolist() == (order % 4).tolist()
    path = str(tmp_path / 'bad')
    assert datasets.check_data(records(tmp_path, (TRUNCATED, 0)), [].append, path) == 1
    assert open(path).read().startswith('train/train-00000-of-00001, record 2\t')
    leaving_out = records(tmp_path, (TRUNCATED, 0), bad_list=path)
    assert leaving_out.left_out == 1
    found, others = (np.concatenate(part) for part in zip(*batches(
        leaving_out.train_batches(batch_size=3, seed=1, image_size=8), 4)))
    assert others.tolist() == (np.where(order == 2, 3, order) % 4).tolist()
    np.testing.assert_array_equal(found[order != 2], images[order != 2])


@pytest.mark.slow
def test_test_images_are_left_out_by_names_of_any_bytes(tmp_path):
    name = b'm\xfc\nller.jpg'.decode('utf-8', 'surrogateescape')
    folder = write_folder(tmp_path / 'data', {
        '%s/a/%d.jpg' % (split, number): jpeg(number) for split in ('train', 'test')
        for number in range(3)})
    os.symlink('nowhere', os.path.join(folder, 'test', 'a', name))  # cannot be read
    said, path = [], str(tmp_path / 'bad')
    assert datasets.check_data(datasets.get_dataset('folder', folder), said.append, path) == 1
    assert sum(r'm\xfc\nller.jpg' in line for line in said) == 1
    found = datasets.get_dataset('folder', folder, bad_list=path)
    assert batches(found.eval_batches(batch_size=4, image_size=8), 1)[0][0].shape[0] == 3
    os.remove(os.path.join(folder, 'test', 'a', name))
    with pytest.raises(datasets.DatasetError, match='names 1 example, and folder has 0 of them'):
        datasets.get_dataset('folder', folder, bad_list=path)


@pytest.mark.parametrize('content, text', [
    (None, 'is no list of bad examples'), (b'train/a/0.jpg', 'is no list of bad examples'),
    (b'\xff', 'Cannot read the list'), (b''.join(b'train/a/%d.jpg\tx\n' % number
                                                 for number in range(3)), 'leaves out all images')])
def test_lists_that_cannot_be_used(tmp_path, content, text):
    folder = write_folder(tmp_path / 'data', {'%s/a/%d.jpg' % (split, number): jpeg(number)
                                              for split in ('train', 'test')
                                              for number in range(3)})
    if content is not None:
        (tmp_path / 'bad').write_bytes(content)
    with pytest.raises(datasets.DatasetError, match=text):
        datasets.get_dataset('folder', folder, bad_list=str(tmp_path / 'bad'))


@pytest.mark.slow
def test_other_colors_are_converted(tmp_path):
    for encoded in (cmyk(), png(200, channels=4)):
        found = records(tmp_path, (encoded, 2))
        assert batches(found.train_batches(batch_size=6, seed=1, image_size=8), 1)
        assert found.look('train', 2)[1] == 2


def test_check_data_says_what_is_wrong(tmp_path):
    def features(**named):
        return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    of_bytes = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'a']))
    with tf.io.TFRecordWriter(str(tmp_path / 'train-00000-of-00001')) as writer:
        for data in (features(**{'image/class/label': label, 'image': of_bytes}),
                     features(**{'image/class/label': label, 'image/encoded': label}),
                     record(jpeg(), 4), b'no example at all', record(jpeg(), 1)):
            writer.write(data)
    path = tmp_path / 'test-00000-of-00001'
    write_records(path, GOOD)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # the last byte of the last record's data
    path.write_bytes(bytes(content))
    found, said = datasets.get_dataset('tfrecords', str(tmp_path), 4), []
    assert datasets.check_data(found, said.append) == 5
    text = '\n'.join(said)
    for wrong in (
            "record 0 at byte 0 has no feature 'image/encoded', but 'image', 'image/class/label'",
            "has a feature 'image/encoded' of the kind int64_list with 0 values of bytes_list",
            'has the label 4, which is not in 0 .. 3: give --background_class where labels begin '
            'at 1, or more --num_classes', 'is no tf.train.Example',
            'train          1 image that can be used, 4 bad',
            '  classes      1 of 4, 0 to 1 image each',
            '  height       20 to 20 pixels, median 20',
            'test           3 images that can be used, 1 bad'):
        assert wrong in text
    assert said[-2].startswith('  bad          %s, record 3 at byte' % path)
    assert said[-1] == 'check          5 bad examples'
    (tmp_path / 'train-00000-of-00001').unlink()
    with pytest.raises(datasets.DatasetError, match='0 at byte 0 cannot be read: No such file'):
        found.look('train', 0)


@pytest.mark.parametrize('kind, path', [('folder', 'train/b'), ('tfrecords', '')])
def test_a_folder_that_may_not_be_read_is_named(kind, path):
    """Its contents may not be reached, so that its files look as if they were not there."""
    user, folder = os.geteuid(), tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    write_folder(folder, {'%s/%s/1.jpg' % (split, name): jpeg() for split in ('train', 'test')
                          for name in 'ab'})
    closed = os.path.join(folder, path).rstrip(os.sep)
    os.chmod(closed, 0)
    if user == 0:
        os.seteuid(65534)  # nobody: the administrator may read them all the same
    try:
        with pytest.raises(datasets.DatasetError) as caught:
            datasets.get_dataset(kind, folder, 3 * (kind == 'tfrecords'))
    finally:
        os.seteuid(user)
        os.chmod(closed, 0o755)
        shutil.rmtree(folder)
    assert str(caught.value) == 'Cannot read the folder %s: Permission denied.' % closed
