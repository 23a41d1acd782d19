"""Calls an Estimator's model function, and merges the `EstimatorSpec`s of all towers into one."""

import functools
import inspect

import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError, ModelFunctionError
from towers.fronts.optimizer_calls import share_of_sum
from towers.placement.variable_device import only_device
from towers.tower.outputs import weighted_mean

_ARGUMENTS = ('features', 'labels', 'mode', 'params', 'config')
_ALWAYS = _ARGUMENTS[:3]
_NEEDED = {'train': ('loss', 'train_op'), 'eval': ('loss',), 'infer': ('predictions',)}
_MODES = tuple(_NEEDED)


class ModelFunction:
    """An Estimator's model function, which is called with the arguments that it has."""

    def __init__(self, function):
        """
        Args:
          function: `f(features, labels, mode, params, config)`, or some of these.

        Raises:
          ModelFunctionError: it cannot be called, or takes no features.
        """
        if not callable(function) or isinstance(function, type):
            raise ModelFunctionError('model_fn=%.80r cannot be called as the model function of an '
                                     'Estimator.' % (function,))
        parameters = list(inspect.signature(function).parameters.values())
        bound = function.keywords if isinstance(function, functools.partial) else {}
        self._names = {each.name for each in parameters} - set(bound)
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            self._names.update(_ALWAYS)
        if 'features' not in self._names:
            raise ModelFunctionError(
                'model_fn=%.80r takes no argument features: expected the model function of an '
                'Estimator, model_fn(features, labels, mode, params).' % (function,))
        unknown = [each.name for each in parameters
                   if each.name not in _ARGUMENTS and each.name not in bound
                   and each.default is each.empty
                   and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if unknown:
            raise ModelFunctionError(
                'model_fn=%.80r takes an argument %s: an Estimator gives %s. Bind it, by '
                'functools.partial(model_fn, %s=…), or give it a default.' % (
                    function, unknown[0], ', '.join(_ARGUMENTS), unknown[0]))
        self._function = function

    def __call__(self, features, labels, mode, params, config):
        """Calls the model function.

        Returns:
          Its `EstimatorSpec`.

        Raises:
          InvalidArgumentError: there are labels, and the function has no argument for them.
          ModelFunctionError: the function returns no `EstimatorSpec`.
        """
        if labels is not None and 'labels' not in self._names:
            raise InvalidArgumentError('the model function takes no labels, and labels=%.80r are '
                                       'given.' % (labels,))
        given = {'labels': labels, 'mode': mode, 'params': params, 'config': config}
        spec = self._function(features=features, **{
            name: value for name, value in given.items() if name in self._names})
        if not isinstance(spec, tf.estimator.EstimatorSpec):
            raise ModelFunctionError('the model function returned %.80r of type %s: expected a '
                                     'tf.estimator.EstimatorSpec.' % (spec, type(spec).__name__))
        # The class itself checks what its own mode needs. No predictions are an empty dict there.
        missing = [field for field in _NEEDED[mode] if spec.mode != mode
                   and (getattr(spec, field) is None or getattr(spec, field) == {})]
        if missing:
            raise ModelFunctionError(
                'the model function was called in mode %r and returned an EstimatorSpec of mode '
                '%r without %s: make the EstimatorSpec of the mode that it is called with.' % (
                    mode, spec.mode, ' and '.join(missing)))
        return spec


def check_mode(mode):
    """Raises `InvalidArgumentError` unless `mode` is one of `tf.estimator.ModeKeys`."""
    if mode not in _MODES:
        raise InvalidArgumentError('mode=%.80r: expected one of tf.estimator.ModeKeys, %s.' % (
            mode, ', '.join(map(repr, _MODES))))


def mergeable(spec):
    """The tensors of a spec for `build_towers` to merge: a nest of tensors [shard, …], scalars."""
    return {'predictions': {} if spec.predictions is None else spec.predictions,
            'export': {name: _parts(output)
                       for name, output in (spec.export_outputs or {}).items()}}


def metrics(spec):
    """The metrics of a spec, each as a `(value, update_op)` pair."""
    pairs = {}
    for name, metric in (spec.eval_metric_ops or {}).items():
        if hasattr(metric, 'update_state'):  # a Keras metric, which has been called
            metric = metric.result(), tf.group(*metric.updates)
        pairs[name] = metric
    return pairs


def merged_spec(spec, built, is_sum):
    """The spec over all towers.

    Args:
      spec: the first tower's spec.
      built: `BuiltTowers`, whose predictions are `mergeable`s.
      is_sum: whether the loss is the sum of the towers' losses, or their weighted mean.

    Returns:
      An `EstimatorSpec`: loss, predictions, metrics and export outputs are those of the whole
      batch, everything else is the first tower's.
    """
    loss = built.loss
    if loss is not None and is_sum:
        with only_device(built.placement.main):
            loss = weighted_mean([tower.loss for tower in built.towers],
                                 [share_of_sum(tower.size) for tower in built.towers])
    merged = built.predictions
    changed = {'loss': loss}
    if spec.predictions is not None:
        changed['predictions'] = merged['predictions']
    if spec.export_outputs is not None:
        changed['export_outputs'] = {
            name: _like(output, merged['export'][name])
            for name, output in spec.export_outputs.items()}
    if built.metrics:
        changed['eval_metric_ops'] = built.metrics
    return spec._replace(**changed)


def _parts(output):
    """The tensors of an export output."""
    kinds = tf.estimator.export
    if isinstance(output, kinds.ClassificationOutput):
        parts = {'scores': output.scores, 'classes': output.classes}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}
    if isinstance(output, kinds.RegressionOutput):
        return {'value': output.value}
    if isinstance(output, kinds.PredictOutput):
        return dict(output.outputs)
    raise ModelFunctionError(
        'the model function returned the export output %r of type %s: expected a '
        'ClassificationOutput, RegressionOutput or PredictOutput of tf.estimator.export.' % (
            output, type(output).__name__))


def _like(output, parts):
    """An export output of the same class."""
    if isinstance(output, tf.estimator.export.PredictOutput):
        return type(output)(outputs=parts)
    return type(output)(**parts)
