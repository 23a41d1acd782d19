"""Sessions of a cluster's workers: how one begins, which calls are its steps, and how all stop."""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.built import BuiltTowers
from towers.arguments import check_instance
from towers.cluster.between_steps import replica_refreshes
from towers.cluster.cluster import Cluster
from towers.cluster.connection import Connection
from towers.cluster.machines import builds_of, connection_of, number_of, shared_variables
from towers.cluster.server_placement import spread
from towers.cluster.worker_step import HOW_TO_BEGIN
from towers.errors import ClusterError
from towers.graph.graph_walk import names_of, step_operations
from towers.run.stopping import StopOnSignalHook


def check_built(built: typing.Any) -> None:
    """Raises `InvalidArgumentError` for what is no build, and `ClusterError` for a build without a
    cluster."""
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if built.machines is None:
        raise ClusterError('built was made without a cluster: pass cluster= to build_towers, too.')


class _CreatorOfOne(tf.train.SessionCreator):
    """Makes one session. After the loss of a machine `MonitoredSession` asks for another session:
    then this raises the error about the loss."""

    def __init__(self, create: typing.Callable, lost: typing.Callable):
        """
        Args:
          create: function that makes the session.
          lost: function that gives the error for a session that was lost.
        """
        self._create = create
        self._lost = lost
        self._has_made_one = False

    def create_session(self) -> tf.Session:
        """The session; at a second call raises the error about the loss of the first one."""
        if self._has_made_one:
            raise self._lost()
        self._has_made_one = True
        return self._create()


