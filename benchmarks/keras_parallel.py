"""A training step of `ParallelModel` on two CPUs beside one device and TF 1.15's `multi_gpu_model`.

    python -m benchmarks.keras_parallel [--rounds=7] [--steps=5]

All in one process, in turns; ratios are of the same round, with the smallest and the largest. On TF
2.16 and later it needs tf-keras. `multi_gpu_model`, which knows GPUs alone, is given virtual CPUs
in their place.
"""

import argparse
import importlib.util
import os
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


class Contender:
    """A model with a graph and a session of its own."""

    def __init__(self, make_model, wrap, devices, x, y):
        self._graph, self._data = tf.Graph(), (x, y)
        with self._graph.as_default():
            self._session = tf.Session(config=towers.session_config(devices))
            with self._session.as_default():
                self._model = wrap(make_model())
                self._model.compile('sgd', 'mse')
        self.step_seconds(3)

    def step_seconds(self, steps):
        """Seconds a step takes, the mean of some."""
        with self._graph.as_default(), self._session.as_default():
            start = time.perf_counter()
            for _ in range(steps):
                self._model.train_on_batch(*self._data)
            return (time.perf_counter() - start) / steps


def main():
    """Prints a line a model and contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--steps', type=int, default=5)
    parser.add_argument('--batch_size', type=int, default=128)
    options = parser.parse_args()
    random = np.random.RandomState(0)
    x = random.rand(options.batch_size, 28, 28, 1).astype('float32')
    y = random.rand(options.batch_size, 10).astype('float32')
    ways = [('one device', lambda model: model, 1),
            ('ParallelModel', lambda model: towers.ParallelModel(model, 2), 2)]
    if compat.TF_VERSION < (2, 0):
        ways.append(('multi_gpu_model', multi_gpu, 2))
    print('TF %s, batch %d, %d cores, load %.1f' % (
        tf.version.VERSION, options.batch_size, os.cpu_count(), os.getloadavg()[0]))
    for make_model in (conv_model, dense_model, recurrent_model, narrow_model):
        contenders = [(name, Contender(make_model, wrap, devices, x, y))
                      for name, wrap, devices in ways]
        rounds = [[contender.step_seconds(options.steps) for _, contender in contenders]
                  for _ in range(options.rounds)]
        of_one = np.array(rounds)
        ratios = of_one / of_one[:, :1]
        for k, (name, _) in enumerate(contenders):
            print('%-15s %-16s %7.1f ms a step, %.2f of one device (%.2f to %.2f)' % (
                make_model.__name__, name, 1000 * np.median(of_one[:, k]), np.median(ratios[:, k]),
                ratios[:, k].min(), ratios[:, k].max()))


if __name__ == '__main__':
    main()
