"""Weights that become others on some worker are found, by name and step; equal ones are not."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from cluster_runs import Launch, own_program, weights_of_own_program
import towers
from towers.errors import ClusterError
from one_process import addresses, together, train

ELSE = 'after step %d the variable %r of worker 1 (%s) is not that of worker 0: each worker makes'


def model_fn(inputs):
    return tf.reduce_mean(tf.square(inputs * tf.get_variable('w', [3]))) + tf.reduce_sum(
        tf.get_variable('another', [2]))


def drawing_from(step, name):
    """A transformation that adds noise to a gradient, another one on each worker."""
    def transform(pairs):
        noise = tf.cond(tf.train.get_global_step() >= step, lambda: tf.random.normal([]),
                        lambda: 0.)
        return [(gradient + noise if variable.op.name == name else gradient, variable)
                for gradient, variable in pairs]
    return transform


def trained(workers, rank, transform, steps=9):
    return train(towers.Cluster('ring', workers, rank=rank), model_fn,
                 (np.ones([4, 3], np.float32),), lambda: towers.Objective(
                     tf.train.MomentumOptimizer(.1, .9), transform_gradients=transform), steps)


@pytest.mark.parametrize('first, found', [
    (0, 1), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_what_the_update_of_a_worker_draws_is_found_after_steps_1_2_4_8(first, found):
    """The moment differs, too, and is before the weight by its name."""
    workers = addresses(2)

    def work(rank):
        with pytest.raises(ClusterError) as raised:
            trained(workers, rank, drawing_from(first, 'w'))
        return type(raised.value), str(raised.value)
    for kind, text in together(work, 2):
        assert kind is ClusterError and text.startswith(ELSE % (found, 'w', workers[1]))
        assert 'noise by tf.random.stateless_normal' in text and '\n' not in text


@pytest.mark.slow
def test_what_is_the_same_on_all_workers_may_be_computed_from_anything():
    """A function of Python's that gives all the same was refused, as one that does not."""
    def rate_of_python(pairs):
        rate = tf.py_func(lambda step: np.float32(1. / (1 + step)), [tf.train.get_global_step()],
                          tf.float32)
        return [(gradient * rate, variable) for gradient, variable in pairs]
    workers = addresses(2)
    one, other = together(lambda rank: trained(workers, rank, rate_of_python), 2)
    assert one['last']['another'][0] < one['first']['another'][0]
    for name, value in one['last'].items():
        assert value.tobytes() == other['last'][name].tobytes(), name


@pytest.mark.slow
def test_of_programs_that_mean_to_differ_the_trained_weights_are_compared():
    """One counts in its update; that is no reason to end, nor to blame another variable."""
    workers = addresses(2)

    def work(rank):
        def transform(pairs):
            with tf.variable_scope('', reuse=tf.AUTO_REUSE):
                counted = tf.get_variable('counted', [], trainable=False, use_resource=True,
                                          initializer=tf.zeros_initializer())
            with tf.control_dependencies([counted.assign_add(1.)] * rank):
                return [(tf.identity(gradient), variable) for gradient, variable in pairs]
        return train(towers.Cluster('ring', workers, rank=rank, compare='variables'), model_fn,
                     (np.ones([4, 3], np.float32),), lambda: towers.Objective(
                         tf.train.GradientDescentOptimizer(.1), transform_gradients=transform), 9)
    one, other = together(work, 2)
    assert one['last']['w'].tobytes() == other['last']['w'].tobytes()
    assert (one['last']['counted'], other['last']['counted']) == (0., 9.)


@pytest.mark.slow
@pytest.mark.parametrize('from_step, found', [(None, None), (17, 21)])
def test_two_processes_end_when_their_rates_differ_and_else_train_on(from_step, found, runner,
                                                                     tmp_path):
    """The chief alone lowers the rate that it feeds; a checkpoint is saved at step 20."""
    path = own_program(str(tmp_path), 40)
    if found is not None:
        with open(path) as opened:
            text = opened.read()
        assert 'rate: 0.5}' in text
        with open(path, 'w') as opened:
            opened.write(text.replace('rate: 0.5}', 'rate: 0.25 if cluster.is_chief and done >= %d '
                                      'else 0.5}' % from_step))
    with Launch(runner, str(tmp_path / 'launch'), ['--workers=2'], [], path) as launch:
        assert launch.status() == (0 if found is None else 1), launch.output
    newest = tf.train.latest_checkpoint(str(tmp_path / 'run'))
    if found is None:
        assert 'own.py: ' not in launch.output
        np.testing.assert_allclose(tf.train.load_checkpoint(newest).get_tensor('weights'),
                                   weights_of_own_program(40), rtol=0, atol=1e-5)
        return
    for rank in (0, 1):
        assert re.search(r"^\[worker %d\] own.py: after step %d the variable 'weights' of worker 1 "
                         r'\(.*\) is not that of worker 0' % (rank, found), launch.output,
                         re.M), launch.output
    assert newest.endswith('-20'), newest
