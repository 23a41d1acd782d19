"""Optimizers that the model function calls itself: against the same program on one device."""

import numpy as np
import pytest
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers
from towers import TowerOptimizer
from towers.fronts.optimizer_calls import OptimizerCalls, calls_of
from towers.graph.graph_walk import step_operations

# Rates are powers of two: TensorFlow has some in float32, some in the variable's type.
X = np.random.RandomState(0).randn(12, 5)
Y = np.random.RandomState(1).randint(3, size=12)
IDS = np.random.RandomState(2).randint(4, size=12)


@pytest.fixture(autouse=True)
def new_graph():
    with tf.Graph().as_default() as graph:
        yield graph


def replicated(model_fn, inputs, num_towers=2, is_sum=False, remainder='weight'):
    """`(built, the first tower's train op)` of a model function that returns `(loss, train op)`."""
    graph, train_ops = tf.get_default_graph(), []
    calls = OptimizerCalls(graph, num_towers, is_sum, True)

    def of_tower(*inputs):
        loss, train_op = model_fn(*inputs)
        calls.check_train_op(len(train_ops), train_op)
        train_ops.append(train_op)
        return loss
    with calls.reported_to():
        built = towers.build_towers(
            of_tower, inputs, calls, ['/cpu:%d' % k for k in range(num_towers)],
            'sum' if is_sum else 'mean', remainder=remainder, copies='reuse', first_scope=False)
    assert calls_of(graph) is None
    return built, train_ops[0]


def variable(name, value, **kwargs):
    return tf.get_variable(name, np.shape(value), tf.float64, tf.constant_initializer(value),
                           **kwargs)


def network(x, ids):
    w = variable('net/w', np.random.RandomState(3).randn(5, 4))
    table = variable('net/table', np.random.RandomState(4).randn(4, 4))
    hidden = tf.tanh(tf.matmul(x, w) + tf.gather(table, ids))
    v = variable('out/v', np.random.RandomState(5).randn(4, 3))
    return tf.matmul(hidden, v)


def cross_entropy(logits, labels):
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels))


def one_optimizer(loss, logits):
    return TowerOptimizer(tf.train.MomentumOptimizer(0.125, 0.5)).minimize(
        loss, tf.train.get_or_create_global_step())


def made_by_a_function(loss, logits):
    step = tf.train.get_or_create_global_step()
    optimizer = TowerOptimizer(lambda: tf.train.MomentumOptimizer(
        tf.train.exponential_decay(tf.constant(0.125, tf.float64), step, 2, 0.5), 0.5))
    with tf.variable_scope('train'):  # which the slots' names begin with
        return optimizer.minimize(loss, step)


def two_optimizers(loss, logits):
    both = [TowerOptimizer(tf.train.MomentumOptimizer(0.125, 0.5)),
            TowerOptimizer(tf.train.AdamOptimizer(0.0625))]
    return tf.group(both[0].minimize(loss, var_list=tf.trainable_variables('net')),
                    both[1].minimize(loss * 2, var_list=tf.trainable_variables('out')))


def overlapping(loss, logits):
    # Each of the gradients is that of the weights before the step.
    optimizers = [TowerOptimizer(tf.train.GradientDescentOptimizer(rate)) for rate in (0.25, 0.125)]
    pairs = [optimizers[0].compute_gradients(loss), optimizers[1].compute_gradients(
        tf.reduce_mean(tf.square(logits)), tf.trainable_variables('out'))]
    gradients = [gradient for each in pairs for gradient, _ in each]
    with tf.control_dependencies([each for each in gradients if isinstance(each, tf.Tensor)]):
        first = optimizers[0].apply_gradients(pairs[0])
    with tf.control_dependencies([first]):
        return optimizers[1].apply_gradients(pairs[1])


def one_after_the_other(loss, logits):
    first = TowerOptimizer(tf.train.GradientDescentOptimizer(0.25)).minimize(
        loss, var_list=tf.trainable_variables('out'))
    with tf.control_dependencies([first]):
        v = tf.trainable_variables('out')[0]
        value = v.read_value() if hasattr(v, 'read_value') else tf.identity(v)
        size = tf.reduce_sum(tf.square(value)) * tf.reduce_mean(tf.square(logits))
        return TowerOptimizer(tf.train.GradientDescentOptimizer(1. / 128)).minimize(
            size, var_list=tf.trainable_variables('net'))


def own_gradients(loss, logits):
    variables = tf.trainable_variables()
    return TowerOptimizer(tf.train.MomentumOptimizer(0.125, 0.5)).apply_gradients(
        list(zip(tf.gradients(loss, variables), variables)),
        global_step=tf.train.get_or_create_global_step())


def model(training):
    def model_fn(x, ids, labels):
        logits = network(x, ids)
        loss = cross_entropy(logits, labels)
        return loss, training(loss, logits)
    return model_fn


