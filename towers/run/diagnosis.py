"""Measures which side limits a training, input or towers: each alone, and both together.

    pipeline   examples a second that the input pipeline delivers when nothing else runs
    towers     examples a second that the towers take from their own devices' memory
    together   examples a second of the training itself

The third is at most the lower of the first two. Where pipeline and towers use the same processors
they slow each other down, at worst to 1 / (1 / pipeline + 1 / towers), as if they took turns. Where
the processors would do for both at once and they still take turns, the pipeline does not work
ahead. The time of the processors that each measurement used tells the one from the other.
"""

import collections
import contextlib
import os
import time

import tensorflow.compat.v1 as tf

from towers.nonfinite import explained
from towers.placement.devices import resolve_devices, session_config
from towers.placement.tower_device import stages_of
from towers.run.input_watch import InputWatch
from towers.tower.shards import split_batch

Trial = collections.namedtuple('Trial', 'train_op initializers config built')
"""A training to be timed, in the default graph.

Fields:
  train_op: the operation of a step.
  initializers: list of operations to run after the variables' initializers, as the iterator's.
  config: of the session.
  built: what `build_towers` returned.
"""

# A speed below this share of another one counts as slower.
_BEHIND = 0.9
_STAGES_BEHIND = 0.8  # the same of the pipeline's stages, which are measured minutes apart
_LEAST_STEPS = 2  # of a measurement
_ROUNDS = 3  # of measuring the towers alone, then together with the pipeline
_WARM_UP_STEPS = 4  # two prefetched batches, a staged one, and the one in the making

_ADVICE = {
    'read': 'put the files on a faster disk, or in memory',
    'decode': 'store the images no larger than the crops need, or give the pipeline more '
              'processors',
    'augment': 'distort less (--augment=crop leaves the colours), or give the pipeline more '
               'processors',
    'batch': 'make the batch from fewer copies, or give the pipeline more processors',
    'copy': 'put the next batch on the devices ahead of time (stage_inputs)',
    None: 'make the pipeline cheaper an example, let it run in parallel '
          '(dataset.map(..., num_parallel_calls)) and ahead (dataset.prefetch), or give it more '
          'processors'}


