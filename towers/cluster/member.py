"""This process as a member of a cluster: its server, its sessions, and its end.

Its tests are `tests/cluster/test_sessions.py`, and `test_faults.py` with real processes.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import (
    check_config,
    check_function,
    check_instance,
    check_number,
    check_say,
    safe_say,
)
from towers.cluster import server_placement, worker_step
from towers.cluster.addresses import (
    FIRST,
    REFUSED,
    connect,
    free_ports,
    listen,
    silent_servers,
    wait_until,
    why_silent,
)
from towers.cluster.between_steps import AskForCheck, AveragingHook, DriftHook
from towers.cluster.cluster import Cluster
from towers.cluster.connection import START_AGAIN, Connection, say_refusal
from towers.cluster.coordinator import Coordinator
from towers.cluster.machines import builds_of, note_connection
from towers.cluster.sessions import BeginHook, check_built
from towers.cluster.signature import signature
from towers.errors import ClusterError, TowersError, WorkerLostError, reason_of
from towers.nonfinite import explained
from towers.placement.session_config import session_config
from towers.run.stopping import StopOnSignalHook

START_TIMEOUT = 120.
DEAD_AFTER = 30.
_TIME_TO_SAY = 5.  # seconds in which the main thread may end by itself when a worker is lost


class Member:
    """What `join` gives: this worker's place in the cluster.

    Attributes:
      cluster: the `Cluster`.
      is_chief: whether this is the worker that saves.
      target: what sessions connect to, see docs/clusters.md.
      config: the `tf.ConfigProto` of sessions.
      hooks: hooks that every session of training needs, before all others.
      listeners: `tf.train.CheckpointSaverListener`s for a hook that saves, of the chief.
    """

    def __init__(self, cluster: Cluster, built: BuiltTowers, target: str, config: tf.ConfigProto,
                 connection: Connection):
        self.cluster = cluster
        self.is_chief = cluster.is_chief
        self.target = target
        self.config = config
        self._connection = connection
        self._begin = BeginHook(cluster, built, target, config, connection, self.lost_error)
        self.hooks: typing.List[tf.train.SessionRunHook] = [self._begin]
        self.listeners: typing.List[tf.train.CheckpointSaverListener] = []
        if cluster.has_local_steps:
            self.hooks.append(AveragingHook(cluster, built, connection))
        elif cluster.has_copies:
            self.hooks.append(DriftHook(cluster, built, connection))
            self.listeners.append(AskForCheck(connection))

    def session_creator(self, creator: tf.train.SessionCreator,
                        scaffold: tf.train.Scaffold) -> tf.train.SessionCreator:
        """The creator of one `tf.train.MonitoredSession` in this cluster, from one for `target` and
        `config`, and its scaffold. `ClusterError` for a second one with parameter servers."""
        return self._begin.creator(creator, scaffold)

    def session(self, hooks: typing.Sequence = ()) -> tf.train.MonitoredSession:
        """A `tf.train.MonitoredSession` that saves nothing; its variables begin with worker 0's
        values. `hooks` come after `self.hooks`."""
        scaffold = tf.train.Scaffold()
        if self.is_chief or not self.cluster.is_served:
            creator = tf.train.ChiefSessionCreator(scaffold, self.target, self.config)
        else:
            creator = tf.train.WorkerSessionCreator(scaffold, self.target, self.config)
        return tf.train.MonitoredSession(self.session_creator(creator, scaffold),
                                         self.hooks + list(hooks))

    def lost_error(self) -> WorkerLostError:
        """A `WorkerLostError` that names the process whose end broke the session; waits up to
        `dead_after` for the name."""
        error = self._connection.error(self._connection.dead_after + 1.)
        return error or WorkerLostError(
            'TensorFlow lost the session of %s. %s.' % (self.cluster.name, START_AGAIN))


@contextlib.contextmanager
def join(cluster: typing.Any, built: typing.Any, config: typing.Optional[tf.ConfigProto] = None,
         start_timeout: float = START_TIMEOUT, dead_after: float = DEAD_AFTER,
         settings: typing.Optional[dict] = None, say: typing.Callable = print,
         on_lost: typing.Optional[typing.Callable] = None) -> typing.Iterator['Member']:
    """Joins the cluster for the time of the `with` block, in which this worker trains.

    Call it when the graph is complete but for savers and summaries. A worker that is about to train
    something else is refused, by name. With parameter servers a join is for one session.

    Args:
      cluster: `Cluster`, the one given to `build_towers`.
      built: the result of `build_towers`.
      config: `tf.ConfigProto`; None for `session_config` of the towers.
      start_timeout: seconds to wait for servers, then for workers; Horovod waits until all come.
      dead_after: seconds of silence after which another worker, or a parameter server, is lost. The
        process is then ended with a message that names it, and exit status 1, unless it ends by
        itself within 5 seconds. Asynchronous workers go on without one that is not the chief.
      settings: dict of what else has to be the same on all workers, from names to numbers or
        strings.
      say: called with lines about what happens.
      on_lost: called with a `WorkerLostError`, in another thread, instead of ending the process.

    Raises:
      ClusterError: the cluster cannot be joined.
      WorkerLostError: another worker is gone; names it.
    """
    check_instance('cluster', cluster, Cluster, 'a Cluster')
    check_number('start_timeout', start_timeout, above=0, expected='seconds')
    check_number('dead_after', dead_after, above=0, expected='seconds')
    check_built(built)
    check_config(config)
    check_instance('settings', settings, (dict, type(None)),
                   'a dict from names to numbers or strings, or None')
    for name in settings or ():
        check_instance('a name in settings', name, str, 'a string')
    check_say(say)
    if on_lost is not None:
        check_function('on_lost', on_lost, 1, 'a function of a WorkerLostError, or None')
    config = cluster.session_config(config or session_config(built.devices))
    ended = threading.Event()
    lose = on_lost or (lambda error: _end_process(error, ended))
    _redirect_late_operations(built)
    own = _signature_with_servers(cluster, built, dict(settings or {}, dead_after=dead_after))
    say = safe_say(say)
    meeting = _meeting(cluster, own, start_timeout, dead_after, say, lose)
    with meeting as connection, _servers_watched(cluster, connection, say):
        try:
            target = ''
            if cluster.has_addresses:
                target = start_server(cluster, config).target
                _check_reachable(cluster, time.monotonic() + start_timeout, say)
            note_connection(built, connection)
            yield Member(cluster, built, target, config, connection)
        except BaseException as error:
            reason = _reason_of_failure(error, connection)
            if _ends_by_itself(cluster, connection):
                ended.set()
            cause = reason or error
            why = reason_of(cause)
            if not isinstance(cause, TowersError):  # which says by itself what is wrong
                why = '%s: %s' % (type(cause).__name__, why)
            connection.fail(why)
            if reason is not None:
                raise reason from None
            raise
        connection.finish()
        if _ends_by_itself(cluster, connection):
            ended.set()
        lost = connection.error()
        if lost is not None:
            raise lost


def _reason_of_failure(error: BaseException,
                       connection: Connection) -> typing.Optional[Exception]:
    """The error in words for one of TensorFlow's that ended the training; None for any other, or if
    its own words say all."""
    if not isinstance(error, tf.errors.OpError):
        return None
    reason = explained(error) or worker_step.explained(error)
    if reason is not None:
        return reason
    # Who is lost is known only when that one has been silent for so long.
    seconds = connection.dead_after + 1. if _may_be_a_peers(error) else 0.
    return connection.error(seconds)


def _ends_by_itself(cluster: Cluster, connection: Connection) -> bool:
    """Whether the process comes to its end: where a worker is lost, Horovod may wait for it."""
    return cluster.has_addresses or connection.lost is None


def _redirect_late_operations(built: BuiltTowers) -> None:
    """Makes the operations of the complete graph that wait for skippable updates wait for what
    always runs, also those that the program made after the builds."""
    for each in builds_of(built):
        each.machines.redirect()


def _signature_with_servers(cluster: Cluster, built: BuiltTowers, settings: dict) -> dict:
    """The `signature` of a worker, and the servers of its variables; `settings` is what else has to
    be the same on all workers."""
    own = signature(cluster, built, settings)
    if cluster.is_served:
        own['servers'] = server_placement.servers_of_variables(
            cluster, tf.get_default_graph(), [variable for _, variable in built.gradients])
    return own


@contextlib.contextmanager
def _meeting(cluster: Cluster, own: dict, start_timeout: float, dead_after: float,
             say: typing.Callable, lose: typing.Callable) -> typing.Iterator[Connection]:
    """The `Connection` of a worker that has met the others; on worker 0 they meet here.

    Args:
      cluster: the `Cluster`.
      own: the signature of this worker.
      start_timeout, dead_after, say: as for `join`.
      lose: called with a `WorkerLostError`, in another thread.
    """
    if cluster.has_addresses and not cluster.is_chief:
        _check_port(cluster, own, time.monotonic() + start_timeout, say)
    wait_until(lambda: (None, silent_servers(cluster)), time.monotonic() + start_timeout, say)
    address = _address(cluster, say)
    listener = listen(address) if cluster.is_chief else None
    deadline = time.monotonic() + start_timeout
    with contextlib.ExitStack() as stack:
        if listener is None:
            connected = connect(address, cluster.who(0), deadline, say)
        else:
            coordinator = Coordinator(cluster, own, listener, dead_after, say)
            stack.callback(coordinator.close)
            connected = coordinator.own_end
        connection = Connection(cluster, own, connected, dead_after, say, lose)
        stack.callback(connection.close)
        try:
            connection.meet(deadline)
        except ClusterError:
            if listener is None or connection.lost is not None:
                raise
            raise coordinator.missing() from None
        yield connection


def _check_port(cluster: Cluster, own: dict, deadline: float, say: typing.Callable) -> None:
    """Raises `ClusterError` where TensorFlow's server would not get its port, and tells worker 0,
    as soon as it is there, so that all end.

    Args:
      cluster: the `Cluster`.
      own: the signature of this worker.
      deadline: by `time.monotonic()`, until which worker 0 may come.
      say: called with lines: the error itself at once.
    """
    try:
        listen(cluster.workers[cluster.rank]).close()
    except ClusterError as error:
        say('cannot join    %s' % error)
        with contextlib.suppress(ClusterError):
            connected = connect(cluster.workers[0], cluster.who(0), deadline, say)
            say_refusal(cluster.rank, own, str(error), connected)
        raise


def _check_reachable(cluster: Cluster, deadline: float, say: typing.Callable) -> None:
    """Raises `ClusterError` where the server of another worker is not reached by its address: its
    steps would wait without an end. Worker 0 looks at all, every other worker at the next one.

    Args:
      cluster: the `Cluster`.
      deadline: by `time.monotonic()`; servers begin one after the other.
      say: called with a line about the wait.
    """
    others = [rank for rank in range(cluster.num_workers) if rank != cluster.rank]
    if not cluster.is_chief:
        others = [(cluster.rank + 1) % cluster.num_workers]

    def unreached() -> str:
        """The workers that are not reached, in words; '' if all are."""
        with ThreadPoolExecutor(16) as pool:
            reasons = list(pool.map(why_silent, [cluster.workers[rank] for rank in others]))
        return '; '.join(
            '%s is not reached by this address from %s: it %s' % (
                cluster.who(rank), cluster.who(cluster.rank), reason)
            for rank, reason in zip(others, reasons) if reason)
    wait_until(lambda: (None, unreached()), deadline, say)


def _address(cluster: Cluster, say: typing.Callable) -> str:
    """The address where worker 0 listens until all are there. With Horovod worker 0 chooses it, and
    `say` is called with a line while this worker waits for the others."""
    if cluster.has_addresses:
        return cluster.workers[0]
    own = ''
    if cluster.is_chief:
        host = os.environ.get('HOROVOD_HOSTNAME') or socket.gethostname()
        own = '%s:%d' % (host, free_ports(1)[0])
    say('waiting        until all processes of %s call join' % cluster.engine.name)
    return cluster.engine.gathered(own)[0]


@contextlib.contextmanager
def _servers_watched(cluster: Cluster, connection: Connection,
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
    """The thread that says which server does not work: lost after `dead_after`, or at the second
    look if nobody listens at its port, for its process has ended.

    Args:
      cluster: the `Cluster`.
      connection: of this worker; it is told of the loss.
      say: called with a line.
      stop: set when the thread is to end.
    """
    dead_after = connection.dead_after
    pause = min(FIRST, dead_after) / 2.
    silent_since: typing.Optional[float] = None
    while not stop.wait(pause if silent_since is None else pause / 5.):
        silent = silent_servers(cluster)
        now = time.monotonic()
        if not silent:
            silent_since = None
        elif silent_since is None:
            silent_since = now
            say('waiting        ' + silent)
        elif not stop.is_set():
            is_dead = now - silent_since > dead_after - 2. * pause
            if is_dead or REFUSED in silent:
                connection.lose(None, silent)
                return


def serve(cluster: typing.Any, say: typing.Callable = print) -> None:
    """Runs a parameter server in this process. It never returns.

    A signal ends the process, with status 143, 130 or 129, when no worker is at work any more: they
    may have got it, too, and save what the server holds. A second one ends it at once.

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
    while len(received) < 2 and not all(why_silent(each, FIRST) for each in cluster.workers):
        time.sleep(0.2)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(128 + received[0])  # the end of the server would wait for its sessions


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


# By these a step fails when another worker dies; by others if their text has a word of _REMOTE.
_OF_PEERS = (tf.errors.CancelledError, tf.errors.UnknownError, tf.errors.DeadlineExceededError,
             tf.errors.AbortedError, tf.errors.InternalError, tf.errors.UnavailableError)
_REMOTE = ('remote target', 'RecvBuf', 'Collective', 'gRPC', 'GRPC', 'Socket closed')


def _may_be_a_peers(error: Exception) -> bool:
    """Whether an error may be the loss of another worker, or what that one failed by."""
    if isinstance(error, _OF_PEERS):
        return True
    return isinstance(error, tf.errors.OpError) and any(
        word in reason_of(error) for word in _REMOTE)


def _end_process(error: Exception, ended: threading.Event) -> None:
    """Ends the process, with an error, if it does not end by itself, which sets the event."""
    if ended.wait(_TIME_TO_SAY):
        return
    with contextlib.suppress(OSError, ValueError):  # nobody reads
        print(error, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(1)
