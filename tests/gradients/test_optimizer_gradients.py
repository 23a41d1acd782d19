"""Optimizers with a `compute_gradients` of their own: it is called once, for the whole batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from towers.errors import GradientError

BATCH = np.array([1., 2., 6.])


class Scaled(tf.train.GradientDescentOptimizer):
    """Scales the loss by a variable, and counts in another how often gradients were taken."""

    def __init__(self, make, rate=.1):
        super(Scaled, self).__init__(tf.constant(rate, tf.float64))
        self.make = make

    def compute_gradients(self, loss, *args, **options):
        with tf.name_scope('scaling'):
            scale = self.make('scale', 64.)
            seen = self.make('seen', 0.)
        tf.summary.scalar('scaled', loss * scale)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(seen, 1.))
        pairs = super(Scaled, self).compute_gradients(loss * scale, *args, **options)
        return [(gradient / scale, variable) for gradient, variable in pairs]


def by_get_variable(name, value):
    with tf.variable_scope('scaling', reuse=tf.AUTO_REUSE):
        return tf.get_variable(name, [], tf.float64, tf.constant_initializer(value),
                               trainable=False)


def by_variable(name, value):
    return tf.Variable(tf.constant(value, tf.float64), name=name, trainable=False)


def model_fn(x):
    return tf.reduce_mean(x) * tf.get_variable('w', [], tf.float64, tf.ones_initializer())


@pytest.mark.parametrize('make, num_towers, options', [
    (by_get_variable, 2, dict(remainder='weight')),
    (by_variable, 1, dict(memory=towers.Memory(accumulate=3)))])
def test_as_on_one_device(make, num_towers, options, tmp_path):
    built = towers.build_towers(
        model_fn, tf.constant(BATCH), Scaled(make), num_towers, 'mean',
        global_step=tf.train.get_or_create_global_step(), **options)
    assert sorted(variable.op.name for variable in tf.global_variables()) == [
        'global_step', 'scaling/scale', 'scaling/seen', 'w']
    assert [variable.op.name for variable in tf.trainable_variables()] == ['w']
    assert all(variable.device == '/device:CPU:0' for variable in tf.global_variables('scaling'))
    assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 1
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 1
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run(built.train_op)
        w, seen = session.run([tf.trainable_variables()[0], tf.global_variables('scaling/seen')[0]])
        np.testing.assert_allclose([w, seen], [1 - .2 * BATCH.mean(), 2.], rtol=1e-12)
        path = tf.train.Saver().save(session, str(tmp_path / 'model'))
    assert 'scaling/scale' in dict(tf.train.list_variables(path))


def test_an_attribute_of_one_object_gets_the_gradients_of_the_whole_loss():
    """As programs have it that wrap what they are given. The loss's own penalty counts once."""
    optimizer = tf.train.GradientDescentOptimizer(.125)
    plain = optimizer.compute_gradients
    optimizer.compute_gradients = lambda *args, **options: [
        (tf.clip_by_value(gradient, -1., 4.), variable)
        for gradient, variable in plain(*args, **options)]

    def regularized(x):
        w = tf.get_variable('w', initializer=np.ones([2, 1]))
        return tf.reduce_mean(tf.matmul(x, w)) + .5 * tf.nn.l2_loss(w)
    x = np.arange(8.).reshape(4, 2)  # gradients 3 + .5 and 4 + .5
    built = towers.build_towers(regularized, tf.constant(x), optimizer, 2, 'mean')
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        np.testing.assert_allclose(session.run(built.variables[0]).ravel(),
                                   [1 - .125 * 3.5, 1 - .125 * 4.], rtol=1e-12)


def test_with_several_losses_each_optimizer_has_its_own():
    def of_two(x):
        return {'loss': {name: tf.reduce_mean(x) * tf.get_variable(
            name, [], tf.float64, tf.ones_initializer()) for name in ('a', 'b')}}
    built = towers.build_towers(
        of_two, tf.constant(BATCH[:2]),
        dict(a=towers.Objective(Scaled(by_variable), lambda every: every[:1]),
             b=towers.Objective(Scaled(by_variable, 1.), lambda every: every[1:])),
        2, 'mean', copies='reuse')
    assert len(tf.global_variables('scaling')) == 4
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        np.testing.assert_allclose(session.run(tf.trainable_variables()), [1 - .15, 1 - 1.5])
        assert session.run(tf.global_variables('scaling.*seen')) == [1., 1.]


# ---- against a plain program on one device ------------------------------------------------------

class Own(tf.train.GradientDescentOptimizer):
    def __init__(self):
        super(Own, self).__init__(tf.constant(.1, tf.float64))

    def plain(self, *args, **options):
        return tf.train.GradientDescentOptimizer.compute_gradients(self, *args, **options)


class Scales(Own):
    def compute_gradients(self, loss, **options):
        return [(gradient / 8., variable) for gradient, variable in self.plain(
            loss * 8., **options)]


class Squares(Own):
    def compute_gradients(self, loss, **options):
        return self.plain(loss * loss, **options)


class Keeps(Own):
    """Keeps the loss and the norm, which it reads when it applies."""

    def compute_gradients(self, loss, **options):
        pairs = self.plain(loss, **options)
        self.loss, self.norm = loss, tf.global_norm([gradient for gradient, _ in pairs])
        return pairs

    def apply_gradients(self, pairs, *args, **options):
        return super(Keeps, self).apply_gradients(
            [(gradient * self.loss / self.norm, v) for gradient, v in pairs], *args, **options)


def rows_and_numbers(x):
    w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
    table = tf.get_variable('table', [5, 1], tf.float64, tf.ones_initializer())
    rows = tf.nn.embedding_lookup(table, tf.cast(x, tf.int32) % 5)
    return tf.reduce_mean(w * w * x * rows[:, 0] * rows[:, 0])


