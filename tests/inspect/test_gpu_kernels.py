"""Builds for GPUs, checked on a machine that has none."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from benchmarks.gpu_graphs import gpus
from sample_models import momentum, sgd, switched, two_layers
from towers import compat
from towers.inspect.gpu_kernels import has_gpu_kernel, knows_gpu_kernels

slow = pytest.mark.slow
with_kernels = pytest.mark.skipif(
    not knows_gpu_kernels(), reason='this TensorFlow was built without GPUs')
FLOATS = [array.astype(np.float32) for array in samples.vectors(8)]


def lacking(found, kind):
    return [line for line in getattr(found, kind) if 'GPU kernel' in line]


def linear32(x, y):
    kernel = tf.get_variable('kernel', [6, 3])
    return tf.reduce_mean(tf.square(tf.matmul(x, kernel) - y))


# ---- what the registry says ----------------------------------------------------------------------

@with_kernels
def test_kernels_by_type_of_operation_and_of_numbers():
    x = tf.ones([3, 3])
    assert has_gpu_kernel(tf.matmul(x, x).op)
    assert has_gpu_kernel(tf.no_op())
    assert not has_gpu_kernel(tf.raw_ops.MatrixSquareRoot(input=x).op)
    assert not has_gpu_kernel(tf.as_string(x).op)
    assert has_gpu_kernel(tf.get_variable('v', [2], use_resource=True).op)


def test_a_tensorflow_without_gpus_says_that_it_cannot_tell(monkeypatch):
    monkeypatch.setattr(compat, 'registered_kernels', lambda op_type: [])
    found = towers.audit(towers.build_towers(linear32, FLOATS, sgd(), gpus(2)))
    assert 'this TensorFlow was built without GPUs: it cannot tell which operations have no ' \
        'kernel on them' in found.notes
    assert lacking(found, 'broken') == []


@with_kernels
def test_floats_without_a_kernel_are_named_with_the_bytes_that_cross():
    def model(x, y):
        root = tf.raw_ops.MatrixSquareRoot(input=tf.stop_gradient(tf.matmul(x, x, True)))
        return linear32(x, y) + 0. * tf.reduce_sum(root)
    found = towers.audit(towers.build_towers(model, FLOATS, sgd(), gpus(2)))
    first, second = lacking(found, 'broken')
    assert first == (
        '1 operation of tower 0 on /gpu:0 without a GPU kernel: MatrixSquareRoot '
        '(MatrixSquareRoot of float32); soft placement takes them to /cpu:0, and 288 bytes a step '
        'cross')  # 6 x 6 floats there and back
    assert second.startswith('1 operation of tower 1 on /gpu:1 without a GPU kernel: tower_1/')


@with_kernels
def test_texts_belong_on_the_cpu():
    def model(x, y):
        buckets = tf.strings.to_hash_bucket_fast(tf.as_string(tf.cast(x[:, 0], tf.int32)), 10)
        table = tf.get_variable('table', [10, 3])
        return linear32(x, y + tf.gather(table, buckets))
    found = towers.audit(towers.build_towers(model, FLOATS, sgd(), gpus(2)))
    assert lacking(found, 'broken') == []
    assert [line.split(' of tower')[0] for line in lacking(found, 'notes')] == ['2 operations'] * 2
    assert 'AsString (AsString of int32, string)' in lacking(found, 'notes')[0]


@with_kernels
def test_what_is_colocated_with_an_operation_without_a_kernel_is_pulled_along():
    def model(x, y):
        root = tf.raw_ops.MatrixSquareRoot(input=tf.stop_gradient(tf.matmul(x, x, True)))
        with tf.colocate_with(root.op):
            total = tf.reduce_sum(root, name='total')
        return linear32(x, y) + 0. * total
    found = towers.audit(towers.build_towers(model, FLOATS, sgd(), gpus(1)))
    without, pulled = lacking(found, 'broken')
    assert 'MatrixSquareRoot of float32' in without
    assert pulled.split(': ')[0].endswith('of tower 0 colocated with one without a GPU kernel')
    assert 'total (Sum of float32, int32)' in pulled


def test_towers_on_cpus_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(compat, 'registered_kernels', None)
    found = towers.audit(towers.build_towers(linear32, FLOATS, sgd(), 2))
    assert lacking(found, 'broken') + lacking(found, 'notes') == []


# ---- what towers makes has kernels ---------------------------------------------------------------

# tests/benchmarks/test_gpu_graphs.py has the networks, in the modes of a build.
@with_kernels
@pytest.mark.parametrize('name', [
    name if name == 'embedding' else pytest.param(name, marks=slow) for name in samples.SAMPLES])
@pytest.mark.parametrize('version, count', [
    ('v1', 2), pytest.param('v2', 2, marks=slow), pytest.param('v1', 8, marks=slow)])
def test_samples(name, version, count):
    """Sparse embeddings, loops, Keras, and variables made in every way, of double precision: no
    operation lacks a kernel, and what is on the CPU is there by the plan."""
    sample = samples.SAMPLES[name]
    with switched('control_flow_v2', version == 'v2'):
        built = towers.build_towers(sample.model_fn, sample.data(8), momentum(), gpus(count))
    found = towers.audit(built)
    assert found.broken == [] and lacking(found, 'notes') == []


# ---- the bytes that cross ------------------------------------------------------------------------

WEIGHTS = (6 * 3 + 3 * 3) * 8  # bytes of the variables of `two_layers`, of doubles


def sent(built, is_counted):
    return sum(pair.bytes for pair in towers.audit(built).transfers
               if is_counted(pair.source, pair.target))


@pytest.mark.parametrize('count', [2, pytest.param(8, marks=pytest.mark.slow)])
def test_shared_variables_are_read_once_and_get_a_gradient_from_each_tower(count):
    built = towers.build_towers(two_layers, samples.vectors(16), sgd(), gpus(count))
    shards = 16 * (6 + 3) * 8
    loss = count * 8
    assert sent(built, lambda source, target: 'CPU' in source) == shards + count * WEIGHTS
    assert sent(built, lambda source, target: 'CPU' in target) == count * WEIGHTS + loss
    assert sent(built, lambda source, target: 'GPU' in source and 'GPU' in target) == 0


@pytest.mark.parametrize('count', [2, pytest.param(8, marks=pytest.mark.slow)])
def test_replicas_get_each_sum_and_give_each_gradient(count):
    """A reduce-scatter and an all-gather by variables: 2 (N - 1) times the weights."""
    built = towers.build_towers(two_layers, samples.vectors(16), sgd(), gpus(count),
                                variables=towers.VariablePlacement('replicated'))
    between = sent(built, lambda source, target: 'GPU' in source and 'GPU' in target)
    assert between == 2 * (count - 1) * WEIGHTS
    assert sent(built, lambda source, target: 'CPU' in target) == count * 8  # the losses
