"""`check_towers`: does a model give the same numbers on N towers as on one device?"""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from towers import graph_walk
from towers.build import build_towers, check_optimizer
from towers.devices import resolve_devices, session_config
from towers.errors import InputError, InvalidArgumentError, SharedVariableError
from towers.keras_calls import record_keras_calls
from towers.outputs import call_model_fn, to_model_output
from towers.regularization import split_loss
from towers.variables import without_numbers

Difference = collections.namedtuple('Difference', 'what name relative')
"""`what` is 'loss', 'gradient', 'variable' or 'slot'; `relative` the largest difference over the
largest absolute value (inf where one side lacks it)."""


class TowersReport(collections.namedtuple('TowersReport', [
        'equal', 'worst', 'tolerance', 'first', 'cause', 'compared', 'towers', 'steps',
        'reduction'])):
    """What `check_towers` found; `print(report)`.

    Attributes:
      equal: whether everything agrees to within the tolerance.
      worst: the `Difference` with the largest relative value.
      tolerance: the relative difference that counts as equal.
      first: the first `Difference` beyond it, in the order in which a step computes things; None
        when equal.
      cause: the likely cause, one sentence; None when equal.
      compared: number of values compared.
      towers, steps, reduction: what was run.
    """
    __slots__ = ()

    def __str__(self):
        ran = '%d towers against one device on the full batch, %d steps, reduction %s' % (
            self.towers, self.steps, self.reduction)
        if self.equal:
            return 'equal to within %.1e (largest: %s %s): %s; %d values compared' % (
                self.worst.relative, self.worst.what, self.worst.name, ran, self.compared)
        return 'NOT equal: %s %s differs by %.1e (allowed %.1e): %s. Likely cause: %s' % (
            self.first.what, self.first.name, self.first.relative, self.tolerance, ran, self.cause)


def check_towers(model_fn, inputs, make_optimizer=None, num_towers=2, steps=3, reduction='mean',
                 same_shards=False, tolerance=None, seed=0, **options):
    """Trains a model some steps on N towers and on one device, and compares the numbers.

    The one device is a plain TF1 program, without this package's towers: the model function on
    the whole batch, its loss plus the registered regularization unless that is in it already, the
    optimizer, and the update ops. Both start from the same weights. Compared are the loss of each
    step, the gradients of the first, and variables and optimizer slots after the last.

    Args:
      model_fn: as for `build_towers`.
      inputs: a sample batch: a nest of arrays [n, …] or `tf.SparseTensorValue`s.
      make_optimizer: function without arguments that makes the optimizer anew for either graph;
        None for momentum SGD at rate 0.01.
      num_towers: how many virtual CPU towers.
      steps: how many steps, all on the same batch.
      reduction: as for `build_towers`; with `'sum'` the one device gets N times its gradient.
      same_shards: use the batch's first n/N examples N times over, so that all towers see the
        same. Batch statistics are then those of the whole batch too, hence the way to check a
        model with batch norm. All but moving variances, which are left out: fused batch norm
        multiplies the variance of n numbers by n / (n - 1), and n is the shard's.
      tolerance: largest relative difference that counts as equal. None: 1e-9 where the model
        computes in float64 throughout, else 1e-4.
      seed: graph-level seed of the initial weights.
      **options: more arguments of `build_towers`: `devices` (then they are counted, not
        `num_towers`), `remainder`, `variable_device`, `variable_scope`, `var_list` (a function),
        `transform_gradients`, `regularization`, `update_ops`, `copies`,
        `all_reduce`.

    Returns:
      `TowersReport`. A variable that cannot be shared is a report too, not an error.

    Raises:
      TowersError: bad arguments, as `build_towers`.
    """
    _check_arguments(make_optimizer, options)
    make_optimizer = make_optimizer or (lambda: tf.train.MomentumOptimizer(0.01, 0.9))
    if 'devices' in options:
        devices = resolve_devices(options.pop('devices'))
        num_towers = len(devices)
    else:
        devices = tuple('/device:CPU:%d' % index for index in range(num_towers))
    if steps < 1 or num_towers < 2:
        raise InvalidArgumentError('num_towers=%r, steps=%r: expected at least 2 towers and 1 '
                                   'step.' % (num_towers, steps))
    if same_shards:
        inputs = _repeat_first_shard(inputs, num_towers)
    elif options.get('remainder') == 'drop':
        inputs = _first_examples(inputs, lambda count: count - count % num_towers)
    factor = num_towers if reduction == 'sum' else 1
    one, traits = _run_one_device(model_fn, inputs, make_optimizer(), steps, seed, factor, options)
    if tolerance is None:
        # float32 sums in another order differ in the last digits, and steps make that grow.
        tolerance = 1e-9 if traits.all_float64 else 1e-4
    try:
        many, sum_of_losses = _run_towers(model_fn, inputs, make_optimizer(), devices, steps,
                                           one['initial'], reduction, options)
    except SharedVariableError as error:
        missing = Difference('variable', 'of a later tower', float('inf'))
        return TowersReport(False, missing, tolerance, missing, 'an unshared variable: %s' % error,
                            0, num_towers, steps, reduction)
    differences = _compare(one, many, noise=1e-14 if traits.all_float64 else 1e-6)
    if same_shards:
        differences = [each for each in differences if not each.name.endswith('moving_variance')]
    worst = max(differences, key=lambda difference: difference.relative)
    beyond = [each for each in differences if not each.relative <= tolerance]
    cause = _likely_cause(beyond[0], one, traits, sum_of_losses) if beyond else None
    return TowersReport(not beyond, worst, tolerance, beyond[0] if beyond else None, cause,
                        len(differences), num_towers, steps, reduction)


