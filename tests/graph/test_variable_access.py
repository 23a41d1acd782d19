"""towers.graph.variable_access: what a tensor has of which variable, and what writes a variable."""

import pytest
import tensorflow.compat.v1 as tf

from sample_models import kind_of_variables, of_kinds, switched  # noqa: F401
from towers.graph import graph_walk
from towers.graph.variable_access import (Writes, read_from, takers_of_memory, variable_op,
                                          variables_read)

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
    # By the graph: an operation under a variable's name is one like any other.
    with tf.name_scope('used/'):
        operations = made_by(lambda: unused + 1.)
    assert variables_read(operations) == [unused]


@of_kinds('reference', 'resource')
def test_takers_are_all_that_memory_is_passed_on_to(v, kind_of_variables):  # noqa: F811
    flat = tf.reshape(tf.stop_gradient(v), [3, 1])
    computed = flat * 2.
    written = tf.assign_add(v, tf.ones([3]))
    after = written * 1.
    takers = takers_of_memory(v.op, lambda op: op is written.op)
    assert ({flat.op.name, computed.op.name} < takers and after.op.name not in takers
            if kind_of_variables == 'reference' else takers == set())


# ---- what writes ---------------------------------------------------------------------------------

def loop(body):
    return tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])


READS = [
    lambda v: (v + v.read_value(), v.value(), tf.shape(v), tf.is_variable_initialized(v)),
    lambda v: (tf.gather(v, [0]), tf.nn.embedding_lookup(v, [1])),
    lambda v: tf.assign(tf.get_variable('w', [3], tf.int32, tf.zeros_initializer()), v),
    lambda v: tf.cond(v[0] > 3, lambda: tf.cond(v[0] > 4, lambda: v + 1, lambda: v), lambda: v - 1),
    lambda v: loop(lambda i: tf.cond(v[0] > 3, lambda: i + v[0], lambda: i + 1))]
WRITES = [
    lambda v: tf.assign(v, [1, 2, 3]), lambda v: tf.scatter_update(v, [0], [2]),
    lambda v: tf.scatter_nd_update(v, [[0]], [2]), lambda v: v[:2].assign([1, 2]),
    lambda v: tf.train.GradientDescentOptimizer(1).apply_gradients([(tf.ones([3], tf.int32), v)]),
    lambda v: tf.cond(v[0] > 3, lambda: tf.cond(
        v[0] > 4, lambda: tf.assign_sub(v, [1, 1, 1]) + 0, lambda: v), lambda: v - 1),
    lambda v: loop(lambda i: tf.assign_add(v, [1, 1, 1])[0] + i),
    lambda v: loop(lambda i: tf.cond(
        v[0] > 3, lambda: tf.assign_add(v, [1, 1, 1])[0] + 0, lambda: i + 1))]


@pytest.mark.parametrize('v2, resource', [  # control flow v2 takes no reference variable
    (False, False), (False, True), (True, True)])
def test_what_reads_and_what_writes(v2, resource):
    with switched('control_flow_v2', v2):
        for number, use in enumerate(READS + WRITES):
            with tf.Graph().as_default() as graph:
                v = tf.get_variable('v', [3], tf.int32, tf.zeros_initializer(),
                                    use_resource=resource)
                finder = Writes(graph)
                assert finder.to(v) == [v.initializer]
                found = [finder.of(op) for op in made_by(lambda: use(v))]
                count = sum('v' in names for names in found)
                assert count == (number >= len(READS)), number
                assert len(Writes(graph).to(v)) == 1 + count


def test_a_reference_that_is_taken_for_its_value(graph):
    variable = tf.get_variable('v', [], initializer=tf.zeros_initializer(), use_resource=False)
    read = tf.raw_ops.Neg(x=variable.op.outputs[0])  # without a read of its own between
    written = tf.raw_ops.AssignAdd(ref=variable.op.outputs[0], value=read)
    assert Writes(graph).of(read.op) == []
    assert Writes(graph).of(written.op) == ['v']
