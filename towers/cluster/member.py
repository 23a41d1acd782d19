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
from towers.cluster import worker_data, horovod, session_guard, server_placement
from towers.cluster.cluster import Cluster
from towers.cluster.connection import Connection, connect, meet
from towers.cluster.coordinator import FIRST, Coordinator
from towers.cluster.drift_check import AskForCheck, DriftHook
from towers.cluster.local_steps import AveragingHook
from towers.cluster.machines import builds_of
from towers.cluster.member_hooks import BegunAnewHook, BeginHook, TogetherHook, lost_session
from towers.cluster.server_placement import SpreadingCreator, servers_of_variables
from towers.cluster.signature import signature
from towers.cluster.step_fetches import StepFetches
from towers.cluster.ports import check_port, check_server, listen, split_address
from towers.cluster.served_connection import (ChiefWait, ServedConnection, ServerWatch,
                                              WaitingCreator, silent_servers)
from towers.errors import ClusterError, WorkerLostError
from towers.nonfinite import explained
from towers.placement.devices import session_config
from towers.tensorflow_errors import reason_of

START_TIMEOUT = 120.
DEAD_AFTER = 30.
_TIME_TO_SAY = 5.  # seconds in which the main thread may end by itself when a worker is lost


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
                 config: typing.Optional[tf.ConfigProto], connection: typing.Any,
                 make_wait: typing.Optional[typing.Callable] = None):
        self.cluster, self.is_chief = cluster, cluster.is_chief
        self.target, self.config = target, config
        self._connection, self._built, self._make_wait = connection, built, make_wait
        self._has_session = False
        self._begin = BeginHook(
            cluster, built, target, config, StepFetches(lambda: builds_of(built)),
            connection if cluster.has_copies or cluster.kind == 'ps' else None,
            self.lost)
        self.hooks = [self._begin]
        self.listeners = []
        if cluster.has_copies:
            self.hooks.append(TogetherHook(cluster, built, connection))
            if cluster.has_local_steps:
                self.hooks.append(AveragingHook(cluster, built, connection))
            else:
                self.hooks.append(DriftHook(cluster, built, connection))
                self.listeners.append(AskForCheck(connection))
        elif built.machines.hook is not None:
            self.hooks.append(built.machines.hook)

    def session_creator(self, creator, scaffold):
        """The `tf.train.SessionCreator` for a `tf.train.MonitoredSession` in this cluster.

        In a ring it makes only one session: `MonitoredSession` asks for another one when a machine
        is lost, and a ring cannot go on then. With parameter servers it spreads the graph before
        it makes the first session.

        Args:
          creator: a `tf.train.SessionCreator` for `target` and `config`.
          scaffold: the creator's `tf.train.Scaffold`.

        Raises:
          ClusterError: a second session with parameter servers.
        """
        self._begin.is_by_member = True
        if self.cluster.kind == 'ps':
            if self._has_session:
                raise ClusterError(
                    'join with parameter servers is for one session, and this is the second one: '
                    'train in one, and evaluate its checkpoints in another process.')
            self._has_session = True
            return SpreadingCreator(self.cluster, creator, scaffold, self._built)
        return _OnceCreator(self, creator) if self.cluster.kind == 'ring' else creator

    def session(self, hooks=(), session_class=tf.train.MonitoredSession):
        """A session that saves nothing; its variables begin with worker 0's values.

        Args:
          hooks: list of hooks, to come after `self.hooks`.
          session_class: `tf.train.MonitoredSession`, or a class that is made with the same
            arguments.
        """
        scaffold = tf.train.Scaffold()
        if self.cluster.kind == 'ps' and not self.is_chief:
            creator = WaitingCreator(scaffold, self.target, self.config, self._make_wait)
        else:
            creator = tf.train.ChiefSessionCreator(scaffold, self.target, self.config)
        return session_class(self.session_creator(creator, scaffold), self.hooks + list(hooks))

    def lost(self):
        """`WorkerLostError` about the worker that is gone, or None; waits until a loss is known, at
        most for `dead_after`."""
        return self._connection.error(self._connection.dead_after)


