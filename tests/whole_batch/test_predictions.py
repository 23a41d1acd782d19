"""Predictions of the towers as those of the batch, by what is proven of each."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers

X = np.arange(30.).reshape([5, 6])


def fed(x):
    return tf.placeholder_with_default(x, [None] + list(x.shape[1:]))


def predicted(prediction, num_towers=2, batch=X, **options):
    """The predictions of towers without an optimizer, and the same on one device."""
    with tf.Graph().as_default():
        built = towers.build_towers(
            lambda x: towers.ModelOutput(predictions=prediction(x)), fed(batch), None, num_towers,
            remainder='weight', **options)
        one = prediction(tf.constant(batch))
        with tf.Session(config=towers.session_config(built.devices)) as session:
            return session.run([built.predictions, one])


@pytest.mark.parametrize('prediction', [
    lambda x: x,
    lambda x: 2. * x,
    lambda x: tf.transpose(tf.reshape(x, [-1, 2, 3]), [1, 0, 2]),  # [time, examples, …]
    lambda x: tf.transpose(x),
    lambda x: tf.reshape(x, [-1, 2]),  # three rows an example
    lambda x: tf.boolean_mask(x, x[:, 0] > 7.),
    lambda x: tf.reduce_mean(x),
    lambda x: tf.reduce_mean(x, 0),
    lambda x: tf.reduce_sum(x, 0),
    lambda x: tf.shape(x)[0],
    lambda x: {'rows': tf.argmax(x, 1), 'rate': tf.constant(.5), 'count': tf.shape(x)[1]},
    lambda x: tf.map_fn(tf.reduce_max, x)])
@pytest.mark.parametrize('num_towers', first_fast(1, [2, 7]))
def test_predictions_are_those_of_one_device(prediction, num_towers):
    """Of seven towers two have padding in the place of an example."""
    ours, theirs = predicted(prediction, num_towers)
    tf.nest.map_structure(lambda one, many: np.testing.assert_allclose(many, one, 1e-12),
                          theirs, ours)


@pytest.mark.parametrize('prediction, text', [
    (lambda x: tf.reduce_max(x), r"'Max:0' of shape \(\) is not known .*'Max' \(Max\) is taken over"),
    (lambda x: tf.nn.top_k(x[:, 0], 1)[0], 'chooses among the examples'),
    (lambda x: x[:1], 'takes some of the examples'),
    (lambda x: tf.concat([x, x], 0), 'a value for each example, 2 times after each other'),
    (lambda x: tf.py_func(np.sort, [x], tf.float64), 'is Python code, of which nothing is known'),
    (lambda x: tf.reduce_sum(x) + 1., 'a sum over the examples'),
    (lambda x: tf.boolean_mask(tf.concat([x, 2. * x], 0), tf.concat([x, x], 0)[:, 0] > 7.),
     'it is rows of the examples, which are not known to be chosen from all examples once')])
def test_what_is_none_of_the_batchs_is_refused(prediction, text):
    with pytest.raises(towers.ModelFunctionError, match=text) as caught:
        predicted(prediction)
    assert 'take it from built.towers[k].predictions' in str(caught.value)
    ours, theirs = predicted(prediction, 1)  # one tower has the whole batch
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_sparse_predictions_are_joined_row_by_row():
    """As the texts of a decoder, each shard's as wide as its longest one."""
    indices, values = [[0, 0], [0, 1], [2, 3]], [1., 2., 3.]

    def built_on(num_towers):
        batch = tf.SparseTensor(indices, values, [4, 5])
        return towers.build_towers(
            lambda x: towers.ModelOutput(predictions=tf.SparseTensor(
                x.indices, 2. * x.values, x.dense_shape)), batch, None, num_towers)
    built = built_on(2)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        joined = session.run(built.predictions)
    assert joined.indices.tolist() == indices and joined.values.tolist() == [2., 4., 6.]
    assert joined.dense_shape.tolist() == [4, 5]


def test_predictions_that_are_no_tensors():
    for make in (tf.no_op, lambda: object, lambda: {1, 2},
                 lambda: tf.ragged.constant([[1], [2, 3]])):
        with tf.Graph().as_default(), pytest.raises(
                towers.ModelFunctionError, match='among its predictions: expected tensors'):
            towers.build_towers(lambda x: towers.ModelOutput(predictions=make()), fed(X), None, 2)
