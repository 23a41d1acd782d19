"""Metrics over a whole data set, on all towers, exact also where the last batch is short."""

import collections
import numbers
import time
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers, check_build_arguments
from towers.api.built import BuiltTowers, check_same_graph
from towers.api.checked_request import check_model_fn
from towers.api.options import Numerics, Pipeline, VariablePlacement
from towers.arguments import (
    check_count,
    check_function,
    check_graph_mode,
    check_instance,
    check_session,
    check_step_variable,
)
from towers.capture.finished_model import is_finished
from towers.capture.model_inputs import BatchAxis
from towers.errors import InputError, InvalidArgumentError, SharedVariableError
from towers.graph.graph_walk import operation_names, step_operations
from towers.graph.variable_access import Writes
from towers.model.objectives import with_parts


class Evaluation:
    """A model that is evaluated on every example of a data set, once.

    Each batch is cut into shards that are weighted by their size (`remainder='weight'`), and the
    batches b are weighted by their size n_b as well:

        metric = sum_b n_b * metric_b / sum_b n_b

    so that a short last batch, or one with fewer examples than towers, counts only its examples.
    A `(value, update_op)` pair of `tf.metrics` counts all batches by itself, from 0.

    Attributes:
      built: the `BuiltTowers` of the evaluation.
      metrics: dict from names of metrics, and `'loss'`, to scalars, of one batch or a pair's value.
    """

    def __init__(self, model_fn: typing.Any, dataset: typing.Any,
                 devices: typing.Union[None, int, str, typing.Sequence] = None,
                 trained: typing.Optional[BuiltTowers] = None, *,
                 variables: typing.Optional[VariablePlacement] = None,
                 copies: str = 'clone', precision: str = 'float32', regularization: str = 'none',
                 pipeline: typing.Optional[Pipeline] = None,
                 shares: typing.Optional[typing.Sequence[int]] = None,
                 inputs: typing.Any = None, feed: typing.Optional[dict] = None):
        """
        Args:
          model_fn: as for `build_towers`, a model function or a finished model; its `metrics` are
            scalars, means over the shard, or pairs of `tf.metrics` with a scalar value. With
            predictions alone it is for `predict`.
          dataset: a `tf.data.Dataset` that ends, of batches as `build_towers` takes them.
          devices: as for `build_towers`; None: the devices of `trained`.
          trained: the `BuiltTowers` whose variables are evaluated; None: the model function makes
            the variables here, to be restored from a checkpoint.
          precision: as in `Numerics`; with `trained`, its precision is taken.
          variables, copies, regularization, pipeline, shares: as for `build_towers`.
          inputs: of a finished model, its tensors that take the elements of the data set, such as
            its placeholders: a nest like an element.
          feed: dict from other placeholders to their values in the evaluation; or None.

        Raises:
          InvalidArgumentError: the model function returns neither a loss, metrics nor predictions,
            or metrics that are no scalars or no numbers; `trained` is of another graph.
          InputError: the elements of the data set are single examples, no batches.
        """
        check_instance('dataset', dataset, compat.DATASET_TYPES, 'a tf.data.Dataset')
        numerics = Numerics(precision)
        check_graph_mode('an Evaluation')
        if trained is not None:
            check_instance('trained', trained, BuiltTowers, 'the result of build_towers')
            check_same_graph('trained', trained)
            numerics = Numerics(trained.precision)
            if devices is None:
                devices = trained.devices
        shapes = tf.data.get_output_shapes(dataset)
        if any(shape.ndims == 0 for shape in tf.nest.flatten(shapes)):
            raise InputError('dataset gives elements of the shapes %s, single examples: expected '
                             'batches, from its .batch(n).' % compat.shapes_text(shapes))
        options: typing.Dict[str, typing.Any] = dict(
            remainder='weight', reuse=trained, variables=variables, copies=copies,
            numerics=numerics, regularization=regularization, pipeline=pipeline, shares=shares)
        _check_model(model_fn, inputs, dataset)
        self._feed = feed
        check_build_arguments(model_fn, None, None, devices, **options)
        with tf.device('/cpu:0'):
            self._iterator = tf.data.make_initializable_iterator(dataset)
            self._batches_known = tf.data.experimental.cardinality(dataset)
            batch = self._iterator.get_next()
        if inputs is not None:
            batch = _by_tensor(inputs, batch)
        counters = tf.get_collection_ref(tf.GraphKeys.METRIC_VARIABLES)
        before = len(counters)
        try:
            self.built = build_towers(model_fn, batch, None, devices, **options)
        except SharedVariableError as error:
            raise SharedVariableError('%s (In an Evaluation reuse= is trained=, what build_towers '
                                      'returned.)' % error) from error
        own_counters = counters[before:]
        if is_finished(model_fn):  # it has made its counters
            own_counters = _counters_of(self.built, counters)
        metrics = _checked_metrics(self.built, own_counters)
        self._from_0 = tf.variables_initializer(own_counters)
        pairs = {name: pair for name, pair in metrics.items() if isinstance(pair, tuple)}
        self._updates = [update for _, update in pairs.values()]
        self._means = {name: metrics[name] for name in metrics if name not in pairs}
        self._values = {name: value for name, (value, _) in pairs.items()}
        self.metrics = dict(metrics, **self._values)
        with tf.device('/cpu:0'):
            self._size = tf.add_n([tf.cast(tower.size, tf.int64) for tower in self.built.towers])

    def run(self, session: tf.Session,
            stopped: typing.Optional[typing.Callable[[], bool]] = None
            ) -> typing.Optional[typing.Dict[str, float]]:
        """Goes through the data set once.

        Args:
          session: `tf.Session` with the variables initialised; no `MonitoredSession`, whose hooks
            would count the batches as steps.
          stopped: function without arguments, called after each batch: if it returns True, the
            evaluation is given up. Or None.

        Returns:
          Dict from metric names and `'loss'` to floats, and from `'examples'` to their number; or
          None if it was given up.
        """
        if stopped is not None:
            check_function('stopped', stopped, 0, 'a function without arguments, or None')
        self.check_examples(session)
        totals: typing.Dict[str, float] = collections.defaultdict(float)
        examples = 0
        session.run(self._from_0)
        for size, (values, _) in self._batches(session, (self._means, self._updates)):
            examples += size
            for name, value in values.items():
                totals[name] += float(value) * size
            if stopped is not None and stopped():
                return None
        if not examples:
            raise InputError(_NO_BATCH)
        results = {name: total / examples for name, total in totals.items()}
        for name, count in session.run(self._values).items():
            results[name] = float(count)
        results['examples'] = examples
        return results

    def predict(self, session: tf.Session) -> typing.Iterator:
        """Predictions of all examples, in their order: a generator of a nest of arrays [batch, …]
        for each batch, like the predictions that the model function returns."""
        leaves = tf.nest.flatten(self.built.predictions)
        if not leaves or any(leaf is None for leaf in leaves):
            raise InvalidArgumentError('the model function returned no predictions: expected some '
                                       'beside the loss, as in ModelOutput(loss, predictions=...).')
        check_session(session, self._size.graph)
        return (predictions for _, predictions in self._batches(session, self.built.predictions))

    def check_examples(self, session: tf.Session, read: bool = False) -> None:
        """Raises `InputError` for a data set that is empty or endless. Where TensorFlow does not
        know its length, only `read=True` finds an empty one, by reading a batch."""
        check_session(session, self._size.graph)
        known = session.run(self._batches_known)
        if known == tf.data.experimental.INFINITE_CARDINALITY:
            raise InputError('the data set to be evaluated has no end: expected one that goes '
                             'through the examples once, without .repeat().')
        if known == 0:
            raise InputError(_NO_BATCH)
        if read and known < 0:
            batches = self._batches(session, (self._means, self._updates))
            if next(batches, None) is None:
                raise InputError(_NO_BATCH)

    def _batches(self, session: tf.Session, fetches: typing.Any
                 ) -> typing.Iterator[typing.Tuple[int, typing.Any]]:
        """Yields, for each batch of the data set, its number of examples and the fetched values."""
        session.run(self._iterator.initializer)
        while True:
            try:
                size, values = session.run([self._size, fetches], self._feed)
            except tf.errors.OutOfRangeError:
                return
            yield int(size), values


