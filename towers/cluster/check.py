"""`check_cluster`: does a model give the same numbers on several machines as on one device?"""

import hashlib
import json
import threading
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count
from towers.build.build import build_towers
from towers.cluster.cluster import KINDS, Cluster
from towers.cluster.horovod import gathered_lines
from towers.cluster.member import join, start_server
from towers.cluster.ports import free_ports
from towers.errors import ClusterError, InputError, InvalidArgumentError
from towers.inspect.check import OPTIONS, check_arguments, report_on, run_one_device
from towers.inspect.check_report import Difference, TowersReport
from towers.placement.devices import session_config
from towers.reason import failing_on


def check_cluster(model_fn: typing.Callable, inputs: typing.Any,
                  make_optimizer: typing.Optional[typing.Callable] = None, kind: str = 'ring',
                  shares: typing.Sequence[int] = (1, 1), num_towers: int = 1, num_ps: int = 1,
                  steps: int = 3, reduction: str = 'mean', tolerance: typing.Optional[float] = None,
                  seed: int = 0, **options) -> TowersReport:
    """Trains a model some steps on several workers and on one device, and compares the numbers.

    The run on one device is made as `check_towers` makes it. The workers are threads of this
    process; each has one of TensorFlow's servers, and they send to each other over loopback. With
    `kind='horovod'` they are the processes of `horovodrun -np 2 python …`, each of which makes this
    call and gets the report. The report compares the losses (weighted by the workers' examples),
    the gradients of the first step, and the variables and slots after the last step. But for
    `kind='ps'`, the workers' variables also have to be the same bit for bit.

    Args:
      model_fn, make_optimizer, steps, reduction, tolerance, seed: as for `check_towers`.
      inputs: a sample batch of all workers together: a tuple of arrays [n, …].
      kind: `'ring'`; `'horovod'`; or `'ps'`, synchronous training on parameter servers.
      shares: the workers' parts of the batch: `(1, 1)` are two halves, `(3, 1)` three quarters and
        a quarter. n has to be a multiple of their sum.
      num_towers: number of towers of each worker.
      num_ps: number of parameter servers, for `'ps'`.
      **options: more arguments of `build_towers`.

    Returns:
      `TowersReport`.

    Raises:
      StepError: TensorFlow cannot run the model's step.
      TowersError: bad arguments, as for `build_towers`; or a cluster that cannot be made.
    """
    check_choice('kind', kind, KINDS)
    check_count('num_towers', num_towers)
    check_count('num_ps', num_ps)
    check_arguments(
        'check_cluster', model_fn, inputs, make_optimizer, num_towers, steps, reduction, tolerance,
        seed, options, [name for name in OPTIONS if name not in ('devices', 'remainder')])
    make_optimizer = make_optimizer or (lambda: tf.train.MomentumOptimizer(0.01, 0.9))
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    sizes = _sizes(_count(inputs), shares)
    factor = len(sizes) * num_towers if reduction == 'sum' else 1
    one, traits = run_one_device(model_fn, inputs, make_optimizer, steps, seed, factor, options)
    ends = np.cumsum(sizes)
    parts = [tuple(each[end - size:end] for each in inputs) for size, end in zip(sizes, ends)]

    def work(cluster):
        return _train(cluster, model_fn, parts[cluster.rank], make_optimizer, num_towers, steps,
                      reduction, dict(one['initial']), options)
    uneven = len(set(sizes)) > 1
    train = _by_horovod if kind == 'horovod' else _on_servers
    losses, many, drifted = train(kind, work, len(sizes), num_ps, uneven)
    sum_of_losses = sum(float(loss['of step 1']) for loss in losses)
    many['loss'] = {step: sum(size * loss[step] for size, loss in zip(sizes, losses)) / sum(sizes)
                    for step in many['loss']}
    report = report_on(one, many, traits, tolerance, sum_of_losses, len(sizes) * num_towers, steps,
                       reduction)
    return _of_drift(report, drifted) if drifted and report.not_finite is None else report


def _of_drift(report, drifted):
    """The report of workers whose weights are not the same bit for bit, whatever else it says."""
    first = Difference('variable', drifted[0], float('inf'))
    return report._replace(
        equal=False, first=first, worst=first,
        cause='the workers do not have the same values of %s: something in the update differs from '
              'worker to worker, such as a number that one machine alone knows, or NumPy\'s random '
              'numbers.' % ', '.join(drifted[:3]))


def _on_servers(kind, work, count, num_ps, uneven):
    """Trains in threads of this process, each with a server of TensorFlow's.

    Returns:
      `(losses, numbers, drifted)`: a dict of losses of each worker, worker 0's numbers, and the
      names of variables that are not the same on all workers.
    """
    # All at once: what one call gives as free, the next one may give again.
    ports = free_ports(count + (num_ps if kind == 'ps' else 0))
    addresses = ['127.0.0.1:%d' % port for port in ports]
    workers, ps = addresses[:count], addresses[count:]

    def member(job, rank):
        return Cluster(kind, workers, ps, job, rank, uneven=uneven)
    servers = [start_server(member('ps', rank), member('ps', rank).session_config(tf.ConfigProto()))
               for rank in range(len(ps))]
    results = _together(lambda rank: work(member('worker', rank)), count)
    del servers
    drifted = _drifted([_digests(result) for result in results]) if kind == 'ring' else []
    return [result['loss'] for result in results], results[0], drifted


