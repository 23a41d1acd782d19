"""A look at the variables half-way through the model function: in every tower as on one device."""

import threading

import numpy as np
import pytest
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers

X = np.random.RandomState(0).randn(8, 2)


@pytest.fixture(autouse=True)
def new_graph():
    with tf.Graph().as_default() as graph:
        yield graph


def weight(name, shape):
    return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(0.5))


def names(variables):
    return [variable.op.name for variable in variables]


def build(model_fn, devices, **options):
    return towers.build_towers(model_fn, tf.constant(X), tf.train.MomentumOptimizer(0.1, 0.9),
                               devices, 'mean', **options)


def encoder_and_head(x):
    """Only the encoder's weights are decayed: the head does not exist yet when they are listed."""
    hidden = tf.tanh(tf.matmul(x, weight('encoder/w', [2, 3])))
    decay = tf.add_n([tf.nn.l2_loss(variable) for variable in tf.trainable_variables()])
    return tf.reduce_mean(tf.square(tf.matmul(hidden, weight('head/w', [3, 1])) - 1)) + decay


def losses(devices, **options):
    with tf.Graph().as_default():
        built = build(encoder_and_head, devices, **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            return [session.run([built.loss, built.train_op])[0] for _ in range(3)]


@pytest.mark.parametrize('options', [
    dict(devices=2, copies='reuse'),
    pytest.param(dict(devices=3, remainder='weight'), marks=pytest.mark.slow),
    pytest.param(dict(devices=2, variables=towers.VariablePlacement('replicated')),
        marks=pytest.mark.slow)])
def test_the_decay_of_what_was_made_so_far(options):
    one = losses(1)
    assert one[0] == pytest.approx(
        np.mean((1.5 * np.tanh(0.5 * X.sum(1)) - 1) ** 2) + 6 * 0.25 / 2)
    np.testing.assert_allclose(losses(**options), one, rtol=1e-12)


def test_each_look_is_of_its_time_and_place():
    looks = []

    def listed():
        return (names(tf.trainable_variables()), names(tf.global_variables('b')),
                names(tf.get_collection('mine')), names(tf.get_variable_scope().global_variables()))

    def model_fn(x):
        seen = [listed()]
        for name in ('a', 'b', 'c'):
            x = x * tf.get_variable(name, [2], tf.float64, tf.ones_initializer(),
                                    collections=['mine', tf.GraphKeys.GLOBAL_VARIABLES,
                                                 tf.GraphKeys.TRAINABLE_VARIABLES])
            seen.append(listed())
        looks.append(seen)
        return tf.reduce_mean(x)
    tf.get_variable('earlier', [], tf.float64, trainable=False)
    build(model_fn, 2, copies='reuse')
    assert looks[0] == looks[1]
    assert looks[1][2] == (['a', 'b'], ['b'], ['a', 'b'], ['earlier', 'a', 'b'])
    assert names(tf.trainable_variables()) == ['a', 'b', 'c']


def test_what_the_first_call_did_not_look_at_is_seen_whole():
    calls = []

    def model_fn(x):
        calls.append(names(tf.trainable_variables()) if calls else None)
        return tf.reduce_mean(x * weight('w', [2]))
    build(model_fn, 2, copies='reuse')
    assert calls == [None, ['w']]


def test_it_ends_with_the_call():
    def model_fn(x):
        raise KeyError('of the model')
    with pytest.raises(KeyError):
        build(model_fn, 2)
    assert tf.get_default_graph().get_collection.__func__ is tf.Graph.get_collection


def test_a_look_makes_no_collection():
    def model_fn(x):
        assert tf.get_collection('not there') == []
        return tf.reduce_mean(x) * weight('w', [])
    build(model_fn, 2, copies='reuse')
    assert 'not there' not in tf.get_default_graph().get_all_collection_keys()


@pytest.mark.parametrize('copies, assignment, resource', [
    ('reuse', {'net/': 'net/'}, True), ('auto', {'net/w': 'net/w'}, True)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('reuse', {'net/w': 'net/w'}, False), ('auto', {'net/': 'net/'}, False)]])
def test_weights_from_a_checkpoint(tmpdir, resource, assignment, copies):
    path = str(tmpdir.join('of_another_model'))
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.Saver([weight('net/w', [2, 1])])
        session.run(tf.global_variables_initializer())
        session.run(tf.global_variables()[0].assign([[0.25], [-1.]]))
        saver.save(session, path)

    def model_fn(x):
        output = tf.matmul(x, weight('net/w', [2, 1]))
        tf.train.init_from_checkpoint(path, assignment)
        return tf.reduce_mean(tf.square(output - weight('net/made_later', [1])))
    with switched('resource_variables', resource):
        built = build(model_fn, 2, copies=copies)
    expected = np.mean((X.dot([0.25, -1.]) - 0.5) ** 2)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(built.loss) == pytest.approx(expected)
        for _ in range(20):
            session.run(built.train_op)
        assert session.run(built.loss) < expected / 2  # and no step loads it again


def test_builds_in_threads_do_not_see_each_other():
    """Each graph is looked at by its own build; none keeps anything of it."""
    errors, begin = [], threading.Barrier(4)

    def look(x):
        first = tf.get_variable('first', [], tf.float64, tf.ones_initializer())
        begin.wait(20)
        seen = tf.trainable_variables()
        second = tf.get_variable('second', [], tf.float64, tf.ones_initializer())
        assert [each.op.name for each in seen] == ['first']
        return tf.reduce_mean(x) * first * second

    def work():
        try:
            with tf.Graph().as_default() as graph:
                towers.build_towers(look, tf.ones([4], tf.float64),
                                    tf.train.GradientDescentOptimizer(1.), 2, copies='reuse')
                assert graph.get_collection.__func__ is tf.Graph.get_collection
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
