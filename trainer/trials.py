"""Steps that train nothing: --mode=memory, --batch_size=auto and --mode=diagnose.

`--mode=diagnose` measures a training's two sides, each alone, and both together:

    pipeline   examples a second that the input pipeline delivers when nothing else runs
    towers     examples a second of the same steps on one batch over and over, from memory
    together   examples a second of the training itself

Its test is tests/trainer/test_trainer_trials.py.
"""

import contextlib
import functools
import statistics
import time
import typing

import tensorflow.compat.v1 as tf

import towers
from towers.memory.measure import count_on_cpus
from towers.nonfinite import explained
from trainer.arguments import memory_limit, session_config
from trainer.batch_parts import parts_of_batch
from trainer.data import naming_failures
from trainer.flags import FLAGS, MOST_EXAMPLES, train_dir
from trainer.job import Setup, build_job
from trainer.run_settings import recorded_setting

_BEHIND = .9  # a speed below this share of another speed counts as slower
_ROUNDS = 3  # how often each speed is measured; the median counts
_WARM_UP_STEPS = 3  # these use up two prefetched batches, and the batch that is being made
_WARM_UP_SHARE = .25  # the least time of a warm-up, as a share of the time of the measurement


def show_memory(setup: Setup) -> None:
    """Prints where the memory of a step goes, and draws it (the option memory_plot).

    Args:
      setup: the model, its data, and a batch size.

    Raises:
      MissingPackageError: the picture needs matplotlib.
    """
    count_on_cpus()  # before the first session, so that memory on CPUs is measured, too
    with naming_failures():
        towers.memory_report(
            _build_function(setup), setup.batch_size, memory_limit(),
            path=FLAGS.memory_plot or None, config=session_config, say=_say)


def choose_batch_size(setup: Setup) -> int:
    """Chooses the batch size for --batch_size=auto, and prints it.

    A run that goes on keeps the size with which it was last started, if that divides among the
    towers; a new run gets the largest size that fits into memory.

    Args:
      setup: the model and its data.

    Returns:
      Examples a step on this machine, over all of its towers.
    """
    count_on_cpus()  # before the first session, so that memory on CPUs is measured, too
    devices = towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)
    smallest_batch = parts_of_batch(len(devices))  # each batch is a multiple of it
    recorded = recorded_setting('batch_size')
    is_size = type(recorded) is int and 0 < recorded <= MOST_EXAMPLES  # the file may be edited
    if is_size and recorded % smallest_batch == 0:
        print('batch %d: as the run in %s was last started' % (recorded, train_dir()), flush=True)
        return recorded
    with naming_failures():
        fitted = towers.fit_batch_size(
            _build_function(setup), smallest_batch, memory_limit(), say=_say,
            config=session_config, most=setup.dataset.num_examples['train'])
    return fitted.batch_size


def _build_function(setup: Setup) -> typing.Callable:
    """The function with which `memory_report` and `fit_batch_size` build a step to be measured."""
    def build(batch_size: int) -> typing.Tuple[towers.BuiltTowers, list]:
        """Builds a step; returns the towers, and what a session runs before the first step."""
        tf.set_random_seed(FLAGS.seed)
        job = build_job(setup._replace(batch_size=batch_size))
        return job.built, [job.iterator.initializer]
    return build


_say = functools.partial(print, flush=True)


# ---- Diagnosis -----------------------------------------------------------------------------------

