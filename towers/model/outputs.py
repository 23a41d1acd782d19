"""The values that a model function may return, and how the towers' values become one."""

import collections
import inspect
import numbers
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import MissingPackageError, ModelFunctionError
from towers.graph.graph_walk import ancestors, fetches_in, leaves_of, operation_names
from towers.graph.op_types import ADDS, ADDS_ROWS, SETS
from towers.shards.cut_batch import is_always_empty, weighted

_TENSORS = (tf.Tensor,) + compat.VARIABLE_TYPES


class ModelOutput(typing.NamedTuple):
    """The value that a model function returns when a loss is not enough.

    Each field may be left out: `ModelOutput(loss, predictions=logits)`.

    Attributes:
      loss: scalar, the mean over the shard's examples; a dict of scalars by name where each has an
        optimizer; None for prediction only.
      predictions: a nest of tensors [shard, …], or scalars.
      metrics: dict from name to a scalar (a mean over the shard), or to the `(value, update_op)`
        pair of `tf.metrics`, whose counters the towers share.
      updates: ops to run once a step that are in no collection.
    """
    loss: typing.Any = None
    predictions: typing.Any = None
    metrics: typing.Any = None
    updates: typing.Sequence = ()


def fetches_of(output: ModelOutput) -> list:
    """Flat list of the tensors in the loss, the predictions and the metrics of a model function."""
    return fetches_in([output.loss, output.predictions, output.metrics])


def call_model_fn(model_fn: typing.Callable, inputs: typing.Any) -> typing.Any:
    """Calls the model function with its shard.

    Args:
      model_fn: the model function.
      inputs: the shard. A plain tuple or list becomes one argument for each entry; anything else is
        one argument.

    Returns:
      What the model function returns.

    Raises:
      ModelFunctionError: it does not take so many arguments.
      MissingPackageError: it needs `tf.layers`, and the package that has these is not installed.
    """
    is_plain = type(inputs) in (tuple, list)  # a named tuple is one argument
    arguments = inputs if is_plain else [inputs]
    _check_takes(model_fn, arguments)
    try:
        return model_fn(*arguments)
    except (AttributeError, ImportError) as error:
        what_to_install = compat.missing_layers(error)
        if what_to_install is None:  # an error of the model function itself
            raise
        raise MissingPackageError(what_to_install) from error


def _check_takes(model_fn: typing.Callable, arguments: typing.Sequence) -> None:
    """Raises `ModelFunctionError` for a model function that does not take so many arguments."""
    try:
        signature = inspect.signature(model_fn)
    except ValueError:
        return  # some callables of C have no signature; Python raises an error of its own then
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ModelFunctionError(
            'the model function %s%s cannot take the inputs: %s. Inputs that are a tuple or a list '
            'become one argument each (%d here), everything else is one argument.' % (
                getattr(model_fn, '__name__', 'model_fn'), signature, error,
                len(arguments))) from None


def to_model_output(returned: typing.Any, needs_loss: bool,
                    names: typing.Optional[typing.List[str]] = None) -> ModelOutput:
    """Checks the value that a model function returned, and makes it a `ModelOutput`.

    Args:
      returned: the value.
      needs_loss: whether there is an optimizer.
      names: the names of several losses, or None.

    Raises:
      ModelFunctionError: the value cannot become a `ModelOutput`; or a field has a value of a wrong
        kind, such as a loss that is no scalar.
    """
    output = _as_model_output(returned, names)
    _check_updates(output.updates)
    for field in ('predictions', 'metrics', 'updates'):
        _check_graph(field, getattr(output, field))
    _check_metric_pairs(output.metrics)
    if output.loss is None:
        if needs_loss:
            raise ModelFunctionError(
                'the model function returned no loss, and there is an optimizer to minimize one: '
                'return a loss, or pass optimizer=None.' + _advice_on_registered_losses())
        return output
    return output._replace(loss=_checked_loss(output.loss, needs_loss, names))


