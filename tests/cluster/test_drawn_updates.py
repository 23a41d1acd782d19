"""Random numbers in the update of a ring: refused, or the same seeds on all workers."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.drawn_updates import seeds_of_updates
from towers.cluster.fingerprint import fingerprint
from towers.errors import ClusterError

RING = towers.Cluster('ring', ['a:1', 'b:1'])


def build(noise=None, optimizer=None, dropout=True):
    def model_fn(inputs):
        weight = tf.get_variable('weight', [3])
        hidden = tf.nn.dropout(inputs * weight, rate=.5) if dropout else inputs * weight
        return tf.reduce_mean(hidden)

    def transform(pairs):
        return [(gradient + noise(), variable) for gradient, variable in pairs]
    return towers.build_towers(
        model_fn, (tf.ones([4, 3]),), optimizer or tf.train.AdamOptimizer(.1), 2,
        global_step=tf.train.get_or_create_global_step(), cluster=RING,
        transform_gradients=transform if noise else None)


class Noisy(tf.train.GradientDescentOptimizer):
    """Adds noise within the optimizer, as Langevin dynamics does."""

    def _apply_dense(self, grad, var):
        return super(Noisy, self)._apply_dense(grad + tf.random.normal([3]), var)

    def _resource_apply_dense(self, grad, handle):
        return super(Noisy, self)._resource_apply_dense(grad + tf.random.normal([3]), handle)


@pytest.mark.parametrize('options', [
    dict(noise=lambda: tf.random.normal([3])), dict(optimizer=Noisy(.1))])
def test_noise_without_a_seed_is_refused_by_name(options):
    built = build(**options)
    with pytest.raises(ClusterError, match=r"random_normal.*RandomStandardNormal\) draws random "
                                           r"numbers for the update"):
        fingerprint(RING, built, 4)


def test_noise_with_a_seed_has_to_have_the_same_on_all_workers():
    built = build(lambda: tf.random.normal([3], seed=7))
    assert seeds_of_updates(built) == 'RandomStandardNormal 87654321 7'
    settings = fingerprint(RING, built, 4)['settings']
    assert settings['random numbers of its update'] == 'RandomStandardNormal 87654321 7'


def test_noise_by_the_step_and_dropout_in_the_model_are_no_matter():
    step = tf.train.get_or_create_global_step()
    built = build(lambda: tf.random.stateless_normal(
        [3], tf.stack([tf.constant(1, tf.int64), step])))
    assert seeds_of_updates(built) == ''
    assert fingerprint(RING, built, 4)['settings']['random numbers of its update'] == ''


@pytest.mark.parametrize('uneven, num_towers', [(False, 2), (True, 1)])
def test_dropout_on_rows_is_none_of_the_update(uneven, num_towers):
    """How many rows this worker sends is a shape of the gradients, which are of the dropout."""
    def model_fn(ids):
        table = tf.get_variable('table', [5, 3])
        return tf.reduce_mean(tf.nn.dropout(tf.nn.embedding_lookup(table, ids), rate=.5))
    tf.set_random_seed(3)  # of this worker
    ring = RING._replace(uneven=uneven)
    built = towers.build_towers(model_fn, (tf.placeholder(tf.int32, [None]),),
                                tf.train.GradientDescentOptimizer(.1), num_towers,
                                remainder='weight', cluster=ring)
    assert seeds_of_updates(built) == ''
