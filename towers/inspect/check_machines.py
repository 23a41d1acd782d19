"""The run of `check_towers` on several workers, of a ring, parameter servers or Horovod."""

import json
import multiprocessing.pool
import threading

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.build import build_towers
from towers.cluster.addresses import free_ports
from towers.cluster.cluster import Cluster
from towers.cluster.horovod import gathered_lines
from towers.cluster.member import join, start_server
from towers.errors import ClusterError, failing_on
from towers.inspect.check_runs import assigned, constants, map_leaves, train
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
    begins, has_begun = np.cumsum([0] + sizes), threading.Event()

    def work(cluster):
        begin, end = begins[cluster.rank:cluster.rank + 2]
        batch = map_leaves(lambda leaf: np.asarray(leaf)[begin:end], inputs)
        return _train(cluster, model_fn, batch, make_optimizer, num_towers, steps, reduction,
                      dict(initial), has_begun, options)
    run = _by_horovod if machines.kind == 'horovod' else _on_servers
    losses, many = run(machines, work, len(set(sizes)) > 1)
    many['loss'] = {step: sum(size * loss[step] for size, loss in zip(sizes, losses)) / sum(sizes)
                    for step in many['loss']}
    return many, sum(float(loss['of step 1']) for loss in losses)


def _on_servers(machines, work, uneven):
    """Trains in threads of this process, each with a server of TensorFlow's.

    Returns:
      `(losses, numbers)`: a dict of losses of each worker, and worker 0's numbers.
    """
    # All at once: what one call gives as free, the next one may give again.
    kind, count = machines.kind, len(machines.shares)
    ports = free_ports(count + (kind == 'ps'))
    addresses = ['127.0.0.1:%d' % port for port in ports]

    def member(job, rank):
        return Cluster(kind, addresses[:count], addresses[count:], job, rank, uneven=uneven)
    servers = [start_server(each, each.session_config(tf.ConfigProto())) for each in (
        member('ps', rank) for rank in range(len(addresses) - count))]
    with multiprocessing.pool.ThreadPool(count) as threads:  # which waits for none after an error
        results = dict(threads.imap_unordered(
            lambda rank: (rank, work(member('worker', rank))), range(count)))
    del servers
    return [results[rank]['loss'] for rank in range(count)], results[0]


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


def _train(cluster, model_fn, batch, make_optimizer, num_towers, steps, reduction, initial,
           has_begun, options):
    """Trains one worker; returns its numbers in the dicts that `run_one_device` returns.

    Args:
      has_begun: `threading.Event` that the chief sets when its variables have the `initial` values:
        on parameter servers the others begin then, elsewhere they set their own.
      The others are those of `run_machines`, for this worker.
    """
    with tf.Graph().as_default():
        optimizer = make_optimizer()
        built = build_towers(
            model_fn, constants(batch), optimizer, num_towers, reduction, remainder='weight',
            global_step=tf.train.get_global_step(), cluster=cluster, **options)
        pairs = [(tf.convert_to_tensor(each), variable) for each, variable in built.gradients]
        assignments, fed = assigned(initial, {})
        refresh = [] if built.replicas is None else [built.replicas.refresh()]
        names = {variable.op.name: variable.op.name for variable in tf.global_variables()}

        def begin(step_context):
            if cluster.is_served and not cluster.is_chief:
                has_begun.wait(_PATIENCE)
                return
            step_context.session.run(assignments, fed)
            step_context.session.run(refresh)
            has_begun.set()
        with failing_on('on worker %d' % cluster.rank), join(
                cluster, built, session_config(built.devices),
                on_lost=lambda error: None) as member, member.session() as session:
            session.run_step_fn(begin)
            return train(session, built.loss, pairs, built.train_op, steps, names)
