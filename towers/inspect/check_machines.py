"""The run of `check_towers` on several workers, of a ring, parameter servers or Horovod."""

import json
import threading

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.build import build_towers
from towers.cluster.cluster import Cluster
from towers.cluster.horovod import gathered_lines
from towers.cluster.member import join, start_server
from towers.cluster.ports import free_ports
from towers.errors import ClusterError, failing_on
from towers.inspect.check_runs import assigned, constants, map_leaves, sort_values
from towers.placement.devices import session_config


_PATIENCE = 120.  # seconds for the chief to begin, or to say what is wrong


def run_machines(machines, sizes, model_fn, inputs, make_optimizer, num_towers, steps, initial,
                 reduction, options):
    """Trains on several workers, from the initial values of `run_one_device`.

    Args:
      machines: `check.Machines`.
      sizes: how many of the inputs' examples each worker has.
      initial: list of (name, value) of variables.
      The others are those of `check_towers`.

    Returns:
      (result, sum of the workers' losses): the result is worker 0's, as that of `run_one_device`,
      with the losses of all.
    """
    ends = np.cumsum(sizes)
    parts = [map_leaves(lambda leaf, begin=end - size, end=end: np.asarray(leaf)[begin:end], inputs)
             for size, end in zip(sizes, ends)]

    def work(cluster):
        return _train(cluster, model_fn, parts[cluster.rank], make_optimizer, num_towers, steps,
                      reduction, dict(initial), has_begun, options)
    has_begun = threading.Event()
    train = _by_horovod if machines.kind == 'horovod' else _on_servers
    losses, many = train(machines, work, len(set(sizes)) > 1)
    sum_of_losses = sum(float(loss['of step 1']) for loss in losses)
    many['loss'] = {step: sum(size * loss[step] for size, loss in zip(sizes, losses)) / sum(sizes)
                    for step in many['loss']}
    return many, sum_of_losses


def _on_servers(machines, work, uneven):
    """Trains in threads of this process, each with a server of TensorFlow's.

    Returns:
      `(losses, numbers)`: a dict of losses of each worker, and worker 0's numbers.
    """
    # All at once: what one call gives as free, the next one may give again.
    kind, count = machines.kind, len(machines.shares)
    ports = free_ports(count + (kind == 'ps'))
    addresses = ['127.0.0.1:%d' % port for port in ports]
    workers, ps = addresses[:count], addresses[count:]

    def member(job, rank):
        return Cluster(kind, workers, ps, job, rank, uneven=uneven)
    servers = [start_server(member('ps', rank), member('ps', rank).session_config(tf.ConfigProto()))
               for rank in range(len(ps))]
    results = _together(lambda rank: work(member('worker', rank)), count)
    del servers
    return [result['loss'] for result in results], results[0]


def _by_horovod(machines, work, uneven):
    """Trains in the processes that Horovod's launcher started; returns as `_on_servers`."""
    cluster, count = Cluster('horovod', uneven=uneven), len(machines.shares)
    if cluster.num_workers != count:
        raise ClusterError('shares of %d workers, and Horovod has %d: start this program with '
                           '`horovodrun -np %d python …`, or pass as many shares.' % (
                               count, cluster.num_workers, count))
    result = work(cluster)
    own = {step: float(loss) for step, loss in result['loss'].items()}
    return [json.loads(text) for text in gathered_lines(json.dumps(own))], result


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
           has_begun, options):
    """Trains one worker; returns its numbers in the dicts that `run_one_device` returns.

    Args:
      has_begun: `threading.Event` that the chief of parameter servers sets when the variables have
        the `initial` values; the others begin then.
      The others are those of `run_machines`, for this worker.
    """
    with tf.Graph().as_default():
        inputs = constants(batch)
        optimizer = make_optimizer()
        step = tf.train.get_global_step()
        built = build_towers(
            model_fn, inputs, optimizer, num_towers, reduction, remainder='weight',
            global_step=step, cluster=cluster, **options)
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in built.gradients]
        begin = _Begin(cluster, initial, built.replicas, has_begun)
        result = {'loss': {}}
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
        names = {variable.op.name: variable.op.name for variable in variables}
        result.update(sort_values(variables, values, names))
        return result


class _Begin(tf.train.SessionRunHook):
    """Gives the variables the initial values of the run on one device."""

    def __init__(self, cluster, initial, replicas, has_begun):
        self._cluster, self._initial, self._replicas = cluster, initial, replicas
        self._has_begun = has_begun
        self._refresh = []

    def begin(self):
        self._assignments, self._fed = [], {}
        if self._cluster.kind == 'ps' and not self._cluster.is_chief:
            return
        self._assignments, self._fed = assigned(self._initial, {})
        if self._replicas is not None:
            self._refresh = [self._replicas.refresh()]

    def after_create_session(self, session, coord):
        if self._cluster.kind == 'ps' and not self._cluster.is_chief:
            # It is ready when the chief has initialised the variables, which it writes then.
            self._has_begun.wait(_PATIENCE)
            return
        session.run(self._assignments, self._fed)
        session.run(self._refresh)
        self._has_begun.set()
