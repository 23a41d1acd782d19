"""towers.combine_gradients against numbers worked out by hand, and what it puts into the graph."""

import pytest
import tensorflow.compat.v1 as tf

from towers import combine_gradients, session_config
from towers.errors import GradientError
from towers.reduce.combination import all_reduce

CPUS = ['/cpu:1', '/cpu:2', '/cpu:3']  # the towers'; variables are on /cpu:0


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)],
                ids=['resource', 'reference'], autouse=True)
def resource(request, graph):
    """Every test runs with resource variables, and the slow ones with reference variables."""
    tf.get_variable_scope().set_use_resource(request.param)
    return request.param


def variable(name, shape, dtype=tf.float32, device='/cpu:0'):
    with tf.device(device):
        return tf.get_variable(name, shape, dtype, initializer=tf.zeros_initializer())


def dense(values, tower=0, dtype=tf.float32):
    with tf.device(CPUS[tower]):
        return tf.constant(values, dtype)


def rows(values, indices, shape=None, tower=0, index_dtype=tf.int32):
    with tf.device(CPUS[tower]):
        return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices, index_dtype),
                                None if shape is None else tf.constant(shape, index_dtype))


def run(fetches):
    with tf.Session(config=session_config(4)) as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches)


def operations_of(call):
    """(what `call` returns, the operations that it made)."""
    graph = tf.get_default_graph()
    before = len(graph.get_operations())
    result = call()
    return result, graph.get_operations()[before:]


def test_dense_gradients_are_added_where_the_variable_lives():
    v = variable('v', [2], device='/cpu:3')
    gradients = [[(dense([1., 2.], 0), v)], [(dense([10., 20.], 1), v)],
                 [(dense([100., 200.], 2), v)]]
    (pair,), made = operations_of(lambda: combine_gradients(gradients))
    assert pair[1] is v
    assert run(pair[0]).tolist() == [111., 222.]
    # One AddN of the three: no Pack, which would copy each of them once more, and no Sum.
    assert [op.type for op in made] == ['AddN']
    assert [tensor.device for tensor in made[0].inputs] == [
        '/device:CPU:1', '/device:CPU:2', '/device:CPU:3']
    assert pair[0].device == v.device == '/device:CPU:3'


def test_alignment_is_by_variable_and_not_by_place():
    a, b, c = [variable(name, []) for name in 'abc']
    combined = combine_gradients([
        [(dense(1.), a), (dense(2.), b), (dense(3.), c)],
        [(dense(30., 1), c), (dense(10., 1), a)],  # shorter, in another order
        [(None, a), (dense(200., 2), b), (None, c)]])
    assert [v.op.name for _, v in combined] == ['a', 'b', 'c']
    assert run([gradient for gradient, _ in combined]) == [11., 202., 33.]


def test_a_gradient_of_one_tower_only_is_used_as_it_is():
    a = variable('a', [])
    only = dense(7., 1)
    (pair,), made = operations_of(lambda: combine_gradients([[(None, a)], [(only, a)], []]))
    assert pair[0] is only and not made


@pytest.mark.parametrize('shape', [None, [4, 2]])
def test_sparse_gradients_stay_sparse_with_their_rows(shape):
    table = variable('table', [4, 2], device='/cpu:2')
    gradients = [[(rows([[1., 2.], [3., 4.], [5., 6.]], [3, 0, 3], shape, 0), table)],
                 [(rows([[10., 20.]], [3], shape, 1), table)]]
    ((gradient, _),), made = operations_of(lambda: combine_gradients(gradients))
    assert isinstance(gradient, tf.IndexedSlices)
    values, indices = run([gradient.values, gradient.indices])
    assert indices.tolist() == [3, 0, 3, 3]
    assert values.tolist() == [[1., 2.], [3., 4.], [5., 6.], [10., 20.]]
    assert gradient.values.device == gradient.indices.device == '/device:CPU:2'
    assert sorted(op.type for op in made) == ['ConcatV2'] * 2 + ['Const'] * 2  # two axes
    assert (gradient.dense_shape is None) == (shape is None)


def test_int32_and_int64_rows_join_as_int64():
    table = variable('table', [3, 1])
    (gradient, _), = combine_gradients([
        [(rows([[1.]], [2], None, 0, tf.int32), table)],
        [(rows([[5.]], [1], None, 1, tf.int64), table)]])
    assert gradient.indices.dtype == tf.int64
    values, indices = run([gradient.values, gradient.indices])
    assert values.tolist() == [[1.], [5.]] and indices.tolist() == [2, 1]


@pytest.mark.parametrize('shape', [None, [3, 2]])
@pytest.mark.parametrize('sparse_tower', [0, 1])
def test_sparse_and_dense_together_are_dense(shape, sparse_tower):
    table = variable('table', [3, 2])
    gradients = [dense([[1., 2.], [3., 4.], [5., 6.]], 1)]
    gradients.insert(sparse_tower, rows([[10., 20.], [100., 200.]], [2, 2], shape, 0))
    (gradient, _), = combine_gradients([[(each, table)] for each in gradients])
    assert isinstance(gradient, tf.Tensor) and gradient.device == '/device:CPU:0'
    assert run(gradient).tolist() == [[1., 2.], [3., 4.], [115., 226.]]


