"""`check_towers`: does a model give the same numbers on N towers as on one device?

Its test is tests/inspect/test_check.py.
"""

import functools
import inspect
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.checked_request import REDUCTIONS, check_model_fn
from towers.api.options import Memory, Pipeline
from towers.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_function,
    check_instance,
    check_number,
)
from towers.capture.finished_model import is_finished, output_of_finished
from towers.cluster.cluster import KINDS
from towers.errors import InputError, InvalidArgumentError
from towers.inspect.check_finished import FinishedProgram
from towers.inspect.check_machines import Machines, run_machines
from towers.inspect.check_one_device import run_one_device
from towers.inspect.check_report import CheckedRuns, TowersReport, report_on
from towers.inspect.check_runs import Program, map_arrays, run_towers
from towers.model.build_context import has_towers
from towers.model.outputs import ModelOutput
from towers.placement.devices import MOST_TOWERS, resolve_devices
from towers.placement.tower_device import all_devices
from towers.shards.cut_batch import checked_shares, checked_size

OPTIONS = ('devices', 'remainder', 'variables', 'regularization', 'update_ops', 'copies', 'memory',
           'pipeline', 'batch_norm')


def check_towers(model_fn: typing.Any, inputs: typing.Any,
                 make_optimizer: typing.Optional[typing.Callable] = None, num_towers: int = 2,
                 steps: int = 3, reduction: str = 'mean', same_shards: bool = False,
                 tolerance: typing.Optional[float] = None, seed: int = 0,
                 cluster: typing.Optional[str] = None,
                 shares: typing.Optional[typing.Sequence[int]] = None,
                 feed: typing.Optional[dict] = None, **options: typing.Any) -> TowersReport:
    """Trains a model some steps on N towers and on one device, and compares the numbers.

    One device runs a plain TF1 program, without this package's towers and their analysis of graphs:
    the model function on the whole batch, its loss (with `regularization='add'` plus the registered
    losses), the optimizer, and the update ops. Both sides start from the same weights (initial
    values that are computed from the batch are compared). It compares the loss of each step, the
    gradients of the first step, and variables and optimizer slots after the last step. A value that
    is not finite on either side is neither equal nor different, and is reported first.

    With `cluster=` the towers belong to several workers. For `'ring'` and `'ps'` the workers are
    threads of this process; each worker has one of TensorFlow's servers, and the workers send to
    each other over loopback. For `'horovod'` the workers are the processes of
    `horovodrun -np 2 python …`; each process makes this call and gets the report. With a cluster,
    losses are weighted by the workers' examples, and moving averages are worker 0's. Except with
    `'ps'`, all workers must have the same weights, bit for bit.

    Args:
      model_fn: as for `build_towers`: a model function, or a finished model of the default graph,
        which is not changed: both sides are imports of the graph's meta graph, as the graph is
        before `build_towers` makes towers in it.
      inputs: a sample batch: a nest of arrays [n, …] or `tf.SparseTensorValue`s; of a finished
        model a dict from the tensors at which the batch enters to arrays.
      make_optimizer: function without arguments that makes the optimizer anew; it is called once
        in each of the two graphs, before the model function, so it may make tensors (a decay by
        `tf.train.get_or_create_global_step()`, which then counts the steps). None for momentum
        SGD at rate 0.01. For a model with several losses it returns a dict of optimizers by name;
        a step then updates by all losses. The `var_list` of an `Objective` is a function here.
      num_towers: how many towers, on virtual CPUs; with `cluster`, how many of each worker.
      steps: how many steps, all on the same batch.
      reduction: as for `build_towers`; with `'sum'` the one device gets N times its gradient.
      same_shards: use the batch's first n/N examples N times over, so that all towers see the same
        examples, and the statistics of a shard equal the statistics of the whole batch. So a model
        with batch norm can be checked. Such a check cannot show an error that differs by shard,
        such as a loss that is divided by a count: for this use `batch_norm='sync'`. Moving
        variances are left out: fused batch norm multiplies the variance of n numbers by
        n / (n - 1), and n is the size of the shard.
      tolerance: largest relative difference that counts as equal. None: 1e-9 where the model
        computes in float64 throughout, 1e-4 where float32 is the coarsest type in it, 0.02 for
        float16, 0.1 for bfloat16.
      seed: graph-level seed of the initial weights.
      cluster: None for one machine; or `'ring'`, `'ps'` (synchronous) or `'horovod'`.
      shares: the proportions of the towers' shards, as for `build_towers`; with `cluster` the
        proportions of the workers' batches: `(1, 1)`, the default with `cluster`, are two halves,
        `(3, 1)` three quarters and a quarter. n has to be a multiple of the sum of the shares. With
        `same_shards` all shares are equal.
      feed: for a finished model, a dict from its other placeholders to their values; or None.
      **options: more arguments of `build_towers`: `variables`, `regularization`, `update_ops`,
        `copies`, `memory`, `pipeline`, `batch_norm`; and without `cluster` also `devices`, in the
        place of `num_towers`, and `remainder`, except `'drop'`.

    Returns:
      `TowersReport`.

    Raises:
      SharedVariableError: a variable that the towers cannot share.
      StepError: TensorFlow cannot run the model's step, on one device or on the towers.
      TowersError: bad arguments, as `build_towers`; a finished model in whose graph there are
        towers already; or a cluster that cannot be made.
    """
    model_fn, inputs = _checked_model(model_fn, inputs, feed, cluster)
    check_choice('reduction', reduction, REDUCTIONS)
    _check_inputs(inputs)
    if make_optimizer is None:
        make_optimizer = functools.partial(tf.train.MomentumOptimizer, 0.01, 0.9)
    _check_make_optimizer(make_optimizer)
    check_count('num_towers', num_towers, most=MOST_TOWERS)
    check_count('steps', steps)
    check_count('seed', seed, least=0)
    if tolerance is not None:
        check_number('tolerance', tolerance, 0, expected='None or a number of at least 0')
    check_flag('same_shards', same_shards)
    options = _checked_options(options)
    if cluster is None:
        checked = _towers_of_one_machine(num_towers, shares, options)
    else:
        checked = _towers_of_workers(cluster, shares, num_towers, options)
    # One of the two factors is 1: `build_towers` refuses both together.
    micro_batches_of_tower = options['memory'].accumulate * options['pipeline'].micro_batches
    num_parts = checked.num_towers * micro_batches_of_tower
    if same_shards:
        _check_equal(checked)
        inputs = _first_shard_repeated(inputs, num_parts)
    sizes_of_workers: typing.List[int] = []  # none without a cluster
    if checked.machines is None:
        _check_divides(inputs, checked.shares, options)
    else:
        sizes_of_workers = _sizes_of_workers(inputs, checked.shares)

    program = Program(model_fn, inputs, make_optimizer, steps, reduction, options)
    factor = 1
    if reduction == 'sum':
        factor = checked.num_towers
    one = run_one_device(program, seed, factor)
    if checked.machines is None:
        trained = run_towers(program, checked.devices, one.initial, same_shards)
    else:
        trained = run_machines(program, checked.machines, sizes_of_workers, one.initial)
    ran = CheckedRuns(
        towers=checked.num_towers, workers=checked.num_workers, steps=steps, reduction=reduction,
        parts=num_parts, same_shards=same_shards)
    return report_on(one.numbers, trained.numbers, one.traits, ran, tolerance, trained.proof)


