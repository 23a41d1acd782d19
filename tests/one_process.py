"""Several workers of a cluster in one process, a thread and a server each; for tests."""

import os
import threading
import traceback

import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.cluster.servers import start_server
from towers.cluster.addresses import free_ports

_SERVERS = []  # they end with the process


def addresses(count, *more):
    """Addresses that are free; of several counts a list for each, since all have to differ."""
    free = iter(['127.0.0.1:%d' % port for port in _own_ports(count + sum(more))])
    lists = [[next(free) for _ in range(each)] for each in (count,) + more]
    return lists if more else lists[0]


def _own_ports(count, processes=16):
    """Free ports that no other process of pytest-xdist draws here, before they are bound."""
    own = int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[len('gw'):]) % processes
    found = set()
    while len(found) < count:
        found.update(port for port in free_ports(processes) if port % processes == own)
    return sorted(found)[:count]


def serve(num_workers, num_ps=1, **fields):
    """Starts parameter servers.

    Args:
      num_workers, num_ps: their numbers.
      fields: more fields of the `Cluster`.

    Returns:
      A function from a worker's rank to its `Cluster`.
    """
    workers, ps = addresses(num_workers, num_ps)
    for rank in range(num_ps):
        server = towers.Cluster('ps', workers, ps, 'ps', rank, **fields)
        _SERVERS.append(start_server(server, server.session_config(tf.ConfigProto())))
    return lambda rank: towers.Cluster('ps', workers, ps, 'worker', rank, **fields)


def together(work, count, seconds=60):
    """Calls work(rank) in as many threads; a list of what they return.

    Raises the error of the lowest rank; all are printed, since it may follow from another's.
    """
    results, errors = [None] * count, [None] * count

    def call(rank):
        try:
            results[rank] = work(rank)
        except BaseException as error:  # shown by the test itself
            errors[rank] = error
            print('worker %d: %s' % (rank, traceback.format_exc()))
    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    for error in errors:
        if error is not None:
            raise error
    assert not any(thread.is_alive() for thread in threads), 'a worker hangs'
    return results


class StopWithoutSignals(towers.StopTogetherHook):
    """Signal handlers are for main threads."""

    def after_create_session(self, session, coord):
        self._coordinator, self._session = coord, session


def averaged(built):
    """The step with moving averages of the weights after it, where a worker runs them."""
    averages = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([built.train_op]):
        with_averages = averages.apply(built.variables)
    return with_averages if built.updates_here else built.train_op


def train(cluster, model_fn, batch, make_optimizer, steps=2, num_towers=1, reduction='mean',
          remainder='weight', on_build=None, step_of=lambda built: built.train_op, **options):
    """One worker's training; a dict of gradients of step 1 and of variables after the last.

    `step_of(built)` is the operation that is run in each step."""
    with tf.Graph().as_default():
        tf.set_random_seed(7 + cluster.rank)  # another start on each worker, but for the broadcast
        inputs = tuple(tf.constant(part) for part in batch)
        step = tf.train.get_or_create_global_step()
        with compat.CONTROL_FLOW_SWITCH:  # or another's build switches the model's loops to TF 1's
            built = towers.build_towers(model_fn, inputs, make_optimizer(), num_towers, reduction,
                                        remainder=remainder, global_step=step, cluster=cluster,
                                        **options)
            if on_build is not None:
                on_build(built)
            train_op = step_of(built)
            gradients = [tf.convert_to_tensor(gradient) for gradient, _ in built.gradients]
        lost, last = [], None
        with towers.join(cluster, built, start_timeout=30., dead_after=20.,
                         on_lost=lost.append) as member, member.session() as session:
            trained = tf.global_variables()
            first = session.run_step_fn(lambda step_context: step_context.session.run(trained))
            values = None
            for _ in range(steps):
                fetched, _ = session.run([gradients, train_op])
                values = fetched if values is None else values
            last = session.run_step_fn(lambda step_context: step_context.session.run(trained))
        assert not lost
        assert last is not None, 'its session ended early'
        names = [variable.op.name for variable in trained]
        return {'gradients': dict(zip([v.op.name for _, v in built.gradients], values)),
                'first': dict(zip(names, first)), 'last': dict(zip(names, last))}


def halving(cluster, **options):
    """A build of two workers: each step halves the weight `w`, which begins with 8.

    The gradient is `w` times the mean of 0.25 and 0.75, the workers' examples; the chief's loss is
    `w ** 2 / 8`, and the other's `3 * w ** 2 / 8`."""
    return towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.square(tf.get_variable(
            'w', [], tf.float64, tf.constant_initializer(8.))) / 2.,
        tf.constant([.25 + .5 * cluster.rank], tf.float64),
        tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster, **options)


def in_sessions(cluster_of, work, build=halving, count=2):
    """`together`, for `work(session, built, rank)` in a session of each worker's."""
    def call(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = build(cluster)
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as joined, \
                    joined.session() as session:
                return work(session, built, rank)
    return together(call, count)
