"""Which operations follow a tower to its device, by the scopes that they were made in."""

import contextlib

import pytest
import tensorflow.compat.v1 as tf

from towers.placement.tower_device import TowerDevice, device_like, follows_tower, moved, overlaps


@pytest.mark.parametrize('scopes, follows', [
    ([], True),
    (['/job:worker'], True),  # says nothing of the device
    (['/cpu:0'], False),
    (['/gpu:1', '/job:worker'], False),
    ([None], False),
    (['/device:CPU:0'], None),  # perhaps the device of another operation
    ([lambda op: ''], None),
    (['/cpu:0', lambda op: ''], None),
    ([lambda op: '', '/cpu:0'], False)])
def test_scopes_inside_that_of_a_tower(scopes, follows):
    with contextlib.ExitStack() as stack:
        for scope in [TowerDevice('/device:CPU:0')] + scopes:
            stack.enter_context(tf.device(scope))
        op = tf.constant(1.).op
    assert follows_tower(op) is follows
    assert device_like(op) == op.device
    assert isinstance(device_like(op), TowerDevice) == (follows is True)


def test_an_operation_beside_another_one_does_not_follow_by_itself(graph):
    with tf.device(TowerDevice('/device:CPU:1')):
        first = tf.constant(1.)
        with graph.colocate_with(first.op):
            second = tf.identity(first)
    assert second.op.device == '/device:CPU:1' and follows_tower(second.op) is False


def test_a_tower_device_is_a_device_like_any_other():
    with tf.device('/job:worker/cpu:3'), tf.device(TowerDevice('/device:GPU:1')):
        assert tf.constant(1.).op.device == '/job:worker/device:GPU:1'


@pytest.mark.parametrize('device, source, target, result', [
    ('/device:CPU:0', '/device:CPU:0', '/device:GPU:1', '/device:GPU:1'),
    ('/job:a/device:CPU:0', '/device:CPU:0', '/device:GPU:1', '/job:a/device:GPU:1'),
    ('/job:a/task:1/device:CPU:0', '/job:a/task:1/device:CPU:0', '/job:a/task:2/device:CPU:0',
     '/job:a/task:2/device:CPU:0'),
    ('/job:b/task:1/device:CPU:0', '/job:a/task:1/device:CPU:0', '/job:c/task:2/device:CPU:0',
     '/job:b/task:2/device:CPU:0')])
def test_moved(device, source, target, result):
    assert moved(device, source, target) == result


def test_overlaps():
    assert overlaps('/job:a/device:CPU:0', '/device:CPU:0')
    assert not overlaps('/device:CPU:1', '/device:CPU:0')
    assert not overlaps('/device:GPU:0', '/device:CPU:0')
    assert not overlaps('/job:a', '/device:CPU:0')
