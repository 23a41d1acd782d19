"""towers.variables: one set of variables for all towers, whichever call makes them.

The batch of the models below is [1, 2, 3, 6] on two towers, so that the loss `mean(x * f(w))` has
the gradient 1.5 f' in tower 0 and 4.5 f' in tower 1: 6 f' for their sum, 3 f' for the mean.
"""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim
from tensorflow.python.training.slot_creator import create_zeros_slot

from towers import (SharedVariableError, TowersError, VariablePlacement, audit, build_towers,
                    mend_slim, session_config)
from towers.graph.variable_access import variables_read
from towers.placement.variable_device import Placement
from towers.tower.variables import owner_by_name, slot_creator, without_numbers

BATCH = np.float32([1., 2., 3., 6.])
ONE = tf.ones_initializer()
slow = pytest.mark.slow


@pytest.fixture(params=[True, pytest.param(False, marks=slow)], ids=['resource', 'reference'])
def resource(request, graph):
    """Each kind of variable with the control flow of its time, as TF 2 itself mixes them badly.

    TF 2's cond cannot initialize the average of a reference variable, and TF 1's while_loop cannot
    have a gradient of a resource variable on another device.
    """
    was_v2 = tf.control_flow_v2_enabled()
    if not request.param:
        tf.disable_control_flow_v2()
    tf.get_variable_scope().set_use_resource(request.param)
    yield request.param
    if was_v2:
        tf.enable_control_flow_v2()


def build(model_fn, devices=2, optimizer=None, **kwargs):
    return build_towers(model_fn, tf.constant(BATCH),
                        optimizer or tf.train.GradientDescentOptimizer(1.), devices,
                        copies='reuse', **kwargs)


def after_one_step(built):
    """{variable name: its value} after one step of SGD at rate 1, from weights of one."""
    with tf.Session(config=session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.train_op)
        return {v.op.name: session.run(v).tolist() for v in tf.global_variables()}


def names(collection=tf.GraphKeys.GLOBAL_VARIABLES):
    return [variable.op.name for variable in tf.get_collection(collection)]


def names_on_one_device(model_fn, collection=tf.GraphKeys.GLOBAL_VARIABLES):
    with tf.Graph().as_default():
        model_fn(tf.constant(BATCH))
        return names(collection)


def error_of(model_fn, **kwargs):
    graph = tf.get_default_graph()
    before = {key: graph.get_collection(key) for key in graph.get_all_collection_keys()}
    with pytest.raises(SharedVariableError) as caught:
        build(model_fn, **kwargs)
    # No variable, no update, no loss of the towers is left in the caller's collections.
    assert {key: graph.get_collection(key) for key in graph.get_all_collection_keys()
            if graph.get_collection(key)} == {key: kept for key, kept in before.items() if kept}
    return str(caught.value)


@pytest.mark.parametrize('options', [{}, {'variable_scope': 'model'}])
def test_a_name_that_one_call_makes_twice(options):
    def model_fn(x):
        return tf.reduce_mean(sum(x * tf.get_variable('w', [], initializer=ONE) for _ in range(2)))
    name = 'model/w' if options else 'w'
    assert error_of(model_fn, **options) == (
        'variable %r is made twice in one call of the model function: where both are to be one, '
        'use tf.variable_scope(..., reuse=tf.AUTO_REUSE) inside the model function; else give it '
        'another name.' % name)

    def mended(x):  # as the text says
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            return model_fn(x)
    with tf.Graph().as_default():
        assert [each.op.name for each in build(mended, **options).variables] == [name]


def test_a_name_that_is_there_before_the_build():
    tf.get_variable('w', [])
    assert error_of(lambda x: tf.reduce_mean(x * tf.get_variable('w', []))) == (
        "variable 'w' exists already in this graph: pass reuse=True (or tf.AUTO_REUSE) to share it "
        'with the towers, or variable_scope=... for a second set.')


def counted(calls):
    """A function that tells how often it was called before: 0 in the first tower, 1 in the next."""
    calls.append(None)
    return len(calls) - 1


# ---- get_variable -------------------------------------------------------------------------------

@pytest.mark.parametrize('towers', [2, pytest.param(4, marks=slow)])
def test_get_variable_is_shared_and_pinned(resource, towers):
    def model_fn(x):
        with tf.variable_scope('a'):
            w = tf.get_variable('w', [], initializer=ONE)
        return tf.reduce_mean(x * w)
    built = build(model_fn, towers)
    assert names() == ['a/w'] == names_on_one_device(model_fn)
    (w,) = tf.global_variables()
    assert w.device == '/device:CPU:0'
    assert w.op.type == ('VarHandleOp' if resource else 'VariableV2')
    assert built.variables == [w] and built.direct_variables == ()
    assert all(tower.variables == [w] for tower in built.towers)
    assert after_one_step(built) == {'a/w': 1. - 3. * towers}  # N times the mean of the batch


def test_there_is_one_operation_of_a_variable_in_the_graph(graph, resource):
    build(lambda x: tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE)), 4)
    assert [op.name for op in graph.get_operations()
            if op.type in ('VariableV2', 'VarHandleOp')] == ['w']
    assert [op.name for op in graph.get_operations() if op.type.startswith('Assign')
            and not op.name.startswith('GradientDescent')] == ['w/Assign']


