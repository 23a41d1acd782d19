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


def test_the_pieces_of_a_table_that_rows_were_added_to_are_read_without_a_copy():
    """`ReadVariableOp` copies it; no operation of the loop reads more than a piece."""
    table = tf.get_variable('table', [64, 4], use_resource=True)
    with compat.control_flow_v1():  # the loop's operations are in the graph
        checksum(table, bytes_of_piece=128)
    types = [op.type for op in tf.get_default_graph().get_operations() if 'table' not in op.name]
    assert 'ResourceGather' in types and 'ReadVariableOp' not in types


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
