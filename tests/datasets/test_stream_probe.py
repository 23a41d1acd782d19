"""Which training examples are bad, and from which place of the stream on: the pipeline says so."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
from datasets.bad_examples import Change
from datasets.stream_probe import StreamOrder
from image_files import batches, jpeg, write_folder

ENDS_BADLY = jpeg(77, 40, 40)[:-2] + b'\xff\xc4\0\0\xff\xd9'  # a wrong table after the last block
SEED, COUNT, LONG = 2, 3, 60  # the crops of this seed that come to the end: at places 9 and 51


def folder_of(folder, bad=ENDS_BADLY, **options):
    """Three images; the second one is bad in its last bytes, which few crops come to."""
    write_folder(folder, {'%s/%s/%d.jpg' % (split, 'abc'[number], number):
                          bad if (split, number) == ('train', 1) else jpeg(90 * number, 40, 40)
                          for split in ('train', 'test') for number in range(COUNT)})
    return datasets.get_dataset('folder', str(folder), augment='crop', **options)


def trained(dataset, count, size=1):
    found = batches(dataset.train_batches(batch_size=size, seed=SEED, image_size=8), count // size)
    return [np.concatenate(parts) for parts in zip(*found)]


@pytest.mark.slow
def test_bad_is_where_the_pipeline_fails_whatever_the_batches(tmp_path):
    found = folder_of(tmp_path, skip_bad=5)
    before, _ = trained(found, 9)
    with tf.Graph().as_default(), pytest.raises(tf.errors.InvalidArgumentError):
        trained(found, 10)
    for step in (1, 4, 6, LONG):
        found = folder_of(tmp_path, skip_bad=5)
        probe = found.stream_probe(SEED, COUNT, 8)
        assert sum(probe.find_bad(place, place + step) for place in range(0, LONG, step)) == 1
        assert [bad[:3] for bad in found.skipped.examples] == [('train', 1, 9)]
        assert 'b/1.jpg is a damaged JPEG: ' in found.skipped.describe()
    # It is left out from its place on, and from no earlier one.
    images, labels = trained(found, LONG, 4)
    np.testing.assert_array_equal(images[:9], before)
    numbers = batches(datasets.pipeline.example_order(COUNT, SEED).batch(LONG), 1)[0]
    assert numbers[9] == 1 and 1 in numbers[:9]
    assert labels.tolist() == numbers[:9].tolist() + [2 if number == 1 else number
                                                      for number in numbers[9:]]


@pytest.mark.slow
@pytest.mark.parametrize('remainder, length', [('pad', 6)])
def test_places_are_those_of_the_pipeline(tmp_path, remainder, length):
    write_folder(tmp_path, {'%s/a/%d.jpg' % (split, number): jpeg(50 * number)
                            for split in ('train', 'test') for number in range(5)})
    found = datasets.get_dataset('folder', str(tmp_path), augment='crop', skip_bad=1)
    order = StreamOrder(5, SEED, length)
    elements = [order.at(place) for place in range(3 * length)]
    seen = []
    found.stand_in = lambda split, number, place, known: seen.append((place, number)) or number
    batches(found.train_batches(batch_size=2, seed=SEED, image_size=8, remainder=remainder),
            3 * length // 2)
    known = {(each.place, each.number) for each in elements}
    # It reads ahead, in any order.
    assert known <= set(seen)
    assert len(known) == 3 * min(length, 5)
    if remainder == 'pad':  # the second time in an epoch it has its first place
        assert elements[5] == elements[0] and elements[11] == elements[6]


@pytest.mark.slow
def test_what_has_become_of_a_bad_example(tmp_path):
    found = folder_of(tmp_path, skip_bad=5)
    probe = found.stream_probe(SEED, COUNT, 8)
    probe.find_bad(0, LONG)
    bad, = found.skipped.examples
    assert bad.name == 'b/1.jpg'
    found.skipped.examples = []
    assert probe.look_again(bad) == bad
    other = bad._replace(position=0)
    assert probe.look_again(other) == other  # of another seed: some part is bad
    for other in (bad._replace(name='c/1.jpg'), bad._replace(number=3), bad._replace(number=-1)):
        assert probe.look_again(other) == Change(False, '%s: that is no longer example %d' % (
            bad.text, other.number))
    path = tmp_path / 'train/b/1.jpg'
    path.write_bytes(b'')  # bad in another way: the text is that of now, as is the name
    assert probe.look_again(bad._replace(name='')) == bad._replace(text='%s is empty' % path)
    path.write_bytes(jpeg(9))
    assert probe.look_again(bad) == Change(True, '%s is good now' % path)


@pytest.mark.slow
def test_a_folder_of_data_that_was_moved_is_the_same_data(tmp_path):
    found = folder_of(tmp_path / 'here', skip_bad=5)
    found.stream_probe(SEED, COUNT, 8).find_bad(0, LONG)
    (tmp_path / 'here').rename(tmp_path / 'there')
    moved = datasets.get_dataset('folder', str(tmp_path / 'there'), augment='crop', skip_bad=5)
    bad, = found.skipped.examples
    again = moved.stream_probe(SEED, COUNT, 8).look_again(bad)
    assert bad.text.startswith('%s/here/train/b/1.jpg is a damaged JPEG: ' % tmp_path)
    assert again == bad._replace(text=bad.text.replace('/here/', '/there/'))
