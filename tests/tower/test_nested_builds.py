"""A build within the model function of another one is refused; after it, builds go on."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers


def _build(model_fn, **options):
    return towers.build_towers(model_fn, tf.constant(np.ones([4, 3], np.float32)), None, 2,
                               **options)


def _mean(x):
    return tf.reduce_mean(x)


def test_a_build_in_a_model_function():
    def nested(x):
        return towers.build_towers(_mean, x, None, 2, name='inner').loss
    with tf.Graph().as_default():
        with pytest.raises(towers.ModelFunctionError, match='^build_towers is called within the m'):
            _build(nested)
    with tf.Graph().as_default():
        assert _build(_mean).loss is not None
        assert _build(_mean, name='second').loss is not None


def test_a_build_in_a_graph_of_its_own():
    def apart(x):
        with tf.Graph().as_default():
            _build(_mean)
        return tf.reduce_mean(x)
    with tf.Graph().as_default():
        assert _build(apart).loss is not None
