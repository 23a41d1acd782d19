"""Programs that enable control flow v2, on parameter servers."""

import threading

import pytest
import tensorflow.compat.v1 as tf

from one_process import halving, in_sessions, serve

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
