"""How a session of a cluster is made: by the member, by `MonitoredTrainingSession`, or plainly."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member_hooks import BeginHook
from towers.cluster.step_fetches import StepFetches
from one_process import addresses, halving, serve, together


def make_clusters(kind):
    """A function from a rank to its `Cluster` of two."""
    if kind == 'ring':
        workers = addresses(2)
        return lambda rank: towers.Cluster('ring', workers, rank=rank)
    return serve(2, synchronous=kind == 'ps')


def steps_of(cluster, make_session):
    """The weights before, between and after two steps in a session of a worker's own making."""
    with tf.Graph().as_default():
        built = halving(cluster, global_step=tf.train.get_or_create_global_step())
        lost, values = [], []
        try:
            with towers.join(cluster, built, start_timeout=30., dead_after=20.,
                             on_lost=lost.append) as member, make_session(member) as session:
                for place in range(3):
                    values.append(session.run(built.variables[0]))
                    if place < 2:
                        session.run(built.train_op)
        except towers.TowersError as error:
            return str(error)
        assert not lost
        return values


@pytest.mark.parametrize('kind', [
    'ring', pytest.param('ps', marks=pytest.mark.slow)])
def test_steps_in_a_plain_session_are_refused(kind):
    """Each worker would go on from its own initial value."""
    cluster_of = make_clusters(kind)

    def plain(member):
        session = tf.Session(member.target, config=member.config)
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session
    for text in together(lambda rank: steps_of(cluster_of(rank), plain), 2):
        assert 'in a session that has not begun as those of a cluster do' in text, text
        assert 'Make it by member.session(hooks), or' in text


def monitored(member):
    """The idiom of programs for TensorFlow's parameter servers; one of the hooks makes a variable,
    and the program starts its metrics anew."""
    class Metrics(tf.train.SessionRunHook):
        def begin(self):
            self.reset = tf.local_variables_initializer()

        def after_run(self, run_context, run_values):
            run_context.session.run(self.reset)
    return tf.train.MonitoredTrainingSession(
        member.target, member.is_chief, hooks=member.hooks + [
            Metrics(), tf.train.StopAtStepHook(num_steps=9)], config=member.config)


@pytest.mark.slow
def test_a_monitored_training_session_trains_in_a_ring():
    """The others would wait for the chief to initialise what is theirs alone."""
    cluster_of = make_clusters('ring')
    found = together(lambda rank: steps_of(cluster_of(rank), monitored), 2)
    assert found == [[8., 4., 2.]] * 2


def test_a_session_that_is_made_again_is_an_error_in_a_ring(graph):
    """`MonitoredSession` makes one when it has lost the first; the others would not come."""
    cluster = towers.Cluster('ring', ['127.0.0.1:1', '127.0.0.1:2'])
    built = halving(cluster)
    hook = BeginHook(cluster, built, '', None, StepFetches(lambda: [built]), lambda: None)
    hook.is_by_member = True
    hook.begin()
    with tf.Session() as session:
        hook.after_create_session(session, None)
        with pytest.raises(towers.ClusterError, match='TensorFlow lost the session of worker'):
            hook.after_create_session(session, None)


@pytest.mark.slow
def test_on_parameter_servers_a_monitored_training_session_is_refused():
    """All operations of all workers would be on the first server, with the same local variables."""
    cluster_of = make_clusters('ps')
    for text in together(lambda rank: steps_of(cluster_of(rank), monitored), 2):
        assert 'this session is not made by the member of the cluster' in text, text
