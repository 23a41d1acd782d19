"""Metadata of a step, read: CPUs, GPUs, copies, and what is no operation."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, sgd
from towers.report.parts import COPIES, FORWARD, OTHER, Place, StepParts
from towers.report.trace import read_trace

CPU = '/job:localhost/replica:0/task:0/device:CPU:%d'
GPU = '/job:localhost/replica:0/task:0/device:GPU:0'


@pytest.fixture
def parts():
    return StepParts(towers.build_towers(linear, samples.vectors(4), sgd(), 2))


def add(metadata, device, name, begin, end, label=''):
    stats = next((each for each in metadata.step_stats.dev_stats if each.device == device), None)
    if stats is None:
        stats = metadata.step_stats.dev_stats.add(device=device)
    stats.node_stats.add(node_name=name, timeline_label=label, all_start_micros=begin,
                         op_start_rel_micros=1, op_end_rel_micros=end - begin + 1)


def test_operations_begin_with_the_step(parts):
    metadata = tf.RunMetadata()
    add(metadata, CPU % 0, '_SOURCE', 1000, 1001)
    add(metadata, CPU % 0, 'MatMul', 1010, 1030, 'MatMul = _MklMatMul(x, kernel)')
    add(metadata, CPU % 1, 'strange', 1040, 1050)
    trace = read_trace(metadata, parts)
    assert (trace.micros, trace.start) == (40, 1011)
    assert trace.operations == [
        ('MatMul', '_MklMatMul', '/cpu:0', Place(FORWARD, 0), 0, 20),
        ('strange', '', '/cpu:1', Place(OTHER), 30, 40)]
    assert list(trace.by_row()) == ['/cpu:0', '/cpu:1'] and trace.copies == []


def test_a_copy_lasts_from_the_send_to_the_end_of_the_receive(parts):
    metadata = tf.RunMetadata()
    graph = metadata.partition_graphs.add()
    for name, op in (('x/_0', '_Send'), ('x/_1', '_Recv')):
        node = graph.node.add(name=name, op=op)
        node.attr['tensor_name'].s = b'edge_7_x'
        node.attr['send_device'].s = (CPU % 0).encode()
        node.attr['recv_device'].s = (CPU % 1).encode()
    add(metadata, CPU % 0, 'MatMul', 0, 20)
    add(metadata, CPU % 0, 'x/_0', 20, 21, 'x/_0 = _Send(x)')
    add(metadata, CPU % 1, 'x/_1', 2, 30, 'x/_1 = _Recv()')
    trace = read_trace(metadata, parts)
    assert trace.copies == [('edge_7_x', 'copy', '/cpu:0 to /cpu:1', Place(COPIES), 21, 30)]
    assert [each.name for each in trace.operations] == ['MatMul']


def test_kernels_of_a_gpu_count_and_not_their_launches(parts):
    metadata = tf.RunMetadata()
    add(metadata, GPU, 'MatMul', 0, 3)
    add(metadata, '/device:GPU:0/stream:all', 'MatMul:MatMul', 5, 25)
    add(metadata, '/device:GPU:0/stream:13', 'MatMul:MatMul', 5, 25)
    add(metadata, '/device:GPU:0/memcpy', 'edge_9:MEMCPYHtoD', 1, 4)
    trace = read_trace(metadata, parts)
    assert [(each.name, each.type, each.row, each.end - each.begin)
            for each in trace.operations] == [('MatMul', 'MatMul', '/gpu:0', 20)]
    assert [(each.name, each.row) for each in trace.copies] == [('edge_9', '/gpu:0 copies')]


def test_no_operations_are_refused(parts):
    with pytest.raises(towers.InvalidArgumentError, match='holds no operations'):
        read_trace(tf.RunMetadata(), parts)
