"""This process as a member of a cluster: its server, its sessions, and its end."""

import contextlib
import json
import os
import sys
import threading
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_config, check_function, check_instance, check_number,
                              check_say)
from towers.api.built import BuiltTowers
from towers.cluster import worker_data, horovod, session_guard, server_placement
from towers.cluster.chief_wait import AwaitedChief, WaitingCreator
from towers.cluster.cluster import Cluster
from towers.cluster.drift_check import AskForCheck, DriftHook
from towers.cluster.ended_workers import EndedWorkers
from towers.cluster.handshake import all_ready, check_port, meet
from towers.cluster.member_hooks import (BegunAnewHook, BeginHook, BroadcastHook,
                                         NextSessionHook, StepWatchHook, ToldAgainHook,
                                         lost_session)
from towers.cluster.parameter_servers import agree, answer_or_raise
from towers.cluster.machines import builds_of
from towers.cluster.server_placement import SpreadingCreator, servers_of_variables
from towers.cluster.signature import difference, signature
from towers.cluster.stall import StallWatch, silent_servers
from towers.cluster.step_fetches import StepFetches
from towers.cluster.wait_notice import Waiting
from towers.cluster.peer_watch import Watch
from towers.cluster.worker_notes import note_failure
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
                 config: typing.Optional[tf.ConfigProto], watch: typing.Any,
                 chief: typing.Any = None):
        self.cluster, self.is_chief = cluster, cluster.is_chief
        self.target, self.config = target, config
        self._watch, self._built, self._chief = watch, built, chief
        self._has_session = False
        step_fetches = StepFetches(lambda: builds_of(built))
        self._begin = BeginHook(cluster, built, target, config, step_fetches,
                                lambda: self.lost(DEAD_AFTER))
        self.hooks = [self._begin] + (
            [StepWatchHook(watch, step_fetches)] if watch is not None else [])
        self.listeners = []
        if cluster.has_copies:
            self.hooks += [BroadcastHook(cluster, built), DriftHook(cluster, built, step_fetches)]
            self.listeners.append(AskForCheck(built))
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
            creator = WaitingCreator(scaffold, self.target, self.config, self._chief)
        else:
            creator = tf.train.ChiefSessionCreator(scaffold, self.target, self.config)
        return session_class(self.session_creator(creator, scaffold), self.hooks + list(hooks))

    def lost(self, seconds=0.):
        """`WorkerLostError` about the worker that is gone, or None.

        Args:
          seconds: how long to wait until a loss is known.
        """
        found = self._watch.wait_for_loss(seconds) if self.cluster.kind == 'ring' else None
        return None if found is None else _lost_error(self.cluster, *found)