class _CheckedTowers(typing.NamedTuple):
    """The towers that are compared with one device.

    Attributes:
      devices: the device of each tower on one machine; none with a cluster.
      machines: the workers of a cluster; None for one machine.
      shares: the proportions of the batch: of the towers, or of the workers.
      num_workers: the number of workers; 1 for one machine.
      num_towers: the number of towers of all workers.
    """
    devices: typing.Sequence[str]
    machines: typing.Optional[Machines]
    shares: typing.Tuple[int, ...]
    num_workers: int
    num_towers: int


def _towers_of_one_machine(num_towers: int, shares: typing.Any,
                           options: typing.Dict[str, typing.Any]) -> _CheckedTowers:
    """The towers of a check without a cluster.

    Args:
      num_towers: how many virtual CPUs, where the devices are not given.
      shares: the proportions of the towers' shards; None for equal shards.
      options: the further arguments of `build_towers`; of these `devices` is taken away, and
        `shares` is added.
    """
    devices = _devices_of_towers(num_towers, options)
    _check_is_not_one_device(devices, options)
    checked = checked_shares(shares, len(devices), 'towers')
    options['shares'] = checked
    return _CheckedTowers(devices, machines=None, shares=checked, num_workers=1,
                          num_towers=len(devices))


def _towers_of_workers(cluster: str, shares: typing.Any, num_towers: int,
                       options: typing.Dict[str, typing.Any]) -> _CheckedTowers:
    """The towers of a check with a cluster; the arguments are those of `_checked_machines`."""
    machines = _checked_machines(cluster, shares, num_towers, options)
    num_workers = len(machines.shares)
    return _CheckedTowers(devices=[], machines=machines, shares=machines.shares,
                          num_workers=num_workers, num_towers=num_workers * num_towers)


