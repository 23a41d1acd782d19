"""Traces of some steps of a run: Chrome's, with a row for each tower, and TensorBoard's profile."""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.run.step_clock import StepClock
from towers.run.step_loop import OccasionalHook


class ProfileHook(OccasionalHook):
    """Traces the step `first` for Chrome, and the steps after it, up to `last`, for TensorBoard.

    Not the same steps for both: TensorFlow has one tracer. The trace for Chrome, by
    `tf.train.ProfilerHook`, is the file `timeline-<step>.json`, whose rows are devices, and so
    towers. TensorBoard's profile is written on TensorFlow 2.2 and later.
    """

    def __init__(self, counts, directory, first, last, say=print):
        """
        Args:
          counts: `StepCounts`.
          directory: for the files.
          first, last: numbers of steps, `1 < first < last`. A run that begins after the step before
            `first` writes no trace for Chrome, and one that begins after `first` writes none.
          say: called with lines that say where the traces are.
        """
        self._clock = StepClock(counts)
        self._timeline = tf.train.ProfilerHook(save_steps=1, output_dir=directory)
        self._directory, self._first, self._last, self._say = directory, first, last, say
        self._profiles = False

    def begin(self):
        """Makes what reads the step."""
        self._timeline.begin()

    def after_create_session(self, session, coord):
        """Takes over the step of the session."""
        self._clock.restart(session)

    def is_due(self):
        """Whether something is to be done before or after the coming step."""
        return self._is_traced() or self._profiles or self._clock.step == self._first

    def before_run(self, run_context):
        """Starts a trace that begins with the coming step."""
        if self._clock.step == self._first:
            self._profiles = compat.start_profile(self._directory)
            if not self._profiles:
                self._say('no profile     for TensorBoard: this needs TensorFlow 2.2 or later')
        return self._timeline.before_run(run_context) if self._is_traced() else None

    def after_run(self, run_context, run_values):
        """Ends a trace that ends with this step."""
        traced = self._is_traced()
        self._clock.count()
        if traced:
            self._timeline.after_run(run_context, run_values)
            if self._clock.step == self._first:
                self._say('trace          %s/timeline-%d.json' % (self._directory, self._first))
        if self._profiles and self._clock.step >= self._last:
            self._stop()

    def step_done(self, fetched):
        """Counts a step without traces."""
        self._clock.count()

    def end(self, session):
        """Ends a profile whose last step was not reached."""
        if self._profiles:
            self._stop()

    def _is_traced(self):
        # `ProfilerHook` does not trace the first step that it is called at: that is the one before.
        return self._clock.step in (self._first - 2, self._first - 1)

    def _stop(self):
        self._profiles = False
        compat.stop_profile()
        self._say('profile        tensorboard --logdir=%s' % self._directory)


def profiled_steps(text):
    """`(first, last)` of --profile_steps; None where that is no such pair."""
    parts = text.split(',')
    if len(parts) != 2 or not all(part.isdecimal() and len(part) <= 12 for part in parts):
        return None
    first, last = map(int, parts)
    return (first, last) if 1 < first < last else None
