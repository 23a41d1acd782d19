"""What train.py finds out by running steps that train nothing: memory, and which side is slower.

`--mode=diagnose` measures a training's two sides, each alone, and both together:

    pipeline   examples a second that the input pipeline delivers when nothing else runs
    towers     examples a second of the same steps on one batch over and over, from memory
    together   examples a second of the training itself
"""

import collections
import contextlib
import functools
import statistics
import time

import tensorflow.compat.v1 as tf

import towers
from towers.memory.measure import count_on_cpus
from towers.nonfinite import explained
from trainer.arguments import memory_limit, session_config
from trainer.data import naming_failures
from trainer.flags import FLAGS, MOST_EXAMPLES, train_dir
from trainer.job import build_job, parts_of_batch
from trainer.run_settings import recorded_setting

_BEHIND = .9  # a speed below this share of another one counts as slower
_ROUNDS = 3  # of measuring the pipeline, the towers, and both together: their median counts
_WARM_UP_STEPS = 3  # two prefetched batches, and the one in the making


def show_memory(setup):
    """Prints where the memory of a step goes, and draws it (--memory_plot)."""
    count_on_cpus()
    with naming_failures():
        towers.memory_report(_measured(setup), setup.batch_size, memory_limit(),
                             FLAGS.memory_plot or None, session_config, _say)


def choose_batch_size(setup):
    """The batch size for --batch_size=auto, an int: as recorded in --train_dir, else the largest
    one that fits into memory. Prints the choice."""
    count_on_cpus()
    parts = parts_of_batch(len(towers.resolve_devices(FLAGS.devices or FLAGS.num_towers)))
    recorded = recorded_setting('batch_size')
    if type(recorded) is int and 0 < recorded <= MOST_EXAMPLES and recorded % parts == 0:
        print('batch %d: as the run in %s was last started' % (recorded, train_dir()), flush=True)
        return recorded
    with naming_failures():
        return towers.fit_batch_size(_measured(setup), parts, memory_limit(), _say, session_config,
                                     setup.dataset.num_examples['train']).batch_size


def _measured(setup):
    """The function of a batch size that `memory_report` and `fit_batch_size` build a step with."""
    def build(batch_size):
        tf.set_random_seed(FLAGS.seed)
        job = build_job(setup._replace(batch_size=batch_size))
        return job.built, [job.iterator.initializer]
    return build


_say = functools.partial(print, flush=True)


# ---- Diagnosis -----------------------------------------------------------------------------------

class Diagnosis(collections.namedtuple('Diagnosis', 'pipeline towers together waiting unit')):
    """The measured speeds, in examples a second, and the share of the training's time that was
    waiting for input; `print(diagnosis)` shows them, with a verdict."""
    __slots__ = ()

    @property
    def side(self):
        """The slower side: `'towers'`, `'input'`, or `'both'`, which slow each other down: on the
        same processors, or because they take turns."""
        if self.together >= _BEHIND * self.towers:
            return 'towers'
        return 'input' if self.pipeline < _BEHIND * self.towers else 'both'

    @property
    def verdict(self):
        """One sentence: which side limits the run, by how much, and what to change."""
        lost = 100 * (1 - self.together / self.towers)
        if self.side == 'towers':
            return ('The towers hold the run back: a faster input would bring %.0f %% at most; '
                    'more or faster devices, or a cheaper model, would bring more.' % max(
                        0, 100 * (self.towers / self.together - 1)))
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
        lines = ['%-16s %10s %ss/s  %s' % (
            name, ('{:,.0f}' if rate >= 10 else '{:.2g}').format(rate), self.unit, note)
                 for name, rate, note in (
                     ('pipeline alone', self.pipeline, ''),
                     ('towers alone', self.towers, 'on a batch in memory'),
                     ('together', self.together, 'waiting for input for %.0f %% of the time'
                      % (100 * self.waiting)))] + [self.verdict]
        if self.together * _BEHIND > min(self.pipeline, self.towers):
            lines.append('The numbers are rough, since something else used the processors, or they '
                         'were too short: measure again, longer (diagnose_seconds of --config).')
        return '\n'.join(line.rstrip() for line in lines)


