"""Calls of `session.run` that take the sums of all workers' gradients without the step."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError
from test_after_the_step import squared, two_workers


class Shows(tf.train.SessionRunHook):
    """Fetches a tensor in each call of `session.run`, as a hook of summaries does."""

    def __init__(self, tensor):
        self._tensor, self.seen = tensor, []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._tensor)

    def after_run(self, run_context, run_values):
        self.seen.append(run_values.results)


@pytest.mark.parametrize('by_hook', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_chief_is_told_at_once_and_the_training_goes_on(by_hook):
    """The gradient is 0.5 w, of weight 8, then 4 and 2: the mean of 0.25 and 0.75 times it."""
    def work(cluster, rank):
        built = towers.build_towers(
            squared, tf.constant([.25 + .5 * rank], tf.float64),
            tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
        [(gradient, w)] = built.gradients
        shows = Shows(gradient)
        with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member, \
                member.session([shows] if by_hook and not rank else []) as session:
            for weight in (4., 2.):
                session.run(built.train_op)
                if rank == 0:
                    with pytest.raises(ClusterError, match='and does not run built.train_op'):
                        session.run(w if by_hook else {'look': [w, gradient]})
                    assert session.run_step_fn(
                        lambda step_context: step_context.session.run(w)) == weight
            return shows.seen
    assert two_workers(work) == [[4., 2.] if by_hook else [], []]
