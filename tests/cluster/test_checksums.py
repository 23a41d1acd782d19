"""Checksums of variables: the same for equal bits, in whatever pieces, and others for others."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

from towers import compat
from towers.cluster.checksums import checksum


@pytest.mark.parametrize('dtype', first_fast(2, ['float32', 'bool', 'float64', 'int64']))
def test_a_change_of_any_piece_changes_the_checksum(dtype):
    """7 rows of 3 in pieces of 2 rows, the last of 1; and rows that change places. Reference and
    resource variables have the same checksums."""
    tables = [tf.get_variable('table_%d' % use_resource, [7, 3], dtype, tf.zeros_initializer(),
                              trainable=False, use_resource=use_resource)
              for use_resource in (False, True)]
    value = tf.placeholder(dtype, [7, 3])
    assign = [tf.assign(table, value) for table in tables]
    size = tables[0].dtype.base_dtype.size
    of_tables = [[checksum(table), checksum(table, bytes_of_piece=6 * size)] for table in tables]
    given = np.zeros([7, 3], dtype)
    given[2, 1] = 1
    seen = []
    with tf.Session() as session:
        def checksums(array):
            session.run(assign, {value: array})
            of_reference, of_resource = session.run(of_tables)
            assert of_reference == of_resource
            return of_reference
        first = checksums(given)
        for row, column in [(0, 0), (1, 2), (3, 1), (6, 2)]:
            other = given.copy()
            other[row, column] = 1
            seen.append(checksums(other))
        seen.append(checksums(given[::-1]))
        assert checksums(given) == first
    for found in zip(first, *seen):  # of the whole, and in pieces
        assert len(set(found)) == 6


def test_the_pieces_of_a_table_whose_rows_are_accessed_are_read_without_a_copy():
    """`ReadVariableOp` copies it; no operation of the loop reads more than a piece."""
    table = tf.get_variable('table', [64, 4], use_resource=True)
    tf.gather(table, [1])
    before = len(tf.get_default_graph().get_operations())
    with compat.control_flow_v1():  # the loop's operations are in the graph
        checksum(table, bytes_of_piece=128)
    types = [op.type for op in tf.get_default_graph().get_operations()[before:]]
    assert 'ResourceGather' in types and 'ReadVariableOp' not in types


@pytest.mark.parametrize('rows_are_accessed', [False, True])
def test_a_checksum_leaves_later_reads_of_a_dense_variable_without_a_copy(rows_are_accessed):
    """From the first gather of rows on, TensorFlow copies a resource variable when it is read, and
    when it is updated."""
    weights = tf.get_variable('weights', [256, 64], use_resource=True)
    if rows_are_accessed:
        tf.gather(weights, [1])
    of_weights = checksum(weights, bytes_of_piece=1024)
    update = tf.assign_add(weights, tf.ones([256, 64])).op
    with tf.Session() as session:
        session.run(weights.initializer)
        session.run(of_weights)
        metadata = tf.RunMetadata()
        session.run(update, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE),
                    run_metadata=metadata)
    allocated = {node.node_name: sum(each.total_bytes for each in node.memory)
                 for device in metadata.step_stats.dev_stats for node in device.node_stats}
    assert allocated[update.name] == (256 * 64 * 4 if rows_are_accessed else 0)


def test_numbers_and_rows_that_are_larger_than_a_piece_have_a_checksum():
    values = [tf.Variable(5., name='number', use_resource=True),
              tf.Variable(np.arange(8.).reshape([2, 4]), name='rows', use_resource=True)]
    checksums = [checksum(each, bytes_of_piece=2) for each in values]
    with tf.Session() as session:
        session.run([each.initializer for each in values])
        found = session.run(checksums)
        session.run(values[1].assign([[0., 1., 2., 3.], [4., 5., 6., 8.]]))
        number, rows = session.run(checksums)
    assert number == found[0] and rows != found[1]
