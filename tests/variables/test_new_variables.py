"""Variables of a build: those that one device's program makes, and one set for all towers.

The batch of the models below is [1, 2, 3, 6] on two towers, so that the loss `mean(x * f(w))` has
the gradient 1.5 f' in tower 0 and 4.5 f' in tower 1: 6 f' for their sum.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim
from tensorflow.python.training.slot_creator import create_zeros_slot
from case_marks import first_fast

from towers import (SharedVariableError, TowersError, audit, build_towers, mend_slim,
                    session_config)

BATCH = np.float32([1., 2., 3., 6.])
ONE = tf.ones_initializer()
SGD = tf.train.GradientDescentOptimizer


def build(model_fn, devices=2, optimizer=None, **options):
    return build_towers(model_fn, tf.constant(BATCH), optimizer or SGD(1.), devices, **options)


def build_again(earlier, model_fn, **options):
    return build_towers(model_fn, BATCH, None, 2, reuse=earlier, **options)


def weight(name='w'):
    return tf.get_variable(name, [], initializer=ONE)


def mean(x):
    return tf.reduce_mean(x * weight())


def values_after(train_op):
    """{variable name: its value} after one step."""
    with tf.Session(config=session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(train_op)
        values = session.run({v.op.name: v for v in tf.global_variables()})
        return {name: value.tolist() for name, value in values.items()}


def names(collection=tf.GraphKeys.GLOBAL_VARIABLES):
    return [variable.op.name for variable in tf.get_collection(collection)]


def error_of(model_fn, **options):
    with pytest.raises(SharedVariableError) as caught:
        build(model_fn, **options)
    return str(caught.value)


# ---- as on one device ----------------------------------------------------------------------------

def partitioned(x):
    w = tf.get_variable('w', [3], initializer=ONE, partitioner=tf.fixed_size_partitioner(2))
    return tf.reduce_mean(x) * tf.reduce_sum(tf.convert_to_tensor(w) * [1., 10., 100.])


def scopes_with_a_default_name(x):
    for _ in range(3):
        with tf.variable_scope(None, default_name='block'):
            x = x * weight()
    return tf.reduce_mean(x)


def layers_without_a_name(x):
    with slim.arg_scope([slim.fully_connected], weights_initializer=ONE, activation_fn=None):
        x = slim.fully_connected(slim.fully_connected(x[:, None], 2), 1)
    return tf.reduce_mean(slim.batch_norm(x, is_training=False))


def reuse_of_its_own(x):
    with tf.variable_scope('d', reuse=tf.AUTO_REUSE) as scope:
        y = x * weight()
        scope.reuse_variables()
        loss = tf.reduce_mean(y) + tf.reduce_mean(2. * x * weight())
    tf.get_variable_scope().reuse_variables()  # as the recipe has it at its end
    return loss


def made_within_a_loop(x):
    def body(i, total):
        return i + 1, total + mean(x)
    return tf.while_loop(lambda i, unused: i < 2, body, [0, 0.])[1]


def getter_of_its_own(x):
    with tf.variable_scope('m', custom_getter=lambda getter, *args, **kwargs: 2. * getter(
            *args, **kwargs)):
        return tf.reduce_mean(x * weight())


def without_get_variable(x):
    """Under a name scope, a variable scope and both; two without a name, one by another's value."""
    top = tf.Variable(1., name='top')
    with tf.name_scope('n'):
        in_name_scope = tf.Variable(1., name='v')
        with tf.variable_scope('s'):
            in_both = tf.Variable(lambda: tf.ones([]), name='v')
            got = tf.get_variable('got', [], initializer=ONE)
    unnamed = [tf.Variable(1.), tf.Variable(tf.reduce_sum(BATCH) / 12., trainable=False)]
    return tf.reduce_mean(x) * (top + 2. * in_name_scope + 4. * in_both + 8. * got
                                + 16. * unnamed[0] + 32. * unnamed[1])


def names_of_operations_and_towers(x):
    x = tf.identity(x, name='Variable')
    value = tf.reduce_mean(x * tf.Variable([2.]), name='mean')
    with tf.variable_scope(value.op.name):
        value = value * weight('b')
    with tf.variable_scope('tower_1'):
        return value + mean(x)


