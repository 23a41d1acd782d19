"""Measures which side limits a training, input or towers: each alone, and both together.

    pipeline   examples a second that the input pipeline delivers when nothing else runs
    towers     examples a second that the towers take from their own devices' memory
    together   examples a second of the training itself

Where nothing is in the way, an example of the training takes as long as the slower one of the two,
or as long as the processors need for both:

    at best    1 / together = max(1 / pipeline, 1 / towers, b / pipeline + c / towers)
    in turns   1 / together = 1 / pipeline + 1 / towers

with b and c the shares of all processors that pipeline and towers use when they are alone. A
training that is clearly slower than at best while processors are idle, and waits for input, takes
turns: the pipeline does not work ahead. One that is slower than the slower one of the two, and
leaves no processors idle, has too few of them.
"""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers.nonfinite import explained
from towers.placement.devices import resolve_devices
from towers.placement.tower_device import stages_of
from trainer.speeds import PipelineSpeed, StepsSpeed
from trainer.verdicts import BARELY, BEHIND, IDLE, ROUNDS, sentence, shown_rate

Trial = collections.namedtuple('Trial', 'train_op initializers config built')
"""A training to be timed, in the default graph.

Fields:
  train_op: the operation of a step.
  initializers: list of operations to run after the variables' initializers, as the iterator's.
  config: of the session.
  built: what `build_towers` returned.
"""

_STAGES_BEHIND = .8  # as `BEHIND`, of the pipeline's stages, which are measured minutes apart
_STEADY = .1  # measurements of one thing that differ by less are long enough
_USABLE = .85  # of the processors' time, by two kinds of work that wait for each other now and then


class Diagnosis(collections.namedtuple('Diagnosis', [
        'pipeline', 'towers', 'together', 'waiting', 'stages', 'busy', 'seconds', 'spread',
        'others'], defaults=(None, 5., None, 0.))):
    """The measured speeds; `print(diagnosis)` shows them, with a verdict.

    Attributes:
      pipeline, towers, together: examples a second.
      waiting: share of the steps' time that was waiting for input in the training itself, 0..1.
      stages: `OrderedDict` from the pipeline's stages to seconds an example.
      busy: shares of all processors, 0..1, that pipeline, towers and both used; None: not known.
      seconds: length of each measurement.
      spread: by which part of their median the repeated measurements of one thing differed at
        most, 0..; None: not known.
      others: share of all processors, 0..1, that other programs used while both were measured.
    """
    __slots__ = ()

    @property
    def side(self):
        """The slower side: `'input'` or `'towers'`; `'both'` where they slow each other down on the
        same processors; `'turns'` where they wait for each other although the processors would do
        for both; `'balanced'` where they are about as fast as each other; `'unclear'` where the
        measurements contradict each other."""
        if self.contradiction:
            return self._side_of_rough_numbers() or 'unclear'
        pipeline, towers = self.at_least()
        if self.busy is not None and self.together < BEHIND * min(pipeline, towers):
            if self.waiting < BARELY:  # whatever slows the steps, it is no batch that comes late
                return 'both'
            # Processors are not what they wait for where some are left, or both need next to none.
            if ((self.idle() > IDLE or self.needed() < IDLE)
                    and self.together < BEHIND * self.at_best(_USABLE)):
                return 'turns'
            # Where the input alone costs more speed than the processors do, it is the input.
            return 'both' if self.together * towers < pipeline * pipeline else 'input'
        if pipeline < BEHIND * towers:
            return 'input'
        if towers < BEHIND * pipeline:
            return 'towers' if self.together >= BEHIND * towers else 'both'
        return 'balanced'

    @property
    def in_turns(self):
        """Examples a second if pipeline and towers took turns: the lower bound of `together`."""
        return 1. / (1. / self.pipeline + 1. / self.towers)

    def at_best(self, usable=1.):
        """Examples a second of both at once, with this share of the processors' time for them,
        where other programs leave it."""
        pipeline, towers = self.at_least()
        needed = self._seconds() / (usable * max(IDLE, 1 - self.others))
        return 1. / max(1. / pipeline, 1. / towers, needed)

    def needed(self):
        """Share of all processors that both at once need, at the speed of the slower one."""
        return self._seconds() * min(self.at_least())

    def _seconds(self):
        """Seconds of all processors that an example needs, on both sides; 0 where not known."""
        return 0. if self.busy is None else (
            self.busy[0] / self.pipeline + self.busy[1] / self.towers)

    def idle(self):
        """Share of all processors that nobody used while both were measured, 0..1."""
        return max(0., 1 - self.busy[2] - self.others)

    def _side_of_rough_numbers(self):
        """The side that is the slower one by far more than the measurements contradict each other,
        if the steps' own waiting time says so, too; else None.

        Towers are not held back on the same processors, either, where the input needs next to none.
        """
        if self.busy is None:
            return None
        least = min(self.pipeline, self.towers)
        rough = 2 * (1 + (self.spread or 0.)) * max(self.together / least,
                                                    self.in_turns / self.together)
        needs = [busy / rate for busy, rate in zip(self.busy, (self.pipeline, self.towers))]
        if (self.pipeline > rough * self.towers and self.waiting < BARELY
                and needs[0] < BARELY * needs[1]):
            return 'towers'
        if self.towers > rough * self.pipeline and self.waiting > .5:
            return 'input'
        return None

    def at_least(self):
        """`(pipeline, towers)`, examples a second: no less than what both reached together."""
        return max(self.pipeline, self.together), max(self.towers, self.together)

    @property
    def is_steady(self):
        return self.spread is not None and self.spread < _STEADY

    @property
    def contradiction(self):
        """What cannot be true of the measurements, as text; '' where they agree, or where they are
        so steady that what they say of the side is true all the same."""
        least = min(self.pipeline, self.towers)
        if self.together < BEHIND * self.in_turns:
            return 'together they are slower than if they took turns (%s images/s)' % shown_rate(
                self.in_turns)
        if self.is_steady:
            return ''
        if self.together * BEHIND > least:
            return 'together they reached %s images/s, and %s alone just %s' % (
                shown_rate(self.together),
                'the pipeline' if least == self.pipeline else 'the towers', shown_rate(least))
        return '' if self.stages_agree else (
            'the first stages of the pipeline took longer than the whole of it')

    @property
    def stages_agree(self):
        return sum(self.stages.values()) * self.pipeline * _STAGES_BEHIND <= 1

    @property
    def verdict(self):
        """One sentence: which side limits the run, by how much, and what to change."""
        return sentence(self)

    def __str__(self):
        rows = [('pipeline alone', self.pipeline, []),
                ('towers alone', self.towers, ['from their own memory']),
                ('together', self.together, ['waiting for input for %.0f %% of the time'
                                             % (100 * self.waiting)])]
        for (_, _, notes), busy in zip(rows, self.busy or ()):
            notes.append('processors %.0f %% busy' % (100 * busy))
        if self.others > IDLE:
            rows[2][2].append('%.0f %% with other programs' % (100 * self.others))
        lines = ['%-16s %10s images/s  %s' % (name, shown_rate(rate), ', '.join(notes))
                 for name, rate, notes in rows]
        whole = sum(self.stages.values())
        for name, seconds in self.stages.items():
            lines.append('  %-14s %10.3g ms an image, %.0f %%' % (
                name, 1e3 * seconds, 100 * seconds / whole if whole else 0))
        return '\n'.join(line.rstrip() for line in lines + [self.verdict])


