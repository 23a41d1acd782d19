"""`Evaluation`: metrics over a whole data set on all towers, exact also for a short last batch."""

import collections
import numbers
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers, check_build_arguments
from towers.api.built import BuiltTowers, check_same_graph
from towers.api.checked_request import check_model_fn
from towers.api.options import Numerics, Pipeline, VariablePlacement
from towers.arguments import (
    check_function,
    check_graph_mode,
    check_instance,
    check_session,
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
      metrics: dict from the names of metrics, and `'loss'`, to scalar tensors: the mean over one
        batch, or the value of a pair of `tf.metrics`.
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
            scalars, means over the shard, or pairs of `tf.metrics` with a scalar value. A model
            that returns only predictions is for `predict`.
          dataset: a `tf.data.Dataset` that ends, of batches as `build_towers` takes them.
          devices: as for `build_towers`; None: the devices of `trained`.
          trained: the `BuiltTowers` whose variables are evaluated; None: the model function makes
            the variables here, to be restored from a checkpoint.
          precision: as in `Numerics`; with `trained`, its precision is taken.
          variables, copies, regularization, pipeline, shares: as for `build_towers`.
          inputs: for a finished model, its tensors that take the elements of the data set, such as
            its placeholders: a nest with the structure of an element.
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
        _check_has_batches(dataset)
        options: typing.Dict[str, typing.Any] = dict(
            remainder='weight', reuse=trained, variables=variables, copies=copies,
            numerics=numerics, regularization=regularization, pipeline=pipeline, shares=shares)
        _check_model(model_fn, inputs, dataset)
        self._feed = feed
        # Checked here, so that a bad argument leaves no operation of an iterator in the graph.
        check_build_arguments(model_fn, inputs=None, optimizer=None, devices=devices, **options)
        with tf.device('/cpu:0'):
            self._iterator = tf.data.make_initializable_iterator(dataset)
            self._num_batches = tf.data.experimental.cardinality(dataset)
            batch = self._iterator.get_next()
        if inputs is not None:
            batch = _by_tensor(inputs, batch)
        counters_before = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
        try:
            self.built = build_towers(model_fn, batch, None, devices, **options)
        except SharedVariableError as error:
            raise SharedVariableError('%s (In an Evaluation reuse= is trained=, what build_towers '
                                      'returned.)' % error) from error
        counters = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
        if is_finished(model_fn):
            # Its counters were made before the build, as those of other metrics in the graph were.
            own_counters = _counters_of(self.built, counters)
        else:
            # The build has called the model function, which has added its counters to the list.
            own_counters = counters[len(counters_before):]
        self._reset_counters = tf.variables_initializer(own_counters)
        self._take_metrics(_checked_metrics(self.built, own_counters))
        with tf.device('/cpu:0'):
            self._size = tf.add_n([tf.cast(tower.size, tf.int64) for tower in self.built.towers])

    def _take_metrics(self, metrics: typing.Dict[str, typing.Any]) -> None:
        """Takes the metrics of `_checked_metrics`: pairs of `tf.metrics`, which count over all
        batches, and the others, which are means over a batch."""
        self._means: typing.Dict[str, tf.Tensor] = {}
        self._count_values: typing.Dict[str, tf.Tensor] = {}
        self._count_updates = []
        for name, metric in metrics.items():
            is_pair = isinstance(metric, tuple)
            if is_pair:
                value, update = metric
                self._count_values[name] = value
                self._count_updates.append(update)
            else:
                self._means[name] = metric
        self.metrics = dict(metrics, **self._count_values)

    def run(self, session: tf.Session,
            stopped: typing.Optional[typing.Callable[[], bool]] = None
            ) -> typing.Optional[typing.Dict[str, float]]:
        """Goes through the data set once.

        Args:
          session: a `tf.Session` with the variables initialized; not a `MonitoredSession`, whose
            hooks would count the batches as steps.
          stopped: function without arguments, called after each batch; if it returns True, the
            evaluation is given up. None to go through all batches.

        Returns:
          A dict from the names of metrics and `'loss'` to floats, and from `'examples'` to the
          number of examples; or None if it was given up.
        """
        if stopped is not None:
            check_function('stopped', stopped, 0, 'a function without arguments, or None')
        self.check_examples(session)
        totals: typing.Dict[str, float] = collections.defaultdict(float)
        examples = 0
        session.run(self._reset_counters)
        for size, (means, _) in self._batches(session, (self._means, self._count_updates)):
            examples += size
            for name, mean in means.items():
                totals[name] += float(mean) * size
            if stopped is not None and stopped():
                return None
        if not examples:  # `check_examples` finds that only where TensorFlow knows the length
            raise InputError(_NO_BATCH)
        results = {name: total / examples for name, total in totals.items()}
        for name, count in session.run(self._count_values).items():
            results[name] = float(count)
        results[_EXAMPLES] = examples
        return results

    def predict(self, session: tf.Session) -> typing.Iterator:
        """Predicts all examples of the data set, in their order.

        Returns:
          A generator with an entry for each batch: a nest of arrays [batch, …], with the structure
          of the predictions that the model function returns.
        """
        leaves = tf.nest.flatten(self.built.predictions)
        if not leaves or any(leaf is None for leaf in leaves):
            raise InvalidArgumentError('the model function returned no predictions: expected some '
                                       'beside the loss, as in ModelOutput(loss, predictions=...).')
        check_session(session, self._size.graph)
        return (predictions for _, predictions in self._batches(session, self.built.predictions))

    def check_examples(self, session: tf.Session, read: bool = False) -> None:
        """Raises `InputError` for a data set that is empty or endless.

        Args:
          session: a `tf.Session` with the variables initialized.
          read: whether to read a batch, to see that there is one, if TensorFlow does not know the
            length of the data set. False: no error is raised for such a data set.
        """
        check_session(session, self._size.graph)
        num_batches = session.run(self._num_batches)
        if num_batches == tf.data.experimental.INFINITE_CARDINALITY:
            raise InputError('the data set to be evaluated has no end: expected one that goes '
                             'through the examples once, without .repeat().')
        if num_batches == 0:
            raise InputError(_NO_BATCH)
        is_unknown = num_batches < 0  # -2 is UNKNOWN_CARDINALITY, as of a data set that is filtered
        if read and is_unknown:
            # The batch goes through the model, as in `run`, so that an error there is raised now,
            # and not at the first evaluation. It is counted, too, but `run` begins again at 0.
            batches = self._batches(session, (self._means, self._count_updates))
            first_batch = next(batches, None)
            if first_batch is None:
                raise InputError(_NO_BATCH)

    def _batches(self, session: tf.Session, fetches: typing.Any
                 ) -> typing.Iterator[typing.Tuple[int, typing.Any]]:
        """Runs all batches of the data set; yields `(number of examples, fetched values)` of each.
        """
        session.run(self._iterator.initializer)
        while True:
            try:
                size, values = session.run([self._size, fetches], self._feed)
            except tf.errors.OutOfRangeError:
                return
            yield int(size), values


def _check_has_batches(dataset: typing.Any) -> None:
    """Raises `InputError` for a data set of single examples."""
    shapes = tf.data.get_output_shapes(dataset)
    if any(shape.ndims == 0 for shape in tf.nest.flatten(shapes)):
        raise InputError('dataset gives elements of the shapes %s, single examples: expected '
                         'batches, from its .batch(n).' % compat.shapes_text(shapes))


def _check_model(model: typing.Any, inputs: typing.Any, dataset: typing.Any) -> None:
    """Raises `InvalidArgumentError` for a model function with `inputs`, or a finished model whose
    `inputs` do not fit the data set."""
    if is_finished(model):
        _check_alike(inputs, dataset)
        return
    check_model_fn(model)
    if inputs is not None:
        raise InvalidArgumentError('inputs= is for the tensors of a finished model, and '
                                   'this is a model function.')


def _check_alike(inputs: typing.Any, dataset: typing.Any) -> None:
    """Raises `InvalidArgumentError` for inputs of another structure than the data set's elements.
    """
    types = tf.data.get_output_types(dataset)
    try:
        tf.nest.assert_same_structure(inputs, types)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            'inputs=%.80r: the model is finished, and expected are its tensors that take the '
            'elements of the data set, such as its placeholders, in a nest like %.200r.' % (
                inputs, types)) from None


