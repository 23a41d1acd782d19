"""Errors of the runtime: the line that says why, and the place where NaN and Inf began."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from towers.errors import NonFiniteError, StepError, failing_on, is_of_input, reason_of
from towers.nonfinite import explained
from case_marks import first_fast


@pytest.mark.parametrize('message', [
    'm = 9 is not in [0, 3)',
    'm = 9 is not in [0, 3)\n\t [[node GatherV2 (defined at a.py:3) ]]',
    'From /job:worker/replica:0/task:0:\nm = 9 is not in [0, 3)\n\t [[{{node GatherV2}}]]',
    'From /job:worker/replica:0/task:0:\n2 root error(s) found.\n  (0) INVALID_ARGUMENT: '
    'm = 9 is not in [0, 3)\n\t [[{{node a}}]]\n  (1) CANCELLED: stopped',
    '\n=====================\nINVALID_ARGUMENT: From /job:worker/replica:0/task:1:\n'
    '2 root error(s) found.\n  (0) INVALID_ARGUMENT: m = 9 is not in [0, 3)\n\t [[{{node a}}]]\n'
    'INVALID_ARGUMENT: From /job:ps/replica:0/task:0:\nm = 9 is not in [0, 3)',
    'Graph execution error:\n\nFrom /job:worker/replica:0/task:0:\nm = 9 is not in [0, 3)',
    "Graph execution error:\n\nDetected at node 'GatherV2' defined at (most recent call last):\n"
    '    File "a.py", line 9, in <module>\nNode: \'GatherV2\'\nm = 9 is not in [0, 3)\n'
    '\t [[{{node GatherV2}}]]',
    'Graph execution error:\n\nm = 9 is not in [0, 3)\n\t [[{{node GatherV2}}]]',
    "Graph execution error:\n\nDetected at node 'a' defined at (most recent call last):\n"
    "Node: 'a'\nDetected at node 'b' defined at (most recent call last):\nNode: 'b'\n"
    '2 root error(s) found.\n  (0) INVALID_ARGUMENT:  m = 9 is not in [0, 3)\n'
    '\t [[{{node a}}]]\n  (1) CANCELLED:  stopped\n0 successful operations.',
    '{{function_node __inference_Dataset_map_<lambda>_24}} m = 9 is not in [0, 3)\n\t '
    '[[{{node a}}]]',
    'Error in user-defined function passed to MapDataset:2 transformation with iterator: '
    'Iterator::Root::Map: m = 9 is not in [0, 3)',
    '2 root error(s) found.\n  (0) Invalid argument: m = 9 is not in [0, 3)\n'
    '\t [[{{node a}}]]\n  (1) Cancelled: stopped'])
def test_the_reason(message):
    assert reason_of(tf.errors.InvalidArgumentError(None, None, message)) == (
        'm = 9 is not in [0, 3)')


@pytest.mark.parametrize('text, expected', [
    ('rotten\n\t [[{{node Assert}}]]\n\t [[IteratorGetNext]]', True),
    ('rotten\n\t [[{{node next/IteratorGetNextAsOptional}}]]', True),
    ('rotten\n\t [[node IteratorGetNext_1 (defined at a.py:3) ]]', True),
    ('rotten\n\t [[{{node model/Assert}}]]\n\t [[IteratorGetNext/_3]]', False),
    ('rotten\n\t [[{{node model/Assert}}]]\n\t [[shards/IteratorGetNext_1/_12]]', False),
    ('rotten\n\t [[{{node model/Assert}}]]', False)])
def test_whether_it_is_of_the_input(text, expected):
    assert is_of_input(tf.errors.UnknownError(None, None, text)) == expected
    assert not is_of_input(tf.errors.ResourceExhaustedError(None, None, text))
    assert not is_of_input(RuntimeError(text))


def test_only_errors_of_the_runtime_become_others():
    with pytest.raises(KeyError):
        with failing_on('on one device'):
            raise KeyError('w')
    with pytest.raises(StepError, match='^the model failed on one device: the disk is full$'):
        with failing_on('on one device'):
            raise tf.errors.ResourceExhaustedError(None, None, 'the disk is full')


# ---- NaN and Inf: tower, variable and step are named, and the variable has not changed ----------

class BadBatch:
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


@pytest.mark.usefixtures('kind_of_variables')
@pytest.mark.parametrize('tower, bad, kind', first_fast(1, [
    (1, np.nan, 'NaN'), (0, np.inf, 'Inf')]))
def test_a_loss_is_named_with_its_tower_before_any_gradient_is(tower, bad, kind):
    job = BadBatch()
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


@pytest.mark.usefixtures('kind_of_variables')
def test_a_sparse_gradient_is_named_with_its_variable():
    job = BadBatch()
    y = [1., 1., 1., 1.]
    y[3] = 0.  # sqrt(0) is fine, its slope is not
    error = job.failure([1.] * 4, y)
    assert str(error).startswith('the gradient of rows in tower 1 is Inf in step 3. ')
    assert job.value('rows') == [0.] * 3


def test_another_failure_is_not_explained():
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError) as caught:
        session.run(tf.debugging.check_numerics(tf.constant(np.nan), "the user's own check"))
    assert explained(caught.value, 1) is None
    assert explained(ValueError('NaN'), 1) is None


@pytest.mark.parametrize('options, where', first_fast(1, [
    (dict(devices=2, memory=towers.Memory(accumulate=3)), 'tower 1, micro-batch 1 of 3'),
    (dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3', pipeline=towers.Pipeline(micro_batches=3),
          copies='reuse'),
     'tower 1, micro-batch 1 of 3'), (dict(devices=2), 'tower 1')]))
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
