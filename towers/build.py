"""`build_towers`: from a model function to a data-parallel train op."""

import collections
import functools
import inspect

import tensorflow.compat.v1 as tf

from towers.all_reduce import all_reduce as reduce_gradients, check_all_reduce
from towers.clone import COPIES, build_all
from towers.combination import combine
from towers.devices import check_variable_device, resolve_devices
from towers.errors import InvalidArgumentError, ModelFunctionError, NameScopeError
from towers.loss_scale import LossScale, ScaledLosses
from towers.nonfinite import checked_at_least_scale
from towers.outputs import merge_metrics, merge_predictions, weighted_mean
from towers.placement import Placement, only_device
from towers.plan import make_plan
from towers.precision import check_precision, rewrite_field, try_precision
from towers.replicas import Replicas, check_no_copies
from towers.shards import split_batch
from towers.tower import TowerBuilder
from towers.update import apply_update, checked_transform
from towers.xla import describe as describe_xla

REDUCTIONS = ('sum', 'mean')
REGULARIZATIONS = ('auto', 'none')
UPDATE_TOWERS = ('first', 'all', 'none')


class BuiltTowers(collections.namedtuple('BuiltTowers', [
        'train_op', 'loss', 'predictions', 'metrics', 'gradients', 'variables', 'slots', 'towers',
        'regularization_loss', 'global_step', 'devices', 'placement', 'direct_variables',
        'plan', 'replicas', 'precision', 'scaled_losses', 'xla'])):
    """What `build_towers` made.

    Attributes:
      train_op: the operation that does one step; None without an optimizer.
      loss: scalar, the mean over the batch's examples plus the regularization, as one device
        would compute it; from the weights before the update.
      predictions: nest of tensors [batch, …] in batch order (scalars: [towers]), or None.
      metrics: dict as the model function's, over all towers.
      gradients: list of `(gradient, variable)`: combined and transformed, what the optimizer gets.
      variables: the variables that the model made, and those it takes gradients of.
      slots: variables that the optimizer made.
      towers: list of `Tower`.
      regularization_loss: scalar, counted once, or None.
      global_step: the variable that counts steps, or None.
      devices: the towers' devices.
      placement: `Placement` of the variables.
      direct_variables: those shared by order of creation, for `reuse=` of a later build.
      plan: `Plan`; print it.
      replicas: `Replicas`: the other towers' copies of the trainable variables; None where there
        is one set.
      precision: as given; `use_precision` makes the session's config keep it.
      scaled_losses: `ScaledLosses`, whose `scale` and `skipped_steps` are scalars to be logged with
        a step; or None.
      xla: as given.
    """
    __slots__ = ()

    def __repr__(self):
        return '<BuiltTowers: %d towers on %s>' % (len(self.towers), ', '.join(self.devices))


