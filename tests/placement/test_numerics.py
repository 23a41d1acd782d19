"""What half precision and XLA really do on this machine is what they say they do."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import (assert_equal_runs, l2_of_kernels, momentum, on_towers, one_device,
                           SAMPLES, sequences, switched, while_loop_rnn)
from towers import compat
from towers.errors import AuditError, ModelFunctionError, PrecisionError
from towers.placement.numerics import (converted_operations, describe_xla, rewrite_field,
                                       use_precision, xla_clusters)

CPUS = ('/device:CPU:0', '/device:CPU:1')
GPUS = ('/device:GPU:0', '/device:GPU:1')
HAS_BF16 = compat.TF_VERSION >= (2, 15)
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason='TF 1.15 has no bfloat16 rewrite')


def options(config):
    """The rewriter's options that speak of precision, as they are set."""
    return {field.name: value for field, value in
            config.graph_options.rewrite_options.ListFields() if 'precision' in field.name}


def linear(x):
    w = tf.get_variable('w', [64, 64], initializer=tf.constant_initializer(0.01))
    return tf.reduce_mean(tf.square(tf.matmul(tf.nn.relu(tf.matmul(x, w)), w)))


def build(devices=2, **arguments):
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    return towers.build_towers(linear, np.ones([4, 64], 'float32'), optimizer, devices,
                               **arguments)


# ---- the config ----------------------------------------------------------------------------------


def test_float16_on_gpus():
    config = use_precision(towers.session_config(GPUS), 'fp16', GPUS)
    assert options(config) == {'auto_mixed_precision': config.graph_options.rewrite_options.ON}


@needs_bf16
def test_bfloat16_on_cpus():
    config = use_precision(towers.session_config(CPUS), 'bf16', CPUS)
    assert options(config) == {
        'auto_mixed_precision_onednn_bfloat16': config.graph_options.rewrite_options.ON}


@pytest.mark.parametrize('name, devices, kind', [('fp16', CPUS, 'CPUs'), ('bf16', GPUS, 'GPUs')] + (
    [] if HAS_BF16 else [('bf16', CPUS, 'CPUs')]))
def test_where_there_is_no_rewrite(name, devices, kind):
    for call in (lambda: use_precision(tf.ConfigProto(), name, devices),
                 lambda: build(towers.resolve_devices(devices, check=False),
                               numerics=towers.Numerics(precision=name))):
        with pytest.raises(PrecisionError) as caught:
            call()
        assert str(caught.value) == (
            'precision=%r: TensorFlow %s has no rewrite to it that works on %s. Use float32; or '
            'fp16 on GPUs, bf16 on CPUs with TensorFlow 2.15 or later.' % (
                name, tf.version.VERSION, kind))
    assert not tf.get_default_graph().get_operations()


def test_devices_of_two_kinds():
    with pytest.raises(PrecisionError) as caught:
        rewrite_field('fp16', CPUS[:1] + GPUS[:1])
    assert str(caught.value).startswith("precision='fp16', and the towers are on GPUs and CPUs: ")


# ---- what the towers make of it ------------------------------------------------------------------

def test_float16_scales_the_loss():
    built = build(towers.resolve_devices(GPUS, check=False),
                  numerics=towers.Numerics(precision='fp16'))
    assert built.precision == 'fp16' and built.scaled_losses.losses.rule == towers.LossScale()
    assert built.plan.line('precision') == (
        "fp16 by TensorFlow's rewrite auto_mixed_precision; the audit of a step says whether it "
        'acts')
    assert built.plan.line('loss scale').startswith('loss x 32768 at first, ')


def test_what_ran_in_half_precision_is_counted():
    x = tf.placeholder(tf.float32, [4, 4])
    result = tf.reduce_sum(tf.cast(tf.matmul(tf.cast(x, tf.float16), tf.cast(x, tf.float16)),
                                   tf.float32))
    metadata = tf.RunMetadata()
    with tf.Session() as session:
        session.run(result, {x: np.ones([4, 4])}, tf.RunOptions(output_partition_graphs=True),
                    metadata)
    found = converted_operations(metadata, 'fp16')
    assert found['MatMul'] == 1 and found['Cast'] >= 1
    assert not converted_operations(metadata, 'bf16')


