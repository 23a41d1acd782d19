"""Variables of a build: as one device makes them, and one set for all towers.

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
from towers.placement.variable_device import Placement
from towers.tower.variables import owner_by_name, slot_creator

BATCH = np.float32([1., 2., 3., 6.])
ONE = tf.ones_initializer()
slow = pytest.mark.slow


def build(model_fn, devices=2, optimizer=None, **options):
    return build_towers(model_fn, tf.constant(BATCH),
                        optimizer or tf.train.GradientDescentOptimizer(1.), devices, **options)


def weight(name='w'):
    return tf.get_variable(name, [], initializer=ONE)


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


def error_of(model_fn, **options):
    with pytest.raises(SharedVariableError) as caught:
        build(model_fn, **options)
    return str(caught.value)


# ---- get_variable -------------------------------------------------------------------------------

def test_get_variable_is_shared_and_pinned(graph):
    def model_fn(x):
        with tf.variable_scope('a'):
            w = weight()
        return tf.reduce_mean(x * w)
    built = build(model_fn, 4)
    (w,) = tf.global_variables()
    assert names() == ['a/w'] == names_on_one_device(model_fn)
    assert w.device == '/device:CPU:0' and built.variables == [w]
    assert built.direct_variables == () and all(each.variables == [w] for each in built.towers)
    assert [op.name for op in graph.get_operations() if op.type == 'VarHandleOp'] == ['a/w']
    assert [op.name for op in graph.get_operations() if op.type == 'AssignVariableOp'] == [
        'a/w/Assign']
    assert after_one_step(built) == {'a/w': 1. - 3. * 4}  # N times the mean of the batch


@pytest.mark.parametrize('use_resource', [True, False])
def test_a_variable_from_before_is_shared_of_either_kind(use_resource):
    with tf.variable_scope('', use_resource=use_resource):
        w = weight()
    built = build(lambda x: tf.reduce_mean(x * weight()), reuse=True)
    assert built.variables == [w] and after_one_step(built) == {'w': -5.}


@pytest.mark.parametrize('options', [{}, {'variable_scope': 'model'}])
def test_a_name_that_one_call_makes_twice(options):
    def model_fn(x):
        return tf.reduce_mean(sum(x * weight() for _ in range(2)))
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


def test_partitioned_variables():
    def model_fn(x):
        w = tf.get_variable('w', [3], initializer=ONE, partitioner=tf.fixed_size_partitioner(2))
        return tf.reduce_mean(x) * tf.reduce_sum(tf.convert_to_tensor(w) * [1., 10., 100.])
    assert after_one_step(build(model_fn)) == {'w/part_0': [-5., -59.], 'w/part_1': [-599.]}


def scopes_with_a_default_name(x):
    for _ in range(3):
        with tf.variable_scope(None, default_name='block'):
            x = x * weight()
    return tf.reduce_mean(x)


def unnamed_layers(x):
    x = slim.fully_connected(x[:, None], 2, activation_fn=None)
    return tf.reduce_mean(slim.batch_norm(slim.fully_connected(x, 1), is_training=True))


@pytest.mark.parametrize('model_fn', [scopes_with_a_default_name, unnamed_layers])
def test_what_has_no_name_is_numbered_as_on_one_device(model_fn):
    mend_slim()
    build(model_fn)
    for key in tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES:
        assert names(key) == names_on_one_device(model_fn, key)
    assert {v.device for v in tf.global_variables()} == {'/device:CPU:0'}


def test_custom_getters_of_model_and_caller():
    seen = []

    def doubled(getter, name, *args, **kwargs):
        seen.append(('model', name))
        return getter(name, *args, **kwargs) * 2.

    def noted(getter, name, *args, **kwargs):
        seen.append(('caller', name))
        return getter(name, *args, **kwargs)

    def model_fn(x):
        with tf.variable_scope('m', custom_getter=doubled):
            return tf.reduce_mean(x * weight())
    with tf.variable_scope('outer', custom_getter=noted):
        built = build(model_fn)
    assert seen == [('model', 'outer/m/w'), ('caller', 'outer/m/w')]
    assert after_one_step(built) == {'outer/m/w': 1. - 2. * 6.}


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


def test_the_models_own_reuse():
    def discriminator(x, reuse):
        with tf.variable_scope('d') as scope:
            if reuse:
                scope.reuse_variables()
            return x * weight()

    def model_fn(x):
        loss = tf.reduce_mean(discriminator(x, False)) + tf.reduce_mean(discriminator(2. * x, True))
        tf.get_variable_scope().reuse_variables()  # as the recipe has it at its end
        return loss
    built = build(model_fn)
    assert after_one_step(built) == {'d/w': 1. - 3. * 6.}
    assert not tf.get_variable_scope().reuse  # the caller's scope is as it was


def test_a_second_build_of_a_variable_shares_it_or_makes_another():
    weight()
    model_fn = lambda x: tf.reduce_mean(x * weight())  # noqa: E731
    for name, kwargs in (('a', {'reuse': True}), ('b', {'reuse': tf.AUTO_REUSE})):
        assert build(model_fn, name=name, **kwargs).variables == tf.global_variables() == [
            tf.global_variables()[0]]
    build(model_fn, name='c', variable_scope='second')
    assert names() == ['w', 'second/w']


def test_reuse_with_nothing_to_reuse_and_none_with_something():
    def model_fn(x):
        return tf.reduce_mean(x * weight())
    for options, name in (({'reuse': True}, 'w'), ({'reuse': True, 'variable_scope': 's'}, 's/w')):
        with tf.Graph().as_default():
            text = error_of(model_fn, **options)
        assert text.startswith('variable %r does not exist in this graph, and reuse is on' % name)
    with tf.Graph().as_default(), tf.variable_scope('around', reuse=True):
        assert error_of(model_fn).startswith("variable 'around/w' does not exist in this graph")
    with tf.Graph().as_default():
        earlier = build(model_fn)
        assert error_of(model_fn, name='again') == (
            "variable 'w' exists already in this graph: pass reuse=True (or tf.AUTO_REUSE) to "
            'share it with the towers, or variable_scope=... for a second set.')
    with pytest.raises(TowersError, match='reuse=<BuiltTowers: .* belongs to another graph than'):
        build(model_fn, reuse=earlier)


def test_an_earlier_build_with_counters_alone_hands_nothing_over():
    def counts(x):
        w = weight()
        return {'loss': tf.reduce_mean(x * w), 'metrics': {'mean': tf.metrics.mean(x)}}

    def makes_more(x):
        scale = tf.Variable(2., trainable=False, name='scale')
        return tf.reduce_mean(x * scale * weight())
    earlier = build(counts)
    assert len(earlier.direct_variables) == 2  # a total and a count
    again = build(makes_more, reuse=earlier, name='again')
    assert [each.requested_name for each in again.direct_variables] == ['scale']


@pytest.mark.parametrize('reuse, shape, text', [
    (True, [], 'Variable own/w does not exist'), (False, [None], 'be fully defined')])
def test_errors_of_the_models_own_scopes_stay_what_they_are(reuse, shape, text):
    def model_fn(x):
        with tf.variable_scope('own', reuse=reuse):
            return tf.reduce_mean(x * tf.get_variable('w', shape))
    with pytest.raises(ValueError, match=text) as caught:
        build(model_fn)
    assert not isinstance(caught.value, TowersError)


def test_a_variable_that_reuse_finds_in_another_shape():
    tf.get_variable('w', [3])
    text = error_of(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), reuse=True)
    assert text.startswith("variable 'w' cannot be shared: Trying to share variable w, ")
    assert text.endswith('Give it the same shape, dtype and partitions as the variable that reuse= '
                         'found.')


def test_a_variable_made_within_a_loop():
    def model_fn(x):
        def body(i, total):
            return i + 1, total + tf.reduce_mean(x * weight())
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


def test_direct_variables_are_shared_under_the_models_own_names():
    built = build(direct_model)
    assert names() == names_on_one_device(direct_model)
    assert set(names()) == set(DIRECT)
    assert names(tf.GraphKeys.TRAINABLE_VARIABLES) == [name for name in names()
                                                       if name != 'Variable_1']
    assert [each.variable.op.name for each in built.direct_variables] == [
        'top', 'n/v', 'n/s/v', 'Variable', 'Variable_1']
    assert {v.device for v in built.variables} == {'/device:CPU:0'}
    assert after_one_step(built) == {
        name: 1. if factor is None else 1. - 6. * factor for name, factor in DIRECT.items()}


def test_direct_variables_under_scopes_of_the_caller_and_of_the_build():
    def in_scopes(call):
        with tf.name_scope('outer'), tf.variable_scope('v'):
            return call()
    with tf.Graph().as_default():
        in_scopes(lambda: direct_model(tf.constant(BATCH)))
        expected = names()
    built = in_scopes(lambda: build(direct_model))
    assert names() == expected and 'outer/v/n/s/v' in expected and 'v/s/got' in expected
    assert after_one_step(built)['outer/v/n/s/v'] == 1. - 6. * 4.
    # Two further sets: neither moves the other's names.
    first = sorted(['set/' + name for name in DIRECT])
    with tf.Graph().as_default():
        for scope in 'set', 'more':
            build(direct_model, variable_scope=scope, name=scope + '_towers')
        assert sorted(names()) == sorted(
            first + [name.replace('set/', 'more/') for name in first])


def test_variable_scope_gives_the_recipes_names_to_slots_as_well():
    def model_fn(x):
        return tf.reduce_mean(x * weight() * tf.Variable(1.))
    built = build(model_fn, optimizer=tf.train.MomentumOptimizer(1., 0.9), variable_scope='tower')
    assert names() == ['tower/w', 'tower/Variable', 'tower/w/Momentum', 'tower/Variable/Momentum']
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


def scope_of_before(x):
    with tf.name_scope('fc'):
        weight = tf.Variable([2.], name='weight')
    return tf.reduce_mean(x * weight)


def unnamed(x):
    x = tf.identity(x, name='Variable')
    return tf.reduce_mean(x * tf.Variable([2.]))


@pytest.mark.parametrize('model_fn', [scope_of_before, unnamed])
def test_direct_variables_are_numbered_as_on_one_device(model_fn):
    def batch():
        with tf.name_scope('fc'):  # as the model's own
            return tf.constant([1., 2.]) * 2
    with tf.Graph().as_default():
        tf.get_variable_scope().set_use_resource(True)
        model_fn(batch())
        expected = names()
    built = build_towers(model_fn, batch(), tf.train.GradientDescentOptimizer(0.1), 2)
    assert names() == expected and all(re.search(r'_1$|^fc_1/', name) for name in expected[:1])
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)


# ---- reuse by a later build ---------------------------------------------------------------------

def build_again(earlier, model_fn, **options):
    return build_towers(model_fn, BATCH, None, 2, reuse=earlier, name='again', **options)


@pytest.mark.parametrize('first, second, text', [
    (dict(v=[]), dict(v=[], w=[]),
     "the model function makes variable 'w' without get_variable, beyond the 1 that the earlier "
     'build made so. '),
    (dict(a=[], b=[2]), dict(a=[], b=[3]),
     "the model function asks for 'b' as its variable number 2 made without get_variable of shape "
     '(3,) and dtype float32; the earlier build made it of shape (2,) and dtype float32. '),
    (dict(a=[]), dict(b=[]),
     "the model function asks for 'b' as its variable number 1 made without get_variable; the "
     "earlier build made 'a' there. ")])
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
        assert str(caught.value) == text + (
            'Make the same variables in the same order as the earlier build did, or make them with '
            'tf.get_variable.')


def test_a_later_build_in_another_order_tells_variables_apart_by_name():
    def making(order):
        def model_fn(x):
            made = {name: tf.Variable(1., name=name) for name in order}
            return tf.reduce_mean(x) * (made['a'] + 10. * made['b'])
        return model_fn
    earlier = build(making('ab'))
    again = build_again(earlier, making('ba'))
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(earlier.train_op)
        assert session.run(again.loss) == 3. * (-5. + 10. * -59.)


def test_a_later_build_shares_all_with_an_earlier():
    training = build(direct_model)
    before = names()
    evaluation = build_again(training, direct_model)
    assert names() == before
    assert {v.op.name for v in evaluation.variables} == set(DIRECT)
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(evaluation.loss) == 3. * 63.
        session.run(training.train_op)
        trained = sum(factor * (1. - 6. * factor) for factor in (1., 2., 4., 8., 16.)) + 32.
        assert session.run(evaluation.loss) == 3. * trained


@pytest.mark.parametrize('reuse', [True, tf.AUTO_REUSE])
def test_a_caller_inside_a_scope_with_reuse(reuse):
    with tf.variable_scope('m'):
        existing = weight()
    with tf.variable_scope('m', reuse=reuse):
        built = build(lambda x: tf.reduce_mean(x * weight()),
                      optimizer=tf.train.MomentumOptimizer(1., 0.9))
        assert tf.get_variable_scope().reuse == reuse  # as it was
    assert built.variables == [existing]
    assert names() == ['m/w', 'm/m/w/Momentum']  # TF's own name for a slot under a scope
    assert after_one_step(built) == {'m/w': -5., 'm/m/w/Momentum': 6.}


def test_a_later_build_whose_variables_are_cached():
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


# ---- local variables, moving averages, the global step ------------------------------------------

def metric_model(x):
    w = weight()
    with tf.name_scope('metrics'):
        metrics = {'mean': tf.metrics.mean(x * w), 'root': tf.metrics.root_mean_squared_error(x, x)}
    return {'loss': tf.reduce_mean(x * w), 'metrics': metrics}


def test_counters_of_metrics_are_shared_and_atomic():
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


def test_moving_averages_made_by_the_model():
    averages = []

    def model_fn(x):
        w = weight()
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


def test_the_global_step_made_by_the_model():
    def model_fn(x):
        rate = tf.cast(tf.train.get_or_create_global_step(), tf.float32) + 1.
        return tf.reduce_mean(x * weight()) * rate
    build(model_fn)
    assert names() == ['global_step', 'w'] == names_on_one_device(model_fn)
    assert tf.get_collection(tf.GraphKeys.GLOBAL_STEP) == [tf.train.get_global_step()]
    assert tf.train.get_global_step().device == '/device:CPU:0'


# ---- slots, and names made of operations' names --------------------------------------------------

def test_slots_by_get_variable_go_beside_their_variable():
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


def average_of_a_tensor(x):
    w = weight()
    with tf.variable_scope('model'):
        mean = tf.reduce_mean(x * w, name='mean')
        average = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([average.apply([mean])]):
            return tf.identity(mean)


def scope_named_by_an_operation(x):
    w = weight()
    mean = tf.reduce_mean(x * w, name='mean')
    with tf.variable_scope(mean.op.name):
        return mean * tf.get_variable('b', [], initializer=ONE)


@pytest.mark.parametrize('options', [{}, dict(variables=VariablePlacement('replicated'))],
                         ids=['shared', 'replicated'])
@pytest.mark.parametrize('model_fn', [
    average_of_a_tensor, scope_named_by_an_operation], ids=lambda each: each.__name__)
def test_the_tower_is_in_no_variables_name(model_fn, options):
    """So one device's checkpoint loads."""
    build(model_fn, **options)
    assert sorted(names()) == sorted(names_on_one_device(model_fn))


def test_a_scope_of_the_models_own_of_a_towers_name():
    def model_fn(x):
        with tf.variable_scope('tower_1'):
            return tf.reduce_mean(x * weight())
    assert after_one_step(build(model_fn)) == {'tower_1/w': -5.}


@pytest.mark.parametrize('options', [
    {}, pytest.param(dict(variables=VariablePlacement('replicated')), marks=slow)], ids=str)
@pytest.mark.parametrize('made_by', ['get_variable', 'Variable', 'slot_creator'])
def test_variables_colocated_with_an_activation_are_where_variables_are(made_by, options):
    def model_fn(x):
        h = x * weight()
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


def test_an_optimizer_of_the_models_own_and_one_around_it():
    def model_fn(x):
        loss = tf.reduce_mean(x * tf.get_variable('weight', initializer=[2.]))
        tf.train.AdamOptimizer().minimize(loss)
        return loss
    with tf.Graph().as_default():
        tf.get_variable_scope().set_use_resource(True)
        tf.train.AdamOptimizer().minimize(model_fn(tf.constant([1., 2.])))
        expected = names()
    build_towers(model_fn, tf.constant([1., 2.]), tf.train.AdamOptimizer(), 2)
    assert names() == expected and 'weight/Adam_3' in expected
