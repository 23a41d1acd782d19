"""`Cluster`: which machines train together, how, and which of them this process is."""

import collections.abc
import inspect
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count, check_flag, check_instance, check_number
from towers.cluster import horovod, parameter_servers, ring
from towers.cluster.addresses import JOBS, parse_tf_config, split_address
from towers.cluster.collectives import MOST_GATHERED, WIRES
from towers.cluster.engine import Engine
from towers.cluster.machines import BUILDS, StepOfWorkers
from towers.cluster.ring import BUFFER_MB
from towers.errors import ClusterError, InvalidArgumentError
from towers.optimizers import combiner_of, name_of

_ENGINES = {'ring': ring.ENGINE, 'ps': parameter_servers.ENGINE, 'horovod': horovod.ENGINE}
KINDS = tuple(_ENGINES)


class _Fields(typing.NamedTuple):
    """The fields of `Cluster`, which says what they mean, and checks them."""
    kind: str
    workers: typing.Tuple[typing.Any, ...]
    ps: typing.Tuple[str, ...]
    job: str
    rank: int
    synchronous: bool
    uneven: bool
    active: typing.Any
    wire: typing.Optional[str]
    buffer_mb: float
    every: int
    compare: str


class Cluster(_Fields):
    """The machines that train one model, each with towers of its own: `build_towers(cluster=…)`.

    The towers' gradients are combined within each machine, then once across the machines. With
    `n_w` of the step's n examples on worker w of W, and `g_w` the gradient of the mean loss there,

        mean:  sum_w (n_w / n) g_w            (the mean loss of all examples on one device)
        sum:   N sum_w (n_w / n) g_w          with N = W * N_w towers in all

    Attributes:
      kind: `'ring'` (TensorFlow's ring all-reduce), `'ps'` (its parameter servers), `'horovod'`.
      workers: tuple of `'host:port'`, the chief first; with Horovod a None for each worker.
      ps: tuple of `'host:port'`; empty but for `'ps'`.
      job: `'worker'`, `'ps'` or `'evaluator'`: the job of this process.
      rank: the number of this process in its job; `from_tf_config` refuses to guess it.
      synchronous: for `'ps'`: whether a step waits for the gradients of all workers.
      uneven: whether workers may have batches of different static sizes. Else these are refused at
        the start, also of asynchronous workers. A batch without a static size counts as uneven.
      active: float scalar tensor, 1 or 0: with 0 the batch of this process counts as empty; see
        `until_all_end`. None: always 1. Not with asynchronous workers.
      wire: for a ring of 2 or 3 workers: `'float16'` or `'bfloat16'`: dense gradients travel in
        this type, in half the bytes, and are added up in float32. None: they travel as they are.
      buffer_mb: for `'ring'`: the size of the buffers in which gradients travel together, a number
        of MiB. A buffer is sent when all of its gradients are there.
      every: for `'ring'`: 1, or K: each worker makes K steps on its own weights by its own
        gradients, then all take the mean of the weights. These are no longer the steps of one
        device on all examples.
      compare: `'program'`: workers whose loss or update is computed by other operations than
        worker 0's are refused. `'variables'`, for programs that mean to differ: only the variables,
        gradients and settings have to be alike.
    """
    __slots__ = ()

    def __new__(cls, kind: str = 'ring', workers: typing.Sequence[typing.Optional[str]] = (),
                ps: typing.Sequence[str] = (), job: str = 'worker', rank: int = 0,
                synchronous: bool = True, uneven: bool = False, active: typing.Any = None,
                wire: typing.Optional[str] = None, buffer_mb: float = BUFFER_MB, every: int = 1,
                compare: str = 'program'):
        """Checks the arguments, which are the attributes of the class.

        Raises:
          InvalidArgumentError: an argument that makes no sense, or does not go with the kind.
          ClusterError: a malformed address, or one that occurs twice; a rank out of range.
        """
        check_choice('kind', kind, KINDS)
        check_choice('job', job, JOBS[1:])  # 'chief' is a word of TF_CONFIG: here it is worker 0
        check_choice('compare', compare, ('program', 'variables'))
        if wire is not None:
            check_choice('wire', wire, sorted(WIRES))
        check_instance('workers', workers, (list, tuple), "a list of addresses, 'host:port'")
        check_instance('ps', ps, (list, tuple), "a list of addresses, 'host:port'")
        check_flag('synchronous', synchronous)
        check_flag('uneven', uneven)
        check_number('buffer_mb', buffer_mb, above=0, expected='a number of MiB')
        check_count('every', every)
        has_launcher = _ENGINES[kind].place is not None  # such as Horovod's
        if has_launcher:  # which says how many workers there are, and which one this is
            workers, rank = _workers_and_rank_of_launcher(kind, workers, rank)
        self = super(Cluster, cls).__new__(
            cls, kind, tuple(workers), tuple(ps), job, rank, synchronous, uneven, active, wire,
            buffer_mb, every, compare)
        _check_arguments_of_kind(self)
        _check_values(self)
        _check_places(self)
        return self

    @classmethod
    def _make(cls, iterable: typing.Iterable) -> 'Cluster':  # type: ignore[override]
        """Makes a cluster of the values in `iterable`. `_replace` of a named tuple calls this, so
        that the new cluster is checked, too."""
        return cls(*iterable)

    @classmethod
    def from_tf_config(cls, kind: typing.Optional[str] = None, environment: typing.Any = None,
                       **fields: typing.Any) -> 'Cluster':
        """The `Cluster` of the environment's `TF_CONFIG`, as users of TensorFlow write it.

            {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]},
             "task": {"type": "worker", "index": 0}}

        The chief, or `master`, is worker 0.

        Args:
          kind: see the class; None: `'ps'` where there are parameter servers, else `'ring'`.
          environment: dict; None for `os.environ`.
          **fields: fields of `Cluster`, but for those that `TF_CONFIG` says; None for the default.

        Raises:
          ClusterError: `TF_CONFIG` cannot be read or contradicts itself, names no workers, or does
            not say which of several this process is.
        """
        if environment is None:
            environment = os.environ
        check_instance('environment', environment, collections.abc.Mapping,
                       'a dict of environment variables, or None')
        task = parse_tf_config(environment.get('TF_CONFIG', '{}'))
        given = {name: value for name, value in fields.items() if value is not None}
        for name in sorted(task._fields):
            if name in given:
                raise InvalidArgumentError('%s=%.80r: TF_CONFIG says it. Leave it out, or make '
                                           'Cluster(kind, workers, …).' % (name, given[name]))
        if kind is None:
            kind = 'ps' if task.ps else 'ring'
        return cls(kind, **task._asdict(), **given)

    @property
    def engine(self) -> Engine:
        """The `Engine` of this kind of cluster."""
        return _ENGINES[self.kind]

    @property
    def num_workers(self) -> int:
        """How many workers there are, the chief included."""
        return len(self.workers)

    @property
    def workers_a_step(self) -> int:
        """How many workers' gradients are in an update: 1 of asynchronous workers, or in local
        steps; else all."""
        if self.has_local_steps or not self.synchronous:
            return 1
        return self.num_workers

    @property
    def waits(self) -> bool:
        """Whether a step of several workers begins on all of them, or on none."""
        return self.synchronous and self.num_workers > 1

    @property
    def has_local_steps(self) -> bool:
        """Whether each of several workers makes `every` steps on its own weights."""
        return self.every > 1 and self.num_workers > 1

    @property
    def is_chief(self) -> bool:
        """Whether this process saves checkpoints, evaluates and speaks for all."""
        return self.job == 'worker' and self.rank == 0

    @property
    def is_served(self) -> bool:
        """Whether the variables are on parameter servers. Then all workers share each variable, and
        the engine has no operation by which worker 0 gives its values to the others."""
        return self.engine.broadcast is None

    @property
    def has_addresses(self) -> bool:
        """Whether each worker has an address, at which a server of TensorFlow's listens: in a ring,
        and with parameter servers. With Horovod its launcher places the workers, and they have
        no addresses."""
        return self.engine.place is None

    @property
    def served_rank(self) -> typing.Optional[int]:
        """The rank of this worker, where several workers make one step on parameter servers, and
        worker 0 makes its update; else None."""
        if self.is_served and self.waits:
            return self.rank
        return None

    @property
    def has_copies(self) -> bool:
        """Whether each of several workers has the variables, and makes the update itself."""
        return not self.is_served and self.num_workers > 1

    @property
    def own_task(self) -> str:
        """What the names of this worker's devices begin with in a session of the cluster:
        `'/job:worker/replica:0/task:1'`. With Horovod a session is of one process alone."""
        if not self.has_addresses:
            return '/job:localhost/replica:0/task:0'
        return '/job:%s/replica:0/task:%d' % (self.job, self.rank)

    @property
    def name(self) -> str:
        """`'worker 1 of 3'`; of an evaluator `'evaluator 0'`."""
        name = '%s %d' % (self.job, self.rank)
        if self.job == 'evaluator':
            return name
        return '%s of %d' % (name, len(self.tasks(self.job)))

    def tasks(self, job: str) -> typing.Tuple[typing.Optional[str], ...]:
        """The addresses of the tasks of a job; () for evaluators, which are outside of the cluster.
        """
        return {'worker': self.workers, 'ps': self.ps}.get(job, ())

    def who(self, rank: int, job: str = 'worker') -> str:
        """The task with this `rank` in a `job`, in words: `'worker 1 (10.0.0.2:2222)'`."""
        address = self.tasks(job)[rank]
        name = '%s %d' % (job, rank)
        return name if address is None else '%s (%s)' % (name, address)

    def session_config(self, config: tf.ConfigProto) -> tf.ConfigProto:
        """A copy of a `tf.ConfigProto` with the settings of the cluster."""
        check_instance('config', config, tf.ConfigProto, 'a tf.ConfigProto')
        changed = tf.ConfigProto()
        changed.CopyFrom(config)
        del changed.device_filters[:]  # the engine says which devices a session sees
        self.engine.configure(self, changed)
        return changed

    @property
    def no_batch_values(self) -> typing.Optional[str]:
        """Why this cluster has no values of the whole batch, which workers exchange in the forward
        pass; None if it has them."""
        if self.num_workers == 1:  # the whole batch is on this worker
            return None
        if self.is_served:
            return ('workers on parameter servers exchange gradients alone: use kind=\'ring\' or '
                    "'horovod', or build without cluster=")
        if self.has_local_steps:
            return ('with every=%d a step is of one worker, and the batch of several: leave '
                    'every= out, or build without cluster=' % self.every)
        return None

    def begin_step(self, examples: typing.Union[int, tf.Tensor], reduction: str) -> StepOfWorkers:
        """Begins a step of the workers in the graph of a build, before the towers have losses: the
        step says how the losses are weighted.

        Args:
          examples: the number of examples in this machine's batch, an int or an int scalar tensor.
          reduction: `'mean'` or `'sum'`.
        """
        return StepOfWorkers(self, examples, reduction)

    def check_build(self, optimizer: typing.Any, has_replicas: bool, scales_loss: bool) -> None:
        """Raises `ClusterError` for a build that this cluster cannot train.

        Args:
          optimizer: of the build.
          has_replicas: whether the towers have replicas of the variables.
          scales_loss: whether the build has a loss scale.
        """
        if self.job == 'evaluator':
            raise ClusterError('this process is an evaluator, which trains nothing: build what it '
                               'evaluates without cluster=.')
        if self.job == 'ps':
            raise ClusterError('this process is %s, which builds no towers: call towers.serve('
                               'cluster) in it.' % self.name)
        if self.is_served and has_replicas:
            raise ClusterError("VariablePlacement('replicated') and parameter servers both say "
                               'where variables live: leave one out.')
        if scales_loss:
            self._check_takes_loss_scale()
        has_build = bool(tf.get_collection(BUILDS))
        if self.is_served and has_build:
            raise ClusterError('this graph has a build with cluster= already, and parameter '
                               "servers take one a graph: use kind='ring', which takes several.")
        _check_does_not_combine(optimizer)

    def _check_takes_loss_scale(self) -> None:
        """Raises `ClusterError` where the workers would not have one loss scale for all."""
        if self.has_local_steps:
            raise ClusterError('a loss scale follows the gradients of one worker, and with '
                               'every=%d the workers would average theirs: leave one out.'
                               % self.every)
        if self.is_served and not self.synchronous:
            raise ClusterError('a loss scale counts steps of all workers, and these parameter '
                               'servers are asynchronous: leave one out.')

    def describe(self) -> str:
        """One line for the plan: `"TensorFlow's ring of 3 workers; this is worker 0"`."""
        workers = _counted(self.num_workers, 'worker')
        if self.is_served:
            kind_of_step = 'synchronous' if self.synchronous else 'asynchronous'
            text = '%s on %s, %s' % (
                workers, _counted(len(self.ps), 'parameter server'), kind_of_step)
        else:
            text = '%s of %s' % (self.engine.name, workers)
        if self.wire is not None and self.num_workers > 1:
            text += ', dense gradients travel as %s and are added up in float32' % self.wire
        if self.has_local_steps:
            text += (', each with its own weights, whose mean all take after every %d steps '
                     "(not one device's gradient)" % self.every)
        return '%s; this is worker %d' % (text, self.rank)

    def warning(self) -> str:
        """One line for the plan: that others can reach the ports."""
        if self.has_addresses:
            return ("TensorFlow's servers listen on every interface, whatever address is given, "
                    'and do what anyone asks who reaches them: let only the cluster reach their '
                    'ports')
        return ("%s's rendezvous listens on every interface: let only the cluster reach it"
                % self.engine.name)


