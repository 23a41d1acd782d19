"""`RunEvaluation`: the evaluation of a run, which keeps the best checkpoint.

Tests are in tests/trainer/test_evaluations.py and test_trainer_stops.py.
"""

import math
import os
import typing

import tensorflow.compat.v1 as tf

import datasets
import towers
from towers.errors import InputError
from trainer.data import INPUT_ERRORS, input_failure, own_failure
from trainer.metrics_log import entries

SINCE_BEST = 'since_best'  # the result that counts the evaluations since the best evaluation


class _Value(typing.NamedTuple):
    """The value of the metric of --keep_best in an evaluation."""
    step: int  # the step that was evaluated
    value: float


class RunEvaluation:
    """An `Evaluation` that loses no trained steps, and keeps the best checkpoint of a run.

    On one machine it gives itself up at a signal, and where the test set cannot be read;
    `EvaluationHook` then stops the session, which saves the steps that were trained. With several
    machines a signal does not break the evaluation off, and an error about the test set is raised
    and ends all machines.

    Attributes:
      metrics: the metrics of the evaluation, and with --keep_best `SINCE_BEST`.
      failure: the error with which the test set could not be read, to be raised when the session
        has saved; or None.
    """

    def __init__(self, evaluation: towers.Evaluation, train_dir: str, global_step: tf.Variable,
                 metric: str = '', stopped: typing.Optional[typing.Callable[[], bool]] = None):
        """
        Args:
          evaluation: the evaluation that is run.
          train_dir: the folder of the run.
          global_step: the variable that counts the steps of the run.
          metric: the metric of --keep_best; '' for none.
          stopped: function that tells whether a signal has come; None where several machines train,
            which stop together at a step, so that no evaluation is given up.

        Raises:
          InvalidArgumentError: the evaluation has no such metric.
        """
        # `EvaluationHook` uses `metrics` and `check_examples`.
        self.metrics = dict(evaluation.metrics)
        self.check_examples = evaluation.check_examples
        self.failure: typing.Optional[Exception] = None
        self._evaluation = evaluation
        self._stopped = stopped
        self._global_step = global_step
        self._best: typing.Optional[_BestCheckpoint] = None
        if metric:
            self._best = _BestCheckpoint(metric, evaluation.metrics, train_dir)
            self.metrics[SINCE_BEST] = None  # no value: `EvaluationHook` uses only the names

    @property
    def text(self) -> typing.Optional[str]:
        """A text about the best checkpoint, such as `'accuracy 0.98 at step 40:
        runs/digits/best/model.ckpt-40'`; None if there is no best checkpoint."""
        return None if self._best is None else self._best.text

    def run(self, session: tf.Session) -> typing.Optional[dict]:
        """Runs the evaluation; returns its results, and with --keep_best `SINCE_BEST`.

        It returns None if a signal came, or if the test set cannot be read. In the second case
        `failure` has the error.
        """
        several_machines_train = self._stopped is None
        try:
            results = self._evaluation.run(session, self._stopped)
        except (datasets.DatasetError, InputError) + INPUT_ERRORS as error:
            if several_machines_train:  # the error ends all machines
                raise
            self.failure = error
            if isinstance(error, tf.errors.OpError):
                # The error that names the user's code or the example, if that is the reason.
                self.failure = own_failure(error) or input_failure(error) or error
            return None
        if results is None or self._best is None:  # a signal came, or no --keep_best
            return results
        step = int(session.run(self._global_step))
        since_best = self._best.evaluated(session, step, results)
        return dict(results, **{SINCE_BEST: since_best})


class _BestCheckpoint:
    """The best checkpoint of a run, in the folder `best` of the run's folder.

    The values of former evaluations are read from `metrics.jsonl`, which is exact over kills. So a
    run that resumes keeps the same checkpoint as a run that was never stopped.

    Attributes:
      text: see `RunEvaluation.text`.
    """

    def __init__(self, metric: str, metrics: typing.Iterable[str], train_dir: str):
        """
        Args:
          metric: the metric of --keep_best; a '-' before its name says that less is better.
          metrics: the names of the metrics of the evaluation.
          train_dir: the folder of the run.

        Raises:
          InvalidArgumentError: the evaluation has no such metric.
        """
        self.text: typing.Optional[str] = None
        self._name = metric.lstrip('-')
        if self._name not in metrics:
            raise towers.InvalidArgumentError('--keep_best=%s: the model has no such metric; it '
                                              'has %s.' % (metric, ', '.join(metrics)))
        self._less_is_better = metric.startswith('-') or self._name == 'loss'
        self._path = os.path.join(train_dir, 'best', 'model.ckpt')
        self._log = os.path.join(train_dir, 'metrics.jsonl')
        # The values of all evaluations so far; None until they are read from the log.
        self._values: typing.Optional[typing.List[_Value]] = None
        self._saver = tf.train.Saver(max_to_keep=1, save_relative_paths=True)
        former_best = tf.train.latest_checkpoint(os.path.dirname(self._path))
        if former_best is not None:  # so that the saver deletes it when a better one is saved
            self._saver.recover_last_checkpoints([former_best])

    def evaluated(self, session: tf.Session, step: int, results: dict) -> int:
        """Saves a checkpoint if its results are the best so far.

        Args:
          session: the session with the variables of the checkpoint.
          step: the step that was evaluated.
          results: the results of the evaluation.

        Returns:
          The number of evaluations since the best evaluation.
        """
        if self._values is None:
            self._values = self._read()
        # A session that goes on from a checkpoint evaluates the steps after it again.
        self._values = [value for value in self._values if value.step < step]
        self._values.append(_Value(step, results[self._name]))
        best = self._best_of(self._values)
        if best is None:  # no value was finite: there is no best evaluation to count from
            return 0
        if best.step == step:
            self._save(session, step)
        self.text = '%s %.4g at step %d: %s-%d' % (
            self._name, best.value, best.step, self._path, best.step)
        return len([value for value in self._values if value.step > best.step])

    def _save(self, session: tf.Session, step: int) -> None:
        """Saves the best checkpoint; the former one is deleted."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # Without the graph, which is in the file of each checkpoint of the run.
        self._saver.save(session, self._path, step, write_meta_graph=False)

    def _best_of(self, values: typing.Iterable[_Value]) -> typing.Optional[_Value]:
        """The best value, and of equal values the first; None if no value is a finite number."""
        finite = [value for value in values if math.isfinite(value.value)]
        # Of equal values `min` and `max` take the first, the value of the earliest step.
        if self._less_is_better:
            return min(finite, key=lambda value: value.value, default=None)
        return max(finite, key=lambda value: value.value, default=None)

    def _read(self) -> typing.List[_Value]:
        """The values of former evaluations, from the log, in which null stands for NaN."""
        values = []
        for entry in entries(self._log):
            if 'test_' + self._name in entry:  # only the lines of evaluated steps have it
                value = entry['test_' + self._name]
                is_number = isinstance(value, (int, float))
                values.append(_Value(entry['step'], value if is_number else math.nan))
        return values