def losses_and_variables(loss, train_op, num_towers, feed=None):
    with tf.Session(config=towers.session_config(num_towers)) as session:
        session.run(tf.global_variables_initializer())
        losses = []
        for _ in range(4):
            losses.append(session.run(loss, feed))
            session.run(train_op, feed)
        return losses, {v.op.name: session.run(v) for v in tf.global_variables()}


def one_device(training, inputs):
    # Of reference variables one device updates one while it takes the gradient of another.
    with tf.Graph().as_default(), switched('resource_variables', True):
        loss, train_op = model(training)(*[tf.constant(each) for each in inputs])
        return losses_and_variables(loss, train_op, 1)


def check_same(found, expected, rel=1e-12):
    assert found[0] == pytest.approx(expected[0], rel=rel)
    assert sorted(found[1]) == sorted(expected[1])
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=rel, atol=rel, err_msg=name)


@pytest.mark.parametrize('training, resource', [(two_optimizers, True)] + [
    pytest.param(training, True, marks=pytest.mark.slow) for training in (
        one_optimizer, made_by_a_function, overlapping, one_after_the_other, own_gradients)] + [
    # A value that was read of a reference variable may change with it, on one device, too.
    pytest.param(training, False, marks=pytest.mark.slow) for training in (
        one_optimizer, made_by_a_function, two_optimizers, overlapping, own_gradients)])
def test_the_same_as_on_one_device(training, resource):
    expected = one_device(training, (X, IDS, Y))
    with switched('resource_variables', resource):
        built, train_op = replicated(model(training), (X, IDS, Y), 3)
        check_same(losses_and_variables(built.loss, train_op, 3), expected)


def tensors_of(inputs, static):
    """Constants of these arrays, or placeholders of unknown batch size."""
    if static:
        return [tf.constant(each) for each in inputs]
    return [tf.placeholder(each.dtype, [None] + list(each.shape[1:])) for each in inputs]


@pytest.mark.parametrize('training, size, num_towers, static', [
    (own_gradients, 11, 3, False)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (one_optimizer, 2, 3, False), (one_optimizer, 11, 3, True),
            (one_optimizer, 12, 2, False),
            (own_gradients, 2, 3, True)]])
def test_uneven_shards_count_by_their_size(training, size, num_towers, static):
    inputs = [each[:size] for each in (X, IDS, Y)]
    expected = one_device(training, inputs)
    tensors = tensors_of(inputs, static)
    built, train_op = replicated(model(training), tensors, num_towers)
    feed = None if static else dict(zip(tensors, inputs))
    check_same(losses_and_variables(built.loss, train_op, num_towers, feed), expected)


@pytest.mark.parametrize('size, static', [(11, True)] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in [(2, False), (12, False)]])
def test_losses_that_are_sums_are_added_up(size, static):
    def training(loss, logits):
        return TowerOptimizer(tf.train.GradientDescentOptimizer(1. / 128)).minimize(
            tf.reduce_sum(tf.square(logits)))
    inputs = [each[:size] for each in (X, IDS, Y)]
    expected = one_device(training, inputs)
    tensors = tensors_of(inputs, static)
    built, train_op = replicated(model(training), tensors, 3, is_sum=True)
    feed = None if static else dict(zip(tensors, inputs))
    found = losses_and_variables(built.loss, train_op, 3, feed)
    check_same((expected[0], found[1]), expected)


def line(x):
    w = variable('w', 10.)
    return tf.reduce_mean(x * w), w


def test_clipping_within_a_tower_is_of_that_towers_share():
    def model_fn(x):
        loss, _ = line(x)
        optimizer = TowerOptimizer(tf.train.GradientDescentOptimizer(1.))
        pairs = optimizer.compute_gradients(loss)
        return loss, optimizer.apply_gradients(
            [(tf.clip_by_value(gradient, -1., 1.), variable) for gradient, variable in pairs])
    built, train_op = replicated(model_fn, np.array([1., 1., 10., 10.]))
    found = losses_and_variables(built.loss, train_op, 2)
    # Shares 1 / 2 and 10 / 2, the latter clipped to 1: 1.5 a step, of a mean of 5.5 w.
    assert found[0] == pytest.approx([5.5 * (10 - 1.5 * k) for k in range(4)], rel=1e-14)


def test_each_optimizer_runs_alone_or_together():
    made = []

    def model_fn(x):
        a = variable('a', 1.)
        b = variable('b', 2.)
        ops = [TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(
            tf.reduce_mean(x) * a * b, var_list=[each]) for each in (a, b)]
        made.append(ops)
        return tf.reduce_mean(x) * a * b, tf.group(*ops)
    built, both = replicated(model_fn, np.array([1., 3.]))
    a, b = built.variables
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(made[0][0])
        assert session.run([a, b]) == [1. - 2. * 2., 2.]
        session.run(made[0][1])
        assert session.run([a, b]) == [-3., 2. - 2. * -3.]
        session.run(both)  # both of the weights before
        assert session.run([a, b]) == [-3. - 2. * 8., 8. - 2. * -3.]


