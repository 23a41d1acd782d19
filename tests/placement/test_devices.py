"""towers.devices: every spelling of a device, what is refused, and the session config."""

import os

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from towers.placement import devices
from towers.placement.devices import config_of_towers, resolve_devices, session_config
from towers.errors import DeviceError, InvalidArgumentError


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    for name in ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def four_gpus(monkeypatch):
    """Pretends that TensorFlow sees four GPUs; nothing is run on them."""
    names = tuple('/device:GPU:%d' % index for index in range(4))
    monkeypatch.setattr(devices, 'visible_gpus', lambda: names)
    return names


def device_error(given, **kwargs):
    with pytest.raises(DeviceError) as caught:
        resolve_devices(given, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# ---- names --------------------------------------------------------------------------------------

@pytest.mark.parametrize('spelling', ['/cpu:3', 'cpu:3', '/CPU:3', '/device:CPU:3', ' /cpu:3 ',
                                      '/job:localhost/replica:0/task:0/device:CPU:3'])
def test_spellings_of_one_device(spelling):
    assert devices.canonical_device(spelling) == '/device:CPU:3'
    assert resolve_devices([spelling]) == ('/device:CPU:3',)


@pytest.mark.parametrize('name', ['', '/cpu', '/gpu:*', '/cpu:-1', '/foo:3', '/gpu:0/gpu:1',
                                  '/job:worker', 0, None, b'/cpu:0'])
def test_what_is_not_the_name_of_one_device(name):
    assert device_error([name]) == (
        "%r is not the name of one device: expected '/gpu:0', '/cpu:1' or "
        "'/job:worker/task:0/gpu:0', with a number." % (name,))


@pytest.mark.parametrize('given', [['/gpu:3', '/cpu:0', '/gpu:0'], ('/gpu:3', '/cpu:0', '/gpu:0'),
                                   '/gpu:3,/cpu:0,/gpu:0', ' /gpu:3 , cpu:0 , /GPU:0 '])
def test_names_keep_their_order_and_holes(given, four_gpus):
    assert resolve_devices(given) == ('/device:GPU:3', '/device:CPU:0', '/device:GPU:0')


def test_devices_that_cannot_be_those_of_towers():
    assert device_error(['/cpu:1', '/cpu:0', 'CPU:1']) == (
        "/cpu:1 is named 2 times in devices=['/cpu:1', '/cpu:0', 'CPU:1']: give each tower a "
        'device of its own, or pass resolve_devices(…, allow_repeated=True) to put several on one.')
    assert resolve_devices(['/cpu:0', '/cpu:0'], allow_repeated=True) == ('/device:CPU:0',) * 2
    assert device_error([]) == (
        'devices=[]: expected one device or more (None for every visible GPU), and as many devices '
        'for each tower.')
    assert device_error('/device:TPU:0').startswith('/device:TPU:0 does not exist: ')


# ---- what exists --------------------------------------------------------------------------------

def test_every_gpu_or_a_count_of_them(four_gpus):
    assert resolve_devices() == resolve_devices(None, check=False) == resolve_devices(4) == (
        four_gpus)
    assert resolve_devices(1) == ('/device:GPU:0',)
    assert device_error(5) == (
        'devices=5, but TensorFlow sees /gpu:0, /gpu:1, /gpu:2, /gpu:3 here: ask for fewer, or '
        'name the devices (CPUs too).')
    assert resolve_devices(5, check=False)[-1] == '/device:GPU:4'


def test_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(devices, 'visible_gpus', lambda: ())
    assert resolve_devices() == ('/device:CPU:0',)
    assert resolve_devices(3) == ('/device:CPU:0', '/device:CPU:1', '/device:CPU:2')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    assert device_error(['/cpu:0', '/gpu:7']) == (
        '/gpu:7 does not exist: TensorFlow sees no GPU here (CUDA_VISIBLE_DEVICES=). Name another '
        'device, or pass resolve_devices(…, check=False) to build the graph for another machine.')


@pytest.mark.parametrize('arguments', [
    dict(devices='/job:worker/task:0/cpu:0,/cpu:1'), dict(devices='/task:2/cpu:0'),
    dict(devices=2, variables=towers.VariablePlacement('/job:ps/task:0/cpu:0'))])
def test_a_device_of_another_machine_is_refused_unless_it_is_not_checked(arguments, graph):
    batch = samples.vectors(4)
    before = [op.name for op in graph.get_operations()]
    with pytest.raises(DeviceError, match='/task:.* does not exist: without a cluster the one job'):
        towers.build_towers(samples.linear, batch, samples.sgd(), **arguments)
    assert [op.name for op in graph.get_operations()] == before
    arguments['devices'] = resolve_devices(arguments['devices'], check=False)
    towers.build_towers(samples.linear, batch, samples.sgd(), **arguments)


# ---- session_config -----------------------------------------------------------------------------


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


@pytest.mark.parametrize('variable, given, count, threads', [
    (None, None, 1, 0), (None, None, 2, 4), (None, None, 16, 1), ('3', None, 2, 3),
    ('0', None, 2, 4), ('many', None, 2, 4), ('3', 7, 2, 7), ('3', 0, 2, 0)])
def test_threads_of_one_operation(monkeypatch, variable, given, count, threads):
    """As given, as OMP_NUM_THREADS says, or the cores divided among CPU towers."""
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
    assert devices.describe_config(config, ['/device:GPU:0']) == (
        "TensorFlow's choice of intra-op and 3 inter-op threads; GPU memory all at once, 0.4 of it "
        'at the most')
    assert session_config(1).gpu_options.per_process_gpu_memory_fraction == 0
    assert devices.describe_config(session_config('/gpu:0'), ['/device:GPU:0']).endswith(
        '; GPU memory as it is needed')
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    assert devices.describe_config(session_config(2), ['/device:CPU:0', '/device:CPU:1']) == (
        "3 intra-op and TensorFlow's choice of inter-op threads")


def test_the_config_of_a_graph_has_all_cpus_that_it_names(graph):
    with tf.device('/cpu:0'):
        tf.constant(1.)
    assert config_of_towers() is None
    with tf.device('/cpu:3'):
        tf.constant(1.)
    config = config_of_towers(graph)
    assert config.device_count['CPU'] == 4 and not config.allow_soft_placement