def _check_model(model: typing.Any, inputs: typing.Any, dataset: typing.Any) -> None:
    """Checks a model function, or a finished model with its `inputs`, for a data set."""
    if is_finished(model):
        _check_alike(inputs, dataset)
        return
    check_model_fn(model)
    if inputs is not None:
        raise InvalidArgumentError('inputs= is for the tensors of a finished model, and '
                                   'this is a model function.')


def _check_alike(inputs: typing.Any, dataset: typing.Any) -> None:
    """Raises `InvalidArgumentError` for inputs that are no nest like an element of the data set."""
    types = tf.data.get_output_types(dataset)
    try:
        tf.nest.assert_same_structure(inputs, types)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            'inputs=%.80r: the model is finished, and expected are its tensors that take the '
            'elements of the data set, such as its placeholders, in a nest like %.200r.' % (
                inputs, types)) from None


def _by_tensor(inputs: typing.Any, batch: typing.Any) -> dict:
    """{tensor of a finished model: tensor of the batch}, both with the same dimensions."""
    by_tensor = {}
    for entry, leaf in zip(tf.nest.flatten(inputs), tf.nest.flatten(batch)):
        if isinstance(entry, BatchAxis):
            leaf = BatchAxis(leaf, entry.axis)
        by_tensor[entry] = leaf
    return by_tensor


