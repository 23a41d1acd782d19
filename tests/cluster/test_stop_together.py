"""`StopTogetherHook`: what makes a worker stop."""

import os
import signal
import time
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import StopTogetherHook


def hook_of(cluster):
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])),
                                tf.ones([2]), tf.train.GradientDescentOptimizer(.1), 1,
                                cluster=cluster)
    hook, stopped = StopTogetherHook(cluster, built), []
    hook._coordinator = types.SimpleNamespace(request_stop=lambda: stopped.append(True))
    return hook, stopped


def test_the_watch_of_a_step_on_parameter_servers_learns_of_a_signal_at_once():
    """In another thread: the main one may be in a step that never ends."""
    hook, _ = hook_of(towers.Cluster('ps', ['a:1', 'b:2'], ['c:3']))
    hook.after_create_session(None, hook._coordinator)
    try:
        assert not hook._machines.told_to_stop
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.time() + 10
        while not hook._machines.told_to_stop and time.time() < deadline:
            time.sleep(0.01)
        assert hook._machines.told_to_stop
    finally:
        hook.restore()


@pytest.mark.parametrize('cluster', [
    towers.Cluster('ring', ['a:1']),
    towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], synchronous=False)])
def test_where_workers_do_not_wait_for_each_other_each_stops_by_itself(cluster):
    hook, stopped = hook_of(cluster)
    hook.step_done(None)
    assert not stopped
    hook.stop(signal.SIGTERM)
    hook.step_done(None)
    assert stopped == [True] and hook.received == signal.SIGTERM