def test_partitioned_variables(resource):
    def model_fn(x):
        w = tf.get_variable('w', [3], initializer=ONE, partitioner=tf.fixed_size_partitioner(2))
        return tf.reduce_mean(x) * tf.reduce_sum(tf.convert_to_tensor(w) * [1., 10., 100.])
    built = build(model_fn)
    assert names() == ['w/part_0', 'w/part_1'] == names_on_one_device(model_fn)
    assert after_one_step(built) == {'w/part_0': [-5., -59.], 'w/part_1': [-599.]}


def test_scopes_with_a_default_name_are_numbered_as_on_one_device(resource):
    def model_fn(x):
        for _ in range(3):
            with tf.variable_scope(None, default_name='block'):
                x = x * tf.get_variable('w', [], initializer=ONE)
        return tf.reduce_mean(x)
    built = build(model_fn)
    assert names() == ['block/w', 'block_1/w', 'block_2/w'] == names_on_one_device(model_fn)
    assert set(after_one_step(built).values()) == {-5.}


def test_unnamed_layers_of_slim(resource):
    mend_slim()

    def model_fn(x):
        x = slim.fully_connected(x[:, None], 2, activation_fn=None)
        x = slim.fully_connected(x, 1, activation_fn=None)
        x = slim.batch_norm(x, is_training=True)
        return tf.reduce_mean(slim.batch_norm(x, is_training=True))
    build(model_fn)
    expected = names_on_one_device(model_fn)
    assert names() == expected
    assert [name for name in expected if 'moving' not in name] == [
        'fully_connected/weights', 'fully_connected/biases', 'fully_connected_1/weights',
        'fully_connected_1/biases', 'BatchNorm/beta', 'BatchNorm_1/beta']
    assert names(tf.GraphKeys.TRAINABLE_VARIABLES) == [
        name for name in expected if 'moving' not in name]
    assert {v.device for v in tf.global_variables()} == {'/device:CPU:0'}


def test_unnamed_layers_of_tf_layers(resource):
    try:
        tf.layers.dense
    except (AttributeError, ImportError):
        pytest.skip('tf.layers needs tf-keras and TF_USE_LEGACY_KERAS=1 from TensorFlow 2.16 on')

    def model_fn(x):
        x = tf.layers.dense(x[:, None], 2, kernel_initializer=ONE)
        x = tf.layers.batch_normalization(x, training=True)
        return tf.reduce_mean(tf.layers.dense(x, 1))
    built = build(model_fn)
    expected = names_on_one_device(model_fn)
    assert names() == expected and 'dense_1/kernel' in expected
    assert built.direct_variables == ()


def test_custom_getters_of_model_and_caller(resource):
    seen = []

    def doubled(getter, name, *args, **kwargs):
        seen.append(('model', name))
        return getter(name, *args, **kwargs) * 2.

    def noted(getter, name, *args, **kwargs):
        seen.append(('caller', name))
        return getter(name, *args, **kwargs)

    def model_fn(x):
        with tf.variable_scope('m', custom_getter=doubled):
            return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
    with tf.variable_scope('outer', custom_getter=noted):
        built = build(model_fn)
    assert seen == [('model', 'outer/m/w'), ('caller', 'outer/m/w')] * 2
    assert after_one_step(built) == {'outer/m/w': 1. - 2. * 6.}


def test_a_getter_that_reads_the_moving_average(resource):
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


def test_the_models_own_reuse(resource):
    def discriminator(x, reuse):
        with tf.variable_scope('d') as scope:
            if reuse:
                scope.reuse_variables()
            return x * tf.get_variable('w', [], initializer=ONE)

    def model_fn(x):
        loss = tf.reduce_mean(discriminator(x, False)) + tf.reduce_mean(discriminator(2. * x, True))
        tf.get_variable_scope().reuse_variables()  # as the recipe has it at the end of each tower
        return loss
    built = build(model_fn)
    assert after_one_step(built) == {'d/w': 1. - 3. * 6.}
    assert not tf.get_variable_scope().reuse  # the caller's scope is as it was


@pytest.mark.parametrize('reuse', [tf.AUTO_REUSE, None, False])
def test_the_models_own_reuse_argument(resource, reuse):
    def model_fn(x):
        with tf.variable_scope('m', reuse=reuse):
            return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
    assert after_one_step(build(model_fn)) == {'m/w': -5.}


def test_auto_reuse_under_a_name_of_each_call_is_an_error(resource):
    calls = []

    def model_fn(x):
        with tf.variable_scope('call_%d' % counted(calls), reuse=tf.AUTO_REUSE):
            return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
    assert error_of(model_fn) == (
        "variable 'call_1/w' is new in tower 1, the first tower has none of that name: the model "
        'function has to make the same names in every call; look for a name that counts calls, or '
        'a scope with reuse=tf.AUTO_REUSE under a name of its own.')


def test_a_name_of_each_call_is_an_error(resource):
    calls = []

    def model_fn(x):
        w = tf.get_variable('w_%d' % counted(calls), [], initializer=ONE)
        return tf.reduce_mean(x * w)
    assert error_of(model_fn) == (
        "variable 'w_1' of tower 1 does not exist in the first tower: the model function has to "
        'make the same names in every call; look for a name that counts calls, or a branch that '
        'depends on the call.')


