"""The memory of a step over its time, measured and predicted."""

import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import momentum, two_layers
from towers.report.memory_curves import memory_curves
from towers.report.parts import FORWARD, StepParts
from towers.report.trace import read_trace
from traces import ran, trace_of, traced_step
import pytest

CPU = '/job:localhost/replica:0/task:0/device:CPU:0'


def build(inputs=None):
    return towers.build_towers(two_layers, inputs or samples.vectors(8), momentum(), 2)


def test_the_prediction_reaches_the_peak_of_the_account():
    built = build()
    metadata = traced_step(built)
    trace = read_trace(metadata, StepParts(built))
    (pool,) = memory_curves(built, metadata, trace).pools
    assert pool.name == 'CPUs' and pool.predicted_peak == towers.memory_account(built).peak
    assert max(count for _, count in pool.predicted) == pool.predicted_peak
    times = [time for time, _ in pool.predicted]
    assert times == sorted(times) and 0 <= times[0] <= times[-1] <= trace.micros


def test_measured_is_what_allocators_told():
    metadata = tf.RunMetadata()
    stats = metadata.step_stats.dev_stats.add(device=CPU)
    for start, in_use in ((100, 1000), (130, 3000)):
        node = stats.node_stats.add(node_name='op', all_start_micros=start, all_end_rel_micros=10)
        node.memory.add(allocator_name='cpu', allocator_bytes_in_use=in_use, peak_bytes=70,
                        live_bytes=50)
    trace = trace_of(ran('/cpu:0', FORWARD, 0, 60))._replace(start=100)
    (pool,) = memory_curves(build(), metadata, trace).pools
    assert pool.measured == [(10, 1020), (40, 3020)] and pool.measured_peak == 3020


@pytest.mark.slow
def test_what_is_not_known_is_said():
    with tf.Graph().as_default():
        inputs = tuple(tf.placeholder(tf.float64, [None, size]) for size in (6, 3))
        built = build(inputs)
        curves = memory_curves(built, tf.RunMetadata(), trace_of(ran('/cpu:0', FORWARD, 0, 60)))
        assert curves.pools == []
        assert 'TF_CPU_ALLOCATOR_USE_BFC=true' in curves.note and 'not predicted: ' in curves.note
        sized = memory_curves(built, tf.RunMetadata(), trace_of(ran('/cpu:0', FORWARD, 0, 60)), 8)
        assert sized.pools[0].predicted_peak == towers.memory_account(built, 8).peak


def test_a_long_curve_keeps_its_peak():
    metadata = tf.RunMetadata()
    stats = metadata.step_stats.dev_stats.add(device=CPU)
    for start in range(5000):
        node = stats.node_stats.add(node_name='op', all_start_micros=start)
        node.memory.add(allocator_name='cpu',
                        allocator_bytes_in_use=9000 if start == 1234 else 1000)
    trace = trace_of(ran('/cpu:0', FORWARD, 0, 5000))
    (pool,) = memory_curves(build(), metadata, trace).pools
    assert len(pool.measured) == 400
    assert max(pool.measured, key=lambda point: point[1]) == (1234, 9000)


def test_a_batch_that_does_not_divide_is_said():
    curves = memory_curves(build(), tf.RunMetadata(), trace_of(ran('/cpu:0', FORWARD, 0, 60)), 7)
    assert curves.pools == [] and 'does not divide' in curves.note