def _by_tensor(inputs: typing.Any, batch: typing.Any) -> dict:
    """The inputs of a build by a finished model: {input of the model: tensor of the batch for it}.

    An input of the model is a tensor; or a `BatchAxis`, which is a tensor with the dimension of its
    examples. Then the tensor of the batch has its examples along the same dimension.
    """
    by_tensor = {}
    for model_input, leaf in zip(tf.nest.flatten(inputs), tf.nest.flatten(batch)):
        if isinstance(model_input, BatchAxis):
            leaf = BatchAxis(leaf, model_input.axis)
        by_tensor[model_input] = leaf
    return by_tensor


_EXAMPLES = 'examples'  # the name under which `run` gives the number of examples
_NO_BATCH = 'the data set to be evaluated has no batch: expected one at least.'


def _counters_of(built: BuiltTowers, counters: typing.Iterable[tf.Variable]
                 ) -> typing.List[tf.Variable]:
    """Those `counters` in which the metrics of a finished model count."""
    updates = [metric[1] for metric in built.metrics.values() if isinstance(metric, tuple)]
    written = _names_written(updates)
    return [counter for counter in counters if counter.op.name in written]


def _names_written(updates: typing.Iterable) -> typing.Set[str]:
    """The names of the variables that are written when these operations and tensors are run."""
    writes = Writes(tf.get_default_graph())
    names: typing.Set[str] = set()
    for op in step_operations(updates):
        names.update(writes.written_by(op))
    return names