def audit_of_a_step(built, config, metadata=None):
    metadata = tf.RunMetadata() if metadata is None else metadata
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op, options=tf.RunOptions(output_partition_graphs=True),
                    run_metadata=metadata)
    return towers.audit(built, metadata)


@needs_bf16
def test_a_session_that_does_not_rewrite_breaks_the_promise():
    built = build(numerics=towers.Numerics(precision='bf16'))
    with pytest.raises(AuditError) as caught:
        audit_of_a_step(built, towers.session_config(built.devices)).raise_if_broken()
    assert ("no operation ran in bf16: was the session made with use_precision(config, 'bf16', "
            'built.devices)? bf16 on CPUs needs TF_ENABLE_ONEDNN_OPTS=1') in str(caught.value)


# ---- XLA -----------------------------------------------------------------------------------------

@pytest.fixture
def control_flow_v1(graph):
    with switched('control_flow_v2', False):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures('control_flow_v1')
def test_each_tower_has_clusters_of_its_own_with_both_passes():
    built, metadata = build(numerics=towers.Numerics(xla=True)), tf.RunMetadata()
    found = audit_of_a_step(built, towers.session_config(built.devices), metadata)
    assert set(xla_clusters(metadata)) == set(CPUS)
    compiled = {op.name: op.type for op in tf.get_default_graph().get_operations()
                if '_XlaCompile' in op.node_def.attr and op.get_attr('_XlaCompile')}
    scopes_of_all = set()
    for tower in built.towers:
        kinds = [kind for name, kind in compiled.items() if tower.has(name)]
        assert kinds.count('MatMul') >= 4 and 'ReluGrad' in kinds  # half of them gradients
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
    counts = xla_clusters(metadata)
    assert not found.broken
    assert 'XLA compiled %d clusters for /cpu:0, %d clusters for /cpu:1' % (
        counts['/device:CPU:0'], counts['/device:CPU:1']) in found.notes


@pytest.mark.slow
@pytest.mark.usefixtures('control_flow_v1')
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


@pytest.mark.usefixtures('control_flow_v1')
def test_a_loop_without_bound_is_refused():
    with pytest.raises(ModelFunctionError, match="pass maximum_iterations= to it, as tf.nn.dynamic"):
        towers.build_towers(while_loop_rnn, sequences(4), momentum(), 2,
                            numerics=towers.Numerics(xla=True))


# ---- what TensorFlow really does, in processes with oneDNN on and off ----------------------------

PROGRAM = '''
import json, sys
import tensorflow.compat.v1 as tf
sys.path[:0] = %r
tf.disable_eager_execution()
import towers
import test_numerics as t
result = {}
built = t.build(numerics=towers.Numerics('bf16'))
config = towers.use_precision(towers.session_config(2), 'bf16', built.devices)
audit = t.audit_of_a_step(built, config)
result['notes'], result['broken'] = audit.notes, audit.broken
for name, session_config in (('bf16', config), ('float32', towers.session_config(2))):
    with tf.Session(config=session_config) as session:
        session.run(tf.global_variables_initializer())
        result[name] = [float(session.run([built.loss, built.train_op])[0]) for _ in range(3)]
print(json.dumps(result))
'''


@pytest.mark.slow
@needs_bf16
@pytest.mark.parametrize('onednn', ['1', '0'])
def test_with_onednn_the_products_are_in_bfloat16_and_without_it_the_audit_says_so(onednn):
    here = os.path.dirname(os.path.abspath(__file__))
    tests = os.path.dirname(here)
    output = subprocess.check_output(
        [sys.executable, '-c', PROGRAM % [here, tests, os.path.dirname(tests)]],
        env=dict(os.environ, TF_ENABLE_ONEDNN_OPTS=onednn, TF_CPP_MIN_LOG_LEVEL='3'))
    result = json.loads(output.decode().splitlines()[-1])
    if onednn == '0':
        assert result['bf16'] == result['float32']
        assert result['broken'][0].startswith('no operation ran in bf16')
        return
    note, = [note for note in result['notes'] if note.startswith('in bf16: ')]
    assert 'MatMul' in note and not result['broken']
    for half, single in zip(result['bf16'], result['float32']):
        assert 0 < abs(half - single) < 0.02 * single  # 8 bits of digits: near, never the same
