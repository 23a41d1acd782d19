"""The longest chain of a traced step."""

import tensorflow.compat.v1 as tf

from towers.report.chain import longest_chain, parts_of_chain
from towers.report.parts import FORWARD, UPDATE
from traces import ran, trace_of


class Graph:
    """The operations of a graph, in the place of `StepParts`."""

    def operation(self, name):
        try:
            return tf.get_default_graph().get_operation_by_name(name)
        except KeyError:
            return None


def test_the_chain_goes_back_by_what_was_waited_for_last():
    slow, fast = tf.constant(1., name='slow'), tf.constant(2., name='fast')
    folded = tf.identity(slow, 'folded')  # in no trace: it stands for what it takes
    added = tf.add(folded, fast, name='added')
    with tf.control_dependencies([added]):
        tf.no_op('end')
    trace = trace_of(
        ran('/cpu:0', FORWARD, 0, 10, 'slow'), ran('/cpu:1', FORWARD, 0, 4, 'fast'),
        ran('/cpu:0', FORWARD, 12, 20, 'added'), ran('/cpu:0', UPDATE, 20, 25, 'end'))
    chain = longest_chain(trace, Graph())
    assert [(link.operation.name, link.gap, link.idle) for link in chain] == [
        ('slow', 0, 0), ('added', 2, 2), ('end', 0, 0)]
    assert parts_of_chain(chain) == [
        (FORWARD, '/cpu:0', 18, 2, 'slow'), (UPDATE, '/cpu:0', 5, 1, 'end'),
        ('', '', 2, 1, 'before added')]


def test_an_operation_of_a_loop_ran_several_times():
    with tf.control_dependencies([tf.no_op('turn')]):
        tf.no_op('end')
    trace = trace_of(ran('/cpu:0', FORWARD, 0, 5, 'turn'), ran('/cpu:0', FORWARD, 6, 9, 'turn'),
                     ran('/cpu:0', UPDATE, 10, 11, 'end'))
    assert [link.operation.end for link in longest_chain(trace, Graph())] == [9, 11]


def test_a_gap_is_idle_where_its_device_runs_nothing():
    with tf.control_dependencies([tf.no_op('begin')]):
        tf.no_op('end')
    trace = trace_of(
        ran('/cpu:0', FORWARD, 0, 4, 'begin'), ran('/cpu:1', FORWARD, 0, 6, 'other'),
        ran('/cpu:1', FORWARD, 9, 10, 'other'), ran('/cpu:1', UPDATE, 20, 21, 'end'))
    chain = longest_chain(trace, Graph())
    assert [(link.gap, link.idle) for link in chain] == [(0, 0), (16, 13)]
    assert parts_of_chain(chain)[:2] == [
        ('', '', 13, 1, 'before end'), (FORWARD, '/cpu:0', 4, 1, 'begin')]
    assert ('', '/cpu:1', 3, 1, 'before end') in parts_of_chain(chain)
