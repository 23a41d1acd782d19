"""towers.tower.regularization.split_loss on many losses: data + regularization == loss."""

import uuid

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.tower.regularization import RegisteredLosses, split_loss

X, W, S = 3., 2., 5.  # the data, a weight, and a learned scale


class Model:
    """What the losses below are made of: data terms, weight terms, constants, a loss scale."""

    def __init__(self, dtype=tf.float64):
        self.x = tf.placeholder_with_default(tf.constant(X, dtype), [], name='x')
        self.w = tf.get_variable('w', [], dtype, tf.constant_initializer(W))
        self.scale = tf.get_variable('scale', [], dtype, tf.constant_initializer(S))
        self.data = tf.square(self.w * self.x, name='data')      # 36, dw 36
        self.more = tf.sin(self.w * self.x)
        self.l2 = 0.25 * tf.square(self.w)                       # 1, dw 1
        self.l1 = 0.5 * tf.abs(self.w)                           # 1, dw 0.5
        self.constant = tf.constant(7., dtype)

    def split(self, loss):
        names = graph_walk.reachable_from([self.x.op], tf.get_default_graph().get_operations())
        return split_loss(loss, names)


def values(model, loss, data, weights):
    """([loss, data, weights], [their gradients of w], [of the scale]); 0 where there is none."""
    losses = [loss, data, weights]
    fetches = []
    for variable in (None, model.w, model.scale):
        for each in losses:
            value = each if variable is None or each is None else tf.gradients(each, variable)[0]
            fetches.append(tf.constant(0.) if value is None else value)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        result = np.float64(session.run(fetches))
    return result[:3], result[3:6], result[6:]


# name -> (loss of a model, value of its part of the weights alone, the gradient of that)
LOSSES = {
    'a + b': (lambda m: m.data + m.l2, 1., 1.),
    'add_n': (lambda m: tf.add_n([m.l2, m.data, m.l1, m.more]), 2., 1.5),
    'reduce_sum of a stack': (lambda m: tf.reduce_sum(tf.stack([m.l1, m.data])), 1., 0.5),
    'a - b': (lambda m: m.data - m.l2, -1., -1.),
    'negated': (lambda m: -(m.data + m.l2), -1., -1.),
    'times a number': (lambda m: (m.data + m.l2) * 4., 4., 4.),
    'nested': (lambda m: 2. * (m.data + 3. * (m.l2 + m.more)) + m.l1, 7., 6.5),
    'a learned scale': (lambda m: m.scale * (m.data + m.l2), 5., 5.),
    'with a constant': (lambda m: m.data + m.l2 + m.constant, 8., 1.),
    'total loss of tf.losses': (lambda m: _total_loss(m), 1., 1.),
    'weights inside a cast': (lambda m: tf.cast(m.data, tf.float32)
                              + tf.cast(m.l2, tf.float32), 1., 1.),
}


def _total_loss(model):
    tf.losses.add_loss(tf.cast(model.data, tf.float32))
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.cast(model.l2, tf.float32))
    return tf.losses.get_total_loss()


@pytest.mark.parametrize('name', sorted(LOSSES))
def test_parts_add_up_in_value_and_gradient(name):
    make, value, gradient = LOSSES[name]
    model = Model()
    loss = make(model)
    data, weights = model.split(loss)
    names = graph_walk.reachable_from([model.x.op], tf.get_default_graph().get_operations())
    assert data.op.name in names and weights.op.name not in names
    losses, of_w, of_scale = values(model, loss, data, weights)
    assert losses[2] == pytest.approx(value, rel=1e-6)
    assert of_w[2] == pytest.approx(gradient, rel=1e-6)
    for whole, part, rest in (losses, of_w, of_scale):
        assert part + rest == pytest.approx(whole, rel=1e-6)
    if name == 'a learned scale':
        assert of_scale.tolist() == [37., 36., 1.]


