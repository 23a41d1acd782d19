"""Each worker's own data: its files, and its first batch again when there is no more."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from one_process import addresses


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


def rates_of_steps(dataset):
    """What a ring of one trains on, in a session that nobody tells to begin the data."""
    feed = towers.until_all_end(dataset)
    cluster = towers.Cluster('ring', addresses(1), active=feed.active)
    built = towers.build_towers(
        lambda numbers: tf.reduce_mean(tf.cast(numbers, tf.float32)) * tf.get_variable('w', []),
        feed.inputs, tf.train.GradientDescentOptimizer(1.), 1, 'mean', remainder='weight',
        cluster=cluster)
    seen = []
    with towers.join(cluster, built) as member, member.session() as session:
        while not session.should_stop():
            seen.append(float(session.run([built.gradients[0][0], built.train_op])[0]))
    return seen


def test_a_monitored_session_begins_the_data():
    assert rates_of_steps(tf.data.Dataset.range(5).batch(2)) == [.5, 2.5, 4.]


def test_a_worker_without_any_data_is_told_so():
    with pytest.raises(towers.errors.InputError, match='this worker gave to until_all_end has no '
                                                       'batch: expected one at least'):
        rates_of_steps(tf.data.Dataset.range(1).batch(2, drop_remainder=True))


def test_a_batch_without_an_example_is_an_error_of_its_own(graph):
    numbers = tf.placeholder_with_default(tf.zeros([0]), [None])
    cluster = towers.Cluster('ring', addresses(1))
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.get_variable('w', []), numbers,
        tf.train.GradientDescentOptimizer(1.), 1, 'mean', remainder='weight', cluster=cluster)
    with pytest.raises(towers.errors.InputError, match='^a batch for 1 towers needs at least 1 '
                       'examples and has 0, on this worker: .* goes on by until_all_end'):
        with towers.join(cluster, built) as member, member.session() as session:
            session.run(built.train_op)