class Diagnosis(collections.namedtuple('Diagnosis', [
        'pipeline', 'towers', 'together', 'waiting', 'stages', 'busy', 'seconds'],
        defaults=(None, 5.))):
    """The measured speeds; `print(diagnosis)` shows them, with a verdict.

    Attributes:
      pipeline, towers, together: examples a second.
      waiting: share of the steps' time that was waiting for input in the training itself, 0..1.
      stages: `OrderedDict` from the pipeline's stages to seconds an example.
      busy: shares of all processors, 0..1, that pipeline, towers and both used; None: not known.
      seconds: length of each measurement.
    """
    __slots__ = ()

    @property
    def side(self):
        """The slower side: `'input'` or `'towers'`; `'both'` where they slow each other down on the
        same processors; `'turns'` where they wait for each other although the processors would do
        for both; `'balanced'` where they are about as fast as each other; `'unclear'` where the
        measurements contradict each other."""
        if self.contradiction:
            return 'unclear'
        if self._take_turns():
            return 'turns'
        if self.pipeline < _BEHIND * self.towers:
            return 'input'
        if self.towers < _BEHIND * self.pipeline:
            return 'towers' if self.together >= _BEHIND * self.towers else 'both'
        return 'balanced'

    @property
    def in_turns(self):
        """Examples a second if pipeline and towers took turns: the lower bound of `together`."""
        return 1. / (1. / self.pipeline + 1. / self.towers)

    @property
    def contradiction(self):
        """What cannot be true of the measurements, as text; '' where they agree."""
        least = min(self.pipeline, self.towers)
        if self.together * _BEHIND > least:
            return 'together they reached %s images/s, and %s alone just %s' % (
                _number(self.together),
                'the pipeline' if least == self.pipeline else 'the towers', _number(least))
        if self.together < _BEHIND * self.in_turns:
            return 'together they are slower than if they took turns (%s images/s)' % _number(
                self.in_turns)
        if sum(self.stages.values()) * self.pipeline * _STAGES_BEHIND > 1:
            return 'the first stages of the pipeline took longer than the whole of it'
        return ''

    def _take_turns(self):
        """Whether both work one after the other, with processors left that nobody used."""
        least = min(self.pipeline, self.towers)
        if self.busy is None or self.together >= _BEHIND * least:
            return False
        pipeline, towers, _ = self.busy
        return least * (pipeline / self.pipeline + towers / self.towers) < _BEHIND

    @property
    def verdict(self):
        """One sentence: which side limits the run, by how much, and what to change."""
        if self.side == 'unclear':
            return ('The measurements contradict each other: %s. Something else used the '
                    'processors, or they were too short: measure again, longer: '
                    '--diagnose_seconds=%g.' % (self.contradiction, max(10., 3 * self.seconds)))
        slowest = max(self.stages, key=self.stages.get) if len(self.stages) > 1 else None
        if self.side == 'turns':
            return (
                'Input and towers take turns: alone the pipeline delivers %s and the towers take '
                '%s images/s, together they reach %s, and %.0f %% of the processors\' time is '
                'left; make the next batch during the step: %s(stage_inputs).' % (
                    _number(self.pipeline), _number(self.towers), _number(self.together),
                    100 * max(0., 1 - self.busy[2]),
                    'put it on the devices ahead of time ' if 'batch' in self.stages else
                    'add .prefetch(2) at the end of the pipeline, or put the batch on the devices '
                    'ahead of time '))
        lost = 100 * max(0., 1 - self.together / self.towers)
        if self.side == 'input':
            return (
                'The input holds the run back: the pipeline delivers %s of the %s images/s that '
                'the towers could take, and the run loses %.0f %% of their speed; %s%s.' % (
                    _number(self.pipeline), _number(self.towers), lost,
                    '' if slowest is None else '%s takes %.0f %% of the pipeline\'s time: ' % (
                        slowest, 100 * self.stages[slowest] / sum(self.stages.values())),
                    _ADVICE.get(slowest, _ADVICE[None])))
        if self.side == 'towers':
            return (
                'The towers hold the run back: they take %s images/s, and the pipeline could '
                'deliver %s, %s times as many, so that a faster input would bring %.0f %% at most; '
                'more or faster devices, or a cheaper model, would bring more.' % (
                    _number(self.towers), _number(self.pipeline),
                    _number(self.pipeline / self.towers),
                    100 * max(0., self.towers / self.together - 1)))
        if self.side == 'both':
            return (
                'Input and towers hold each other back, on the same processors: alone the pipeline '
                'delivers %s and the towers take %s images/s, together they reach %s, %.0f %% less '
                'than the towers alone; %s, or make the input on other processors.' % (
                    _number(self.pipeline), _number(self.towers), _number(self.together), lost,
                    _ADVICE.get(slowest, _ADVICE[None])))
        return (
            'Neither side holds the run back alone: the pipeline delivers %s and the towers take '
            '%s images/s, and together they reach %s; a faster run needs both%s.' % (
                _number(self.pipeline), _number(self.towers), _number(self.together),
                ', or processors that they do not share' if self.together < _BEHIND * min(
                    self.pipeline, self.towers) else ''))

    def __str__(self):
        rows = [('pipeline alone', self.pipeline, []),
                ('towers alone', self.towers, ['from their own memory']),
                ('together', self.together, ['waiting for input for %.0f %% of the time'
                                             % (100 * self.waiting)])]
        for (_, _, notes), busy in zip(rows, self.busy or ()):
            notes.append('processors %.0f %% busy' % (100 * busy))
        lines = ['%-16s %10s images/s  %s' % (name, _number(rate), ', '.join(notes))
                 for name, rate, notes in rows]
        whole = sum(self.stages.values())
        for name, seconds in self.stages.items():
            lines.append('  %-14s %10.3g ms an image, %.0f %%' % (
                name, 1e3 * seconds, 100 * seconds / whole if whole else 0))
        return '\n'.join(line.rstrip() for line in lines + [self.verdict])


