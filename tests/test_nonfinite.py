"""NaN and Inf: the error names tower, variable and step, and the variable has not changed."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from towers.nonfinite import NonFiniteError, explained

pytestmark = pytest.mark.usefixtures('kind_of_variables')


class Job:
    """One variable of each kind of gradient: loss = mean(x * w) + mean(sqrt(rows[ids] + y))."""

    def __init__(self):
        self.x = tf.placeholder(tf.float32, [4])
        self.y = tf.placeholder(tf.float32, [4])

        def model_fn(x, y):
            w = tf.get_variable('w', [], initializer=tf.ones_initializer())
            rows = tf.get_variable('rows', [3], initializer=tf.zeros_initializer())
            return tf.reduce_mean(x * w) + tf.reduce_mean(
                tf.sqrt(tf.gather(rows, tf.ones([tf.size(y)], tf.int32)) + y))
        self.built = towers.build_towers(
            model_fn, (self.x, self.y), tf.train.GradientDescentOptimizer(1.), 2,
            numerics=towers.Numerics(check_numerics=True))
        self.session = tf.Session(config=towers.session_config(self.built.devices))
        self.session.run(tf.global_variables_initializer())

    def failure(self, x, y, step=3):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            self.session.run(self.built.train_op, {self.x: x, self.y: y})
        return explained(caught.value, step)

    def value(self, name):
        variable, = [v for v in tf.global_variables() if v.op.name == name]
        return self.session.run(variable).tolist()


@pytest.mark.parametrize('tower, bad, kind', [
    (1, np.nan, 'NaN'), (0, np.inf, 'Inf'),
    pytest.param(0, -np.inf, 'Inf', marks=pytest.mark.slow)])
def test_a_loss_is_named_with_its_tower_before_any_gradient_is(tower, bad, kind):
    job = Job()
    x = [1., 1., 1., 1.]
    x[2 * tower] = bad
    for _ in range(5):  # the gradients are bad too, and it would be a race
        error = job.failure(x, [1.] * 4, step=12)
        assert isinstance(error, NonFiniteError) and isinstance(error, towers.TowersError)
        assert str(error) == (
            'the loss of tower %d is %s in step 12. Nothing of it was saved. Look at the learning '
            'rate, at the inputs of that step, and at logarithms, divisions and square roots of 0 '
            'in the model.' % (tower, kind))
    assert job.value('w') == 1. and job.value('rows') == [0.] * 3


@pytest.mark.parametrize('tower', [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_sparse_gradient_is_named_with_its_variable(tower):
    job = Job()
    y = [1., 1., 1., 1.]
    y[2 * tower + 1] = 0.  # sqrt(0) is fine, its slope is not
    error = job.failure([1.] * 4, y)
    assert str(error).startswith('the gradient of rows in tower %d is Inf in step 3. ' % tower)
    assert job.value('rows') == [0.] * 3


def test_another_failure_is_not_explained():
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError) as caught:
        session.run(tf.debugging.check_numerics(tf.constant(np.nan), "the user's own check"))
    assert explained(caught.value, 1) is None
    assert explained(ValueError('NaN'), 1) is None


@pytest.mark.parametrize('options, where', [
    (dict(devices=2, memory=towers.Memory(accumulate=3)), 'tower 1, micro-batch 1 of 3'),
    (dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3', pipeline=towers.Pipeline(micro_batches=3),
          copies='reuse'),
     'tower 1, micro-batch 1 of 3'), (dict(devices=2), 'tower 1')])
def test_the_micro_batch_is_named_with_its_tower(options, where):
    def model(x):
        return tf.reduce_mean(tf.get_variable('w', [], initializer=tf.ones_initializer()) * x)
    built = towers.build_towers(model, np.float32([1] * 8 + [np.nan] * 2 + [1] * 2),
                                tf.train.GradientDescentOptimizer(.1),
                                numerics=towers.Numerics(check_numerics=True),
                                **options)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            session.run(built.train_op)
    assert str(explained(caught.value, 3)).startswith('the loss of %s is NaN in step 3. ' % where)