def build_towers(model_fn, inputs, optimizer, devices=None, reduction='sum', remainder='error',
                 variable_device=None, variable_scope=None, reuse=None, name='tower',
                 var_list=None, transform_gradients=None, global_step=None, regularization='auto',
                 update_ops='first', learning_rate=None, check_devices=True,
                 allow_repeated_devices=False, check_numerics=False, stateless_random=False,
                 copies='auto', all_reduce=None, precision='float32', loss_scale=None, xla=False):
    """Copies a model onto several devices and trains the copies as one, data-parallel.

    The batch is cut into one shard a tower on the CPU; each tower computes its shard's loss and
    gradients on its device; `combine_gradients` sums them per variable where the variable lives;
    one `apply_gradients` updates the variables, which all towers share. With `n_k` of the batch's
    `n` examples on tower k of N, a loss `L_k` there and regularization R, the gradient of a
    variable is

        mean:  sum_k (n_k / n) dL_k + dR      (that of the full batch's mean loss on one device)
        sum:   N times that                   (the hand-written recipe's, for equal shards)

    Args:
      model_fn: called with a tower's shard, once or once per tower, see `copies`: as
        `model_fn(*inputs)` where `inputs` is a plain tuple or list, else as `model_fn(inputs)`.
        Returns a scalar loss, the mean over the
        shard's examples, or a dict or `ModelOutput` with `loss`, `predictions`, `metrics` and
        `updates`. Ordinary TF1 code.
      inputs: the batch: a nest of tensors [n, …], dense or sparse, of any dtype.
      optimizer: a `tf.train.Optimizer`, or None for evaluation and prediction.
      devices: see `resolve_devices`: None, a count, or names.
      reduction: `'sum'` or `'mean'`, as above.
      remainder: a batch that does not divide: `'error'`, `'weight'` (uneven shards, weighted by
        their size), or `'drop'`; see `split_batch`.
      variable_device: None (`/cpu:0`; the GPU when there is just one), a device name,
        `'balanced'`, `'replicated'`, or a device function. `'replicated'`: each tower has its own
        copy of every trainable variable (the model's own is the first tower's), and updates it
        with the combined gradient. The same numbers, the same checkpoints; the copies are local
        variables, so a plain session runs `tf.local_variables_initializer()` after it has restored
        a checkpoint (`MonitoredSession` does by itself), and a program that writes weights itself
        runs `built.replicas.refresh()`, made when the graph is built, after it. An optimizer whose
        `apply_gradients` mixes variables (a global norm) would see each one N times: do that in
        `transform_gradients`. Without an optimizer no copies are made.
      variable_scope: the model's variables go under a scope of this name; None adds none.
      reuse: for the first tower: None, True or `tf.AUTO_REUSE` as in `tf.variable_scope`; or what
        an earlier `build_towers` returned, to share its variables, direct ones included.
      name: prefix of the towers' name scopes: `tower_0`, `tower_1`, …; no part of variable names.
      var_list: the variables to train: a list, or a callable from the list of all trainable
        variables to those wanted; None for all.
      transform_gradients: called with the combined `(gradient, variable)` pairs, returns those to
        apply: the place for `tf.clip_by_global_norm`.
      global_step: variable to be increased by one per step, or None.
      regularization: `'auto'` adds the weights' registered losses (`REGULARIZATION_LOSSES`, and
        those of Keras layers that were called), once, unless the model's own loss has terms of
        the weights already; those are counted and computed once too. `'none'` adds nothing.
      update_ops: whose batch-norm updates ride on the train op: the `'first'` tower's, `'all'`
        towers' or `'none'`.
      learning_rate: for the plan: a number, or an object with `describe()`. None: what the
        optimizer says of itself.
      check_devices: False builds the graph for devices that are not on this machine.
      allow_repeated_devices: may two towers share a device?
      check_numerics: a NaN or an infinity in a tower's loss or gradient fails the step, naming the
        tower and the variable; see `nonfinite`.
      stateless_random: dropout and other random ops of the model draw numbers that depend on the
        graph-level seed, the op's name and `global_step` alone, so that a run that resumes draws
        what it would have drawn; see `stateless_random`.
      copies: how the towers after the first are made. `'reuse'`: a call of the model function each,
        under `variable_scope` reuse. `'clone'`: copies of the first one's finished graph, forward
        and backward, which takes a fraction of the time: equal but for names, shards, devices and
        the seeds of random ops (an op that the model gave a seed gets another one in each
        clone). The model function is then called once in all, so what it does besides making a
        graph (counting, printing, keeping tensors in lists) is done once, with the first tower's
        tensors. `'auto'` clones where that gives what calls would give; where it cannot it calls,
        and the plan says why: shards of different static sizes, tables, queues, placeholders and
        Python functions made by the model function, functions with a gradient of their own.
      all_reduce: for `variable_device='replicated'`: `'copy'` (the default: each sum is made on one
        of the towers and sent to the others), `'collective'` (TF's ring) or `'nccl'` (GPUs of one
        machine); see `all_reduce`.
      precision: `'float32'`; or `'bf16'` or `'fp16'`, by TensorFlow's own graph rewrite, which is
        tried out first, in a session of its own (not with check_devices=False: TF keeps the GPU
        options of a process's first session for all). The session's config has to ask for it too:
        `use_precision(config, precision, built.devices)`.
      loss_scale: `LossScale`; None: the default one with `'fp16'`, none with the others. With one,
        a step whose gradient is not finite in any tower changes no weight and no slot in any, and
        is counted in `scaled_losses.skipped_steps`; `global_step` counts it too.
        Batch-norm statistics follow every forward pass, that of a skipped step as well.
        `check_numerics` then fails a step only for its loss, or at the least scale.
      xla: whether XLA compiles each tower's forward and backward pass, see `xla`; what comes after
        them (combination, update) is not compiled.

    Returns:
      `BuiltTowers`.

    Raises:
      TowersError: one of its subclasses, for every bad argument, before any op is made where that
        is possible. On any error the graph's collections are put back as they were; operations
        and names that were made stay, since TensorFlow cannot remove them.
    """
    names = resolve_devices(devices, check_devices, allow_repeated_devices)
    graph = tf.get_default_graph()
    _check_arguments(model_fn, optimizer, reduction, regularization, update_ops, var_list,
                     transform_gradients, copies)
    if stateless_random and global_step is None:
        raise InvalidArgumentError('stateless_random=True needs a global_step to draw by.')
    _check_name_scopes(graph, name, len(names))
    placement = Placement(variable_device, names, all_reduce, optimizer is not None)
    if check_devices:
        for device in placement.devices() or ():
            check_variable_device(device)
    if all_reduce is not None:
        check_all_reduce(all_reduce, names)
    precision_text = _precision_text(precision, names, check_devices)
    if optimizer is None:
        loss_scale = None
    elif loss_scale is None and precision == 'fp16':
        loss_scale = LossScale()
    shares_earlier = isinstance(reuse, BuiltTowers)
    replicas = Replicas(names) if placement.all_reduce is not None else None
    if replicas is not None and shares_earlier:
        _check_earlier_has_copies(reuse)
    builder = TowerBuilder(
        model_fn, optimizer, placement, graph, var_list, regularization, variable_scope,
        reuse=True if shares_earlier else reuse,
        earlier=reuse.direct_variables if shares_earlier else (), check_numerics=check_numerics,
        random_step=global_step if stateless_random else None, replicas=replicas, xla=xla)
    scaled_losses = None
    with builder.undone_on_error():
        if loss_scale is not None:
            scaled_losses = ScaledLosses(loss_scale, name + 's', placement)
            builder.scaled_losses = scaled_losses
        # No padding for evaluation: there an empty shard is an empty part of the predictions.
        shards = split_batch(inputs, len(names), remainder, pad_empty=optimizer is not None)
        factor = 1. if reduction == 'mean' else float(len(names))
        towers, how_built = build_all(builder, names, name, shards, factor, copies)
        builder.finish_collections()
        with only_device(placement.main), tf.name_scope(name + 's'):
            loss = _mean_loss(towers, shards, builder.regularization_loss)
            padded = shards.sizes if remainder == 'weight' and optimizer is not None else None
            predictions = merge_predictions([tower.predictions for tower in towers], padded)
            metrics = merge_metrics([tower.metrics for tower in towers], shards.weights)
        gradients, joined, train_op, slots = [], [], None, []
        if optimizer is not None:
            of_towers = [tower.gradients for tower in towers]
            with tf.name_scope('combine_gradients'):
                others, on_towers = builder.regularization_gradients(factor), None
                if replicas is None:
                    check_no_copies(builder.trainable)
                    gradients, joined = combine(of_towers, others)
                else:
                    gradients, on_towers = reduce_gradients(placement.all_reduce, of_towers,
                                                            others, names)
            on_skip = None
            if scaled_losses is not None:
                scaled_losses.watch(gradients)
                if check_numerics:
                    on_skip = functools.partial(checked_at_least_scale, gradients, scaled_losses)
            gradients = checked_transform(transform_gradients, gradients, placement)
            train_op, slots = apply_update(
                optimizer, gradients, global_step, placement, builder.variables,
                [loss] + _updates(towers, update_ops), replicas, on_towers, scaled_losses, on_skip)
    plan = make_plan(builder, towers, shards, placement, gradients, joined, optimizer, reduction,
                     remainder, update_ops, learning_rate, how_built)._replace(
                         precision=precision_text, xla=describe_xla(names) if xla else None,
                         loss_scale=None if loss_scale is None else loss_scale.describe())
    return BuiltTowers(train_op, loss, predictions, metrics, gradients, builder.variables, slots,
                       towers, builder.regularization_loss, global_step, names, placement,
                       builder.direct_variables, plan, replicas, precision, scaled_losses, xla)