def diagnose(trial, batches, devices, batch_size, stages=None, *, seconds=5., stage_inputs=False,
             mend=lambda error: False, say=lambda line: None):
    """Measures the pipeline, the towers, and both together.

    Args:
      trial: function that builds the training in the default graph: takes a `stage_inputs` of
        `build_towers`, returns a `Trial`.
      batches: function without arguments that makes the `tf.data.Dataset` of training batches.
      devices: the towers' devices, as for `build_towers`.
      batch_size: examples a step.
      stages: function without arguments that makes an `OrderedDict` from the names of the
        pipeline's stages to datasets, each of them the pipeline up to that stage, with elements of
        `batch_size` examples; or None.
      seconds: least length of each measurement, without its warm-up.
      stage_inputs: the training's own `stage_inputs`.
      mend: function of the `tf.errors.OpError` of a batch or step: returns whether it has taken
        out what failed, in what the pipeline reads; the measurement then begins anew.
      say: called with a line that says how long it takes, before it begins.

    Returns:
      `Diagnosis`.

    Raises:
      NonFiniteError: a step found a NaN or an infinity (`build_towers(check_numerics=True)`).
    """
    devices = resolve_devices(devices, says_how=False)
    upto = collections.OrderedDict()
    names = []
    if stages is not None:
        with tf.Graph().as_default():
            names = list(stages())
    # What is copied from one CPU to another is a pointer.
    copies = any('CPU' not in name.upper() for device in devices for name in stages_of(device))
    measured = len(names[:-1]) + 1 + copies + 2
    say('measuring      %d times %g s, with warm-ups about %.0f s, and the time to build the '
        'towers twice' % (measured, seconds, 1.25 * measured * seconds))

    def measure(make, *devices):
        def once():
            with tf.Graph().as_default():
                return _pipeline_speed(make(), batch_size, seconds, *devices)
        return _mending(once, mend)
    for name in names[:-1]:
        upto[name] = measure(lambda name=name: stages()[name])
    upto['batch' if names else 'pipeline'] = measure(batches)
    if copies:
        upto['copy'] = measure(batches, devices)
    spent, before = collections.OrderedDict(), 0.
    for name, speed in upto.items():
        spent[name] = max(0., 1. / speed.rate - before)
        before = max(before, 1. / speed.rate)
    pipeline = list(upto.values())[-1]
    with contextlib.ExitStack() as sessions:
        alone, both = [sessions.enter_context(_Steps(trial, staging, batch_size))
                       for staging in ('first', stage_inputs)]
        # In turns, so that other load on the machine slows both alike.
        for _ in range(_ROUNDS):
            for steps in (alone, both):
                _mending(lambda steps=steps: steps.measure(seconds / _ROUNDS), mend)
        return Diagnosis(pipeline.rate, alone.rate, both.rate, both.waiting, spent,
                         (pipeline.busy, alone.busy, both.busy), seconds)


def _mending(measure, mend):
    """What a measurement returns, which begins anew where `mend` of its error returns True."""
    while True:
        try:
            return measure()
        except tf.errors.OpError as error:
            reason = explained(error)
            if reason is not None:
                raise reason from None
            if not mend(error):
                raise


def pipeline_rate(dataset, batch_size, seconds=5., devices=()):
    """Examples a second, a float, that a `tf.data.Dataset` of batches delivers.

    The warm-up takes the batches that were prefetched before the clock started.

    Args:
      dataset: of elements of `batch_size` examples.
      batch_size: an int.
      seconds: least length of the measurement.
      devices: the towers' devices, to which the batch then is copied in shards; `()`: not copied.
    """
    return _pipeline_speed(dataset, batch_size, seconds, devices).rate


