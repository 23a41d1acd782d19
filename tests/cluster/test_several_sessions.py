"""Several sessions one after the other in one `join`."""

import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from one_process import StopWithoutSignals, addresses, together
from test_after_the_step import squared, two_workers


@pytest.mark.slow
@pytest.mark.parametrize('slow', [0, 1])
def test_a_worker_that_comes_to_its_second_session_waits_for_the_other(slow):
    """Each session begins with 8, and halves the weight twice. Whoever is first waits for longer
    than `dead_after`: the other one ends a session meanwhile, and not its training."""
    said, lost = [], []

    def work(cluster, rank):
        built = towers.build_towers(
            squared, tf.constant([.25 + .5 * rank], tf.float64),
            tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
        losses = []
        with towers.join(cluster, built, start_timeout=30., dead_after=0.5, say=said.append,
                         on_lost=lost.append) as member:
            for place in range(2):
                if place and rank == slow:
                    time.sleep(2.)
                with member.session() as session:
                    for _ in range(2):
                        losses.append(session.run([built.loss, built.train_op])[0])
                    value = session.run(built.variables[0])
                    time.sleep(0.7 if rank == slow else 0.)
        return losses, value
    (of_chief, value), (of_other, _) = two_workers(work)
    assert of_chief == [8., 2., 8., 2.] and of_other == [24., 6., 24., 6.]
    assert value == 2.
    assert not lost and not [line for line in said if line.startswith('beginning anew')]


@pytest.mark.parametrize('leaves', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_in_a_ring_one_worker_ends_each_session(leaves):
    """TensorFlow counts steps beyond sessions, and does not count the one that was not made. Each
    step takes the mean of 1 and 3 off the weight, and each session begins with 0."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer()),
                tf.constant([1. + 2. * rank], tf.float64),
                tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
            seen = []
            with towers.join(cluster, built, start_timeout=30., dead_after=10.) as member:
                for steps in (3, 2, 4):
                    stop, made = StopWithoutSignals(cluster, built), 0
                    with member.session([stop]) as session:
                        while not session.should_stop() and (rank != leaves or made < steps):
                            session.run(built.train_op)
                            made += 1
                            value = session.run(built.variables[0])
                    seen.append((made, stop.is_told, value))
            return seen
    assert together(work, 2) == [[(3, True, -6.), (2, True, -4.), (4, True, -8.)]] * 2
