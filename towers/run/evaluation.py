"""Metrics over a whole data set, on all towers, exact whether or not the batches divide."""

import collections
import contextlib
import numbers
import time
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (check_count, check_flag, check_function, check_graph_mode,
                              check_instance, check_session, check_step_variable)
from towers.build.arguments import check_same_graph
from towers.build.build import BuiltTowers, build_towers, check_arguments
from towers.errors import InputError, InvalidArgumentError, SharedVariableError
from towers.placement.precision import check_precision
from towers.run.step_loop import OccasionalHook
from towers.tower.objectives import with_parts


class Evaluation:
    """A model function that is evaluated on every example of a data set, once.

    The towers share the variables of an earlier build, if there is one. Each batch is cut into
    shards weighted by their size (`remainder='weight'`), and batches are weighted by their size in
    turn:

        metric = sum_b n_b * metric_b / sum_b n_b

    so that a short last batch, or one with fewer examples than towers, counts just its examples.

    Attributes:
      built: the `BuiltTowers` of the evaluation.
      metrics: dict from the names of what is evaluated, `'loss'` included, to scalar tensors.
    """

    def __init__(self, model_fn: typing.Callable, dataset: typing.Any,
                 devices: typing.Union[None, int, str, typing.Sequence] = None,
                 trained: typing.Any = None, name: str = 'eval_tower',
                 variable_device: typing.Any = None, check_devices: bool = True,
                 copies: str = 'auto', precision: str = 'float32', regularization: str = 'none',
                 on_tower: typing.Optional[typing.Callable] = None,
                 stages: typing.Optional[str] = None):
        """
        Args:
          model_fn: as for `build_towers`; its `metrics` are scalars, means over the shard.
          dataset: a `tf.data.Dataset` that ends, of batches `(inputs..., )` as `model_fn` takes.
          devices: as for `build_towers`; None for those of `trained`.
          trained: the `BuiltTowers` whose variables are evaluated; None where the model function
            makes them here, to be restored from a checkpoint.
          name: prefix of the towers' name scopes.
          variable_device, check_devices, copies, precision, regularization, on_tower, stages: as
            for `build_towers`; with `trained`, the precision is its.

        Raises:
          InvalidArgumentError: the model function has neither a loss nor metrics, or metrics that
            are no scalars, or no numbers; `trained` is of another graph.
          InputError: the data set gives single examples, no batches.
        """
        check_instance('dataset', dataset, compat.DATASET_TYPES, 'a tf.data.Dataset')
        check_precision(precision)
        check_flag('check_devices', check_devices)
        check_graph_mode('an Evaluation')
        if trained is not None:
            check_instance('trained', trained, BuiltTowers, 'what build_towers returned')
            check_same_graph('trained', trained)
            precision = trained.precision
            if devices is None:
                devices, check_devices = trained.devices, False
        if any(shape.ndims == 0 for shape in tf.nest.flatten(tf.data.get_output_shapes(dataset))):
            raise InputError('dataset gives elements of the shapes %s, single examples: expected '
                             'batches, from its .batch(n).' % (tf.data.get_output_shapes(dataset),))
        options = dict(
            remainder='weight', reuse=trained, name=name, variable_device=variable_device,
            check_devices=check_devices, allow_repeated_devices=trained is not None, copies=copies,
            precision=precision, regularization=regularization, on_tower=on_tower, stages=stages)
        check_arguments(model_fn, None, None, devices, **options)
        with _iterators_put_back(), _advising_trained(trained):
            with tf.device('/cpu:0'):
                self._iterator = tf.data.make_initializable_iterator(dataset)
                self._batches_known = tf.data.experimental.cardinality(dataset)
                batch = self._iterator.get_next()
            self.built = build_towers(model_fn, batch, None, devices, **options)
            self.metrics = _checked_metrics(self.built)
        with tf.device('/cpu:0'):
            self._size = tf.add_n([tf.cast(tower.size, tf.int64) for tower in self.built.towers])

    def run(self, session):
        """Goes through the data set once.

        Args:
          session: a session with the variables initialised; a raw one, not a monitored one, whose
            hooks would take this for training steps.

        Returns:
          Dict from metric names, `'loss'` and `'examples'` (how many there were) to numbers.

        Raises:
          InvalidArgumentError: no session, or one of another graph.
          InputError: the data set has no batch, or no end.
        """
        self.check_examples(session)
        totals, examples = collections.defaultdict(float), 0
        for size, values in self._batches(session, self.metrics):
            examples += size
            for name, value in values.items():
                totals[name] += float(value) * size
        if not examples:
            raise InputError(_NO_BATCH)
        result = {name: total / examples for name, total in totals.items()}
        result['examples'] = examples
        return result

    def predict(self, session):
        """Goes through the data set once and yields the predictions of each batch.

        Yields:
          Nests of arrays [batch, …], as the model function's predictions, in the data's order.

        Raises:
          InvalidArgumentError: the model function returned no predictions; as `run`.
        """
        leaves = tf.nest.flatten(self.built.predictions)
        if not leaves or any(leaf is None for leaf in leaves):
            raise InvalidArgumentError('the model function returned no predictions: expected some '
                                       'beside the loss, as in ModelOutput(loss, predictions=...).')
        check_session(session, self._size.graph)
        return (predictions for _, predictions in self._batches(session, self.built.predictions))

    def check_examples(self, session, read=False):
        """Raises `InputError` for a data set that is known to be empty, or to have no end.

        Args:
          session: as for `run`.
          read: whether to read the first batch where TensorFlow does not know how many there are.
        """
        check_session(session, self._size.graph)
        known = session.run(self._batches_known)
        if known == tf.data.experimental.INFINITE_CARDINALITY:
            raise InputError('the data set to be evaluated has no end: expected one that goes '
                             'through the examples once, without .repeat().')
        if known == 0 or (read and known < 0
                          and next(self._batches(session, self.metrics), None) is None):
            raise InputError(_NO_BATCH)

    def _batches(self, session, fetches):
        session.run(self._iterator.initializer)
        while True:
            try:
                size, values = session.run([self._size, fetches])
            except tf.errors.OutOfRangeError:
                return
            yield int(size), values


