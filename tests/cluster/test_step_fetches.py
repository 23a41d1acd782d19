"""What calls of `session.run` are: steps, of all workers, or looks that one of them takes alone."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError
from one_process import StopWithoutSignals, addresses, in_sessions, serve, together

def two_workers(kind):
    """A function from a rank to its `Cluster`."""
    if kind == 'ring':
        workers = addresses(2)
        return lambda rank: towers.Cluster('ring', workers, rank=rank)
    return serve(2)


@pytest.mark.parametrize('kind', ['ring', pytest.param('ps', marks=pytest.mark.slow)])
def test_sums_without_the_step_are_refused_and_the_training_goes_on(kind):
    def work(session, built, rank):
        [(gradient, w)] = built.gradients
        for weight in (4., 2.):
            session.run(built.train_op)
            if rank == 0:
                with pytest.raises(ClusterError, match='.gradients.* without the step'):
                    session.run({'look': [w, gradient]})
                assert session.run(w) == weight
    in_sessions(two_workers(kind), work)


@pytest.mark.parametrize('kind, ends', [
    ('ring', 'steps'), pytest.param('ring', 'the data of all', marks=pytest.mark.slow),
    pytest.param('ps', 'all together', marks=pytest.mark.slow)])
def test_one_worker_looks_at_a_weight_alone_while_it_trains_and_afterwards(kind, ends):
    """The gradient is that of the distance to the mean of all, 4: w <- w - 0.2 * (w - 4)."""
    cluster_of, steps = two_workers(kind), 2 if ends == 'steps' else 3

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            data = tf.data.Dataset.from_tensors(np.array([[1., 3.], [5., 7.]][rank])).repeat(3)
            if ends == 'all together':
                feed = towers.until_all_end(data)
                inputs, cluster = feed.inputs, cluster._replace(active=feed.active)
            else:
                inputs = tf.data.make_one_shot_iterator(data).get_next()
            built = towers.build_towers(
                lambda x: tf.reduce_mean(tf.square(x - tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer()))), inputs,
                tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)), 1, 'mean',
                cluster=cluster)
            seen = []
            with towers.join(cluster, built, dead_after=20.) as member, member.session(
                    [StopWithoutSignals(cluster, built)]) as session:
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while not session.should_stop() and (ends != 'steps' or len(seen) < steps):
                        session.run(built.train_op)
                        seen.append(session.run(built.variables[0]) if rank == 0 else None)
                if rank == 0:
                    seen.append(session.run(built.variables[0]))
            return seen
    seen, _ = together(work, 2)
    expected = [4 * (1 - .8 ** step) for step in range(1, steps + 1)]
    # The step that ends the training without data changes nothing, and has a look of its own.
    assert len(seen) - steps in ((1, 2) if ends == 'all together' else (1,))
    np.testing.assert_allclose(seen, expected + expected[-1:] * (len(seen) - steps), rtol=1e-12)