class ClipsValues(Own):
    """Of rows, too, which stay rows."""

    def compute_gradients(self, *args, **options):
        def clipped(gradient):
            if isinstance(gradient, tf.IndexedSlices):
                return tf.IndexedSlices(gradient.values * 2., gradient.indices)
            return tf.clip_by_value(gradient, -1., 1.)
        return [(clipped(gradient), v) for gradient, v in self.plain(*args, **options)]


def on_one_device(make, model, examples):
    with tf.Graph().as_default():
        optimizer = make()
        pairs = optimizer.compute_gradients(model(tf.constant(examples)),
                                            var_list=tf.trainable_variables())
        return after_two_steps(optimizer.apply_gradients(pairs))


def after_two_steps(train_op):
    with tf.Session(config=towers.session_config(4)) as session:
        session.run(tf.global_variables_initializer())
        session.run(tf.local_variables_initializer())
        for _ in range(2):
            session.run(train_op)
        return session.run(tf.trainable_variables())


SQUARED = lambda x: tf.reduce_mean(x) * tf.square(
    tf.get_variable('w', [], tf.float64, tf.ones_initializer()))


@pytest.mark.parametrize(
    'make, model, count, num_towers, options', first_fast(1, [
     (Squares, SQUARED, 3, 2, {}), (Keeps, SQUARED, 3, 2, {}),
     (ClipsValues, rows_and_numbers, 3, 2, {}),
     (Scales, SQUARED, 4, 2, dict(memory=towers.Memory(accumulate=2))),
     (Scales, SQUARED, 4, 2, dict(variables=towers.VariablePlacement('replicated')))]))
def test_on_any_number_of_towers(make, model, count, num_towers, options):
    examples = np.arange(1., count + 1) / 4
    with tf.Graph().as_default():
        found = after_two_steps(towers.build_towers(
            model, tf.constant(examples), make(), num_towers, 'mean', remainder='weight',
            **options).train_op)
    for value, expected in zip(found, on_one_device(make, model, examples)):
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_a_loss_scale_comes_before_the_backward_pass_of_half_precision():
    """The gradient is 2 ** -26, which is 0 in half precision, without the scale of 2 ** 10."""
    class InHalf(tf.train.GradientDescentOptimizer):
        def compute_gradients(self, loss, var_list=None, **options):
            pairs = super(InHalf, self).compute_gradients(loss * 2. ** 10, var_list, **options)
            return [(gradient / 2. ** 10, v) for gradient, v in pairs]

    def half(x):
        w = tf.get_variable('w', [], tf.float32, tf.ones_initializer())
        return tf.reduce_mean(tf.cast(tf.cast(w, tf.float16) * x, tf.float32)) * 2. ** -13
    built = towers.build_towers(half, tf.fill([4], tf.constant(2. ** -13, tf.float16)),
                                InHalf(1.), 2, 'mean')
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(built.gradients[0][0]) == 2. ** -26


def never(self, loss, var_list=None, **options):
    return [(tf.zeros([], tf.float64), variable) for variable in var_list]


def in_a_branch(self, loss, **options):
    gradients = tf.cond(tf.constant(True), lambda: self.plain(loss * 1., **options)[0][0],
                        lambda: tf.zeros([], tf.float64))
    return [(gradients, options['var_list'][0])]


def by_groups(self, loss, var_list=None, **options):
    return [pair for factor in (tf.train.get_or_create_global_step(), 1.)
            for pair in self.plain(loss * tf.cast(factor, tf.float64), var_list=var_list)]


CLUSTER = dict(cluster=towers.Cluster('ring', ['a:1', 'b:1']))


@pytest.mark.parametrize('method, words, options', [
    (never, 'takes no gradient of the loss', {}), (in_a_branch, 'within a branch', {}),
    (by_groups, 'takes gradients of its loss with several factors, .*: take them with one factor, '
     'and mul', {}),
    (Squares.compute_gradients, 'depends on the value of the loss',
     dict(memory=towers.Memory(accumulate=2))),
    (Squares.compute_gradients, "one worker's examples", CLUSTER)])
def test_what_the_towers_cannot_do_is_refused(method, words, options):
    make = type('Strange', (Own,), {'compute_gradients': method})
    with pytest.raises(GradientError, match='compute_gradients of Strange .*' + words):
        towers.build_towers(SQUARED, tf.constant([1., 3., 2., 4.], tf.float64), make(), 2, 'mean',
                            global_step=tf.train.get_or_create_global_step(), **options)


def test_the_value_of_a_loss_of_one_machine_is_refused_in_an_update():
    with pytest.raises(GradientError, match="one worker's examples"):
        towers.build_towers(SQUARED, tf.constant([1., 3.], tf.float64), Keeps(), 1, 'mean',
                            global_step=tf.train.get_or_create_global_step(), **CLUSTER)


def test_a_variable_without_gradient_keeps_its_place():
    def with_an_unused_one(x):
        a, _, c = [tf.get_variable(name, [], tf.float64, tf.ones_initializer()) for name in 'abc']
        return tf.reduce_mean(x) * (a + c)
    seen = []

    def transform(pairs):
        seen.extend((gradient is None, variable.op.name) for gradient, variable in pairs)
        return pairs
    built = towers.build_towers(
        with_an_unused_one, tf.constant([1., 3.], tf.float64), towers.Objective(
            tf.train.GradientDescentOptimizer(.1), transform_gradients=transform), 2, 'mean')
    assert seen == [(False, 'a'), (True, 'b'), (False, 'c')]
    assert [variable.op.name for _, variable in built.gradients] == ['a', 'c']
