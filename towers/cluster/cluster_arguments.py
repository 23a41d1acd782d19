"""What `Cluster` is told, by its arguments or by `TF_CONFIG`, and what of it is refused."""

import json

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice
from towers.cluster.machines import count_builds
from towers.cluster.sockets import split_address
from towers.cluster.ring import MOST_GATHERED, WIRES
from towers.errors import ClusterError, InvalidArgumentError
from towers.optimizers import combiner_of, name_of

JOBS = ('chief', 'worker', 'ps', 'evaluator')
_FORM = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'


def parse_tf_config(text):
    """The fields `workers`, `ps`, `job` and `rank` of `Cluster` that a `TF_CONFIG` says: a dict.

    Raises:
      ClusterError: it is no JSON, contradicts itself, or does not say which of several tasks this
        process is.
    """
    cluster, task = _read(text)
    # "master" is the chief of TensorFlow's estimators before 1.4, and of services since.
    jobs = {'chief' if job == 'master' else job: list(cluster[job] or ()) for job in cluster}
    job = task.get('type', 'worker')
    job, index = 'chief' if job == 'master' else job, task.get('index')
    unknown = [each for each in sorted(jobs) + [job] if each not in JOBS]
    workers = jobs.get('chief', []) + jobs.get('worker', [])
    count = len(jobs.get(job, ())) if not unknown else 0
    for is_wrong, why in (
            (unknown, 'has a job %r: expected some of %s' % (
                unknown[0] if unknown else '', ', '.join(JOBS))),
            (len(jobs) < len(cluster), 'has a chief and a master, which are two words for one: '
             'leave one out'),
            (len(jobs.get('chief', ())) > 1, 'has several chiefs, and one worker is the chief: '
             'leave one, and put the others under "worker"'),
            (any(jobs.values()) and not workers, 'names no worker: add "worker": ["host:port", …] '
             'to its "cluster"'),
            (workers and not task, 'has a cluster and no task: add "task": {"type": "worker", '
             '"index": 0} for this process'),
            (workers and job != 'evaluator' and index is None and count > 1,
             'has %d tasks of the job %s, and nothing says which of them this process is: give an '
             '"index" in the "task"' % (count, job)),
            (workers and job != 'evaluator' and not 0 <= (index or 0) < count,
             'gives this process the task %s %s, and its cluster has %d of them: number the tasks '
             'of each job from 0' % (job, index or 0, count))):
        if is_wrong:
            raise ClusterError('TF_CONFIG %s.' % why)
    index = (index or 0) + (len(jobs.get('chief', ())) if job == 'worker' else 0)
    return {'workers': workers, 'ps': jobs.get('ps', []),
            'job': 'worker' if job == 'chief' else job, 'rank': index}


def _read(text):
    """`(cluster, task)`: the two dicts in a `TF_CONFIG`; the index in the task is an int or None.
    """
    try:
        config = json.loads(text if text.strip() else '{}')
        cluster, task = config.get('cluster') or {}, dict(config.get('task') or {})
        lists = all(each is None or isinstance(each, list) for each in cluster.values())
    except (AttributeError, RecursionError, TypeError, ValueError):
        raise _unreadable(text, 'no such objects') from None
    index = task.get('index')
    if isinstance(index, str) and index.isdigit() and index.isascii():
        task['index'] = int(index)
    # A bool or a float would be made into the number of another task by int().
    elif index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise _unreadable(text, 'the index %.40r is no whole number' % (index,))
    if not lists:
        raise _unreadable(text, 'a job is no list of addresses')
    if task and 'type' not in task:
        raise _unreadable(text, '"task" has no "type"')
    return cluster, task


def _unreadable(text, why):
    return ClusterError('TF_CONFIG=%s cannot be read (%s): expected %s.' % (
        repr(text[:80]) + '…' * (len(text) > 80), why, _FORM))


