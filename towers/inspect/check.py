"""`check_towers`: does a model give the same numbers on N towers as on one device?"""

import collections
import functools
import numbers
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.options import Memory, Pipeline
from towers.api.request import REDUCTIONS, check_model_fn
from towers.arguments import (check_choice, check_count, check_flag, check_function,
                              check_instance)
from towers.cluster.cluster import KINDS
from towers.errors import InputError, InvalidArgumentError, SharedVariableError
from towers.inspect.check_machines import run_machines
from towers.inspect.check_report import (Difference, TowersReport, compare, compare_initial_values,
                                         is_finite, likely_cause, not_compared, why_not_finite)
from towers.inspect.check_runs import (first_examples, repeat_first_shard, run_one_device,
                                       run_towers)
from towers.placement.devices import resolve_devices
from towers.placement.tower_device import all_devices
from towers.tower.shards import checked_shares

OPTIONS = ('devices', 'remainder', 'variables', 'regularization', 'update_ops', 'copies', 'memory',
           'pipeline', 'batch_norm')


def check_towers(model_fn: typing.Callable, inputs: typing.Any,
                 make_optimizer: typing.Optional[typing.Callable] = None, num_towers: int = 2,
                 steps: int = 3, reduction: str = 'mean', same_shards: bool = False,
                 tolerance: typing.Optional[float] = None, seed: int = 0,
                 cluster: typing.Optional[str] = None,
                 shares: typing.Optional[typing.Sequence[int]] = None,
                 num_ps: typing.Optional[int] = None, **options) -> TowersReport:
    """Trains a model some steps on N towers and on one device, and compares the numbers.

    One device runs a plain TF1 program, without this package's towers and their analysis of graphs:
    the model function on the whole batch, its loss (with `regularization='add'` plus the registered
    losses), the optimizer, and the update ops. Both sides start from the same weights (initial
    values that are computed from the batch are compared). Compared are the loss of each step, the
    gradients of the first step, and variables and optimizer slots after the last step. A value that
    is not finite on either side is neither equal nor different, and is reported first.

    With `cluster=` the towers are those of several workers. For `'ring'` and `'ps'` these are
    threads of this process; each has one of TensorFlow's servers, and they send to each other over
    loopback. For `'horovod'` they are the processes of `horovodrun -np 2 python …`, each of which
    makes this call and gets the report. Losses are then weighted by the workers' examples, moving
    averages are worker 0's, and but for `'ps'` the workers' weights also have to be the same bit
    for bit.

    Args:
      model_fn: as for `build_towers`.
      inputs: a sample batch: a nest of arrays [n, …] or `tf.SparseTensorValue`s.
      make_optimizer: function without arguments that makes the optimizer anew; it is called once
        in either graph, before the model function, so it may make tensors (a decay by
        `tf.train.get_or_create_global_step()`, which then counts the steps). None for momentum
        SGD at rate 0.01. For a model with several losses it returns a dict of optimizers by name;
        a step is then that of all losses. The `var_list` of an `Objective` is a function here.
      num_towers: how many virtual CPU towers; of each worker, with `cluster`.
      steps: how many steps, all on the same batch.
      reduction: as for `build_towers`; with `'sum'` the one device gets N times its gradient.
      same_shards: use the batch's first n/N examples N times over, so that all towers see the same
        examples, and the statistics of a shard are those of the whole batch: the way to check a
        model with batch norm. Moving variances are left out: fused batch norm multiplies the
        variance of n numbers by n / (n - 1), and n is the size of the shard.
      tolerance: largest relative difference that counts as equal. None: 1e-9 where the model
        computes in float64 throughout, 1e-4 where float32 is the coarsest type in it, 0.02 for
        float16, 0.1 for bfloat16.
      seed: graph-level seed of the initial weights.
      cluster: None for one machine; or `'ring'`, `'ps'` (synchronous) or `'horovod'`.
      shares: the towers' parts of the batch, as for `build_towers`; with `cluster` the workers':
        `(1, 1)`, the default there, are two halves, `(3, 1)` three quarters and a quarter. n has to
        be a multiple of their sum. With `same_shards` all equal.
      num_ps: number of parameter servers, for `'ps'`; 1 if None.
      **options: more arguments of `build_towers`: `devices` (then they are counted, not
        `num_towers`) and `remainder`, without `cluster`; `variables`,
        `regularization`, `update_ops`, `copies`, `memory`, `pipeline`, `batch_norm`.

    Returns:
      `TowersReport`. A variable that cannot be shared is a report too, not an error.

    Raises:
      StepError: TensorFlow cannot run the model's step, on one device or on the towers.
      TowersError: bad arguments, as `build_towers`; or a cluster that cannot be made.
    """
    check_model_fn(model_fn)
    check_choice('reduction', reduction, REDUCTIONS)
    _check_inputs(inputs)
    _check_make_optimizer(make_optimizer)
    for name, value, least in (('num_towers', num_towers, 1), ('steps', steps, 1),
                               ('seed', seed, 0)):
        check_count(name, value, least)
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(
            tolerance, numbers.Real) or not tolerance >= 0):
        raise InvalidArgumentError('tolerance=%r: expected None or a number of at least 0.'
                                   % (tolerance,))
    check_flag('same_shards', same_shards)
    options = _checked_options(options)
    machines = _checked_machines(cluster, shares, num_ps, same_shards, options)
    make_optimizer = make_optimizer or (lambda: tf.train.MomentumOptimizer(0.01, 0.9))
    workers, devices, sizes = 1, None, None
    if machines is not None:
        workers = len(machines.shares)
    else:
        devices = resolve_devices(options.pop('devices')) if 'devices' in options else tuple(
            '/device:CPU:%d' % index for index in range(num_towers))
        num_towers = len(devices)
        _check_devices(devices, options)
        options['shares'] = checked_shares(shares, num_towers, 'towers')
        if same_shards and len(set(options['shares'])) > 1:
            raise InvalidArgumentError('shares=%r and same_shards=True: all shards are the same, '
                                       'so that the towers have equal parts.' % (tuple(shares),))
    # One for each tower, or for each of its micro-batches.
    parts = workers * num_towers * options['memory'].accumulate * options['pipeline'].micro_batches
    if same_shards:
        inputs = repeat_first_shard(inputs, parts)
    elif options.get('remainder') == 'drop':
        unit = parts // num_towers * sum(options['shares'])
        inputs = first_examples(inputs, lambda count: count - count % unit)
    if machines is not None:
        sizes = machines.sizes(inputs)
    factor = workers * num_towers if reduction == 'sum' else 1
    one, traits = run_one_device(model_fn, inputs, make_optimizer, steps, seed, factor, options)
    try:
        if machines is None:
            many, sum_of_losses = run_towers(model_fn, inputs, make_optimizer, devices, steps,
                                             one['initial'], reduction, options)
        else:
            many, sum_of_losses = run_machines(
                machines, sizes, model_fn, inputs, make_optimizer, num_towers, steps,
                one['initial'], reduction, options)
    except SharedVariableError as error:
        missing = Difference('variable', 'of a later tower', float('inf'))
        return TowersReport(False, missing, _tolerance(tolerance, traits), missing,
                            'an unshared variable: %s' % error, 0, workers * num_towers, steps,
                            reduction, None, [], workers)
    return _report_on(one, many, traits, tolerance, sum_of_losses, workers * num_towers, steps,
                      reduction, same_shards, parts, workers)


