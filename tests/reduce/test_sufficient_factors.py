"""Gradients joined by their factors: against products worked out by hand, against one device, and
which gradients are left to be added up."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from towers import combine_gradients, session_config
from towers.reduce.combination import combine
from towers.reduce.sufficient_factors import products_of

pytestmark = pytest.mark.usefixtures('kind_of_variables')  # reference and resource

WIDTH = 1024  # WIDTH x WIDTH is the least size that is joined
WEIGHTS = '/cpu:3'


def weights(shape=(WIDTH, WIDTH), device=WEIGHTS, name='weights'):
    with tf.device(device):
        return tf.get_variable(name, shape, initializer=tf.zeros_initializer())


def whole_numbers(seed, shape):
    """Small ones, whose sums of products float32 holds exactly."""
    return np.random.RandomState(seed).randint(-4, 5, shape).astype(np.float32)


def product(tower, rows, transpose_a=True, transpose_b=False, m=WIDTH, n=WIDTH, device=None):
    """(a tower's gradient [m, n], its numbers)"""
    x, y = whole_numbers(tower, [rows, m]), whole_numbers(tower + 50, [rows, n])
    with tf.device('/cpu:%d' % tower if device is None else device):
        gradient = tf.matmul(tf.constant(x if transpose_a else x.T),
                             tf.constant(y.T if transpose_b else y), transpose_a, transpose_b)
    return gradient, x.T.dot(y)


def made_by(call):
    graph = tf.get_default_graph()
    before = len(graph.get_operations())
    result = call()
    return result, [op for op in graph.get_operations()[before:] if op.type != 'Const']


def run(fetches, **options):
    with tf.Session(config=session_config(4)) as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches, **options)


def is_joined(gradients, variable):
    """Whether one product is made of these; else one AddN, as of any gradients."""
    products = products_of(gradients, variable)
    combined, made = made_by(lambda: combine([[(each, variable)] for each in gradients]))
    types = [op.type for op in made]
    assert types in (['ConcatV2', 'ConcatV2', 'MatMul'], ['AddN'])
    joined = types != ['AddN']
    assert len(products) == (len(gradients) if joined else 0)
    assert combined.joined == ([variable] if joined else [])
    return joined


@pytest.mark.parametrize('transpose_a, transpose_b', [
    (True, False), (False, True)])
def test_one_product_of_all_rows_where_the_variable_lives(transpose_a, transpose_b):
    variable = weights()
    towers_of = [product(tower, rows, transpose_a, transpose_b)
                 for tower, rows in enumerate((1, 32, 5))]
    ((joint, owner),), made = made_by(lambda: combine_gradients(
        [[(gradient, variable)] for gradient, _ in towers_of]))
    assert owner is variable
    assert [op.type for op in made] == ['ConcatV2', 'ConcatV2', 'MatMul']
    assert [op.device for op in made] == ['/device:CPU:3'] * 3
    rows = joint.op.inputs[0].shape.as_list()[0 if transpose_a else 1]
    assert rows == 1 + 32 + 5
    assert np.array_equal(run(joint), sum(numbers for _, numbers in towers_of))


def test_what_is_no_product_is_added_to_the_joint_one():
    variable = weights()
    one, two = product(0, 3), product(1, 3)
    with tf.device(WEIGHTS):
        third = tf.constant(whole_numbers(2, [WIDTH, WIDTH])) * 1.
    rows = tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([7]), tf.constant([WIDTH, WIDTH]))
    ((combined, _),) = combine_gradients([[(one[0], variable)], [(third, variable)],
                                          [(two[0], variable)], [(rows, variable)]])
    assert combined.op.type == 'AddN'
    assert [tensor.op.type for tensor in combined.op.inputs][0] == 'MatMul'
    assert third in list(combined.op.inputs) and len(combined.op.inputs) == 3
    expected = one[1] + two[1] + whole_numbers(2, [WIDTH, WIDTH])
    expected[7] += 1
    assert np.array_equal(run(combined), expected)


