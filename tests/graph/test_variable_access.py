"""towers.graph.variable_access: which variable a tensor is, or holds the value of."""

import pytest
import tensorflow.compat.v1 as tf

from sample_models import kind_of_variables, of_kinds  # noqa: F401
from towers.graph import graph_walk
from towers.graph.variable_access import read_from, variable_op, variables_read

ONE = tf.ones_initializer()


def made_by(function):
    with graph_walk.Recording(tf.get_default_graph()) as made:
        function()
    return made.operations


@pytest.fixture
def v(kind_of_variables):  # noqa: F811
    return tf.get_variable('v', [3], initializer=ONE)


@of_kinds('reference', 'resource')
def test_variables_and_their_values(v):
    assert variable_op(v.op.outputs[0]) is v.op
    assert variable_op(tf.convert_to_tensor(v)) is None
    assert read_from(tf.identity(v)) == [v.op] == read_from(v.op.outputs[0])
    assert read_from(v + 1.) == []
    parts = tf.get_variable('parts', [4], initializer=ONE,
                            partitioner=tf.fixed_size_partitioner(2))
    assert {op.name for op in read_from(tf.convert_to_tensor(parts))} == {
        'parts/part_0', 'parts/part_1'}


@of_kinds('reference', 'resource')
def test_variables_read(graph, kind_of_variables):  # noqa: F811
    owned = {op.name for op in made_by(lambda: [
        tf.get_variable(name, [], initializer=ONE) for name in ('used', 'unused', 'written')])}
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        used, unused, written = map(tf.get_variable, ('used', 'unused', 'written'))
    assert variables_read(graph.get_operations(), owned) == []  # initializers, reads: no use
    operations = made_by(lambda: (used * 2., tf.assign_add(written, 1.)))
    assert variables_read(operations) == [used, written]
    assert variables_read(graph.get_operations(), owned) == [used, written]
    # By the graph: an operation under a variable's name is one like any other.
    with tf.name_scope('used/'):
        operations = made_by(lambda: unused + 1.)
    assert variables_read(operations) == [unused]
