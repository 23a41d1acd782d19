"""The values that a model function may return, and how the towers' values become one."""

import collections
import inspect

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import MissingPackageError, ModelFunctionError
from towers.graph.graph_walk import ancestors, fetches_in, leaves_of
from towers.graph.op_types import ADDS, ADDS_ROWS, SETS
from towers.tower.shards import weighted


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


_FIELDS, _WHERE = ModelOutput._fields, 'the model function'


def fetches_of(output):
    """The tensors that a model function returned to be computed, as a flat list."""
    return fetches_in([output.loss, output.predictions, output.metrics])


def call_model_fn(model_fn, inputs):
    """Calls the model function with its shard: a plain tuple or list is spread over arguments.

    Raises `ModelFunctionError` where it takes another number of arguments, `MissingPackageError`
    where it uses `tf.layers`, which this TensorFlow does not have by itself.
    """
    arguments = inputs if type(inputs) in (tuple, list) else [inputs]
    try:
        signature = inspect.signature(model_fn)
    except (TypeError, ValueError):
        signature = None  # some callables of C have none; Python raises an error of its own then
    if signature is not None:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise ModelFunctionError(
                'the model function %s%s cannot take the inputs: %s. Inputs that are a tuple or a '
                'list become one argument each (%d here), everything else is one argument.'
                % (getattr(model_fn, '__name__', 'model_fn'), signature, error,
                   len(arguments))) from None
    try:
        return model_fn(*arguments)
    except (AttributeError, ImportError, RecursionError) as error:
        missing = compat.missing_layers(error)
        if missing is None:
            raise
        raise MissingPackageError(missing) from error


def to_model_output(returned, needs_loss, names=None):
    """Checks the value that the model function returned and makes it a `ModelOutput`.

    Args:
      returned: a scalar tensor; a dict or an object with some of the fields of `ModelOutput`.
      needs_loss: whether there is an optimizer.
      names: list of the names of several losses; None for one loss.

    Raises:
      ModelFunctionError: None, an unknown type or key, a loss that is missing or no scalar float.
    """
    if isinstance(returned, (tf.Tensor,) + compat.VARIABLE_TYPES):
        output = ModelOutput(loss=returned)
    elif isinstance(returned, dict) and set(returned) <= set(_FIELDS):
        output = ModelOutput(**returned)
    elif hasattr(returned, 'loss') or hasattr(returned, 'predictions'):
        output = ModelOutput(*[getattr(returned, field, default) for field, default
                               in zip(_FIELDS, ModelOutput())])
    else:
        raise _not_an_output(returned, names)
    updates = output.updates if output.updates is not None else ()
    if not isinstance(updates, (list, tuple)) or not all(isinstance(
            each, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES) for each in updates):
        raise ModelFunctionError('%s returned updates=%.80r: expected a list of operations or '
                                 'tensors.' % (_WHERE, updates))
    if output.loss is None:
        if needs_loss:
            raise ModelFunctionError('%s returned no loss, and there is an optimizer to minimize '
                                     'one: return a loss, or pass optimizer=None.%s' % (
                                         _WHERE, _registered_losses()))
        return output
    if names is None and not isinstance(output.loss, dict):
        return output._replace(loss=_scalar_loss(output.loss, _WHERE))
    return output._replace(loss=_named_losses(output.loss, names, needs_loss))


def _not_an_output(returned, names):
    """The error about a value that is no loss and has no losses and predictions by name."""
    if returned is None:
        return ModelFunctionError(
            "%s returned None: return the loss, or a dict or ModelOutput with 'loss' (is a return "
            'statement missing?).%s' % (_WHERE, _registered_losses()))
    if isinstance(returned, dict):
        if names is not None and set(returned) == set(names):
            return ModelFunctionError(
                "%s returned the losses %s themselves: expected them under 'loss', return {'loss': "
                '{%s}}.' % (_WHERE, _listed(names), _listed(names, ': …')))
        return ModelFunctionError('%s returned a dict with the key %r: expected some of %s.%s' % (
            _WHERE, min(map(str, set(returned) - set(_FIELDS))), ', '.join(_FIELDS),
            '' if 'loss' in returned else _registered_losses()))
    return ModelFunctionError(
        '%s returned a %s: expected a scalar loss, or a dict or ModelOutput with some of %s.%s' % (
            _WHERE, type(returned).__name__, ', '.join(_FIELDS), _registered_losses()))


