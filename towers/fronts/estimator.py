"""`replicate_model_fn` and `TowerOptimizer`: an Estimator's model function on several devices.

Its test is `tests/fronts/test_estimator.py`.
"""

import copy
import functools
import inspect
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers
from towers.api.built import BuiltTowers
from towers.arguments import check_choice, check_function
from towers.errors import InvalidArgumentError, MissingPackageError, ModelFunctionError
from towers.fronts.optimizer_calls import OptimizerCalls, calls_of
from towers.fronts.stand_ins import one_if_any
from towers.model.outputs import weighted_sum
from towers.optimizers import OptimizerAround, check_optimizer, has_own_minimize
from towers.placement.devices import check_one_stage, resolve_devices
from towers.placement.variable_device import only_device
from towers.whole_batch.predictions import RowsOfExamples

# The fields that an `EstimatorSpec` must have, by its mode.
_NEEDED = {'train': ('loss', 'train_op'), 'eval': ('loss',), 'infer': ('predictions',)}


def replicate_model_fn(model_fn: typing.Callable,
                       loss_reduction: str = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
                       devices: typing.Union[None, int, str, typing.Sequence] = None, *,
                       on_built: typing.Optional[typing.Callable] = None) -> typing.Callable:
    """Puts the model of an Estimator's model function onto several devices.

    It has the arguments and the effect of `tf.contrib.estimator.replicate_model_fn`:

        def model_fn(features, labels, mode, params):
            …
            optimizer = towers.TowerOptimizer(tf.train.AdamOptimizer(0.001))
            return tf.estimator.EstimatorSpec(
                mode, loss=loss, train_op=optimizer.minimize(loss, tf.train.get_global_step()))

        estimator = tf.estimator.Estimator(towers.replicate_model_fn(model_fn))

    Features and labels are cut into one shard a tower, sparse tensors by example; the model
    function is called once, and later towers are copies, see `build_towers`. With n_k of the
    batch's n examples on tower k, loss L_k and gradient dL_k there:

        Reduction.SUM:  loss = sum_k L_k,            gradient = sum_k dL_k
        any other:      loss = sum_k (n_k / n) L_k,  gradient = sum_k (n_k / n) dL_k

    So SUM is right for losses that are sums over the examples, every other reduction for means.

    In the `EstimatorSpec` the loss, the predictions, the metrics and the export outputs become
    those of the whole batch. Predictions and export outputs are in batch order; a mean or a sum
    over the shard becomes the batch's. All towers count metrics in one set of counters. All hooks
    and the scaffold are the first tower's, and so are operations that a program looks for by name.
    Batch-norm updates are the first tower's and ride on the train op, in `UPDATE_OPS` or not.

    With one device the model function is called directly, and its `EstimatorSpec` is not changed.

    Args:
      model_fn: a model function of an Estimator. It is called by keyword with the arguments that it
        has among `features`, `labels`, `mode`, `params` and `config`, and returns an
        `EstimatorSpec`. In training its optimizers are `TowerOptimizer`s.
      loss_reduction: one of `tf.losses.Reduction` except NONE.
      devices: see `resolve_devices`: None (every GPU, else one CPU), a count, or names. Each tower
        has one device; for stages use `build_towers`.
      on_built: called as `on_built(mode, built)` with the `BuiltTowers` of each mode, for its plan
        and the audit; not on one device, where nothing is built.

    Returns:
      A function `f(features, labels, mode, params=None, config=None)`, for `tf.estimator.Estimator`
      or to be called in a program of your own, with tensors, arrays, or placeholders.

    Raises:
      MissingPackageError: this TensorFlow has no Estimator.
      InvalidArgumentError: an unknown reduction.
      ModelFunctionError: `model_fn` is no model function.
      DeviceError: see `resolve_devices`.
      When it is called: `GradientError` (a train op that comes from no `TowerOptimizer`),
      `InputError`, and the other errors of `build_towers`.
    """
    if not compat.has_estimator():
        raise MissingPackageError(
            'TensorFlow %s has no tf.estimator, which was removed in 2.16: give the loss of the '
            'model function to towers.build_towers, or use TensorFlow 1.15 or 2.15.'
            % tf.version.VERSION)
    # Like contrib's function, this one refuses NONE: the towers' losses have to become one loss.
    reductions = set(tf.losses.Reduction.all()) - {tf.losses.Reduction.NONE}
    check_choice('loss_reduction', loss_reduction, sorted(reductions))
    if on_built is not None:
        check_function('on_built', on_built, 2, 'a function of the mode and of what was built')
    model = _ModelFunction(model_fn)
    names = resolve_devices(devices)
    check_one_stage('replicate_model_fn', names)
    is_sum = loss_reduction == tf.losses.Reduction.SUM

    def replicated_model_fn(features, labels, mode, params=None, config=None):
        """The `EstimatorSpec` of the whole batch, for `features`, `labels`, `mode`, `params` and
        `config` as an Estimator gives them."""
        check_choice('mode', mode, sorted(_NEEDED))
        if len(names) == 1:
            with tf.device(names[0]):
                return model.spec(features, labels, mode, params, config)
        trains = mode == tf.estimator.ModeKeys.TRAIN
        evaluates = mode == tf.estimator.ModeKeys.EVAL
        # Also for evaluation and prediction: a model function may call its optimizers in each mode,
        # and `calls` makes these calls do nothing where nothing is trained.
        calls = OptimizerCalls(tf.get_default_graph(), is_sum, trains)
        specs = []

        def outputs_of_tower(inputs: dict) -> dict:
            """The model function for `build_towers`: keeps its `EstimatorSpec` in `specs`."""
            # A copy of the parameters: the model function may remove entries, and a program may
            # call the replicated function again with the same dict.
            spec = model.spec(inputs['features'], inputs['labels'], mode, copy.copy(params), config)
            specs.append(spec)
            if trains:
                calls.check_spec(spec)
            # A model function does not say whether a prediction has a row for each example. The
            # build takes each prediction to have these rows, unless it proves something else.
            outputs = {'loss': spec.loss, 'predictions': RowsOfExamples(_mergeable(spec))}
            if evaluates:
                outputs['metrics'] = _metrics(spec)
            return outputs

        inputs = {'features': features, 'labels': labels}
        with calls.reported_to():
            built = build_towers(
                outputs_of_tower, inputs, optimizer=calls if trains else None, devices=names,
                reduction='sum' if is_sum else 'mean', remainder='weight')
        tf.logging.info('%s', built.plan)
        if on_built is not None:
            on_built(mode, built)
        spec_of_first_tower = specs[0]  # the only call: later towers are copies
        return _merged_spec(spec_of_first_tower, built, is_sum)
    return replicated_model_fn