_NO_BATCH = 'the data set to be evaluated has no batch: expected one at least.'


@contextlib.contextmanager
def _iterators_put_back():
    """On an error takes the iterators made within it out of their collection."""
    before = len(tf.get_collection('iterators'))
    try:
        yield
    except BaseException:
        del tf.get_collection_ref('iterators')[before:]
        raise


@contextlib.contextmanager
def _advising_trained(trained):
    """The advice of an error about variables that exist already is `trained=`, not `reuse=`."""
    try:
        yield
    except SharedVariableError as error:
        name, exists, _ = str(error).partition(' exists already in this graph')
        if trained is not None or not exists:
            raise
        raise SharedVariableError('%s%s: pass trained= what build_towers returned, to evaluate the '
                                  'variables that it trains.' % (name, exists)) from error


def _checked_metrics(built):
    """What is evaluated by its name, `'loss'` included."""
    metrics = dict(built.metrics)
    if built.loss is not None:
        metrics.update(with_parts('loss', built.loss))
    if not metrics:
        raise InvalidArgumentError('the model function returned neither a loss nor metrics: there '
                                   'is nothing to evaluate.')
    for metric, value in metrics.items():
        if isinstance(value, tuple):
            raise InvalidArgumentError(
                'metric %r is a (value, update_op) pair of tf.metrics, which counts over '
                'batches by itself: return the mean over the shard instead.' % metric)
    for metric, value in (built.towers[0].metrics or {}).items():
        dtype = value.dtype.base_dtype
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            raise InvalidArgumentError('metric %r is of type %s: expected a number, the mean over '
                                       'the shard.' % (metric, dtype.name))
    return metrics


def listed_listeners(listeners):
    """A list of what is told of evaluations; `InvalidArgumentError` for anything else."""
    if not isinstance(listeners, (list, tuple)) or not all(
            hasattr(listener, 'evaluated') for listener in listeners):
        raise InvalidArgumentError('listeners=%.80r: expected a list of hooks with evaluated(step, '
                                   'results, seconds), such as [progress].' % (listeners,))
    return list(listeners)


