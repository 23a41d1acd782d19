"""towers.graph.variable_access: what reads and what writes a variable."""

import pytest
import tensorflow.compat.v1 as tf

from sample_models import switched
from towers.graph import graph_walk
from towers.graph.variable_access import Writes


def made_by(function):
    with graph_walk.Recording(tf.get_default_graph()) as made:
        function()
    return made.operations


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