class _ModelFunction:
    """The model function of an Estimator, called with the arguments that it takes."""

    def __init__(self, model_fn: typing.Callable):
        """Finds the names of the arguments that the model function takes.

        Raises:
          ModelFunctionError: `model_fn` is no model function of an Estimator.
        """
        if not callable(model_fn) or isinstance(model_fn, type):
            raise ModelFunctionError('model_fn=%.80r cannot be called as the model function of an '
                                     'Estimator.' % (model_fn,))
        parameters = inspect.signature(model_fn).parameters
        names = set(parameters)
        if isinstance(model_fn, functools.partial):
            # Python lists the keywords of a partial among the parameters. They have values already,
            # which the values of the Estimator must not replace.
            names -= set(model_fn.keywords)
        kinds = {parameter.kind for parameter in parameters.values()}
        # As an Estimator does it: **kwargs gets these three; `params` and `config` only go to a
        # function that names them.
        if inspect.Parameter.VAR_KEYWORD in kinds:
            names.update(('features', 'labels', 'mode'))
        if 'features' not in names:
            raise ModelFunctionError(
                'model_fn=%.80r takes no argument features: expected the model function of an '
                'Estimator, model_fn(features, labels, mode, params).' % (model_fn,))
        self._function = model_fn
        self._names = names

    def spec(self, features: typing.Any, labels: typing.Any, mode: str, params: typing.Any,
             config: typing.Any) -> typing.Any:
        """Calls the model function with the arguments that it takes; gives the `EstimatorSpec`.

        Args:
          features, labels: nests of tensors [shard, …]; labels may be None.
          mode: one of `tf.estimator.ModeKeys`.
          params, config: as the Estimator gives them.

        Raises:
          InvalidArgumentError: there are labels, and the function has no argument for them.
          ModelFunctionError: the function returns no `EstimatorSpec` of this mode.
        """
        if labels is not None and 'labels' not in self._names:
            raise InvalidArgumentError('the model function takes no labels, and labels=%.80r are '
                                       'given.' % (labels,))
        given = {'labels': labels, 'mode': mode, 'params': params, 'config': config}
        arguments = {name: value for name, value in given.items() if name in self._names}
        spec = self._function(features=features, **arguments)
        if not isinstance(spec, tf.estimator.EstimatorSpec):
            raise ModelFunctionError('the model function returned %.80r of type %s: expected a '
                                     'tf.estimator.EstimatorSpec.' % (spec, type(spec).__name__))
        if spec.mode != mode:  # in the same mode, `EstimatorSpec` itself has checked the fields
            _check_fields(spec, mode)
        return spec


