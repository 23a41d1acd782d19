"""`StepReportHook`: writes the report of one step of a running session."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance, check_say, directory_name, safe_say
from towers.errors import TowersError
from towers.report.step_report import step_report


class StepReportHook(tf.train.SessionRunHook):
    """Traces one step of a session, and writes its page; see `step_report`.

    >>> hook = towers.StepReportHook(built, 100, 'step.html')
    >>> with tf.train.MonitoredTrainingSession(hooks=[hook], …) as session:

    A page that cannot be written is said, and the training goes on.
    """

    def __init__(self, built: BuiltTowers, step: int, path: str,
                 against: typing.Optional[str] = None, say: typing.Callable = print):
        """
        Args:
          built: the result of `build_towers`.
          step: which step to trace: counted by `built.global_step`, or, without one, from the
            beginning of the session, from 1. A session that begins later traces none.
          path, against: as for `step_report`.
          say: called with each line of text.

        Raises:
          InvalidArgumentError: an argument of another kind.
        """
        check_instance('built', built, BuiltTowers, 'the result of build_towers')
        check_count('step', step)
        check_say(say)
        self._built = built
        self._traced_step = step
        self._path = directory_name('path', path, 'the name of a file')
        self._against = against
        self._say = safe_say(say)
        self._step = 1  # the coming one

    def after_create_session(self, session, coord):
        """Takes over the step of the session; says where that is after the one to be traced."""
        if self._built.global_step is not None:
            self._step = int(session.run(self._built.global_step)) + 1
        if self._step > self._traced_step:
            self._say('no report      of step %d: the run goes on from step %d' % (
                self._traced_step, self._step - 1))

    def before_run(self, run_context):
        """Asks for a trace of the step."""
        if self._step != self._traced_step:
            return None
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)
        return tf.train.SessionRunArgs(None, options=options)

    def after_run(self, run_context, run_values):
        """Writes the page of a step that was traced."""
        if self._step == self._traced_step:
            self._report(run_values.run_metadata)
        self._step += 1

    def _report(self, metadata: tf.RunMetadata):
        try:
            report = step_report(self._built, metadata, self._path, self._against)
        except TowersError as error:
            self._say('no report      of step %d: %s' % (self._traced_step, error))
            return
        self._say('report         %s' % self._path)
        for sentence in report.verdict:
            self._say('               %s' % sentence)
