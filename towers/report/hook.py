"""`StepReportHook`: writes the report of one step of a running session."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance, check_say, checked_path, safe_say
from towers.errors import TowersError
from towers.report.step_report import step_report


class StepReportHook(tf.train.SessionRunHook):
    """Traces one step of a session, and writes its page; see `step_report`.

    >>> hook = towers.StepReportHook(built, 100, 'step.html')
    >>> with tf.train.MonitoredTrainingSession(hooks=[hook], …) as session:

    Where the page cannot be written, it says so in a line, and the training goes on.
    """

    def __init__(self, built: BuiltTowers, step: int, path: str,
                 against: typing.Optional[str] = None, say: typing.Callable = print):
        """
        Args:
          built: the result of `build_towers`.
          step: which step to trace, by `built.global_step`; without a global step, by a count from
            1 at the beginning of the session. A session that begins after this step traces none.
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
        self._path = checked_path('path', path, 'the name of a file')
        self._against = against
        self._say = safe_say(say)
        self._step = 1  # the step that comes next

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Takes over the step of the session; says if the step to be traced is over already."""
        if self._built.global_step is not None:
            self._step = int(session.run(self._built.global_step)) + 1
        if self._step > self._traced_step:
            self._say('no report      of step %d: the run goes on from step %d' % (
                self._traced_step, self._step - 1))

    def before_run(self, run_context: tf.train.SessionRunContext
                   ) -> typing.Optional[tf.train.SessionRunArgs]:
        """Asks TensorFlow to trace the step, if it is the one to be traced."""
        if self._step != self._traced_step:
            return None
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)
        return tf.train.SessionRunArgs(None, options=options)

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Writes the page, if the step was traced."""
        if self._step == self._traced_step:
            self._report(run_values.run_metadata)
        self._step += 1

    def _report(self, metadata: tf.RunMetadata) -> None:
        """Writes the page of a step with this metadata, and says its verdict."""
        try:
            report = step_report(self._built, metadata, self._path, self._against)
        except TowersError as error:
            self._say('no report      of step %d: %s' % (self._traced_step, error))
            return
        self._say('report         %s' % self._path)
        for sentence in report.verdict:
            self._say('               %s' % sentence)
