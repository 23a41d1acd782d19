"""`copies='reuse'`: the hand-written recipe, a call of the model function for each tower."""

import numpy as np
import pytest
import tensorflow
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import check_against_one_device, run, sgd, vectors

keras = tensorflow.keras

X = np.array([1., 2., 3., 6.])  # on two towers the means are 1.5 and 4.5


def weight(**options):
    return tf.get_variable('w', [], tf.float64, tf.ones_initializer(), **options)


def mean(x):
    return tf.reduce_mean(x * weight())


def built_of(model_fn, data=X, devices=2, **options):
    return towers.build_towers(model_fn, data, sgd(), devices, 'mean', copies='reuse', **options)


def test_the_graph_is_the_recipes(graph):
    built = built_of(mean)
    assert [tower.loss.op.name for tower in built.towers] == ['tower_0/Mean', 'tower_1/Mean']
    assert [variable.op.name for variable in tf.global_variables()] == ['w']
    assert run(built, [tower.loss for tower in built.towers]) == [1.5, 4.5]


@pytest.mark.slow
def test_its_parts_know_their_tower_and_micro_batch(graph):
    built = built_of(mean, memory=towers.Memory(accumulate=2))
    assert [(tower.index, tower.micro_batch) for tower in built.towers] == [
        (0, 0), (0, 1), (1, 0), (1, 1)]
    assert towers.largest_batch(built, 10 ** 6).per_tower == towers.largest_batch(
        towers.build_towers(mean, X, sgd(), 2, 'mean', memory=towers.Memory(accumulate=2),
                            reuse=tf.AUTO_REUSE), 10 ** 6).per_tower


@pytest.mark.parametrize('options', [
    dict(remainder='weight', reduction='sum'),
    pytest.param(dict(memory=towers.Memory(accumulate=2)), marks=pytest.mark.slow)], ids=str)
def test_it_is_one_device_in_numbers(options):
    def model_fn(x, y):
        """Layers without a name, which each call finds again; and the recipe's last line."""
        net = slim.fully_connected(slim.fully_connected(x, 4), 3, activation_fn=None)
        tf.get_variable_scope().reuse_variables()
        return tf.reduce_mean(tf.square(net - y))
    check_against_one_device(model_fn, vectors(7 if 'remainder' in options else 8),
                             copies='reuse', **dict(dict(reduction='mean'), **options))
    assert not tf.get_variable_scope().reuse


@pytest.mark.slow
def test_registered_losses_are_added_once():
    """The variable's own, which only the first call registers, and one that each call does."""
    def model_fn(x):
        w = weight(regularizer=lambda w: 10. * w)
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 5. * w)
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 2. * tf.reduce_mean(x * w))
        return tf.reduce_mean(x * w)
    built = built_of(model_fn, devices=2, regularization='add')
    assert run(built, [built.loss, built.gradients[0][0]]) == [3. + 15. + 6.] * 2
    assert built.plan.line('regularization') == '3 registered losses added, counted once'


def writes(x):
    size = tf.get_variable('size', [], tf.float64, trainable=False)
    with tf.control_dependencies([tf.assign_add(size, tf.reduce_mean(x))]):
        return mean(x) + 0.


def makes_a_variable(x):
    return mean(x) * tf.Variable(np.float64(1.), name='v')


def kept(make):
    """A model that makes a variable, or a layer, in its first call and keeps it."""
    made = []

    def model_fn(x):
        made.extend([] if made else [make()])
        return mean(x) * tf.reduce_mean(made[0](x[:, None]) if callable(made[0]) else made[0])
    return model_fn


def counts_in_a_metric(x):
    return dict(loss=mean(x), metrics={'mean': tf.metrics.mean(x)})


def counting_calls(name, shape):
    calls = []

    def model_fn(x):
        calls.append(x)
        return tf.reduce_mean(x) * tf.reduce_sum(tf.get_variable(
            name(len(calls)), shape(len(calls)), tf.float64))
    return model_fn


def takes_the_total(x):
    tf.losses.add_loss(mean(x))
    return tf.losses.get_total_loss()


@pytest.mark.parametrize('model_fn, error, text', [
    (writes, towers.SharedVariableError,
     '^copies=.reuse., and the forward pass writes variable size .*UPDATE_OPS, .*or pass '
     "copies='clone'"),
    (makes_a_variable, towers.SharedVariableError,
     "^copies='reuse', and the model function makes variable 'tower_0/v' without tf.get_variable, "
     "so that it is of one tower.*make it before build_towers .*or pass copies='clone'"),
    (kept(lambda: tf.Variable(np.float64(1.), name='v')), towers.SharedVariableError,
     "^copies='reuse', and the model function makes variable 'tower_0/v' without"),
    (kept(lambda: keras.layers.Dense(1, dtype='float64')), towers.SharedVariableError,
     "^copies='reuse', and the model function makes variable 'tower_0/.*kernel' without"),
    (counts_in_a_metric, towers.SharedVariableError,
     "^copies='reuse', and the model function calls a function of tf.metrics, whose counter "
     "'tower_0/mean.*/total' each call would have for itself: pass copies='clone'.*the mean over"),
    (counting_calls('w{}'.format, lambda _: []), towers.SharedVariableError,
     "^copies='reuse', and the call of the model function for tower 1 makes variable 'w2'"),
    (counting_calls(lambda _: 'w', lambda call: [call]), towers.SharedVariableError,
     "^variable 'w' cannot be shared: .*same shape"),
    (takes_the_total, towers.ModelFunctionError,
     "^copies='reuse', and the loss of tower 1 is computed from the shard of another tower: .*"
     r"get_total_loss\(scope='tower_1/'\), or pass copies='clone'")])
def test_what_the_recipe_cannot_carry_is_refused(model_fn, error, text):
    with pytest.raises(error, match=text):
        built_of(model_fn)


@pytest.mark.parametrize('options', [
    dict(variables=towers.VariablePlacement('replicated')),
    dict(pipeline=towers.Pipeline(stages='auto'),
         devices=[['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']])
],
                         ids=str)
def test_replicas_and_cuts_are_refused(options, graph):
    with pytest.raises(towers.InvalidArgumentError, match="^copies='reuse' goes with neither"):
        built_of(mean, **options)
    assert not graph.get_operations()