def _checked_loss(loss: typing.Any, needs_loss: bool,
                  names: typing.Optional[typing.List[str]]) -> typing.Any:
    """Checks what a model function returned as its loss, and returns it as a scalar; of several
    losses, as {name: scalar}.

    Args:
      loss: what it returned; not None.
      needs_loss, names: see `to_model_output`.
    """
    if names is not None:
        return _named_losses(loss, names)
    if not isinstance(loss, dict):
        return _scalar_loss(loss)
    if needs_loss:
        raise ModelFunctionError(
            'the model function returned several losses, %s, and there is one optimizer: pass '
            'one for each, optimizer={%s} (to check_towers a make_optimizer= that returns such '
            'a dict), or return one scalar.' % (_listed(loss), _listed(loss, ': …')))
    return _named_losses(loss, list(loss))  # an evaluation takes any names


def _as_model_output(returned: typing.Any,
                     names: typing.Optional[typing.List[str]]) -> ModelOutput:
    """Makes a `ModelOutput` of a loss, a dict, or an object with the fields of a `ModelOutput`. The
    values of the fields are not checked.

    Args:
      returned: what the model function returned.
      names: the names of several losses, or None.

    Raises:
      ModelFunctionError: `returned` is something else.
    """
    if isinstance(returned, _TENSORS):
        return ModelOutput(loss=returned)
    if isinstance(returned, dict) and set(returned) <= set(ModelOutput._fields):
        return ModelOutput(**returned)
    if hasattr(returned, 'loss') or hasattr(returned, 'predictions'):  # as an EstimatorSpec
        fields = {field: getattr(returned, field)
                  for field in ModelOutput._fields if hasattr(returned, field)}
        return ModelOutput(**fields)
    several = ''
    if names is not None:
        several = ", {'loss': {%s}}" % _listed(names, ': …')
    raise ModelFunctionError(
        'the model function returned %s: expected a scalar loss, or a dict or ModelOutput with '
        'some of %s%s.%s' % (
            _text_of(returned), ', '.join(ModelOutput._fields), several,
            _advice_on_registered_losses()))


def _text_of(returned: typing.Any) -> str:
    """The words of an error for a value that cannot become a `ModelOutput`."""
    if returned is None:
        return 'None (is a return statement missing?)'
    if isinstance(returned, dict):
        return 'a dict with the keys %.200s' % _listed(returned)
    return 'a ' + type(returned).__name__


def _check_updates(updates: typing.Any) -> None:
    """Raises `ModelFunctionError` for updates that are no list of operations and tensors; None, for
    no updates, passes."""
    if updates is None:
        return
    is_list = isinstance(updates, (list, tuple))
    if not is_list or not all(isinstance(each, (tf.Operation,) + _TENSORS) for each in updates):
        raise ModelFunctionError('the model function returned updates=%.80r: expected a list of '
                                 'operations or tensors.' % (updates,))


def _check_graph(field: str, values: typing.Any) -> None:
    """Raises `ModelFunctionError` if a tensor or operation in a field of a `ModelOutput` belongs to
    another graph than the default one."""
    try:
        fetches = fetches_in(values)
    except TypeError as error:  # of a dict whose keys have no order, which TensorFlow sorts
        raise ModelFunctionError('the model function returned %s=%.80r: %s.' % (
            field, values, error)) from None
    for fetch in fetches:
        if fetch.graph is not tf.get_default_graph():
            raise ModelFunctionError(
                'the model function returned %r in its %s, which belongs to another graph: make it '
                'in the model function.' % (fetch.name, field))


def _check_metric_pairs(metrics: typing.Any) -> None:
    """Raises `ModelFunctionError` for a pair among metrics that is not a number and an update."""
    if not isinstance(metrics, dict):
        return  # None; or something that `merge_metrics` refuses
    for name, value in metrics.items():
        if not _is_pair(value):
            continue
        number, update = value
        has_number = isinstance(number, _TENSORS + (numbers.Number, np.generic))
        has_update = isinstance(update, _TENSORS + (tf.Operation,))
        if not has_number or not has_update:
            raise ModelFunctionError('metric %r is the pair %.80r: expected the (value, update_op) '
                                     'of tf.metrics.' % (name, tuple(value)))


