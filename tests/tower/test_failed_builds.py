"""towers.tower.refused_builds: collections are put back, and the next build is made in a new graph."""

import pytest
import tensorflow.compat.v1 as tf

import sample_models as samples
import towers
from sample_models import SAMPLES, keras, linear, momentum


class Broken(Exception):
    pass


def entries(graph):
    return {key: list(graph.get_collection(key)) for key in graph.get_all_collection_keys()
            if graph.get_collection(key)}


def fail(model_fn, data, where):
    """A build that fails in tower 0, in tower 1, or when all towers are there."""
    calls = []

    def broken(*inputs):
        loss = model_fn(*inputs)
        calls.append(None)
        if where == 'tower %d' % (len(calls) - 1):
            raise Broken()
        return loss

    def transform(pairs):
        raise Broken()
    with pytest.raises(Broken):
        towers.build_towers(broken, data, momentum(), 2, copies='reuse',
                            transform_gradients=transform if where == 'the end' else None)


@pytest.mark.parametrize('where', ['tower 0', 'tower 1', 'the end'])
@pytest.mark.parametrize('name', ['slim', 'tf.Variable', 'embedding'])
def test_the_collections_are_as_before(graph, name, where):
    data, before = SAMPLES[name].data(8), entries(graph)
    fail(SAMPLES[name].model_fn, data, where)
    assert entries(graph) == before


def test_get_variable_has_forgotten_what_failed(graph):
    fail(linear, samples.vectors(8), 'tower 1')
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        with pytest.raises(ValueError, match='kernel'):
            tf.get_variable('kernel', [6, 3], tf.float64)


@pytest.mark.parametrize('where', ['tower 0', 'the end'])
def test_no_build_follows_in_the_graph(graph, where):
    data = samples.vectors(8)
    fail(linear, data, where)
    dataset = tf.data.Dataset.from_tensors(data)
    for build in (lambda: towers.build_towers(linear, data, momentum(), 2),
                  lambda: towers.build_towers(linear, data, momentum(), 1, name='other'),
                  lambda: towers.Evaluation(linear, dataset, devices=1)):
        before = len(graph.get_operations())
        with pytest.raises(towers.FailedBuildError) as caught:
            build()
        assert str(caught.value) == (
            'a build_towers in this graph has failed, and TensorFlow cannot remove what it made: '
            'build in a new graph (with tf.Graph().as_default(): …, or tf.reset_default_graph()).')
        assert len(graph.get_operations()) == before


def test_layers_without_a_name_are_numbered_on_from_before(graph):
    def model_fn(x, y):
        net = keras.layers.Dense(4, dtype='float64')(x)
        return samples.mean_squared_error(keras.layers.Dense(3, dtype='float64')(net), y)

    def number_of_the_next():
        return int(keras.layers.Dense(1).name.partition('_')[2] or 0)
    before = number_of_the_next()
    fail(model_fn, samples.vectors(8), 'tower 1')
    assert number_of_the_next() == before + 1


@pytest.mark.parametrize('wrong', [
    dict(reduction='average'), dict(devices=['/cpu:0', '/cpu:0']), dict(optimizer=3),
    dict(accumulate=3), dict(name='tower 0')], ids=str)
def test_an_argument_is_corrected_in_the_same_graph(graph, wrong):
    data = samples.vectors(8)
    arguments = dict(model_fn=linear, inputs=data, optimizer=momentum(), devices=2)
    with pytest.raises(towers.TowersError):
        towers.build_towers(**dict(arguments, **wrong))
    built = towers.build_towers(**arguments)
    assert samples.names(built.variables) == ['kernel']