def _checked_metrics(built: BuiltTowers, counters: typing.Sequence[tf.Variable]
                     ) -> typing.Dict[str, typing.Any]:
    """The metrics and losses of an evaluation, checked.

    Args:
      built: the towers of the evaluation.
      counters: the counters that begin at 0 in each evaluation.

    Returns:
      {name of a metric, or of a loss: its scalar tensor, or its pair of `tf.metrics`}.

    Raises:
      InvalidArgumentError: there is nothing to evaluate; a metric has the name of a loss, or is no
        scalar number; or a pair counts in another variable than `counters`.
    """
    metrics = dict(built.metrics)
    losses: typing.Dict[str, tf.Tensor] = {}
    if built.loss is not None:
        losses.update(with_parts('loss', built.loss))
    for name in metrics:
        if name in losses or name == _EXAMPLES:
            raise InvalidArgumentError('metric %r has the name of another result of an evaluation: '
                                       'give it another name.' % name)
    metrics.update(losses)
    if not metrics and built.predictions is None:
        raise InvalidArgumentError('the model function returned neither a loss nor metrics: there '
                                   'is nothing to evaluate.')
    # A mean over the batch is a scalar number: the build refuses any other.
    for name, metric in metrics.items():
        is_pair = isinstance(metric, tuple)
        if is_pair:
            value, update = metric
            _check_is_number(name, value)
            _check_counters(name, value, update, counters)
    return metrics


def _check_is_number(metric: str, value: typing.Any) -> None:
    """Raises `InvalidArgumentError` for a pair of `tf.metrics`, of this name, whose value is no
    scalar tensor of numbers."""
    if isinstance(value, (numbers.Number, np.generic)):
        raise InvalidArgumentError('metric %r is a pair with the value %.80r, a constant: expected '
                                   'a tensor that is computed from counters.' % (metric, value))
    if value.shape.ndims:  # None if the shape is not known: it may be a scalar
        raise InvalidArgumentError('metric %r has the shape %s: expected one number, or a '
                                   'metric for each.' % (metric, value.shape))
    dtype = value.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise InvalidArgumentError('metric %r is of type %s: expected a number.' % (
            metric, dtype.name))


def _check_counters(metric: str, value: tf.Tensor, update: typing.Any,
                    counters: typing.Sequence[tf.Variable]) -> None:
    """Raises `InvalidArgumentError` for a metric that counts in another variable than `counters`.

    A metric counts in the variables that its update writes and its value reads. The update may
    write others besides, as one that notes when it was run.

    Args:
      metric: the name of the metric.
      value: the scalar of the metric.
      update: the operation or tensor that counts a batch.
      counters: the counters that begin at 0 in each evaluation.
    """
    names_of_others = _names_written([update]) - operation_names(counters)
    for op in step_operations([value]):
        # A variable that the value reads is among these operations, under the variable's name.
        is_other_counter = op.name in names_of_others
        if is_other_counter:
            raise InvalidArgumentError(
                'metric %r counts in the variable %r, which is no counter of this evaluation alone '
                'that begins at 0: make it by tf.Variable(..., collections=[LOCAL_VARIABLES, '
                'METRIC_VARIABLES]), as tf.metrics does.' % (metric, op.name))
