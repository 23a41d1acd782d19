"""Graphs for GPUs: a sample of what `python -m benchmarks.gpu_graphs` builds, and its checks."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from benchmarks import gpu_graphs
from benchmarks.gpu_graphs import ALL_MODES, MODES, Outcome, check, gpus
from benchmarks.recipe_models import RECIPES
from sample_models import sgd
from towers.inspect.gpu_kernels import knows_gpu_kernels

slow = pytest.mark.slow
with_kernels = pytest.mark.skipif(
    not knows_gpu_kernels(), reason='this TensorFlow was built without GPUs')


@slow
@with_kernels
@pytest.mark.parametrize('count', [2, 8])
@pytest.mark.parametrize('mode', [mode for mode in ALL_MODES if mode != 'bf16'])
def test_digits_in_every_mode(mode, count):
    check_kept('digits', mode, count)


@slow
@with_kernels
@pytest.mark.parametrize('network, mode, count', [
    ('inception_resnet_v2', 'sync', 2), ('inception_resnet_v2', 'shared', 8),
    ('inception_v1', 'replicated', 8), ('inception_v2', 'fp16', 2), ('inception_v3', 'stages', 2),
    ('alexnet_v2', 'replicated', 2), ('overfeat', 'balanced', 2), ('vgg_a', 'accumulate', 2),
    ('vgg_16', 'ring', 2), ('vgg_19', 'ps', 8), ('resnet_v1_50', 'replicated', 2),
    ('resnet_v1_50', 'reuse', 2), ('resnet_v2_50', 'recompute', 8), ('resnet_v2_50', 'xla', 2)])
def test_networks(network, mode, count):
    check_kept(network, mode, count)


@slow
@with_kernels
@pytest.mark.parametrize('recipe', list(RECIPES))
def test_recipes(recipe):
    check_kept(recipe, 'shared', 2)


def check_kept(network, mode, count):
    outcome = gpu_graphs.outcome_of(network, mode, count)
    assert outcome.result == 'kept', outcome.text


# ---- the checks ----------------------------------------------------------------------------------

def built_for_gpus(model_fn, data=None, **options):
    options.setdefault('reduction', 'mean')
    return towers.build_towers(model_fn, data or samples.vectors(16), sgd(), gpus(2), **options)


@with_kernels
def test_an_operation_without_a_kernel_is_a_fault_unless_it_is_known():
    def model(x, y):
        root = tf.raw_ops.MatrixSquareRoot(input=tf.stop_gradient(tf.matmul(x, x, True)))
        return samples.linear(x, y) + 0. * tf.reduce_sum(root)
    built = built_for_gpus(model)
    first, second = check(built).faults
    assert 'MatrixSquareRoot' in first and 'tower 1' in second
    assert check(built, without_kernel=('MatrixSquareRoot',)).faults == []


def test_bytes_that_do_not_fit_are_a_fault():
    def wide(x, y):
        kernel = tf.get_variable('kernel', [6, 500], tf.float64)
        return tf.reduce_mean(tf.square(tf.matmul(x, kernel))) + tf.reduce_mean(y)
    built = built_for_gpus(wide, variables=towers.VariablePlacement('replicated'))
    assert check(built, MODES['replicated']).faults == []
    of_cpu, between = check(built, MODES['shared']).faults
    assert 'kB cross between CPU and GPUs, and the formula gives 48.0 kB, ' in of_cpu
    assert between.startswith('48.0 kB cross between GPUs of different towers, and the formula '
                              'gives 0 bytes, ')


def test_a_weight_that_crosses_twice_is_a_fault():
    def in_branch(x, y):
        kernel = tf.get_variable('kernel', [6, 500], tf.float64)
        more = tf.cond(tf.reduce_mean(x) > 0., lambda: tf.reduce_mean(tf.matmul(x, kernel)),
                       lambda: tf.zeros([], tf.float64))
        return tf.reduce_mean(tf.square(tf.matmul(x, kernel))) + more + tf.reduce_mean(y)
    with samples.switched('control_flow_v2', False):
        [fault] = check(built_for_gpus(in_branch)).faults
    assert 'and the formula gives 96.0 kB, ' in fault  # 24 kB to each of 2 towers, and from each


def test_a_sum_that_is_not_where_its_variable_is_is_a_fault():
    def elsewhere(pairs):
        with tf.device('/gpu:1'):
            return [(tf.identity(gradient), variable) for gradient, variable in pairs]
    built = towers.build_towers(
        samples.linear, samples.vectors(16), towers.Objective(sgd(), transform_gradients=elsewhere),
        gpus(2), reduction='mean')
    assert check(built).faults[0] == (
        'the sum of the gradients of kernel is on /gpu:1, and the variable on /cpu:0')


# ---- the command ---------------------------------------------------------------------------------

@slow
@with_kernels
def test_it_goes_on_where_it_was(tmp_path, capsys):
    options = gpu_graphs.parse(['--networks=policy,deep_q', '--modes=shared,bf16', '--towers=2',
                                '--directory=%s' % tmp_path])
    options.seconds = -1
    assert gpu_graphs.run(options) == 0
    assert '0 builds of 4: 0 kept, 0 refused, 0 at fault; 4 not built' in capsys.readouterr().out
    options.seconds = 100
    assert gpu_graphs.run(options) == 0
    said = capsys.readouterr().out
    assert said.count(' 2 GPUs  ') == 4
    assert '| policy | + | r |' in said
    assert 'refused: PrecisionError: ' in said
    assert gpu_graphs.run(options) == 0
    assert capsys.readouterr().out.count(' 2 GPUs  ') == 0


def test_what_was_at_fault_is_built_again(tmp_path, monkeypatch):
    results = iter(['fault', 'kept'])
    monkeypatch.setattr(gpu_graphs, 'outcome_of', lambda *key, blocks: Outcome(
        *key, result=next(results), text='', seconds=1.))
    options = gpu_graphs.parse(['--networks=policy', '--modes=shared', '--towers=2',
                                '--directory=%s' % tmp_path])
    assert [gpu_graphs.run(options) for _ in range(3)] == [1, 0, 0]


def test_names_that_there_are_not():
    with pytest.raises(SystemExit, match="There is no mode 'fp8'. Those there are: shared, sync"):
        gpu_graphs.all_builds(gpu_graphs.parse(['--modes=fp8']))