_OPTIONS = ('devices', 'remainder', 'variable_device', 'variable_scope', 'var_list',
            'transform_gradients', 'regularization', 'update_ops', 'check_devices',
            'allow_repeated_devices', 'copies', 'all_reduce')


def _check_arguments(make_optimizer, options):
    if make_optimizer is not None and not callable(make_optimizer):
        raise InvalidArgumentError(
            'make_optimizer=%r: expected a function that makes the optimizer, such as lambda: '
            'tf.train.AdamOptimizer(0.001), since there are two graphs.' % (make_optimizer,))
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise InvalidArgumentError('check_towers takes no %s: expected some of %s.'
                                   % (unknown[0], ', '.join(_OPTIONS)))
    for name in ('var_list', 'transform_gradients'):
        if options.get(name) is not None and not callable(options[name]):
            raise InvalidArgumentError('%s=%r: expected a function here, since there are two '
                                       'graphs.' % (name, options[name]))


_Traits = collections.namedtuple('_Traits', 'all_float64 random batch_norm')


def _run_one_device(model_fn, inputs, optimizer, steps, seed, factor, options):
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(seed)
        check_optimizer(optimizer)
        batch = _map_leaves(_constant, inputs)
        scope = options.get('variable_scope')
        with record_keras_calls() as keras, tf.variable_scope(
                tf.get_variable_scope() if scope is None else scope, auxiliary_name_scope=False):
            output = to_model_output(call_model_fn(model_fn, batch), 0, True)
        loss = output.loss
        registered = tf.losses.get_regularization_losses() + keras.losses()
        known = graph_walk.ancestors([loss])
        if (options.get('regularization', 'auto') == 'auto' and registered
                and not any(each.op.name in known for each in registered)
                and not _has_weight_terms(loss, batch, graph)):
            loss = loss + tf.add_n([tf.cast(each, loss.dtype) for each in registered])
        updates = [] if options.get('update_ops') == 'none' else (
            tf.get_collection(tf.GraphKeys.UPDATE_OPS) + keras.updates()
            + list(output.updates or ()))
        trainable = tf.trainable_variables()
        if options.get('var_list') is not None:
            trainable = options['var_list'](trainable)
        pairs = optimizer.compute_gradients(loss * factor, var_list=trainable)
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if options.get('transform_gradients') is not None:
            pairs = options['transform_gradients'](pairs)
        with tf.control_dependencies([loss] + updates):
            train_op = optimizer.apply_gradients(pairs)
        forward = [graph.get_operation_by_name(name) for name in graph_walk.ancestors([loss])]
        traits = _Traits(
            # tf.losses, for one, computes in float32 whatever it is given.
            all(output.dtype.base_dtype == tf.float64 for op in forward for output in op.outputs
                if output.dtype.is_floating),
            sorted({op.type for op in forward if graph_walk.is_random(op)}),
            any('BatchNorm' in op.type for op in forward) or bool(updates))
        with tf.Session(config=session_config(1)) as session:
            _initialize(session)
            variables = tf.global_variables()
            initial = list(zip([v.op.name for v in variables], session.run(variables)))
            names = {name: name for name, _ in initial}
            result = _train(session, loss, pairs, train_op, steps, names)
            result['initial'] = initial
            return result, traits