@contextlib.contextmanager
def join(cluster: typing.Any, built: typing.Any, config: typing.Optional[tf.ConfigProto] = None,
         start_timeout: float = START_TIMEOUT, dead_after: float = DEAD_AFTER,
         settings: typing.Optional[dict] = None, say: typing.Callable = print,
         on_lost: typing.Optional[typing.Callable] = None) -> typing.Iterator['Member']:
    """Joins the cluster for the time of the `with` block, in which this worker trains.

        with towers.join(cluster, built) as member, member.session() as session:
            while not session.should_stop():
                session.run(built.train_op)

    Call it when the graph is complete but for savers and summaries. The workers compare what they
    are about to train, and one that is about to train something else is refused, by name. With
    parameter servers a join is for one session.

    Args:
      cluster: `Cluster`, the one given to `build_towers`.
      built: what `build_towers` returned.
      config: `tf.ConfigProto`; None for `session_config` of the towers.
      start_timeout: seconds to wait for the others; on parameter servers also for the first session
        of a chief that has failed, or does not answer.
      dead_after: seconds of silence after which another worker of a ring is gone. The process is
        then ended with a message that names it, and exit status 1, unless it ends by itself within
        5 seconds. On parameter servers: seconds that a step may take before a line says who does
        not answer; where it waits for a worker that has ended its training, which does not come
        back, or that has not come within `start_timeout`, the process is ended as in a ring.
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
    place = _Place(cluster, built, config, start_timeout, dead_after, settings, say)
    ended = threading.Event()
    with place.coordinated(lambda error: _lose(error, on_lost, ended)) as connection:
        try:
            with place.member(connection) as member, _explained_in_words():
                yield member
        except BaseException as error:
            waits = cluster.kind != 'ps' and _may_be_a_peers(error)
            lost = connection.error(dead_after + 1. if waits else 0.)
            ended.set()
            connection.fail('%s: %s' % (type(error).__name__, reason_of(error)))
            if lost is not None and isinstance(error, (tf.errors.OpError, WorkerLostError)):
                raise (error if isinstance(error, WorkerLostError) else lost) from None
            raise
        connection.finish()
        ended.set()
        lost = None if cluster.kind == 'ps' else connection.error()
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


class _Place:
    """A worker's place in a cluster: it meets the others, and becomes a `Member`."""

    def __init__(self, cluster, built, config, start_timeout, dead_after, settings, say):
        """As for `join`; `config` is that of the cluster."""
        self._cluster, self._built, self._config = cluster, built, config
        self._start_timeout, self._dead_after, self._say = start_timeout, dead_after, say
        self._deadline = time.monotonic() + start_timeout
        for each in builds_of(built):
            if each.machines.redirect is not None:
                each.machines.redirect()
        self._signature = signature(cluster, built, settings)
        if cluster.kind == 'ps':
            self._signature['servers'] = servers_of_variables(
                cluster, tf.get_default_graph(), [variable for _, variable in built.gradients])

    @contextlib.contextmanager
    def coordinated(self, on_lost):
        """The `Connection` of a worker that has met the others; on worker 0 they meet here."""
        cluster, coordinator = self._cluster, None
        if cluster.kind != 'horovod' and not (cluster.kind == 'ring' and cluster.is_chief):
            check_port(cluster.workers[cluster.rank], self._say)
        if cluster.kind == 'ps':
            self._find_servers()
        address, listener = self._address()
        try:
            if listener is not None:
                coordinator = Coordinator(cluster, self._signature, listener, self._dead_after,
                                          self._start_timeout, self._say)
                lines = self._met(coordinator)
            else:
                lines = meet(cluster, self._signature,
                             connect(cluster, address, self._deadline, self._say), self._deadline,
                             self._say)
            given = cluster, lines, self._dead_after, self._say, on_lost
            yield Connection(*given) if cluster.kind != 'ps' else ServedConnection(
                *given, fingerprint=self._signature, address=address)
        finally:
            if coordinator is not None:
                coordinator.close()

    def _address(self):
        """Where worker 0 listens, and on worker 0 its listener; else None."""
        cluster = self._cluster
        if cluster.kind != 'horovod':
            address = coordinator_address(cluster)
            return address, listen(address, self._say) if cluster.is_chief else None
        listener, text = None, ''
        if cluster.is_chief:
            listener = socket.socket()
            listener.bind(('', 0))
            listener.listen(64)
            host = os.environ.get('HOROVOD_HOSTNAME') or socket.gethostname()
            text = '%s:%d' % (host, listener.getsockname()[1])
        return horovod.gathered_lines(text)[0], listener

    def _met(self, coordinator):
        """Worker 0's `Lines`; where some have not come, its error says who is missing."""
        try:
            return meet(self._cluster, self._signature, coordinator.own_end, self._deadline,
                        self._say)
        except ClusterError:
            raise coordinator.missing() from None

    def _find_servers(self):
        """Waits for the parameter servers.

        Raises:
          ClusterError: one does not answer in time.
        """
        def say():
            self._say('waiting        for %s, start_timeout is %.3g s' % (
                silent_servers(self._cluster), self._start_timeout))
        timer = threading.Timer(min(FIRST, self._start_timeout / 2.), say)
        timer.daemon = True
        timer.start()
        try:
            for rank, address in enumerate(self._cluster.ps):
                check_server(address, self._cluster.who(rank, 'ps'), self._deadline)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def member(self, connection):
        """The `Member`, whose server is up."""
        cluster, built = self._cluster, self._built

        def make_wait(what):
            return ChiefWait(cluster, connection, '%s%s, the chief' % (what, cluster.who(0)),
                             self._start_timeout, self._say)
        target = '' if cluster.kind == 'horovod' else start_server(cluster, self._config).target
        for each in builds_of(built):
            each.machines.join(connection, make_wait)
        member = Member(cluster, built, target, self._config, connection, make_wait)
        if cluster.kind != 'ps':
            yield member
            return
        member.hooks.append(BegunAnewHook(cluster, built.machines.hook, self._say, connection))
        watch = ServerWatch(cluster, connection, self._dead_after, self._say)
        try:
            yield member
        finally:
            watch.close()


def coordinator_address(cluster):
    """Where worker 0 listens for the others.

    In a ring it is worker 0's own address, before TensorFlow's server takes the port. Workers of
    parameter servers come at any time: there it is the next port that no task has.
    """
    if cluster.kind == 'ring':
        return cluster.workers[0]
    host, _, port = cluster.workers[0].rpartition(':')
    taken = {split_address(each)[1] for each in cluster.workers + cluster.ps}
    return '%s:%d' % (host, next(
        free for free in range(int(port) + 1, int(port) + len(taken) + 2) if free not in taken))


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


class _OnceCreator(tf.train.SessionCreator):
    """Makes one session; when it is asked for another one, the error names the lost worker."""

    def __init__(self, member, creator):
        self._member, self._creator, self._made = member, creator, False

    def create_session(self):
        if self._made:
            raise self._member.lost() or lost_session(self._member.cluster)
        self._made = True
        return self._creator.create_session()


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
            or session_guard.explained(error))
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