def _listed(names, after=''):
    return ', '.join('%r%s' % (name, after) for name in names)


def _named_losses(losses, names, needs_loss):
    """Several losses, in the order of `names`; where `names` is None, in their own order."""
    if names is None:
        if needs_loss:
            raise ModelFunctionError(
                '%s returned several losses, %s, and there is one optimizer: pass one for each, '
                'optimizer={%s} (to check_towers a make_optimizer= that returns such a dict), or '
                'return one scalar.' % (_WHERE, _listed(losses), _listed(losses, ': …')))
        names = list(losses)
    if not isinstance(losses, dict) or set(losses) != set(names):
        raise ModelFunctionError(
            "%s returned the losses %.200s, and the optimizers are for %s: return one loss for "
            "each optimizer and no other, {'loss': {%s}}." % (
                _WHERE, _listed(losses) if isinstance(losses, dict) else losses, _listed(names),
                _listed(names, ': …')))
    return collections.OrderedDict(
        (name, _scalar_loss(losses[name], '%s, for %r,' % (_WHERE, name))) for name in names)


def _scalar_loss(loss, where):
    if not isinstance(loss, (tf.Tensor,) + compat.VARIABLE_TYPES):
        raise ModelFunctionError('%s returned the loss %r of type %s: expected a scalar tensor.'
                                 % (where, loss, type(loss).__name__))
    loss, wrong = tf.convert_to_tensor(loss), None
    if loss.graph is not tf.get_default_graph():
        wrong = ('the loss %r of another graph: make it of the inputs that it is called with.'
                 % loss.name)
    elif not loss.dtype.is_floating:
        wrong = 'a loss of dtype %s: expected a float.' % loss.dtype.name
    elif loss.shape.ndims != 0:
        wrong = ('a loss of shape %s: expected a scalar, the mean over the examples of the shard.%s'
                 % (loss.shape, _registered_losses() or ' Take tf.reduce_mean of it.'))
    if wrong is not None:
        raise ModelFunctionError('%s returned %s' % (where, wrong))
    return loss


def _registered_losses():
    """Advice for a model that registers losses (slim's do) and returns none; else ''."""
    count = len(tf.losses.get_losses())
    return '' if not count else (
        ' There %s in the collection LOSSES: if what it returns are predictions, return '
        "{'loss': tf.losses.get_total_loss(), 'predictions': ...}." % (
            'is 1 loss' if count == 1 else 'are %d losses' % count))


def merge_predictions(predictions, sizes, examples=None):
    """The towers' predictions as one nest: leaves [n, …]; scalars [N], of towers with an example.

    Args:
      predictions: list of N equal nests of tensors.
      sizes: N numbers of examples where a shard without one holds padding, whose rows are left
        out; None where shards hold just their examples.
      examples: of the first shard, an int; None where it is not static.

    Raises:
      ModelFunctionError: the nests differ from tower to tower, or hold what is no prediction.
    """
    columns = []
    try:
        tf.nest.map_structure(lambda *column: columns.append(column), *predictions)
    except (ValueError, TypeError) as error:
        raise ModelFunctionError('the predictions of the towers differ in structure: %s'
                                 % str(error).split('\n', 1)[0]) from None
    for column in columns:
        _check_prediction(column[0], examples if len(predictions) > 1 else None)
    return tf.nest.pack_sequence_as(predictions[0], [_merge(list(each), sizes) for each in columns])


