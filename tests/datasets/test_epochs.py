"""The last batch of an epoch, counted by hand; and a start at any place."""

import numpy as np
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
REMAINDERS = ['weight'] + [
    pytest.param(name, marks=pytest.mark.slow) for name in ('carry', 'drop', 'pad')]
LENGTHS = {'carry': 7, 'drop': 6, 'pad': 9, 'weight': 7}


@pytest.mark.parametrize('remainder', sorted(EXPECTED))
def test_batches_of_three_of_seven(remainder):
    assert Epochs(7, 3, remainder).length == LENGTHS[remainder]
    assert epochs_of(remainder) == EXPECTED[remainder]


@pytest.mark.parametrize('remainder', REMAINDERS)
def test_a_start_anywhere_goes_on(remainder):
    epochs, place = Epochs(7, 3, remainder), 0
    for step in range(5):
        assert epochs_of(remainder, tf.constant(place), 1) == [EXPECTED[remainder][step]]
        assert epochs.steps(0, place) == step and epochs.place_after(0, step) == place
        place += len(EXPECTED[remainder][step])
    assert epochs.place_after(epochs.place_after(0, 2), 3) == place
    assert epochs.steps(epochs.place_after(0, 2), place) == 3


@pytest.mark.parametrize('remainder', REMAINDERS)
@pytest.mark.parametrize('counts, sizes', [((4,), ((3, 1), (2, 2)))])
def test_steps_are_those_of_the_real_batches_from_any_place(remainder, counts, sizes):
    """A run that resumes with another batch size begins at places that are no multiple of it."""
    cases = [(n, size, workers) for n in counts for size, workers in sizes if not (
        remainder == 'drop' and n < size or remainder == 'weight' and workers > 1)]
    first, made = tf.placeholder(tf.int64, []), []
    for n, size, workers in cases:
        made.append([tf.data.make_initializable_iterator(
            Epochs(n, size, remainder, (worker, workers)).batches(
                lambda epoch, n=n: 10 * epoch + tf.range(n, dtype=tf.int64), first))
                     for worker in range(workers)])
    following = [[iterator.get_next() for iterator in iterators] for iterators in made]
    with tf.Session() as session:
        for (n, size, _), iterators, nexts in zip(cases, made, following):
            epochs, length = Epochs(n, size, remainder), Epochs(n, size, remainder).length
            for begin in range(2 * length):
                session.run([each.initializer for each in iterators], {first: begin})
                places = [begin]
                while places[-1] < 2 * length + 1:
                    given = np.concatenate(session.run(nexts)).tolist()
                    assert given == [10 * (place // length) + place % length % n for place in
                                     range(places[-1], places[-1] + len(given))]
                    places.append(places[-1] + len(given))
                assert places == [epochs.place_after(begin, step) for step in range(len(places))]
                for end in range(2 * length + 2):
                    assert epochs.steps(begin, end) == sum(place < end for place in places), (
                        n, size, begin, end)


def test_arguments():
    with pytest.raises(InvalidArgumentError, match='leaves nothing of 7 examples'):
        Epochs(7, 8, 'drop')
    with pytest.raises(InvalidArgumentError, match="remainder='all'"):
        Epochs(7, 8, 'all')
