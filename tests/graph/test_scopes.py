"""towers.graph.scopes: variable scopes by their full names, and name scopes within texts."""

import pytest
import tensorflow.compat.v1 as tf

from towers.graph.scopes import full_scope_name, like_current_scope, scope_to_enter


@pytest.mark.parametrize('around', ['', 'train', 'train/net', 'other', 'train_2'])
@pytest.mark.parametrize('full', ['', 'train', 'train/net', 'train_2', 'training/net'])
def test_the_scope_of_a_full_name_is_entered_from_anywhere(around, full):
    """`training` is not within `train`, though its name begins so."""
    def within():
        with tf.variable_scope(
                tf.get_variable_scope() if enter is None else enter, auxiliary_name_scope=False):
            return tf.get_variable('w', []).op.name
    if around:
        with tf.variable_scope(around):
            enter = scope_to_enter(full)
            assert full_scope_name(enter) == full
            assert within() == (full + '/w' if full else 'w')
    else:
        enter = scope_to_enter(full)
        assert within() == (full + '/w' if full else 'w')


def test_a_scope_like_the_current_one():
    initializer = tf.ones_initializer()
    with tf.variable_scope('a', initializer=initializer, use_resource=True, dtype=tf.float64):
        made = like_current_scope('b', True)
    assert (made.name, made.reuse, made.initializer) == ('b', True, initializer)
    assert made.use_resource and made.dtype == tf.float64