@pytest.mark.parametrize('of_product', [False, True])
def test_what_the_gradients_wait_for_is_waited_for(of_product):
    variable = weights()
    pairs = []
    for tower in range(2):
        with tf.device('/cpu:%d' % tower):
            refusal = [tf.Assert(tf.constant(tower != 1), ['tower %d said no' % tower])]
            x, y = product(tower, 2)[0].op.inputs
            with tf.control_dependencies(refusal if of_product else []):
                gradient = tf.matmul(x, y, transpose_a=True)
            with tf.control_dependencies([] if of_product else refusal):
                pairs.append([(tf.identity(gradient), variable)])
    ((joint, _),) = combine_gradients(pairs)
    assert joint.op.type == 'MatMul'
    with pytest.raises(tf.errors.InvalidArgumentError, match='tower 1 said no'):
        run(joint)


@pytest.mark.parametrize('num_towers, joined', [(4, True), (5, False)])
def test_how_many_rows_are_joined(num_towers, joined):
    gradients = [product(tower, 32)[0] for tower in range(num_towers)]
    assert is_joined(gradients, weights()) is joined


# What passes its input's memory on, for these arguments at least.
PASS_ON = {
    'nothing': lambda thin: thin, 'reshape': lambda thin: tf.reshape(thin, [2, WIDTH]),
    'squeeze': lambda thin: tf.squeeze(tf.expand_dims(thin, 0), 0), 'slice': lambda thin: thin[:2],
    'slices': lambda thin: tf.slice(thin, [0, 0], [2, WIDTH]),
    'split': lambda thin: tf.split(thin, 1)[0], 'unstack': lambda thin: tf.unstack(thin[None])[0],
    'stack': lambda thin: tf.stack([thin])[0], 'tile': lambda thin: tf.tile(thin, [1, 1]),
    'pad': lambda thin: tf.pad(thin, [[0, 0], [0, 0]]),
    'transpose': lambda thin: tf.transpose(thin, [0, 1]),
    'sum': lambda thin: tf.reduce_sum(thin, []),
    'stop_gradient': tf.stop_gradient, 'identity_n': lambda thin: tf.identity_n([thin, 1.])[0],
    'finite': lambda thin: tf.check_numerics(thin, 'thin'), 'cast': lambda thin: tf.cast(
        thin, tf.float32), 'default': lambda thin: tf.placeholder_with_default(thin, [2, WIDTH]),
    'branch': lambda thin: tf.cond(tf.constant(True), lambda: thin, lambda: thin + 1.),
    'assigned': lambda thin: tf.assign(thin, tf.ones([2, WIDTH]))}
COMMON = ('nothing', 'reshape', 'slice', 'split', 'identity_n', 'branch', 'assigned')


@pytest.mark.parametrize('kind_of_variables, what', [('resource', 'nothing')] + [
    pytest.param('reference', name, marks=[] if name in COMMON else [pytest.mark.slow])
    for name in sorted(PASS_ON)], indirect=['kind_of_variables'])
def test_the_memory_of_a_reference_variable_is_no_factor(kind_of_variables, what):
    """Its update might come before the joint product has read it; a resource's value is its own."""
    variable, thin = weights(), weights([2, WIDTH], name='thin')
    for of_second in (False, True):
        gradients = []
        for tower in range(2):
            with tf.device('/cpu:%d' % tower):
                other = tf.constant(whole_numbers(tower, [2, WIDTH]))
                passed_on = tf.reshape(PASS_ON[what](thin), [2, WIDTH])
                factors = (other, passed_on) if of_second else (passed_on, other)
                gradients.append(tf.matmul(factors[0], factors[1], transpose_a=True))
        assert is_joined(gradients, variable) is (kind_of_variables == 'resource')


@samples.of_kinds('reference')
@pytest.mark.parametrize('what, compute', [
    ('sum', lambda thin, w: thin + 1.), ('product', lambda thin, w: 2. * thin),
    ('layer', lambda thin, w: tf.nn.elu(tf.nn.bias_add(tf.matmul(thin, w), thin[0]))),
    ('rows', lambda thin, w: tf.reduce_mean(tf.gather(thin, [[0, 1], [1, 1]]), 1))])