def averages_of_variables(x):
    w, direct = weight(), tf.Variable(1., name='direct')
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                         tf.train.ExponentialMovingAverage(0.5).apply([w, direct]))
    return tf.reduce_mean(x * w) + direct


def the_global_step(x):
    return mean(x) * (tf.cast(tf.train.get_or_create_global_step(), tf.float32) + 1.)


def all_in_scopes_of_their_own(x):
    total = 0.
    for model_fn in (partitioned, scopes_with_a_default_name, layers_without_a_name,
                     made_within_a_loop, getter_of_its_own, without_get_variable,
                     names_of_operations_and_towers):
        with tf.variable_scope(model_fn.__name__):
            total = total + model_fn(x)
    return total


@pytest.mark.parametrize('model_fn', first_fast(1, [
    reuse_of_its_own, averages_of_variables, the_global_step, all_in_scopes_of_their_own]))
def test_they_are_those_of_one_device(graph, model_fn):
    """Names, collections, values after a step, slots; on the CPU, and each once in the graph."""
    mend_slim()
    keys = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES,
            tf.GraphKeys.MOVING_AVERAGE_VARIABLES, tf.GraphKeys.GLOBAL_STEP]
    with tf.Graph().as_default():
        batch = tf.constant(BATCH)
        with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
            loss = 2. * model_fn(batch)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = tf.train.MomentumOptimizer(1., 0.9).minimize(loss)
        expected = values_after(train_op), list(map(names, keys))
    built = build(model_fn, ['/cpu:1', '/cpu:0'], tf.train.MomentumOptimizer(1., 0.9))
    found = list(map(names, keys))
    assert found == expected[1] and not tf.get_variable_scope().reuse
    assert {variable.device for variable in tf.global_variables()} == {'/device:CPU:0'}
    assert [op.name for op in graph.get_operations() if op.type == 'VarHandleOp'] == found[0]
    if model_fn is not averages_of_variables:  # of the old values, or the new, as it happens
        assert values_after(built.train_op) == expected[0]
    assert all(tower.variables == built.variables for tower in built.towers)


def test_a_getter_that_reads_the_moving_average():
    average = tf.train.ExponentialMovingAverage(0.5)
    w = tf.get_variable('w', [], initializer=tf.constant_initializer(3.))
    average.apply([w])

    def model_fn(x):
        def averaged(getter, name, *args, **kwargs):
            return average.average(getter(name, *args, **kwargs))
        with tf.variable_scope(tf.get_variable_scope(), custom_getter=averaged):
            return {'loss': tf.reduce_mean(x * tf.get_variable('w', []))}
    built = build_towers(model_fn, BATCH, None, 2, reuse=True)
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(tf.assign(w, 100.))
        assert session.run(built.loss) == 9.


def test_variables_colocated_with_an_activation_are_where_variables_are():
    def model_fn(x):
        h = x * weight()
        value = tf.reduce_mean(h, name='mean')
        with tf.colocate_with(h):
            average = create_zeros_slot(value, 'average')
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, value))
        return value
    with tf.Graph().as_default():
        model_fn(tf.constant(BATCH))
        expected = names()
    built = build(model_fn, optimizer=SGD(0.))
    assert names() == expected
    average, = [each for each in tf.global_variables() if 'average' in each.op.name]
    assert average.device == '/device:CPU:0' and not audit(built).broken
    assert values_after(built.train_op)[average.op.name] == 1.5  # the first tower's mean


@pytest.mark.parametrize('copies', first_fast(1, ['clone', 'reuse']))
def test_a_scope_from_before_the_build_makes_variables_by_name(copies):
    """The loss of its regularizer, which the model adds to its own, counts once."""
    with tf.variable_scope('before', regularizer=tf.square) as scope:
        pass

    def model_fn(x):
        with tf.variable_scope(scope, reuse=tf.AUTO_REUSE):
            return mean(x) + tf.losses.get_regularization_loss()
    built = build(model_fn, reduction='mean', regularization='add', copies=copies)
    assert values_after(built.train_op) == {'before/w': 1. - (3. + 2.)}
    assert not built.direct_variables


# ---- reuse ---------------------------------------------------------------------------------------