def _checked_model(model: typing.Any, inputs: typing.Any, feed: typing.Optional[dict],
                   cluster: typing.Any) -> typing.Tuple[typing.Any, typing.Any]:
    """Checks that the arguments fit a model function, or a finished model.

    Args:
      model: `model_fn` of `check_towers`.
      inputs, feed, cluster: the arguments of `check_towers`.

    Returns:
      `(the model function or a FinishedProgram, the arrays of the sample batch)`.
    """
    if not is_finished(model):
        check_model_fn(model)
        if feed is not None:
            raise InvalidArgumentError('feed= is for the placeholders of a finished model, and '
                                       'this is a model function.')
        return model, inputs
    if cluster is not None:
        raise InvalidArgumentError('cluster=%r, and the model is finished: pass a model function, '
                                   'which each worker calls.' % (cluster,))
    if has_towers(tf.get_default_graph()):
        raise InvalidArgumentError(
            'the model is finished, and its graph has towers already, which would be trained with '
            'it: call check_towers before build_towers, or in a graph without towers.')
    program = FinishedProgram(_as_output(model), inputs, feed)
    return program, program.batch


def _as_output(model: typing.Any) -> ModelOutput:
    """The `ModelOutput` of a finished model. It is given as a loss, as a `ModelOutput`, as a dict
    with the fields of a `ModelOutput` (`{'loss': …, 'predictions': …}`), or as a dict of losses
    by name."""
    names_of_losses = None
    if isinstance(model, dict):
        has_fields = set(model) <= set(ModelOutput._fields)
        if not has_fields:
            names_of_losses = list(model)
    return output_of_finished(model, needs_loss=True, names=names_of_losses)


def _check_make_optimizer(make_optimizer: typing.Any) -> None:
    """Raises `InvalidArgumentError` if `make_optimizer` cannot be called without arguments."""
    if isinstance(make_optimizer, type):  # a class, which `check_function` takes for no function
        make_optimizer = functools.partial(make_optimizer)
    check_function('make_optimizer', make_optimizer, 0,
                   'a function that makes the optimizer, such as '
                   'lambda: tf.train.AdamOptimizer(0.001), since there are two graphs')


def _devices_of_towers(num_towers: int,
                       options: typing.Dict[str, typing.Any]) -> typing.Sequence[str]:
    """The device of each tower on one machine.

    Args:
      num_towers: how many virtual CPUs, where the devices are not given.
      options: the further arguments of `build_towers`, of which `devices` is taken away.
    """
    if 'devices' in options:
        return resolve_devices(options.pop('devices'))
    return ['/device:CPU:%d' % index for index in range(num_towers)]


def _check_is_not_one_device(devices: typing.Sequence[str],
                             options: typing.Dict[str, typing.Any]) -> None:
    """Raises `InvalidArgumentError` for a single tower that computes just as one device does:
    without stages, micro-batches and recomputation.

    Args:
      devices: the device of each tower.
      options: the further arguments of `build_towers`.
    """
    memory = options['memory']
    has_several_towers = len(devices) > 1
    has_stages = len(all_devices(devices)) > 1
    has_micro_batches = memory.accumulate > 1 or options['pipeline'].micro_batches > 1
    has_recomputation = memory.recompute is not None
    if not (has_several_towers or has_stages or has_micro_batches or has_recomputation):
        raise InvalidArgumentError('devices=%r: expected at least 2 towers to compare with one '
                                   'device; or memory=, or several devices for '
                                   'the one.' % (devices,))


def _check_equal(checked: _CheckedTowers) -> None:
    """Raises `InvalidArgumentError` for shares that differ, with `same_shards`."""
    owners = 'towers' if checked.machines is None else 'workers'
    if len(set(checked.shares)) > 1:
        raise InvalidArgumentError('shares=%r and same_shards=True: all shards are the same, so '
                                   'that the %s have equal parts.' % (checked.shares, owners))


def _check_divides(inputs: typing.Any, shares: typing.Tuple[int, ...],
                   options: typing.Dict[str, typing.Any]) -> None:
    """Raises `InputError`, before any step, for a batch that does not divide among the towers.

    `shares` and `options` are the arguments of `check_towers`.
    """
    sizes = [size for size in _numbers_of_examples(inputs) if size is not None]
    if not sizes:
        return  # sparse inputs alone: the build checks these
    some_batch = np.empty(sizes[0])  # one array will do: the build compares all
    # `checked_size` refuses eager execution, in which `check_towers` itself may be called.
    with tf.Graph().as_default():
        checked_size(some_batch, shares, options.get('remainder', 'error'), 'towers')


def _numbers_of_examples(inputs: typing.Any) -> typing.List[typing.Optional[int]]:
    """For each leaf of the inputs its number of examples; None for scalars and sparse leaves."""
    leaves: typing.List[typing.Any] = []
    map_arrays(leaves.append, inputs)
    return list(map(_number_of_examples, leaves))


