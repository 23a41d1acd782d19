"""check_towers, and replicated variables, on programs that it once judged wrongly."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

import sample_models as samples
import towers

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(12, 4).astype('f'), RANDOM.randn(12, 3).astype('f')
INITIAL = tf.constant_initializer(np.random.RandomState(7).randn(4, 3).astype('f') * .5)


def error(out, y):
    return tf.reduce_mean(tf.reduce_sum(tf.square(out - y), 1))


def kernel():
    return tf.get_variable('w', [4, 3], initializer=INITIAL)


def counts_its_calls(x, y):
    count = tf.get_variable('count', [], tf.int64, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(count, 1)]):
        return error(tf.matmul(x, kernel()), y)


def averages_inline(x, y):
    return error(tf.matmul(slim.batch_norm(x, updates_collections=None, decay=.5), kernel()), y)


class IgnoresTheStep(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return super(IgnoresTheStep, self).apply_gradients(grads_and_vars, name=name)


def ignores_the_step():
    tf.train.get_or_create_global_step()
    return IgnoresTheStep(.1)


@pytest.mark.parametrize('model_fn, make_optimizer, options', [
    (counts_its_calls, None, {}), (averages_inline, None, dict(same_shards=True)),
    (lambda x, y: error(tf.matmul(x, kernel()), y), ignores_the_step, {})],
    ids=['count', 'inline', 'step'])
def test_what_is_equal(model_fn, make_optimizer, options):
    towers.mend_slim()
    report = towers.check_towers(model_fn, (X, Y), make_optimizer, **options)
    assert report.equal, str(report)


def test_tensors_for_arrays_are_refused():
    with pytest.raises(towers.InputError, match='takes arrays'):
        towers.check_towers(error, (tf.constant(X), Y))


def test_gradients_that_the_model_takes_of_all_variables():
    def model_fn(x, y):
        loss = error(tf.matmul(x, kernel()), y)
        found = [each for each in tf.gradients(loss, tf.trainable_variables()) if each is not None]
        return loss + sum(.3 * tf.reduce_sum(each) for each in found)
    samples.check_against_one_device(model_fn, (X, Y), tolerance=1e-5, reduction='mean',
                                     variables=towers.VariablePlacement('replicated'))


@pytest.mark.parametrize('arguments', [(None,), (object,)])
def test_an_audit_of_something_else(arguments):
    with pytest.raises(towers.InvalidArgumentError, match='what build_towers returned'):
        towers.audit(*arguments)


def scaled_by_its_first_batch(x, y):
    """Weight normalization with data-dependent initialization, as Salimans and Kingma have it."""
    direction = tf.get_variable('v', [4, 3], initializer=tf.random_normal_initializer())
    out = tf.matmul(x, tf.cond(tf.is_variable_initialized(direction), direction.read_value,
                               lambda: direction.initial_value))
    scale = tf.get_variable('g', initializer=1. / tf.sqrt(tf.reduce_mean(tf.square(out), 0)))
    return error(tf.matmul(x, direction) * scale, y)


def test_an_initial_value_of_a_part_of_the_batch_is_not_equal():
    report = towers.check_towers(scaled_by_its_first_batch, (X, Y), steps=1)
    assert not report.equal and report.not_finite is None
    assert report.first[:2] == ('initial value', 'g') and report.first.relative > 1e-2
    assert str(report).startswith('NOT equal: initial value g differs by ')
    assert "tower 0's part of it: compute it from the whole batch" in report.cause
    # Shards that are alike have the whole batch's.
    assert towers.check_towers(scaled_by_its_first_batch, (X, Y), steps=1, same_shards=True).equal


def test_an_initial_value_of_the_whole_batch_is():
    def model_fn(x, y):
        scale = tf.get_variable('g', initializer=tf.reduce_mean(tf.square(tf.constant(X))))
        return error(tf.matmul(x, kernel()) * scale, y)
    assert towers.check_towers(model_fn, (X, Y), steps=1).equal


@pytest.mark.parametrize('options, names', [
    (dict(devices=1), []), (dict(devices=1, memory=towers.Memory(accumulate=2)), ['g'])])
def test_the_plan_names_such_an_initial_value(options, names):
    plan = towers.build_towers(scaled_by_its_first_batch, (X, Y), samples.sgd(), **options).plan
    assert plan.initial_of_first == names
    line = "  initial value    of g is of tower 0's part of the batch, not of all of it"
    assert str(plan).split('\n').count(line) == len(names)