def diagnose(setup):
    """Measures the pipeline, the towers, and both: a `Diagnosis` to be printed.

    Raises:
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
    """
    seconds = FLAGS.diagnose_seconds
    _say('measuring      3 times %g s, with warm-ups about %.0f s, and the time to build the '
         'towers twice' % (seconds, 3.75 * seconds))
    held = setup._replace(dataset=_OneBatch(setup.dataset))
    with naming_failures():
        try:
            with contextlib.ExitStack() as sessions:
                measures = [sessions.enter_context(_timed(build)) for build in (
                    lambda: _reading(setup), lambda: _training(held), lambda: _training(setup))]
                # In turns: other load on the machine slows all alike.
                rounds = [[measure(seconds / _ROUNDS) for measure in measures]
                          for _ in range(_ROUNDS)]
        except tf.errors.OpError as error:
            raise explained(error) or error from None
    rates, shares = zip(*[map(statistics.median, zip(*found)) for found in zip(*rounds)])
    return Diagnosis(*rates, shares[-1], setup.model.unit)


class _OneBatch:
    """A data set whose training batches are all its first one, from memory."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def train_batches(self, **arguments):
        """As of the data set."""
        return self._dataset.train_batches(**arguments).take(1).cache().repeat()


_Steps = collections.namedtuple('_Steps', 'step examples waited initializers config')
"""Operations to be timed: a step, how many examples it has, the seconds that it waits for its
input, what the session runs first, one after the other; and the config of the session."""


def _training(setup):
    """The `_Steps` of a training."""
    tf.set_random_seed(FLAGS.seed)
    job = build_job(setup, with_evaluation=False)
    begin = [tf.global_variables_initializer(), tf.local_variables_initializer(),
             tf.tables_initializer(), job.iterator.initializer]
    sizes = [tf.cast(tower.size, tf.int64) for tower in job.built.towers]
    return _Steps(job.train_op, tf.add_n(sizes), job.input_wait, begin, session_config(job.built))


def _reading(setup):
    """The `_Steps` that read the batches of a training, and do nothing with them."""
    iterator = tf.data.make_initializable_iterator(setup.dataset.train_batches(
        batch_size=setup.batch_size, seed=FLAGS.seed, shift=FLAGS.augment_shift,
        remainder=FLAGS.remainder, **setup.model.image_format))
    leaves = tf.nest.flatten(iterator.get_next(), expand_composites=True)
    counted = [tf.shape(leaf)[0] for leaf in leaves if leaf.shape.ndims]
    return _Steps(tf.group(*leaves), (counted + [setup.batch_size])[0], 0, [iterator.initializer],
                  None)


@contextlib.contextmanager
def _timed(build):
    """A session of the `_Steps` that a function builds: yields a function of seconds that runs
    them for so long, after a warm-up, and returns `(examples a second, share of waiting)`."""
    with tf.Graph().as_default() as graph:
        steps = build()
        fetches = [tf.convert_to_tensor(each) for each in (steps.examples, steps.waited)]
    with tf.Session(graph=graph, config=steps.config) as session:
        for each in steps.initializers:
            session.run(each)
        step = session.make_callable(fetches + [steps.step])

        def run(least, seconds):
            begin, done = time.perf_counter(), []
            while len(done) < least or time.perf_counter() - begin < seconds:
                done.append(step()[:2])
            examples, waited = map(sum, zip(*done))
            taken = time.perf_counter() - begin
            return examples / taken, min(1., waited / taken)

        def measure(seconds):
            run(_WARM_UP_STEPS, seconds / 4)  # takes the batches that were prefetched before
            return run(2, seconds)
        yield measure