def _is_pair(metric: typing.Any) -> bool:
    """Whether a metric may be the `(value, update_op)` of `tf.metrics`."""
    return isinstance(metric, (tuple, list)) and len(metric) == 2


def _listed(names: typing.Iterable, after: str = '') -> str:
    """Names as text for an error, each followed by the text `after`."""
    return ', '.join('%r%s' % (name, after) for name in names)


def _named_losses(losses: typing.Any, names: typing.List[str]) -> typing.Dict[str, tf.Tensor]:
    """Checks several losses, and puts them into the order of the optimizers.

    Args:
      losses: what the model function returned as its loss.
      names: the names that the losses have to have.

    Returns:
      {name: scalar loss}.

    Raises:
      ModelFunctionError: other names than the optimizers have; a loss that is no scalar.
    """
    if not isinstance(losses, dict) or set(losses) != set(names):
        given = _listed(losses) if isinstance(losses, dict) else losses
        raise ModelFunctionError(
            "the model function returned the losses %.200s, and the optimizers are for %s: return "
            "one loss for each optimizer and no other, {'loss': {%s}}." % (
                given, _listed(names), _listed(names, ': …')))
    checked = collections.OrderedDict()
    for name in names:
        checked[name] = _scalar_loss(losses[name], ', for %r,' % name)
    return checked


def _scalar_loss(loss: typing.Any, which: str = '') -> tf.Tensor:
    """Checks a loss, and returns it as a tensor.

    Args:
      loss: what the model function returned.
      which: in errors, text that says which of several losses it is.

    Raises:
      ModelFunctionError: it is no scalar float of this graph.
    """
    if isinstance(loss, _TENSORS):
        loss = tf.convert_to_tensor(loss)
        is_of_graph = loss.graph is tf.get_default_graph()
        if is_of_graph and loss.dtype.is_floating and loss.shape.ndims == 0:
            return loss
    raise ModelFunctionError(
        'the model function%s returned the loss %.80r: expected a scalar float of this graph, '
        'the mean over the examples of the shard.%s' % (
            which, loss, _advice_on_registered_losses()))


def _advice_on_registered_losses() -> str:
    """Advice for a model function that registers losses, as slim's do, and returns no loss; '' for
    any other."""
    if not tf.losses.get_losses():
        return ''
    return (' There are losses in the collection LOSSES: if what it returns are predictions, '
            "return {'loss': tf.losses.get_total_loss(), 'predictions': ...}.")


# ---- metrics -------------------------------------------------------------------------------------

def metrics_by_kind(metrics: typing.Any) -> typing.Tuple[list, list]:
    """`(scalars, pairs)`: the list of the metrics that are scalars, and the list of the metrics
    that are pairs `(value, update_op)` of `tf.metrics`."""
    if not isinstance(metrics, dict):
        return [], []  # None; or something that `merge_metrics` refuses
    values = list(metrics.values())
    scalars = [value for value in values if isinstance(value, tf.Tensor)]
    pairs = list(filter(_is_pair, values))
    return scalars, pairs


def metric_updates(metrics: typing.Any) -> list:
    """List of the update_ops of the metrics that are pairs `(value, update_op)` of `tf.metrics`."""
    _, pairs = metrics_by_kind(metrics)
    return [update for _, update in pairs]


def merge_metrics(metrics: typing.Sequence, weights: typing.Sequence,
                  inputs: typing.Any = ()) -> typing.Dict[str, typing.Any]:
    """Merges the towers' metrics into the metrics of the batch.

    Args:
      metrics: what the model function returned in each tower, a dict or None.
      weights: the weights of the towers' shards.
      inputs: the shard of tower 0, whose metrics are checked.

    Returns:
      {name: metric}. A scalar becomes the mean over all examples. A `(value, update_op)` pair stays
      a pair, whose update runs the updates of all towers with examples; see `metric_counters`.

    Raises:
      ModelFunctionError: a metric is something else.
    """
    if metrics[0] is None:
        return {}
    for tower_metrics in metrics:
        if not isinstance(tower_metrics, dict) or set(tower_metrics) != set(metrics[0]):
            raise ModelFunctionError('the metrics of the model function have to be a dict with the '
                                     'same names in every tower, and are %.80r.' % (metrics[0],))
    merged = {}
    for name in metrics[0]:
        values = [tower_metrics[name] for tower_metrics in metrics]
        merged[name] = _merged_metric(name, values, weights, inputs)
    return merged


