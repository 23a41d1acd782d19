"""The values that a model function may return, and how the towers' values become one."""

import collections
import inspect
import numbers

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import MissingPackageError, ModelFunctionError
from towers.graph.graph_walk import ancestors, fetches_in, leaves_of
from towers.graph.op_types import ADDS, ADDS_ROWS, SETS
from towers.shards.cut_batch import weighted


class ModelOutput(collections.namedtuple('ModelOutput', 'loss predictions metrics updates',
                                         defaults=(None, None, None, ()))):
    """The value that a model function returns when a loss alone is not enough.

    Each field may be left out: `ModelOutput(loss, predictions=logits)`.

    Attributes:
      loss: scalar, the mean over the shard's examples; a dict of scalars by name where each has an
        optimizer; None for prediction only.
      predictions: a nest of tensors [shard, …], or scalars.
      metrics: dict from name to a scalar (a mean over the shard), or to the `(value, update_op)`
        pair of `tf.metrics`, whose counters the towers share.
      updates: ops to run once a step that are in no collection.
    """
    __slots__ = ()


def fetches_of(output):
    """The tensors that a model function returned to be computed, as a flat list."""
    return fetches_in([output.loss, output.predictions, output.metrics])


def call_model_fn(model_fn, inputs):
    """Calls the model function with its shard: a plain tuple or list is spread over arguments."""
    arguments = inputs if type(inputs) in (tuple, list) else [inputs]
    try:
        signature = inspect.signature(model_fn)
        signature.bind(*arguments)
    except ValueError:
        pass  # some callables of C have no signature; Python raises an error of its own then
    except TypeError as error:
        raise ModelFunctionError(
            'the model function %s%s cannot take the inputs: %s. Inputs that are a tuple or a list '
            'become one argument each (%d here), everything else is one argument.' % (
                getattr(model_fn, '__name__', 'model_fn'), signature, error,
                len(arguments))) from None
    try:
        return model_fn(*arguments)
    except (AttributeError, ImportError, RecursionError) as error:
        missing = compat.missing_layers(error)
        if missing is None:
            raise
        raise MissingPackageError(missing) from error


def to_model_output(returned, needs_loss, names=None):
    """The returned value as a `ModelOutput`; `names` are the names of several losses, or None."""
    if isinstance(returned, (tf.Tensor,) + compat.VARIABLE_TYPES):
        output = ModelOutput(loss=returned)
    elif isinstance(returned, dict) and set(returned) <= set(ModelOutput._fields):
        output = ModelOutput(**returned)
    elif hasattr(returned, 'loss') or hasattr(returned, 'predictions'):
        output = ModelOutput(*[getattr(returned, field, default) for field, default
                               in zip(ModelOutput._fields, ModelOutput())])
    else:
        raise ModelFunctionError(
            'the model function returned %s: expected a scalar loss, or a dict or ModelOutput with '
            'some of %s%s.%s' % (
                'None (is a return statement missing?)' if returned is None else
                'a dict with the keys %.200s' % _listed(returned) if isinstance(returned, dict) else
                'a ' + type(returned).__name__, ', '.join(ModelOutput._fields),
                '' if names is None else ", {'loss': {%s}}" % _listed(names, ': …'),
                _registered_losses()))
    updates = output.updates if output.updates is not None else ()
    if not isinstance(updates, (list, tuple)) or not all(isinstance(
            each, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES) for each in updates):
        raise ModelFunctionError('the model function returned updates=%.80r: expected a list of '
                                 'operations or tensors.' % (updates,))
    for field in ('predictions', 'metrics', 'updates'):
        _check_graph(field, getattr(output, field))
    _check_metric_pairs(output.metrics)
    if output.loss is None:
        if needs_loss:
            raise ModelFunctionError(
                'the model function returned no loss, and there is an optimizer to minimize one: '
                'return a loss, or pass optimizer=None.' + _registered_losses())
        return output
    if names is None and not isinstance(output.loss, dict):
        return output._replace(loss=_scalar_loss(output.loss))
    return output._replace(loss=_named_losses(output.loss, names, needs_loss))


def _check_graph(field, values):
    """Raises `ModelFunctionError` for a tensor or operation of another graph than the default."""
    try:
        fetches = fetches_in(values)
    except TypeError as error:  # a dict whose keys have no order
        raise ModelFunctionError('the model function returned %s=%.80r: %s.' % (
            field, values, error)) from None
    for fetch in fetches:
        if fetch.graph is not tf.get_default_graph():
            raise ModelFunctionError(
                'the model function returned %r in its %s, which belongs to another graph: make it '
                'in the model function.' % (fetch.name, field))


def _check_metric_pairs(metrics):
    """Raises `ModelFunctionError` for a pair of something else than a number and an update."""
    tensors = (tf.Tensor,) + compat.VARIABLE_TYPES
    if not isinstance(metrics, dict):
        return  # refused where metrics are merged
    for name, value in metrics.items():
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            continue
        has_number = isinstance(value[0], tensors + (numbers.Number, np.generic))
        if not has_number or not isinstance(value[1], tensors + (tf.Operation,)):
            raise ModelFunctionError('metric %r is the pair %.80r: expected the (value, update_op) '
                                     'of tf.metrics.' % (name, tuple(value)))