def test_a_shape_of_each_call_is_an_error(resource):
    calls = []

    def model_fn(x):
        w = tf.get_variable('w', [1 + counted(calls)], initializer=ONE)
        return tf.reduce_mean(x) * tf.reduce_sum(w)
    assert error_of(model_fn) == (
        "variable 'w' of tower 1 cannot be shared: Trying to share variable w, but specified shape "
        '(2,) and found shape (1,). Give it the same shape, dtype and partitions in every call of '
        'the model function.')


def test_a_dtype_of_each_call_is_an_error(resource):
    calls = []

    def model_fn(x):
        w = tf.get_variable('w', [], [tf.float32, tf.float64][counted(calls)], initializer=ONE)
        return tf.reduce_mean(x) * tf.cast(w, tf.float32)
    text = error_of(model_fn)
    assert text.startswith("variable 'w' of tower 1 cannot be shared: Trying to share variable w, "
                           'but specified dtype float64 and found dtype float32')
    assert text.endswith('in every call of the model function.')


def test_partitions_of_each_call_are_an_error(resource):
    calls = []

    def model_fn(x):
        partitioner = tf.fixed_size_partitioner(2) if counted(calls) else None
        w = tf.get_variable('w', [2], initializer=ONE, partitioner=partitioner)
        return tf.reduce_mean(x) * tf.reduce_sum(tf.convert_to_tensor(w))
    text = error_of(model_fn)
    assert text.startswith("variable 'w' of tower 1 cannot be shared: A partitioner was provided")


def test_a_variable_that_the_graph_has_already(resource):
    tf.get_variable('w', [], initializer=ONE)
    model_fn = lambda x: tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))  # noqa: E731
    assert error_of(model_fn) == (
        "variable 'w' exists already in this graph: pass reuse=True (or tf.AUTO_REUSE) to share it "
        'with the towers, or variable_scope=... for a second set.')


def test_a_second_build_of_a_variable_shares_it_or_makes_another(resource):
    tf.get_variable('w', [], initializer=ONE)
    model_fn = lambda x: tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))  # noqa: E731
    for name, kwargs in (('a', {'reuse': True}), ('b', {'reuse': tf.AUTO_REUSE})):
        assert build(model_fn, name=name, **kwargs).variables == tf.global_variables() == [
            tf.global_variables()[0]]
    build(model_fn, name='c', variable_scope='second')
    assert names() == ['w', 'second/w']


def test_reuse_with_nothing_to_reuse(resource):
    model_fn = lambda x: tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))  # noqa: E731
    for options, name in (({'reuse': True}, 'w'), ({'reuse': True, 'variable_scope': 's'}, 's/w')):
        with tf.Graph().as_default():
            text = error_of(model_fn, **options)
        assert text.startswith('variable %r does not exist in this graph, and reuse is on' % name)
        assert 'tf.AUTO_REUSE' in text
    with tf.Graph().as_default(), tf.variable_scope('around', reuse=True):
        assert error_of(model_fn).startswith("variable 'around/w' does not exist in this graph")
    with tf.Graph().as_default():
        earlier = build(model_fn)
    with pytest.raises(TowersError, match='reuse=<BuiltTowers: .* belongs to another graph than'):
        build(model_fn, reuse=earlier)


def test_an_earlier_build_with_counters_alone_hands_nothing_over(resource):
    def counts(x):
        w = tf.get_variable('w', [], initializer=ONE)
        return {'loss': tf.reduce_mean(x * w), 'metrics': {'mean': tf.metrics.mean(x)}}

    def makes_more(x):
        scale = tf.Variable(2., trainable=False, name='scale')
        return tf.reduce_mean(x * scale * tf.get_variable('w', [], initializer=ONE))
    earlier = build(counts)
    assert len(earlier.direct_variables) == 2  # a total and a count
    again = build(makes_more, reuse=earlier, name='again')
    assert [each.requested_name for each in again.direct_variables] == ['scale']


def test_a_reuse_of_the_models_own_that_finds_nothing(resource):
    """TensorFlow's error is about the model function's own scope, and says so."""
    def model_fn(x):
        with tf.variable_scope('own', reuse=True):
            return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
    with pytest.raises(ValueError, match='Variable own/w does not exist') as caught:
        build(model_fn)
    assert not isinstance(caught.value, TowersError)


def test_a_variable_that_reuse_finds_in_another_shape(resource):
    tf.get_variable('w', [3])
    text = error_of(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), reuse=True)
    assert text.startswith("variable 'w' of tower 0 cannot be shared: Trying to share variable w, ")
    assert text.endswith('Give it the same shape, dtype and partitions as the variable that reuse= '
                         'found.')


def test_other_errors_of_the_model_stay_what_they_are(resource):
    def model_fn(x):
        return tf.reduce_mean(x * tf.get_variable('w', [None]))
    with pytest.raises(ValueError) as caught:
        build(model_fn)
    assert not isinstance(caught.value, SharedVariableError)
    assert 'w' in str(caught.value)


