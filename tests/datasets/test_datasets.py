"""The data sets: what is in them, the split, and what a damaged file says."""

import shutil

import numpy as np
import pytest

import datasets
from datasets import digits
from towers.errors import InvalidArgumentError, TowersError


def test_split_has_the_published_counts():
    train_images, train_labels = digits.load_digits('train')
    test_images, test_labels = digits.load_digits('test')
    assert train_images.shape == (1437, 8, 8, 1) and train_labels.shape == (1437,)
    assert test_images.shape == (360, 8, 8, 1) and test_labels.shape == (360,)
    assert train_images.dtype == test_images.dtype == np.float32
    assert train_labels.dtype == test_labels.dtype == np.int64
    # UCI's counts a class of the 1,797 images: 178 182 177 183 181 182 181 179 174 180.
    assert np.bincount(train_labels).tolist() == [142, 146, 141, 147, 144, 146, 145, 143, 139, 144]
    assert np.bincount(test_labels).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]


def test_images_are_the_source_divided_by_16():
    images, labels = digits.load_digits('test')
    # The first image of UCI's optdigits.tes, a 0, is the first of its class, hence a test image.
    assert labels[0] == 0
    assert (images[0, :, :, 0] * 16).tolist() == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0]]
    assert images.min() == 0 and images.max() == 1


def test_damaged_file_is_named(tmp_path, monkeypatch):
    damaged = tmp_path / 'digits.npz'
    shutil.copy(digits.PATH, str(damaged))
    content = bytearray(damaged.read_bytes())
    content[20000] ^= 1
    damaged.write_bytes(bytes(content))
    monkeypatch.setattr(digits, 'PATH', str(damaged))
    with pytest.raises(datasets.DatasetError) as error:
        digits.load_digits('train')
    assert isinstance(error.value, TowersError)
    assert str(damaged) in str(error.value)
    assert '45,394 bytes' in str(error.value) and 'git checkout' in str(error.value)


def test_a_label_that_is_no_class_is_named():
    """Kernels on GPUs give NaN for it, those on CPUs an error that names no example."""
    digits_set = datasets.get_dataset('digits')
    images, labels = digits_set.load('train')
    labels[[5, 7]] = 200, -1
    damaged = digits_set._replace(load=lambda split: (images, labels))
    for batches in (lambda: damaged.train_batches(batch_size=2, seed=1),
                    lambda: damaged.eval_batches(batch_size=2)):
        with pytest.raises(datasets.BadExampleError, match=(
                r'Example 5 of the \w+ set of digits has the label 200, which is not in 0 .. 9, '
                r'and 1 more have such labels')):
            batches()
    said = []
    assert datasets.check_data(damaged, said.append) == 4  # two of each part


def test_a_name_that_is_no_data_set_or_does_not_take_an_option(tmp_path):
    for name, options, text in (
            ('svhn', {}, "no data set 'svhn'; choose one of: cifar10"),
            ('digits', {'num_classes': 3}, 'has its own number of classes'),
            ('digits', {'background_class': True}, 'has its own number of classes')):
        with pytest.raises(InvalidArgumentError, match=text):
            datasets.get_dataset(name, **options)
    with pytest.raises(InvalidArgumentError, match=r"'validation', expected one of .*test.*train"):
        digits.load_digits('validation')
    (tmp_path / 'file').write_text('')
    with pytest.raises(datasets.DatasetError, match='file is no folder'):
        datasets.get_dataset('folder', str(tmp_path / 'file'))