@contextlib.contextmanager
def join(cluster: typing.Any, built: typing.Any, config: typing.Optional[tf.ConfigProto] = None,
         start_timeout: float = START_TIMEOUT, dead_after: float = DEAD_AFTER,
         settings: typing.Optional[dict] = None, say: typing.Callable = print,
         on_lost: typing.Optional[typing.Callable] = None) -> Member:
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
    deadline = time.monotonic() + start_timeout
    config = cluster.session_config(config or session_config(built.devices))
    for each in builds_of(built):
        if each.machines.redirect is not None:
            each.machines.redirect()
    own = signature(cluster, built, settings)
    if cluster.kind == 'ps':
        own['servers'] = servers_of_variables(
            cluster, tf.get_default_graph(), [variable for _, variable in built.gradients])
        check_port(cluster.workers[cluster.rank], say)
        with Waiting(lambda: silent_servers(cluster), start_timeout, say):
            answer_or_raise(cluster, deadline)
        server = start_server(cluster, config)
        with Waiting(lambda: 'parameter servers' if cluster.is_chief else
                     '%s, the chief' % cluster.who(0), start_timeout, say):
            agree(cluster, own, server.target, config, deadline)
        chief = None if cluster.is_chief else AwaitedChief(
            cluster, EndedWorkers(cluster, server.target, config), start_timeout, say)
        if built.machines.hook is not None:
            built.machines.hook.say, built.machines.hook.chief = say, chief
        ended, waits = threading.Event(), cluster.synchronous and cluster.num_workers > 1
        asked = EndedWorkers(cluster, server.target, config) if waits else None

        def tell(error):
            if cluster.num_workers > 1:
                note_failure(cluster, server.target, config,
                             '%s: %s' % (type(error).__name__, reason_of(error)))
        stall = StallWatch(
            cluster, dead_after, say, asked,
            lambda ranks: _lose(_ended_error(cluster, ranks), on_lost, ended),
            lambda: built.machines.told_to_stop,
            lambda who: _lose(_told_error(cluster, dead_after, who), on_lost, ended),
            (lambda: asked.notes) if waits else None, start_timeout,
            lambda why: _lose(_missing_error(cluster, why), on_lost, ended, tell))
        try:
            with _explained_in_words():
                joined = Member(cluster, built, server.target, config, stall, chief)
                if cluster.is_chief:
                    # Before the rounds begin, by which the others hear of the session.
                    joined.hooks.insert(0, ToldAgainHook(lambda: agree(
                        cluster, own, server.target, config, time.monotonic() + start_timeout)))
                chief_end = built.machines.chief_end
                if chief_end is not None and not cluster.is_chief:
                    joined.hooks.append(NextSessionHook(cluster, chief_end, start_timeout, say))
                joined.hooks.append(BegunAnewHook(cluster, built.machines.hook, say, chief))
                yield joined
        except BaseException as error:
            tell(error)
            raise
        finally:
            ended.set()
            stall.close()
        return
    if cluster.kind == 'horovod':
        _agree_by_horovod(cluster, own)
        with _explained_in_words():
            yield Member(cluster, built, '', config, None)
            if any(each.machines.have_stopped for each in builds_of(built)):
                horovod.wait_for_all()
        return
    connections = meet(cluster, own, deadline, say)
    try:
        server = start_server(cluster, config)
        all_ready(cluster, connections, deadline)
    except BaseException:
        for lines in connections.values():  # so that the others hear of it at once
            lines.close()
        raise
    ended = threading.Event()
    watch = Watch(cluster, connections, dead_after,
                  lambda rank, why: _lose(_lost_error(cluster, rank, why), on_lost, ended))
    built.machines.watch = watch
    member = Member(cluster, built, server.target, config, watch)
    try:
        with _explained_in_words():
            yield member
    except BaseException as error:
        lost = member.lost(dead_after + 1. if _may_be_a_peers(error) else 0.)
        ended.set()
        watch.fail('%s: %s' % (type(error).__name__, reason_of(error)))
        if lost is not None and isinstance(error, (tf.errors.OpError, WorkerLostError)):
            raise lost from None
        raise
    watch.finish()
    lost = member.lost()
    ended.set()
    if lost is not None:
        raise lost


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
            raise self._member.lost(DEAD_AFTER) or lost_session(self._member.cluster)
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


def _lost_error(cluster, rank, why):
    return WorkerLostError('%s is lost: %s. The ring cannot go on without it: start all workers '
                           'again, and they go on from the last checkpoint.' % (
                               cluster.who(rank), str(why).rstrip('.')))


def _ended_error(cluster, ranks):
    return WorkerLostError(
        '%s has ended its training, perhaps for lack of data, and %s has not: a synchronous step '
        'waits for all workers. Give each as many steps as the others, or see until_all_end. '
        'Started again, all go on from the last checkpoint.' % (
            ' and '.join(cluster.who(rank) for rank in ranks), cluster.who(cluster.rank)))


def _missing_error(cluster, why):
    return WorkerLostError('%s cannot begin, since a synchronous step waits for all workers: %s.'
                           % (cluster.who(cluster.rank), why))


def _told_error(cluster, seconds, who):
    return WorkerLostError(
        '%s was told to stop, and its step takes more than %g seconds: %s. It ends without saving. '
        'Started again, all go on from the last checkpoint.' % (
            cluster.who(cluster.rank), seconds, who))


def _lose(error, on_lost, ended, tell=None):
    """Ends the process if it does not end by itself: a step without its peer may never end.

    Args:
      error: `WorkerLostError`.
      on_lost: as for `join`.
      ended: event that is set when the process ends by itself.
      tell: called with the error before the process is ended.
    """
    if on_lost is not None:
        on_lost(error)
        return
    if ended.wait(_TIME_TO_SAY):
        return
    if tell is not None:
        tell(error)
    sys.stderr.write('%s\n' % error)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)


def _agree_by_horovod(cluster, own):
    texts = [json.loads(text) for text in horovod.gathered_lines(json.dumps(own))]
    for rank, other in enumerate(texts):
        why = difference(texts[0], other)
        if why is not None:
            raise ClusterError('worker %d does not belong to this cluster: %s.' % (rank, why))