def test_a_variable_made_within_a_loop(resource):
    def model_fn(x):
        def body(i, total):
            return i + 1, total + tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
        return tf.while_loop(lambda i, unused: i < 2, body, [0, 0.])[1]
    assert after_one_step(build(model_fn)) == {'w': 1. - 2. * 6.}


# ---- tf.Variable --------------------------------------------------------------------------------

def direct_model(x):
    """Variables at the top, under a name scope, a variable scope and both; two without a name."""
    top = tf.Variable(1., name='top')
    with tf.name_scope('n'):
        in_name_scope = tf.Variable(1., name='v')
        with tf.variable_scope('s'):
            in_both = tf.Variable(lambda: tf.ones([]), name='v')
            got = tf.get_variable('got', [], initializer=ONE)
    unnamed = [tf.Variable(1.), tf.Variable(1., trainable=False)]
    return tf.reduce_mean(x) * (top + 2. * in_name_scope + 4. * in_both + 8. * got
                                + 16. * unnamed[0] + 32. * unnamed[1])


DIRECT = {'top': 1., 'n/v': 2., 'n/s/v': 4., 's/got': 8., 'Variable': 16., 'Variable_1': None}


def test_direct_variables_are_shared_under_the_models_own_names(resource):
    built = build(direct_model)
    assert names() == names_on_one_device(direct_model)
    assert set(names()) == set(DIRECT)
    assert names(tf.GraphKeys.TRAINABLE_VARIABLES) == [name for name in names()
                                                       if name != 'Variable_1']
    assert [each.variable.op.name for each in built.direct_variables] == [
        'top', 'n/v', 'n/s/v', 'Variable', 'Variable_1']
    assert [each.requested_name for each in built.direct_variables] == [
        'top', 'n/v', 'n/s/v', 'Variable', 'Variable']
    assert {v.device for v in built.variables} == {'/device:CPU:0'}
    assert after_one_step(built) == {
        name: 1. if factor is None else 1. - 6. * factor for name, factor in DIRECT.items()}


def test_direct_variables_under_scopes_of_the_caller(resource):
    def in_scopes(call):
        with tf.name_scope('outer'), tf.variable_scope('v'):
            return call()
    with tf.Graph().as_default():
        in_scopes(lambda: direct_model(tf.constant(BATCH)))
        expected = names()
    built = in_scopes(lambda: build(direct_model))
    assert names() == expected
    assert 'outer/v/n/s/v' in expected and 'v/s/got' in expected
    assert after_one_step(built)['outer/v/n/s/v'] == 1. - 6. * 4.


def test_variable_scope_is_for_direct_variables_too(resource):
    with tf.Graph().as_default():
        with tf.variable_scope('tower'):
            direct_model(tf.constant(BATCH))
        expected = names()
    built = build(direct_model, variable_scope='tower')
    assert names() == expected and 'tower/n/s/v' in expected and 'tower/s/got' in expected
    assert after_one_step(built)['tower/n/s/v'] == 1. - 6. * 4.
    # A second set beside it, and neither has moved the other's names.
    build(direct_model, variable_scope='more', name='more_towers')
    assert names() == expected + [name.replace('tower/', 'more/') for name in expected]


def test_variable_scope_gives_the_recipes_names_to_slots_as_well(resource):
    def model_fn(x):
        return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE) * tf.Variable(1.))
    built = build(model_fn, optimizer=tf.train.MomentumOptimizer(1., 0.9), variable_scope='tower')
    assert names() == ['tower/w', 'tower/Variable', 'tower/w/Momentum', 'tower/Variable/Momentum']
    assert [op.name for op in tf.get_default_graph().get_operations()
            if op.name.startswith('tower/') and op.type == 'Mean'] == []
    assert built.towers[1].loss.op.name.startswith('tower_1/')


@pytest.mark.parametrize('balanced', [False, True])
def test_a_direct_variable_may_take_its_value_from_another(balanced):
    outside = tf.constant([2., 3.])

    def model_fn(x):
        first = tf.Variable(outside * 2., name='first')
        second = tf.Variable(lambda: tf.reduce_sum(outside), name='second')
        return tf.reduce_mean(x) * (tf.reduce_sum(first) + second)
    built = build(model_fn, variables=VariablePlacement('balanced' if balanced else None))
    assert after_one_step(built) == {'first': [-2., 0.], 'second': -1.}


def test_direct_variables_in_another_order_are_told_apart_by_name(resource):
    calls = []

    def model_fn(x):
        order = ['a', 'b'] if counted(calls) else ['b', 'a']
        made = {name: tf.Variable(1., name=name) for name in order}
        return tf.reduce_mean(x) * (made['a'] + 10. * made['b'])
    assert after_one_step(build(model_fn)) == {'a': -5., 'b': -59.}


def test_a_direct_variable_kept_from_the_first_call_is_shared(resource):
    kept = {}

    def model_fn(x):
        if 'w' not in kept:
            kept['w'] = tf.Variable(1., name='w')
        return tf.reduce_mean(x * kept['w'] * tf.Variable(1., name='u'))
    assert after_one_step(build(model_fn)) == {'w': -5., 'u': -5.}


