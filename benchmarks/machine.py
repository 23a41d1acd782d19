"""What the numbers were measured on, and whether it was quiet."""

import os
import platform

import tensorflow.compat.v1 as tf

_NOISY = 0.5  # load average from which timings are not worth much


def describe():
    """dict of the machine: model, cores, instructions, memory, versions, load."""
    cpu = _fields('/proc/cpuinfo')
    flags = cpu.get('flags', '').split()
    return {
        'cpu': cpu.get('model name', platform.processor() or 'unknown'),
        'cores': os.cpu_count(),
        'instructions': [flag for flag in ('avx2', 'fma', 'avx512f', 'avx512_bf16', 'amx_bf16')
                         if flag in flags],
        'memory_gb': round(int(_fields('/proc/meminfo')['MemTotal'].split()[0]) / 1e6, 1),
        'tensorflow': tf.version.VERSION, 'python': platform.python_version(),
        'onednn': os.environ.get('TF_ENABLE_ONEDNN_OPTS'),
        'load': round(os.getloadavg()[0], 2)}


def lines(machine):
    """The description as lines for people, with a warning where the machine was not quiet."""
    text = ['%s, %d cores, %s, %.1f GB; TensorFlow %s, oneDNN %s, Python %s; load average %.2f at '
            'the start' % (
        machine['cpu'], machine['cores'], ' '.join(machine['instructions']) or 'no vector flags',
        machine['memory_gb'], machine['tensorflow'], _onednn(machine), machine['python'],
        machine['load'])]
    if machine['load'] > _NOISY:
        text.append('WARNING: the load average was above %.1f: something else was running, and '
                    'timings are not worth much' % _NOISY)
    return text


def _onednn(machine):
    """Without the setting TF uses oneDNN's kernels on CPUs with AVX-512 VNNI or AMX alone."""
    setting = machine.get('onednn')
    return 'as TF chooses' if setting is None else {'1': 'on', '0': 'off'}.get(setting, setting)


def _fields(path):
    """The `name: value` lines of a file of /proc; the first of each name."""
    fields = {}
    with open(path) as text:
        for line in text:
            name, _, value = line.partition(':')
            fields.setdefault(name.strip(), value.strip())
    return fields
