"""Writes the figures of a run to `metrics.jsonl`, step by step."""

import os
import time

import tensorflow.compat.v1 as tf

from towers.checkpoint.files import list_checkpoints
from towers.run.step_clock import SaveListener, StepClock, rate, share_waited
from towers.run.step_loop import OccasionalHook
from trainer.metrics_log import MetricsLog


class MetricsHook(OccasionalHook):
    """Writes a line of `metrics.jsonl` at each multiple of `log_every` steps and at the last step.

    After a kill the file has the lines of a run that was never killed: which steps have a line
    depends on the step alone, and a run that goes on from a step cuts the lines of later ones. For
    that the line of a step has to be on the disk before its checkpoint is: give `listener` to the
    hook that saves, and put this hook and the hook that evaluates before it in the list of hooks.

    Attributes:
      listener: a `CheckpointSaverListener`.
      log: the `MetricsLog`.
    """

    def __init__(self, values, counts, path, log_every=100, *, say=print, input_wait=None,
                 unit='images'):
        """
        Args:
          values: list of pairs of a name and a scalar tensor, fetched with every step: `loss`,
            `learning_rate`, ….
          counts: `StepCounts` with `examples_per_epoch`, whose `last_step`, if given, has a line
            whatever its number.
          path: of the file, such as `train_dir + '/metrics.jsonl'`.
          log_every: steps from one line to the next.
          say: called with the line about what was cut or renamed, see `MetricsLog.resume`. A run
            is new if it is at step 0 and there is no checkpoint beside the file.
          input_wait: as for `ProgressHook`, for `input_wait` in each line: the share of the time
            since the line before that was waiting for input, 0..1; or None.
          unit: the name of the examples, as in `images_per_second`.
        """
        self._fetches = {'logged': dict(values)}
        if input_wait is not None:
            self._fetches['waited'] = input_wait
        self.log = MetricsLog(path)
        self._clock = StepClock(counts)
        self.listener = SaveListener(self._clock, lambda step: self.log.sync())
        self._examples_per_epoch = counts.examples_per_epoch
        self._log_every = log_every
        self._last_step = counts.last_step
        self._say = say
        self._unit = unit
        self._is_first_session = True
        self._writes = self._ended = False
        self._since = 0
        self._mark = None

    def after_create_session(self, session, coord):
        """Cuts the lines of steps after the restored one; renames the file of another run."""
        self._clock.restart(session)
        self._since, self._mark = self._clock.step, None
        self._writes = self._ended = False
        is_new = (self._is_first_session and self._clock.step == 0
                  and not list_checkpoints(os.path.dirname(os.path.abspath(self.log.path))))
        self._is_first_session = False
        told = self.log.resume(self._clock.step, is_new)
        if told is not None:
            self._say(told)

    def before_run(self, run_context):
        """Fetches the values."""
        self._writes = self.is_due()
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        """Counts the step, and puts its line, if it has one, into the log."""
        clock = self._clock
        self.step_done(run_values.results)
        if not self._writes:
            return
        self._writes = False
        clock.read(run_context.session)
        if not clock.passed(self._since, self._log_every, self._last_step):
            return
        self._since = clock.step
        speed, share = rate(self._mark, clock.mark), share_waited(self._mark, clock.mark)
        self._mark = clock.mark
        line = {'epoch': round(clock.examples / self._examples_per_epoch, 6),
                'examples': clock.examples}
        line.update(run_values.results['logged'])
        line[self._unit + '_per_second'] = None if speed is None else round(speed, 3)
        if 'waited' in self._fetches:
            line['input_wait'] = None if share is None else round(share, 4)
        line['wall_time'] = round(time.time(), 3)
        self.log.add(clock.step, line)

    def is_due(self):
        """Whether the coming step has a line.

        Also writes the line of the step before, which would be lost if the coming step failed.
        """
        self.log.flush()
        return self._clock.comes_to(self._log_every, self._last_step)

    def step_done(self, fetched):
        """Counts a step."""
        self._clock.count(fetched.get('waited', 0.))
        if self._mark is None:
            self._mark = self._clock.mark

    def always_fetched(self):
        """The values."""
        return self._fetches

    def end(self, session):
        """Writes the line that is kept back."""
        self._ended = True
        self.log.sync()

    def evaluated(self, step, results, seconds=0., name='test'):
        """Adds the results of an evaluation to the step's line: `test_accuracy`, ….

        Args:
          step: the step whose weights were evaluated: the current one.
          results: dict from names to numbers, as `Evaluation.run` returns it.
          seconds: duration of the evaluation; left out of `images_per_second`.
          name: prefix of the names of the results.

        Raises:
          InvalidArgumentError: a step before the latest one in the file.
        """
        self._clock.away(seconds)
        self.log.add(step, {'%s_%s' % (name, key): value for key, value in results.items()})
        if self._ended:  # the `end` of the hook that evaluates came after this one's
            self.log.sync()