def direct_error(make):
    """The error of a model that makes `make(call)`, a list of direct variables, in each call."""
    calls = []

    def model_fn(x):
        made = make(counted(calls))
        return tf.reduce_mean(x) * tf.add_n([tf.cast(tf.reduce_sum(v), tf.float32) for v in made])
    return error_of(model_fn)


FIX = ('Make the same variables in the same order in every call of the model function, or make '
       'them with tf.get_variable.')


def test_more_direct_variables_in_a_later_tower(resource):
    assert direct_error(lambda call: [tf.Variable(1., name='v') for _ in range(2 + call)]) == (
        "tower 1 makes variable 'v' without get_variable, beyond the 2 that the first tower made "
        'so: make the same variables in every call of the model function, or make them with '
        'tf.get_variable.')


def test_fewer_direct_variables_in_a_later_tower(resource):
    assert direct_error(
        lambda call: [tf.Variable(1., name='v%d' % i) for i in range(3 - call)]) == (
            'tower 1 used 2 of the 3 variables that the first tower made without get_variable; it '
            "left out 'v2'. Make the same variables in every call of the model function, or make "
            'them with tf.get_variable.')


def test_direct_variables_of_another_shape(resource):
    expected = ("tower 1 asks for 'b' as its variable number 2 made without get_variable of shape "
                '(3,); the first tower made it of shape (2,). ' + FIX)
    assert direct_error(lambda call: [tf.Variable(1., name='a'),
                                      tf.Variable(tf.ones([2 + call]), name='b')]) == expected
    with tf.Graph().as_default():
        assert direct_error(lambda call: [
            tf.Variable(lambda: 1., name='a'),
            tf.Variable(lambda: tf.ones([2 + call]), name='b')]) == expected


def test_direct_variables_of_another_dtype(resource):
    assert direct_error(lambda call: [
        tf.Variable(1., name='a', dtype=[tf.float32, tf.float64][call])]) == (
            "tower 1 asks for 'a' as its variable number 1 made without get_variable of dtype "
            'float64; the first tower made it of dtype float32. ' + FIX)


def test_direct_variables_of_another_name(resource):
    assert direct_error(lambda call: [tf.Variable(1., name='ab'[call])]) == (
        "tower 1 asks for 'b' as its variable number 1 made without get_variable; the first tower "
        "made 'a' there. " + FIX)


def test_a_direct_variable_for_one_that_get_variable_made(resource):
    calls = []

    def model_fn(x):
        w = tf.Variable(1., name='w') if counted(calls) else tf.get_variable('w', [],
                                                                             initializer=ONE)
        return tf.reduce_mean(x * w)
    assert "tower 1 makes variable 'w' without get_variable, beyond the 0" in error_of(model_fn)


def test_a_third_tower_is_named(resource):
    calls = []

    def model_fn(x):
        w = tf.get_variable('u' if counted(calls) < 2 else 'v', [], initializer=ONE)
        return tf.reduce_mean(x * w)
    assert error_of(model_fn, devices=4).startswith(
        "variable 'v' of tower 2 does not exist in the first tower")


# ---- reuse by a later build ---------------------------------------------------------------------

def test_a_later_build_shares_all_with_an_earlier(resource):
    training = build(direct_model)
    before = names()
    evaluation = build_towers(direct_model, BATCH, None, 2, reuse=training, name='evaluate')
    assert names() == before
    assert {v.op.name for v in evaluation.variables} == set(DIRECT)
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(evaluation.loss) == 3. * 63.
        session.run(training.train_op)
        trained = sum(factor * (1. - 6. * factor) for factor in (1., 2., 4., 8., 16.)) + 32.
        assert session.run(evaluation.loss) == 3. * trained


def test_a_later_build_that_makes_more(resource):
    training = build(lambda x: tf.reduce_mean(x * tf.Variable(1., name='v')))
    with pytest.raises(SharedVariableError) as caught:
        build_towers(lambda x: tf.reduce_mean(x * tf.Variable(1., name='v') * tf.Variable(
            1., name='w')), BATCH, None, 2, reuse=training, name='evaluate')
    assert str(caught.value).startswith(
        "tower 0 makes variable 'w' without get_variable, beyond the 1 that the earlier build made")


@pytest.mark.parametrize('reuse', [None, True, tf.AUTO_REUSE])
def test_a_caller_inside_a_scope_with_reuse(resource, reuse):
    if reuse:
        with tf.variable_scope('m'):
            existing = tf.get_variable('w', [], initializer=ONE)
    with tf.variable_scope('m', reuse=reuse):
        built = build(lambda x: tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE)),
                      optimizer=tf.train.MomentumOptimizer(1., 0.9))
        assert bool(tf.get_variable_scope().reuse) == bool(reuse)  # as it was
    if reuse:
        assert built.variables == [existing]
    assert names() == ['m/w', 'm/m/w/Momentum']  # TF's own name for a slot under a scope
    assert after_one_step(built) == {'m/w': -5., 'm/m/w/Momentum': 6.}


# ---- local variables, moving averages, the global step ------------------------------------------