def _workers_and_rank_of_launcher(
        kind: str, workers: typing.Sequence, rank: int) -> typing.Tuple[tuple, int]:
    """The fields `workers` and `rank` of a cluster whose launcher says them, as Horovod's does.

    Args:
      kind: of the cluster.
      workers: as given to `Cluster`: (); or, in a `_replace`, what this function returned before.
      rank: as given to `Cluster`: 0; or, in a `_replace`, what this function returned before.

    Raises:
      InvalidArgumentError: something else was given.
    """
    num_workers, own_rank = _ENGINES[kind].place()  # type: ignore[misc]
    without_addresses = (None,) * num_workers
    may_be_workers = tuple(workers) in ((), without_addresses)
    may_be_rank = rank in (0, own_rank)
    if not may_be_workers or not may_be_rank:
        raise InvalidArgumentError('kind=%r, workers=%.80r, rank=%.80r: its launcher says '
                                   'both. Leave them out.' % (kind, workers, rank))
    return without_addresses, own_rank


def _check_does_not_combine(optimizer: typing.Any) -> None:
    """Raises `ClusterError` for an optimizer that adds up gradients over machines by itself."""
    combiner = combiner_of(optimizer)
    if combiner is None:
        return
    if combiner is optimizer:
        what_it_is = 'is a %s' % name_of(combiner)
    else:
        what_it_is = 'has a %s in it' % name_of(combiner)
    raise ClusterError(
        'the optimizer %s %s, and build_towers(cluster=…) combines gradients over the '
        'machines already: twice would give other numbers. Give build_towers the '
        'optimizer that it wraps.' % (type(optimizer).__name__, what_it_is))


