"""towers.staged: the batches of a dataset on the towers' devices, against the dataset itself."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers

X, Y = np.random.RandomState(0).randn(24, 6), np.random.RandomState(1).randn(24, 3)


def model_fn(x, y):
    w = tf.get_variable('w', [6, 3], tf.float64, tf.ones_initializer())
    return tf.reduce_mean(tf.square(tf.matmul(x, w) - y))


def batches(**options):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, **options)


def trained(num_towers, stages, dataset, **options):
    """The weights after all batches, by as many steps as there are."""
    with tf.Graph().as_default():
        inputs = tf.data.make_one_shot_iterator(dataset()).get_next() if not stages else (
            towers.staged(dataset(), num_towers))
        built = towers.build_towers(model_fn, inputs, tf.train.MomentumOptimizer(.1, .9),
                                    num_towers, 'mean', **options)
        if stages:
            assert [tf.nest.flatten(tower.inputs)[0].device for tower in built.towers] == list(
                built.devices)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for _ in range(3):
                session.run(built.train_op)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(built.train_op)
            return session.run(built.variables)


@pytest.mark.parametrize('num_towers, dataset, options', first_fast(1, [
    (2, batches, {}), (4, batches, {}), (2, lambda: batches(drop_remainder=True), {}),
    (2, lambda: batches(drop_remainder=True), dict(copies='reuse'))]))
def test_the_steps_are_those_of_the_dataset(num_towers, dataset, options):
    np.testing.assert_array_equal(trained(num_towers, True, dataset, **options),
                                  trained(num_towers, False, dataset, **options))


def test_the_plan_counts_the_examples_of_all_shards():
    built = towers.build_towers(model_fn, towers.staged(batches(drop_remainder=True), 2),
                                tf.train.GradientDescentOptimizer(.1), 2)
    assert str(built.plan).startswith('2 towers, batch 8 = 2 x 4\n')


@pytest.mark.parametrize('staged, build, text', [
    (lambda: towers.staged(X, 2), {}, 'expected a tf.data.Dataset'),
    (lambda: towers.staged(batches(drop_remainder=True), 3), {}, r'\(8, 6\).* that 3 towers'),
    (lambda: towers.staged(tf.data.Dataset.from_tensors(1.), 2), {}, r'shape \(\): expected dense'),
    (lambda: towers.staged(batches(), [['/cpu:0', '/cpu:1']]), {}, 'is one tower on 2 devices'),
    (lambda: towers.staged(batches(), 2), dict(devices=4), 'the same devices to towers.staged'),
    (lambda: towers.staged(batches(), 2), dict(devices=2, memory=towers.Memory(accumulate=2)),
     'cut each into 2')])
def test_what_cannot_be_staged_is_one_typed_line(staged, build, text):
    with pytest.raises(towers.TowersError, match=text) as caught:
        towers.build_towers(model_fn, staged(), tf.train.GradientDescentOptimizer(.1), **build)
    assert '\n' not in str(caught.value)
