"""`Cluster`: which machines train together, how, and which of them this process is."""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_choice, check_count, check_flag, check_instance, check_number,
                              combiner_of, name_of)
from towers.cluster.collectives import BUFFER_MB, MOST_GATHERED, WIRES
from towers.cluster.horovod import HorovodMachines, load_horovod
from towers.cluster.machines import check_goes_with_others
from towers.cluster.parameter_servers import ServedMachines
from towers.cluster.ports import split_address
from towers.cluster.ring import RingMachines
from towers.cluster.tf_config import parse_tf_config
from towers.errors import ClusterError, InvalidArgumentError

KINDS = ('ring', 'ps', 'horovod')


class Cluster(collections.namedtuple('Cluster', [
        'kind', 'workers', 'ps', 'job', 'rank', 'synchronous', 'uneven', 'active', 'wire',
        'buffer_mb', 'every', 'compare'])):
    """The machines that train one model, each with towers of its own: `build_towers(cluster=…)`.

    The towers' gradients are combined within each machine, then once across the machines. With
    `n_w` of the step's n examples on worker w of W, and `g_w` the gradient of the mean loss there,

        mean:  sum_w (n_w / n) g_w            (the mean loss of all examples on one device)
        sum:   N sum_w (n_w / n) g_w          with N = W * N_w towers in all

    Attributes:
      kind: `'ring'` (TensorFlow's ring all-reduce: every worker holds the weights), `'ps'`
        (TensorFlow's parameter servers hold them), `'horovod'`.
      workers: tuple of `'host:port'`, the chief first; with Horovod a None for each worker.
      ps: tuple of `'host:port'`; empty but for `'ps'`.
      job: `'worker'`, `'ps'` or `'evaluator'`: the job of this process.
      rank: the number of this process in its job. 0 unless it is given: each process of several
        has to give its own, or to be made by `from_tf_config`, which refuses to guess.
      synchronous: for `'ps'`: whether a step waits for the gradients of all workers.
      uneven: whether workers may have batches of different size. A batch without a static size
        counts as uneven; static sizes that differ are refused at the start unless this is True,
        of asynchronous workers, too.
      active: float scalar tensor of this process, 1 or 0: with 0 its batch counts as empty; see
        `until_all_end`. None: always 1. Not with asynchronous workers.
      wire: for a ring of 2 or 3 workers: `'float16'` or `'bfloat16'`, in which dense gradients
        travel, in half the bytes; they are added up in float32. None: as they are.
      buffer_mb: for `'ring'`: the size of the buffers in which gradients travel together, a number
        of MiB. A buffer is sent when all of its gradients are there.
      every: for `'ring'`: 1, or K: each worker makes K steps on its own weights by its own
        gradients, then all take the mean of their weights and optimizer state.
        With K > 1 a step is no longer one device's on all examples.
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
        check_choice('kind', kind, KINDS)
        check_choice('job', job, ('worker', 'ps', 'evaluator'))
        check_choice('compare', compare, ('program', 'variables'))
        for name, value in (('workers', workers), ('ps', ps)):
            check_instance(name, value, (list, tuple), "a list of addresses, 'host:port'")
        check_flag('synchronous', synchronous)
        check_flag('uneven', uneven)
        check_number('buffer_mb', buffer_mb, above=0, expected='a number of MiB')
        check_count('every', every)
        if kind == 'horovod':
            hvd = load_horovod()
            workers, ps, rank = (None,) * hvd.size(), (), hvd.rank()
        self = super(Cluster, cls).__new__(
            cls, kind, tuple(workers), tuple(ps), job, rank, synchronous, uneven, active, wire,
            buffer_mb, every, compare)
        self._check_places()
        self._check_steps()
        self._check_local_steps()
        self._check_wire()
        return self

    def _check_places(self):
        """Raises for addresses and a rank that make no sense."""
        kind, taken = self.kind, {}
        for address in self.workers + self.ps if kind != 'horovod' else ():
            host, port = split_address(address)
            place = host.lower(), port
            if place in taken:
                raise ClusterError('%s is the address of two tasks of the cluster%s: give each one '
                                   'its own.' % (address, '' if taken[place] == address else
                                                 ', once as ' + taken[place]))
            taken[place] = address
        if not self.workers:
            raise ClusterError('a cluster needs a worker, and workers=() names none: set '
                               "TF_CONFIG, or pass workers=['host:port', …].")
        if kind == 'ps' and not self.ps:
            raise ClusterError("kind='ps' needs a parameter server, and there is none: name one "
                               "under 'ps', or use kind='ring', which needs none.")
        if kind == 'ring' and self.ps:
            raise ClusterError("kind='ring' has no parameter servers, and %s is one: leave it out, "
                               "or use kind='ps'." % self.ps[0])
        tasks, rank = {'worker': self.workers, 'ps': self.ps}.get(self.job), self.rank
        if (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0
                or tasks is not None and rank >= len(tasks)):
            raise ClusterError('%s %r is none of the cluster, which has %s.' % (
                self.job, rank, '%d of them, from 0' % len(tasks) if tasks else 'none of them'))

    def _check_steps(self):
        """Raises for arguments about the workers of a step that do not go together."""
        synchronous, active = self.synchronous, self.active
        if self.kind != 'ps' and not synchronous:
            raise InvalidArgumentError(
                "synchronous=False: a %s is synchronous. Use kind='ps'." % self.kind)
        if active is not None and not synchronous:
            raise InvalidArgumentError(
                'active=%.80r, synchronous=False: asynchronous workers wait for nobody, and each '
                'ends with its own data. Leave active out, and train on the data set itself.' % (
                    active,))
        if active is not None and not isinstance(active, tf.Tensor):
            raise InvalidArgumentError('active=%.80r: expected what until_all_end returned, or '
                                       'None.' % (active,))

    def _check_local_steps(self):
        """Raises for what does not go with steps of each worker alone."""
        if self.every > 1 and self.kind != 'ring':
            raise InvalidArgumentError("every=%d: local steps are those of kind='ring', and this "
                                       'is %r. Leave it out.' % (self.every, self.kind))
        if self.every > 1 and (self.active is not None or self.wire is not None):
            raise InvalidArgumentError(
                'every=%d: no gradient travels, and all workers make all steps: leave %s out.' % (
                    self.every, 'wire' if self.active is None else 'active'))

    def _check_wire(self):
        """Raises for a type of gradients on the wire that this kind does not have."""
        if self.wire is None:
            return
        check_choice('wire', self.wire, sorted(WIRES))
        if self.kind != 'ring':
            raise InvalidArgumentError(
                "wire=%r: %s sends gradients as they are. Use kind='ring', or leave it out." % (
                    self.wire, 'Horovod' if self.kind == 'horovod' else 'a parameter server'))
        if self.num_workers > MOST_GATHERED:
            raise InvalidArgumentError(
                'wire=%r: to be added up in float32, 16-bit gradients go from each of the %d '
                'workers to each other one, which of more than %d workers are no fewer bytes than '
                "the ring's. Leave it out." % (self.wire, self.num_workers, MOST_GATHERED))

    @classmethod
    def _make(cls, values):  # namedtuple's `_replace` calls it: the new tuple is checked, too
        return cls(*values)

    @classmethod
    def from_tf_config(cls, kind=None, environment=None, **fields):
        """The cluster of the environment's `TF_CONFIG`, as TF's users write it.

            {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]},
             "task": {"type": "worker", "index": 0}}

        The chief, if one is named, is worker 0 here, and the others follow. `master` is the older
        word for it.

        Args:
          kind: see the class; None: `'ps'` where there are parameter servers, else `'ring'`.
          environment: dict; None for `os.environ`.
          **fields: of `Cluster`, but for those that `TF_CONFIG` says; None for the default.

        Returns:
          A `Cluster`.

        Raises:
          ClusterError: `TF_CONFIG` cannot be read or contradicts itself, names no workers, or does
            not say which of several this process is.
          InvalidArgumentError: a field that `TF_CONFIG` says.
        """
        said = parse_tf_config((os.environ if environment is None else environment).get(
            'TF_CONFIG') or '{}')
        fields = {name: value for name, value in fields.items() if value is not None}
        for name in sorted(set(said) & set(fields)):
            raise InvalidArgumentError('%s=%.80r: TF_CONFIG says it. Leave it out, or make '
                                       'Cluster(kind, workers, …).' % (name, fields[name]))
        if kind is None:
            kind = 'ps' if said['ps'] else 'ring'
        return cls(kind, **dict(said, **fields))

    @property
    def num_workers(self):
        """How many workers there are, the chief included."""
        return len(self.workers)

    @property
    def workers_a_step(self):
        """How many workers' gradients are in an update: one's of an asynchronous worker, and in
        local steps."""
        return self.num_workers if self.synchronous and not self.has_local_steps else 1

    @property
    def waits(self):
        """Whether a step of several workers begins on all of them, or on none."""
        return self.synchronous and self.num_workers > 1

    @property
    def has_local_steps(self):
        """Whether each of several workers makes `every` steps on its own weights."""
        return self.every > 1 and self.num_workers > 1

    @property
    def is_chief(self):
        """Whether this process saves checkpoints, evaluates and speaks for all."""
        return self.job == 'worker' and self.rank == 0

    @property
    def served_rank(self):
        """The number of this worker, where several make one step on parameter servers; or None."""
        return self.rank if self.kind == 'ps' and self.waits else None

    @property
    def has_copies(self):
        """Whether each of several workers has the variables, and makes the update itself."""
        return self.kind != 'ps' and self.num_workers > 1

    @property
    def name(self):
        """`'worker 1 of 3'`; of an evaluator `'evaluator 0'`."""
        tasks = {'ps': self.ps, 'worker': self.workers}.get(self.job)
        return '%s %d%s' % (self.job, self.rank, '' if tasks is None else ' of %d' % len(tasks))

    def who(self, rank, job='worker'):
        """`'worker 1 (10.0.0.2:2222)'`."""
        addresses = self.ps if job == 'ps' else self.workers
        return '%s %d%s' % (job, rank, '' if addresses[rank] is None else ' (%s)' % addresses[rank])

    def spec(self):
        """`tf.train.ClusterSpec` of the jobs `worker` and `ps`."""
        jobs = {'worker': list(self.workers)}
        if self.ps:
            jobs['ps'] = list(self.ps)
        return tf.train.ClusterSpec(jobs)

    def session_config(self, config):
        """A new `tf.ConfigProto` with the settings for a session or server of this cluster.

        Args:
          config: a `tf.ConfigProto`, see `towers.session_config`.
        """
        changed = tf.ConfigProto()
        changed.CopyFrom(config)
        del changed.device_filters[:]
        own = '/job:%s/task:%d' % (self.job, self.rank)
        if self.kind == 'ring':
            # Without this filter, TF 1.15 waits for the devices of all workers, and hangs.
            changed.device_filters.append(own)
            changed.experimental.collective_group_leader = '/job:worker/replica:0/task:0'
        elif self.kind == 'ps':
            # A worker that is gone must not keep the others from making a session.
            changed.device_filters.extend(['/job:ps'] + ([own] if self.job == 'worker' else
                                                         ['/job:worker']))
        else:
            hvd = load_horovod()
            if hvd.local_size() > 1:
                changed.gpu_options.visible_device_list = str(hvd.local_rank())
        return changed

    def machines(self, examples, reduction):
        """The object that combines the build's gradients across machines; makes no operation.

        Args:
          examples: number of examples in this machine's batch: an int, or an int scalar tensor.
          reduction: as for `build_towers`.
        """
        kind = {'ring': RingMachines, 'ps': ServedMachines, 'horovod': HorovodMachines}[self.kind]
        return kind(self, examples, reduction)

    def check_build(self, optimizer, all_reduce, scales_loss):
        """Raises `ClusterError` for a build that this cluster cannot train; makes no operation.

        Args:
          optimizer: as for `build_towers`, one.
          all_reduce: as for `build_towers`, None where there is one set of variables.
          scales_loss: whether there is a loss scale.
        """
        if self.job == 'evaluator':
            raise ClusterError('this process is an evaluator, which trains nothing: build what it '
                               'evaluates without cluster=.')
        if self.job != 'worker':
            raise ClusterError('this process is %s, which builds no towers: call towers.serve('
                               'cluster) in it.' % self.name)
        if self.kind == 'ring' and all_reduce == 'collective':
            raise ClusterError("all_reduce='collective' within a machine and a ring across "
                               "machines would be one group to TensorFlow: use all_reduce='copy'.")
        if self.kind == 'ps' and all_reduce is not None:
            raise ClusterError("VariablePlacement('replicated') and parameter servers both say "
                               'where variables live: leave one out.')
        if self.has_local_steps and scales_loss:
            raise ClusterError('a loss scale follows the gradients of one worker, and with every='
                               '%d the workers would average theirs: leave one out.' % self.every)
        if self.kind == 'ps' and scales_loss and not self.synchronous:
            raise ClusterError('a loss scale counts steps of all workers, and these parameter '
                               'servers are asynchronous: leave one out.')
        check_goes_with_others(self)
        combiner = combiner_of(optimizer)
        if combiner is not None:
            raise ClusterError(
                'the optimizer %s %s, and build_towers(cluster=…) combines gradients over the '
                'machines already: twice would give other numbers. Give build_towers the '
                'optimizer that it wraps.' % (
                    type(optimizer).__name__, 'is a ' + name_of(combiner) if combiner is optimizer
                    else 'has a %s in it' % name_of(combiner)))

    def describe(self):
        """One line for the plan: `'ring of 3 workers, this is worker 0'`."""
        count = '%d worker%s' % (self.num_workers, '' if self.num_workers == 1 else 's')
        if self.kind == 'ps':
            text = '%s on %d parameter server%s, %s' % (
                count, len(self.ps), '' if len(self.ps) == 1 else 's',
                'synchronous' if self.synchronous else 'asynchronous')
        else:
            text = '%s of %s%s' % (
                {'ring': "TensorFlow's ring", 'horovod': 'Horovod'}[self.kind], count,
                '' if self.wire is None or self.num_workers == 1 else
                ', dense gradients travel as %s and are added up in float32' % self.wire)
            if self.has_local_steps:
                text += (', each with its own weights, whose mean all take after every %d steps '
                         "(not one device's gradient)" % self.every)
        return '%s; this is worker %d' % (text, self.rank)

    def warning(self):
        """One line for the plan: who else can reach the servers."""
        if self.kind == 'horovod':
            return "Horovod's rendezvous listens on every interface: let only the cluster reach it"
        return ("TensorFlow's servers listen on every interface, whatever address is given, and do "
                'what anyone asks who reaches them: let only the cluster reach their ports')
