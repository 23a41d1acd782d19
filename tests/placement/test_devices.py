"""towers.resolve_devices: every spelling of a device, and what is refused."""


import pytest
import sample_models as samples

import towers
from towers.placement import devices
from towers.placement.devices import resolve_devices
from towers.errors import DeviceError


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
