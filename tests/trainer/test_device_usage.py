"""Device use: processor time of this process, and GPUs through a stand-in for NVML."""

import sys
import textwrap
import time

import pytest

from towers.errors import MissingPackageError
from trainer import device_usage
from trainer.device_usage import CpuUse, DeviceUse, GpuReading, GpuUse, describe_gpus

# Three GPUs; the second does not tell its use. `lost` makes the driver fail.
NVML = '''
    import collections
    class NVMLError(Exception): pass
    class NVMLError_NotSupported(NVMLError): pass
    Memory = collections.namedtuple('Memory', 'used total')
    Rates = collections.namedtuple('Rates', 'gpu')
    gpus = [(97, 10.2e9, 16e9, 'GPU-aaa1'), (None, 2e9, 8e9, 'GPU-bbb2'), (35, 12e9, 16e9,
            'GPU-ccc3')]
    lost, opened, calls = False, 0, 0
    def nvmlInit():
        global opened
        if lost: raise NVMLError('Driver Not Loaded')
        opened += 1
    def nvmlShutdown():
        global opened
        opened -= 1
    def nvmlDeviceGetCount(): return len(gpus)
    def nvmlDeviceGetHandleByIndex(index):
        if index >= len(gpus): raise NVMLError('Invalid Argument')
        return index
    def nvmlDeviceGetUUID(handle): return gpus[handle][3]
    def nvmlDeviceGetHandleByUUID(uuid): raise NVMLError('Not Found')
    def nvmlDeviceGetUtilizationRates(handle):
        global calls
        calls += 1
        if lost: raise NVMLError('GPU is lost')
        if gpus[handle][0] is None: raise NVMLError_NotSupported('Not Supported')
        return Rates(gpus[handle][0])
    def nvmlDeviceGetMemoryInfo(handle): return Memory(*gpus[handle][1:3])
'''


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """The stand-in for pynvml, which is found as an installed module is."""
    (tmp_path / 'pynvml.py').write_text(textwrap.dedent(NVML))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    import pynvml
    yield pynvml
    del sys.modules['pynvml']


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setattr(device_usage.importlib.util, 'find_spec', lambda name: None)


@pytest.mark.slow
def test_cpu_use_is_of_this_process():
    cpu = CpuUse()
    start, end = time.perf_counter(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    busy, seconds = cpu.percent(), time.perf_counter() - start
    # On a machine that is busy with other things those seconds are many.
    assert busy * seconds / 100. == pytest.approx(0.2, rel=0.2)
    time.sleep(seconds)
    assert cpu.percent() < busy / 2


def test_reads_the_gpus_among_the_devices(nvml):
    gpus = GpuUse(['/device:CPU:0', '/device:GPU:0', '/device:GPU:1',
                   '/job:worker/task:1/device:GPU:2'])
    assert gpus.read() == [GpuReading(97, 10.2e9, 16e9), GpuReading(None, 2e9, 8e9)]
    assert nvml.opened == 1
    gpus.close()
    assert nvml.opened == 0


@pytest.mark.parametrize('visible, expected', [
    ('GPU-ccc3, GPU-aaa', [35, 97]), ('', [97, None])])
def test_follows_cuda_visible_devices(nvml, monkeypatch, visible, expected):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    readings = GpuUse(['/device:GPU:0', '/device:GPU:1']).read()
    assert [reading.percent for reading in readings] == expected


def test_the_error_names_the_extra(no_nvml):
    with pytest.raises(MissingPackageError,
                       match=r'pip install nvidia-ml-py \(the extra gpu\)$') as caught:
        GpuUse(['/device:GPU:0'])
    assert isinstance(caught.value, ImportError)


def test_several_gpus_are_described_in_a_few_words():
    assert describe_gpus([GpuReading(97, 10.2e9, 16e9), GpuReading(95, 6e9, 8e9)]) == (
        '2 GPUs 95-97% 6/8 GB')
    assert describe_gpus([GpuReading(None, 2e9, 8e9)]) == 'GPU 2/8 GB'


def test_device_use_with_gpus(nvml, monkeypatch):
    use = DeviceUse(['/device:GPU:0'])
    gpu, cpu = use.describe()
    assert gpu == 'GPU 97% 10.2/16 GB' and cpu.startswith('CPU ') and cpu.endswith('%')
    assert use.describe() == (gpu, cpu) and nvml.calls == 1  # not read again within a second
    monkeypatch.setattr(DeviceUse, '_KEPT_SECONDS', 0.)
    use.describe()
    assert nvml.calls == 2
    use.close()
    use.close()
    assert nvml.opened == 0
    assert use.describe()[0] == ''


def test_device_use_goes_on_without_gpus_when_nvml_fails(nvml, monkeypatch):
    monkeypatch.setattr(DeviceUse, '_KEPT_SECONDS', 0.)
    use = DeviceUse(['/device:GPU:0'])
    nvml.lost = True
    assert use.describe()[0] == '' and use.describe()[1].startswith('CPU')
    assert use.problem == 'GPU use is not shown: NVML says GPU is lost'
    assert nvml.opened == 0
    use = DeviceUse(['/device:GPU:0'])
    assert use.problem == 'GPU use is not shown: NVML says Driver Not Loaded'


def test_device_use_without_nvml(no_nvml):
    gpu, cpu = DeviceUse(['/device:GPU:0']).describe()
    assert gpu == '' and cpu.startswith('CPU')
