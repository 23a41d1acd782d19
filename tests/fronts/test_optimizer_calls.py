"""Optimizers that the model function calls itself: against the same program on one device."""

from estimator_runs import needs_estimator, replicated
import numpy as np
import pytest
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers
from towers import TowerOptimizer

pytestmark = needs_estimator

# Rates are powers of two: TensorFlow has some in float32, some in the variable's type.
X = np.random.RandomState(0).randn(12, 5)
Y = np.random.RandomState(1).randint(3, size=12)
IDS = np.random.RandomState(2).randint(4, size=12)


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


def losses_and_variables(loss, train_op, feed=None):
    with tf.Session(config=towers.session_config(3)) as session:
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
        return losses_and_variables(loss, train_op)


def check_same(found, expected, rel=1e-12):
    assert found[0] == pytest.approx(expected[0], rel=rel)
    assert sorted(found[1]) == sorted(expected[1])
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=rel, atol=rel, err_msg=name)


@pytest.mark.parametrize('training', [
    made_by_a_function, two_optimizers, overlapping, one_after_the_other, own_gradients])
def test_the_same_as_on_one_device(training):
    expected = one_device(training, (X, IDS, Y))
    _, spec = replicated(model(training), (X, IDS, Y), 3)
    check_same(losses_and_variables(spec.loss, spec.train_op), expected)


def in_scopes(loss, logits, wrap):
    optimizer = wrap(tf.train.AdamOptimizer(0.125))
    with tf.variable_scope('training'), tf.name_scope('adam'):
        return optimizer.minimize(loss), [optimizer]


def of_the_same_variables(loss, logits, wrap):
    optimizers = [wrap(tf.train.AdamOptimizer(0.125)) for _ in range(2)]
    first = optimizers[0].minimize(loss)
    with tf.control_dependencies([first]):
        return optimizers[1].minimize(loss), optimizers


def one_within_another(loss, logits, wrap):
    optimizer = wrap(wrap(OwnApply(0.125, 0.5)))
    return optimizer.minimize(loss), [optimizer]