class Diagnosis(typing.NamedTuple):
    """The measured speeds; `print(diagnosis)` shows them, with a verdict.

    Attributes:
      pipeline: examples a second of the input pipeline without towers.
      towers: examples a second of the towers without the pipeline.
      together: examples a second of the training.
      waiting: the share of the training's time that was waiting for input.
      unit: the name of an example.
    """
    pipeline: float
    towers: float
    together: float
    waiting: float
    unit: str

    @property
    def side(self) -> str:
        """The side that limits the run: `'towers'`, `'input'`, or `'both'`.

        `'both'`: the input alone is as fast as the towers alone, but together they slow each other
        down, since they share processors or take turns.
        """
        is_as_fast_as_towers = self.together >= _BEHIND * self.towers
        if is_as_fast_as_towers:
            return 'towers'
        input_is_slower = self.pipeline < _BEHIND * self.towers
        return 'input' if input_is_slower else 'both'

    @property
    def verdict(self) -> str:
        """A sentence about which side limits the run, by how much, and what to change."""
        lost = 100 * (1 - self.together / self.towers)
        if self.side == 'towers':
            gain = max(0, 100 * (self.towers / self.together - 1))
            return ('The towers hold the run back: a faster input would bring %.0f %% at most; '
                    'more or faster devices, or a cheaper model, would bring more.' % gain)
        if self.side == 'input':
            return ('The input holds the run back, which loses %.0f %% of the speed of the towers; '
                    'make the pipeline cheaper an example (smaller files, augment=crop of '
                    '--config), let it run in parallel and ahead (num_parallel_calls, prefetch), '
                    'or give it more processors.' % lost)
        return ('Input and towers hold each other back: alone each is faster, and the run loses '
                '%.0f %% of the speed of the towers; where processors are idle, make the next '
                'batch during the step (dataset.prefetch, more inter_op_threads of --config); else '
                'make the input cheaper, or on other processors.' % lost)

    def __str__(self):
        """A line for each speed, and the verdict."""
        share = 'waiting for input for %.0f %% of the time' % (100 * self.waiting)
        lines = [self._line('pipeline alone', self.pipeline, ''),
                 self._line('towers alone', self.towers, 'on a batch in memory'),
                 self._line('together', self.together, share),
                 self.verdict]
        # Both together cannot be faster than either alone: then the measurements disagree.
        if self.together * _BEHIND > min(self.pipeline, self.towers):
            lines.append('The measurements contradict each other: something else used the '
                         'processors, or they took too little time. Measure again, longer '
                         '(diagnose_seconds of --config).')
        return '\n'.join(lines)

    def _line(self, name: str, rate: float, note: str) -> str:
        """The line about a speed, in examples a second, with a note."""
        number = '{:,.0f}'.format(rate) if rate >= 10 else '{:.2g}'.format(rate)
        return ('%-16s %10s %ss/s  %s' % (name, number, self.unit, note)).rstrip()


def diagnose(setup: Setup) -> Diagnosis:
    """Measures the pipeline, the towers, and both, each for `diagnose_seconds` of --config.

    Args:
      setup: the model, its data, and a batch size.

    Returns:
      The medians of three rounds: a `Diagnosis` to be printed.

    Raises:
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
    """
    seconds = FLAGS.diagnose_seconds
    seconds_with_warm_up = (1 + _WARM_UP_SHARE) * seconds
    _say('measuring      3 times %g s, with warm-ups about %.0f s, and the time to build the '
         'towers twice' % (seconds, 3 * seconds_with_warm_up))
    on_one_batch = setup._replace(dataset=_OneBatch(setup.dataset))
    pipeline = []  # a `_Speed` for each round
    towers_alone = []
    together = []
    with naming_failures():
        try:
            with _timed(lambda: _reading(setup)) as measure_pipeline, \
                    _timed(lambda: _training(on_one_batch)) as measure_towers, \
                    _timed(lambda: _training(setup)) as measure_together:
                for _ in range(_ROUNDS):  # in turns, so that other load slows all three alike
                    pipeline.append(measure_pipeline(seconds / _ROUNDS))
                    towers_alone.append(measure_towers(seconds / _ROUNDS))
                    together.append(measure_together(seconds / _ROUNDS))
        except tf.errors.OpError as error:
            nonfinite = explained(error)  # None for an error of another kind
            if nonfinite is not None:
                raise nonfinite from None
            raise
    return Diagnosis(
        pipeline=_median_rate(pipeline), towers=_median_rate(towers_alone),
        together=_median_rate(together),
        waiting=statistics.median(speed.waiting for speed in together), unit=setup.model.unit)


class _OneBatch:
    """A data set that gives its first training batch over and over, from memory."""

    def __init__(self, dataset: typing.Any):
        """`dataset` is the data set with the batch."""
        self._dataset = dataset

    def __getattr__(self, name: str) -> typing.Any:
        """Any other attribute, from the data set."""
        return getattr(self._dataset, name)

    def train_batches(self, **arguments) -> tf.data.Dataset:
        """The first batch of the data set for these arguments, over and over."""
        return self._dataset.train_batches(**arguments).take(1).cache().repeat()


