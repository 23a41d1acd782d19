"""towers.api.contradictions: options that are refused together, before any operation is made."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd, slope

BATCH = np.arange(4.)


class OwnMinimize(tf.train.GradientDescentOptimizer):
    """An optimizer that does something between the gradients and their update."""

    def minimize(self, loss, *given, **options):
        return super().minimize(2. * loss, *given, **options)


@pytest.mark.parametrize('options, text', [
    (dict(numerics=towers.Numerics(stateless_random=True)),
     'stateless_random=True needs a global_step to draw by.'),
    (dict(memory=towers.Memory(recompute='auto'), numerics=towers.Numerics(xla=True)),
     "recompute='auto' and xla=True: XLA chooses the results that it keeps."),
    (dict(memory=towers.Memory(recompute='auto'), optimizer=None),
     "recompute='auto', and there is no optimizer"),
    (dict(memory=towers.Memory(accumulate=3), pipeline=towers.Pipeline(2)),
     'micro_batches=2 and accumulate=3: a pipeline adds up the gradients'),
    (dict(pipeline=towers.Pipeline(2)), 'micro_batches=2, and each tower has one device'),
    (dict(pipeline=towers.Pipeline(stages='auto')), "stages='auto', and each tower has one device"),
    (dict(copies='reuse', variables=towers.VariablePlacement('replicated')),
     "copies='reuse' goes with neither VariablePlacement('replicated') nor stages="),
    (dict(optimizer=OwnMinimize(.1), numerics=towers.Numerics(loss_scale=towers.LossScale())),
     'OwnMinimize has a minimize of its own, and there is a loss scale'),
    (dict(optimizer=OwnMinimize(.1), variables=towers.VariablePlacement('replicated')),
     'OwnMinimize has a minimize of its own, and there is a replica of each variable')])
def test_options_that_contradict_each_other(graph, options, text):
    options = dict(dict(optimizer=sgd(), devices=2), **options)
    with pytest.raises(towers.InvalidArgumentError) as error:
        towers.build_towers(slope, BATCH, **options)
    assert text in str(error.value)
    assert not graph.get_operations()


@pytest.mark.parametrize('options, text', [
    (dict(copies='reuse'), "copies='reuse' calls a model function for every tower, and the model"),
    (dict(reuse=True), 'reuse=True is for variables that a model function makes, and the model')])
def test_options_that_a_finished_model_does_not_take(graph, options, text):
    x = tf.placeholder(tf.float64, [None])
    loss = tf.reduce_mean(x * tf.get_variable('slope', [], tf.float64))
    with pytest.raises(towers.InvalidArgumentError) as error:
        towers.build_towers(loss, x, sgd(), 2, **options)
    assert text in str(error.value)


def test_replicas_of_variables_that_another_build_trains_without_them(graph):
    trained = towers.build_towers(slope, BATCH, sgd(), 2)
    with pytest.raises(towers.InvalidArgumentError, match='without replicas, so that its updates'):
        towers.build_towers(slope, BATCH, sgd(), 2, reuse=trained,
                            variables=towers.VariablePlacement('replicated'))
