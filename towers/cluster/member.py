"""This process as a member of a cluster: its server, its sessions, and its end."""

import contextlib
import os
import socket
import sys
import threading
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_config, check_function, check_instance, check_number,
                              check_say)
from towers.api.built import BuiltTowers
from towers.cluster import worker_data, horovod, session_steps, server_placement
from towers.cluster.cluster import Cluster
from towers.cluster.connection import Connection, meet
from towers.cluster.coordinator import Coordinator
from towers.cluster.machines import builds_of
from towers.cluster.member_hooks import (AskForCheck, AveragingHook, BeginHook, DriftHook,
                                         MemberCreator)
from towers.cluster.ports import (FIRST, check_port, listen, silent_servers, wait_for,
                                  wait_for_servers)
from towers.cluster.server_placement import servers_of_variables
from towers.cluster.signature import signature
from towers.errors import ClusterError, WorkerLostError, explained, reason_of
from towers.placement.devices import session_config

START_TIMEOUT = 120.
DEAD_AFTER = 30.
_TIME_TO_SAY = 5.  # seconds in which the main thread may end by itself when a worker is lost
_PAUSE = 1.  # seconds from one look at the servers to the next
_AGAIN = ('The run cannot go on without it: start all again, and it goes on from the last '
          'checkpoint.')


class Member:
    """What `join` gives: this worker's place in the cluster.

    Attributes:
      cluster: `Cluster`.
      is_chief: whether this is the worker that saves.
      target: what sessions connect to. Those that run a step are made by `session`, or by
        `towers.training_session`; in a ring also by `tf.train.MonitoredTrainingSession(
        member.target, member.is_chief, hooks=member.hooks + …, config=member.config)`.
      config: `tf.ConfigProto` of sessions.
      hooks: hooks that every session of training needs, before all others.
      listeners: `tf.train.CheckpointSaverListener`s for a hook that saves, of the chief.
    """

    def __init__(self, cluster: typing.Any, built: typing.Any, target: typing.Any,
                 config: typing.Optional[tf.ConfigProto], connection: typing.Any):
        self.cluster, self.is_chief = cluster, cluster.is_chief
        self.target, self.config = target, config
        self._connection, self._built, self._has_session = connection, built, False
        self._begin = BeginHook(cluster, built, target, config, connection, self.lost)
        self.hooks, self.listeners = [self._begin], []
        if cluster.has_local_steps:
            self.hooks.append(AveragingHook(cluster, built, connection))
        elif cluster.has_copies:
            self.hooks.append(DriftHook(built, connection))
            self.listeners.append(AskForCheck(connection))

    def session_creator(self, creator, scaffold):
        """The `tf.train.SessionCreator` for a `tf.train.MonitoredSession` in this cluster.

        It makes one session, on parameter servers when it has spread the graph over them.

        Args:
          creator: a `tf.train.SessionCreator` for `target` and `config`.
          scaffold: the creator's `tf.train.Scaffold`.

        Raises:
          ClusterError: a second session with parameter servers.
        """
        self._begin.is_by_member = True
        if self.cluster.kind == 'ps' and self._has_session:
            raise ClusterError(
                'join with parameter servers is for one session, and this is the second one: train '
                'in one, and evaluate its checkpoints in another process.')
        self._has_session = True
        return MemberCreator(self.cluster, self._built, creator, scaffold, self._connection,
                             self.lost)

    def session(self, hooks=(), session_class=tf.train.MonitoredSession):
        """A session that saves nothing; its variables begin with worker 0's values.

        Args:
          hooks: list of hooks, to come after `self.hooks`.
          session_class: `tf.train.MonitoredSession`, or a class that is made with the same
            arguments.
        """
        scaffold = tf.train.Scaffold()
        served = self.cluster.kind == 'ps' and not self.is_chief
        make = tf.train.WorkerSessionCreator if served else tf.train.ChiefSessionCreator
        creator = make(scaffold, self.target, self.config)
        return session_class(self.session_creator(creator, scaffold), self.hooks + list(hooks))

    def lost(self):
        """`WorkerLostError` about what this worker's session is lost with; waits until it is known,
        at most for `dead_after`."""
        silent = silent_servers(self.cluster)
        if silent:
            return WorkerLostError('%s. %s' % (silent, _AGAIN))
        return self._connection.error(self._connection.dead_after) or WorkerLostError(
            'TensorFlow lost the session of %s. %s' % (self.cluster.name, _AGAIN))


