"""A training step of `ParallelModel` on two CPUs beside one device and TF 1.15's `multi_gpu_model`.

    python -m benchmarks.keras_parallel [--rounds=7] [--steps=5]

Each contender is a process of its own, and they take turns; ratios are of the same round, with the
smallest and the largest. One device has a thread a core for each operation. Two devices have that
as well, and one thread for each operation, as two operations run at once. On TF 2.16 and later it
needs tf-keras. `multi_gpu_model`, which knows GPUs alone, is given virtual CPUs in their place.
"""

import argparse
import collections
import importlib.util
import os
import subprocess
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
if importlib.util.find_spec('tf_keras') is not None:
    os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')

import numpy as np  # noqa: E402
import tensorflow  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from towers import compat  # noqa: E402

keras = tensorflow.keras


def conv_model():
    """Images [batch, 28, 28, 1]; convolutions."""
    return keras.Sequential([
        keras.layers.Conv2D(32, 3, activation='relu', input_shape=(28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation='relu'),
        keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.Dense(10)])


def dense_model():
    """Images [batch, 28, 28, 1]; layers whose weights outweigh the examples."""
    return keras.Sequential([
        keras.layers.Flatten(input_shape=(28, 28, 1)),
        keras.layers.Dense(1024, activation='relu'), keras.layers.Dense(1024, activation='relu'),
        keras.layers.Dense(10)])


def recurrent_model():
    """Images [batch, 28, 28, 1], read row by row; each turn waits for the one before it."""
    return keras.Sequential([
        keras.layers.Reshape((28, 28), input_shape=(28, 28, 1)),
        keras.layers.LSTM(128), keras.layers.Dense(10)])


def narrow_model():
    """Images [batch, 28, 28, 1]; many layers, each too small to keep two cores busy."""
    model = keras.Sequential([keras.layers.Conv2D(8, 3, strides=2, activation='relu',
                                                  input_shape=(28, 28, 1))])
    for _ in range(24):
        model.add(keras.layers.Conv2D(8, 3, padding='same', activation='tanh'))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    return model


class _CpusForGpus:
    """TensorFlow's module `ops`, for which `/gpu:1` is `/cpu:1`."""

    def __init__(self, ops):
        self._ops = ops

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def device(self, name):
        return self._ops.device(name.replace('gpu', 'cpu'))


def multi_gpu(model):
    """TF 1.15's own way."""
    from unittest import mock
    multi_gpu_utils = sys.modules[keras.utils.multi_gpu_model.__module__]
    with mock.patch.object(multi_gpu_utils, 'ops', _CpusForGpus(multi_gpu_utils.ops)), \
            mock.patch.object(multi_gpu_utils, '_get_available_devices',
                              lambda: ['/device:CPU:0', '/device:GPU:0', '/device:GPU:1']):
        return keras.utils.multi_gpu_model(model, 2)


MODELS = collections.OrderedDict((make.__name__, make) for make in (
    conv_model, dense_model, recurrent_model, narrow_model))
WAYS = {'one device': lambda model: model,
        'ParallelModel': lambda model: towers.ParallelModel(model, 2),
        'multi_gpu_model': multi_gpu}


def serve(model, way, threads, batch_size):
    """Trains in this process: for each number of steps that it reads, prints the seconds a step."""
    random = np.random.RandomState(0)
    x = random.rand(batch_size, 28, 28, 1).astype('float32')
    y = random.rand(batch_size, 10).astype('float32')
    config = towers.session_config(1 if way == 'one device' else 2)
    config.intra_op_parallelism_threads = threads
    with tf.Graph().as_default(), tf.Session(config=config).as_default():
        trained = WAYS[way](MODELS[model]())
        trained.compile('sgd', 'mse')
        for line in sys.stdin:
            steps = int(line)
            start = time.perf_counter()
            for _ in range(steps):
                trained.train_on_batch(x, y)
            print('seconds', (time.perf_counter() - start) / steps, flush=True)


class Contender:
    """A process that trains a model in one way."""

    def __init__(self, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.keras_parallel', '--serve'] + list(
                map(str, arguments)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, universal_newlines=True)

    def step_seconds(self, steps):
        """Seconds a step takes, the mean of some."""
        self._process.stdin.write('%d\n' % steps)
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('seconds '):
                return float(line.split()[1])
        raise RuntimeError('a contender ended with status %s' % self._process.wait())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def main():
    """Prints a line a model and contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--steps', type=int, default=5)
    parser.add_argument('--batch_size', type=int, default=128)
    parser.add_argument('--serve', nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        model, way, threads, batch_size = options.serve
        serve(model, way, int(threads), int(batch_size))
        return
    cores = os.cpu_count()
    ways = [('one device', cores), ('ParallelModel', cores), ('ParallelModel', 1)]
    if compat.TF_VERSION < (2, 0):
        ways += [('multi_gpu_model', cores), ('multi_gpu_model', 1)]
    print('TF %s, batch %d, %d cores, load %.1f' % (
        tf.version.VERSION, options.batch_size, cores, os.getloadavg()[0]))
    for model in MODELS:
        contenders = [Contender(model, way, threads, options.batch_size) for way, threads in ways]
        try:
            for contender in contenders:
                contender.step_seconds(3)
            seconds = np.array([[contender.step_seconds(options.steps) for contender in contenders]
                                for _ in range(options.rounds)])
        finally:
            for contender in contenders:
                contender.close()
        ratios = seconds / seconds[:, :1]
        for k, (way, threads) in enumerate(ways):
            print('%-15s %-15s %d thread%s %7.1f ms a step, %.2f of one device (%.2f to %.2f)' % (
                model, way, threads, ' ' if threads == 1 else 's', 1000 * np.median(seconds[:, k]),
                np.median(ratios[:, k]), ratios[:, k].min(), ratios[:, k].max()), flush=True)


if __name__ == '__main__':
    main()