def _pipeline_speed(dataset, batch_size, seconds, devices=()):
    """As `pipeline_rate`, the `_Speed`."""
    with tf.device('/cpu:0'):
        iterator = tf.data.make_initializable_iterator(dataset)
        batch = iterator.get_next()
    ops = [tensor.op for tensor in tf.nest.flatten(batch)]
    if devices:
        shards = split_batch(batch, len(devices), 'weight')
        ops = []
        for device, shard in zip(devices, shards.inputs):
            with tf.device(device):
                ops += [tf.identity(tensor).op for tensor in tf.nest.flatten(shard)]
    step = tf.group(*ops)
    with tf.Session(config=session_config(devices) if devices else None) as session:
        session.run(iterator.initializer)
        return _speed(lambda: session.run(step), batch_size, seconds)


class _Steps:
    """The steps of a training, in a graph and a session of their own; a context manager."""

    def __init__(self, trial, stage_inputs, batch_size):
        self._batch_size = batch_size
        self._speeds = []
        self._waited = self._seconds = 0.
        graph = tf.Graph()
        with graph.as_default():
            made = trial(stage_inputs)
            self._watch = InputWatch(made.train_op, made.built.staged)
            initializers = [[tf.global_variables_initializer(), tf.local_variables_initializer()],
                            [tf.tables_initializer(), self._watch.initializer]
                            + list(made.initializers)]
        self._session = tf.Session(graph=graph, config=made.config)
        self._train_op = made.train_op
        self._input_initializers, self._failed = list(made.initializers), False
        for each in initializers:
            self._session.run(each)

    def __enter__(self):
        return self

    def __exit__(self, *unused_exception):
        self._session.close()

    def measure(self, seconds):
        """Runs steps for so many seconds, and takes their rate and their waiting time."""
        if self._failed:  # in the batch that the iterator was at
            self._session.run(self._input_initializers)
        marks, self._failed = [], True
        self._speeds.append(_speed(lambda: self._session.run(self._train_op), self._batch_size,
                                   seconds, lambda: marks.append(self._watch.read(self._session))))
        self._failed = False
        span = self._watch.span(self._watch.read(self._session), marks[0])
        self._waited += span.waited
        self._seconds += span.seconds

    @property
    def rate(self):
        """Examples a second: the median of the measurements."""
        return self._median('rate')

    @property
    def busy(self):
        """Share of all processors that was used, 0..1: the median of the measurements."""
        return self._median('busy')

    @property
    def waiting(self):
        """Share of the steps' time that was waiting for input, 0..1, over all measurements."""
        return min(1., self._waited / self._seconds) if self._seconds else 0.

    def _median(self, field):
        return sorted(getattr(speed, field) for speed in self._speeds)[len(self._speeds) // 2]


_Speed = collections.namedtuple('_Speed', 'rate busy')
"""Examples a second, and the share of all processors that this process used meanwhile, 0..1."""


def _speed(run, batch_size, seconds, on_start=lambda: None):
    """The `_Speed` of a function that does a step, after a warm-up.

    Args:
      run: function without arguments that does a step of `batch_size` examples.
      batch_size: an int.
      seconds: least length of the measurement.
      on_start: function without arguments, called between warm-up and measurement.
    """
    begin, steps = time.perf_counter(), 0
    while steps < _WARM_UP_STEPS or (time.perf_counter() - begin < seconds / 4 and steps < 1000):
        run()
        steps += 1
    on_start()
    used, begin, steps = time.process_time(), time.perf_counter(), 0
    while steps < _LEAST_STEPS or time.perf_counter() - begin < seconds:
        run()
        steps += 1
    taken = time.perf_counter() - begin
    return _Speed(steps * batch_size / taken,
                  min(1., (time.process_time() - used) / taken / _processors()))


def _processors():
    """How many processors this process may use."""
    if hasattr(os, 'sched_getaffinity'):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(rate):
    """A rate as text: `'1,234'`, `'3.4'`."""
    return ('{:,.0f}' if rate >= 10 else '{:.2g}').format(rate)