def _check_fields(spec: typing.Any, mode: str) -> None:
    """Raises `ModelFunctionError` for an `EstimatorSpec` of another mode that lacks what `mode`
    needs; the class itself checks what the spec's own mode needs."""
    missing = []
    for field in _NEEDED[mode]:
        value = getattr(spec, field)
        if value is None or value == {}:  # {} are no predictions
            missing.append(field)
    if missing:
        raise ModelFunctionError(
            'the model function was called in mode %r and returned an EstimatorSpec of mode '
            '%r without %s: make the EstimatorSpec of the mode that it is called with.' % (
                mode, spec.mode, ' and '.join(missing)))


def _mergeable(spec: typing.Any) -> typing.Dict[str, typing.Any]:
    """The predictions and export outputs of a spec, for `build_towers` to merge.

    Returns:
      A nest of tensors [shard, …] and scalars.
    """
    exports = {}
    for name, output in (spec.export_outputs or {}).items():
        exports[name] = _export_tensors(output)
    predictions = {} if spec.predictions is None else spec.predictions
    return {'predictions': predictions, 'export': exports}


def _metrics(spec: typing.Any) -> typing.Dict[str, tuple]:
    """The metrics of a spec, each as `(value, update_op)`: a Keras metric gives its own updates."""
    metrics = {}
    for name, metric in (spec.eval_metric_ops or {}).items():
        is_keras = hasattr(metric, 'update_state')
        if is_keras:
            metrics[name] = (metric.result(), tf.group(*metric.updates))
        else:
            metrics[name] = metric
    return metrics


def _merged_spec(spec: typing.Any, built: BuiltTowers, is_sum: bool) -> typing.Any:
    """The first tower's spec, with loss, predictions, metrics and exports of the whole batch.

    Args:
      spec: the `EstimatorSpec` of the first tower.
      built: the towers.
      is_sum: whether the losses of the towers are added up, or averaged.
    """
    merged = built.predictions.rows  # the structure of `_mergeable`
    fields = {'loss': _summed_loss(built) if is_sum else built.loss}
    if spec.predictions is not None:
        fields['predictions'] = merged['predictions']
    if spec.export_outputs is not None:
        exports = {}
        for name, output in spec.export_outputs.items():
            output_class = type(output)
            exports[name] = output_class(**merged['export'][name])
        fields['export_outputs'] = exports
    if built.metrics:
        fields['eval_metric_ops'] = built.metrics
    return spec._replace(**fields)


def _summed_loss(built: BuiltTowers) -> typing.Optional[tf.Tensor]:
    """The loss of the batch where the towers' losses are added up; None if the model function
    returned no loss.

    It is computed here, since `built.loss` is the mean over the examples whatever the `reduction`.
    A shard without examples holds padding, whose loss gets the weight 0.
    """
    if built.loss is None:
        return None
    losses = [tower.loss for tower in built.towers]
    weights = [one_if_any(tower.size) for tower in built.towers]
    with only_device(built.placement.main):
        return weighted_sum(losses, weights)


def _export_tensors(output: typing.Any) -> typing.Dict[str, typing.Any]:
    """{argument of the class of an export output: its tensor or tensors}; without arguments that
    are None."""
    classes = tf.estimator.export
    arguments_of_class = {
        classes.ClassificationOutput: ['scores', 'classes'],
        classes.RegressionOutput: ['value'],
        classes.PredictOutput: ['outputs']}
    for output_class, names in arguments_of_class.items():
        if isinstance(output, output_class):
            tensors = {name: getattr(output, name) for name in names}
            return {name: value for name, value in tensors.items() if value is not None}
    raise ModelFunctionError(
        'the model function returned the export output %r of type %s: expected a '
        'ClassificationOutput, RegressionOutput or PredictOutput of tf.estimator.export.' % (
            output, type(output).__name__))


def _calls_now() -> typing.Optional[OptimizerCalls]:
    """The `OptimizerCalls` to which an optimizer reports when it is called now; None outside of
    towers."""
    return calls_of(tf.get_default_graph())