def _check_arguments(model_fn, optimizer, reduction, regularization, update_ops, var_list,
                     transform_gradients, copies):
    if tf.executing_eagerly():
        raise InvalidArgumentError(
            'build_towers builds a graph, and TensorFlow is executing eagerly: call it under '
            '`with tf.Graph().as_default():`, or tf.disable_eager_execution() first.')
    for argument, given, expected in (('reduction', reduction, REDUCTIONS),
                                      ('regularization', regularization, REGULARIZATIONS),
                                      ('update_ops', update_ops, UPDATE_TOWERS),
                                      ('copies', copies, COPIES)):
        if given not in expected:
            raise InvalidArgumentError('%s=%r: expected one of %s.' % (
                argument, given, ', '.join(map(repr, expected))))
    if not callable(model_fn):
        raise ModelFunctionError('model_fn=%r cannot be called: expected a function from a shard '
                                 'to its loss.' % (model_fn,))
    if optimizer is not None:
        check_optimizer(optimizer)
    if transform_gradients is not None and not callable(transform_gradients):
        raise InvalidArgumentError('transform_gradients=%r cannot be called.'
                                   % (transform_gradients,))
    if not (var_list is None or callable(var_list) or isinstance(var_list, (list, tuple))):
        raise InvalidArgumentError('var_list=%r: expected None, a list of variables, or a function '
                                   'from all trainable variables to such a list.' % (var_list,))


