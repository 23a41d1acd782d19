"""towers.session_config: CPU devices, threads, memory; and the config of a graph."""

import os
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.placement.devices import resolve_devices
from towers.placement.session_config import config_of_towers, describe_config, session_config


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    for name in ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compat, 'threads_made', lambda: None)  # other tests have made them


def test_config_of_cpu_towers():
    config = session_config(4)
    assert dict(config.device_count) == {'CPU': 4}
    assert config.inter_op_parallelism_threads == 0
    assert not config.allow_soft_placement  # a misplaced op is an error
    assert config.gpu_options.allow_growth


def test_config_of_gpu_towers():
    config = session_config(['/gpu:0', '/gpu:2'])
    assert dict(config.device_count) == {'CPU': 1}
    assert config.allow_soft_placement  # integer and string ops have no kernel on a GPU
    assert config.intra_op_parallelism_threads == 0


def test_devices_of_another_kind_need_no_virtual_cpus():
    named = resolve_devices('/device:TPU:2,/device:TPU:3', check=False)
    assert dict(session_config(named).device_count) == {'CPU': 1}


@pytest.mark.parametrize('variable, given, count, threads', [
    (None, None, 1, 0), (None, None, 2, 0), (None, None, 8, 1), (None, None, 16, 1),
    ('3', None, 2, 3), ('0', None, 8, 1), ('many', None, 8, 1), ('3', 7, 2, 7), ('3', 0, 8, 0)])
def test_threads_of_one_operation(monkeypatch, variable, given, count, threads):
    """As given, as OMP_NUM_THREADS says, or one where each of 8 cores has a CPU tower."""
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    if variable is not None:
        monkeypatch.setenv('OMP_NUM_THREADS', variable)
    assert session_config(
        count, intra_op_threads=given).intra_op_parallelism_threads == threads


@pytest.mark.parametrize('arguments, text', [
    (dict(intra_op_threads=-1), 'intra_op_threads=-1: expected a whole number of at least 0.'),
    (dict(inter_op_threads='2'), "inter_op_threads='2': expected a whole number of at least 0."),
    (dict(memory_fraction=65), 'memory_fraction=65: expected a part of'),
    (dict(memory_fraction=float('nan')), 'memory_fraction=nan')])
def test_what_no_session_has(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        session_config(1, **arguments)


def test_memory_fraction_and_what_is_said_of_it(monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    config = session_config('/gpu:0', memory_fraction=0.4, allow_growth=False, inter_op_threads=3)
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.4
    assert describe_config(config, ['/device:GPU:0']) == (
        "TensorFlow's choice of intra-op and 3 inter-op threads; GPU memory all at once, 0.4 of it "
        'at the most')
    assert session_config(1).gpu_options.per_process_gpu_memory_fraction == 0
    assert describe_config(session_config('/gpu:0'), ['/device:GPU:0']).endswith(
        '; GPU memory as it is needed')
    staged = resolve_devices('/cpu:0+/gpu:0', check=False)  # a GPU of a later stage counts, too
    assert describe_config(session_config(staged), staged).endswith('; GPU memory as it is needed')
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    assert describe_config(session_config(2), ['/device:CPU:0', '/device:CPU:1']) == (
        "3 intra-op and TensorFlow's choice of inter-op threads")


_INPUT_BEFORE_TOWERS = """
import tensorflow.compat.v1 as tf
import towers
tf.disable_v2_behavior()
if %d:
    tf.config.threading.set_intra_op_parallelism_threads(%d)
data = tf.data.Dataset.range(64).map(tf.to_float).batch(8)
batch = tf.data.make_one_shot_iterator(data).get_next()
built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), (batch,),
                            tf.train.GradientDescentOptimizer(1.), 2)
print(built.plan.line('session_config'))
"""


@pytest.mark.slow
@pytest.mark.parametrize('set_before, has_effect', [(0, False), (1, False), (3, True)])
def test_the_plan_says_where_the_process_has_other_threads(set_before, has_effect):
    """On TensorFlow 2 the function of a data set makes the threads of the process; on 1.15 the
    first session does."""
    program = _INPUT_BEFORE_TOWERS % (set_before, set_before)
    printed = subprocess.run([sys.executable, '-c', program], stdout=subprocess.PIPE, check=True,
                             env=dict(os.environ, OMP_NUM_THREADS='3')).stdout.decode()
    assert printed.startswith('3 intra-op ')
    makes_threads = int(tf.version.VERSION.split('.')[0]) >= 2
    assert ('of no effect' in printed) == (makes_threads and not has_effect)


def test_the_config_of_a_graph_has_all_cpus_that_it_names(graph):
    with tf.device('/cpu:0'):
        tf.constant(1.)
    assert config_of_towers() is None
    with tf.device('/cpu:3'):
        tf.constant(1.)
    config = config_of_towers(graph)
    assert config.device_count['CPU'] == 4 and not config.allow_soft_placement
