"""towers.graph.variable_writes: which operations write a variable, on every way to get at it."""

import pytest
import tensorflow.compat.v1 as tf

from sample_models import kind_of_variables, of_kinds, switched  # noqa: F401
from towers.graph.graph_walk import Recording
from towers.graph.variable_writes import Writes, passed_on


def kinds(build, resource=True):
    """The types of the operations that `build(variable)` makes and that write the variable."""
    with tf.Graph().as_default() as graph:
        variable = tf.get_variable('v', [], tf.int32, tf.zeros_initializer(), use_resource=resource)
        with Recording(graph) as made:
            build(variable)
        names = {op.name for op in made.operations}
        return sorted(op.type for op in Writes(graph).to(variable) if op.name in names)


def loop(variable, body):
    return tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])


READS = {
    'value': lambda v: v + 1,
    'read_value': lambda v: v.read_value(),
    'assigned elsewhere': lambda v: tf.assign(
        tf.get_variable('w', [], tf.int32, tf.zeros_initializer()), v),
    'is_initialized': tf.is_variable_initialized,
    'cond': lambda v: tf.cond(v > 3, lambda: v + 1, lambda: v - 1),
    'cond in a cond': lambda v: tf.cond(v > 3, lambda: tf.cond(v > 4, lambda: v + 1, lambda: v),
                                        lambda: v - 1),
    'case': lambda v: tf.case([(v > 3, lambda: v + 1), (v > 2, lambda: v + 2)],
                              default=lambda: v + 3),
    'while': lambda v: loop(v, lambda i: i + v),
    'cond in a while': lambda v: loop(v, lambda i: tf.cond(v > 3, lambda: i + v, lambda: i + 1)),
}
WRITES = {
    'assign': lambda v: v.assign(3),
    'assign_add': lambda v: tf.assign_add(v, 1),
    'count_up_to': lambda v: tf.count_up_to(v, 3),
    'cond': lambda v: tf.cond(tf.constant(True), lambda: tf.assign_add(v, 1) + 0, lambda: 0),
    'cond in a cond': lambda v: tf.cond(
        v > 3, lambda: tf.cond(v > 4, lambda: tf.assign_sub(v, 1) + 0, lambda: v), lambda: v - 1),
    'while': lambda v: loop(v, lambda i: tf.assign_add(v, 1) + i),
    'cond in a while': lambda v: loop(v, lambda i: tf.cond(
        v > 3, lambda: tf.assign_add(v, 1) + 0, lambda: i + 1)),
}
FLOWS = [(False, False), (False, True), (True, True)]  # control flow v2 takes no reference variable


@pytest.mark.parametrize('v2, resource', FLOWS, ids=['v1-reference', 'v1-resource', 'v2-resource'])
@pytest.mark.parametrize('build', READS.values(), ids=list(READS))
def test_what_reads(build, v2, resource):
    with switched('control_flow_v2', v2):
        assert kinds(build, resource) == []


@pytest.mark.parametrize('v2, resource', FLOWS, ids=['v1-reference', 'v1-resource', 'v2-resource'])
@pytest.mark.parametrize('build', WRITES.values(), ids=list(WRITES))
def test_what_writes(build, v2, resource):
    with switched('control_flow_v2', v2):
        assert len(kinds(build, resource)) == 1


@of_kinds('reference', 'resource')
def test_the_initial_value_is_written(graph, kind_of_variables):  # noqa: F811
    variable = tf.get_variable('v', [], tf.int32, tf.zeros_initializer())
    assert [op.name for op in Writes(graph).to(variable)] == [variable.initializer.name]


# ---- by operation: which variables it writes

def written_by(function):
    """{name of a variable: the types of the operations that write it}"""
    finder, found = Writes(tf.get_default_graph()), {}
    with Recording(tf.get_default_graph()) as made:
        function()
    for op in made.operations:
        for name in finder.of(op):
            found.setdefault(name, []).append(op.type)
    return found


@pytest.fixture
def v(kind_of_variables):  # noqa: F811
    return tf.get_variable('v', [3], initializer=tf.ones_initializer())


@of_kinds('reference', 'resource')
@pytest.mark.parametrize('write', [
    lambda v: tf.assign(v, [1., 2., 3.]), lambda v: tf.assign_add(v, [1., 2., 3.]),
    lambda v: tf.assign_sub(v, [1., 2., 3.]), lambda v: tf.scatter_update(v, [0], [2.]),
    lambda v: tf.scatter_nd_update(v, [[0]], [2.]), lambda v: v[:2].assign([1., 2.]),
    lambda v: tf.train.GradientDescentOptimizer(1.).apply_gradients([(tf.ones([3]), v)])],
    ids=['assign', 'add', 'sub', 'scatter', 'scatter_nd', 'slice', 'optimizer'])
def test_the_variable_that_is_written(v, write):
    assert list(written_by(lambda: write(v))) == ['v']
    assert len(written_by(lambda: write(v))['v']) == 1


@of_kinds('reference', 'resource')
def test_the_variable_that_is_read(v):
    def read():
        tf.identity(v + 1.), v.read_value(), tf.gather(v, [0]), tf.shape(v)
        tf.is_variable_initialized(v), tf.nn.embedding_lookup(v, [1]), v.value()
        tf.gradients(tf.reduce_sum(tf.square(v)), [v])
        tf.while_loop(lambda i: i < 3., lambda i: i + tf.reduce_sum(v), [0.])
    assert written_by(read) == {}


@of_kinds('reference', 'resource')
@pytest.mark.parametrize('flow', ['v1', 'v2'])
def test_in_branches_and_loops(v, flow, kind_of_variables):  # noqa: F811
    if flow == 'v2' and (tf.version.VERSION < '2' or kind_of_variables == 'reference'):
        pytest.skip('control flow v2 is for resource variables')
    other = tf.get_variable('other', [], initializer=tf.ones_initializer())
    with switched('control_flow_v2', flow == 'v2'):
        def branch():
            def add():
                with tf.control_dependencies([tf.assign_add(v, [1., 1., 1.])]):
                    return tf.identity(other)
            tf.cond(tf.reduce_sum(other) > 0., add, lambda: other * 1.)

        def loop():
            def body(i):
                with tf.control_dependencies([tf.assign_add(v, [1., 1., 1.])]):
                    return i + other
            tf.while_loop(lambda i: i < 3., body, [0.])
        for function in (branch, loop):
            assert list(written_by(function)) == ['v']


def test_a_reference_that_is_taken_for_its_value():
    with tf.Graph().as_default() as graph:
        variable = tf.get_variable('v', [], initializer=tf.zeros_initializer(), use_resource=False)
        read = tf.raw_ops.Neg(x=variable.op.outputs[0])  # without a read of its own between
        written = tf.raw_ops.AssignAdd(ref=variable.op.outputs[0], value=read)
        assert Writes(graph).of(read.op) == []
        assert Writes(graph).of(written.op) == ['v']


def test_handles_are_followed_whatever_the_order_of_nodes():
    nodes = [tf.NodeDef(name='c', op='Identity', input=['b']),
             tf.NodeDef(name='b', op='Identity', input=['a:output:0']),
             tf.NodeDef(name='a', op='Identity', input=['handle']),
             tf.NodeDef(name='value', op='ReadVariableOp', input=['a']),
             tf.NodeDef(name='other', op='Identity', input=['value', '^a'])]
    assert passed_on(nodes, {'handle'}) == {'handle', 'a', 'b', 'c'}
