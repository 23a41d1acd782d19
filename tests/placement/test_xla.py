"""towers.xla: clusters are really compiled, one device each, and the numbers are the same."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import (assert_equal_runs, l2_of_kernels, momentum, on_towers, one_device,
                           SAMPLES, switched)
from towers.placement.numerics import clusters, describe_xla

TRACE = tf.RunOptions(output_partition_graphs=True)
BOTH = {'/device:CPU:0', '/device:CPU:1'}


@pytest.fixture(autouse=True)
def resource_variables(graph):
    with switched('resource_variables', True), switched('control_flow_v2', False):
        yield


def linear(x):
    w = tf.get_variable('w', [64, 64], initializer=tf.random_normal_initializer(seed=3))
    return tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(tf.tanh(x), w))))


def build(**arguments):
    x = np.random.RandomState(1).randn(8, 64).astype('float32')
    return towers.build_towers(arguments.pop('model_fn', linear), x, momentum(), 2, **arguments)


def run(built, fetches, metadata=None, steps=1):
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            result = session.run(fetches, options=TRACE, run_metadata=metadata)
        return result


def test_each_tower_has_clusters_of_its_own_with_both_passes():
    built, metadata = build(numerics=towers.Numerics(xla=True)), tf.RunMetadata()
    run(built, built.train_op, metadata)
    assert set(clusters(metadata)) == BOTH
    compiled = {op.name: op.type for op in tf.get_default_graph().get_operations()
                if '_XlaCompile' in op.node_def.attr and op.get_attr('_XlaCompile')}
    scopes_of_all = set()
    for tower in built.towers:
        kinds = [kind for name, kind in compiled.items() if tower.has(name)]
        assert kinds.count('MatMul') == 3 and 'ReluGrad' in kinds  # two of them gradients
        scopes = {op.get_attr('_XlaScope') for op in tf.get_default_graph().get_operations()
                  if op.name in compiled and tower.has(op.name)}
        assert len(scopes) == 1
        scopes_of_all |= scopes
    assert len(scopes_of_all) == 2
    assert all(any(tower.has(name) for tower in built.towers) for name in compiled)
    # The plan and the audit say it.
    assert ("XLA compiles each tower's forward and backward pass, but for random operations; on "
            'CPUs that was slower in every model measured' in ' '.join(str(built.plan).split()))
    assert describe_xla(['/device:GPU:0', '/device:GPU:1']) == (
        "each tower's forward and backward pass, but for random operations")
    found = towers.audit(built, metadata)
    counts = clusters(metadata)
    assert not found.broken
    assert 'XLA compiled %d clusters for /cpu:0, %d clusters for /cpu:1' % (
        counts['/device:CPU:0'], counts['/device:CPU:1']) in found.notes


@pytest.mark.parametrize('name', [
    name if name == 'tf.Variable' else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(set(SAMPLES) - {'while_loop'})])
def test_the_numbers_are_those_of_one_device(name):
    sample = SAMPLES[name]
    ours = on_towers(sample.model_fn, sample.data(8), momentum, 2,
                     numerics=towers.Numerics(xla=True),
                     reduction='mean', regularization='add')
    plain = one_device(sample.model_fn, sample.data(8), momentum, ours.initial,
                       penalty=l2_of_kernels if sample.decays else None)
    assert_equal_runs(ours, plain)