@contextlib.contextmanager
def join(cluster: typing.Any, built: typing.Any, config: typing.Optional[tf.ConfigProto] = None,
         start_timeout: float = START_TIMEOUT, dead_after: float = DEAD_AFTER,
         settings: typing.Optional[dict] = None, say: typing.Callable = print,
         on_lost: typing.Optional[typing.Callable] = None) -> typing.Iterator['Member']:
    """Joins the cluster for the time of the `with` block, in which this worker trains.

        with towers.join(cluster, built) as member, member.session() as session:
            while not session.should_stop():
                session.run(built.train_op)

    Call it when the graph is complete but for savers and summaries. A worker that is about to train
    something else is refused, by name. With parameter servers a join is for one session.

    Args:
      cluster: `Cluster`, the one given to `build_towers`.
      built: what `build_towers` returned.
      config: `tf.ConfigProto`; None for `session_config` of the towers.
      start_timeout: seconds to wait for the others.
      dead_after: seconds of silence after which another worker, or a parameter server, is gone. The
        process is then ended with a message that names it, and exit status 1, unless it ends by
        itself within 5 seconds. Asynchronous workers go on without one that is not the chief.
      settings: dict of what else has to be the same on all workers, from names to numbers or
        strings.
      say: called with lines about what happens.
      on_lost: called with a `WorkerLostError`, in another thread, instead of ending the process.

    Yields:
      `Member`.

    Raises:
      ClusterError: the cluster cannot be joined.
      WorkerLostError: another worker is gone; names it.
      InvalidArgumentError: an argument of another kind.
    """
    _check_arguments(cluster, built, config, start_timeout, dead_after, settings, say, on_lost)
    config = cluster.session_config(config or session_config(built.devices))
    ended, own = threading.Event(), _described(cluster, built, settings)

    def lose(error):
        _lose(error, on_lost, ended)
    with _met(cluster, own, start_timeout, dead_after, say) as lines:
        connection = Connection(cluster, lines, dead_after, say, lose)
        try:
            target = '' if cluster.kind == 'horovod' else start_server(cluster, config).target
            for each in builds_of(built):
                each.machines.join(connection)
            with _servers_watched(cluster, connection, say, lose), _explained_in_words():
                yield Member(cluster, built, target, config, connection)
        except BaseException as error:
            lost = connection.error(dead_after + 1. if _may_be_a_peers(error) else 0.)
            ended.set()
            connection.fail('%s: %s' % (type(error).__name__, reason_of(error)))
            if lost is not None and isinstance(error, (tf.errors.OpError, WorkerLostError)):
                raise (error if isinstance(error, WorkerLostError) else lost) from None
            raise
        connection.finish()
        ended.set()
        lost = connection.error()
        if lost is not None:
            raise lost


def _check_arguments(cluster, built, config, start_timeout, dead_after, settings, say, on_lost):
    """Raises for arguments of `join` that make no sense."""
    check_instance('cluster', cluster, Cluster, 'a Cluster')
    check_number('start_timeout', start_timeout, above=0, expected='seconds')
    check_number('dead_after', dead_after, above=0, expected='seconds')
    check_instance('built', built, BuiltTowers, 'what build_towers returned')
    check_config(config)
    if settings is not None:
        check_instance('settings', settings, dict, 'a dict from names to numbers or strings, or '
                       'None')
    check_say(say)
    if on_lost is not None:
        check_function('on_lost', on_lost, 1, 'a function of a WorkerLostError, or None')
    if built.machines is None:
        raise ClusterError('built was made without a cluster: pass cluster= to build_towers, too.')


def _described(cluster, built, settings):
    """The signature of a worker whose graph is complete."""
    for each in builds_of(built):
        if each.machines.redirect is not None:
            each.machines.redirect()
    own = signature(cluster, built, settings)
    if cluster.kind == 'ps':
        own['servers'] = servers_of_variables(
            cluster, tf.get_default_graph(), [variable for _, variable in built.gradients])
    return own


@contextlib.contextmanager
def _met(cluster, own, start_timeout, dead_after, say):
    """The `Lines` with worker 0 of a worker that has met the others; on worker 0 they meet here."""
    deadline = time.monotonic() + start_timeout
    if cluster.kind != 'horovod' and not cluster.is_chief:
        check_port(cluster.workers[cluster.rank], say)
    if cluster.kind == 'ps':
        wait_for_servers(cluster, deadline, say)
    address, listener = _address(cluster, say)
    coordinator = None if listener is None else Coordinator(
        cluster, own, listener, dead_after, start_timeout, say)
    try:
        connected = wait_for(address, cluster.who(0), deadline, say) if (
            coordinator is None) else coordinator.own_end
        try:
            lines = meet(cluster, own, connected, deadline, say)
        except ClusterError:
            if coordinator is None:
                raise
            raise coordinator.missing() from None
        yield lines
    finally:
        if coordinator is not None:
            coordinator.close()


