"""Use of the devices: processor time of this process, use and memory of GPUs (by NVML)."""

import collections
import importlib.util
import os
import time

import tensorflow.compat.v1 as tf

from towers.errors import MissingPackageError
from towers.placement.devices import is_gpu

GpuReading = collections.namedtuple('GpuReading', 'percent used_bytes total_bytes')
"""Use of a GPU in percent (None where the driver does not tell) and its memory, by all programs."""


class CpuUse:
    """Processor time of this process, all of its threads together."""

    def __init__(self):
        self._since = time.perf_counter(), time.process_time()

    def percent(self):
        """Use since the last call: 100. is one core, 400. four; None if no time has passed."""
        now, busy = time.perf_counter(), time.process_time()
        seconds, worked = now - self._since[0], busy - self._since[1]
        if seconds <= 0:
            return None
        self._since = now, busy
        return 100. * worked / seconds


class GpuUse:
    """Reads use and memory of some of TensorFlow's GPUs through NVML (package nvidia-ml-py).

    TensorFlow numbers the GPUs that `CUDA_VISIBLE_DEVICES` names; NVML numbers all GPUs in the
    order of the PCI bus. The two orders agree unless the machine has GPUs of several kinds; there
    `CUDA_DEVICE_ORDER=PCI_BUS_ID` makes them agree.
    """

    def __init__(self, devices):
        """
        Args:
          devices: device names as in `BuiltTowers.devices`; all but GPUs of this process are left
            out.

        Raises:
          MissingPackageError: pynvml is not installed.
          pynvml.NVMLError: there is no NVIDIA driver, or it does not know one of the GPUs.
        """
        if not is_nvml_installed():
            raise MissingPackageError('GPU use is read by the package nvidia-ml-py, which is not '
                                      'installed: pip install nvidia-ml-py (the extra gpu)')
        import pynvml  # pylint: disable=import-outside-toplevel
        self._nvml = pynvml
        pynvml.nvmlInit()
        try:
            self._handles = [self._handle(index) for index in _local_gpus(devices)]
        except Exception:
            pynvml.nvmlShutdown()
            raise

    def read(self):
        """List of `GpuReading`, one for each GPU.

        Raises:
          pynvml.NVMLError: a GPU does not answer any more.
        """
        readings = []
        for handle in self._handles:
            try:
                percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            except self._nvml.NVMLError_NotSupported:  # of old GPUs, and of slices of new ones
                percent = None
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            readings.append(GpuReading(percent, memory.used, memory.total))
        return readings

    def close(self):
        """Ends the use of NVML by this object."""
        self._nvml.nvmlShutdown()

    def _handle(self, index):
        """NVML's handle of TensorFlow's GPU of this number."""
        visible = [name.strip() for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')]
        name = visible[index] if index < len(visible) and visible[index] else str(index)
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        # CUDA takes the beginning of a UUID, NVML the whole.
        for number in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
            if self._nvml.nvmlDeviceGetUUID(handle).startswith(name):
                return handle
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


class DeviceUse:
    """A few words about the use of the devices, for a line that is often redrawn.

    Attributes:
      problem: where NVML fails, a string that says why no use of GPUs is shown; else None.
    """

    _KEPT_SECONDS = 1.  # readings over a shorter time vary much, and reading NVML takes time

    def __init__(self, devices=()):
        """
        Args:
          devices: device names as in `BuiltTowers.devices`.
        """
        self.problem = None
        self._cpu = CpuUse()
        self._gpus = None
        self._said = '', ''
        self._read_at = None
        if _local_gpus(devices) and is_nvml_installed():
            self._gpus = self._guarded(GpuUse, devices)

    def describe(self):
        """Two strings such as `('GPU 97% 10.2/16 GB', 'CPU 187%')`; `''` for an unknown one."""
        now = time.perf_counter()
        if self._read_at is None or now - self._read_at >= self._KEPT_SECONDS:
            self._read_at = now
            percent = self._cpu.percent()
            readings = self._guarded(self._gpus.read) if self._gpus is not None else None
            self._said = (describe_gpus(readings) if readings else '',
                          '' if percent is None else 'CPU %.0f%%' % percent)
        return self._said

    def close(self):
        """Ends the use of NVML; GPUs are not read any more."""
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    def _guarded(self, function, *args):
        """What a function that uses NVML returns; None if NVML fails, which `problem` then says.

        Nothing is raised: a run goes on without these figures.
        """
        from pynvml import NVMLError  # pylint: disable=import-outside-toplevel
        try:
            return function(*args)
        except NVMLError as error:
            self.problem = 'GPU use is not shown: NVML says %s' % error
            self.close()
            return None


def describe_gpus(readings):
    """`'GPU 97% 10.2/16 GB'`; of several the range of their use, and the fullest one's memory."""
    percents = [reading.percent for reading in readings if reading.percent is not None]
    fullest = max(readings, key=lambda reading: reading.used_bytes / reading.total_bytes)
    words = ['GPU' if len(readings) == 1 else '%d GPUs' % len(readings)]
    if percents:
        low, high = min(percents), max(percents)
        words.append('%d%%' % high if low == high else '%d-%d%%' % (low, high))
    words.append('%.3g/%.3g GB' % (fullest.used_bytes / 1e9, fullest.total_bytes / 1e9))
    return ' '.join(words)


def is_nvml_installed():
    """Whether the module pynvml can be imported."""
    return importlib.util.find_spec('pynvml') is not None


def _local_gpus(devices):
    """Numbers of the GPUs among the device names. Those of a `/job:` may be another machine's."""
    specs = [tf.DeviceSpec.from_string(name) for name in devices if is_gpu(name)]
    return [spec.device_index for spec in specs if spec.job is None]
