"""`EvaluationHook`: evaluations during a training, and a training that stops at a metric.

Its test is tests/run/test_evaluation.py.
"""

import numbers
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_function, check_step_variable
from towers.errors import InvalidArgumentError


class _StopAt(typing.NamedTuple):
    """The condition at which training stops: a metric is at least a value."""
    metric: str
    value: float


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates at multiples of `every_steps` and at the end of training, each step at most once.

    A run that `stop_at` has ended stays ended: when it is started again, it evaluates its step once
    more, and stops.

    Attributes:
      latest: what `Evaluation.run` returned last, a dict; None before the first evaluation.
    """

    def __init__(self, evaluation: typing.Any, global_step: tf.Variable,
                 every_steps: typing.Optional[int] = None, listeners: typing.Sequence = (),
                 stop_at: typing.Optional[tuple] = None,
                 skip_end: typing.Optional[typing.Callable] = None):
        """
        Args:
          evaluation: `Evaluation`; or an object with its `metrics` and `run(session)`. A `run`
            that returns None has been given up: the session is then asked to stop.
          global_step: the variable that counts steps.
          every_steps: steps from one evaluation to the next; None to evaluate only at the end.
          listeners: list of hooks that get the results, by `evaluated(step, results, seconds)`,
            such as `SummaryHook`. Among the session's hooks they come before this one, and the hook
            that saves after it.
          stop_at: `(metric, value)`: training stops when the metric is at least the value; or None.
          skip_end: function without arguments, called at the end of the session; if it returns
            True, the last evaluation is left out. None to evaluate at every end.

        Raises:
          InvalidArgumentError: an argument of another kind; `stop_at` without `every_steps`, or
            with an unknown metric; `every_steps` below 1.
        """
        _check_evaluation(evaluation)
        check_step_variable(global_step)
        if every_steps is not None:
            check_count('every_steps', every_steps)
        if skip_end is not None:
            check_function('skip_end', skip_end, 0, 'a function without arguments, or None')
        if stop_at is not None:
            _check_stop_at(stop_at, every_steps, evaluation.metrics)
        _check_listeners(listeners)
        self.latest: typing.Optional[typing.Dict[str, float]] = None
        self._evaluation = evaluation
        self._global_step = global_step
        self._every_steps: typing.Any = every_steps
        self._listeners = list(listeners)
        self._stop_at: typing.Optional[_StopAt] = None
        if stop_at is not None:
            self._stop_at = _StopAt(*stop_at)
        self._skip_end = skip_end
        self._step = 0  # counts runs of the session, until the global step is read
        self._due_step = 0  # the last step at which an evaluation was due, or the restored step
        self._evaluated_step: typing.Optional[int] = None
        self._given_up = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Takes over the restored step; if `stop_at` is reached there, asks the session to stop."""
        self._step = int(session.run(self._global_step))
        self._due_step = self._step
        self._evaluated_step = None
        self._given_up = False
        # An object in the place of an `Evaluation` may have no data set to check.
        if hasattr(self._evaluation, 'check_examples'):
            self._evaluation.check_examples(session)
        if self._stop_at is None:
            return
        # The run that saved this step may have stopped, as the metric had reached `stop_at`: then
        # this run has to stop, too. It evaluates the step once more to find that out. A step at
        # which no evaluation was due cannot have stopped that run.
        was_evaluated = self._step > 0 and self._step % self._every_steps == 0
        if not was_evaluated:
            return
        # The run before has given these results to its listeners.
        reaches_stop = self._evaluate(session, listeners=())
        if reaches_stop:
            coord.request_stop()

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Evaluates if the run has come to a multiple of `every_steps`.

        The step is counted, as if each `session.run` made one. Only where the count is a multiple
        of `every_steps`, the true step is read, since that costs another `session.run`.
        """
        self._step += 1
        may_be_due = self._every_steps is not None and self._step % self._every_steps == 0
        if not may_be_due:
            return
        self._step = int(run_context.session.run(self._global_step))
        num_due = self._step // self._every_steps
        num_due_before = self._due_step // self._every_steps
        # False where several runs make one step: then the count was ahead of the true step.
        is_due = num_due > num_due_before
        if not is_due:
            return
        self._due_step = self._step
        if self._evaluate(run_context.session, self._listeners):
            run_context.request_stop()

    def end(self, session: tf.Session) -> None:
        """Evaluates the final weights, unless this step is evaluated or `skip_end` returns True."""
        self._step = int(session.run(self._global_step))
        if self._evaluated_step == self._step or self._given_up:
            return
        if self._skip_end is not None and self._skip_end():
            return
        self._evaluate(session, self._listeners)

    def _evaluate(self, session: tf.Session, listeners: typing.Sequence) -> bool:
        """Evaluates the current step, and gives the results and the seconds to the listeners.

        Returns:
          Whether to stop: the evaluation was given up, or `stop_at` is reached.
        """
        begin = time.perf_counter()
        results = self._evaluation.run(session)
        self._given_up = results is None
        if self._given_up:
            return True
        self.latest = results
        self._evaluated_step = self._step
        for listener in listeners:
            listener.evaluated(self._step, results, time.perf_counter() - begin)
        if self._stop_at is None:
            return False
        return results[self._stop_at.metric] >= self._stop_at.value


def _check_evaluation(evaluation: typing.Any) -> None:
    """Raises `InvalidArgumentError` for what is no `Evaluation`, nor an object like one."""
    is_class = isinstance(evaluation, type)  # `Evaluation` itself, which has the methods, too
    has_both = hasattr(evaluation, 'run') and hasattr(evaluation, 'metrics')
    if is_class or not has_both:
        raise InvalidArgumentError('evaluation=%.80r: expected an Evaluation.' % (evaluation,))


def _check_listeners(listeners: typing.Any) -> None:
    """Raises `InvalidArgumentError` for what is no list of hooks that get results."""
    is_list = isinstance(listeners, (list, tuple))
    if not is_list or not all(hasattr(listener, 'evaluated') for listener in listeners):
        raise InvalidArgumentError('listeners=%.80r: expected a list of hooks with evaluated('
                                   'step, results, seconds), such as [summaries].' % (listeners,))


def _check_stop_at(stop_at: typing.Any, every_steps: typing.Optional[int],
                   metrics: typing.Dict[str, typing.Any]) -> None:
    """Raises `InvalidArgumentError` for a `stop_at` that is no pair of a metric and a number.

    Args:
      stop_at: the argument of `EvaluationHook`.
      every_steps: the argument of `EvaluationHook`; without it `stop_at` is refused.
      metrics: the metrics of the evaluation, by name.
    """
    fits = False
    if isinstance(stop_at, (tuple, list)) and len(stop_at) == 2:
        metric, value = stop_at
        fits = metric in metrics and isinstance(value, numbers.Real)
    if every_steps is None or not fits:
        raise InvalidArgumentError(
            "stop_at=%.80r: expected a metric's name (of %s) and a number, and every_steps, at "
            'which it is looked at.' % (stop_at, ', '.join(sorted(metrics))))