def metric_model(x):
    w = tf.get_variable('w', [], initializer=ONE)
    with tf.name_scope('metrics'):
        metrics = {'mean': tf.metrics.mean(x * w), 'root': tf.metrics.root_mean_squared_error(x, x)}
    return {'loss': tf.reduce_mean(x * w), 'metrics': metrics}


def test_counters_of_metrics_are_shared_and_atomic(resource):
    built = build(metric_model)
    local = tf.local_variables()
    assert names(tf.GraphKeys.LOCAL_VARIABLES) == names_on_one_device(
        metric_model, tf.GraphKeys.LOCAL_VARIABLES)
    assert len(local) == 4 and names() == ['w']
    # Towers add to them at the same time; that of a reference variable may lose one.
    assert {v.op.type for v in local} == {'VarHandleOp'}
    assert {v.device for v in local} == {'/device:CPU:0'}
    with tf.Session(config=session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for _ in range(3):
            session.run([update for _, update in built.metrics.values()])
        assert session.run(built.metrics['mean'][0]) == 3.
        counters = {v.op.name.rsplit('/', 1)[1]: session.run(v)
                    for v in local if '/mean/' in v.op.name}
    assert counters == {'total': 36., 'count': 12.}  # 3 x both shards


def test_get_local_variable_is_shared(resource):
    def model_fn(x):
        count = tf.get_local_variable('count', [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
        return {'loss': loss, 'updates': [tf.assign_add(count, 1.)]}
    build(model_fn)
    (count,) = tf.local_variables()
    assert (count.op.name, count.op.type) == ('count', 'VarHandleOp')


def test_moving_averages_made_by_the_model(resource):
    averages = []

    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONE)
        direct = tf.Variable(1., name='direct')
        average = tf.train.ExponentialMovingAverage(0.5)
        averages.append(average.apply([w, direct]))
        return {'loss': tf.reduce_mean(x * w) + direct, 'updates': [averages[-1]]}
    built = build(model_fn, ['/cpu:1', '/cpu:2'])
    expected = names_on_one_device(model_fn)
    assert names() == expected
    assert set(expected) == {'w', 'direct', 'w/ExponentialMovingAverage',
                             'direct/ExponentialMovingAverage'}
    assert {v.device for v in tf.global_variables()} == {'/device:CPU:0'}
    assert names(tf.GraphKeys.MOVING_AVERAGE_VARIABLES) == ['w', 'direct']
    with tf.Session(config=session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        session.run([tower.updates for tower in built.towers][0])
        values = {v.op.name: session.run(v) for v in tf.global_variables()}
    # The average of the first step is of the old 1, the one run by hand of the new -5 and -1.
    assert values == {'w': -5., 'direct': -1., 'w/ExponentialMovingAverage': -2.,
                      'direct/ExponentialMovingAverage': 0.}


def test_the_global_step_made_by_the_model(resource):
    steps = []

    def model_fn(x):
        steps.append(tf.train.get_or_create_global_step())
        rate = tf.cast(steps[-1], tf.float32) + 1.
        return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE)) * rate
    build(model_fn)
    assert names() == ['global_step', 'w'] == names_on_one_device(model_fn)
    assert steps[0] is steps[1] is tf.train.get_global_step()
    assert tf.get_collection(tf.GraphKeys.GLOBAL_STEP) == [steps[0]]
    assert steps[0].device == '/device:CPU:0'


def test_the_global_step_made_before(resource):
    step = tf.train.get_or_create_global_step()

    def model_fn(x):
        assert tf.train.get_or_create_global_step() is step
        return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
    built = build(model_fn, global_step=step)
    assert after_one_step(built) == {'global_step': 1, 'w': -5.}


# ---- slots, names -------------------------------------------------------------------------------

def test_slots_by_get_variable_go_beside_their_variable(resource):
    placement = Placement('balanced', ('/device:CPU:0', '/device:CPU:1'))
    variables, slots = [], []
    for name in ('a', 'b/kernel'):
        with placement.scope():
            variables.append(tf.get_variable(name, [4]))
        placement.note(variables[-1])
    with tf.device('/cpu:3'), tf.variable_creator_scope(slot_creator(placement, variables, slots)):
        made = [tf.get_variable(name, [4]) for name in
                ('a/adam_m', 'b/kernel/adam_m', 'scope/b/kernel/adam_v', 'b/other', 'power')]
    assert slots == made
    assert [slot.device[-1] for slot in made] == ['0', '1', '1', '3', '3']


@pytest.mark.parametrize('name,owner', [
    ('dense/kernel/Adam', 'dense/kernel'),
    ('dense/kernel/Adam_1', 'dense/kernel'),
    ('dense/kernel/a/b/c', 'dense/kernel'),
    ('dense/kernel', 'dense'),              # the longest name before its own end
    ('dense', None),
    ('other/Adam', None),
    ('dense/bias/Adam', 'dense'),
    ('m/dense/kernel/Adam', 'dense/kernel'),  # a scope around apply_gradients
    ('beta1_power', None)])
def test_owner_by_name(name, owner):
    by_name = {each: each for each in ('dense', 'dense/kernel')}
    assert owner_by_name(name, by_name) == owner


@pytest.mark.parametrize('name,plain', [
    ('dense_1/kernel', 'dense/kernel'), ('dense_1_2/kernel_3', 'dense/kernel'),
    ('dense/kernel', 'dense/kernel'), ('conv2d_1/w', 'conv2d/w'), ('layer2/w', 'layer2/w'),
    ('block_12/part_0', 'block/part'), ('a_1b/w', 'a_1b/w')])
def test_without_numbers(name, plain):
    assert without_numbers(name) == plain


# ---- names made of operations' names -------------------------------------------------------------

def average_of_a_tensor(x):
    w = tf.get_variable('w', [], initializer=ONE)
    with tf.variable_scope('model'):
        mean = tf.reduce_mean(x * w, name='mean')
        average = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([average.apply([mean])]):
            return tf.identity(mean)


def average_that_starts_at_zero(x):
    w = tf.get_variable('w', [], initializer=ONE)
    mean = tf.reduce_mean(x * w, name='mean')
    average = tf.train.ExponentialMovingAverage(0.5, zero_debias=True)
    with tf.control_dependencies([average.apply([mean])]):
        return tf.identity(average.average(mean)) + mean


def average_of_weights_in_float64(x):
    w = tf.get_variable('w', [], tf.float64, initializer=ONE)
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([average.apply([w])]):
        return tf.reduce_mean(tf.cast(x, tf.float64) * w)


def average_by_hand(x):
    w = tf.get_variable('w', [], initializer=ONE)
    with tf.name_scope('model'):
        mean = tf.reduce_mean(x * w, name='mean')
        slot = tf.get_variable(mean.op.name + '_average', [], initializer=ONE, trainable=False)
        direct = tf.Variable(1., name=mean.op.name.split('/')[-1] + '_direct', trainable=False)
    return mean * slot * direct


def scope_named_by_an_operation(x):
    w = tf.get_variable('w', [], initializer=ONE)
    mean = tf.reduce_mean(x * w, name='mean')
    with tf.variable_scope(mean.op.name):
        return mean * tf.get_variable('b', [], initializer=ONE)


def named_by_a_scope(x):
    w = tf.get_variable('w', [], initializer=ONE)
    with tf.name_scope('q') as scope:
        mean = tf.reduce_mean(x * w, name='mean')
        slot = tf.get_variable(scope + 'average', [], initializer=ONE, trainable=False)
        with tf.variable_scope(scope.rstrip('/')):
            slot = slot * tf.get_variable('other', [], initializer=ONE, trainable=False)
        return mean * slot * tf.Variable(1., name=scope + 'direct', trainable=False)


def named_by_a_scope_without_operations(x):
    with tf.name_scope('q') as scope:
        w = tf.get_variable(scope + 'w', [], initializer=ONE)
    return tf.reduce_mean(x * w)


def joined_names(x):
    w = tf.get_variable('w', [], initializer=ONE)
    with tf.name_scope('model'):
        mean = tf.reduce_mean(x * w, name='mean')
    for separator in '_-.':
        name = mean.op.name.replace('/', separator)
        mean *= tf.get_variable('of_' + name, [], initializer=ONE, trainable=False)
        mean *= tf.get_variable(name + '_average', [], initializer=ONE, trainable=False)
        mean *= tf.Variable(1., name=name + '_direct', trainable=False)
    return mean


def optimizer_inside(x):
    w = tf.get_variable('w', [], initializer=ONE)
    inner = tf.get_variable('inner', [], initializer=ONE, trainable=False)
    loss = tf.reduce_mean(x * w)
    step = tf.train.AdamOptimizer(0.1).minimize(tf.square(inner), var_list=[inner])
    with tf.control_dependencies([step]):
        return tf.identity(loss)


@pytest.mark.parametrize('options', [
    dict(copies='clone'), pytest.param(dict(variables=VariablePlacement('replicated')),
        marks=slow)],
    ids=['clone', 'replicated'])
@pytest.mark.parametrize('model_fn', [
    average_of_a_tensor, average_by_hand, scope_named_by_an_operation, joined_names,
    optimizer_inside] + [pytest.param(model_fn, marks=slow) for model_fn in (
        average_that_starts_at_zero, average_of_weights_in_float64, named_by_a_scope,
        named_by_a_scope_without_operations)], ids=lambda each: each.__name__)
def test_the_tower_is_in_no_variables_name(resource, model_fn, options):
    """Whichever call made it: one device's checkpoint loads."""
    expected = names_on_one_device(model_fn)
    for towers in (1, 2, 4):
        with tf.Graph().as_default():
            tf.get_variable_scope().set_use_resource(resource)
            build_towers(model_fn, tf.constant(BATCH), tf.train.GradientDescentOptimizer(1.),
                         towers, **options)
            assert sorted(names()) == sorted(expected)


def test_nor_within_scopes_of_the_caller(resource):
    for model_fn in (average_of_a_tensor, joined_names):
        with tf.Graph().as_default():
            with tf.variable_scope('train'):
                build(model_fn)
            found = names()
        with tf.Graph().as_default():
            with tf.variable_scope('train'):
                model_fn(tf.constant(BATCH))
            assert sorted(found) == sorted(names())


@pytest.mark.parametrize('has_name_scope', [True, False])
def test_a_scope_of_the_models_own_of_the_towers_name(resource, has_name_scope):
    def model_fn(x):
        with tf.variable_scope('tower_0', auxiliary_name_scope=has_name_scope):
            return tf.reduce_mean(x * tf.get_variable('w', [], initializer=ONE))
    build(model_fn)
    assert names() == ['tower_0/w']


@pytest.mark.parametrize('options', [
    dict(copies='clone'), dict(copies='reuse'),
    pytest.param(dict(variables=VariablePlacement('replicated')), marks=slow)],
    ids=['clone', 'reuse', 'replicated'])
@pytest.mark.parametrize('made_by', ['get_variable', 'Variable', 'slot_creator'])
def test_variables_colocated_with_an_activation_are_where_variables_are(resource, made_by, options):
    def model_fn(x):
        h = x * tf.get_variable('w', [], initializer=ONE)
        mean = tf.reduce_mean(h, name='mean')
        if made_by == 'slot_creator':
            average = create_zeros_slot(mean, 'average')
        else:
            with tf.colocate_with(h):
                average = (tf.get_variable('average', [], initializer=ONE, trainable=False)
                           if made_by == 'get_variable' else
                           tf.Variable(1., name='average', trainable=False))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, mean))
        return mean
    expected = names_on_one_device(model_fn)
    built = build_towers(model_fn, tf.constant(BATCH), tf.train.GradientDescentOptimizer(0.), 2,
                         'mean', **options)
    assert sorted(names()) == sorted(expected)
    average, = [each for each in tf.global_variables() if 'average' in each.op.name]
    assert average.device == '/device:CPU:0' and not audit(built).broken
    with tf.Session(config=session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.train_op)
        assert session.run(average) == 1.5  # the first tower's mean