def _has_weight_terms(loss, batch, graph):
    """Whether the loss has L2 terms of its own, found as `build_towers` finds them."""
    operations = graph.get_operations()
    sources = [leaf.op for leaf in tf.nest.flatten(batch, expand_composites=True)]
    sources += [op for op in operations if graph_walk.is_random(op)]
    return split_loss(loss, graph_walk.reachable_from(sources, operations))[1] is not None


def _run_towers(model_fn, inputs, optimizer, devices, steps, initial, reduction, options):
    with tf.Graph().as_default():
        batch = _map_leaves(_constant, inputs)
        built = build_towers(model_fn, batch, optimizer, devices, reduction, **options)
        sum_of_losses = tf.add_n([tower.data_loss for tower in built.towers])
        if built.regularization_loss is not None:
            sum_of_losses += built.regularization_loss
        with tf.Session(config=session_config(devices)) as session:
            _initialize(session)
            names = _names_on_one_device(tf.global_variables(), initial)
            values, assignments, fed = dict(initial), [], {}
            for variable in tf.global_variables():
                if names[variable.op.name] in values:
                    value = tf.placeholder(variable.dtype.base_dtype)
                    assignments.append(tf.assign(variable, value, validate_shape=False).op)
                    fed[value] = values[names[variable.op.name]]
            session.run(assignments, fed)
            if built.replicas is not None:
                session.run(built.replicas.refresh())
            added_up = session.run(sum_of_losses)
            result = _train(session, built.loss, built.gradients, built.train_op, steps, names)
            return result, added_up


def _names_on_one_device(variables, initial):
    """Dict from the names of the towers' variables to those on one device.

    They are the same but for layers that a library numbers on from graph to graph (Keras 3): these
    are matched by their order, when everything but the numbers agrees.
    """
    names = [variable.op.name for variable in variables]
    known = [name for name, _ in initial]
    if set(names) != set(known) and (
            [without_numbers(name) for name in names] == [without_numbers(n) for n in known]):
        return dict(zip(names, known))
    return {name: name for name in names}


def _map_leaves(function, inputs):
    """As `tf.nest.map_structure`, which would take a `tf.SparseTensorValue` apart."""
    if isinstance(inputs, tf.SparseTensorValue) or not tf.nest.is_nested(inputs):
        return None if inputs is None else function(inputs)
    if isinstance(inputs, dict):
        return {key: _map_leaves(function, inputs[key]) for key in inputs}
    parts = [_map_leaves(function, each) for each in inputs]
    return type(inputs)(*parts) if hasattr(inputs, '_fields') else type(inputs)(parts)


def _constant(leaf):
    if isinstance(leaf, tf.SparseTensorValue):
        return tf.SparseTensor.from_value(leaf)
    return tf.constant(leaf)


def _initialize(session):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                 tf.tables_initializer()])


