"""This process as a member of a cluster: its server, its sessions, and its end.

Its tests are `tests/cluster/test_sessions.py`, and `test_faults.py` with real processes.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import typing

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
from towers.cluster.addresses import connect, free_ports, listen, silent_servers, wait_until
from towers.cluster.between_steps import AskForCheck, AveragingHook, DriftHook
from towers.cluster.cluster import Cluster
from towers.cluster.connection import START_AGAIN, Connection, say_refusal, text_for_others
from towers.cluster.coordinator import Coordinator
from towers.cluster.machines import builds_of, note_connection
from towers.cluster.servers import check_reachable, servers_watched, start_server
from towers.cluster.sessions import BeginHook, check_built
from towers.cluster.signature import signature
from towers.errors import ClusterError, WorkerLostError, reason_of
from towers.gradients.gradient_pairs import variables_of
from towers.nonfinite import explained
from towers.placement.session_config import session_config

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
        elif cluster.has_copies:  # the copies all get the same update, and have to stay the same
            self.hooks.append(DriftHook(cluster, built, connection))
            self.listeners.append(AskForCheck(connection))

    def session_creator(self, creator: tf.train.SessionCreator,
                        scaffold: tf.train.Scaffold) -> tf.train.SessionCreator:
        """The creator of one `tf.train.MonitoredSession` in this cluster, made of a `creator` for
        `target` and `config`, and the `scaffold` of the session. With parameter servers a second
        call raises `ClusterError`."""
        return self._begin.creator(creator, scaffold)

    def session(self, hooks: typing.Sequence = ()) -> tf.train.MonitoredSession:
        """A `tf.train.MonitoredSession` that saves nothing; its variables begin with worker 0's
        values. `hooks` come after `self.hooks`."""
        scaffold = tf.train.Scaffold()
        initializes_variables = self.is_chief or not self.cluster.is_served
        if initializes_variables:  # TensorFlow calls such a worker a chief
            creator = tf.train.ChiefSessionCreator(scaffold, self.target, self.config)
        else:
            creator = tf.train.WorkerSessionCreator(scaffold, self.target, self.config)
        return tf.train.MonitoredSession(self.session_creator(creator, scaffold),
                                         self.hooks + list(hooks))

    def lost_error(self) -> WorkerLostError:
        """A `WorkerLostError` that names the process whose end broke the session; waits for the
        name up to a second longer than `dead_after`, the silence after which a process is lost."""
        error = self._connection.error(self._connection.dead_after + 1.)
        if error is not None:
            return error
        raised = self._connection.raised
        return WorkerLostError('TensorFlow lost the session of %s%s. %s.' % (
            self.cluster.name, ': ' + raised.rstrip('.') if raised else '', START_AGAIN))


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
      dead_after: seconds of silence after which another worker, or a parameter server, is lost.
        This process is then ended with a message that names the lost one, and exit status 1, unless
        it ends by itself within 5 seconds. Asynchronous workers go on without a lost worker that is
        not the chief.
      settings: dict of what else has to be the same on all workers, from names to numbers or
        strings.
      say: called with lines about what happens.
      on_lost: called with a `WorkerLostError`, in another thread, instead of ending the process.

    Raises:
      ClusterError: the cluster cannot be joined.
      WorkerLostError: another worker is gone; names it.
    """
    check_instance('cluster', cluster, Cluster, 'a Cluster')
    check_built(built)
    _check_arguments(config, start_timeout, dead_after, settings, say, on_lost)
    say = safe_say(say)
    config = cluster.session_config(config or session_config(built.devices))
    end = _EndOfProcess()
    _redirect_late_operations(built)
    own = _signature_with_servers(cluster, built, dict(settings or {}, dead_after=dead_after))
    meeting = _meeting(cluster, own, config, start_timeout, dead_after, say,
                       on_lost or end.with_error)
    with meeting as connection, servers_watched(cluster, connection, say):
        try:
            target = _target(cluster, config, start_timeout, say)
            cluster.engine.connect(cluster, built.train_op.graph, target, config)
            note_connection(built, connection)
            yield Member(cluster, built, target, config, connection)
        except BaseException as error:
            clearer_error = _reason_of_failure(error, connection)
            end.comes(cluster, connection)
            connection.fail(text_for_others(clearer_error or error))
            if isinstance(clearer_error, WorkerLostError):  # of which `error` may be the reason
                raise clearer_error from error
            if clearer_error is not None:
                raise clearer_error from None
            raise
        connection.finish()
        end.comes(cluster, connection)
        connection.raise_if_lost()  # a worker may be lost while this one waits for the end of all


