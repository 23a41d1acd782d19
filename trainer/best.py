"""The evaluation of a run: it gives up at signals and errors, and keeps the best checkpoint."""

import math
import os
import typing

import tensorflow.compat.v1 as tf

import datasets
import towers
from towers.errors import InputError
from trainer.data import INPUT_ERRORS, input_failure, own_failure
from trainer.metrics_log import entries

SINCE_BEST = 'since_best'  # evaluations since the best one: 0 where there is none better so far


class RunEvaluation:
    """An `Evaluation` that gives itself up where going on would lose trained steps, that is at a
    signal and at an error of the test set; `EvaluationHook` then stops the session, which saves.

    With --keep_best it saves the checkpoint that is the best one so far in the folder `best` below
    that of the run, a folder of checkpoints like any other. Which evaluations were the best is read
    from `metrics.jsonl`, which is exact over kills; so a run that resumes keeps what it would have
    kept.

    Attributes:
      metrics: those of the evaluation, and with --keep_best `SINCE_BEST`.
      failure: the error, to be raised when the session has saved; or None.
      text: such as `'accuracy 0.98 at step 40: runs/digits/best/model.ckpt-40'`; or None.
    """

    def __init__(self, evaluation: towers.Evaluation, train_dir: str, global_step: tf.Variable,
                 metric: str = '', stopped: typing.Optional[typing.Callable[[], bool]] = None):
        """`metric` is that of --keep_best; `stopped` is a function that tells whether a signal has
        come, or None: machines, which stop together at a step, never give up."""
        self.metrics, self.check_examples = dict(evaluation.metrics), evaluation.check_examples
        self.failure = self.text = None
        self._evaluation, self._stopped = evaluation, stopped
        self._global_step, self._name = global_step, metric.lstrip('-')
        if not metric:
            return
        if self._name not in evaluation.metrics:
            raise towers.InvalidArgumentError('--keep_best=%s: the model has no such metric; it '
                                              'has %s.' % (metric, ', '.join(evaluation.metrics)))
        self._sign = -1 if metric.startswith('-') or self._name == 'loss' else 1
        self.metrics[SINCE_BEST] = None
        self._path, self._log = (os.path.join(train_dir, *names) for names in (
            ('best', 'model.ckpt'), ('metrics.jsonl',)))
        self._values = None  # pairs of a step and a value, of all evaluations before
        self._saver = tf.train.Saver(max_to_keep=1, save_relative_paths=True)
        former = tf.train.latest_checkpoint(os.path.dirname(self._path))
        self._saver.recover_last_checkpoints([former] if former else [])

    def run(self, session: tf.Session) -> typing.Optional[dict]:
        """As of the `Evaluation`, and `SINCE_BEST`; None where it was given up."""
        try:
            results = self._evaluation.run(session, self._stopped)
        except (datasets.DatasetError, InputError) + INPUT_ERRORS as error:
            if self._stopped is None:
                raise
            self.failure = error if not isinstance(error, tf.errors.OpError) else (
                own_failure(error) or input_failure(error) or error)
            return None
        return results if results is None or not self._name else self._with_best(session, results)

    def _with_best(self, session, results):
        """Saves if these results are the best; returns them with `SINCE_BEST`."""
        step, value = int(session.run(self._global_step)), results[self._name]
        self._values = [pair for pair in self._values or self._read() if pair[0] < step] + [
            (step, value)]
        finite = [pair for pair in self._values if math.isfinite(pair[1])]
        if not finite:
            return dict(results, **{SINCE_BEST: 0})
        best, kept = max(finite, key=lambda pair: (self._sign * pair[1], -pair[0]))
        if best == step:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._saver.save(session, self._path, step, write_meta_graph=False)
        self.text = '%s %.4g at step %d: %s-%d' % (self._name, kept, best, self._path, best)
        return dict(results, **{SINCE_BEST: sum(pair[0] > best for pair in self._values)})

    def _read(self):
        """`_values` of a run that resumes, from its log, where null stands for NaN."""
        found = [(entry['step'], entry['test_' + self._name]) for entry in entries(self._log)
                 if 'test_' + self._name in entry]
        return [(step, value if isinstance(value, (int, float)) else math.nan)
                for step, value in found]