def test_what_is_computed_from_a_reference_variable_is_a_factor(what, compute):
    variable, thin = weights(), weights([2, WIDTH], name='thin')
    gradients = []
    for tower in range(2):
        with tf.device('/cpu:%d' % tower):
            gradients.append(tf.matmul(compute(thin, variable), tf.ones([2, WIDTH]), True))
    assert is_joined(gradients, variable)


def test_what_has_been_made_use_of_is_added_up():
    """It is made in any case, so that a joint product would be one more."""
    variable = weights()
    gradients = [tf.identity(product(tower, 2)[0]) for tower in range(3)]
    tf.identity(gradients[0])  # passed on is not made use of
    tf.summary.histogram('gradient', tf.identity(gradients[1]))
    assert [each.gradient for each in products_of(gradients, variable)] == gradients[::2]
    tf.norm(gradients[2].op.inputs[0])  # the product under its Identity
    assert not is_joined(gradients, variable)


def test_a_chain_of_identities_is_looked_through():
    gradients = [tf.identity(tf.identity(product(tower, 2)[0])) for tower in range(2)]
    assert is_joined(gradients, weights())


def test_what_is_no_tower_s_is_added_to_the_joint_product():
    """Nor does it count for the most rows that are joined."""
    variable = weights()
    of_towers = [product(tower, 32) for tower in range(4)]
    with tf.device('/cpu:0'):
        more = product(9, 32, device='/cpu:0')
    gradients, joined = combine([[(each, variable)] for each, _ in of_towers],
                                [[(more[0], variable)]])
    assert joined == [variable]
    assert [tensor.op.type for tensor in gradients[0][0].op.inputs] == ['MatMul', 'MatMul']
    assert gradients[0][0].op.inputs[1] is more[0]
    assert np.array_equal(run(gradients[0][0]), sum(each[1] for each in of_towers) + more[1])


@pytest.mark.parametrize('rows, m, n, joined', [
    (32, WIDTH, WIDTH, True), (33, WIDTH, WIDTH, False),        # many rows
    (8, WIDTH, WIDTH - 1, False),                               # small weights
    # 2 x 8 x (m + n) elements of factors: more than the m x n of the product, and fewer
    (8, 2 ** 17, 15, False), (8, 2 ** 17, 17, True)])
@pytest.mark.slow
def test_which_sizes_are_joined(rows, m, n, joined):
    variable = weights([m, n])
    gradients = [product(tower, rows, m=m, n=n)[0] for tower in range(2)]
    assert is_joined(gradients, variable) is joined


@pytest.mark.parametrize('of_variable, of_towers, joined', [
    ('/cpu:0', ('/cpu:0', '/cpu:1'), True),
    ('/job:worker/task:1/cpu:0', ('/job:worker/task:1/cpu:0', '/job:worker/task:1/cpu:1'), True),
    ('/gpu:0', ('/cpu:0', '/cpu:1'), False), ('/cpu:0', ('/gpu:0', '/gpu:1'), False),
    (None, ('/cpu:0', '/cpu:1'), False), ('/cpu:0', (None, '/cpu:1'), False),
    ('/job:ps/cpu:0', ('/job:worker/cpu:0', '/job:worker/cpu:1'), False),
    ('/job:worker/task:0/cpu:0', ('/job:worker/task:0/cpu:0', '/job:worker/task:1/cpu:0'), False),
    ('/job:a/replica:0/cpu:0', ('/job:a/replica:0/cpu:0', '/job:a/replica:1/cpu:0'), False)])
def test_on_which_devices_they_are_joined(of_variable, of_towers, joined):
    variable = weights(device=of_variable)
    with tf.device(None):
        gradients = [product(tower, 2, device=device or '')[0]
                     for tower, device in enumerate(of_towers)]
    assert is_joined(gradients, variable) is joined