_NO_BATCH = 'the data set to be evaluated has no batch: expected one at least.'


def _counters_of(built: BuiltTowers, counters: typing.Iterable[tf.Variable]
                 ) -> typing.List[tf.Variable]:
    """Those of the counters that the metrics of a finished model count in."""
    updates = [value[1] for value in built.metrics.values() if isinstance(value, tuple)]
    written = _names_written(updates)
    return [counter for counter in counters if counter.op.name in written]


def _names_written(updates: typing.Iterable) -> typing.Set[str]:
    """The names of the variables that some operations and tensors write when they are run."""
    writes = Writes(tf.get_default_graph())
    names: typing.Set[str] = set()
    for op in step_operations(updates):
        names.update(writes.of(op))
    return names


def _checked_metrics(built: BuiltTowers, counters: typing.Sequence[tf.Variable]
                     ) -> typing.Dict[str, typing.Any]:
    """{name of a metric, or of a loss: its scalar tensor, or its pair of `tf.metrics`}.

    Raises:
      InvalidArgumentError: there is nothing to evaluate; a metric is no scalar number; or a pair
        counts elsewhere than in `counters`.
    """
    metrics = dict(built.metrics)
    if built.loss is not None:
        metrics.update(with_parts('loss', built.loss))
    if not metrics and built.predictions is None:
        raise InvalidArgumentError('the model function returned neither a loss nor metrics: there '
                                   'is nothing to evaluate.')
    for metric, value in (built.towers[0].metrics or {}).items():
        number = value
        if isinstance(value, (tuple, list)):
            metric_value, update = metrics[metric]
            _check_counters(metric, metric_value, update, counters)
            number = value[0]
            if number.shape.ndims:
                raise InvalidArgumentError('metric %r has the shape %s: expected one number, or a '
                                           'metric for each.' % (metric, number.shape))
        dtype = number.dtype.base_dtype
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            raise InvalidArgumentError('metric %r is of type %s: expected a number.' % (
                metric, dtype.name))
    return metrics


def _check_counters(metric: str, value: tf.Tensor, update: typing.Any,
                    counters: typing.Sequence[tf.Variable]) -> None:
    """Raises `InvalidArgumentError` unless a metric counts in some variables alone.

    Args:
      metric: its name.
      value: a scalar.
      update: the operation or tensor that counts a batch.
      counters: the variables.
    """
    others = _names_written([update]) - operation_names(counters)
    for op in step_operations([value]):
        if op.name in others:
            raise InvalidArgumentError(
                'metric %r counts in the variable %r, which is no counter of this evaluation alone '
                'that begins at 0: make it by tf.Variable(..., collections=[LOCAL_VARIABLES, '
                'METRIC_VARIABLES]), as tf.metrics does.' % (metric, op.name))