class BeginHook(tf.train.SessionRunHook):
    """Begins a session on all workers together, and lets its steps be made."""

    def __init__(self, cluster: Cluster, built: BuiltTowers, target: str, config: tf.ConfigProto,
                 connection: Connection, lost: typing.Callable):
        """
        Args:
          cluster, built, connection: of this member.
          target, config: of its sessions.
          lost: function that gives the error for a session that was lost.
        """
        self._cluster = cluster
        self._built = built
        self._target = target
        self._config = config
        self._connection = connection
        self._lost = lost
        self._is_by_member = False  # whether the session to come is made by `creator`
        self._is_used_up = False  # whether `creator` may make no further session
        self._has_begun = False  # whether the session has begun together with all workers' sessions
        # The operations by which the other workers get worker 0's values of variables, and the
        # names of these variables.
        self._operations: typing.List[tf.Operation] = []
        self._names: typing.List[str] = []

    def creator(self, creator: tf.train.SessionCreator,
                scaffold: tf.train.Scaffold) -> tf.train.SessionCreator:
        """The creator that `Member.session_creator` returns, for the same arguments."""
        if self._is_used_up:
            raise ClusterError(
                'join with parameter servers is for one session, and this is the second one: train '
                'in one, and evaluate its checkpoints in another process.')
        self._is_by_member = True
        self._is_used_up = self._cluster.is_served  # the graph can be spread over servers once

        def create() -> tf.Session:
            """Makes the session."""
            self._prepare_session(scaffold)
            return creator.create_session()
        return _CreatorOfOne(create, self._lost)

    def _prepare_session(self, scaffold: tf.train.Scaffold) -> None:
        """With parameter servers, spreads the graph over them; workers other than the chief then
        wait until the chief has its session, which gives the variables their values."""
        if not self._cluster.is_served:
            return
        spread(self._cluster, self._built, scaffold)
        if not self._cluster.is_chief:
            self._connection.begin_session()

    def begin(self) -> None:
        """Makes the operations by which the other workers get worker 0's values."""
        is_by_member = self._is_by_member
        self._is_by_member = False  # until `creator` is called for another session
        self._has_begun = False
        cluster = self._cluster
        if not is_by_member:
            self._check_may_be_made_without_member()
            self._initialize_own_variables()
        if cluster.has_copies:  # each worker's copies of the variables get worker 0's values
            variables = shared_variables(self._built)
            self._names = [variable.op.name for variable in variables]
            broadcast = cluster.engine.broadcast(cluster, variables)
            self._operations = [broadcast] + replica_refreshes(self._built)

    def _check_may_be_made_without_member(self) -> None:
        """Raises `ClusterError` for a session with parameter servers that `creator` has not
        prepared."""
        if self._cluster.is_served:
            raise ClusterError(
                'this session is not made by the member of the cluster, which puts the variables '
                'on the parameter servers when the graph is complete. %s, and not by '
                'tf.train.MonitoredTrainingSession.' % HOW_TO_BEGIN)

    def _initialize_own_variables(self) -> None:
        """Gives the variables of a worker in a ring their initial values.

        On a worker that is not the chief, `tf.train.MonitoredTrainingSession` runs no initializer:
        it waits until the chief has run them. But in a ring each worker's variables live in its own
        server: a session with the same target, such as that one, sees the values. (With Horovod no
        server keeps them: each process has to make its session as a chief.)
        """
        if self._cluster.kind == 'ring' and not self._cluster.is_chief:
            with tf.Session(self._target, config=self._config) as session:
                session.run([variable.initializer for variable in tf.global_variables()])

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Waits for the sessions of all workers, and lets steps be made.

        Raises:
          ClusterError: the session was lost; or the workers have different variables. Without that
            error, a worker with a variable of its own would wait for its value for ever.
        """
        if self._has_begun:  # `MonitoredSession` has made another session after an error
            raise self._lost()
        self._has_begun = True
        builds = builds_of(self._built)
        for build in builds:
            build.machines.exchange.begin_session(session)  # lets steps be made in it
        # Workers of parameter servers other than the chief have waited already, for the values that
        # the chief gives the variables: see `_prepare_session`, where they name none. With
        # parameter servers `_names` is [], too.
        has_still_to_wait = not self._cluster.is_served or self._cluster.is_chief
        if has_still_to_wait:
            differing_rank = self._connection.begin_session(self._names)
            if differing_rank is not None:
                raise self._other_variables(builds)
        # Each of these operations waits for the other workers. If a worker does not answer, this
        # worker is told so, as in a step.
        with self._connection.first_values():
            for operation in self._operations:
                session.run(operation)
        _StepsTogether(session, builds, self._connection).take_over()

    def _other_variables(self, builds: typing.List[BuiltTowers]) -> ClusterError:
        """The error about workers whose programs have made other variables than this worker's. It
        leaves out the variables of the models, which `builds` have: these were compared before, by
        the signatures."""
        model_names = {variable.op.name for build in builds for variable in build.variables}
        others = [name for name in self._names if name not in model_names]
        return ClusterError(
            'the workers have other variables, besides those of the model; this one has '
            '%.300s: worker 0 gives them to all. Make the same ones on every worker, or what '
            'one needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES].' % (
                ', '.join(others) or 'none'))


class _PreparedStep(typing.NamedTuple):
    """A call of a session without feeds, which makes a step."""
    fetches: typing.Any  # kept alive: the key has ids, which Python may give to a new object
    positions: typing.List[int]  # of the builds of which it makes a step
    call: typing.Callable  # with the arguments `options` and `run_metadata` of the session's `run`


_LEAVES = (tf.Operation, tf.Tensor)  # `tf` looks such a name up by Python's code each time


def _key_of(fetches: typing.Any) -> typing.Optional[tuple]:
    """What tells fetches from others in a dict: their structure, and the identities of the
    operations and tensors in it. None for fetches with anything else in them."""
    if isinstance(fetches, _LEAVES):
        return (id(fetches),)
    if type(fetches) is dict:
        names = list(fetches)
        parts = list(fetches.values())
    elif type(fetches) in (list, tuple):
        names = []
        parts = list(fetches)
    else:
        return None
    keys = [_key_of(part) for part in parts]
    if None in keys:
        return None
    return (type(fetches), tuple(names), tuple(keys))


class _StepsTogether:
    """The calls of a session: a call that makes a step begins on all workers or on none.

    A hook sees a call before it runs, but cannot enclose it in a context. So these methods take the
    place of the session's own methods.
    """

    def __init__(self, session: tf.Session, builds: typing.List[BuiltTowers],
                 connection: Connection):
        """
        Args:
          session: the session.
          builds: the builds of its graph.
          connection: of this worker.
        """
        self._session = session
        self._run = session.run
        self._make_callable = session.make_callable
        self._builds = builds
        self._connection = connection
        self._gives_metadata = compat.gives_metadata(session)
        # {names that a call has fetched: the positions of the builds of which it makes a step}
        self._known: typing.Dict[tuple, typing.List[int]] = {}
        self._prepared: typing.Dict[tuple, _PreparedStep] = {}  # by `_key_of` the fetches

    def take_over(self) -> None:
        """Makes the session call these methods in the place of its own methods."""
        self._session.run = self.run
        self._session.make_callable = self.make_callable

    def run(self, fetches: typing.Any, feed_dict: typing.Any = None, options: typing.Any = None,
            run_metadata: typing.Any = None) -> typing.Any:
        """Takes the place of the session's `run`."""
        if not feed_dict:
            prepared = self._prepared_step(fetches)
            if prepared is not None:
                # A `MonitoredSession` passes both in each call, mostly for nothing.
                asks_for_nothing = options is None or options.ByteSize() == 0
                if asks_for_nothing and not self._gives_metadata:
                    options = run_metadata = None
                return self._step(prepared.positions, lambda: compat.called_as_run(
                    self._session, prepared.call, options=options, run_metadata=run_metadata))
        positions = self._builds_stepped_by(fetches)
        return self._step(positions, lambda: self._run(fetches, feed_dict, options, run_metadata))

    def _prepared_step(self, fetches: typing.Any) -> typing.Optional['_PreparedStep']:
        """The prepared call without feeds of some fetches, which makes a step; None if they make no
        step, or cannot be told from others. Without it, each call of the session would look through
        its fetches again."""
        key = _key_of(fetches)
        if key is None:
            return None
        if key not in self._prepared:
            positions = self._builds_stepped_by(fetches)
            if not positions:
                return None
            call = self._make_callable(fetches, accept_options=True)
            self._prepared[key] = _PreparedStep(fetches, positions, call)
        return self._prepared[key]

    def make_callable(self, fetches: typing.Any, feed_list: typing.Any = None,
                      accept_options: bool = False) -> typing.Callable:
        """Takes the place of the session's `make_callable`."""
        call = self._make_callable(fetches, feed_list, accept_options)
        # With feeds, TensorFlow's function calls the session's `run`, which is `run` above, and so
        # begins the step itself.
        if feed_list is not None:
            return call
        positions = self._builds_stepped_by(fetches)
        return lambda *fed, **options: self._step(positions, lambda: call(*fed, **options))

    def _step(self, positions: typing.List[int], call: typing.Callable) -> typing.Any:
        """Makes a call of the session.

        Args:
          positions: of the builds of which the call makes a step; [] if it makes none.
          call: the call.
        """
        if not positions:
            return call()
        with self._connection.step(positions):
            return call()

    def _builds_stepped_by(self, fetches: typing.Any) -> typing.List[int]:
        """The positions of the builds whose train op some fetches run. Fetches that are no nest of
        tensors, operations and names may run any train op: the result is all positions."""
        try:
            leaves = tf.nest.flatten(fetches, expand_composites=True)
            # Operations; or what a program may name them by in their place, `'train/Adam'`.
            fetched = [getattr(leaf, 'op', leaf) for leaf in leaves]
            names = tuple(op.name if isinstance(op, tf.Operation) else op for op in fetched)
            if names not in self._known:  # a walk through the graph, which takes a while
                self._known[names] = _positions_of_steps(fetched, self._builds)
            return self._known[names]
        except (TypeError, ValueError, KeyError):  # unknown object, or unknown name
            return list(range(len(self._builds)))


