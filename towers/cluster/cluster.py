"""`Cluster`: which machines train together, how, and which of them this process is."""

import collections
import inspect
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_cases, check_choice, check_count, check_flag, check_instance,
                              check_number)
from towers.cluster import horovod, parameter_servers, ring
from towers.cluster.addresses import JOBS, parse_tf_config, split_address
from towers.cluster.machines import BUILDS, Engine, Machines
from towers.cluster.ring import BUFFER_MB, MOST_GATHERED, WIRES
from towers.errors import ClusterError, InvalidArgumentError
from towers.optimizers import combiner_of, name_of

_ENGINES = {'ring': ring.ENGINE, 'ps': parameter_servers.ENGINE, 'horovod': horovod.ENGINE}
KINDS = tuple(_ENGINES)


class Cluster(collections.namedtuple('Cluster', [
        'kind', 'workers', 'ps', 'job', 'rank', 'synchronous', 'uneven', 'active', 'wire',
        'buffer_mb', 'every', 'compare'])):
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
      uneven: whether workers may have batches of different static size, which are refused at the
        start else, of asynchronous workers, too. A batch without a static size counts as uneven.
      active: float scalar tensor of this process, 1 or 0: with 0 its batch counts as empty; see
        `until_all_end`. None: always 1. Not with asynchronous workers.
      wire: for a ring of 2 or 3 workers: `'float16'` or `'bfloat16'`, in which dense gradients
        travel, in half the bytes; they are added up in float32. None: as they are.
      buffer_mb: for `'ring'`: the size of the buffers in which gradients travel together, a number
        of MiB. A buffer is sent when all of its gradients are there.
      every: for `'ring'`: 1, or K: each worker makes K steps on its own weights by its own
        gradients, then all take the mean: no longer one device's steps on all examples.
      compare: `'program'`: workers whose loss or update is computed by other operations than
        worker 0's are refused. `'variables'`, for programs that mean to differ: only the variables,
        gradients and settings have to be alike.
    """
    __slots__ = ()

    def __new__(cls, kind: str = 'ring', workers: typing.Sequence[str] = (),
                ps: typing.Sequence[str] = (), job: str = 'worker', rank: int = 0,
                synchronous: bool = True, uneven: bool = False, active: typing.Any = None,
                wire: typing.Optional[str] = None, buffer_mb: float = BUFFER_MB, every: int = 1,
                compare: str = 'program'):
        """
        Raises:
          InvalidArgumentError: an argument that makes no sense, or does not go with the kind.
          ClusterError: a malformed address, or one that occurs twice; a rank out of range.
        """
        for name, value, choices in (('kind', kind, KINDS), ('job', job, JOBS[1:]),
                                     ('compare', compare, ('program', 'variables'))):
            check_choice(name, value, choices)
        if wire is not None:
            check_choice('wire', wire, sorted(WIRES))
        for name, value in (('workers', workers), ('ps', ps)):
            check_instance(name, value, (list, tuple), "a list of addresses, 'host:port'")
        check_flag('synchronous', synchronous)
        check_flag('uneven', uneven)
        check_number('buffer_mb', buffer_mb, above=0, expected='a number of MiB')
        check_count('every', every)
        place = _ENGINES[kind].place
        if place is not None:
            count, own = place()
            if tuple(workers) not in ((), (None,) * count) or rank not in (0, own):
                raise InvalidArgumentError('kind=%r, workers=%.80r, rank=%.80r: its launcher says '
                                           'both. Leave them out.' % (kind, workers, rank))
            workers, rank = (None,) * count, own
        self = super(Cluster, cls).__new__(
            cls, kind, tuple(workers), tuple(ps), job, rank, synchronous, uneven, active, wire,
            buffer_mb, every, compare)
        _check(self)
        return self

    @classmethod
    def _make(cls, values):  # namedtuple's `_replace` calls it: the new tuple is checked, too
        return cls(*values)

    @classmethod
    def from_tf_config(cls, kind: typing.Optional[str] = None, environment: typing.Any = None,
                       **fields: typing.Any) -> 'Cluster':
        """The `Cluster` of the environment's `TF_CONFIG`, as TF's users write it.

            {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]},
             "task": {"type": "worker", "index": 0}}

        The chief, or `master`, is worker 0.

        Args:
          kind: see the class; None: `'ps'` where there are parameter servers, else `'ring'`.
          environment: dict; None for `os.environ`.
          **fields: of `Cluster`, but for those that `TF_CONFIG` says; None for the default.

        Raises:
          ClusterError: `TF_CONFIG` cannot be read or contradicts itself, names no workers, or does
            not say which of several this process is.
        """
        environment = os.environ if environment is None else environment
        said = parse_tf_config(environment.get('TF_CONFIG') or '{}')
        fields = {name: value for name, value in fields.items() if value is not None}
        for name in sorted(set(said) & set(fields)):
            raise InvalidArgumentError('%s=%.80r: TF_CONFIG says it. Leave it out, or make '
                                       'Cluster(kind, workers, …).' % (name, fields[name]))
        if kind is None:
            kind = 'ps' if said['ps'] else 'ring'
        return cls(kind, **dict(said, **fields))

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
        """How many workers' gradients are in an update: 1 if asynchronous, or in local steps."""
        return self.num_workers if self.synchronous and not self.has_local_steps else 1

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
        """Whether the variables are on parameter servers."""
        return self.engine.broadcast is None

    @property
    def has_addresses(self) -> bool:
        """Whether each worker has a server of TensorFlow's, at its address; Horovod has its own."""
        return self.engine.place is None

    @property
    def served_rank(self) -> typing.Optional[int]:
        """The number of this worker, where several make one step on parameter servers; or None."""
        return self.rank if self.is_served and self.waits else None

    @property
    def has_copies(self) -> bool:
        """Whether each of several workers has the variables, and makes the update itself."""
        return not self.is_served and self.num_workers > 1

    @property
    def name(self) -> str:
        """`'worker 1 of 3'`; of an evaluator `'evaluator 0'`."""
        tasks = self.tasks(self.job)
        return '%s %d%s' % (self.job, self.rank, '' if tasks is None else ' of %d' % len(tasks))

    def tasks(self, job: str) -> typing.Optional[typing.Tuple[str, ...]]:
        """The addresses of a job; None of evaluators."""
        return {'worker': self.workers, 'ps': self.ps}.get(job)

    def who(self, rank: int, job: str = 'worker') -> str:
        """`'worker 1 (10.0.0.2:2222)'`."""
        address = self.tasks(job)[rank]
        return '%s %d%s' % (job, rank, '' if address is None else ' (%s)' % address)

    def session_config(self, config: tf.ConfigProto) -> tf.ConfigProto:
        """A copy of a `tf.ConfigProto` with the settings of the cluster."""
        changed = tf.ConfigProto()
        changed.CopyFrom(config)
        del changed.device_filters[:]
        self.engine.configure(self, changed)
        return changed

    def combine(self, gradients: typing.Sequence[tuple], loss: typing.Optional[tf.Tensor],
                examples: typing.Union[int, tf.Tensor], reduction: str) -> Machines:
        """The `Machines` of `(gradient, variable)` pairs of this machine's towers, of its batch's
        loss, or None, and of its number of examples, an int or an int scalar tensor."""
        return Machines(self, gradients, loss, examples, reduction)

    def check_build(self, optimizer: typing.Any, has_replicas: bool, scales_loss: bool) -> None:
        """Raises `ClusterError` for a build that this cluster cannot train."""
        combiner = combiner_of(optimizer)
        check_cases(ClusterError, [
            (self.job == 'evaluator', 'this process is an evaluator, which trains nothing: build '
             'what it evaluates without cluster='),
            (self.job == 'ps', 'this process is %s, which builds no towers: call towers.serve('
             'cluster) in it' % self.name),
            (self.is_served and has_replicas, "VariablePlacement('replicated') and parameter "
             'servers both say where variables live: leave one out'),
            (self.has_local_steps and scales_loss, 'a loss scale follows the gradients of one '
             'worker, and with every=%d the workers would average theirs: leave one out'
             % self.every),
            (self.is_served and scales_loss and not self.synchronous, 'a loss scale counts steps '
             'of all workers, and these parameter servers are asynchronous: leave one out'),
            (self.is_served and tf.get_collection(BUILDS), 'this graph has a build with cluster= '
             "already, and parameter servers take one a graph: use kind='ring', which takes "
             'several')])
        if combiner is not None:
            raise ClusterError(
                'the optimizer %s %s, and build_towers(cluster=…) combines gradients over the '
                'machines already: twice would give other numbers. Give build_towers the '
                'optimizer that it wraps.' % (
                    type(optimizer).__name__, 'is a ' + name_of(combiner) if combiner is optimizer
                    else 'has a %s in it' % name_of(combiner)))

    def describe(self) -> str:
        """One line for the plan: `"TensorFlow's ring of 3 workers; this is worker 0"`."""
        count = '%d worker%s' % (self.num_workers, '' if self.num_workers == 1 else 's')
        if self.is_served:
            text = '%s on %d parameter server%s, %s' % (
                count, len(self.ps), '' if len(self.ps) == 1 else 's',
                'synchronous' if self.synchronous else 'asynchronous')
        else:
            text = '%s of %s' % (self.engine.name, count)
        if self.wire is not None and self.num_workers > 1:
            text += ', dense gradients travel as %s and are added up in float32' % self.wire
        if self.has_local_steps:
            text += (', each with its own weights, whose mean all take after every %d steps '
                     "(not one device's gradient)" % self.every)
        return '%s; this is worker %d' % (text, self.rank)

    def warning(self) -> str:
        """One line for the plan: who else can reach the ports."""
        return ("TensorFlow's servers listen on every interface, whatever address is given, and do "
                'what anyone asks who reaches them: let only the cluster reach their ports'
                if self.has_addresses else "%s's rendezvous listens on every interface: let only "
                'the cluster reach it' % self.engine.name)


