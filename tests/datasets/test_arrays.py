"""Data sets in memory: the digits, the documented order whatever the batch size or the version, a
start anywhere, shifts."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
from datasets import digits
from datasets.epochs import Epochs
from image_files import batches
from towers.errors import InvalidArgumentError

IMAGES = np.arange(7 * 2 * 2, dtype=np.float32).reshape([7, 2, 2, 1])
LABELS = np.arange(7, dtype=np.int64) * 10


def array_set(images=IMAGES, labels=LABELS):
    return datasets.ArraySet('set', 100, images.shape[1:], None, lambda split: (images, labels))


def train_labels(batch_size, count, seed=5, **kwargs):
    return np.concatenate([labels for _, labels in batches(
        array_set().train_batches(batch_size, seed, **kwargs), count)]).tolist()


def test_order_is_the_same_in_every_version():
    # The same numbers from TF 1.15.5, 2.15.1 and 2.21.0.
    assert train_labels(7, 2) == [30, 10, 0, 40, 60, 50, 20, 50, 10, 20, 30, 60, 40, 0]


@pytest.mark.slow
def test_starts_anywhere():
    assert train_labels(3, 5, first_example=23) == train_labels(1, 38)[23:]
    assert train_labels(7, 1, first_example=7 * 10 ** 12) == [30, 60, 20, 10, 40, 0, 50]



def test_eval_is_one_pass_in_order_with_a_short_end():
    found = batches(array_set().eval_batches(3))
    assert [labels.tolist() for _, labels in found] == [[0, 10, 20], [30, 40, 50], [60]]
    assert (np.concatenate([images for images, _ in found]) == IMAGES).all()


def test_resize_is_bilinear_with_half_pixel_centres():
    # From two pixels 0 and 8 to four: centres at -1/4 (clipped), 1/4, 3/4 and 5/4 (clipped) of
    # the way between the old ones: 0, 2, 6, 8.
    images = np.array([[0, 8], [0, 8]], np.float32).reshape([1, 2, 2, 1])
    (got, _), = batches(array_set(images, LABELS[:1]).eval_batches(1, image_size=4, channels=3))
    assert got.shape == (1, 4, 4, 3)
    assert got[0, :, :, 2].tolist() == [[0, 2, 6, 8]] * 4


def test_arguments_that_do_not_fit_the_images():
    for options, text in ((dict(shift=2), 'moves images of 2 x 2 pixels out of sight'),
                          (dict(remainder='drop'), 'leaves nothing of 7 examples')):
        with pytest.raises(InvalidArgumentError, match=text):
            array_set().train_batches(8, 1, **options)
    with pytest.raises(InvalidArgumentError, match='channels=1 for images with 3 channels'):
        array_set(np.zeros([7, 2, 2, 3])).train_batches(2, 1, channels=1)


def moved(image, down, right):
    """An image [h, w, c] moved, with 0 for what moves in: the slow way."""
    result = np.zeros_like(image)
    height, width = image.shape[:2]
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                result[row, column] = image[row - down, column - right]
    return result


IMAGES_TO_MOVE = np.arange(1, 1 + 7 * 4 * 3 * 2, dtype=np.float32).reshape([7, 4, 3, 2])


# Down and right, of the places in the stream: the same in every version.
SHIFTS = [(1, 0), (0, -1), (0, -1), (0, -1), (0, -1), (0, 1), (-1, -1), (0, -1), (-1, 0), (-1, 0),
          (0, -1), (-1, -1), (-1, 1), (0, -1), (0, 1), (-1, 0), (1, 0), (0, -1), (0, 1), (0, -1),
          (-1, 0), (-1, 1), (0, 1), (1, -1), (0, 0)]


@pytest.mark.slow
def test_images_are_moved_by_the_shifts_of_their_place_in_the_stream():
    first_example = 9
    found = batches(array_set(IMAGES_TO_MOVE).train_batches(
        4, seed=5, first_example=first_example, shift=1), 4)
    images, labels = map(np.concatenate, zip(*found))
    for image, label, by in zip(images, labels, SHIFTS[first_example:]):
        np.testing.assert_array_equal(image, moved(IMAGES_TO_MOVE[label // 10], *by))


@pytest.mark.slow
@pytest.mark.parametrize('shift, remainder', [(1, 'carry'), (0, 'drop')])
def test_workers_share_out_the_batches_of_one_machine(shift, remainder):
    common = dict(seed=5, first_example=6, shift=shift, remainder=remainder)
    whole = batches(array_set().train_batches(6, **common), 5)
    parts = [batches(array_set().train_batches(2, share=(worker, 3), **common), 5)
             for worker in range(3)]
    for step, (images, labels) in enumerate(whole):
        np.testing.assert_array_equal(images, np.concatenate([part[step][0] for part in parts]))
        np.testing.assert_array_equal(labels, np.concatenate([part[step][1] for part in parts]))


# ---- The digits ----------------------------------------------------------------------------------

def test_the_digits_are_those_of_the_source():
    train_images, train_labels = digits.load_digits('train')
    images, labels = digits.load_digits('test')
    assert train_images.shape == (1437, 8, 8, 1) and images.shape == (360, 8, 8, 1)
    assert train_images.dtype == np.float32 and train_labels.dtype == np.int64
    # UCI's counts a class of the 1,797 images: 178 182 177 183 181 182 181 179 174 180.
    assert np.bincount(train_labels).tolist() == [142, 146, 141, 147, 144, 146, 145, 143, 139, 144]
    assert np.bincount(labels).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]
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


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    with open(digits.PATH, 'rb') as opened:
        content = bytearray(opened.read())
    content[20000] ^= 1
    path = tmp_path / 'digits.npz'
    monkeypatch.setattr(digits, 'PATH', str(path))
    for damaged in (None, b'', b'PK', bytes(content)):
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(datasets.DatasetError, match='%s.*git checkout' % path):
            digits.load_digits('train')


def test_a_label_that_is_no_class_is_named():
    """Kernels on GPUs give NaN for it, those on CPUs an error that names no example."""
    digits_set = datasets.get_dataset('digits')
    images, labels = digits_set.load('train')
    labels[[5, 7]] = 200, -1
    damaged = digits_set._replace(load=lambda split: (images, labels))
    for make in (lambda: damaged.train_batches(batch_size=2, seed=1),
                 lambda: damaged.eval_batches(batch_size=2)):
        with pytest.raises(datasets.BadExampleError, match=(
                r'Example 5 of the \w+ set of digits has the label 200, which is not in 0 .. 9, '
                r'and 1 more have such labels')):
            make()
    said = []
    assert datasets.check_data(damaged, said.append) == 4  # two of each part


# ---- The last batch of an epoch, counted by hand; and a start at any place -----------------------

def epochs_of(remainder, first=0, count=6):
    """Batches of 3 of the 7 examples 10 e + i of epoch e."""
    found = Epochs(7, 3, remainder).batches(
        lambda epoch: 10 * epoch + tf.range(7, dtype=tf.int64), first)
    return [batch.tolist() for batch in batches(found, count)]


EXPECTED = {
    'carry': [[0, 1, 2], [3, 4, 5], [6, 10, 11], [12, 13, 14], [15, 16, 20], [21, 22, 23]],
    'drop': [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15], [20, 21, 22], [23, 24, 25]]}


@pytest.mark.parametrize('remainder, length', [('carry', 7), ('drop', 6)])
def test_batches_of_three_of_seven(remainder, length):
    epochs = Epochs(7, 3, remainder)
    assert epochs.length == length and epochs_of(remainder) == EXPECTED[remainder]
    assert epochs_of(remainder, tf.constant(6), 4) == EXPECTED[remainder][2:]
    assert epochs.place_after(1, 3) == 10 and epochs.steps(1, 10) == 3 == epochs.steps(1, 9)
    assert epochs.steps(9, 1) == 0
