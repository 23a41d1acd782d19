"""TensorFlow's servers: one in each worker with an address, and the parameter servers.

Its tests are `tests/cluster/test_member.py`, and `test_faults.py` with real processes.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor

import tensorflow.compat.v1 as tf

from towers.arguments import check_instance, check_say, safe_say
from towers.cluster.addresses import (
    FIRST_LINE_AFTER,
    NOBODY_LISTENS,
    listen,
    silent_servers,
    wait_until,
    why_silent,
)
from towers.cluster.cluster import Cluster
from towers.cluster.connection import Connection
from towers.errors import ClusterError, reason_of
from towers.run.stopping import StopOnSignalHook

_ENDED_BY_SIGNAL = 128  # plus the number of the signal: the exit status, as of a shell


def start_server(cluster: Cluster, config: tf.ConfigProto) -> tf.train.Server:
    """TensorFlow's server of this process; `ClusterError` if it cannot start."""
    tasks = {'worker': list(cluster.workers)}
    if cluster.ps:
        tasks['ps'] = list(cluster.ps)
    try:
        return tf.train.Server(tasks, cluster.job, cluster.rank, config=config)
    except tf.errors.OpError as error:
        raise ClusterError('the server of %s cannot start: %s.' % (
            cluster.who(cluster.rank, cluster.job), reason_of(error).rstrip('.'))) from None


def serve(cluster: typing.Any, say: typing.Callable = print) -> None:
    """Runs a parameter server in this process. It never returns.

    A signal ends the process, with status 143, 130 or 129, when no worker is at work any more: the
    workers may have got the signal, too, and save what the server holds. A second signal ends the
    process at once.

    Args:
      cluster: `Cluster`, whose job is `'ps'` in this process.
      say: called with a line when the server is up.

    Raises:
      ClusterError: this process has another job, or its port is in use.
    """
    check_instance('cluster', cluster, Cluster, 'a Cluster')
    check_say(say)
    if cluster.job != 'ps':
        raise ClusterError('this process is %s, no parameter server: build towers in it.'
                           % cluster.name)
    # Raises if the port is in use, where TensorFlow's server would end the process.
    listen(cluster.ps[cluster.rank]).close()
    say = safe_say(say)
    received: typing.List[int] = []
    with contextlib.suppress(ValueError):  # Python has signal handlers in the main thread only
        for handled in StopOnSignalHook.handled():
            signal.signal(handled, lambda number, frame: received.append(number))
    config = cluster.session_config(tf.ConfigProto())
    server = start_server(cluster, config)  # noqa: F841, it serves while it is held
    say('serving        %s; %s' % (cluster.who(cluster.rank, 'ps'), cluster.warning()))
    while not received:
        time.sleep(0.2)
    say('told to stop   serves until no worker is at work; a second signal ends it at once')
    while len(received) < 2 and _is_any_worker_at_work(cluster):
        time.sleep(0.2)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    # The end of the interpreter would wait for the sessions of the server.
    os._exit(_ENDED_BY_SIGNAL + received[0])


def _is_any_worker_at_work(cluster: Cluster) -> bool:
    """Whether the server of any worker answers."""
    return any(not why_silent(address, FIRST_LINE_AFTER) for address in cluster.workers)


def check_reachable(cluster: Cluster, deadline: float, say: typing.Callable) -> None:
    """Raises `ClusterError` where the server of another worker is not reached by its address: steps
    would wait for it without an end.

    Worker 0 looks at all others, and every other worker at the worker before it only, from whose
    server it fetches what that one sends in a ring. That makes 2 W - 2 looks in the place of
    W (W - 1).

    Args:
      cluster: the `Cluster`.
      deadline: by `time.monotonic()`; servers begin one after the other.
      say: called with a line about the wait.
    """
    if cluster.is_chief:
        others = list(range(1, cluster.num_workers))
    else:
        others = [cluster.rank - 1]

    def attempt() -> typing.Tuple[None, str]:
        """An attempt for `wait_until`, which waits until nothing is wrong."""
        return None, _unreached(cluster, others)
    wait_until(attempt, deadline, say)


def _unreached(cluster: Cluster, ranks: typing.List[int]) -> str:
    """The workers of these ranks that do not answer at their addresses, in words; '' if all
    answer."""
    addresses = [cluster.workers[rank] for rank in ranks]
    with ThreadPoolExecutor(16) as pool:  # a look at a machine that is off takes seconds
        reasons = list(pool.map(why_silent, addresses))
    own_name = cluster.who(cluster.rank)
    return '; '.join('%s is not reached by this address from %s: it %s' % (
        cluster.who(rank), own_name, reason) for rank, reason in zip(ranks, reasons) if reason)


@contextlib.contextmanager
def servers_watched(cluster: Cluster, connection: Connection,
                    say: typing.Callable) -> typing.Iterator[None]:
    """A context in which a thread watches the parameter servers, see `_watch_servers`."""
    stop = threading.Event()
    if cluster.is_served:
        threading.Thread(target=_watch_servers, args=(cluster, connection, say, stop), daemon=True,
                         name='towers-servers').start()
    try:
        yield
    finally:
        stop.set()


def _watch_servers(cluster: Cluster, connection: Connection, say: typing.Callable,
                   stop: threading.Event) -> None:
    """The thread that looks whether all servers work.

    At the first look that finds a server silent, the thread says so. The server is lost when it has
    been silent for `dead_after`; or at the next look already, if nobody listens at its port, since
    its process has ended then. With a `dead_after` of 30 s, there is a look every 2.5 s, and every
    0.5 s while a server is silent. Such a server is lost 25 s after the look that first found it
    silent.

    Args:
      cluster: the `Cluster`.
      connection: of this worker; it is told of the loss.
      say: called with a line.
      stop: set when the thread is to end.
    """
    dead_after = connection.dead_after
    pause = min(FIRST_LINE_AFTER, dead_after) / 2.
    pause_while_silent = pause / 5.  # shorter, to lose a server, or to go on, in time
    # One pause: a server may have been silent for so long when a look first finds it silent. The
    # other pause: the looks themselves take time.
    lost_after = dead_after - 2. * pause
    silent_since: typing.Optional[float] = None  # when a server was first found silent
    while not stop.wait(pause if silent_since is None else pause_while_silent):
        silent = silent_servers(cluster)  # in words; '' if all work
        now = time.monotonic()
        if not silent:
            silent_since = None
        elif silent_since is None:
            silent_since = now
            say('waiting        ' + silent)
        elif stop.is_set():  # the training has ended during the look, and servers may end, too
            return
        elif now - silent_since > lost_after or NOBODY_LISTENS in silent:
            connection.lose(rank=None, why=silent)
            return