def _counted(count: int, noun: str) -> str:
    """A number of things in words: `'1 worker'`, `'2 workers'`."""
    return '%d %s%s' % (count, noun, '' if count == 1 else 's')


def _check_arguments_of_kind(cluster: Cluster) -> None:
    """Raises `InvalidArgumentError` for an argument that goes with other kinds of cluster alone,
    such as `every` with Horovod. An argument that has its default counts as not given."""
    parameters = inspect.signature(Cluster).parameters  # with the defaults
    for kind, engine in _ENGINES.items():
        arguments_of_other_kind = set(engine.arguments) - set(cluster.engine.arguments)
        for name in sorted(arguments_of_other_kind):
            value = getattr(cluster, name)
            was_given = value != parameters[name].default
            if was_given:
                raise InvalidArgumentError(
                    '%s=%.80r goes with kind=%r, and this is kind=%r: leave it out, or use that '
                    'kind.' % (name, value, kind, cluster.kind))


def _check_values(cluster: Cluster) -> None:
    """Raises `InvalidArgumentError` for arguments that do not go together."""
    if cluster.active is not None:
        _check_active(cluster)
    if cluster.wire is not None:
        _check_wire(cluster)


_NO_GRADIENT_TRAVELS = ('every=%d: no gradient travels, and all workers make all steps: leave %s '
                        'out.')


