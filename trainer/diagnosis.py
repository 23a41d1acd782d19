"""Measures which side limits a training, input or towers: each alone, and both together.

    pipeline   examples a second that the input pipeline delivers when nothing else runs
    towers     examples a second of the same steps on one batch over and over, from memory
    together   examples a second of the training itself

The input costs what the training is slower than its steps on a batch in memory. It is the slower
side where the pipeline alone does not keep up with these steps, either; else both are fast enough
alone, and slow each other down: on the same processors, or because they take turns.
"""

import collections
import contextlib
import statistics
import time

import tensorflow.compat.v1 as tf

from towers.nonfinite import explained

_BEHIND = .9  # a speed below this share of another one counts as slower
_ROUNDS = 3  # of measuring the pipeline, the towers, and both together: their median counts
_WARM_UP_STEPS = 3  # two prefetched batches, and the one in the making

_ADVICE = {
    'read': 'put the files on a faster disk, or in memory',
    'decode': 'store the images no larger than the crops need, or give the pipeline more '
              'processors',
    'augment': 'distort less (of --config, augment=crop leaves the colours, augment=none '
               'everything), or give the pipeline more processors',
    'batch': 'make the batch from fewer copies, or give the pipeline more processors',
    None: 'make the pipeline cheaper an example, let it run in parallel '
          '(dataset.map(..., num_parallel_calls)) and ahead (dataset.prefetch), or give it more '
          'processors'}


class Diagnosis(collections.namedtuple('Diagnosis', [
        'pipeline', 'towers', 'together', 'waiting', 'stages', 'unit'],
                                       defaults=({}, 'images'))):
    """The measured speeds; `print(diagnosis)` shows them, with a verdict.

    Attributes:
      pipeline, towers, together: examples a second.
      waiting: share of the steps' time that was waiting for input in the training itself, 0..1.
      stages: dict from the pipeline's stages, in their order, to seconds an example.
      unit: the name of the examples.
    """
    __slots__ = ()

    @property
    def side(self):
        """The slower side: `'towers'`, `'input'`, or `'both'`, which slow each other down."""
        if self.together >= _BEHIND * self.towers:
            return 'towers'
        return 'input' if self.pipeline < _BEHIND * self.towers else 'both'

    @property
    def verdict(self):
        """One sentence: which side limits the run, by how much, and what to change."""
        name, advice = self._slowest_stage()
        lost = 100 * (1 - self.together / self.towers)
        if self.side == 'towers':
            return ('The towers hold the run back: a faster input would bring %.0f %% at most; '
                    'more or faster devices, or a cheaper model, would bring more.' % max(
                        0, 100 * (self.towers / self.together - 1)))
        if self.side == 'input':
            return ('The input holds the run back, which loses %.0f %% of the speed of the towers; '
                    '%s%s.' % (lost, '' if name is None else
                               "%s takes %.0f %% of the pipeline's time: " % (
                                   name, 100 * self.stages[name] / sum(self.stages.values())),
                               advice))
        return ('Input and towers hold each other back: alone each is faster, and the run loses '
                '%.0f %% of the speed of the towers; where processors are idle, make the next '
                'batch during the step (dataset.prefetch, more --inter_op_threads); else %s, or '
                'make the input on other processors.' % (lost, advice))

    def _slowest_stage(self):
        """`(name, advice)` of the slowest of the pipeline's stages; the name may be None."""
        name = max(self.stages, key=self.stages.get) if len(self.stages) > 1 else None
        return name, _ADVICE.get(name, _ADVICE[None])

    def __str__(self):
        lines = ['%-16s %10s %s/s  %s' % (name, _shown(rate), self.unit, note)
                 for name, rate, note in (
                     ('pipeline alone', self.pipeline, ''),
                     ('towers alone', self.towers, 'on a batch in memory'),
                     ('together', self.together, 'waiting for input for %.0f %% of the time'
                      % (100 * self.waiting)))]
        whole = sum(self.stages.values())
        lines += ['  %-14s %10.3g ms each, %.0f %%' % (name, 1e3 * seconds, 100 * seconds / whole)
                  for name, seconds in self.stages.items()]
        lines.append(self.verdict)
        if self.together * _BEHIND > min(self.pipeline, self.towers):
            lines.append('The numbers are rough, since something else used the processors, or they '
                         'were too short: measure again, longer (--diagnose_seconds).')
        return '\n'.join(line.rstrip() for line in lines)


class Steps(collections.namedtuple('Steps', 'step examples waited initializers config')):
    """Operations to be timed.

    Attributes:
      step: the operation of a step.
      examples: how many examples it has, an int or a tensor.
      waited: seconds that it waits for its input, a tensor; or 0.
      initializers: list of operations that the session runs first, one after the other.
      config: of the session; or None.
    """
    __slots__ = ()


