"""Optimizers with a `minimize` of their own, which clips, gathers or decays: numbers by hand."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import objective
from towers.errors import GradientError, InvalidArgumentError

RATE = .5


def weight(name='w', value=1.):
    return tf.get_variable(name, [], tf.float64, tf.constant_initializer(value))


def model_fn(x):
    """Gradients are the mean of x, 3, for `w`, and twice that for `v`."""
    return (weight() + 2. * weight('v')) * tf.reduce_mean(x)


class Plain(tf.train.GradientDescentOptimizer):
    def __init__(self):
        super(Plain, self).__init__(tf.constant(RATE, tf.float64))


class Clipping(Plain):
    """By the global norm, of the whole batch."""

    def minimize(self, loss, global_step=None, var_list=None):
        gradients, variables = zip(*self.compute_gradients(loss, var_list))
        clipped, _ = tf.clip_by_global_norm(gradients, 1.)
        return self.apply_gradients(list(zip(clipped, variables)), global_step)


class Scaling(Plain):
    """A loss scale, and a `compute_gradients` that adds 1 to each gradient."""

    def compute_gradients(self, loss, var_list=None, **options):
        return [(gradient + 1., variable) for gradient, variable in super(
            Scaling, self).compute_gradients(loss, var_list, **options)]

    def minimize(self, loss, **options):
        pairs = self.compute_gradients(loss * 8.)
        return self.apply_gradients([(gradient / 8., variable) for gradient, variable in pairs],
                                    **{'global_step': options.get('global_step')})


class Decaying(Plain):
    """Halves `w` after the update, which its operation includes; takes the loss alone."""

    def minimize(self, loss):
        done = super(Decaying, self).minimize(loss)
        w = tf.trainable_variables()[0]
        with tf.control_dependencies([done]):
            return tf.assign(w, w.read_value() / 2.)


class Wrapping:
    """No `tf.train.Optimizer`: hands everything on to one, but for `minimize`."""

    def __init__(self, inner=None):
        self._inner = inner or Plain()

    def __getattr__(self, name):
        return getattr(self._inner, name)


class WrappingMinimize(Wrapping):
    def minimize(self, loss, **options):
        return self._inner.minimize(loss / 2., **options)


class ByLoss(Plain):
    """The gradient times the loss."""

    def minimize(self, loss, global_step=None, var_list=None):
        return self.apply_gradients([(gradient * loss, variable) for gradient, variable
                                     in self.compute_gradients(loss, var_list)], global_step)


NORM = np.sqrt(9. + 36.)
BY_HAND = [
    (Clipping, 1. - RATE * 3. / NORM, 1. - RATE * 6. / NORM),
    (Scaling, 1. - RATE * (3. + 1. / 8.), 1. - RATE * (6. + 1. / 8.)),
    (Decaying, (1. - RATE * 3.) / 2., 1. - RATE * 6.),
    (WrappingMinimize, 1. - RATE * 1.5, 1. - RATE * 3.),
    (ByLoss, 1. - RATE * 27., 1. - RATE * 54.)]


def trained(make_optimizer, steps=1, **options):
    """`(w, v, global step)` after some steps."""
    step = tf.train.get_or_create_global_step()
    options = dict(dict(devices=2, remainder='weight', global_step=step), **options)
    built = towers.build_towers(model_fn, tf.constant([1., 2., 3., 4., 5.], tf.float64),
                                objective(make_optimizer(), options), reduction='mean', **options)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            session.run(built.train_op)
        return session.run(built.variables + [step])


@pytest.mark.parametrize('make_optimizer, w, v, options', first_fast(2, [
    BY_HAND[0] + ({},), BY_HAND[0] + (dict(memory=towers.Memory(accumulate=2), devices=1),)] + [
        each + ({},) for each in BY_HAND[1:]]))
def test_it_is_called_once_for_the_whole_batch(make_optimizer, w, v, options, graph):
    np.testing.assert_allclose(trained(make_optimizer, **options), [w, v, 1], rtol=1e-12)


@pytest.mark.parametrize('minimize, expected', [
    (lambda loss, params, global_step=None: tf.no_op(),
        "minimize of Plain: expected minimize.loss.*'params'"),
    (lambda loss, **options: tf.no_op(), 'minimize of Plain takes no gradient of the loss'),
    (lambda loss, **options: (tf.no_op(), 1), 'minimize of Plain returned .*: expected the oper')])
def test_what_cannot_be_called_so(minimize, expected, graph):
    def make():
        optimizer = Plain()
        optimizer.minimize = minimize
        return optimizer
    with pytest.raises(GradientError, match=expected):
        trained(make)


def test_what_would_be_done_to_other_gradients_is_refused(graph):
    for options, expected in ((dict(numerics=towers.Numerics(loss_scale=towers.LossScale())),
                               'there is a loss scale'),
                              (dict(variables=towers.VariablePlacement('replicated')),
                               'there is a replica of each')):
        with pytest.raises(InvalidArgumentError, match='minimize of its own, and ' + expected):
            trained(Clipping, **options)


def test_in_a_cluster_the_value_of_one_workers_loss_is_refused(graph):
    cluster = towers.Cluster('ring', ['a:1', 'b:1'], uneven=True)
    with pytest.raises(GradientError, match="computes with the loss of one worker's examples"):
        trained(ByLoss, cluster=cluster)