def _number_of_examples(leaf: typing.Any) -> typing.Optional[int]:
    """The first dimension of an array; None for a scalar and for a sparse tensor."""
    if isinstance(leaf, tf.SparseTensorValue) or np.ndim(leaf) == 0:
        return None
    return np.shape(leaf)[0]


def _check_inputs(inputs: typing.Any) -> None:
    """Raises `InputError` for a sample batch without arrays, or with tensors of a graph."""
    leaves = tf.nest.flatten(inputs)
    if all(leaf is None for leaf in leaves):
        raise InputError('inputs=%.80r: expected a sample batch, of at least one array [n, …].'
                         % (inputs,))
    for leaf in leaves:
        if isinstance(leaf, (tf.Tensor, tf.SparseTensor) + compat.VARIABLE_TYPES):
            raise InputError('inputs hold %.80r: check_towers makes graphs of its own and takes '
                             'arrays, such as np.random.rand(8, 3), and tf.SparseTensorValues.'
                             % (leaf,))


def _first_shard_repeated(inputs: typing.Any, num_parts: int) -> typing.Any:
    """The first n // N of the n examples of the inputs, N times over; N is `num_parts`."""
    def repeated(leaf: typing.Any) -> np.ndarray:
        """The first part of an array, N times over."""
        if isinstance(leaf, tf.SparseTensorValue):
            raise InputError('same_shards takes arrays here, not sparse tensors.')
        leaf = np.asarray(leaf)
        if len(leaf) < num_parts:  # a part has no example
            raise InputError('%d examples are too few: every tower needs one.' % len(leaf))
        return np.concatenate([leaf[:len(leaf) // num_parts]] * num_parts)
    return map_arrays(repeated, inputs)


def _checked_options(options: typing.Dict[str, typing.Any]) -> typing.Dict[str, typing.Any]:
    """The further arguments of `check_towers`, checked, with the defaults of `memory` and
    `pipeline` where these are not given."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        parameters = list(inspect.signature(check_towers).parameters)
        # Without the model and its inputs, which come first, and without `**options`.
        optional = parameters[parameters.index('make_optimizer'):parameters.index('options')]
        hint = ''
        if unknown[0] == 'optimizer':
            hint = ' make_optimizer= is a function that makes the optimizer: there are two graphs.'
        raise InvalidArgumentError(
            'check_towers takes no %s: expected some of %s.%s' % (
                unknown[0], ', '.join(optional + list(OPTIONS)), hint))
    checked = dict(options)
    for name, kind in (('memory', Memory), ('pipeline', Pipeline)):
        if checked.get(name) is None:
            checked[name] = kind()
        check_instance(name, checked[name], kind, 'a towers.%s, or None' % kind.__name__)
    if checked.get('remainder') == 'drop':
        raise InvalidArgumentError("remainder='drop': give check_towers a batch that divides, or "
                                   "remainder='weight'.")
    return checked


def _sizes_of_workers(inputs: typing.Any, shares: typing.Sequence[int]) -> typing.List[int]:
    """How many of the inputs' examples each worker gets; `shares` are the workers' proportions."""
    sizes = _numbers_of_examples(inputs)
    batch_size = sizes[0]
    if batch_size is None or set(sizes) != {batch_size}:
        raise InputError('inputs=%.80r: with cluster= expected arrays [n, …] of the same n, '
                         'which can be cut into the parts of the workers.' % (inputs,))
    if batch_size == 0 or batch_size % sum(shares) != 0:
        raise InvalidArgumentError(
            'shares=%r of %d examples: expected whole numbers whose sum divides the number of '
            'examples.' % (shares, batch_size))
    size_of_share = batch_size // sum(shares)
    return [share * size_of_share for share in shares]


def _checked_machines(cluster: typing.Any, shares: typing.Any, num_towers: int,
                      options: typing.Dict[str, typing.Any]) -> Machines:
    """The workers that `check_towers` is asked for.

    Args:
      cluster: `'ring'`, `'ps'` or `'horovod'`.
      shares: the workers' proportions of the batch; None for two halves.
      num_towers: how many towers each worker has.
      options: the further arguments of `build_towers`.
    """
    check_choice('cluster', cluster, KINDS)
    if 'devices' in options:
        raise InvalidArgumentError('devices= and cluster=: each worker has num_towers towers on '
                                   'CPUs of its own. Pass one of the two.')
    if 'remainder' in options:
        raise InvalidArgumentError("remainder= and cluster=: a worker's batch that does not divide "
                                   'is weighted. Pass one of the two.')
    if shares is None:
        shares = (1, 1)
    if not isinstance(shares, (tuple, list)) or len(shares) < 2:
        raise InvalidArgumentError('shares=%.80r: expected the parts of two or more workers, whole '
                                   'numbers such as (1, 1) or (3, 1).' % (shares,))
    return Machines(cluster, checked_shares(shares, len(shares), 'workers'), num_towers)