def _train(session, loss, pairs, train_op, steps, names):
    gradients = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
    of_gradients = [names[variable.op.name] for _, variable in pairs]
    result = {'gradient': dict(zip(of_gradients, session.run(gradients))), 'loss': {}}
    for step in range(steps):
        value, _ = session.run([loss, train_op])
        result['loss']['of step %d' % (step + 1)] = value
    trainable = {variable.op.name for variable in tf.trainable_variables()}
    result['variable'], result['slot'] = {}, {}
    variables = tf.global_variables()
    for variable, value in zip(variables, session.run(variables)):
        name = variable.op.name
        is_slot = any(name.startswith(other + '/') for other in trainable) or '/' not in name and (
            name.endswith('_power'))
        result['slot' if is_slot else 'variable'][names[name]] = value
    return result


def _compare(one, many, noise):
    """The `Difference`s of two runs.

    Args:
      one, many: dicts from kind to dict from name to array.
      noise: what rounding may add to a gradient, over the largest of all. A bias in front of a
        batch norm has the gradient zero, computed as the rest of a sum: noise. Such a variable
        and its slots are not compared. (Adam makes even such steps as large as any other, which
        then shows in the moving mean; momentum SGD does not.)
    """
    noise *= max([np.abs(each).max() for each in one['gradient'].values() if each.size] or [0.])
    noisy = {name for name in set(one['gradient']) & set(many['gradient'])
             if _largest(one['gradient'][name]) <= noise
             and _largest(many['gradient'][name]) <= noise}
    differences = []
    for what in ('loss', 'gradient', 'variable', 'slot'):
        for name in sorted(set(one[what]) | set(many[what])):
            if noisy and (name in noisy or any(name.startswith(each + '/') for each in noisy)):
                continue
            if name not in one[what] or name not in many[what]:
                differences.append(Difference(what, name, float('inf')))
                continue
            differences.append(Difference(what, name, _relative(
                one[what][name], many[what][name], noise if what == 'gradient' else 0.)))
    return differences


def _largest(array):
    return np.abs(array).max() if array.size else 0.


def _relative(one, many, noise):
    one, many = np.asarray(one), np.asarray(many)
    if one.shape != many.shape:
        return float('inf')
    if one.dtype.kind not in 'fc':
        return 0. if np.array_equal(one, many) else float('inf')
    one, many = one.astype(np.float64), many.astype(np.float64)
    if not np.array_equal(np.isfinite(one), np.isfinite(many)):
        return float('inf')
    finite = np.isfinite(one)
    largest, difference = _largest(one[finite]), _largest(one[finite] - many[finite])
    if difference <= noise:
        return 0.
    return float(difference / largest) if largest else float(difference)


def _likely_cause(first, one, traits, sum_of_losses):
    if first.relative == float('inf') and first.what in ('variable', 'slot', 'gradient'):
        return ('%s %s exists on one side only: an unshared variable, or one whose name depends '
                'on the tower.' % (first.what, first.name))
    full = float(one['loss']['of step 1'])
    if full and abs(sum_of_losses - full) < 1e-3 * abs(full):
        return ('the loss sums over the batch (the towers\' losses add up to the full one): return '
                'the mean over examples.')
    if traits.random:
        return ('random numbers in the model (%s), such as dropout: each tower draws its own. '
                'Check it with dropout off.' % ', '.join(traits.random))
    if traits.batch_norm:
        return ('batch norm: each tower normalizes with the statistics of its own shard. Check '
                'with same_shards=True, where these agree, or with batch norm in inference mode.')
    return ('something that mixes the examples of a batch other than by the mean of a loss, such '
            'as a statistic of the batch, or a loss divided by a count that differs by shard.')


def _repeat_first_shard(inputs, num_towers):
    first = _first_examples(inputs, lambda count: count // num_towers)
    return _map_leaves(lambda leaf: np.concatenate([leaf] * num_towers), first)


def _first_examples(inputs, how_many):
    def first(leaf):
        if isinstance(leaf, tf.SparseTensorValue):
            raise InputError("same_shards and remainder='drop' take arrays here, not sparse "
                             'tensors.')
        leaf = np.asarray(leaf)
        if not how_many(len(leaf)):
            raise InputError('%d examples are too few: every tower needs one.' % len(leaf))
        return leaf[:how_many(len(leaf))]
    return _map_leaves(first, inputs)
