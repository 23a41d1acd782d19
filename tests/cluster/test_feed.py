"""Each worker's own data: its files, and its first batch again when there is no more."""

import pytest
import tensorflow.compat.v1 as tf

import towers


def worker(rank, count=2):
    return towers.Cluster('ring', ['host:%d' % (1 + each) for each in range(count)], rank=rank)


def test_every_file_is_read_by_one_worker_whatever_order_each_lists_them_in():
    files = ['b', 'd', 'a', 'e', 'c', 'a']
    assert towers.files_of_worker(files, worker(0)) == ['a', 'c', 'e']
    assert towers.files_of_worker(files[::-1], worker(1)) == ['b', 'd']
    with pytest.raises(towers.errors.InputError, match='2 files for 3 workers leave one of them'):
        towers.files_of_worker(['a', 'b', 'a'], worker(0, 3))


def test_after_the_last_batch_comes_the_first_one_which_counts_nothing():
    feed = towers.until_all_end(tf.data.Dataset.range(5).batch(2))
    with tf.Session() as session:
        session.run(feed.initializer)
        found = [session.run([feed.inputs, feed.active]) for _ in range(6)]
    assert [(batch.tolist(), active) for batch, active in found] == [
        ([0, 1], 1.), ([2, 3], 1.), ([4], 1.)] + [([0, 1], 0.)] * 3