class OwnApply(tf.train.MomentumOptimizer):
    """Makes slots in a scope of its own, as BERT's optimizer does."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        with tf.variable_scope('own'):
            return super().apply_gradients(grads_and_vars, global_step, name)


@pytest.mark.parametrize('training', [in_scopes, of_the_same_variables, one_within_another])
def test_slots_are_there_after_the_call_as_on_one_device(training):
    def there(wrap):
        def call(loss, logits):
            train_op, optimizers = training(loss, logits, wrap)
            seen.append(([(v.op.name, v.device or '/device:CPU:0') for v in tf.global_variables()],
                         [[v.op.name for v in each.variables()] for each in optimizers]))
            return train_op
        return call
    seen = []
    expected = one_device(there(lambda optimizer: optimizer), (X, IDS, Y))
    _, spec = replicated(model(there(TowerOptimizer)), (X, IDS, Y), 3)
    assert seen[0] == seen[1]
    check_same(losses_and_variables(spec.loss, spec.train_op), expected)


def placeholders(inputs):
    """Placeholders of unknown batch size for these arrays, and what to feed."""
    made = [tf.placeholder(each.dtype, [None] + list(each.shape[1:])) for each in inputs]
    return made, dict(zip(made, inputs))


def of_sums(loss, logits):
    return TowerOptimizer(tf.train.GradientDescentOptimizer(1. / 128)).minimize(
        tf.reduce_sum(tf.square(logits)))


@pytest.mark.parametrize('training, size', [
    (own_gradients, 11), (one_optimizer, 2), (of_sums, 11), (of_sums, 2)])
def test_uneven_shards_count_by_their_size_and_sums_are_added_up(training, size):
    inputs = [each[:size] for each in (X, IDS, Y)]
    expected = one_device(training, inputs)
    tensors, feed = placeholders(inputs)
    reductions = [tf.losses.Reduction.SUM] if training is of_sums else []
    _, spec = replicated(model(training), tensors, 3, *reductions)
    losses, variables = losses_and_variables(spec.loss, spec.train_op, feed)
    check_same((expected[0] if training is of_sums else losses, variables), expected)


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
    _, spec = replicated(model_fn, [np.array([1., 1., 10., 10.])])
    found = losses_and_variables(spec.loss, spec.train_op)
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
    built, spec = replicated(model_fn, [np.array([1., 3.])])
    a, b = built.variables
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(made[0][0])
        assert session.run([a, b]) == [1. - 2. * 2., 2.]
        session.run(made[0][1])
        assert session.run([a, b]) == [-3., 2. - 2. * -3.]
        session.run(spec.train_op)  # both of the weights before
        assert session.run([a, b]) == [-3. - 2. * 8., 8. - 2. * -3.]


def test_averages_of_the_weights_after_the_update():
    def model_fn(x):
        w = tf.get_variable('w', [], tf.float32, tf.constant_initializer(8.))
        loss = tf.reduce_mean(x * w)
        train_op = TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
        with tf.control_dependencies([train_op]):
            return loss, tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables())
    _, spec = replicated(model_fn, [np.array([1., 3.], np.float32)])
    w, average = tf.global_variables()
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(w.initializer)
        session.run(average.initializer)
        session.run(spec.train_op)
        assert session.run([w, average]) == [6., 7.]
    assert average.op.name == 'w/ExponentialMovingAverage'


def test_update_ops_of_the_model_run_once_a_step():
    def model_fn(x):
        loss, _ = line(x)
        mean = variable('mean', 0., trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(
            mean, .5 * mean + .5 * tf.reduce_mean(x)))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return loss, TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
    built, spec = replicated(model_fn, [np.array([1., 3.])])
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        for average in (.5, .75):
            session.run(spec.train_op)
            assert session.run(built.variables[1]) == average  # the first tower's


def plain(loss):
    return tf.train.GradientDescentOptimizer(1.).minimize(loss)


def in_a_branch(loss):
    with switched('control_flow_v2', False):
        return tf.cond(loss > 0, lambda: TowerOptimizer(
            tf.train.GradientDescentOptimizer(1.)).minimize(loss), tf.no_op)


def waited_for(loss):
    train_op = TowerOptimizer(tf.train.AdamOptimizer()).minimize(loss)
    with tf.control_dependencies([train_op]):
        return tf.identity(loss), train_op


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
        _, spec = replicated(model(by_gathering), (X, IDS, Y), 3)
        check_same(losses_and_variables(spec.loss, spec.train_op), expected)


@pytest.mark.parametrize('train, text', [
    (gathered(True), "writes gradients of a tower to 'sum_of_w'.*GatheringOptimizer"),
    (gathered(False), "writes gradients of a tower to 'sum_of_w'"),
    (plain, 'comes from no TowerOptimizer: each tower would'),
    (lambda loss: tf.group(plain(loss), TowerOptimizer(
        tf.train.GradientDescentOptimizer(1.)).minimize(loss)), 'has the update .*Wrap every'),
    (in_a_branch, 'in a branch or a loop'),
    (lambda loss: tf.train.SyncReplicasOptimizer(TowerOptimizer(
        tf.train.GradientDescentOptimizer(1.)), 1).minimize(
            loss, tf.train.get_or_create_global_step()),
     r'writes gradients .*towers\.TowerOptimizer\(tf\.train\.SyncReplicasOptimizer\('),
    (waited_for, 'the loss of the model function.*waits for')])
def test_calls_that_cannot_be_joined(train, text):
    def model_fn(x):
        loss, _ = line(x)
        made = train(loss)
        return made if isinstance(made, tuple) else (loss, made)
    with pytest.raises(towers.GradientError, match=text) as raised:
        replicated(model_fn, [np.array([1., 3.])])
    assert isinstance(raised.value, ValueError) and not tf.global_variables()
