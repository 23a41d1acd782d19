"""Cut variables: the same rows on any number of servers, or an error."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.partitioned_embeddings import check_lookups
from towers.errors import ClusterError

CLUSTER = towers.Cluster('ps', ['a:1'], ['b:1', 'c:1'], partition_bytes=16)


def look_up(strategy, partitioner, ids):
    table = tf.get_variable('net/table', [10, 4], partitioner=partitioner)
    assert partitioner is None or len(list(table)) == 2
    return tf.nn.embedding_lookup(table, ids, partition_strategy=strategy)


def test_rows_by_remainders_are_refused():
    look_up('mod', CLUSTER.partitioner(), tf.constant([[3, 4], [9, 0]]))
    with pytest.raises(ClusterError, match="'net/table' is cut into 2 parts, and .* by "
                                           "partition_strategy='mod', the default"):
        check_lookups()


def test_rows_in_order_and_tables_that_are_cut_otherwise_are_not():
    look_up('div', CLUSTER.partitioner(), tf.constant([3, 4]))
    check_lookups()
    with tf.Graph().as_default():  # the program's own number of parts, on any cluster
        look_up('mod', tf.fixed_size_partitioner(2), tf.constant([3, 4]))
        check_lookups()


def test_small_variables_stay_whole():
    small = tf.get_variable('small', [2, 2], partitioner=CLUSTER.partitioner())
    tf.nn.embedding_lookup(small, [1])
    check_lookups()
    assert len(list(small)) == 1