def _listed(names, after=''):
    return ', '.join('%r%s' % (name, after) for name in names)


def _named_losses(losses, names, needs_loss):
    """Several losses, in the order of `names`; where `names` is None, in their own order."""
    if names is None:
        if needs_loss:
            raise ModelFunctionError(
                'the model function returned several losses, %s, and there is one optimizer: pass '
                'one for each, optimizer={%s} (to check_towers a make_optimizer= that returns such '
                'a dict), or return one scalar.' % (_listed(losses), _listed(losses, ': …')))
        names = list(losses)
    if not isinstance(losses, dict) or set(losses) != set(names):
        raise ModelFunctionError(
            "the model function returned the losses %.200s, and the optimizers are for %s: return "
            "one loss for each optimizer and no other, {'loss': {%s}}." % (
                _listed(losses) if isinstance(losses, dict) else losses, _listed(names),
                _listed(names, ': …')))
    return collections.OrderedDict(
        (name, _scalar_loss(losses[name], ', for %r,' % name)) for name in names)


def _scalar_loss(loss, of_whom=''):
    is_tensor, graph = isinstance(loss, (tf.Tensor,) + compat.VARIABLE_TYPES), None
    if is_tensor:
        loss = tf.convert_to_tensor(loss)
        graph = loss.graph
    if graph is not tf.get_default_graph() or not loss.dtype.is_floating or loss.shape.ndims != 0:
        raise ModelFunctionError(
            'the model function%s returned the loss %.80r: expected a scalar float of this graph, '
            'the mean over the examples of the shard.%s' % (of_whom, loss, _registered_losses()))
    return loss


def _registered_losses():
    """Advice for a model that registers losses (slim's do) and returns none; else ''."""
    return '' if not tf.losses.get_losses() else (
        ' There are losses in the collection LOSSES: if what it returns are predictions, return '
        "{'loss': tf.losses.get_total_loss(), 'predictions': ...}.")


def metrics_by_kind(metrics):
    """`(scalars, pairs)`: lists of the values, and of the `(value, update_op)`s, of metrics."""
    values = list(metrics.values()) if isinstance(metrics, dict) else []
    pairs = [value for value in values if isinstance(value, (tuple, list)) and len(value) == 2]
    return [value for value in values if isinstance(value, tf.Tensor)], pairs


def merge_metrics(metrics, weights, inputs=()):
    """The towers' metrics, a dict or None each, as one dict: a scalar becomes the mean over all
    examples; a `(value, update_op)` pair stays one, whose update runs the updates of all towers
    with examples, see `metric_counters`."""
    if metrics[0] is None:
        return {}
    if not all(isinstance(metric, dict) and set(metric) == set(metrics[0]) for metric in metrics):
        raise ModelFunctionError('the metrics of the model function have to be a dict with the '
                                 'same names in every tower, and are %.80r.' % (metrics[0],))
    merged, of_shard = {}, {leaf.op.name for leaf in leaves_of(inputs)}
    for name in metrics[0]:
        values = [metric[name] for metric in metrics]
        if isinstance(values[0], (tuple, list)) and len(values[0]) == 2:
            # Computed from the shard by a way that does not lead through counters?
            if len(metrics) > 1 and isinstance(values[0][0], tf.Tensor) and (
                    of_shard & ancestors([values[0][0]], SETS | ADDS | ADDS_ROWS)):
                raise ModelFunctionError(
                    'metric %r is a pair with the value %r, which is computed from one shard of '
                    'the batch and not from counters, so that it is none of the whole batch. Pass '
                    'tf.metrics.mean(values), of one value for each example; or, to build_towers, '
                    'the scalar alone, for its mean over the towers.' % (name, values[0][0].name))
            updates = [update for (_, update), weight in zip(values, weights)
                       if not (isinstance(weight, float) and weight == 0.)]
            with tf.control_dependencies(updates):  # the last tower counts after all others
                merged[name] = (values[0][0], tf.identity(updates[-1]) if isinstance(
                    updates[-1], tf.Tensor) else tf.no_op())
        elif _is_scalar_number(values[0]):
            merged[name] = weighted_mean(values, weights)
        else:
            raise ModelFunctionError(
                'metric %r is %.80r: expected a scalar number (the mean over the shard) or the '
                '(value, update_op) pair of tf.metrics.' % (name, values[0]))
    return merged


def _is_scalar_number(value):
    return isinstance(value, tf.Tensor) and value.shape.ndims == 0 and (
        value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool)


def weighted_mean(values, weights):
    """`sum_k weight_k * value_k` of scalars; a value of weight 0 is left out, even if it is NaN."""
    if len(values) == 1:
        return tf.identity(values[0])
    return tf.add_n([weighted(value if value.dtype.is_floating else tf.cast(value, tf.float32),
                              weight) for value, weight in zip(values, weights)])
