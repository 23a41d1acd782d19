"""Folders, TFRecords with any number of classes, Keras' sets, synthetic images, a user's own."""

import os

import numpy as np
import pytest
import tensorflow

import datasets
from datasets import keras_sets
from datasets.check_data import check_data
from image_files import batches, jpeg, png, write_folder, write_records
from towers.errors import InvalidArgumentError


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
    found = datasets.get_dataset('folder', write_folder(tmp_path, {
        '%s/%d.jpg' % (name, number): jpeg() for name, count in (('a', 6), ('b', 6), ('c', 1))
        for number in range(count)}))
    assert found.num_examples == {'train': 9, 'test': 4}  # the only image of c is to train on
    assert found._sources['test'].paths == [str(tmp_path / name) for name in (
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
    ({'flowers/train/1.jpg': b''},
     r'The folder .*flowers has no images: .*not looked into, such as .*flowers/train: move'),
    ({'a/1.jpg': b''}, 'one image a class, which is to train on, so that nothing is left to test')])
def test_folders_that_are_none(tmp_path, files, text):
    with pytest.raises(datasets.DatasetError, match=text):
        datasets.get_dataset('folder', write_folder(tmp_path, files))


def test_check_data_says_what_it_leaves_alone(tmp_path):
    write_folder(tmp_path, {
        'train/a\nb/1.jpg': jpeg(), 'train/a\nb/2.webp': b'', 'train/a\nb/deep/1.jpg': jpeg(),
        'train/a\nb/.hidden': b'', 'test/a\nb/1.jpg': jpeg()})
    os.mkfifo(str(tmp_path / 'train' / 'a\nb' / '3.jpg'))  # to read it would wait for a writer
    found = datasets.get_dataset('folder', str(tmp_path))
    said = []
    assert check_data(found, said.append) == 0
    assert [line for line in said if 'left alone' in line] == [
        '  left alone   3 other files or folders, such as %s' % (
            tmp_path / 'train' / 'a\\nb' / '2.webp')]
    assert sum(line.split() == ['0', 'a\\nb', '1'] for line in said) == 2  # on one line


@pytest.mark.parametrize('background', [False, True])
def test_records_with_and_without_a_background_class(tmp_path, background):
    first = int(background)
    write_records(tmp_path / 'flowers_train_00000-of-00001', [
        (jpeg(), first + number) for number in range(3)])
    write_records(tmp_path / 'flowers_validation_00000-of-00001', [(jpeg(), first)])
    with pytest.raises(InvalidArgumentError, match='give --num_classes'):
        datasets.get_dataset('tfrecords', str(tmp_path))
    (tmp_path / 'labels.txt').write_text('0:daisy\n1:rose\n2:tulip\n')
    found = datasets.get_dataset('tfrecords', str(tmp_path), background_class=background)
    assert found.num_classes == 3 + first
    assert found.num_examples == {'train': 3, 'test': 1}
    assert datasets.get_dataset('tfrecords', str(tmp_path), 7).num_classes == 7


@pytest.fixture
def fake_keras(monkeypatch, tmp_path):
    """A function that puts a `load_data` in the place of Keras'; returns what stands for Keras."""
    def put(name, load_data):
        module = type('module', (), {'load_data': staticmethod(load_data)})
        # Keras 3 alone has Operation.
        fake = type('keras', (), {'Operation': object, 'datasets': type(
            'datasets', (), {name: module})})
        monkeypatch.setattr(tensorflow, 'keras', fake)
        monkeypatch.setenv('KERAS_HOME', str(tmp_path))
        return fake
    return put


def test_keras_sets(monkeypatch, fake_keras):
    images = {split: np.arange(count * 28 * 28, dtype=np.uint8).reshape([count, 28, 28])
              for split, count in (('train', 6), ('test', 2))}

    fake_keras('mnist', lambda: ((images['train'], np.arange(6, dtype=np.uint8)),
                                 (images['test'], np.arange(2, dtype=np.uint8))))
    with pytest.raises(datasets.DatasetError, match=r'shape \[6, 28, 28, 1\], expected \[60000'):
        keras_sets.load_keras_set('mnist', 'train')
    monkeypatch.setitem(keras_sets.SETS, 'mnist', keras_sets.SETS['mnist']._replace(
        num_examples={'train': 6, 'test': 2}))
    found, labels = keras_sets.load_keras_set('mnist', 'test')
    assert found.dtype == np.float32 and labels.dtype == np.int64
    np.testing.assert_array_equal(found[..., 0], images['test'] / np.float32(255))


