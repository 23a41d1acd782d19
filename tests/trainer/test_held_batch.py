"""A step on a batch that is held computes what it computes on that batch, and reads no other."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph.graph_walk import step_operations
from trainer.held_batch import hold_batch

DEVICES = ['/cpu:1', '/cpu:2']


class Program:
    """Two towers on a dataset of one batch; each step fetches the loss and the towers' sizes."""

    def __init__(self, dataset, model_fn, **options):
        self.iterator = tf.data.make_initializable_iterator(dataset)
        self.batch = self.iterator.get_next()
        options.setdefault('devices', DEVICES)
        self.built = towers.build_towers(
            lambda *inputs: model_fn(self, *inputs), self.batch,
            tf.train.GradientDescentOptimizer(.1), reduction='mean', **options)
        self.fetches = [self.built.train_op, self.built.loss] + [
            tf.identity(tower.size) for tower in self.built.towers]

    def losses(self, steps, held):
        """The losses of some steps, and the towers' sizes, of a batch that is held or of each."""
        begin = hold_batch(self.built, self.fetches) if held else []
        with tf.Session(config=towers.session_config(self.built.devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(self.iterator.initializer)
            session.run(begin)
            return [session.run(self.fetches)[1:] for _ in range(steps)]


def squares(program, numbers):
    """Loss w * mean(x * x) - mean(x)."""
    weight = tf.get_variable('weight', [], initializer=tf.ones_initializer())
    values = tf.cast(numbers, tf.float32)
    return tf.reduce_mean(weight * values * values) - tf.reduce_mean(values)


def four():
    """One batch: 0, 1, 2, 3."""
    return tf.data.Dataset.range(4).batch(4, drop_remainder=True)


def test_steps_on_a_batch_that_is_held_are_those_on_that_batch_over_and_over():
    with tf.Graph().as_default():
        expected = Program(four().repeat(), squares).losses(3, held=False)
    # By hand: x = 0 … 3, means 1.5 of x and 3.5 of its square, which is the gradient of w = 1.
    np.testing.assert_allclose([losses[0] for losses in expected],
                               [3.5 - 1.5, .65 * 3.5 - 1.5, .3 * 3.5 - 1.5], rtol=1e-5)
    with tf.Graph().as_default():
        assert Program(four(), squares).losses(3, held=True) == expected
    with pytest.raises(tf.errors.OutOfRangeError):
        Program(four(), squares).losses(2, held=False)


def test_shards_are_held_on_the_devices_of_their_towers():
    program = Program(four(), squares)
    begin = hold_batch(program.built, program.fetches)
    step = step_operations(program.fetches)
    assert not {'IteratorGetNext', 'Split', 'SplitV'} & {op.type for op in step}
    held = [op.device for op in step if op.name.startswith('held_batch') and
            op.type == 'VarHandleOp']
    assert sorted(held) == ['/device:CPU:1', '/device:CPU:2'] and len(begin) == 2
    assert not [each for each in tf.global_variables() if each.name.startswith('held_batch')]


def test_sizes_and_weights_of_a_batch_that_is_held():
    program = Program(tf.data.Dataset.range(5).batch(5), squares, remainder='weight')
    found = program.losses(2, held=True)
    assert [sizes for _, *sizes in found] == [[3, 2]] * 2  # of 5 examples
    # x = 0 … 4: means 2 of x and 6 of its square.
    np.testing.assert_allclose([loss for loss, *_ in found], [6 - 2, .4 * 6 - 2], rtol=1e-5)


@pytest.mark.slow
def test_a_batch_of_sparse_tensors_strings_and_a_dict():
    def parse(number):
        return {'name': tf.as_string(number), 'sparse': tf.SparseTensor(
            tf.zeros([1, 1], tf.int64), tf.reshape(number, [1]), [5])}

    def model_fn(program, inputs):
        weight = tf.get_variable('weight', [], initializer=tf.ones_initializer())
        numbers = tf.strings.to_number(inputs['name'])
        return weight * (tf.reduce_mean(numbers) + tf.reduce_mean(
            tf.cast(tf.sparse.to_dense(inputs['sparse']), tf.float32)))
    program = Program(
        tf.data.Dataset.range(4).map(parse).batch(4, drop_remainder=True), model_fn)
    # 0 … 3: 1.5, and a fifth of it.
    np.testing.assert_allclose([loss for loss, *_ in program.losses(2, held=True)],
                               [1.8, 1.8 * (1 - .18)], rtol=1e-5)


def test_what_a_model_takes_of_the_batch_by_its_closure_is_held():
    def model_fn(program, numbers):
        with tf.control_dependencies([program.batch]):
            whole = tf.reduce_max(tf.cast(program.batch, tf.float32))
        return squares(program, numbers) + whole
    program = Program(four(), model_fn)
    assert [loss for loss, *_ in program.losses(1, held=True)] == [2. + 3.]


@pytest.mark.parametrize('options', [
    dict(memory=towers.Memory(accumulate=2)),
    dict(devices=['/cpu:0+/cpu:1', '/cpu:2+/cpu:3'],
         pipeline=towers.Pipeline(micro_batches=2, stages='auto')),
    dict(copies='reuse')
])
@pytest.mark.slow
def test_micro_batches_and_stages(options):
    def model_fn(program, numbers):
        values = tf.cast(numbers, tf.float32)[:, tf.newaxis]
        for name in ('one', 'two'):
            values = tf.nn.relu(tf.matmul(values, tf.get_variable(
                name, [1, 1], initializer=tf.ones_initializer())))
        return tf.reduce_mean(values)
    program = Program(tf.data.Dataset.range(8).batch(8, drop_remainder=True), model_fn, **options)
    assert program.losses(1, held=True)[0][0] == 3.5


def test_a_step_without_an_iterator_is_left_as_it_is():
    built = towers.build_towers(lambda x: tf.reduce_mean(x) * tf.get_variable('w', []),
                                tf.ones([4]), tf.train.GradientDescentOptimizer(.1), DEVICES)
    before = tf.get_default_graph().as_graph_def()
    assert hold_batch(built, [built.train_op]) == []
    assert tf.get_default_graph().as_graph_def() == before