def check_optimizer(optimizer):
    """Raises `InvalidArgumentError` for what is not used as a `tf.train.Optimizer` is."""
    if isinstance(optimizer, tf.train.Optimizer):
        return
    # Some Keras optimizers have methods of these names as well, with other arguments.
    if not (hasattr(optimizer, 'compute_gradients') and hasattr(optimizer, 'apply_gradients')
            and 'global_step' in inspect.signature(optimizer.apply_gradients).parameters):
        raise InvalidArgumentError(
            'optimizer=%r has no compute_gradients(loss, var_list) and apply_gradients(pairs, '
            'global_step): expected a tf.train.Optimizer (Keras optimizers are none), or None to '
            'evaluate.' % (optimizer,))


def _check_earlier_has_copies(earlier):
    if earlier.train_op is not None and earlier.replicas is None:
        raise InvalidArgumentError(
            "variable_device='replicated', but reuse= is a build that trains the same variables "
            "without copies, so that its updates would not reach this one's: build that one with "
            "variable_device='replicated' on several towers, too.")


def _precision_text(precision, devices, check_devices):
    """The plan's line about the precision, or None for float32."""
    check_precision(precision)
    if precision == 'float32':
        return None
    if check_devices and all(tf.DeviceSpec.from_string(name).job is None for name in devices):
        return '%s by %s' % (precision, try_precision(precision, devices))
    return "%s by TensorFlow's rewrite %s, not tried out" % (
        precision, rewrite_field(precision, devices))


def _check_name_scopes(graph, name, num_towers):
    around = graph.get_name_scope()
    for scope in ['%s_%d' % (name, index) for index in range(num_towers)] + [name + 's']:
        full = '%s/%s' % (around, scope) if around else scope
        if graph.unique_name(scope, mark_as_used=False) != full:
            raise NameScopeError(
                'the graph has a name scope or operation %r already, perhaps from an earlier '
                "build_towers: pass another name=, such as name='eval_tower'." % full)


def _mean_loss(towers, shards, regularization_loss):
    if towers[0].data_loss is None:
        return None
    loss = weighted_mean([tower.data_loss for tower in towers], shards.weights)
    return loss if regularization_loss is None else loss + regularization_loss


def _updates(towers, update_ops):
    chosen = {'first': towers[:1], 'all': towers, 'none': []}[update_ops]
    return [update for tower in chosen for update in tower.updates]