def steps_of(job, config):
    """The `Steps` of a training.

    Args:
      job: `Job`.
      config: of its session.
    """
    begin = [tf.global_variables_initializer(), tf.local_variables_initializer(),
             tf.tables_initializer(), job.iterator.initializer]
    sizes = [tf.cast(tower.size, tf.int64) for tower in job.built.towers]
    return Steps(job.train_op, tf.add_n(sizes), job.input_wait, begin, config)


def diagnose(train, batches, batch_size, stages=None, *, seconds=5., unit='images',
             say=lambda line: None):
    """Measures the pipeline, the towers, and both together.

    Args:
      train: function of whether the batch is held, that builds the training in the default graph,
        on one batch from memory over and over or on all of them, and returns its `Steps`.
      batches: function without arguments that makes the `tf.data.Dataset` of training batches.
      batch_size: examples of an element that has no dimension to count them by.
      stages: function without arguments that makes an `OrderedDict` from the names of the
        pipeline's stages to datasets, each of them the pipeline up to that stage, and the last one
        all of it; or None.
      seconds: least length of each measurement, without its warm-up.
      unit: the name of the examples.
      say: called with a line that says how long it takes, before it begins.

    Returns:
      `Diagnosis`.

    Raises:
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
    """
    names = []
    if stages is not None:
        with tf.Graph().as_default():
            names = list(stages())[:-1]
    count = len(names) + 3
    say('measuring      %d times %g s, with warm-ups about %.0f s, and the time to build the '
        'towers twice' % (count, seconds, 1.25 * count * seconds))
    try:
        upto = collections.OrderedDict()
        for name in names:
            with _Measured(lambda: _reading(stages()[name], batch_size)) as stage:
                stage.measure(seconds)
            upto[name] = stage.rate
        with contextlib.ExitStack() as sessions:
            measured = [sessions.enter_context(_Measured(build)) for build in (
                lambda: _reading(batches(), batch_size), lambda: train(True),
                lambda: train(False))]
            for _ in range(_ROUNDS):  # in turns, so that other load on the machine slows all alike
                for each in measured:
                    each.measure(seconds / _ROUNDS)
    except tf.errors.OpError as error:
        raise explained(error) or error from None
    upto['batch'] = measured[0].rate
    return Diagnosis(*[each.rate for each in measured], measured[-1].waiting,
                     _spent(upto) if names else {}, unit)


def _reading(dataset, batch_size):
    """The `Steps` that read a dataset, and do nothing with it."""
    iterator = tf.data.make_initializable_iterator(dataset)
    leaves = tf.nest.flatten(iterator.get_next(), expand_composites=True)
    counted = [tf.shape(leaf)[0] for leaf in leaves if leaf.shape.ndims]
    return Steps(tf.group(*leaves), (counted + [batch_size])[0], 0, [iterator.initializer], None)


def _spent(upto):
    """`OrderedDict` of the seconds an example that each stage adds to those before it.

    Args:
      upto: `OrderedDict` from stages to examples a second of the pipeline up to each.
    """
    spent, before = collections.OrderedDict(), 0.
    for name, rate in upto.items():
        spent[name] = max(0., 1. / rate - before)
        before = max(before, 1. / rate)
    return spent


class _Measured:
    """Steps in a graph and a session of their own; a context manager that closes it."""

    def __init__(self, build):
        """
        Args:
          build: function without arguments that makes the `Steps` in the default graph.
        """
        self._rates, self._waited, self._seconds = [], 0., 0.
        with tf.Graph().as_default() as graph:
            steps = build()
            fetches = [tf.convert_to_tensor(each) for each in (steps.examples, steps.waited)]
            self._session = tf.Session(graph=graph, config=steps.config)
        for each in steps.initializers:
            self._session.run(each)
        self._step = self._session.make_callable(fetches + [steps.step])

    def __enter__(self):
        return self

    def __exit__(self, *unused_exception):
        self._session.close()

    def measure(self, seconds):
        """Runs steps for so many seconds, after a warm-up, which takes the batches that were
        prefetched before."""
        self._run(_WARM_UP_STEPS, seconds / 4)
        examples, waited, taken = self._run(2, seconds)
        self._rates.append(examples / taken)
        self._waited += waited
        self._seconds += taken

    def _run(self, least, seconds):
        """Runs steps; returns their examples, and the seconds that they waited and took."""
        begin, done = time.perf_counter(), []
        while len(done) < least or time.perf_counter() - begin < seconds:
            done.append(self._step()[:2])
        return tuple(map(sum, zip(*done))) + (time.perf_counter() - begin,)

    @property
    def rate(self):
        """Examples a second: the median of the measurements."""
        return statistics.median(self._rates)

    @property
    def waiting(self):
        """Share of the steps' time that was waiting for input, 0..1, over all measurements."""
        return min(1., self._waited / self._seconds)


def _shown(rate):
    """A rate as text: `'1,234'`, `'3.4'`."""
    return ('{:,.0f}' if rate >= 10 else '{:.2g}').format(rate)
