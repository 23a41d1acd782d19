"""What calls of `session.run` are: steps, of all workers, or looks that one of them takes alone."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.step_fetches import StepFetches
from towers.errors import ClusterError
from one_process import StopWithoutSignals, addresses, serve, together

BATCHES = [[1., 3.], [5., 7.]]  # of each worker, 3 times


def model_fn(x):
    return tf.reduce_mean(tf.square(x - tf.get_variable('w', [], tf.float64,
                                                        tf.zeros_initializer())))


def two_workers(kind):
    """A function from a rank to its `Cluster`."""
    if kind == 'ring':
        workers = addresses(2)
        return lambda rank: towers.Cluster('ring', workers, rank=rank)
    return serve(2)


class Shows(tf.train.SessionRunHook):
    """Fetches a tensor in each call of `session.run`, as a hook of summaries does."""

    def __init__(self, tensor):
        self._tensor, self.seen = tensor, []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._tensor)

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results)


@pytest.mark.parametrize('kind, by_hook', [
    ('ring', False), pytest.param('ps', True, marks=pytest.mark.slow)])
def test_sums_without_the_step_are_refused_and_the_training_goes_on(kind, by_hook):
    """The gradient is w times the mean of 0.25 and 0.75; the weight is 8, then 4 and 2."""
    cluster_of = two_workers(kind)

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.square(tf.get_variable(
                    'w', [], tf.float64, tf.constant_initializer(8.))) / 2.,
                tf.constant([.25 + .5 * rank], tf.float64),
                tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
            [(gradient, w)] = built.gradients
            shows = Shows(gradient)
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member, \
                    member.session([shows] if by_hook and not rank else []) as session:
                for weight in (4., 2.):
                    session.run(built.train_op)
                    if rank == 0:
                        with pytest.raises(ClusterError, match='.gradients.* without the step'):
                            session.run(w if by_hook else {'look': [w, gradient]})
                        assert session.run_step_fn(
                            lambda step_context: step_context.session.run(w)) == weight
                return shows.seen
    assert together(work, 2) == [[4., 2.] if by_hook else [], []]


@pytest.mark.parametrize('kind, ends', [('ring', 'steps')] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('ring', 'the data of all'), ('ps', 'all together')]])
def test_one_worker_looks_at_a_weight_alone_while_it_trains_and_afterwards(kind, ends):
    cluster_of = two_workers(kind)

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            data = tf.data.Dataset.from_tensors(np.array(BATCHES[rank])).repeat(3)
            if ends == 'all together':
                feed = towers.until_all_end(data)
                inputs, cluster = feed.inputs, cluster._replace(active=feed.active)
            else:
                inputs = tf.data.make_one_shot_iterator(data).get_next()
            built = towers.build_towers(
                model_fn, inputs, tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)),
                1, 'mean', global_step=tf.train.get_or_create_global_step(), cluster=cluster)
            w, seen = built.variables[0], []
            with towers.join(cluster, built, dead_after=10.) as member, member.session(
                    [StopWithoutSignals(cluster, built)]) as session:
                try:
                    for _ in range(2 if ends == 'steps' else 9):
                        if session.should_stop():
                            break
                        session.run(built.train_op)
                        if rank == 0:
                            seen.append(session.run(w))
                except tf.errors.OutOfRangeError:
                    pass
                if rank == 0:
                    seen.append(session.run(w))
            return seen
    # The mean of all four is 4: w <- w - 0.2 * (w - 4).
    expected = [4 * (1 - .8 ** step) for step in (1, 2, 3)]
    if ends == 'steps':
        expected = expected[:2]
    seen, _ = together(work, 2)
    # The step that ends the training without data changes nothing, and has a look of its own.
    assert len(seen) - len(expected) in ((1, 2) if ends == 'all together' else (1,))
    np.testing.assert_allclose(seen[:len(expected)], expected, rtol=1e-12)
    np.testing.assert_allclose(seen[len(expected):], expected[-1], rtol=1e-12)
