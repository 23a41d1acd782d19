"""towers.build_arguments: `compute_gradients`' own arguments, in every tower."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.tower import gradients as tower_gradients

X = np.arange(4, dtype=np.int32)
slow = pytest.mark.slow


class Records(tf.train.GradientDescentOptimizer):
    """Writes down what `compute_gradients` is given."""

    def __init__(self):
        super(Records, self).__init__(1.)
        self.given = []

    def compute_gradients(self, loss, var_list=None, **options):
        self.given.append(options)
        return super(Records, self).compute_gradients(loss, var_list, **options)


class TakesNone(tf.train.GradientDescentOptimizer):
    def compute_gradients(self, loss, var_list=None):
        return super(TakesNone, self).compute_gradients(loss, var_list)


def gathers(x):
    """tf.gather, unlike embedding_lookup, reads the table from the tower; its gradient wants to be
    with the table, too."""
    table = tf.get_variable('table', [5, 2], initializer=tf.ones_initializer())
    return tf.reduce_mean(tf.square(tf.gather(table, x)))


def on_two_devices(x):
    with tf.device('/cpu:0'):
        table = tf.get_variable('table', [5, 2], initializer=tf.ones_initializer())
        rows = tf.gather(table, x)
    return tf.reduce_mean(tf.square(tf.gather(rows * 2., tf.range(tf.size(x)))))


def regularized(x):
    table = tf.get_variable('table', [5, 2], initializer=tf.ones_initializer(),
                            regularizer=lambda w: 0.5 * tf.reduce_sum(w ** 2) + tf.reduce_sum(w))
    return tf.reduce_mean(tf.gather(tf.square(table), x))


COLOCATED = dict(colocate_gradients_with_ops=True)
ALL = dict(COLOCATED, gate_gradients=tf.train.Optimizer.GATE_GRAPH,
           aggregation_method=tf.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N)


def gradients(monkeypatch, model_fn, num_towers, copies, options, device=None):
    with tf.Graph().as_default():
        optimizer, of_towers = Records(), Records()
        monkeypatch.setattr(tower_gradients, '_PLAIN', of_towers)
        built = towers.build_towers(model_fn,
                                    X,
                                    towers.Objective(optimizer, gradient_options=options),
                                    num_towers,
                                    'mean',
                                    copies=copies,
                                    variables=towers.VariablePlacement(device))
        assert not towers.audit(built).broken
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            values = session.run([tf.convert_to_tensor(gradient)
                                  for gradient, _ in built.gradients])
            session.run(built.train_op)
        return values, optimizer.given, of_towers.given


@pytest.mark.parametrize('options, copies, model_fn', [
    (ALL, 'clone', on_two_devices), (ALL, 'reuse', regularized)] + [
        pytest.param(*case, marks=slow) for case in [
            (COLOCATED, 'clone', regularized), (COLOCATED, 'reuse', gathers)]])
def test_every_tower_gets_them_and_the_gradients_are_the_same(
        monkeypatch, options, copies, model_fn):
    expected, _, _ = gradients(monkeypatch, model_fn, 1, copies, None)
    got, given, of_towers = gradients(monkeypatch, model_fn, 2, copies, options)
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert given == [options]  # what the optimizer makes of the batch's gradients itself
    assert of_towers == [options] * (2 if copies == 'reuse' else 1)


@pytest.mark.parametrize('options, message', [
    (dict(colocate=True), "gradient_options has 'colocate': expected some of aggregation_method, "
     'colocate_gradients_with_ops, gate_gradients, as far as'),
    (dict(grad_loss=2.), 'The loss is what the model function returns: multiply it there.'),
    (dict(gate_gradients=True), "gradient_options['gate_gradients']=True: expected one of 0, 1"),
    (dict(aggregation_method='tree'), "['aggregation_method']='tree': expected one of None, "),
    (dict(colocate_gradients_with_ops=1), "=1: expected one of True, False."),
    ('gate_gradients', 'expected a dict of arguments of compute_gradients')])
def test_options_that_there_are_not(graph, options, message):
    with pytest.raises(towers.InvalidArgumentError) as caught:
        towers.build_towers(gathers, X, towers.Objective(Records(), gradient_options=options), 2)
    assert message in str(caught.value)
    assert not graph.get_operations()


def test_options_that_the_optimizer_does_not_take(graph):
    with pytest.raises(towers.InvalidArgumentError,
                       match='as far as compute_gradients of TakesNone takes them'):
        towers.Objective(TakesNone(1.), gradient_options={'gate_gradients': 1})
    towers.build_towers(gathers, X, towers.Objective(TakesNone(1.), gradient_options={}), 2)


# ---- What belongs to another graph, and what an optimizer returns --------------------------------

def loss_of(x):
    return tf.reduce_mean(x * tf.get_variable('v', []))


def error_of(kind=towers.InvalidArgumentError, optimizer=None, **options):
    with pytest.raises(kind) as caught:
        towers.build_towers(loss_of, np.ones(4, np.float32),
                            optimizer or tf.train.GradientDescentOptimizer(.1), 2, **options)
    return str(caught.value)


def test_rates_of_another_graph(graph):
    with tf.Graph().as_default():
        rate = tf.constant(.1)
    adam = tf.train.AdamOptimizer(rate)
    for text in (error_of(optimizer=adam), error_of(optimizer={'a': adam})):
        assert text.endswith('belongs to another graph than the default one: make it and the '
                             'towers under the same tf.Graph().')
    assert not graph.get_operations()