def check_places(cluster):
    """Raises `ClusterError` for addresses and a rank of a `Cluster` that make no sense."""
    taken = {}
    for address in cluster.workers + cluster.ps if cluster.has_addresses else ():
        host, port = split_address(address)
        place = host.lower(), port
        if place in taken:
            raise ClusterError('%s is the address of two tasks of the cluster%s: give each one '
                               'its own.' % (address, '' if taken[place] == address else
                                             ', once as ' + taken[place]))
        taken[place] = address
    tasks, rank = cluster.tasks(cluster.job), cluster.rank
    for is_wrong, why in (
            (not cluster.workers, 'a cluster needs a worker, and workers=() names none: set '
             "TF_CONFIG, or pass workers=['host:port', …]"),
            (cluster.is_served and not cluster.ps, "kind='ps' needs a parameter server, and there "
             "is none: name one under 'ps', or use kind='ring', which needs none"),
            (cluster.kind == 'ring' and cluster.ps, "kind='ring' has no parameter servers, and %s "
             "is one: leave it out, or use kind='ps'" % ', '.join(map(str, cluster.ps))),
            (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0
             or tasks is not None and rank >= len(tasks),
             '%s %r is none of the cluster, which has %s' % (
                 cluster.job, rank, '%d of them, from 0' % len(tasks) if tasks else
                 'none of them'))):
        if is_wrong:
            raise ClusterError(why + '.')


def check_together(cluster, name_of_kind):
    """Raises `InvalidArgumentError` for arguments that do not go together."""
    kind, active, every, wire = cluster.kind, cluster.active, cluster.every, cluster.wire
    if wire is not None:
        check_choice('wire', wire, sorted(WIRES))
    for is_wrong, why in (
            (kind != 'ps' and not cluster.synchronous,
             "synchronous=False: a %s is synchronous. Use kind='ps'" % kind),
            (active is not None and not cluster.synchronous, 'active=%.80r, synchronous=False: '
             'asynchronous workers wait for nobody, and each ends with its own data. Leave '
             'active out, and train on the data set itself' % (active,)),
            (active is not None and not isinstance(active, tf.Tensor), 'active=%.80r: expected '
             'what until_all_end returned, or None' % (active,)),
            (every > 1 and kind != 'ring', "every=%d: local steps are those of kind='ring', "
             'and this is %r. Leave it out' % (every, kind)),
            (every > 1 and (active is not None or wire is not None), 'every=%d: no gradient '
             'travels, and all workers make all steps: leave %s out' % (
                 every, 'wire' if active is None else 'active')),
            (wire is not None and kind != 'ring', 'wire=%r: %s sends gradients as they are. '
             "Use kind='ring', or leave it out" % (wire, name_of_kind)),
            (wire is not None and cluster.num_workers > MOST_GATHERED, 'wire=%r: to be added up '
             'in float32, 16-bit gradients go from each of the %d workers to each other one, '
             "which of more than %d workers are no fewer bytes than the ring's. Leave it out"
             % (wire, cluster.num_workers, MOST_GATHERED))):
        if is_wrong:
            raise InvalidArgumentError(why + '.')


def check_build(cluster, optimizer, all_reduce, scales_loss):
    """Raises `ClusterError` for a build that a cluster cannot train.

    Args:
      optimizer: as for `build_towers`, one.
      all_reduce: as for `build_towers`, None where there is one set of variables.
      scales_loss: whether there is a loss scale.
    """
    is_served, combiner = cluster.is_served, combiner_of(optimizer)
    for is_wrong, why in (
            (cluster.job == 'evaluator', 'this process is an evaluator, which trains nothing: '
             'build what it evaluates without cluster='),
            (cluster.job == 'ps', 'this process is %s, which builds no towers: call towers.serve('
             'cluster) in it' % cluster.name),
            (cluster.kind == 'ring' and all_reduce == 'collective', "all_reduce='collective' "
             'within a machine and a ring across machines would be one group to TensorFlow: '
             "use all_reduce='copy'"),
            (is_served and all_reduce is not None, "VariablePlacement('replicated') and "
             'parameter servers both say where variables live: leave one out'),
            (cluster.has_local_steps and scales_loss, 'a loss scale follows the gradients of one '
             'worker, and with every=%d the workers would average theirs: leave one out'
             % cluster.every),
            (is_served and scales_loss and not cluster.synchronous, 'a loss scale counts steps of '
             'all workers, and these parameter servers are asynchronous: leave one out'),
            (is_served and count_builds(), 'this graph has a build with cluster= already, and '
             "parameter servers take one a graph: use kind='ring', which takes several")):
        if is_wrong:
            raise ClusterError(why + '.')
    if combiner is not None:
        raise ClusterError(
            'the optimizer %s %s, and build_towers(cluster=…) combines gradients over the '
            'machines already: twice would give other numbers. Give build_towers the '
            'optimizer that it wraps.' % (
                type(optimizer).__name__, 'is a ' + name_of(combiner) if combiner is optimizer
                else 'has a %s in it' % name_of(combiner)))