class TowerOptimizer(OptimizerAround):
    """Wraps an optimizer, so that all towers of `replicate_model_fn` share one update.

        optimizer = towers.TowerOptimizer(tf.train.AdamOptimizer(0.001))
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())

    Under `replicate_model_fn` on N > 1 devices `compute_gradients` gives the tower's share of the
    gradient: the gradient of the tower's loss times the weight of its shard, see
    `replicate_model_fn`. What the model function does to it, such as clipping, is done to that
    share. `apply_gradients` returns an operation that runs the one update of all towers, by the
    first tower's optimizer, under the names that its variables would have without towers. Where the
    model function took gradients with `tf.gradients` of the loss instead of `compute_gradients`,
    `apply_gradients` multiplies them with the weight. In evaluation and prediction it does nothing.

    Elsewhere, also on one device, all calls are passed on to the wrapped optimizer. A model
    function may use several `TowerOptimizer`s, for one loss or for several. Where one train op runs
    several updates, all of them use gradients at the weights from before the step. Wrap a
    `tf.train.SyncReplicasOptimizer` by a `TowerOptimizer`, not the other way round.
    """

    def __init__(self, optimizer_or_optimizer_fn: typing.Any):
        """
        Args:
          optimizer_or_optimizer_fn: a `tf.train.Optimizer`; or a function without arguments that
            returns one, called once, when it is first used.

        Raises:
          InvalidArgumentError: something else.
        """
        super().__init__(use_locking=False, name='TowerOptimizer')
        self._optimizer = optimizer_or_optimizer_fn
        if not callable(optimizer_or_optimizer_fn):
            check_optimizer(optimizer_or_optimizer_fn, 'optimizer_or_optimizer_fn',
                            'or a function without arguments that returns one')

    def wrapped(self) -> tf.train.Optimizer:
        """The optimizer inside. A `TowerOptimizer` inside is unwrapped, too: it would multiply with
        the weight of the shard a second time."""
        if callable(self._optimizer):
            self._optimizer = self._optimizer()
            check_optimizer(self._optimizer, 'optimizer_or_optimizer_fn() of TowerOptimizer',
                            or_else='')  # the error names no other value, such as None
        if isinstance(self._optimizer, TowerOptimizer):
            return self._optimizer.wrapped()
        return self._optimizer

    @property
    def minimize(self) -> typing.Callable:
        """The `minimize` of the wrapped optimizer, if it overrides the `minimize` of
        `tf.train.Optimizer`; else the latter.

        Raises:
          InvalidArgumentError: in a tower, if the wrapped optimizer overrides `minimize`: what that
            method does between gradients and update would be done to each tower's share alone.
        """
        optimizer = self.wrapped()
        if not has_own_minimize(optimizer):
            return super().minimize
        is_in_tower = _calls_now() is not None
        if is_in_tower:
            raise InvalidArgumentError(
                '%s has a minimize of its own, which replicate_model_fn would call in each tower, '
                'for its shard of the batch. Put what it does between the gradients and their '
                'update into its apply_gradients, which gets those of all towers.'
                % type(optimizer).__name__)
        return optimizer.minimize

    def compute_gradients(self, loss: tf.Tensor, *args: typing.Any,
                          **kwargs: typing.Any) -> list:
        """The wrapped optimizer's pairs; in a tower, for the loss times the weight of the shard.

        Args:
          loss: the scalar loss.
          *args, **kwargs: the other arguments of the wrapped optimizer's `compute_gradients`.
        """
        calls = _calls_now()
        if calls is not None:
            loss = calls.weighted(loss)
        return self.wrapped().compute_gradients(loss, *args, **kwargs)

    def apply_gradients(self, grads_and_vars: typing.Iterable, global_step: typing.Any = None,
                        name: typing.Optional[str] = None,
                        **kwargs: typing.Any) -> tf.Operation:
        """The wrapped optimizer's update; in a tower, the one update of all towers.

        Raises:
          GradientError: in a tower, the call is in a branch or a loop.
        """
        if name is not None:  # the wrapped optimizer may have a method without this argument
            kwargs['name'] = name
        calls = _calls_now()
        if calls is None:
            return self.wrapped().apply_gradients(grads_and_vars, global_step=global_step, **kwargs)
        pairs = list(grads_and_vars)
        return calls.applied(self.wrapped(), pairs, global_step=global_step, **kwargs)

    # A program that asks for slots, the name or variables gets those of the wrapped optimizer.
    get_slot = property(lambda self: self.wrapped().get_slot)
    get_slot_names = property(lambda self: self.wrapped().get_slot_names)
    get_name = property(lambda self: self.wrapped().get_name)
    variables = property(lambda self: self.wrapped().variables)
