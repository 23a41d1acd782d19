"""The last batch of an epoch, counted by hand; and a start at any place."""

import pytest
import tensorflow.compat.v1 as tf

from datasets.epochs import Epochs
from image_files import batches
from towers.errors import InvalidArgumentError


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


def test_arguments():
    with pytest.raises(InvalidArgumentError, match='leaves nothing of 7 examples'):
        Epochs(7, 8, 'drop')
    with pytest.raises(InvalidArgumentError, match="remainder='all'"):
        Epochs(7, 8, 'all')