def _check_stop_at(stop_at: typing.Any, every_steps: typing.Optional[int],
                   metrics: typing.Dict[str, typing.Any]) -> None:
    """Raises `InvalidArgumentError` for a `stop_at` that is no pair of a metric and a number.

    `every_steps` is the argument of that name, which it needs; `metrics` are those of the
    evaluation, by their names.
    """
    is_pair = isinstance(stop_at, (tuple, list)) and len(stop_at) == 2
    if (not is_pair or every_steps is None or stop_at[0] not in metrics
            or not isinstance(stop_at[1], numbers.Real)):
        raise InvalidArgumentError(
            "stop_at=%.80r: expected a metric's name (of %s) and a number, and every_steps, at "
            'which it is looked at.' % (stop_at, ', '.join(sorted(metrics))))


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates at multiples of `every_steps` and at the end of training, each step at most once.

    A run that `stop_at` has ended stays ended: started again, it evaluates its step, and stops.

    Attributes:
      latest: what `Evaluation.run` returned last, a dict; or None.
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
          every_steps: steps from one evaluation to the next; None: at the end only.
          listeners: list of hooks that get the results, by `evaluated(step, results, seconds)`,
            such as `SummaryHook`. Among the session's hooks they come before this one, and the hook
            that saves after it.
          stop_at: `(metric, value)`: training stops when the metric is at least the value; or None.
          skip_end: function without arguments, called at the end of the session: if it returns
            True, the last evaluation is left out. Or None.

        Raises:
          InvalidArgumentError: `stop_at` without `every_steps`, or with an unknown metric;
            `every_steps` below 1.
        """
        is_evaluation = hasattr(evaluation, 'run') and hasattr(evaluation, 'metrics')
        if isinstance(evaluation, type) or not is_evaluation:
            raise InvalidArgumentError('evaluation=%.80r: expected an Evaluation.' % (evaluation,))
        check_step_variable(global_step)
        if every_steps is not None:
            check_count('every_steps', every_steps)
        if skip_end is not None:
            check_function('skip_end', skip_end, 0, 'a function without arguments, or None')
        if stop_at is not None:
            _check_stop_at(stop_at, every_steps, evaluation.metrics)
        is_list = isinstance(listeners, (list, tuple))
        if not is_list or not all(hasattr(listener, 'evaluated') for listener in listeners):
            raise InvalidArgumentError('listeners=%.80r: expected a list of hooks with evaluated('
                                       'step, results, seconds), such as [summaries].' % (
                                           listeners,))
        self.latest: typing.Optional[typing.Dict[str, float]] = None
        self._evaluation = evaluation
        self._global_step = global_step
        self._every_steps: typing.Any = every_steps
        self._listeners = list(listeners)
        self._stop_at = stop_at
        self._skip_end = skip_end
        self._step = 0  # counted, as if each run of the session did one step
        self._since = 0  # the step of the latest evaluation that was due, or the restored one
        self._evaluated_step: typing.Optional[int] = None
        self._given_up = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Takes over the restored step; if `stop_at` is reached there, asks the session to stop."""
        self._step = self._since = int(session.run(self._global_step))
        self._evaluated_step = None
        self._given_up = False
        if hasattr(self._evaluation, 'check_examples'):  # else found when the training is done
            self._evaluation.check_examples(session)
        if self._stop_at is not None and self._step and self._step % self._every_steps == 0:
            # Without listeners: they had the results before the step was saved.
            if self._evaluate(session, listeners=()):
                coord.request_stop()

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Evaluates if the run has come to a multiple of `every_steps`."""
        self._step += 1
        if self._every_steps is None or self._step % self._every_steps:
            return
        self._step = int(run_context.session.run(self._global_step))
        if self._step // self._every_steps <= self._since // self._every_steps:
            return  # several runs make a step here, and the counted step is ahead
        self._since = self._step
        if self._evaluate(run_context.session, self._listeners):
            run_context.request_stop()

    def end(self, session: tf.Session) -> None:
        """Evaluates the final weights, unless this step has been, or `skip_end` says otherwise."""
        self._step = int(session.run(self._global_step))
        if self._evaluated_step == self._step or self._given_up:
            return
        if self._skip_end is not None and self._skip_end():
            return
        self._evaluate(session, self._listeners)

    def _evaluate(self, session: tf.Session, listeners: typing.Sequence) -> bool:
        """Evaluates the current step, and gives the results and their seconds to the listeners;
        returns whether to stop: it was given up, or has reached `stop_at`."""
        begin = time.perf_counter()
        results = self._evaluation.run(session)
        self._given_up = results is None
        if self._given_up:
            return True
        self.latest = results
        self._evaluated_step = self._step
        for listener in listeners:
            listener.evaluated(self._step, results, time.perf_counter() - begin)
        return self._stop_at is not None and results[self._stop_at[0]] >= self._stop_at[1]
