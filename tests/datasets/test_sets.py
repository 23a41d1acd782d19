"""Folders, TFRecords with any number of classes, Keras' sets, synthetic images, a user's own."""

import os

import numpy as np
import pytest
import tensorflow

import datasets
from datasets.held_out import with_unlabelled, with_validation
from image_files import batches, jpeg, png, write_folder, write_records
from towers.errors import InvalidArgumentError


@pytest.mark.slow
def test_a_folder_with_train_and_test(tmp_path):
    found = datasets.get_dataset('folder', write_folder(tmp_path, {
        'train/cat/2.png': png(250), 'train/cat/1.jpg': jpeg(), 'train/ant/1.JPEG': jpeg(9),
        'train/ant/notes.txt': b'no image', 'val/cat/1.jpg': jpeg()}), augment='none')
    assert (found.num_classes, found.classes) == (2, ['ant', 'cat'])
    assert found.num_examples == {'train': 3, 'test': 1}
    images, labels = batches(found.train_batches(batch_size=3, seed=1, image_size=8), 1)[0]
    assert sorted(labels) == [0, 1, 1] and images.shape == (3, 8, 8, 3)
    bright = images[:, 0, -1, 0]
    assert sorted(np.round((bright + 1) * 127.5 / 50).astype(int)) == [0, 2, 5]


def test_a_folder_without_is_split(tmp_path):
    os.makedirs(str(tmp_path / 'a'))
    os.mkfifo(str(tmp_path / 'a' / '0_.jpg'))  # to read it would wait for a writer
    found = datasets.get_dataset('folder', write_folder(tmp_path, {
        '%s/%d.jpg' % (name, number): jpeg() for name, count in (('a', 6), ('b', 6), ('c', 1))
        for number in range(count)}))
    assert found.num_examples == {'train': 9, 'test': 4}  # the only image of c is to train on
    assert found.sources['test'].paths == [str(tmp_path / name) for name in (
        'a/0.jpg', 'a/5.jpg', 'b/0.jpg', 'b/5.jpg')]


@pytest.mark.parametrize('files, text', [
    ({'train/a/1.txt': b'', 'test/a/1.jpg': b''}, r'a has no images: expected files \*.jpg'),
    ({'train/a/1.jpg': b''}, 'none named test or validation or val: make one, .* or '
     'move the class folders out of train'),
    ({'train/a/1.jpg': b'', 'test/b/1.jpg': b''}, "a class 'b' that .*train does not have: give "
     'the folder the name of a class, move it away'),
    ({'1.jpg': b''}, 'has no folders: expected one for each class, .* such as .*/daisy/1.jpg'),
    ({'train/a/x/1.jpg': b'', 'train/b/1.txt': b'', 'test/a/1.jpg': b''},
     r'The folder .*train/a has no images: .*not looked into, such as .*train/a/x: move'),
    ({'a/1.jpg': b''}, 'one image a class, which is to train on, so that nothing is left to test')])
def test_folders_that_are_none(tmp_path, files, text):
    with pytest.raises(datasets.DatasetError, match=text):
        datasets.get_dataset('folder', write_folder(tmp_path, files))


@pytest.mark.parametrize('name, shape', [('mnist', (28, 28, 1)), ('cifar100', (32, 32, 3))])
def test_keras_sets(monkeypatch, name, shape):
    gray = shape[:2] if shape[2] == 1 else shape
    images = {split: np.arange(count * np.prod(shape)).astype(np.uint8).reshape((count,) + gray)
              for split, count in (('train', 6), ('test', 2))}
    given = [(images[split], np.arange(len(images[split]), dtype=np.uint8)[:, np.newaxis])
             for split in ('train', 'test')]
    monkeypatch.setattr(getattr(tensorflow.keras.datasets, name), 'load_data', lambda: given)
    found, labels = datasets.get_dataset(name).load('test')
    assert found.dtype == np.float32 and labels.dtype == np.int64 and labels.tolist() == [0, 1]
    np.testing.assert_array_equal(
        found, images['test'].reshape((2,) + shape) / np.float32(255))

    def fail():
        raise OSError('no\nnetwork')
    monkeypatch.setattr(getattr(tensorflow.keras.datasets, name), 'load_data', fail)
    with pytest.raises(datasets.DatasetError, match=(
            'Cannot load %s: no network. Without a network, fetch https://.* to %s' % (name, name[
                :5]))):
        datasets.get_dataset(name).load('train')


def test_a_name_that_is_no_data_set_or_does_not_take_an_option(tmp_path):
    (tmp_path / 'file').write_text('')
    for name, options, text in (
            ('svhn', {}, "no data set 'svhn'; choose one of: cifar10"),
            ('digits', {'num_classes': 3}, 'has its own number of classes'),
            ('digits', {'background_class': True}, 'has its own number of classes'),
            ('digits', {'data_dir': 'x'}, "'digits' is part of this package and takes no data_dir"),
            ('imagenet', {}, "'imagenet' needs a data_dir"),
            ('folder', {'data_dir': str(tmp_path / 'file')}, 'Cannot read the folder .*file: Not'),
            ('imagenet', {'data_dir': str(tmp_path / 'gone')}, 'Cannot read .*gone: No such')):
        with pytest.raises((InvalidArgumentError, datasets.DatasetError), match=text):
            datasets.get_dataset(name, **options)