def test_what_waits_for_the_update_comes_after_it_in_every_tower():
    made = []

    def model_fn(x):
        loss, w = line(x)
        train_op = TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
        with tf.control_dependencies([train_op]):
            made.append(w.read_value())
        return loss, train_op
    replicated(model_fn, np.array([1., 1.]))
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(made) == [9., 9.]


def test_what_an_update_waits_for():
    made = []

    def model_fn(x):
        variables = [variable('a', 1.), variable('b', 2.)]
        loss = tf.reduce_mean(x * variables[0] * variables[1])
        optimizers = [TowerOptimizer(tf.train.GradientDescentOptimizer(1.)) for _ in variables]
        pairs = [optimizer.compute_gradients(loss, [each])
                 for optimizer, each in zip(optimizers, variables)]
        first = tf.no_op('first')
        with tf.control_dependencies([first]):
            updates = [optimizer.apply_gradients(each)
                       for optimizer, each in zip(optimizers, pairs)]
        made.append((first, [gradient.op for (gradient, _), in pairs]))
        return loss, tf.group(*updates)
    built, _ = replicated(model_fn, np.array([1., 3.]))
    updates = [op for op in tf.get_default_graph().get_operations()
               if 'ApplyGradientDescent' in op.type]
    assert len(updates) == 2
    for update in updates:
        before = {op.name for op in step_operations([update])}
        assert made[0][0].name in before and built.loss.op.name in before
        # Of both variables, in both towers: a reference variable would change under the others.
        assert before.issuperset(op.name for _, gradients in made for op in gradients)


def test_averages_of_the_weights_after_the_update():
    def model_fn(x):
        w = tf.get_variable('w', [], tf.float32, tf.constant_initializer(8.))
        loss = tf.reduce_mean(x * w)
        train_op = TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
        with tf.control_dependencies([train_op]):
            return loss, tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables())
    built, train_op = replicated(model_fn, np.array([1., 3.], np.float32))
    w, average = tf.global_variables()
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(w.initializer)
        session.run(average.initializer)
        session.run(train_op)
        assert session.run([w, average]) == [6., 7.]
    assert average.op.name == 'w/ExponentialMovingAverage'


def test_update_ops_of_the_model_run_once_a_step():
    def model_fn(x):
        loss, _ = line(x)
        mean = variable('mean', 0., trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(mean, tf.reduce_mean(x)))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return loss, TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
    built, train_op = replicated(model_fn, np.array([1., 3.]))
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        for step in (1., 2.):
            session.run(train_op)
            assert session.run(built.variables[1]) == step  # the first tower's


@pytest.mark.slow
def test_a_sync_replicas_optimizer_inside():
    made = []

    def model_fn(x):
        loss, _ = line(x)
        sync = tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(1.), 1, 1)
        made.append((sync.make_session_run_hook(True, num_tokens=0), sync))
        return loss, TowerOptimizer(sync).minimize(loss, tf.train.get_or_create_global_step())
    built, train_op = replicated(model_fn, np.array([1., 3.]))
    for to_start_with in (made[0][1].chief_init_op, made[0][1].ready_for_local_init_op):
        assert built.loss.op not in step_operations([to_start_with])
    with tf.train.MonitoredTrainingSession(
            config=towers.session_config(2), hooks=[made[0][0]],
            stop_grace_period_secs=1) as session:
        session.run(train_op)
        session.run(train_op)
        assert session.run(built.variables[0]) == 6.
        assert session.run(tf.train.get_global_step()) == 2


def test_operations_and_their_devices(new_graph):
    built, _ = replicated(model(two_optimizers), (X, IDS, Y), 2)
    assert all(v.device == '/device:CPU:0' for v in tf.global_variables())
    assert new_graph.get_operation_by_name('MatMul').device == '/device:CPU:0'
    assert new_graph.get_operation_by_name('tower_1/MatMul').device == '/device:CPU:1'
    assert not [op for op in new_graph.get_operations() if op.name.startswith('tower_0')]
    audited = towers.audit(built)
    assert not audited.broken
    # Gradients are taken where the tower is.
    backward = [op for op in new_graph.get_operations() if op.type == 'TanhGrad']
    assert sorted(op.device for op in backward) == ['/device:CPU:0', '/device:CPU:1']


def test_nothing_stays_in_collections(new_graph):
    before = set(new_graph.get_all_collection_keys())
    replicated(model(one_optimizer), (X, IDS, Y), 2)
    keys = {key for key in new_graph.get_all_collection_keys() if isinstance(key, str)
            and not key.startswith('_') and new_graph.get_collection(key)}
    assert keys - before == {'variables', 'trainable_variables', 'global_step', 'train_op'}
    assert tf.train.export_meta_graph(graph=new_graph)