# What has no part of the weights alone, or none that could be told apart: the loss stays as it is.
WHOLE = {
    'data': lambda m: m.data,
    'with a constant': lambda m: m.data + m.constant,
    'product': lambda m: m.data * m.l2,
    'data in the denominator': lambda m: m.l2 / m.data,
    'of a function that is not linear': lambda m: tf.exp(m.data + m.l2),
    'square of a sum': lambda m: tf.square(m.data + m.l2),
    'mean of a list': lambda m: tf.reduce_mean([m.data, m.l2]),
    'sum of stacked vectors': lambda m: tf.reduce_sum(tf.stack([tf.stack([m.data, m.more]),
                                                                tf.stack([m.l2, m.l1])])),
    'sum of vectors': lambda m: tf.reduce_sum(m.data * tf.ones([2], tf.float64)
                                              + m.l2 * tf.ones([2], tf.float64)),
}


def test_a_loss_without_terms_of_the_weights_is_returned_itself(graph):
    model = Model()
    for name, make in sorted(WHOLE.items()):
        loss = make(model)
        before = len(graph.get_operations())
        data, weights = model.split(loss)
        assert data is loss and weights is None, name
        assert len(graph.get_operations()) == before  # and nothing was added


def test_a_loss_of_the_weights_alone_has_no_data_part():
    model = Model()
    loss = model.l2 + model.l1
    data, weights = model.split(loss)
    assert data is None and weights is loss


def test_a_loss_added_up_over_hundreds_of_variables():
    model = Model()
    loss = model.data
    for _ in range(200):
        loss = loss + model.l2
    data, weights = model.split(loss)
    losses, of_w, _ = values(model, loss, data, weights)
    assert losses.tolist() == [236., 36., 200.]
    assert of_w.tolist() == [236., 36., 200.]


@pytest.mark.parametrize('where', ['identity', 'inner sum', 'scale'])
def test_what_the_loss_waits_for_still_runs(where):
    """slim's and many a trainer's `with tf.control_dependencies([update]): tf.identity(loss)`."""
    model = Model()
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer())
    update = tf.assign_add(count, 1.)
    inner = model.data + model.l2
    with tf.control_dependencies([update]):
        loss = {'identity': lambda: tf.identity(inner),
                'inner sum': lambda: tf.add_n([model.more, model.l2]),
                'scale': lambda: inner * 2.}[where]()
    loss = loss + model.l1
    data, weights = model.split(loss)
    assert weights is not None
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(data)
        assert session.run(count) == 1.
        session.run([data, weights])
        assert session.run(count) == 2.


def test_noise_on_the_weights_is_data():
    model = Model()
    noise = tf.random.normal([], dtype=tf.float64)
    loss = model.data + tf.square(model.w + noise) + model.l2
    names = graph_walk.reachable_from([model.x.op, noise.op],
                                      tf.get_default_graph().get_operations())
    data, weights = split_loss(loss, names)
    assert values(model, loss, data, weights)[0][2] == 1.  # l2 alone


@pytest.mark.parametrize('make', [
    lambda model, total: tf.identity(total), lambda model, total: total * 2.,
    lambda model, total: tf.reduce_sum([model.data, model.l2])],
    ids=['identity', 'product', 'stack'])
def test_an_operation_with_a_gradient_of_its_own_is_left_whole(make, graph):
    name = 'Negated' + uuid.uuid4().hex  # TensorFlow keeps them for the whole process
    tf.RegisterGradient(name)(lambda op, gradient: [-gradient] + [None] * (len(op.inputs) - 1))
    model = Model()
    total = model.data + model.l2
    with graph.gradient_override_map({kind: name for kind in (
            'Identity', 'Mul', 'Add', 'AddV2', 'Cast', 'Pack')}):
        loss = make(model, total)
    data, weights = model.split(loss)
    assert data is loss and weights is None


@pytest.mark.slow
def test_a_sum_of_itself_forty_times_over_is_left_whole():
    model = Model()
    loss = model.data + model.l2
    for _ in range(40):
        loss = loss + loss
    data, weights = model.split(loss)
    assert data is loss and weights is None


def test_what_get_variable_registers_is_one_tensor(graph):
    """TF 2 registers what makes new operations at each use, so none is found in any loss."""
    tf.get_variable('early', [], tf.float64, regularizer=lambda w: w * w)
    RegisteredLosses(graph)
    count = len(graph.get_operations())
    registered = RegisteredLosses(graph).of_call()
    assert len(graph.get_operations()) == count
    early, = tf.losses.get_regularization_losses()
    assert registered.parts_of(tf.identity(early) * 2., [early]) == [early]
    assert registered.parts_of(tf.constant(1.), [early]) == []