def _report_on(one, many, traits, tolerance, sum_of_losses, num_towers, steps, reduction,
               same_shards, parts, workers):
    """The `TowersReport` of two runs.

    Args:
      one, traits: as `run_one_device` returns them.
      many: such a dict of the towers' values.
      sum_of_losses: the sum of the towers' losses in the first step.
      tolerance, num_towers, steps, reduction, same_shards: as for `check_towers`.
      parts: into how many parts a batch is cut.
      workers: of how many workers the towers are.
    """
    tolerance = _tolerance(tolerance, traits)
    noise = _ROUNDING[traits.coarsest].noise * max(
        [np.abs(each).max() for each in one['gradient'].values() if each.size] or [0.])
    left_out = not_compared(one, many, noise, same_shards)
    differences = compare_initial_values(one, many) + compare(
        one, many, noise, [each.name for each in left_out])
    worst = max(differences, key=lambda difference: difference.relative)
    beyond = [each for each in differences if not each.relative <= tolerance]
    not_finite = next((each for each in differences if not (
        is_finite(one, each) and is_finite(many, each))), None)
    cause = None
    if not_finite is not None:
        cause = why_not_finite(not_finite, one, many)
    elif beyond:
        cause = likely_cause(beyond[0], one, traits, sum_of_losses, parts)
    return TowersReport(not beyond and not_finite is None, worst, tolerance,
                        beyond[0] if beyond else None, cause, len(differences), num_towers, steps,
                        reduction, not_finite, left_out, workers)


_Rounding = collections.namedtuple('_Rounding', 'tolerance noise')
# Sums in another order differ in the last digits, and steps make that grow.
_ROUNDING = {'float64': _Rounding(1e-9, 1e-14), 'float32': _Rounding(1e-4, 1e-6),
             'float16': _Rounding(2e-2, 2e-3), 'bfloat16': _Rounding(0.1, 2e-2)}


def _tolerance(given, traits):
    return _ROUNDING[traits.coarsest].tolerance if given is None else given