def test_an_evaluation_reads_the_same_averages(resource):
    built = build(average_of_a_tensor)
    build_towers(average_of_a_tensor, tf.constant(BATCH), None, 2, reuse=built, name='evaluate')
    assert names() == names_on_one_device(average_of_a_tensor)


# ---- caches --------------------------------------------------------------------------------------

def test_a_later_build_whose_variables_are_cached(resource):
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONE, regularizer=tf.square)
        return tf.reduce_mean(x * w)
    with tf.variable_scope(tf.get_variable_scope(), caching_device='/cpu:0'):
        first = build(model_fn)
        second = build(model_fn, reuse=first, name='second')
    assert second.variables == first.variables
    assert second.plan.regularization == first.plan.regularization
    with tf.Session(config=session_config(first.devices)) as session:
        session.run(tf.global_variables_initializer())
        losses = session.run([first.loss, second.loss])
    assert losses[0] == losses[1]


# ---- names that are numbered ---------------------------------------------------------------------

def scope_of_before(x):
    with tf.name_scope('fc'):
        weight = tf.Variable([2.], name='weight')
    return tf.reduce_mean(x * weight)


def name_of_an_operation(x):
    x = tf.identity(x, name='weight')
    return tf.reduce_mean(x * tf.Variable([2.], name='weight') * tf.Variable([3.], name='weight'))