def _address(cluster, say):
    """Where worker 0 listens until all are there, and on worker 0 its listener; else None.

    It is worker 0's own address, before TensorFlow's server takes the port.
    """
    if cluster.kind != 'horovod':
        return cluster.workers[0], listen(cluster.workers[0], say) if cluster.is_chief else None
    listener, text = None, ''
    if cluster.is_chief:
        listener = socket.socket()
        listener.bind(('', 0))
        listener.listen(64)
        host = os.environ.get('HOROVOD_HOSTNAME') or socket.gethostname()
        text = '%s:%d' % (host, listener.getsockname()[1])
    return horovod.gathered_lines(text)[0], listener


@contextlib.contextmanager
def _servers_watched(cluster, connection, say, lose):
    """A context in which a thread says which server does not work when a step, or a pause, takes
    long; when it has not worked for `dead_after`, the thread calls `lose`."""
    stop, first = threading.Event(), min(FIRST, connection.dead_after / 2.)

    def watch():
        since = None
        while not stop.wait(min(_PAUSE, first / 2.)):
            now = time.monotonic()
            silent = silent_servers(cluster) if now - connection.since > first else ''
            if silent and since is None:
                say('waiting        ' + silent)
            elif silent and now - since > connection.dead_after - first:
                lose(WorkerLostError('%s. %s' % (silent, _AGAIN)))
                return
            since = (since or now) if silent else None
    if cluster.kind == 'ps':
        threading.Thread(target=watch, daemon=True, name='towers-servers').start()
    try:
        yield
    finally:
        stop.set()


def serve(cluster: typing.Any, say: typing.Callable = print) -> None:
    """Runs a parameter server in this process. It never returns: a signal ends the process.

    Args:
      cluster: `Cluster`, whose job is `'ps'` in this process.
      say: called with a line when the server is up.

    Raises:
      ClusterError: this process has another job, or its port is in use.
      InvalidArgumentError: no `Cluster`; `say` cannot be called.
    """
    check_instance('cluster', cluster, Cluster, 'a Cluster')
    check_say(say)
    if cluster.job != 'ps':
        raise ClusterError('this process is %s, no parameter server: build towers in it.'
                           % cluster.name)
    check_port(cluster.ps[cluster.rank], say)
    server = start_server(cluster, cluster.session_config(tf.ConfigProto()))
    say('serving        %s; %s' % (cluster.who(cluster.rank, 'ps'), cluster.warning()))
    server.join()


def start_server(cluster, config):
    """TensorFlow's server of this process.

    Raises:
      ClusterError: it cannot start.
    """
    try:
        return tf.train.Server(cluster.spec(), cluster.job, cluster.rank, config=config)
    except tf.errors.OpError as error:
        raise ClusterError('the server of %s cannot start: %s.' % (
            cluster.who(cluster.rank, cluster.job), reason_of(error).rstrip('.'))) from None


@contextlib.contextmanager
def _explained_in_words():
    """A context in which a step that finds NaN or Inf raises `NonFiniteError`, one of a worker
    without any data `InputError`, one of Horovod's without another worker `WorkerLostError`, and
    one that cannot be placed, or in a session that has not begun, `ClusterError`."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError,
            tf.errors.UnknownError) as error:
        reason = horovod.explained(error) if isinstance(error, tf.errors.UnknownError) else (
            explained(error) or worker_data.explained(error) or server_placement.explained(error)
            or session_steps.explained(error))
        if reason is None:
            raise
        raise reason from None


def _may_be_a_peers(error):
    """Whether an error in a ring may be the loss of another worker, or what that one failed by."""
    return isinstance(error, tf.errors.OpError) and (
        not isinstance(error, _OWN) or any(word in reason_of(error) for word in _REMOTE))


_OWN = (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.NotFoundError,
        tf.errors.ResourceExhaustedError, tf.errors.FailedPreconditionError,
        tf.errors.UnimplementedError, tf.errors.DataLossError, tf.errors.PermissionDeniedError)
"""What a step fails by on its own machine, unless the text says that it came from another one."""

_REMOTE = ('remote target', 'RecvBuf', 'Collective', 'gRPC', 'GRPC', 'Socket closed')


def _lose(error, on_lost, ended):
    """Ends the process if it does not end by itself: a step without its peer may never end.

    Args:
      error: `WorkerLostError`.
      on_lost: as for `join`.
      ended: event that is set when the process ends by itself.
    """
    if on_lost is not None:
        on_lost(error)
        return
    if ended.wait(_TIME_TO_SAY):
        return
    sys.stderr.write('%s\n' % error)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)
