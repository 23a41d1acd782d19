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
    'drop': [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15], [20, 21, 22], [23, 24, 25]],
    'pad': [[0, 1, 2], [3, 4, 5], [6, 0, 1], [10, 11, 12], [13, 14, 15], [16, 10, 11]],
    'weight': [[0, 1, 2], [3, 4, 5], [6], [10, 11, 12], [13, 14, 15], [16]]}
REMAINDERS = ['weight', pytest.param('pad', marks=pytest.mark.slow)]
LENGTHS = {'carry': 7, 'drop': 6, 'pad': 9, 'weight': 7}


@pytest.mark.parametrize('remainder', sorted(EXPECTED))
def test_batches_of_three_of_seven(remainder):
    assert Epochs(7, 3, remainder).length == LENGTHS[remainder]
    assert epochs_of(remainder) == EXPECTED[remainder]


@pytest.mark.parametrize('remainder', REMAINDERS)
@pytest.mark.slow
def test_a_start_anywhere_goes_on(remainder):
    epochs, place = Epochs(7, 3, remainder), 0
    for step in range(5):
        assert epochs_of(remainder, tf.constant(place), 1) == [EXPECTED[remainder][step]]
        assert epochs.steps(0, place) == step and epochs.place_after(0, step) == place
        place += len(EXPECTED[remainder][step])
    assert epochs.place_after(epochs.place_after(0, 2), 3) == place
    assert epochs.steps(epochs.place_after(0, 2), place) == 3


def test_arguments():
    with pytest.raises(InvalidArgumentError, match='leaves nothing of 7 examples'):
        Epochs(7, 8, 'drop')
    with pytest.raises(InvalidArgumentError, match="remainder='all'"):
        Epochs(7, 8, 'all')