def _check_devices(devices, options):
    """Raises `InvalidArgumentError` for one tower that is built as a plain program is."""
    if len(devices) < 2 and not (
            len(all_devices(devices)) > 1 or options['memory'].recompute is not None
            or options['memory'].accumulate > 1 or options['pipeline'].micro_batches > 1):
        raise InvalidArgumentError('devices=%r: expected at least 2 towers to compare with one '
                                   'device; or memory=, or several devices for '
                                   'the one.' % (devices,))


def _check_inputs(inputs):
    leaves = [leaf for leaf in tf.nest.flatten(inputs) if leaf is not None]
    if not leaves:
        raise InputError('inputs=%.80r: expected a sample batch, of at least one array [n, …].'
                         % (inputs,))
    for leaf in leaves:
        if isinstance(leaf, (tf.Tensor, tf.SparseTensor) + compat.VARIABLE_TYPES):
            raise InputError('inputs hold %.80r: check_towers makes graphs of its own and takes '
                             'arrays, such as np.random.rand(8, 3), and tf.SparseTensorValues.'
                             % (leaf,))


def _check_make_optimizer(make_optimizer):
    if make_optimizer is not None:
        if isinstance(make_optimizer, type):
            make_optimizer = functools.partial(make_optimizer)  # a class makes one, too
        check_function('make_optimizer', make_optimizer, 0, 'a function that makes the optimizer, '
                       'such as lambda: tf.train.AdamOptimizer(0.001), since there are two graphs')


def _checked_options(options):
    """The arguments of `build_towers`, with defaults of those that are objects."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InvalidArgumentError(
            'check_towers takes no %s: expected some of make_optimizer, %s.%s' % (
                unknown[0], ', '.join(OPTIONS),
                ' make_optimizer= is a function that makes the optimizer: there are two graphs.'
                if unknown[0] == 'optimizer' else ''))
    options = dict(options)
    for name, kind in (('memory', Memory), ('pipeline', Pipeline)):
        given = options.get(name)
        options[name] = kind() if given is None else given
        check_instance(name, options[name], kind, 'a towers.%s, or None' % kind.__name__)
    return options


class Machines(collections.namedtuple('Machines', 'kind shares num_ps')):
    """The workers of `check_towers(cluster=…)`: the kind of cluster, their shares of a batch, and
    the number of parameter servers."""
    __slots__ = ()

    def sizes(self, inputs):
        """How many of the inputs' examples each worker has."""
        leaves = tf.nest.flatten(inputs)
        sparse = [leaf for leaf in leaves if isinstance(leaf, tf.SparseTensorValue)]
        counts = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves
                  if leaf is not None}
        if sparse or len(counts) != 1 or None in counts:
            raise InputError('inputs=%.80r: with cluster= expected arrays [n, …] of the same n, '
                             'which can be cut into the parts of the workers.' % (inputs,))
        [count] = counts
        if not count or count % sum(self.shares):
            raise InvalidArgumentError(
                'shares=%r of %d examples: expected whole numbers whose sum divides the number of '
                'examples.' % (self.shares, count))
        return [share * count // sum(self.shares) for share in self.shares]


def _checked_machines(cluster, shares, num_ps, same_shards, options):
    """The `Machines` that `check_towers` is asked for; None for one machine."""
    if cluster is None:
        if num_ps is not None:
            raise InvalidArgumentError("num_ps=%r goes with cluster='ps'." % (num_ps,))
        return None
    if not isinstance(cluster, str):
        raise InvalidArgumentError(
            'cluster=%.80r: check_towers starts workers of its own, and takes the kind of cluster: '
            '%s.' % (cluster, ', '.join(map(repr, KINDS))))
    check_choice('cluster', cluster, KINDS)
    for name in ('devices', 'remainder'):
        if name in options:
            raise InvalidArgumentError(
                '%s= and cluster=: %s. Pass one of the two.' % (name, {
                    'devices': 'each worker has num_towers towers on CPUs of its own',
                    'remainder': "a worker's batch that does not divide is weighted"}[name]))
    if num_ps is not None and cluster != 'ps':
        raise InvalidArgumentError("num_ps=%r goes with cluster='ps', and it is %r."
                                   % (num_ps, cluster))
    check_count('num_ps', 1 if num_ps is None else num_ps)
    shares = (1, 1) if shares is None else shares
    if not isinstance(shares, (tuple, list)) or len(shares) < 2:
        raise InvalidArgumentError('shares=%.80r: expected the parts of two or more workers, whole '
                                   'numbers such as (1, 1) or (3, 1).' % (shares,))
    shares = checked_shares(shares, len(shares), 'workers')
    if same_shards and len(set(shares)) > 1:
        raise InvalidArgumentError('shares=%r and same_shards=True: all shards are the same, so '
                                   'that the workers have equal parts.' % (tuple(shares),))
    return Machines(cluster, shares, 1 if num_ps is None else int(num_ps))
