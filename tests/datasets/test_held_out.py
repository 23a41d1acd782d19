"""Other examples to evaluate than the test set: of the training set, and of no label."""

import numpy as np
import pytest

import datasets
from datasets.held_out import with_unlabelled, with_validation
from image_files import batches, jpeg, write_folder
from towers.errors import InvalidArgumentError


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
