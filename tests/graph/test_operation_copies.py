"""Copies of operations, and what takes them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.graph.operation_copies import copied_operations, take_instead


@pytest.mark.parametrize('use_resource', [True, False])
def test_copies_take_copies_and_read_for_themselves(use_resource):
    with tf.variable_scope('', use_resource=use_resource), tf.device('/cpu:0'):
        x = tf.get_variable('x', [2], initializer=tf.constant_initializer([1., 2.]))
        read = x.read_value()
    with tf.control_dependencies([tf.no_op('before')]):
        first, second = tf.split(tf.square(read), 2)
    taker = first + second
    chain = [read.op, first.op.inputs[1].op, first.op]
    with tf.control_dependencies([x.initializer]):  # none of the scopes around
        copies = copied_operations(chain)
    assert sorted(copies) == sorted(op.name for op in chain)
    assert copies[first.op.name].outputs[1].shape.as_list() == [1]
    assert copies[read.op.name].device == read.op.device
    copied = copies[first.op.name]
    assert copied.inputs[1].op is copies[chain[1].name]
    assert not copies[read.op.name].control_inputs
    assert [op.name for op in copies[chain[1].name].control_inputs] == ['before']
    take_instead(taker.op, copies)
    assert [tensor.op for tensor in taker.op.inputs] == [copied] * 2
    assert [tensor.value_index for tensor in taker.op.inputs] == [0, 1]
    waits = tf.group(first.op)
    take_instead(waits, copies)
    assert waits.control_inputs == [copied]
    with tf.Session() as session:
        session.run(x.initializer)
        np.testing.assert_array_equal(session.run(taker), [5.])
