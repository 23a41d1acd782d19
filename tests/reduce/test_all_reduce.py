"""towers.all_reduce against sums by hand, what it puts into the graph and where, and that no tower
ever waits for one that cannot come."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import compat
from towers.reduce import all_reduce as module
from towers import session_config
from towers.reduce.all_reduce import all_reduce, check_all_reduce
from towers.errors import DeviceError, GradientError

RUNNABLE = ('copy', 'collective')


def cpus(count):
    return tuple('/device:CPU:%d' % index for index in range(count))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)],
                ids=['resource', 'reference'])
def resource(request, graph):
    tf.get_variable_scope().set_use_resource(request.param)
    return request.param


def variable(name, shape=(), dtype=tf.float32):
    with tf.device('/cpu:0'):
        return tf.get_variable(name, shape, dtype, initializer=tf.zeros_initializer())


def dense(values, tower, dtype=tf.float32):
    with tf.device('/cpu:%d' % tower):
        return tf.constant(values, dtype)


def rows(values, indices, tower, shape=None):
    with tf.device('/cpu:%d' % tower):
        return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices),
                                None if shape is None else tf.constant(shape))


def run(fetches, num_towers, feed=None, **config):
    with tf.Session(config=session_config(num_towers, **config)) as session:
        session.run(tf.global_variables_initializer())
        return run_in(session, fetches, feed)


def run_in(session, fetches, feed=None):
    """A run that fails after a minute instead of hanging."""
    return session.run(fetches, feed, options=tf.RunOptions(timeout_in_ms=60000))


def reductions():
    return [op for op in tf.get_default_graph().get_operations()
            if op.type in ('AddN', 'CollectiveReduce')]


# ---- sums ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('method', RUNNABLE)
def test_sums_by_hand_on_every_tower(method, resource):
    a, b = variable('a', [2]), variable('b', [])
    reduced = all_reduce(method, [
        [(dense([1., 2.], 0), a), (dense(3., 0), b)],
        [(dense(30., 1), b), (dense([10., 20.], 1), a)],  # in another order
        [(dense([100., 200.], 2), a), (dense(300., 2), b)]], [], cpus(3))
    assert [v for _, v in reduced.gradients] == [a, b]
    values = run([reduced.gradients[0][0], reduced.gradients[1][0], reduced.on_towers], 3)
    assert values[0].tolist() == [111., 222.] and values[1] == 333.
    assert [each.tolist() for each in values[2]['a']] == [[111., 222.]] * 3
    assert values[2]['b'] == [333.] * 3
    for gradient, v in reduced.gradients:
        assert reduced.on_towers[v.op.name][0] is gradient
        assert len(reduced.on_towers[v.op.name]) == 3
        assert gradient.shape == v.shape and gradient.dtype == tf.float32


@pytest.mark.parametrize('method', RUNNABLE)
def test_towers_without_a_gradient_and_a_gradient_of_no_tower(method):
    a, b, c, d = [variable(name, [2]) for name in 'abcd']
    reduced = all_reduce(method, [
        [(dense([1., 1.], 0), a), (None, b), (None, c), (None, d)],
        [(None, a), (dense([2., 3.], 1), b), (None, d)]],
        [[(dense([10., 10.], 0), a), (dense([20., 20.], 0), b), (dense([30., 30.], 0), c),
          (None, d)]], cpus(2))
    assert [v.op.name for _, v in reduced.gradients] == ['a', 'b', 'c']  # d has none at all
    on_towers = run(reduced.on_towers, 2)
    for name, expected in (('a', [11., 11.]), ('b', [22., 23.]), ('c', [30., 30.])):
        assert [each.tolist() for each in on_towers[name]] == [expected] * 2


@pytest.mark.parametrize('method', RUNNABLE)
def test_sparse_gradients_stay_sparse_and_mixed_ones_become_dense(method, resource):
    table, mixed = variable('table', [4, 2]), variable('mixed', [3, 1])
    reduced = all_reduce(method, [
        [(rows([[1., 2.], [3., 4.], [5., 6.]], [3, 0, 3], 0), table),
         (rows([[1.], [1.]], [2, 2], 0), mixed)],
        [(rows([[10., 20.]], [3], 1), table), (dense([[10.], [20.], [30.]], 1), mixed)]],
        [], cpus(2))
    (sparse, _), (total, _) = reduced.gradients
    assert isinstance(sparse, tf.IndexedSlices) and isinstance(total, tf.Tensor)
    assert all(each is sparse for each in reduced.on_towers['table'])
    values, indices, totals = run([sparse.values, sparse.indices, reduced.on_towers['mixed']], 2)
    assert indices.tolist() == [3, 0, 3, 3]
    assert values.tolist() == [[1., 2.], [3., 4.], [5., 6.], [10., 20.]]
    assert [each.tolist() for each in totals] == [[[10.], [20.], [32.]]] * 2
    assert len([op for op in reductions() if op.type == 'CollectiveReduce']) == (
        2 if method == 'collective' else 0)  # of the mixed one


# ---- what is in the graph, and where ------------------------------------------------------------

def attributes(op):
    return {name: op.get_attr(name) for name in ('group_key', 'instance_key', 'group_size')}


def test_collective_reduces_on_each_tower_in_one_order(resource):
    small = [variable('small%d' % i, [3]) for i in range(3)]
    large = [variable('large%d' % i, [module.BUFFER_BYTES // 4 + 1]) for i in range(2)]
    variables = [small[0], large[0], small[1], large[1], small[2]]
    all_reduce('collective', [[(dense(np.zeros(v.shape, 'f'), k), v) for v in variables]
                              for k in range(3)], [], cpus(3))
    made = reductions()
    # The last variable opens the buffer of all small ones; each large one is reduced by itself.
    assert [op.inputs[0].shape.as_list() for op in made[::3]] == [
        [9]] + [[module.BUFFER_BYTES // 4 + 1]] * 2
    assert made[0].inputs[0].op.type == 'ConcatV2' and made[3].inputs[0].op.type == 'Const'
    assert [op.device for op in made] == list(cpus(3)) * 3
    assert [attributes(op) for op in made] == [
        dict(group_key=1, instance_key=number // 3 + 1, group_size=3) for number in range(9)]
    for tower in range(3):  # one after the other on each tower
        for before, after in zip(made[tower::3], made[tower + 3::3]):
            assert list(after.control_inputs) == [before]
    assert all(op.inputs[0].op.device == op.device for op in made)


def test_buffers_are_filled_up_and_hold_one_dtype(monkeypatch):
    monkeypatch.setattr(module, 'BUFFER_BYTES', 40)
    variables = [variable('a', [5]), variable('b', [2], tf.float64), variable('c', [4]),
                 variable('d', [1], tf.float64), variable('e', [2]), variable('f', [11]),
                 variable('g', [4])]
    reduced = all_reduce('collective', [
        [(dense(np.full(v.shape, 10. ** k), k, v.dtype.base_dtype), v) for v in variables]
        for k in range(2)], [], cpus(2))
    # From the last: g and e and c, 16 + 8 + 16 bytes; f is too large; d and b; a opens another one.
    assert [(op.inputs[0].dtype.name, op.inputs[0].shape.as_list()) for op in reductions()[::2]] \
        == [('float32', [10]), ('float32', [11]), ('float64', [3]), ('float32', [5])]
    for v, gradients in zip(variables, run([reduced.on_towers[v.op.name] for v in variables], 2)):
        assert all((each == 11.).all() and each.shape == tuple(v.shape.as_list())
                   for each in gradients)


def test_two_builds_in_one_graph_use_other_keys():
    v = variable('v', [2])
    both = [all_reduce('collective', [[(dense([k + factor, 0.], k), v)] for k in range(2)], [],
                       cpus(2)) for factor in (1., 100.)]
    keys = [attributes(op) for op in reductions()]
    assert [(each['group_key'], each['instance_key']) for each in keys] == [(1, 1)] * 2 + [
        (2, 2)] * 2
    values = run([each.on_towers['v'] for each in both], 2)
    assert [[each[0] for each in of_build] for of_build in values] == [[3.] * 2, [201.] * 2]


# ---- nobody waits for ever ----------------------------------------------------------------------

def many(num_towers, num_variables, poison=None):
    """Gradients whose sums are known, behind a matmul each so that towers are out of step."""
    variables = [variable('v%d' % i, [1 + i % 7, 16]) for i in range(num_variables)]
    pairs = []
    for k in range(num_towers):
        with tf.device('/cpu:%d' % k):
            pairs.append([(tf.matmul(tf.fill(v.shape, i + 1.), tf.eye(16) * (k + 1.)), v)
                          for i, v in enumerate(variables)])
            if poison is not None and k == num_towers - 1:
                middle = num_variables // 2
                gradient, v = pairs[-1][middle]
                pairs[-1][middle] = (tf.debugging.check_numerics(gradient / poison, 'poison'), v)
    return variables, pairs


def test_a_single_gradient_can_be_fetched():
    """A summary of one gradient, say: the other towers still have to take part."""
    _, pairs = many(4, 5)
    reduced = all_reduce('collective', pairs, [], cpus(4))
    with tf.Session(config=session_config(4)) as session:
        for gradient, v in reduced.gradients:
            number = int(v.op.name[1:])
            assert (run_in(session, gradient) == (number + 1.) * 10).all()


def test_a_failing_tower_fails_the_step_and_the_next_one_goes_well(monkeypatch):
    monkeypatch.setattr(module, 'BUFFER_BYTES', 256)
    poison = tf.placeholder_with_default(1., [])
    variables, pairs = many(3, 8, poison)
    on_towers = all_reduce('collective', pairs, [], cpus(3)).on_towers
    with tf.Session(config=session_config(3, inter_op_threads=1)) as session:
        run_in(session, on_towers)  # the towers have met; see the module's limits
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError, match='poison'):
                run_in(session, on_towers, {poison: 0.})
            values = run_in(session, on_towers)
            for i, v in enumerate(variables):
                assert all((each == (i + 1.) * 6).all() for each in values[v.op.name])


# ---- errors -------------------------------------------------------------------------------------

@pytest.mark.parametrize('devices', [
    ('/job:a/task:0/device:CPU:0', '/job:a/task:1/device:CPU:0'), cpus(1) * 2,
    ('/device:GPU:0', '/device:CPU:0')])
def test_what_cannot_be_reduced_over(devices):
    check_all_reduce('copy', devices)
    with pytest.raises(DeviceError, match="all_reduce='collective' reduces over devices of one "
                       "type on one machine, one for each tower, and the towers are on .*: use 'c"):
        check_all_reduce('collective', devices)


def test_a_dtype_that_a_ring_does_not_add(graph):
    v = variable('v', [2], tf.complex64)
    pairs = [[(dense([1., 2.], k, tf.complex64), v)] for k in range(2)]
    before = len(graph.get_operations())
    with pytest.raises(GradientError) as caught:
        all_reduce('collective', pairs, [], cpus(2))
    assert str(caught.value) == (
        "all_reduce='collective' adds gradients of float32, float64%s here, and that of 'v' is "
        "complex64: use 'copy'." % (', float16' if tf.version.VERSION > '2' else ''))
    assert len(graph.get_operations()) == before
    assert run(all_reduce('copy', pairs, [], cpus(2)).gradients[0][0], 2).tolist() == [2., 4.]
