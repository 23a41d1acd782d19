"""Initial values that are computed from other variables: initialized after these, by whoever made.

`large` takes long to draw, so that in a race its readers come first.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd
from case_marks import first_fast

X = np.array([1., 2., 3., 6.])


def large():
    return tf.get_variable('large', [600, 600], tf.float64, tf.random_normal_initializer(seed=1))


def build(model_fn, optimizer=None, **options):
    return towers.build_towers(model_fn, X, optimizer or sgd(), 2, 'mean', **options)


def run_initialized(fetches):
    with tf.Session(config=towers.session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session.run(fetches)


def variable(name):
    [found] = [each for each in tf.global_variables() if each.op.name.split('/')[-1] == name]
    return found


def norm_of(x):
    """Weight norm's g."""
    g = tf.get_variable('made', initializer=tf.norm(large()))
    return tf.reduce_mean(x) * g


def norm_by_function(x):
    values = large()
    g = tf.get_variable('made', [], tf.float64, lambda *_, **__: tf.norm(values))
    return tf.reduce_mean(x) * g


def norm_by_variable(x):
    g = tf.Variable(tf.Variable(tf.norm(large()), name='between'), name='made')
    return tf.reduce_mean(x) * g


def norm_of_rows(x):
    values, shape = large(), tf.shape(tf.Variable(np.zeros([600]), validate_shape=False))
    rows = tf.gather(values, tf.range(shape[0]))
    return tf.reduce_mean(x) * tf.Variable(tf.norm(rows), name='made')


def norm_in_a_loop(x):
    squares = tf.map_fn(lambda row: tf.reduce_sum(tf.square(row)), large())
    return tf.reduce_mean(x) * tf.Variable(tf.sqrt(tf.reduce_sum(squares)), name='made')


@pytest.mark.parametrize('model_fn', first_fast(1, [
    norm_of, norm_by_function, norm_by_variable, norm_of_rows, norm_in_a_loop]))
def test_a_models_variable_is_initialized_after_those_it_is_computed_from(model_fn):
    build(model_fn)
    made, expected = run_initialized([variable('made'), tf.norm(variable('large'))])
    np.testing.assert_allclose(made, expected)


class Averages(tf.train.GradientDescentOptimizer):
    """openai/finetune-transformer-lm makes its slots by an operator on the variable."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        averages = [tf.Variable(variable * 0 + 1., trainable=False, name='made')
                    for _, variable in grads_and_vars]
        with tf.control_dependencies(averages):
            return super().apply_gradients(grads_and_vars, global_step, name)


def average_of_gradients(pairs):
    tf.Variable(pairs[0][1] * 0 + 1., trainable=False, name='made')
    return pairs


@pytest.mark.parametrize('optimizer, numerics', first_fast(1, [
    (Averages(.1), None),
    (towers.Objective(sgd(), transform_gradients=average_of_gradients), None),
    (Averages(.1), towers.Numerics(loss_scale=towers.LossScale()))]))  # which applies in a branch
def test_so_is_a_variable_of_the_optimizer(optimizer, numerics):
    build(lambda x: tf.reduce_mean(x) * tf.reduce_sum(large()), optimizer, numerics=numerics)
    np.testing.assert_array_equal(run_initialized(variable('made')), np.ones([600, 600]))


def test_a_variable_that_has_a_value_keeps_it_and_gives_it():
    def model_fn(x):
        first = tf.get_variable('first', [], tf.float64, tf.ones_initializer())
        return tf.reduce_mean(x) * tf.Variable(2. * first, name='made')
    build(model_fn)
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.assign(variable('first'), 5.))
        session.run(variable('made').initializer)
        assert session.run([variable('first'), variable('made')]) == [5., 10.]


def test_the_value_that_init_from_checkpoint_gives_counts(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        saved = tf.get_variable('first', initializer=np.float64(7.))
        session.run(saved.initializer)
        path = tf.train.Saver().save(session, str(tmp_path / 'model'), write_meta_graph=False)

    def model_fn(x):
        first = tf.get_variable('first', [], tf.float64, tf.ones_initializer())
        tf.train.init_from_checkpoint(path, {'first': first})
        return tf.reduce_mean(x) * tf.Variable(2. * first, name='made')
    build(model_fn)
    assert run_initialized(variable('made')) == 14.


def test_a_read_within_a_loop_is_refused():
    def model_fn(x):
        values = large()
        rows = tf.map_fn(lambda number: tf.reduce_sum(values) * number, tf.ones([2], tf.float64))
        return tf.reduce_mean(x) * tf.Variable(tf.reduce_sum(rows))
    with pytest.raises(towers.SharedVariableError,
                       match='^the initial value of a variable is computed from another variable, '
                             'which operation map/while.* reads within a loop.*initial_value'):
        build(model_fn)