def _positions_of_steps(fetched: typing.List[typing.Any],
                        builds: typing.List[BuiltTowers]) -> typing.List[int]:
    """The positions of the builds of which a call of `session.run` makes a step.

    Args:
      fetched: the operations, or their names, that the call fetches.
      builds: the builds of the graph.

    Raises:
      ClusterError: the call needs sums over all workers, and makes no step. The other workers send
        their summands only in a step, so the call would wait for ever.
    """
    graph = builds[0].train_op.graph
    elements = [graph.as_graph_element(each) for each in fetched]
    names = names_of(step_operations(elements))
    positions = []
    for position, built in enumerate(builds):
        if built.train_op.name in names:
            positions.append(position)
        elif not names.isdisjoint(built.machines.exchange.names_of_sums):
            raise ClusterError(
                'session.run takes what needs all workers (built.gradients, which are the sums of '
                'all, or what is computed from a value of the whole batch) without the step: fetch '
                'it with built.train_op.')
    return positions


class StopTogetherHook(StopOnSignalHook):
    """`StopOnSignalHook` for a cluster: the first signal to any worker makes all stop, and save.

    Use it on all workers, among the hooks that come last. Then all workers stop when one stops,
    whatever the reason. Asynchronous workers all stop when the chief stops; another worker stops
    alone. The end of a worker's data is no such stop, see `until_all_end`.

    A worker that would begin one more step gets `tf.errors.OutOfRangeError`, by which a
    `MonitoredSession` ends the training. `received` is None in a worker that stops because another
    worker does.
    """

    def __init__(self, cluster: typing.Any, built: typing.Any, stream: typing.Any = None):
        """
        Args:
          cluster: `Cluster`.
          built: `BuiltTowers`. If the graph has several builds, all stop after a step of this
            build.
          stream: as for `StopOnSignalHook`.

        Raises:
          ClusterError: `built` was made without a cluster.
        """
        check_instance('cluster', cluster, Cluster, 'a Cluster')
        check_built(built)
        super(StopTogetherHook, self).__init__(stream)
        self._cluster = cluster
        self._built = built
        self._connection: typing.Optional[Connection] = None
        self._position = number_of(built)
        self._steps = 0  # that the session had made at the last call of `after_run`

    @property
    def is_told(self) -> bool:
        """Whether this worker stops because a worker, perhaps itself, has said so."""
        return self._connection is not None and self._connection.is_over

    @property
    def stopped_by(self) -> typing.Tuple[typing.Optional[int], typing.Optional[int]]:
        """`(rank, number)`: the rank of the worker that got a signal, and the number of the signal;
        `(None, None)` without a signal."""
        if self.received is not None:
            return self._cluster.rank, self.received
        if self._connection is None or self._connection.stopped_by is None:
            return None, None
        return self._connection.stopped_by

    @property
    def stopping_signal(self) -> typing.Optional[int]:
        """The number of the signal that ended the run, of whichever worker; or None."""
        return self.stopped_by[1]

    @property
    def status(self) -> int:
        """The exit status that tells of the signal: 128 plus its number; 0 without a signal."""
        return 0 if self.stopping_signal is None else 128 + self.stopping_signal

    def begin(self) -> None:
        """Begins with a session; `ClusterError` if not within `join`."""
        self._connection = connection_of(self._built)
        self._steps = 0
        self._connected()

    def _connected(self) -> Connection:
        """The connection of this worker; raises `ClusterError` outside of `join`."""
        if self._connection is None:
            raise ClusterError('StopTogetherHook is for sessions within towers.join: make the '
                               'session there.')
        return self._connection

    def before_run(self, run_context: typing.Any) -> None:
        """Tells the others of a signal, if there was one."""
        self._tell_signal()

    def _tell_signal(self) -> None:
        """Lets the next message of this worker tell the others of a signal, if there was one."""
        if self.received is not None:
            self._connected().ask(signal=self.received)

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Asks the session to stop when it is time.

        Synchronous workers stop together, after a step of the build that the hook was made with: of
        the two builds of a GAN, say, which are trained in turns, that is the second build. A single
        worker, or an asynchronous one, stops when it gets a signal itself, or when the chief stops.
        """
        connection = self._connected()
        has_made_step = connection.steps_made > self._steps
        self._steps = connection.steps_made
        stops_with_others = self._cluster.waits
        if stops_with_others:
            was_step_of_build = has_made_step and self._position in connection.builds
            stops = connection.is_over and was_step_of_build
        else:
            stops = connection.is_over or self.received is not None
        if stops:
            run_context.request_stop()

    def end(self, session: tf.Session) -> None:
        """Tells the others that this session makes no more steps."""
        self._tell_signal()
        self._connected().leave()
        super(StopTogetherHook, self).end(session)