def test_synthetic_images():
    found = datasets.get_dataset('synthetic', num_classes=5)
    (one, labels), (again, _) = batches(found.train_batches(
        batch_size=4, seed=1, image_size=6, channels=1), 2)
    assert one.shape == (4, 6, 6, 1) and one.min() >= -1 and one.max() < 1 and one.std() > .4
    np.testing.assert_array_equal(one, again)
    assert set(labels) <= set(range(5)) and labels.dtype == np.int64
    assert len(batches(found.eval_batches(batch_size=500, image_size=2))) == 2
    (other, _), = batches(found.train_batches(batch_size=4, seed=1, image_size=6, channels=1,
                                              share=(1, 2)), 1)
    assert not np.array_equal(one, other)


def test_files_of_other_names_have_another_digest(tmp_path):
    write_folder(tmp_path / 'here', {
        '%s/%s/%d.jpg' % (split, name, number): jpeg()
        for split in ('train', 'test') for name in 'ab' for number in range(3)})

    def digest(folder, split='train'):
        return datasets.get_dataset('folder', str(folder)).names_digest(split)
    first = digest(tmp_path / 'here')
    assert len(first) == 8 and first == digest(tmp_path / 'here', 'test')  # of the same names
    (tmp_path / 'here').rename(tmp_path / 'there')
    assert digest(tmp_path / 'there') == first
    (tmp_path / 'there/train/a/0.jpg').rename(tmp_path / 'there/train/a/9.jpg')
    assert digest(tmp_path / 'there') != first and digest(tmp_path / 'there', 'test') == first


def test_classes_of_records(tmp_path):
    for name in ('flowers_train_', 'flowers_validation_'):
        write_records(tmp_path / (name + '00000-of-00001'), [(jpeg(), label) for label in (0, 2)])

    def made(labels=None, **options):
        if labels is not None:
            (tmp_path / 'labels.txt').write_bytes(labels)
        return datasets.get_dataset('tfrecords', str(tmp_path), **options)
    with pytest.raises(InvalidArgumentError, match='give --num_classes'):
        made()
    assert made(b'0:daisy\n1:rose\n\n2:tulip\n').num_classes == 3
    assert made(b'\xff\r\nb', background_class=True).num_classes == 3
    with pytest.raises(datasets.DatasetError, match='labels.txt lists no class: expected a line'):
        made(b'\n')
    assert made(b'', num_classes=4).num_examples == {'train': 2, 'test': 2}
    with pytest.raises(datasets.DatasetError, match=(
            'has the label 2, which is not in 0 .. 1, by the classes that .*/labels.txt lists: ')):
        made(b'a\nb\n').look('train', 1)
    with pytest.raises(datasets.DatasetError, match='which is not in 0 .. 1: give'):
        made(b'a\n', num_classes=2).look('train', 1)


# ---- Other examples to evaluate than the test set: of the training set, and of no label ----------

def test_every_tenth_training_example_of_arrays():
    whole = datasets.get_dataset('digits')
    images, labels = whole.load('train')
    part = with_validation(whole, .1)
    held = np.arange(9, 1437, 10)
    assert part.num_examples == {'train': 1437 - len(held), 'test': len(held)}
    found_images, found_labels = part.load('test')
    np.testing.assert_array_equal(found_images, images[held])
    np.testing.assert_array_equal(found_labels, labels[held])
    np.testing.assert_array_equal(part.load('train')[1], np.delete(labels, held))
    with pytest.raises(InvalidArgumentError, match='of 1437 training examples is none'):
        with_validation(whole, 1e-4)
    with pytest.raises(InvalidArgumentError, match='gives batches, and not examples'):
        with_validation(datasets.get_dataset('synthetic'), .5)


@pytest.mark.slow
def test_images_in_files(tmp_path):
    folder = write_folder(tmp_path / 'flowers', {
        'train/%s/%d.jpg' % (name, number): jpeg(40 * number)
        for name in 'ab' for number in range(4)})
    write_folder(tmp_path / 'flowers', {'test/a/9.jpg': jpeg()})
    whole = datasets.get_dataset('folder', str(folder))
    part = with_validation(whole, .5)
    assert part.num_examples == {'train': 4, 'test': 4}
    assert [part.where('test', number).split('train/')[1] for number in part.numbers['test']] == [
        'a/1.jpg', 'a/3.jpg', 'b/1.jpg', 'b/3.jpg']
    (_, labels), = batches(part.eval_batches(batch_size=4, image_size=8))
    assert labels.tolist() == [0, 0, 1, 1] and whole.num_examples == {'train': 8, 'test': 1}
    new = with_unlabelled(whole, str(tmp_path / 'flowers' / 'test'))
    assert new.num_examples == {'train': 8, 'test': 1}
    assert new.where('test', 0) == str(tmp_path / 'flowers/test/a/9.jpg')
    with pytest.raises(datasets.DatasetError, match='has no images'):
        (tmp_path / 'none').mkdir()
        with_unlabelled(whole, str(tmp_path / 'none'))