def _check_active(cluster: Cluster) -> None:
    """Raises `InvalidArgumentError` for an `active` that is no tensor, or that does not go with the
    other arguments."""
    active = cluster.active
    if not cluster.synchronous:
        raise InvalidArgumentError('active=%.80r, synchronous=False: asynchronous workers end each '
                                   'with its own data. Leave active out.' % (active,))
    if not isinstance(active, tf.Tensor):
        raise InvalidArgumentError('active=%.80r: expected what until_all_end returned, or None.'
                                   % (active,))
    if cluster.every > 1:
        raise InvalidArgumentError(_NO_GRADIENT_TRAVELS % (cluster.every, 'active'))


def _check_wire(cluster: Cluster) -> None:
    """Raises `InvalidArgumentError` for a `wire` that does not go with the other arguments."""
    if cluster.every > 1:  # then workers send weights
        raise InvalidArgumentError(_NO_GRADIENT_TRAVELS % (cluster.every, 'wire'))
    if cluster.num_workers > MOST_GATHERED:
        raise InvalidArgumentError(
            'wire=%r: 16-bit gradients go from each worker to each other one, which of more than '
            "%d workers are no fewer bytes than the ring's. Leave it out." % (
                cluster.wire, MOST_GATHERED))


def _check_places(cluster: Cluster) -> None:
    """Raises `ClusterError` for addresses and ranks that make no sense."""
    if cluster.has_addresses:
        _check_addresses(cluster.workers + cluster.ps)
    if not cluster.workers:
        raise ClusterError('a cluster needs a worker, and workers=() names none: set TF_CONFIG, or '
                           "pass workers=['host:port', …].")
    if cluster.is_served and not cluster.ps:
        raise ClusterError("kind='ps' needs a parameter server, and there is none: name one under "
                           "'ps', or use kind='ring', which needs none.")
    num_tasks = len(cluster.tasks(cluster.job))
    if not _is_rank(cluster.rank, cluster.job, num_tasks):
        numbers = '%d of them, from 0' % num_tasks if num_tasks else 'none of them'
        raise ClusterError('%s %.80r is none of the cluster, which has %s.' % (
            cluster.job, cluster.rank, numbers))


def _check_addresses(addresses: typing.Iterable) -> None:
    """Raises `ClusterError` for a malformed address, or for an address that occurs twice."""
    # In lower case: names of hosts are the same in upper and lower case.
    places = [split_address(str(address).lower()) for address in addresses]
    for place in places:
        if places.count(place) > 1:
            raise ClusterError('%s:%d is the address of two tasks of the cluster: give each '
                               'one its own.' % place)


def _is_rank(rank: typing.Any, job: str, num_tasks: int) -> bool:
    """Whether a value is the rank of one of the tasks of a job. Evaluators, which are outside of
    the cluster, may have any number."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        return False
    return job == 'evaluator' or rank < num_tasks