@pytest.mark.parametrize('name', sorted(keras_sets.SETS))
def test_what_to_fetch_without_a_network(name, fake_keras, tmp_path):
    def fail():
        raise OSError('no network')
    fake = fake_keras(name, fail)
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.get_dataset(name).load('train')
    text = str(caught.value)
    assert text.startswith('Cannot load %s: no network. Without a network, fetch https://' % name)
    assert ' into %s/datasets as ' % tmp_path in text
    del fake.Operation  # as Keras 2, which looks below the home folder alone
    assert keras_sets.cache_folder() == os.path.expanduser('~/.keras/datasets')


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


def test_files_of_a_split_beside_those_that_are_taken_are_said(tmp_path):
    for name in ('train-00000-of-00001', 'validation-00000-of-00001', 'test-00000-of-00001'):
        write_records(tmp_path / name, [(jpeg(), 0)])
    folder = write_folder(tmp_path / 'images', {
        '%s/a/1.jpg' % name: jpeg() for name in ('train', 'test', 'val')})
    for name, path, other in (('tfrecords', str(tmp_path), 'test-00000-of-00001'),
                              ('folder', folder, 'val')):
        said = []
        datasets.check_data(datasets.get_dataset(name, path, int(name == 'tfrecords')), said.append)
        assert [line for line in said if 'left alone' in line] == [
            '  left alone   1 other file or folder, such as %s/%s' % (path, other)]


def test_files_of_other_names_have_another_digest(tmp_path):
    names = ['%s/%s/%d.jpg' % (split, name, number)
             for split in ('train', 'test') for name in 'ab' for number in range(3)]
    write_folder(tmp_path / 'here', {name: jpeg() for name in names})

    def digest(folder, split='train'):
        return datasets.get_dataset('folder', str(folder)).names_digest(split)
    first, test = digest(tmp_path / 'here'), digest(tmp_path / 'here', 'test')
    assert len(first) == 8 and first == test  # the same classes and names
    (tmp_path / 'here').rename(tmp_path / 'there')
    assert digest(tmp_path / 'there') == first
    (tmp_path / 'there/train/a/0.jpg').rename(tmp_path / 'there/train/a/9.jpg')
    assert digest(tmp_path / 'there') != first and digest(tmp_path / 'there', 'test') == test
    (tmp_path / 'there/train/a/9.jpg').rename(tmp_path / 'there/train/b/0_.jpg')  # of another class
    (tmp_path / 'there/train/b/0_.jpg').rename(tmp_path / 'there/train/a/0.jpg')
    assert digest(tmp_path / 'there') == first


@pytest.fixture
def three_classes(tmp_path):
    """A function from the contents of labels.txt to the data set; labels are 0 to 2."""
    for name in ('train', 'validation'):
        write_records(tmp_path / (name + '-00000-of-00001'), [(jpeg(), label) for label in (0, 2)])

    def made(labels, **options):
        (tmp_path / 'labels.txt').write_bytes(labels)
        return datasets.get_dataset('tfrecords', str(tmp_path), **options)
    return made


def test_labels_that_are_counted(three_classes):
    assert three_classes(b'0:daisy\n1:rose\n\n2:tulip\n').num_classes == 3
    assert three_classes(b'\xff\r\nb', background_class=True).num_classes == 3
    with pytest.raises(datasets.DatasetError, match='labels.txt lists no class: expected a line'):
        three_classes(b'\n')
    assert three_classes(b'', num_classes=4).num_classes == 4


def test_a_label_out_of_range_names_the_file_that_counts_the_classes(three_classes):
    with pytest.raises(datasets.DatasetError, match=(
            'has the label 2, which is not in 0 .. 1, by the classes that .*/labels.txt lists: ')):
        three_classes(b'a\nb\n').look('train', 1)
    with pytest.raises(datasets.DatasetError, match='which is not in 0 .. 1: give'):
        three_classes(b'a\n', num_classes=2).look('train', 1)