def test_the_hand_written_recipe_around_it():
    """A legacy tower loop that took combine_gradients alone; the numbers are by hand."""
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    batch = tf.constant([[1.], [2.], [3.], [5.]])
    with tf.device('/cpu:0'):
        shards = tf.split(batch, 2)
    gradients = []
    for tower in range(2):
        with tf.device(CPUS[tower]), tf.variable_scope('model', reuse=tower > 0):
            with tf.device('/cpu:0'):
                w = tf.get_variable('w', [], initializer=tf.ones_initializer())
            gradients.append(optimizer.compute_gradients(tf.reduce_mean(w * shards[tower]), [w]))
    step = optimizer.apply_gradients(combine_gradients(gradients))
    with tf.Session(config=session_config(4)) as session:
        session.run(tf.global_variables_initializer())
        session.run(step)
        assert session.run(w) == 1. - 0.5 * (1.5 + 4.)  # the sum of the shards' means


def foreign(name):
    with tf.Graph().as_default():
        return variable(name, [])


OF_V = ('expected a tensor or an IndexedSlices of this graph, of shape () and dtype float32, or '
        'None.')


@pytest.mark.parametrize('make, text', [
    (lambda v: [[(None, v)], [(None, v)]], 'none of the 1 variables has a gradient in any tower: '
     'the loss does not depend on them. Variables: v.'),
    (lambda v: [[(dense(1.), v)], [(dense(1.), v), (dense(2.), v)]],
     "variable 'v' occurs twice among the gradients of tower 1: sum them, or leave one out."),
    (lambda v: [[(dense(1.), v)], [(dense(1., 1, tf.float64), v)]], OF_V),
    (lambda v: [[(dense(1.), v)], [(dense([1., 2., 3.]), v)]], OF_V),
    (lambda v: [[(dense(1.), foreign('v'))]], OF_V),
    (lambda v: [[(dense(1.), v)], [(1., v)]], "the gradient of 'v' in tower 1 is 1.0: " + OF_V),
    (lambda v: [3], 'the gradients of tower 0 are 3: expected a list of (gradient, variable) '
     'pairs.'),
    (lambda v: [[(dense(1.), v)], [(dense(1.), v, 1)]], ': expected a list of (gradient, variable) '
     'pairs.'),
    (lambda v: [[], []], 'no tower has a (gradient, variable) pair, all 2 lists are empty: pass '
     'for each tower what its optimizer.compute_gradients(loss) returned.'),
    (lambda v: [[(dense(1.), variable('tower_%d/w' % k, [])), (None, v)] for k in range(2)],
     "tower 0 has gradients of 'tower_0/w' and tower 1 of 'tower_1/w', and no variable has one in "
     'both: each tower trains a model of its own. Make the variables with tf.get_variable under '
     'the same names in every tower, with reuse from the second one on, or let build_towers share '
     'them.')])
def test_what_cannot_be_combined(make, text):
    gradients = make(variable('v', []))
    with pytest.raises(GradientError) as caught:
        combine_gradients(gradients)
    assert str(caught.value).endswith(text)
    assert not [op for op in tf.get_default_graph().get_operations() if op.type == 'AddN']


def test_variables_of_some_towers_only_are_no_mistake():
    shared, one, other = (variable(name, [2]) for name in ('shared', 'expert_0/w', 'expert_1/w'))
    gradient = dense([1., 2.])
    # A shared variable, and experts of the towers' own.
    combined = combine_gradients([[(gradient, shared), (gradient, one)],
                                  [(gradient, shared), (gradient, other)]])
    assert [v for _, v in combined] == [shared, one, other]
    # One tower alone has gradients.
    assert combine_gradients([[(None, one)], [(gradient, other)]])[0][1] is other


# ---- sums on every tower, for replicated variables -----------------------------------------------

def test_sums_by_hand_on_every_tower():
    a, b, table, unused = [variable(name, [2]) for name in 'ab'] + [
        variable('table', [4, 2]), variable('unused', [])]
    reduced = all_reduce(
        [[(dense([1., 2.], 0), a), (None, b), (rows([[1., 2.], [3., 4.]], [3, 3]), table)],
         [(dense([2., 3.], 1), b), (dense([10., 20.], 1), a), (None, unused),
          (rows([[10., 20.]], [0], tower=1), table)]],
        [[(dense([100., 100.], 0), a)]], CPUS[:2])  # of no tower
    assert [v for _, v in reduced.gradients] == [a, b, table]
    assert [getattr(g, 'values', g).device for g, _ in reduced.gradients] == [
        '/device:CPU:1', '/device:CPU:2', '/device:CPU:1']  # the one that adds the fewest bytes
    for gradient, v in reduced.gradients:
        assert all(each is gradient for each in reduced.on_towers[v.op.name])
        assert len(reduced.on_towers[v.op.name]) == 2
    of_a, of_b, of_table = run([gradient for gradient, _ in reduced.gradients])
    assert of_a.tolist() == [111., 122.] and of_b.tolist() == [2., 3.]
    assert of_table.indices.tolist() == [3, 3, 0]  # which stay sparse