class _Steps(typing.NamedTuple):
    """A step to be timed.

    Attributes:
      step: the operation of the step.
      examples: the number of examples of the step, a scalar.
      waited: the seconds that the step waits for its input, a scalar.
      initializers: the operations that a session runs first, one after the other: the initializer
        of an iterator reads a variable, which says where the batches begin.
      config: the config of the session; None for the default.
    """
    step: tf.Operation
    examples: typing.Any
    waited: typing.Any
    initializers: list
    config: typing.Optional[tf.ConfigProto]


class _Speed(typing.NamedTuple):
    """The measured speed of some steps.

    Attributes:
      examples: examples a second.
      waiting: the share of the time that was waiting for input.
    """
    examples: float
    waiting: float


def _median_rate(speeds: typing.Iterable[_Speed]) -> float:
    """The median of the examples a second."""
    return statistics.median(speed.examples for speed in speeds)


def _training(setup: Setup) -> _Steps:
    """The step of a training, without evaluation."""
    tf.set_random_seed(FLAGS.seed)
    job = build_job(setup, with_evaluation=False)
    initializers = [tf.global_variables_initializer(), tf.local_variables_initializer(),
                    tf.tables_initializer(), job.iterator.initializer]
    shard_sizes = [tf.cast(tower.size, tf.int64) for tower in job.built.towers]
    return _Steps(job.train_op, examples=tf.add_n(shard_sizes), waited=job.input_wait,
                  initializers=initializers, config=session_config(job.built))


def _reading(setup: Setup) -> _Steps:
    """A step that reads a batch of a training, and does nothing with it.

    All of its time is reading, so that no wait is measured.
    """
    iterator = tf.data.make_initializable_iterator(setup.dataset.train_batches(
        batch_size=setup.batch_size, seed=FLAGS.seed, shift=FLAGS.augment_shift,
        remainder=FLAGS.remainder, **setup.model.image_format))
    leaves = tf.nest.flatten(iterator.get_next(), expand_composites=True)
    return _Steps(tf.group(*leaves), examples=setup.batch_size, waited=0,
                  initializers=[iterator.initializer], config=None)


@contextlib.contextmanager
def _timed(build: typing.Callable[[], _Steps]) -> typing.Iterator[typing.Callable]:
    """A context with a session in which a step can be measured.

    Args:
      build: function that makes the `_Steps` in the default graph.

    Yields:
      A function that runs the step for a number of seconds, after a warm-up, and returns its
      `_Speed`.
    """
    with tf.Graph().as_default() as graph:
        steps = build()
        fetches = [tf.convert_to_tensor(steps.examples), tf.convert_to_tensor(steps.waited)]
    with tf.Session(graph=graph, config=steps.config) as session:
        for initializer in steps.initializers:
            session.run(initializer)
        run_step = session.make_callable(fetches + [steps.step])

        def measure(seconds: float) -> _Speed:
            """Measures after a warm-up, which uses up the batches that were prefetched."""
            _run_for(_WARM_UP_SHARE * seconds, run_step, least_steps=_WARM_UP_STEPS)
            return _run_for(seconds, run_step, least_steps=2)
        yield measure


def _run_for(seconds: float, run_step: typing.Callable, least_steps: int) -> _Speed:
    """Runs a step for so many seconds, and at least `least_steps` times; returns its speed.

    Args:
      seconds: how long to run it.
      run_step: function that runs the step; returns `(examples, seconds that it waited, …)`.
      least_steps: the least number of runs.
    """
    begin = time.perf_counter()
    examples = 0
    waited = 0.
    num_steps = 0
    while num_steps < least_steps or time.perf_counter() - begin < seconds:
        examples_of_step, waited_in_step, _ = run_step()
        examples += examples_of_step
        waited += waited_in_step
        num_steps += 1
    passed = time.perf_counter() - begin
    # `waited` is measured by TensorFlow's clock, and `passed` by Python's: their quotient may be a
    # little above 1.
    return _Speed(examples / passed, min(1., waited / passed))