def diagnose(trial, batches, devices, batch_size, stages=None, *, seconds=5., trial_alone=None,
             mend=lambda error: False, say=lambda line: None):
    """Measures the pipeline, the towers, and both together.

    Args:
      trial: function without arguments that builds the training in the default graph, and returns
        a `Trial`.
      batches: function without arguments that makes the `tf.data.Dataset` of training batches,
        whose examples are counted.
      devices: the towers' devices, as for `build_towers`.
      batch_size: examples of an element of a stage that has no dimension to count them by.
      stages: function without arguments that makes an `OrderedDict` from the names of the
        pipeline's stages to datasets, each of them the pipeline up to that stage, with elements of
        `batch_size` examples; or None.
      seconds: least length of each measurement, without its warm-up.
      trial_alone: as `trial`, of steps on batches of one size, for the towers alone; None: `trial`.
      mend: function of the `tf.errors.OpError` of a batch or step: returns whether it has taken
        out what failed, in what the pipeline reads; the measurement then begins anew.
      say: called with a line that says how long it takes, before it begins.

    Returns:
      `Diagnosis`.

    Raises:
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
    """
    devices = resolve_devices(devices)
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
        with PipelineSpeed(make, batch_size, *devices) as pipeline:
            _mending(lambda: pipeline.measure(seconds), mend)
            return pipeline.rate
    for name in names[:-1]:
        upto[name] = measure(lambda name=name: stages()[name])
    if copies:
        upto['batch' if names else 'pipeline'] = measure(batches)
    with contextlib.ExitStack() as sessions:
        pipeline = sessions.enter_context(
            PipelineSpeed(batches, batch_size, devices if copies else ()))
        alone = sessions.enter_context(StepsSpeed(trial_alone or trial, holds_batch=True))
        both = sessions.enter_context(StepsSpeed(trial))
        measured = pipeline, alone, both
        # In turns, so that other load on the machine slows all alike.
        for _ in range(ROUNDS):
            for each in measured:
                _mending(lambda each=each: each.measure(seconds / ROUNDS), mend)
        upto['copy' if copies else 'batch' if names else 'pipeline'] = pipeline.rate
        return Diagnosis(*[each.rate for each in measured], both.waiting, _spent(upto),
                         tuple(each.busy for each in measured), seconds,
                         max(each.spread for each in measured), both.others)


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
