"""Programs that enable control flow v2, on parameter servers."""

import threading

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError
from one_process import halving, in_sessions, serve

V115 = tf.__version__.startswith('1.')
BUILDING = threading.Lock()  # the switch of control flow v2 is the whole process's


@pytest.fixture(autouse=True)
def with_v2():
    was_enabled = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    yield
    if not was_enabled:
        tf.disable_control_flow_v2()


def build(cluster):
    with BUILDING:
        return halving(cluster)


@pytest.mark.slow
def test_a_model_without_control_flow_trains():
    """On 1.15 no queue may be in a loop of v2."""
    def work(session, built, rank):
        for _ in range(2):
            session.run(built.train_op)
        return session.run(built.variables[0])
    assert in_sessions(serve(2), work, build)[0] == 2.


def test_a_variable_that_cannot_be_taken_into_a_loop_is_refused_in_words(graph):
    """This version cannot place the one or the other kind of variable."""
    table = tf.get_variable('table', [3, 1], initializer=tf.ones_initializer(), use_resource=V115)
    cluster = serve(1)(0)
    built = towers.build_towers(
        lambda x: tf.reduce_mean(tf.while_loop(
            lambda i, total: i < 2, lambda i, total: (i + 1, total + tf.nn.embedding_lookup(
                table, tf.range(3))), [0, tf.zeros([3, 1])])[1]) * x[0],
        tf.ones([2]), tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
    with pytest.raises(ClusterError, match=(
            "^TensorFlow would have '.*' and '.*' in one process, and one of them is on a "
            'parameter server, the other on a worker: .* Call tf.disable_control_flow_v2')):
        with towers.join(cluster, built, start_timeout=30.) as member, member.session():
            pass