def plain(loss):
    return tf.train.GradientDescentOptimizer(1.).minimize(loss)


def in_a_branch(loss):
    with switched('control_flow_v2', False):
        return tf.cond(loss > 0, lambda: TowerOptimizer(
            tf.train.GradientDescentOptimizer(1.)).minimize(loss), tf.no_op)


def applying(pairs):
    return lambda loss: TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).apply_gradients(
        pairs(tf.trainable_variables()))


def more_calls_in_later_towers(loss):
    return tf.group(*[TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
                      for _ in range(1 if not loss.op.name.startswith('tower_1') else 2)])


def fewer_calls_in_later_towers(loss):
    return tf.group(*[TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
                      for _ in range(2 if not loss.op.name.startswith('tower_1') else 1)])


def gathered(takes_output):
    """Adds gradients up in variables, and applies these, as programs do that step every k times."""
    def train(loss):
        optimizer = TowerOptimizer(tf.train.GradientDescentOptimizer(1.))
        pairs = [(gradient, variable) for gradient, variable in zip(
            tf.gradients(loss, tf.trainable_variables()), tf.trainable_variables())]
        sums = [tf.get_variable('sum_of_' + variable.op.name, variable.shape, variable.dtype,
                                tf.zeros_initializer(), trainable=False) for _, variable in pairs]
        added = [tf.assign_add(total, gradient) for total, (gradient, _) in zip(sums, pairs)]
        train_op = optimizer.apply_gradients([
            (each, variable) for each, (_, variable) in zip(
                added if takes_output else sums, pairs)])
        return train_op if takes_output else tf.group(*added)
    return train


class Gathering(tf.train.GradientDescentOptimizer):
    """Applies the sum of the gradients of two steps."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        gradients, variables = zip(*grads_and_vars)
        sums = [tf.get_variable('sum_of_' + each.op.name, each.shape, each.dtype,
                                tf.zeros_initializer(), trainable=False) for each in variables]
        count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)
        added = [total.assign_add(each) for total, each in zip(sums, gradients)]
        with tf.control_dependencies(added + [global_step.assign_add(1)]):
            is_last = tf.equal(count.assign_add(1) % 2, 0)

        def apply():
            applied = super(Gathering, self).apply_gradients(
                [(total.read_value(), each) for total, each in zip(sums, variables)])
            with tf.control_dependencies([applied]):
                return tf.group(*[total.assign(tf.zeros_like(total)) for total in sums])
        return tf.cond(is_last, apply, tf.no_op)


def by_gathering(loss, unused_logits):
    return TowerOptimizer(Gathering(0.25)).minimize(
        loss, tf.train.get_or_create_global_step(), tf.trainable_variables('net'))


def test_an_optimizer_that_gathers_gets_the_gradients_of_all_towers():
    expected = one_device(by_gathering, (X, IDS, Y))
    with switched('resource_variables', True):
        built, train_op = replicated(model(by_gathering), (X, IDS, Y), 3)
        check_same(losses_and_variables(built.loss, train_op, 3), expected)


@pytest.mark.parametrize('train, text', [
    (gathered(True), "writes gradients of a tower to the variable 'sum_of_w'.*GatheringOptimizer"),
    (gathered(False), "writes gradients of a tower to the variable 'sum_of_w'"),
    (plain, 'comes from no TowerOptimizer, and there are 2 devices'),
    (lambda loss: tf.group(plain(loss), TowerOptimizer(
        tf.train.GradientDescentOptimizer(1.)).minimize(loss)), 'wrap every optimizer'),
    (in_a_branch, 'in a branch or a loop'),
    (applying(lambda variables: []), r'given \[\]: expected \(gradient, variable\) pairs'),
    (applying(lambda variables: tf.constant([1., 2.])), r'given <tf.Tensor.*variable\) pairs'),
    (applying(lambda variables: [('much', variables[0])]), "given 'much' as the gradient of 'w'"),
    (applying(lambda variables: [(1., 'w')]), "given 'w' of type str as a variable"),
    (more_calls_in_later_towers, '1 times in tower 0 and 2 times in tower 1'),
    (fewer_calls_in_later_towers, '2 times in tower 0 and 1 times in tower 1')])
def test_calls_that_cannot_be_joined(new_graph, train, text):
    def model_fn(x):
        loss, _ = line(x)
        return loss, train(loss)
    with pytest.raises(towers.GradientError, match=text) as raised:
        replicated(model_fn, np.array([1., 3.]))
    assert isinstance(raised.value, ValueError)
    assert calls_of(new_graph) is None and not tf.global_variables()