def _merged_metric(name: str, values: list, weights: typing.Sequence,
                   inputs: typing.Any) -> typing.Any:
    """One metric of the batch, as `merge_metrics` describes it.

    Args:
      name: the name of the metric.
      values: its value in each tower.
      weights: the weights of the towers' shards.
      inputs: the shard of tower 0.
    """
    first = values[0]
    if _is_pair(first):
        if len(values) > 1:  # the shard of a single tower is the whole batch
            _check_counts(name, first[0], inputs)
        return _merged_pair(values, weights)
    if _is_scalar_number(first):
        return weighted_sum(values, weights)
    raise ModelFunctionError(
        'metric %r is %.80r: expected a scalar number (the mean over the shard) or the '
        '(value, update_op) pair of tf.metrics.' % (name, first))


def _check_counts(name: str, value: typing.Any, inputs: typing.Any) -> None:
    """Refuses a pair of `tf.metrics` whose value is computed from a shard directly.

    The value of a pair has to be computed from counters alone, which all towers share: then the
    value of tower 0 is the value for the whole batch.

    Args:
      name: the name of the metric.
      value: the value of the pair, in tower 0.
      inputs: the shard of tower 0.
    """
    if not isinstance(value, tf.Tensor):
        return  # a number of Python's or numpy's is the same for every shard
    # The search ends at writes of variables: what a counter is written from does not matter.
    writes_of_counters = SETS | ADDS | ADDS_ROWS
    computed_from = ancestors([value], ends=writes_of_counters)
    is_from_shard = not computed_from.isdisjoint(operation_names(leaves_of(inputs)))
    if is_from_shard:
        raise ModelFunctionError(
            'metric %r is a pair with the value %r, which is computed from one shard of the batch '
            'and not from counters, so that it is none of the whole batch. Pass '
            'tf.metrics.mean(values), of one value for each example; or, to build_towers, the '
            'scalar alone, for its mean over the towers.' % (name, value.name))


def _merged_pair(pairs: typing.Sequence, weights: typing.Sequence) -> tuple:
    """The `(value, update_op)` pair of all towers.

    Args:
      pairs: the pair of each tower.
      weights: the weights of the towers. The updates of a tower that never has an example are not
        run: it would count padding.
    """
    updates = []
    for (_, update), weight in zip(pairs, weights):
        if not is_always_empty(weight):
            updates.append(update)
    value = pairs[0][0]  # computed from the counters, which all towers share
    # `join_counters` makes each tower count after the tower before. So the last update gives the
    # value for the whole batch.
    last_update = updates[-1]
    with tf.control_dependencies(updates):
        if isinstance(last_update, tf.Tensor):
            return value, tf.identity(last_update)
        return value, tf.no_op()  # a program's own metric may have an operation as its update


def _is_scalar_number(value: typing.Any) -> bool:
    """Whether a metric is a scalar tensor of numbers or truth values."""
    if not isinstance(value, tf.Tensor) or value.shape.ndims != 0:
        return False
    return value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool


def weighted_sum(values: typing.Sequence[tf.Tensor], weights: typing.Sequence) -> tf.Tensor:
    """`sum_k weight_k * value_k`, a scalar; a value of weight 0 counts nothing, even if it is
    NaN."""
    if len(values) == 1:  # its weight is 1; like a sum, the batch's value is a new tensor
        return tf.identity(values[0])
    terms = []
    for value, weight in zip(values, weights):
        if not value.dtype.is_floating:
            value = tf.cast(value, tf.float64)  # float32 does not hold every count above 2^24
        terms.append(weighted(value, weight))
    return tf.add_n(terms)