def test_what_else_is_left_alone():
    variable = weights()
    one, two = [product(tower, 2)[0] for tower in range(2)]
    any_batch = tf.placeholder(tf.float32, [None, WIDTH])
    with tf.device('/cpu:0'):
        of_any_sizes = [tf.matmul(any_batch, any_batch, True),
                        tf.matmul(tf.constant(whole_numbers(3, [2, WIDTH])), any_batch, True),
                        tf.matmul(any_batch, tf.constant(whole_numbers(3, [2, WIDTH])), True)]
        finite = tf.check_numerics(one, 'of tower 0')
    for of_any_size in of_any_sizes:
        assert not is_joined([of_any_size, product(1, 2)[0]], variable)
    assert not is_joined([finite, two], variable)
    one = product(0, 2)[0]
    assert not is_joined([one, product(2, 2, transpose_a=False)[0]], variable)
    one = product(0, 2)[0]
    ((alone, _),), made = made_by(lambda: combine_gradients([[(one, variable)]]))
    assert alone is one and not made


# ---- in a training step -------------------------------------------------------------------------

def dense_net(x, y):
    """Two wide layers of slim's."""
    hidden = slim.fully_connected(x, WIDTH, scope='wide')
    return samples.mean_squared_error(slim.fully_connected(hidden, WIDTH, scope='wider'), y)


def one_layer(x, y):
    return samples.mean_squared_error(slim.fully_connected(x, WIDTH), y)


def batch_of(examples):
    random = np.random.RandomState(3)
    return tuple(random.randn(examples, WIDTH) / 32 for _ in range(2))


def built_on(devices, examples=8, **options):
    return towers.build_towers(dense_net, batch_of(examples), samples.momentum(), devices,
                               reduction='mean', **options)


@pytest.mark.parametrize('model, copies', [
    (one_layer, 'clone'), pytest.param(dense_net, 'reuse', marks=pytest.mark.slow)])
def test_towers_against_one_device(model, copies):
    ours = samples.check_against_one_device(model, batch_of(8), copies=copies)
    assert ours.built.plan.combination is not None


def test_a_step_computes_the_gradients_once_and_the_plan_says_what_is_joined():
    """And the towers keep gradients of their own, for those that ask for them."""
    built = built_on(2)
    assert built.plan.combination == (
        "2 dense layers by one product of the towers' factors, which spares 16.8 MB a tower")
    assert '  combination      2 dense layers by one product' in str(built.plan)
    of_towers, combined, decay = run([
        [tower.gradients[0][0] for tower in built.towers], built.gradients[0][0],
        built.variables[0] * 2. ** -10])
    np.testing.assert_allclose(combined, of_towers[0] + of_towers[1] + decay, rtol=1e-9, atol=1e-15)
    traced = tf.RunMetadata()
    run([built.loss, built.train_op], run_metadata=traced,
        options=tf.RunOptions(output_partition_graphs=True))
    products = [node for graph in traced.partition_graphs for node in graph.node
                if 'MatMul' in node.op]
    for tower in built.towers:  # forwards twice, and back to the hidden layer
        own = [node.name for node in products if tower.has(node.name)]
        assert len(own) == 3 and sum('gradients/' in name for name in own) == 1, own
    joint = [node for node in products if node.name.startswith('combine_gradients/')]
    assert [node.device[-len('/device:CPU:0'):] for node in joint] == ['/device:CPU:0'] * 2
    assert len(products) == 2 * 3 + 2


@pytest.mark.parametrize('options', [
    pytest.param(dict(examples=66), marks=pytest.mark.slow),
    dict(numerics=towers.Numerics(check_numerics=True)),
    dict(numerics=towers.Numerics(loss_scale=towers.LossScale())),
    dict(numerics=towers.Numerics(xla=True)),
    dict(variables=towers.VariablePlacement('replicated'))], ids=lambda given: list(given)[0])
@pytest.mark.slow
def test_builds_that_add_up(options):
    built = built_on(2, **options)
    assert built.plan.combination is None and 'combination' not in str(built.plan)
    assert not any(op.name.startswith('combine_gradients') and op.type == 'MatMul'
                   for op in tf.get_default_graph().get_operations())


def test_small_layers_are_not_in_the_plan():
    built = towers.build_towers(samples.two_layers, samples.vectors(8), samples.sgd(), 2)
    assert built.plan.combination is None