class EvaluationHook(OccasionalHook):
    """Evaluates every so many steps and at the end of training, each step at most once.

    A run that `stop_at` has ended is over: started again, it evaluates the step that it is at, and
    ends.

    Attributes:
      latest: dict of the latest evaluation, or None.
      reached: whether `stop_at` ended the training.
    """

    def __init__(self, evaluation: typing.Any, global_step: typing.Optional[tf.Variable],
                 every_steps: typing.Optional[int] = None, listeners: typing.Sequence = (),
                 stop_at: typing.Optional[tuple] = None,
                 skip_end: typing.Optional[typing.Callable] = None):
        """
        Args:
          evaluation: `Evaluation`.
          global_step: the variable that counts steps.
          every_steps: evaluate at the multiples of so many steps; None: at the end only.
          listeners: hooks to tell, by their `evaluated(step, results, seconds)`: `ProgressHook`,
            `MetricsHook`, `SummaryHook`. Put them before this hook, and the one that saves after.
          stop_at: `(metric, value)`: stop when the metric is at least that; or None.
          skip_end: function that tells, when the session ends, whether to leave out the evaluation
            of what is not yet the end of training: `lambda: signals.received is not None`, for a
            process that is told to stop has little time; or None.

        Raises:
          InvalidArgumentError: `stop_at` without `every_steps`, or of a metric that there is not;
            `every_steps` below 1.
        """
        if isinstance(evaluation, type) or not (hasattr(evaluation, 'run')
                                                and hasattr(evaluation, 'metrics')):
            raise InvalidArgumentError('evaluation=%.80r: expected an Evaluation.' % (evaluation,))
        if every_steps is not None:
            check_count('every_steps', every_steps)
        if stop_at is not None and every_steps is None:
            raise InvalidArgumentError('stop_at=%r is looked at when there is an evaluation: give '
                                       'every_steps.' % (stop_at,))
        if stop_at is not None and not (isinstance(stop_at, (tuple, list)) and len(stop_at) == 2
                                        and isinstance(stop_at[1], numbers.Real)):
            raise InvalidArgumentError("stop_at=%.80r: expected a metric's name and a number."
                                       % (stop_at,))
        if skip_end is not None:
            check_function('skip_end', skip_end, 0, 'a function without arguments, or None')
        if stop_at is not None and stop_at[0] not in evaluation.metrics:
            raise InvalidArgumentError('stop_at=%r: there is no such metric; there are %s.' % (
                stop_at, ', '.join(sorted(evaluation.metrics))))
        listeners = listed_listeners(listeners)
        check_step_variable(global_step)
        self.latest = None
        self.reached = False
        self._evaluation = evaluation
        self._global_step = global_step
        self._every_steps = every_steps
        self._listeners = list(listeners)
        self._stop_at = stop_at
        self._skip_end = skip_end
        self._step = 0  # as counted: a run a step
        self._since = 0  # the step from which on multiples of every_steps are to be evaluated
        self._evaluated_step = None

    def after_create_session(self, session, coord):
        """Starts from the step that was restored, and ends there if it is one that ended it."""
        self._step = self._since = int(session.run(self._global_step))
        self._evaluated_step = None
        if hasattr(self._evaluation, 'check_examples'):  # or it would show after the training
            self._evaluation.check_examples(session)
        if self._stop_at is not None and self._step and self._step % self._every_steps == 0:
            self._evaluate(session, listeners=())  # they were told before the step was saved
            if self._is_reached():
                coord.request_stop()

    def after_run(self, run_context, run_values):
        """Evaluates when the step is one to evaluate."""
        due = self.is_due()
        self._step += 1
        if not due:
            return
        self._step = int(run_context.session.run(self._global_step))
        if self._step // self._every_steps <= self._since // self._every_steps:
            return  # with several runs a step, its time is yet to come
        self._since = self._step
        self._evaluate(run_context.session, self._listeners)
        if self._is_reached():
            run_context.request_stop()

    def is_due(self):
        """Whether the coming step is one to evaluate after."""
        return self._every_steps is not None and (self._step + 1) % self._every_steps == 0

    def step_done(self, fetched):
        """Counts a step that is none to evaluate after."""
        self._step += 1

    def end(self, session):
        """Evaluates the final weights, unless that has just been done."""
        self._step = int(session.run(self._global_step))
        if self._evaluated_step != self._step and not (self._skip_end and self._skip_end()):
            self._evaluate(session, self._listeners)

    def _evaluate(self, session, listeners):
        begin = time.perf_counter()
        self.latest = self._evaluation.run(session)
        self._evaluated_step = self._step
        for listener in listeners:
            listener.evaluated(self._step, self.latest, time.perf_counter() - begin)

    def _is_reached(self):
        if self._stop_at is None:
            return False
        metric, least = self._stop_at
        self.reached = self.latest[metric] >= least
        return self.reached
