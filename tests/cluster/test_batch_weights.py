"""What part of a step's gradient a machine's gradient is."""

import pytest
import tensorflow.compat.v1 as tf

from towers import Cluster
from towers.cluster.batch_weights import Shares

CLUSTER = Cluster('ring', ['a:1', 'b:2'])


@pytest.mark.parametrize('reduction, weight, constant', [('mean', .75, .5), ('sum', 1.5, 1.)])
def test_by_examples(reduction, weight, constant):
    """3 of 4 examples; the sum is that of two workers, hence twice as much."""
    with tf.Session() as session:
        shares = Shares(CLUSTER._replace(uneven=True), 3, reduction)
        assert shares.are_weighted and shares.same_examples is None
        assert session.run(shares.weight(tf.constant(4., tf.float64))) == weight
        even = Shares(CLUSTER, 3, reduction)
        assert not even.are_weighted and even.same_examples == 3 and even.constant() == constant


def test_a_worker_without_examples_weighs_nothing():
    for active, total, weight in ((0., 5., 0.), (1., 8., .375), (0., 0., 0.)):
        shares = Shares(CLUSTER._replace(active=tf.constant(active)), 3, 'mean')
        with tf.Session() as session:
            assert shares.are_weighted and shares.same_examples is None
            assert session.run(shares.own_examples()) == 3 * active
            assert session.run(shares.weight(tf.constant(total, tf.float64))) == weight