def _by_horovod(kind, work, count, num_ps, uneven):
    """Trains in the processes that Horovod's launcher started; returns as `_on_servers`."""
    cluster = Cluster(kind, uneven=uneven)
    if cluster.num_workers != count:
        raise ClusterError('shares of %d workers, and Horovod has %d: start this program with '
                           '`horovodrun -np %d python …`, or pass as many shares.' % (
                               count, cluster.num_workers, count))
    result = work(cluster)
    own = {'loss': {step: float(loss) for step, loss in result['loss'].items()},
           'digests': _digests(result)}
    every = [json.loads(text) for text in gathered_lines(json.dumps(own))]
    return [each['loss'] for each in every], result, _drifted([each['digests'] for each in every])


def _digests(result):
    """Dict from names of the variables that all workers share to a digest of their bytes.

    What the step writes besides them, such as moving averages, is each worker's own.
    """
    return {name: hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
            for name, value in result['variable'].items() if name in result['shared']}


def _drifted(digests):
    """Names of variables whose bytes are not the same on all workers."""
    return [name for name, first in digests[0].items()
            if any(other[name] != first for other in digests)]


def _count(inputs):
    counts = [np.shape(each)[0] if np.ndim(each) else None for each in inputs]
    if None in counts or len(set(counts)) != 1:
        raise InputError('inputs=%.80r: expected a tuple of arrays [n, …], of the same n.'
                         % (inputs,))
    return counts[0]


def _sizes(count, shares):
    if (not isinstance(shares, (tuple, list)) or len(shares) < 2 or not all(
            isinstance(share, int) and not isinstance(share, bool) and share > 0
            for share in shares) or count % sum(shares)):
        raise InvalidArgumentError('shares=%r of %d examples: expected two or more whole numbers '
                                   'whose sum divides the number of examples.' % (shares, count))
    return [share * count // sum(shares) for share in shares]


def _together(work, count):
    results, errors = [None] * count, []

    def call(rank):
        try:
            results[rank] = work(rank)
        except BaseException as error:  # raised again by the caller's thread
            errors.append(error)
    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.1)
    if errors:
        raise errors[0]
    return results


def _train(cluster, model_fn, batch, make_optimizer, num_towers, steps, reduction, initial,
           options):
    """Trains one worker; returns its numbers in the dicts that `run_one_device` returns."""
    with tf.Graph().as_default():
        inputs = tuple(tf.constant(part) for part in batch)
        optimizer = make_optimizer()
        step = tf.train.get_global_step()
        built = build_towers(
            model_fn, inputs, optimizer, num_towers, reduction, remainder='weight',
            global_step=step, cluster=cluster, **options)
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in built.gradients]
        begin = _Begin(cluster, initial, built.replicas)
        shared = [variable for _, variable in built.gradients]
        if cluster.kind != 'ps':
            shared = shared + built.machines.state
        result = {'loss': {}, 'variable': {}, 'slot': {},
                  'shared': {variable.op.name for variable in shared}}
        config = session_config(built.devices)
        with failing_on('on worker %d' % cluster.rank), join(
                cluster, built, config, on_lost=lambda error: None) as member, member.session(
                [begin]) as session:
            for number in range(steps):
                loss, values, _ = session.run([built.loss, gradients, built.train_op])
                result['loss']['of step %d' % (number + 1)] = loss
                if number == 0:
                    result['gradient'] = {variable.op.name: value for (_, variable), value in
                                          zip(built.gradients, values)}
            variables = tf.global_variables()
            values = session.run_step_fn(
                lambda step_context: step_context.session.run(variables))
        trained = {variable.op.name for variable in tf.trainable_variables()}
        for variable, value in zip(variables, values):
            name = variable.op.name
            is_slot = any(name.startswith(other + '/') for other in trained) or (
                '/' not in name and name.endswith('_power'))
            result['slot' if is_slot else 'variable'][name] = value
        return result


class _Begin(tf.train.SessionRunHook):
    """Gives the variables the initial values of the run on one device."""

    def __init__(self, cluster, initial, replicas):
        self._cluster, self._initial, self._replicas = cluster, initial, replicas
        self._refresh = []

    def begin(self):
        self._assignments, self._fed = [], {}
        if self._cluster.kind == 'ps' and not self._cluster.is_chief:
            return
        for variable in tf.global_variables():
            if variable.op.name in self._initial:
                value = tf.placeholder(variable.dtype.base_dtype)
                self._assignments.append(tf.assign(variable, value, validate_shape=False).op)
                self._fed[value] = self._initial[variable.op.name]
        if self._replicas is not None:
            self._refresh = [self._replicas.refresh()]

    def after_create_session(self, session, coord):
        session.run(self._assignments, self._fed)
        session.run(self._refresh)
