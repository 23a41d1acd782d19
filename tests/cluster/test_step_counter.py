"""What needs all workers of a ring, run by one of them alone: an error that says so."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError, WorkerLostError
from one_process import addresses, together


def worker(cluster, alone, kept):
    """Runs three steps; between two of them the workers in `alone` run the gradients, too."""
    with tf.Graph().as_default():
        built = towers.build_towers(
            lambda inputs: tf.reduce_mean(inputs) * tf.get_variable(
                'weight', [], tf.float64, tf.zeros_initializer()),
            (tf.constant(np.full([2], 1. + cluster.rank)),), tf.train.GradientDescentOptimizer(1.),
            1, 'mean', global_step=tf.train.get_or_create_global_step(), cluster=cluster)
        (gradient, weight), = built.gradients
        with towers.join(cluster, built, start_timeout=30., dead_after=5.,
                         on_lost=lambda lost: None) as member, member.session() as session:
            for turn in range(3):
                session.run(built.train_op)
                if turn == 0 and cluster.rank in alone:
                    kept.append(session.run(gradient))
            kept.append(session.run_step_fn(
                lambda step_context: step_context.session.run(weight)))


@pytest.mark.slow
def test_one_worker_that_runs_gradients_alone_is_found_out():
    workers = addresses(2)

    def work(rank):
        with pytest.raises((ClusterError, WorkerLostError)) as caught:
            worker(towers.Cluster('ring', workers, rank=rank), [0], [])
        return str(caught.value)
    texts = together(work, 2)
    for text in texts:
        assert 'the workers of the ring are in different steps: this one has made ' in text
        assert 'all of them together 3. Some of them alone have run' in text
        assert 'built.gradients' in text


@pytest.mark.slow
def test_all_workers_may_run_gradients_between_steps():
    workers, kept = addresses(2), [[], []]
    together(lambda rank: worker(towers.Cluster('ring', workers, rank=rank), [0, 1], kept[rank]), 2)
    assert kept == [[1.5, -4.5]] * 2
