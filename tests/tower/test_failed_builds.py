"""After a build that failed: collections are as before, and the next build is in a new graph."""

import threading

import pytest
import tensorflow.compat.v1 as tf

import sample_models as samples
import towers
from sample_models import SAMPLES, linear, momentum


def entries(graph):
    return {key: list(graph.get_collection(key)) for key in graph.get_all_collection_keys()
            if graph.get_collection(key)}


def fail(model_fn, data, where, **options):
    """A build that fails in the model function, in its second call, or when all towers are there.
    """
    calls = []

    def broken(*inputs):
        loss = model_fn(*inputs)
        calls.append(None)
        if where == len(calls):
            raise KeyboardInterrupt  # no Exception even
        return loss

    def transform(pairs):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        towers.build_towers(
            broken, data,
            towers.Objective(momentum(), transform_gradients=None if where else transform), 2,
            **options)


@pytest.mark.parametrize('where, options', [(1, {}), (2, dict(copies='reuse')), (None, {})])
def test_the_collections_are_as_before(graph, where, options):
    tf.get_variable('earlier', [], regularizer=tf.nn.l2_loss)
    data, before = SAMPLES['slim'].data(8), entries(graph)
    fail(SAMPLES['slim'].model_fn, data, where, **options)
    assert entries(graph) == before
    assert tf.get_variable_scope().custom_getter is None


@pytest.mark.parametrize('where', [1, None])
def test_no_build_follows_in_the_graph(graph, where):
    data = samples.vectors(8)
    fail(linear, data, where)
    dataset = tf.data.Dataset.from_tensors(data)
    before = len(graph.get_operations())
    for build in (lambda: towers.build_towers(linear, data, momentum(), 2),
                  lambda: towers.Evaluation(linear, dataset, devices=1)):
        with pytest.raises(towers.FailedBuildError, match=(
                '^a build_towers in this graph has failed, and TensorFlow cannot remove what it '
                'made: build in a new graph ')):
            build()
    assert len(graph.get_operations()) == before


# ---- builds within builds, and beside them -------------------------------------------------------

def mean(x):
    return tf.reduce_mean(x)


def test_a_build_in_a_model_function_is_refused_but_in_a_graph_of_its_own():
    def apart(x):
        with tf.Graph().as_default():
            towers.build_towers(mean, tf.ones([4]), None, 2)
        return tf.reduce_mean(x)

    def nested(x):
        return towers.build_towers(mean, x, None, 2).loss
    assert towers.build_towers(apart, tf.ones([4]), None, 2).loss is not None
    with pytest.raises(towers.ModelFunctionError, match='^build_towers is called within the model'):
        towers.build_towers(nested, tf.ones([4]), None, 2)


def test_builds_in_threads_do_not_see_each_other():
    errors, begin = [], threading.Barrier(3)

    def look(x):
        first = tf.get_variable('first', [], initializer=tf.ones_initializer())
        begin.wait(20)
        assert tf.trainable_variables() == [first]
        begin.wait(20)
        return tf.reduce_mean(x) * first * tf.get_variable('second', [])

    def work():
        try:
            with tf.Graph().as_default():
                built = towers.build_towers(look, tf.ones([4]), momentum(), 2)
                assert samples.names(built.variables) == ['first', 'second']
        except BaseException as error:
            errors.append(error)
            begin.abort()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
