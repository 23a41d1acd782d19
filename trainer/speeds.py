"""Examples a second of a pipeline and of a training's steps, measured in the sessions of both.

    rate = examples of the steps / seconds of the steps      busy = seconds of the processors that
                                                                    this process used / those it had

Each measurement comes after a warm-up. What is measured repeatedly has the median of its rates.
Examples are counted, not steps: batches need not be of one size (`remainder='weight'`).
"""

import collections
import os
import time

import tensorflow.compat.v1 as tf

from towers.placement.devices import session_config
from towers.run.input_watch import InputWatch
from towers.tower.shards import split_batch
from trainer.held_batch import hold_batch

_LEAST_STEPS = 2  # of a measurement
_MOMENT = .01  # seconds
_WARM_UP_STEPS = 3  # two prefetched batches, and the one in the making

Speed = collections.namedtuple('Speed', 'rate busy others')
"""Examples a second; and the shares of all processors that this process used meanwhile, and that
other programs did, 0..1 (0 where the system does not tell)."""


class _Measured:
    """What is measured, in a session of its own; a context manager that closes it."""

    def __init__(self, graph, config, initializers, input_initializers):
        """
        Args:
          graph, config: of the session.
          initializers: list of what is run first, one after the other.
          input_initializers: the same, to begin the input; and to begin it anew after an error.
        """
        self.speeds = []
        self._input_initializers, self._has_input = input_initializers, False
        self._session = tf.Session(graph=graph, config=config)
        for each in initializers:
            self._session.run(each)

    def __enter__(self):
        return self

    def __exit__(self, *unused_exception):
        self._session.close()

    def measure(self, seconds):
        """Runs steps for so many seconds, after a warm-up, and takes their `Speed`."""
        if not self._has_input:
            for each in self._input_initializers:
                self._session.run(each)
        self._has_input = False  # an error ends it, in the batch that the iterator is at
        _settle(seconds)
        self.speeds.append(speed_of(self._step, seconds, self._on_start))
        self._has_input = True

    def _step(self):
        """Does a step, and returns how many examples it had."""
        raise NotImplementedError

    def _on_start(self):
        """Is called between warm-up and measurement."""

    @property
    def rate(self):
        """Examples a second: the median of the measurements."""
        return self._median('rate')

    @property
    def busy(self):
        """Share of all processors that was used, 0..1: the median of the measurements."""
        return self._median('busy')

    @property
    def others(self):
        """Share of all processors that other programs used, 0..1: median of the measurements."""
        return self._median('others')

    @property
    def spread(self):
        """By which part of their median the measured rates differ, 0..; None of a single one."""
        rates = [speed.rate for speed in self.speeds]
        return (max(rates) - min(rates)) / self.rate if len(rates) > 1 else None

    def _median(self, field):
        return sorted(getattr(speed, field) for speed in self.speeds)[len(self.speeds) // 2]


class PipelineSpeed(_Measured):
    """How fast a `tf.data.Dataset` of batches is read."""

    def __init__(self, make, batch_size, devices=()):
        """
        Args:
          make: function without arguments that makes the dataset, in the default graph.
          batch_size: examples of an element that has no dimension to count them by.
          devices: the towers' devices, to which the batch then is copied in shards; `()`: not
            copied.
        """
        graph = tf.Graph()
        with graph.as_default():
            with tf.device('/cpu:0'):
                iterator = tf.data.make_initializable_iterator(make())
                batch = iterator.get_next()
                count = _examples(batch, batch_size)
            ops = [tensor.op for tensor in tf.nest.flatten(batch)]
            if devices:
                shards = split_batch(batch, len(devices), 'weight')
                ops = []
                for device, shard in zip(devices, shards.inputs):
                    with tf.device(device):
                        ops += [tf.identity(tensor).op for tensor in tf.nest.flatten(shard)]
            self._fetches = (tf.group(*ops), () if isinstance(count, int) else count)
        self._static = count if isinstance(count, int) else None
        super().__init__(graph, session_config(devices) if devices else None,
                         [], [iterator.initializer])

    def _step(self):
        _, count = self._session.run(self._fetches)
        return int(count) if self._static is None else self._static


class StepsSpeed(_Measured):
    """How fast the steps of a training are."""

    def __init__(self, trial, holds_batch=False):
        """
        Args:
          trial: function without arguments that builds the training in the default graph, and
            returns a `Trial`.
          holds_batch: whether all steps take one batch, from the memory of the towers' devices.
        """
        graph = tf.Graph()
        with graph.as_default():
            made = trial()
            sizes = [tower.size for tower in made.built.towers]
            self._static = sum(size for size in sizes if not tf.is_tensor(size))
            self._fetches = [made.train_op] + [
                tf.identity(size) for size in sizes if tf.is_tensor(size)]
            input_initializers = [list(made.initializers)]
            if holds_batch:
                input_initializers.append(hold_batch(made.built, self._fetches))
            self._watch = InputWatch(made.train_op)
            initializers = [[tf.global_variables_initializer(), tf.local_variables_initializer()],
                            [tf.tables_initializer(), self._watch.initializer]]
        self._mark, self._waited, self._seconds = None, 0., 0.
        super().__init__(graph, made.config, initializers, input_initializers)

    def measure(self, seconds):
        """As of a pipeline; takes the steps' waiting time as well."""
        super().measure(seconds)
        span = self._watch.span(self._watch.read(self._session), self._mark)
        self._waited += span.waited
        self._seconds += span.seconds

    @property
    def waiting(self):
        """Share of the steps' time that was waiting for input, 0..1, over all measurements."""
        return min(1., self._waited / self._seconds) if self._seconds else 0.

    def _step(self):
        return self._static + int(sum(self._session.run(self._fetches)[1:]))

    def _on_start(self):
        self._mark = self._watch.read(self._session)


def speed_of(step, seconds, on_start=lambda: None):
    """The `Speed` of a function that does a step, after a warm-up.

    The warm-up takes the batches that were prefetched before the clock started.

    Args:
      step: function without arguments that does a step, and returns how many examples it had.
      seconds: least length of the measurement.
      on_start: function without arguments, called between warm-up and measurement.
    """
    begin, steps = time.perf_counter(), 0
    while steps < _WARM_UP_STEPS or (time.perf_counter() - begin < seconds / 4 and steps < 1000):
        step()
        steps += 1
    on_start()
    idle, used, begin, steps, examples = (
        _idle_seconds(), time.process_time(), time.perf_counter(), 0, 0)
    while steps < _LEAST_STEPS or time.perf_counter() - begin < seconds:
        examples += step()
        steps += 1
    taken, used = time.perf_counter() - begin, time.process_time() - used
    left = _idle_seconds() - idle
    busy = min(1., used / taken / _processors())
    # Ticks of 10 ms tell nothing of a moment.
    others = max(0., 1 - busy - left / taken / _processors()) if taken > .25 and left >= 0 else 0.
    return Speed(examples / taken, busy, others)


def _settle(seconds):
    """Waits, so many seconds at most, until the pipelines of other sessions have filled their
    buffers: what they make ahead takes processors from what is measured."""
    begin, used, now = time.perf_counter(), None, time.process_time()
    while (used is None or now - used > .1 * _MOMENT) and time.perf_counter() - begin < seconds:
        time.sleep(_MOMENT)
        used, now = now, time.process_time()


def _examples(batch, otherwise):
    """The examples of a batch, an int or a scalar tensor; `otherwise` where it is of scalars."""
    for tensor in tf.nest.flatten(batch):
        if tensor.shape.ndims:
            static = tensor.shape.as_list()[0]
            if static is not None:
                return static
            return (tensor.dense_shape if isinstance(tensor, tf.SparseTensor) else
                    tf.shape(tensor))[0]
    return otherwise


def _processors():
    """How many processors this process may use."""
    return len(_numbers_of_processors() or ()) or os.cpu_count() or 1


def _numbers_of_processors():
    """Numbers of the processors that this process may use; None where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else None  # on Linux


def _idle_seconds():
    """Seconds for which they had nothing to do since the system began; NaN if it does not tell."""
    numbers = _numbers_of_processors()
    try:
        with open('/proc/stat') as stat:
            rows = [line.split() for line in stat if line.startswith('cpu')]
    except OSError:
        return float('nan')
    names = {'cpu%d' % number for number in numbers or ()}
    found = [sum(int(ticks) for ticks in row[4:6]) for row in rows if row[0] in names]
    if len(found) != len(names) or not any(found):
        return float('nan')
    return sum(found) / os.sysconf('SC_CLK_TCK')