def unnamed(x):
    x = tf.identity(x, name='Variable')
    return tf.reduce_mean(x * tf.Variable([2.]))


@pytest.mark.parametrize('copies', ['clone', 'reuse'])
@pytest.mark.parametrize('model_fn', [scope_of_before, name_of_an_operation, unnamed])
def test_direct_variables_are_numbered_as_on_one_device(resource, model_fn, copies):
    def batch():
        with tf.name_scope('fc'):  # as the model's own
            return tf.constant([1., 2.]) * 2
    with tf.Graph().as_default():
        tf.get_variable_scope().set_use_resource(resource)
        model_fn(batch())
        expected = names()
    built = build_towers(model_fn, batch(), tf.train.GradientDescentOptimizer(0.1), 2,
                         copies=copies)
    assert names() == expected and all(re.search(r'_1$|^fc_1/', name) for name in expected[:1])
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)


def test_an_optimizer_of_the_models_own_and_one_around_it(resource):
    def model_fn(x):
        loss = tf.reduce_mean(x * tf.get_variable('weight', initializer=[2.]))
        tf.train.AdamOptimizer().minimize(loss)
        return loss
    with tf.Graph().as_default():
        tf.get_variable_scope().set_use_resource(resource)
        tf.train.AdamOptimizer().minimize(model_fn(tf.constant([1., 2.])))
        expected = names()
    build_towers(model_fn, tf.constant([1., 2.]), tf.train.AdamOptimizer(), 2)
    assert names() == expected and 'weight/Adam_3' in expected


def test_a_template_of_an_earlier_build_in_the_next(graph):
    template = tf.make_template('T', lambda x: x * tf.get_variable('w', [], initializer=ONE))

    def model_fn(x):
        return tf.reduce_mean(template(x))
    built = build(model_fn, variables=VariablePlacement('replicated'))
    other = build(model_fn, name='other', reuse=built, variables=VariablePlacement('replicated'))
    assert [[variable.op.name for variable in variables_read(
        [op for op in graph.get_operations() if op.name.startswith(tower.name_scope)
         and op.name not in tower.backward])] for tower in other.towers] == [
             ['T/w'], ['T/w_replica_1/T/w']]