def _check_arguments(config: typing.Any, start_timeout: typing.Any, dead_after: typing.Any,
                     settings: typing.Any, say: typing.Any, on_lost: typing.Any) -> None:
    """Raises `InvalidArgumentError` for arguments of `join` that are of a wrong type."""
    check_number('start_timeout', start_timeout, above=0, expected='seconds')
    check_number('dead_after', dead_after, above=0, expected='seconds')
    check_config(config)
    check_instance('settings', settings, (dict, type(None)),
                   'a dict from names to numbers or strings, or None')
    for name in settings or ():
        check_instance('a name in settings', name, str, 'a string')
    check_say(say)
    if on_lost is not None:
        check_function('on_lost', on_lost, 1, 'a function of a WorkerLostError, or None')


class _EndOfProcess:
    """Ends this process when a worker is lost, unless it ends by itself in time."""

    def __init__(self):
        self._comes_by_itself = threading.Event()

    def comes(self, cluster: Cluster, connection: Connection) -> None:
        """Notes that the main thread leaves `join`, and goes on to the end of the process. Nothing
        is noted after a loss with Horovod: it waits for the lost worker at the end of the process,
        so that the process may never end."""
        has_horovod = not cluster.has_addresses
        may_hang = has_horovod and connection.lost is not None
        if not may_hang:
            self._comes_by_itself.set()

    def with_error(self, error: Exception) -> None:
        """Ends the process, with the error about the worker, if the main thread does not go on: it
        may hang in TensorFlow, in a step that waits for the lost worker."""
        if self._comes_by_itself.wait(_TIME_TO_SAY):
            return
        with contextlib.suppress(OSError, ValueError):  # where nobody reads what is printed
            print(error, file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(1)


def _target(cluster: Cluster, config: tf.ConfigProto, start_timeout: float,
            say: typing.Callable) -> str:
    """The target of this worker's sessions: its server, which starts here. With Horovod there is
    no server: the target is '', and a session is on this process's own devices.

    Args:
      cluster: the `Cluster`.
      config: the `tf.ConfigProto` of the sessions.
      start_timeout, say: as for `join`.
    """
    if not cluster.has_addresses:
        return ''
    target = start_server(cluster, config).target
    check_reachable(cluster, time.monotonic() + start_timeout, say)
    return target


def _reason_of_failure(error: BaseException,
                       connection: Connection) -> typing.Optional[Exception]:
    """An error that says in words why TensorFlow's `error` ended the training; None if `error` is
    not TensorFlow's, or if its own words say all."""
    if not isinstance(error, tf.errors.OpError):
        return None
    reason = explained(error) or worker_step.explained(error)
    if reason is not None and not connection.is_raised_by_other:
        return reason
    seconds_to_wait = 0.
    if connection.is_raised_by_other:
        # That worker may wait in the same way, and then ends: two seconds are for the news.
        seconds_to_wait = connection.dead_after + 3.
    elif _may_be_of_other_worker(error):
        # That worker is lost when it has been silent for `dead_after`; a second is for the news.
        seconds_to_wait = connection.dead_after + 1.
    lost_error = connection.error(seconds_to_wait)
    return None if connection.is_lost_by_own_step else lost_error


# A step raises an error of these types when another worker dies. An error of another type comes
# from that only if its text has one of these words.
_OF_OTHER_WORKER = (
    tf.errors.CancelledError, tf.errors.UnknownError, tf.errors.DeadlineExceededError,
    tf.errors.AbortedError, tf.errors.InternalError, tf.errors.UnavailableError)
_WORDS_OF_OTHER_WORKER = ('remote target', 'RecvBuf', 'Collective', 'gRPC', 'GRPC', 'Socket closed')


def _may_be_of_other_worker(error: tf.errors.OpError) -> bool:
    """Whether an error of TensorFlow's may come from the loss of another worker, or from an error
    that has ended that worker."""
    if isinstance(error, _OF_OTHER_WORKER):
        return True
    return any(word in reason_of(error) for word in _WORDS_OF_OTHER_WORKER)


def _redirect_late_operations(built: BuiltTowers) -> None:
    """Makes the operations that wait for updates which a step may skip wait for what always runs.
    The graph is complete now, so that the operations that the program made after the builds are
    among them."""
    for each in builds_of(built):
        each.machines.redirect()


def _signature_with_servers(cluster: Cluster, built: BuiltTowers, settings: dict) -> dict:
    """The `signature` of this worker; with parameter servers also the number of the server of each
    variable. `settings` is what else has to be the same on all workers."""
    own = signature(cluster, built, settings)
    if cluster.is_served:
        # The trained variables are dealt out first, since all workers have these: so they are on
        # the same servers even if the chief alone has more variables, for its evaluation say.
        own['servers'] = server_placement.servers_of_variables(
            cluster, tf.get_default_graph(), first=variables_of(built.gradients))
    return own


@contextlib.contextmanager
def _meeting(cluster: Cluster, own: dict, config: tf.ConfigProto, start_timeout: float,
             dead_after: float, say: typing.Callable, lose: typing.Callable
             ) -> typing.Iterator[Connection]:
    """The `Connection` of a worker that has met the others; on worker 0 they meet here.

    Args:
      cluster: the `Cluster`.
      own: the signature of this worker.
      config: the `tf.ConfigProto` of the sessions.
      start_timeout, dead_after, say: as for `join`.
      lose: called with a `WorkerLostError`, in another thread.
    """
    # Worker 0 listens at its port below, and so finds out itself whether the port is free.
    needs_port_later = cluster.has_addresses and not cluster.is_chief
    if needs_port_later:
        _check_port(cluster, own, time.monotonic() + start_timeout, say)
    _wait_for_servers(cluster, time.monotonic() + start_timeout, say)
    address = _address_to_meet(cluster, config, say)
    deadline = time.monotonic() + start_timeout  # anew for each wait: servers, then workers
    coordinator: typing.Optional[Coordinator] = None  # of worker 0 alone
    with contextlib.ExitStack() as stack:
        if cluster.is_chief:
            listener = listen(address)
            coordinator = Coordinator(cluster, own, listener, dead_after, say)
            stack.callback(coordinator.close)
            connected = coordinator.own_end
        else:
            connected = connect(address, cluster.who(0), deadline, say)
        serve = None if coordinator is None else coordinator.serve
        connection = Connection(cluster, own, connected, dead_after, say, lose, serve)
        stack.callback(connection.close)
        try:
            connection.meet(deadline)
        except ClusterError:
            is_timeout = connection.lost is None  # else a worker was refused
            if coordinator is not None and is_timeout:
                raise coordinator.give_up() from None  # which names the workers that are missing
            raise
        yield connection


def _wait_for_servers(cluster: Cluster, deadline: float, say: typing.Callable) -> None:
    """Waits until all parameter servers answer; the arguments are those of `_check_port`."""
    def attempt() -> typing.Tuple[None, str]:
        """An attempt for `wait_until`, which waits until nothing is wrong."""
        return None, silent_servers(cluster)
    wait_until(attempt, deadline, say)


def _check_port(cluster: Cluster, own: dict, deadline: float, say: typing.Callable) -> None:
    """Raises `ClusterError` if this worker's port is in use: TensorFlow's server of this worker,
    which starts when all are there, would not get it. Before that, this function says so at once,
    waits for worker 0, and tells worker 0, so that no worker waits for this one.

    Args:
      cluster: the `Cluster`.
      own: the signature of this worker.
      deadline: by `time.monotonic()`, until when worker 0 may come.
      say: called with lines.
    """
    try:
        listen(cluster.workers[cluster.rank]).close()
    except ClusterError as error:
        say('cannot join    %s' % error)
        with contextlib.suppress(ClusterError):
            connected = connect(cluster.workers[0], cluster.who(0), deadline, say)
            say_refusal(cluster.rank, own, str(error), connected)
        raise


def _address_to_meet(cluster: Cluster, config: tf.ConfigProto, say: typing.Callable) -> str:
    """The address where worker 0 listens until all are there.

    Without addresses in the cluster, worker 0 chooses one, which all get by the engine's
    `gathered`; this waits for all, and `say` is called with a line about that. `config` is of the
    sessions.
    """
    if cluster.has_addresses:
        return cluster.workers[0]
    own_address = ''  # nobody asks for the address of another worker than worker 0
    if cluster.is_chief:
        host = os.environ.get('HOROVOD_HOSTNAME') or socket.gethostname()
        own_address = '%s:%d' % (host, free_ports(1)[0])
    say('waiting        until all processes of %s call join' % cluster.engine.name)
    return cluster.engine.gathered(own_address, config)[0]