def _check(cluster):
    """Raises for arguments that do not go together, and for addresses and ranks without sense."""
    defaults = inspect.signature(Cluster).parameters
    for kind, engine in _ENGINES.items():
        for name in sorted(set(engine.arguments) - set(cluster.engine.arguments)):
            if getattr(cluster, name) != defaults[name].default:
                raise InvalidArgumentError(
                    '%s=%.80r goes with kind=%r, and this is kind=%r: leave it out, or use that '
                    'kind.' % (name, getattr(cluster, name), kind, cluster.kind))
    active, every, wire = cluster.active, cluster.every, cluster.wire
    check_cases(InvalidArgumentError, [
        (active is not None and not cluster.synchronous, 'active=%.80r, synchronous=False: '
         'asynchronous workers end each with its own data. Leave active out' % (active,)),
        (active is not None and not isinstance(active, tf.Tensor), 'active=%.80r: expected '
         'what until_all_end returned, or None' % (active,)),
        (every > 1 and (active is not None or wire is not None), 'every=%d: no gradient '
         'travels, and all workers make all steps: leave %s out' % (
             every, 'wire' if active is None else 'active')),
        (wire is not None and cluster.num_workers > MOST_GATHERED, 'wire=%r: 16-bit gradients '
         'go from each worker to each other one, which of more than %d workers are no fewer '
         "bytes than the ring's. Leave it out" % (wire, MOST_GATHERED))])
    places = [split_address(str(each).lower()) for each in cluster.workers + cluster.ps
              if cluster.has_addresses]
    twice = [place for place in places if places.count(place) > 1]
    tasks, rank = cluster.tasks(cluster.job), cluster.rank
    check_cases(ClusterError, [
        (twice, '%s:%d is the address of two tasks of the cluster: give each one its own' % (
            twice or [('', 0)])[0]),
        (not cluster.workers, 'a cluster needs a worker, and workers=() names none: set '
         "TF_CONFIG, or pass workers=['host:port', …]"),
        (cluster.is_served and not cluster.ps, "kind='ps' needs a parameter server, and there "
         "is none: name one under 'ps', or use kind='ring', which needs none"),
        (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0
         or tasks is not None and rank >= len(tasks),
         '%s %r is none of the cluster, which has %s' % (
             cluster.job, rank, '%d of them, from 0' % len(tasks) if tasks else 'none of them'))])