EXISTS = ("variable 'w' exists already in this graph: pass reuse=True (or tf.AUTO_REUSE) to share "
          'it with the towers, or open a tf.variable_scope in the model function for a second ')


def test_a_name_that_one_call_makes_twice():
    def model_fn(x):
        return mean(x) + mean(x)
    assert error_of(model_fn).startswith(EXISTS)

    def mended(x):  # as the text says
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            return model_fn(x)
    with tf.Graph().as_default():
        assert [each.op.name for each in build(mended).variables] == ['w']


@pytest.mark.slow
def test_a_variable_from_before_is_shared_and_another_set_is_made():
    with tf.variable_scope('', use_resource=False):
        w = weight()
    assert error_of(mean).startswith(EXISTS)
    for reuse in True, tf.AUTO_REUSE:
        with tf.Graph().as_default():
            with tf.variable_scope('', use_resource=False):
                w = weight()
            built = build(mean, reuse=reuse)
            assert built.variables == [w] and values_after(built.train_op) == {'w': -5.}
            with tf.variable_scope('second'):
                build(mean)
            assert names() == ['w', 'second/w']


def test_what_reuse_does_not_find():
    with tf.Graph().as_default():
        assert error_of(mean, reuse=True).startswith(
            "variable 'w' does not exist in this graph, and reuse is on")
    with tf.Graph().as_default():
        earlier = build(mean)
    with pytest.raises(TowersError, match='reuse=<BuiltTowers: .* belongs to another graph than'):
        build(mean, reuse=earlier)
    tf.get_variable('w', [3])
    assert error_of(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), reuse=True) == (
        "variable 'w' cannot be shared: give it the same shape, dtype and partitions as the "
        'variable that reuse= found.')


# ---- reuse by a later build ----------------------------------------------------------------------

@pytest.mark.parametrize('first, second, text', first_fast(1, [
    (dict(v=[]), dict(v=[], w=[]),
     "'w' of shape () and dtype float32 as its variable number 2 made without get_variable; the "
     'earlier build made none there. '),
    (dict(a=[], b=[2]), dict(a=[], b=[3]),
     "'b' of shape (3,) and dtype float32 as its variable number 2 made without get_variable; the "
     "earlier build made 'b' of shape (2,) and dtype float32 there. "),
    (dict(a=[]), dict(b=[]),
     "'b' of shape () and dtype float32 as its variable number 1 made without get_variable; the "
     "earlier build made 'a' of shape () and dtype float32 there. ")]))
def test_a_later_build_that_makes_others_is_refused(first, second, text):
    def making(shapes, wrapped):
        def model_fn(x):
            made = [tf.Variable((lambda shape=shape: tf.ones(shape)) if wrapped else
                                tf.ones(shape), name=name) for name, shape in shapes.items()]
            return tf.reduce_mean(x) * tf.add_n([tf.reduce_sum(each) for each in made])
        return model_fn
    for wrapped in (False, True):
        with tf.Graph().as_default():
            earlier = build(making(first, wrapped))
            with pytest.raises(SharedVariableError) as caught:
                build_again(earlier, making(second, wrapped))
        assert str(caught.value) == 'the model function asks for ' + text + (
            'Make the same variables in the same order as the earlier build did, or make them with '
            'tf.get_variable.')


def in_another_order(x):
    made = {name: tf.Variable(1., name=name) for name in names() or 'ab'}
    return tf.reduce_mean(x) * (made['a'] + 10. * made['b'])


def cached(x):
    with tf.variable_scope(tf.get_variable_scope(), caching_device='/cpu:0'):
        return mean(x)


@pytest.mark.parametrize('model_fn, first, trained', first_fast(1, [
    (without_get_variable, 63., 63. - 6. * (1. + 4. + 16. + 64. + 256.)),
    (in_another_order, 11., 11. - 6. * 101.), (cached, 1., -5.),
    (tf.make_template('T', mean), 1., -5.)]))
def test_a_later_build_shares_all_with_an_earlier(model_fn, first, trained):
    training = build(model_fn)
    before = names()
    evaluation = build_again(training, model_fn)
    assert names() == before and set(evaluation.variables) == set(training.variables)
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(evaluation.loss) == 3. * first
        session.run(training.train_op)
        assert session.run(evaluation.loss) == 3. * trained
