"""What a build leaves in its graph: collections as of one device; after a failure, as before it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import SAMPLES, momentum
from towers import build_towers, session_config
from case_marks import first_fast

UPDATES = tf.GraphKeys.UPDATE_OPS
BATCH = np.array([1., 2., 3., 6.])
SGD = tf.train.GradientDescentOptimizer


def weight(dtype=tf.float64, **options):
    return tf.get_variable('w', [], dtype, tf.ones_initializer(), **options)


def model_fn(x):
    w = weight(tf.float32, regularizer=lambda w: 10. * tf.square(w))
    x = tf.cast(x, tf.float32)  # as that of tf.losses is
    tf.losses.mean_squared_error(tf.zeros_like(x), x * w)
    tf.losses.add_loss(tf.reduce_mean(x * w))
    count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
    tf.add_to_collection(UPDATES, tf.assign_add(count, 1.))
    tf.summary.scalar('mean', tf.reduce_mean(x))
    tf.add_to_collection('notes', {'a': 1})
    return tf.losses.get_total_loss()


@pytest.mark.slow
def test_losses_updates_and_summaries_are_those_of_one_device(graph):
    with tf.Graph().as_default() as one:
        model_fn(tf.constant(BATCH))
        expected = {key: len(one.get_collection(key)) for key in one.get_all_collection_keys()
                    if isinstance(key, str)}
    built = build_towers(model_fn, tf.constant(BATCH), SGD(0.), 2, 'mean')
    assert {key: len(graph.get_collection(key)) for key in expected} == expected
    assert tf.get_collection(UPDATES) == built.towers[0].updates
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        # mean(x^2) = 12.5, mean(x) = 3, 10 w^2 once; no tower counts another's losses.
        assert session.run(built.loss) == 25.5
        session.run(built.train_op)
        assert session.run(built.variables[1]) == 1.  # one update a step
        summary = tf.Summary.FromString(session.run(tf.summary.merge_all()))
        assert [value.simple_value for value in summary.value] == [1.5]  # of the first tower


def test_weights_from_a_checkpoint_half_way_through_the_model(tmpdir):
    path = str(tmpdir.join('of_another_model'))
    with tf.Graph().as_default(), tf.Session() as session:
        with tf.variable_scope('net'):
            saver = tf.train.Saver([weight()])
        session.run(tf.global_variables()[0].assign(0.25))
        saver.save(session, path)

    def model(x):
        with tf.variable_scope('net'):
            output = x * weight()
            tf.train.init_from_checkpoint(path, {'net/': 'net/'})
            return tf.reduce_mean(output) * tf.get_variable(
                'made_later', [], tf.float64, tf.ones_initializer())
    built = build_towers(model, BATCH, SGD(1.), 2, 'mean')
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(built.loss) == 0.25 * 3.
        session.run(built.train_op)
        assert session.run(built.variables) == [0.25 - 3., 1. - 0.75]  # and no step loads it again


# ---- updates from before the towers --------------------------------------------------------------

def counted(name):
    """Registers an update that counts, as a batch norm registers its own."""
    count = tf.get_variable(name, [], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(UPDATES, tf.assign_add(count, 1.))


def model_that_counts(x):
    counted('inside')
    return tf.reduce_mean(x) * weight()


def counts_after(session, train_op):
    session.run(train_op)
    return session.run({v.op.name: v for v in tf.global_variables() if not v.trainable})


@pytest.mark.parametrize('update_ops, before, inside, line', [
    ('first', 1., 1., '1 update ops of tower 0 ride on the train op, 1 from before the towers too'),
    ('all', 1., 2., '1 update ops of every tower ride on the train op, 1 from before the towers '
                    'too'),
    ('none', 0., 0., "nobody's 1 update ops run, 1 from before the towers do not run either")])
def test_updates_from_before_the_towers_ride_on_the_train_op(update_ops, before, inside, line):
    counted('before')
    built = build_towers(model_that_counts, BATCH, SGD(1.), 2, update_ops=update_ops)
    assert built.plan.line('batch norm') == line
    with tf.Session(config=session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert counts_after(session, built.train_op) == {'before': before, 'inside': inside}


def test_updates_of_an_earlier_build_are_that_ones():
    counted('before')
    first = build_towers(model_that_counts, BATCH, SGD(1.), 2)
    counted('between')
    with tf.variable_scope('more'):
        second = build_towers(model_that_counts, BATCH, SGD(1.), 2)
    with tf.Session(config=session_config(first.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert counts_after(session, first.train_op) == {
            'before': 1., 'between': 0., 'inside': 1., 'more/inside': 0.}
        assert counts_after(session, second.train_op) == {
            'before': 2., 'between': 1., 'inside': 1., 'more/inside': 1.}


def test_an_update_of_another_graph_is_refused(graph):
    with tf.Graph().as_default():
        foreign = tf.no_op('foreign')

    def model(x):
        tf.add_to_collection(UPDATES, foreign)
        return tf.reduce_mean(x) * weight()
    with pytest.raises(towers.ModelFunctionError, match="UPDATE_OPS holds 'foreign', which belo"):
        build_towers(model, BATCH, SGD(1.), 2)


# ---- a build that fails --------------------------------------------------------------------------

def entries(graph):
    return {key: list(graph.get_collection(key)) for key in graph.get_all_collection_keys()
            if graph.get_collection(key)}


@pytest.mark.parametrize('where, options', first_fast(1, [
    (1, {}), (2, dict(copies='reuse')), (None, {})]))
def test_the_collections_are_as_before_and_no_build_follows(graph, where, options):
    """It fails in the model function, in its second call, or when all towers are there."""
    calls = []

    def broken(*inputs):
        loss = SAMPLES['slim'].model_fn(*inputs)
        calls.append(None)
        if where == len(calls):
            raise KeyboardInterrupt  # no Exception even
        return loss

    def transform(pairs):
        raise KeyboardInterrupt
    tf.get_variable('earlier', [], regularizer=tf.nn.l2_loss)
    data, before = SAMPLES['slim'].data(8), entries(graph)
    with pytest.raises(KeyboardInterrupt):
        build_towers(broken, data, towers.Objective(
            momentum(), transform_gradients=None if where else transform), 2, **options)
    assert entries(graph) == before
    assert tf.get_variable_scope().custom_getter is None
    dataset, before = tf.data.Dataset.from_tensors(data), len(graph.get_operations())
    for build in (lambda: build_towers(SAMPLES['slim'].model_fn, data, momentum(), 2),
                  lambda: towers.Evaluation(SAMPLES['slim'].model_fn, dataset, devices=1)):
        with pytest.raises(towers.FailedBuildError, match=(
                '^a build_towers in this graph has failed, and TensorFlow cannot remove what it '
                'made: build in a new graph ')):
            build()
    assert len(graph.get_operations()) == before


def test_a_build_in_a_model_function_is_refused_but_in_a_graph_of_its_own():
    def apart(x):
        with tf.Graph().as_default():
            towers.build_towers(tf.reduce_mean, tf.ones([4]), None, 2)
        return tf.reduce_mean(x)

    def nested(x):
        return towers.build_towers(tf.reduce_mean, x, None, 2).loss
    assert towers.build_towers(apart, tf.ones([4]), None, 2).loss is not None
    with pytest.raises(towers.ModelFunctionError, match='^build_towers is called within the model'):
        towers.build_towers(nested, tf.ones([4]), None, 2)