def _check_prediction(leaf, examples):
    """Raises for no tensor, and for a tensor that is not of the shard's examples: joined, it would
    be none of the batch's. An example may have several rows."""
    if leaf is not None and not isinstance(leaf, (
            tf.Tensor, tf.SparseTensor, bool, int, float, str, bytes, np.ndarray,
            np.generic) + compat.VARIABLE_TYPES):
        raise ModelFunctionError('the model function returned %.80r of type %s among its '
                                 'predictions: expected tensors [shard, ...], or scalars.'
                                 % (leaf, type(leaf).__name__))
    rows = leaf.shape.as_list()[0] if isinstance(leaf, tf.Tensor) and leaf.shape.ndims else None
    if examples is not None and rows is not None and (rows == 0 or rows % examples):
        raise ModelFunctionError(
            'the prediction %r has shape %s, and the shard has %d examples: expected a tensor '
            '[shard, ...], which is joined to one of the batch, or a scalar. Return what is of the '
            'whole shard as a metric, or take it from built.towers[k].' % (
                leaf.name, leaf.shape, examples))


def _merge(parts, sizes):
    if parts[0] is None:
        return None
    if isinstance(parts[0], tf.SparseTensor):
        if sizes is not None:
            parts = [tf.sparse.slice(
                part, tf.zeros_like(part.dense_shape), tf.concat(
                    [[tf.cast(_rows(part.dense_shape[0], size), tf.int64)], part.dense_shape[1:]],
                    0)) for part, size in zip(parts, sizes)]
        # Shards may differ in the other dimensions, as the texts of a decoder do in length.
        return tf.sparse.concat(0, parts, expand_nonconcat_dim=True)
    parts = [tf.convert_to_tensor(part) for part in parts]
    if parts[0].shape.ndims == 0:
        scalars = tf.stack(parts)
        return scalars if sizes is None else tf.boolean_mask(scalars, tf.stack(sizes) > 0)
    if sizes is not None:
        parts = [part[:_rows(tf.shape(part)[0], size)] for part, size in zip(parts, sizes)]
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _rows(rows, size):
    """How many rows of a shard's prediction count: none if its example is padding, else all."""
    return (rows if size else 0) if isinstance(size, int) else tf.where(
        size > 0, rows, tf.zeros_like(rows))


def metrics_by_kind(metrics):
    """`(scalars, pairs)`: lists of the values, and of the `(value, update_op)`s, of metrics."""
    values = list(metrics.values()) if isinstance(metrics, dict) else []
    pairs = [value for value in values if isinstance(value, (tuple, list)) and len(value) == 2]
    return [value for value in values if isinstance(value, tf.Tensor)], pairs


def merge_metrics(metrics, weights, inputs=()):
    """The towers' metrics as one dict.

    A scalar becomes the mean over all examples, `sum_k weight_k * value_k`. A `(value, update_op)`
    pair of `tf.metrics` stays a pair: the counters are shared, so the value of any tower reads the
    counts of all, and the update runs the updates of all towers but those that hold only padding;
    its value is of all counts. Where the batch size is not static these add nothing, see
    `metric_counters`; but a running maximum and the like sees the padding, in training.

    Args:
      metrics: for each tower a dict, or None.
      weights: for each tower its weight in means.
      inputs: the first tower's shard: a nest of tensors.

    Raises:
      ModelFunctionError: no dict of scalars and pairs; a pair whose value is of one shard.
    """
    if metrics[0] is None:
        return {}
    if not all(isinstance(metric, dict) and set(metric) == set(metrics[0]) for metric in metrics):
        raise ModelFunctionError('the metrics of the model function have to be a dict with the '
                                 'same names in every tower, and are %r.' % (metrics[0],))
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
        elif isinstance(values[0], tf.Tensor) and values[0].shape.ndims == 0:
            merged[name] = weighted_mean(values, weights)
        else:
            raise ModelFunctionError(
                'metric %r is %r: expected a scalar tensor (the mean over the shard) or the '
                '(value, update_op) pair of tf.metrics.' % (name, values[0]))
    return merged


def weighted_mean(values, weights):
    """`sum_k weight_k * value_k` of scalars; a value of weight 0 is left out, even if it is NaN."""
    if len(values) == 1:
        return tf.identity(values[0])
    return tf.add_n([weighted(value if value.dtype.is_floating else tf.cast(value, tf.float32),
                              weight) for value, weight in zip(values, weights)])
