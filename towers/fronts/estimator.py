"""`replicate_model_fn`: an Estimator's model function on several devices."""

import copy
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_choice
from towers.api.build import build_towers
from towers.errors import GradientError, InvalidArgumentError, MissingPackageError
from towers.fronts.estimator_spec import (ModelFunction, check_mode, initialize_all_towers,
                                          mergeable, merged_spec, metrics)
from towers.fronts.optimizer_calls import OptimizerCalls
from towers.fronts.optimizer_slots import check_saved
from towers.placement.devices import check_one_stage, resolve_devices

REMAINDERS = ('weight', 'error')


def replicate_model_fn(model_fn: typing.Callable,
                       loss_reduction: str = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
                       devices: typing.Union[None, int, str, typing.Sequence] = None, *,
                       remainder: str = 'weight',
                       on_built: typing.Optional[typing.Callable] = None) -> typing.Callable:
    """Puts the model of an Estimator's model function onto several devices.

    It has the arguments and the effect of `tf.contrib.estimator.replicate_model_fn`:

        def model_fn(features, labels, mode, params):
            …
            optimizer = towers.TowerOptimizer(tf.train.AdamOptimizer(0.001))
            return tf.estimator.EstimatorSpec(
                mode, loss=loss, train_op=optimizer.minimize(loss, tf.train.get_global_step()))

        estimator = tf.estimator.Estimator(towers.replicate_model_fn(model_fn))

    Features and labels are cut into one shard a tower, sparse ones by example; the model function
    is called once, and later towers are copies, see `build_towers`. With n_k of the batch's n
    examples on tower k, loss L_k and gradient dL_k there:

        Reduction.SUM:  loss = sum_k L_k,            gradient = sum_k dL_k
        any other:      loss = sum_k (n_k / n) L_k,  gradient = sum_k (n_k / n) dL_k

    so that SUM is right for losses that are sums over the examples, the others are for means.

    Of the `EstimatorSpec`s the loss, the predictions, the metrics and the export outputs become
    those of the whole batch: predictions and export outputs in batch order (scalars: [towers]),
    metrics counted over all towers in one set of counters. Everything else is the first tower's, in
    each mode: the train op, `training_hooks`, `training_chief_hooks`, `evaluation_hooks`,
    `prediction_hooks` and `scaffold`, whose `local_init_op`, if the model function gives one, is
    made to initialize the tables and local variables of the later towers, too. Operations of the
    first tower have the names that they have without towers; so hooks and programs that look for
    operations by name get the first tower's.
    Batch-norm updates are the first tower's and ride on the train op, in `UPDATE_OPS` or not.

    With one device the model function is called directly, and its `EstimatorSpec` is not changed.

    Args:
      model_fn: a model function of an Estimator. It is called by keyword with the arguments that it
        has among `features`, `labels`, `mode`, `params` and `config`, and returns an
        `EstimatorSpec`. In training its optimizers are `TowerOptimizer`s.
      loss_reduction: one of `tf.losses.Reduction` but NONE.
      devices: see `resolve_devices`: None (every GPU, else one CPU), a count, or names. One a
        tower: stages are for `build_towers`.
      remainder: for a batch that does not divide: `'weight'` (uneven shards, weighted as above), or
        `'error'`.
      on_built: called as `on_built(mode, built)` with the `BuiltTowers` of each mode, for its plan
        and the audit; not on one device, where nothing is built. `built.train_op` does all of the
        model function's updates.

    Returns:
      A function `f(features, labels, mode, params=None, config=None)`, a model function for
      `tf.estimator.Estimator`; or to be called in a program of your own, with tensors, arrays, or
      placeholders of any shape.

    Raises:
      MissingPackageError: this TensorFlow has no Estimator.
      InvalidArgumentError: an unknown reduction or remainder.
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
    _check_reduction(loss_reduction)
    check_choice('remainder', remainder, REMAINDERS)
    if on_built is not None and not callable(on_built):
        raise InvalidArgumentError('on_built=%.80r cannot be called: expected a function of the '
                                   'mode and of what was built, or None.' % (on_built,))
    function = ModelFunction(model_fn)
    is_empty = isinstance(devices, (list, tuple)) and not devices
    names = resolve_devices(None if is_empty else devices)
    check_one_stage('replicate_model_fn', names)
    is_sum = loss_reduction == tf.losses.Reduction.SUM

    def replicated_model_fn(features, labels, mode, params=None, config=None):
        check_mode(mode)
        if len(names) == 1:
            with tf.device(names[0]):
                return function(features, labels, mode, params, config)
        trains = mode == tf.estimator.ModeKeys.TRAIN
        graph = tf.get_default_graph()
        calls = OptimizerCalls(graph, len(names), is_sum, trains)
        specs = []

        def of_tower(inputs):
            spec = function(inputs['features'], inputs['labels'], mode, _own(params), config)
            specs.append(spec)
            if trains:
                _check_train_op(calls, spec)
            return dict(loss=spec.loss, predictions=mergeable(spec),
                        metrics=metrics(spec) if mode == tf.estimator.ModeKeys.EVAL else None)

        with calls.reported_to():
            built = build_towers(
                of_tower, dict(features=features, labels=labels), calls if trains else None,
                names, 'sum' if is_sum else 'mean', remainder=remainder)
        check_saved(specs[0], calls.late)
        tf.logging.info('%s', built.plan)
        if on_built is not None:
            on_built(mode, built)
        initialize_all_towers(specs[0].scaffold, built.own_state)
        return merged_spec(specs[0], built, is_sum)

    replicated_model_fn.is_replicated = True
    return replicated_model_fn


def _check_reduction(loss_reduction):
    reductions = tf.losses.Reduction.all()
    if isinstance(loss_reduction, str) and loss_reduction == tf.losses.Reduction.NONE:
        raise InvalidArgumentError(
            "loss_reduction='none': the losses of the towers have to become one, and none "
            'reduction is specified: pass Reduction.SUM or Reduction.MEAN.')
    if not isinstance(loss_reduction, str) or loss_reduction not in reductions:
        raise InvalidArgumentError(
            'loss_reduction=%.80r: expected one of tf.losses.Reduction, %s.' % (
                loss_reduction, ', '.join(map(repr, sorted(set(reductions) - {'none'})))))


def _check_train_op(calls, spec):
    """Raises `GradientError` unless the train op makes its updates by `TowerOptimizer`s."""
    calls.check_train_op(spec.train_op)
    after = calls.after_update()
    for what, tensor in [('loss', spec.loss)] + [
            ('update in UPDATE_OPS', update)
            for update in tf.get_collection(tf.GraphKeys.UPDATE_OPS)]:
        op = getattr(tensor, 'op', tensor)
        if op.name in after:
            raise GradientError(
                'the %s of the model function, %r, waits for an update of a TowerOptimizer, which '
                'itself comes after the losses and the UPDATE_OPS of all towers: take it out of '
                'tf.control_dependencies of the train op.' % (what, op.name))


def _own(params):
    """A tower's own parameters, since a model function may remove entries from them."""
    return copy.copy(params)
