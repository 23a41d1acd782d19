"""`TF_CONFIG`: what it says about the cluster, and which place in it this process has."""

import json

from towers.arguments import check_choice
from towers.errors import ClusterError

JOBS = ('chief', 'worker', 'ps', 'evaluator')
_SHOWN = 80  # characters of TF_CONFIG in an error
_FORM = ('{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}')


def parse_tf_config(text):
    """What a `TF_CONFIG` says.

    Args:
      text: JSON; of nothing but spaces: as if there was none.

    Returns:
      `(jobs, task)`: a dict from each of `JOBS` to its list of addresses; and `(job, index)` of
      this process, with None for an index that is not there, or None.

    Raises:
      ClusterError: it is another text, or contradicts itself.
    """
    try:
        config = json.loads(text if text.strip() else '{}')
    except RecursionError:
        raise _unreadable(text, 'it is nested too deeply') from None
    except ValueError as error:
        raise _unreadable(text, error) from None
    config = _object(text, 'it', config)
    jobs = _parse_jobs(text, _object(text, '"cluster"', config.get('cluster')))
    if config.get('task') is None:
        return jobs, None
    task = _object(text, '"task"', config['task'])
    if 'type' not in task:
        raise _unreadable(text, '"task" has no "type"')
    job = 'chief' if task['type'] == 'master' else task['type']
    if job not in JOBS:
        raise ClusterError("TF_CONFIG's task is of type %r: expected one of %s." % (
            job, ', '.join(JOBS)))
    return jobs, (job, _parse_index(text, task.get('index')))


def place_of(jobs, task, workers=None, ps=None, job=None, index=None):
    """Which task this process is, in the words of `Cluster`, for which a chief is worker 0.

    A number counts within the job as the list in force does: a `TF_CONFIG` with a chief counts its
    workers without it, and `workers` with it.

    Args:
      jobs, task: as `parse_tf_config` returns them.
      workers, ps: addresses instead of those of `TF_CONFIG`; or None.
      job: one of `JOBS`, instead of the task's; or None.
      index: the number within the job, instead of the task's; or None.

    Returns:
      `(job, rank)`.

    Raises:
      ClusterError: there is no such task, or several may be meant.
      InvalidArgumentError: no such job.
    """
    if job is not None:
        check_choice('job', job, JOBS)
    said_by = 'this process' if job or index is not None or task is None else "TF_CONFIG's task"
    if workers is not None:
        if task is not None and task[0] in ('chief', 'worker'):
            task = ('worker', 0 if task[0] == 'chief' else
                    None if task[1] is None else task[1] + len(jobs['chief']))
        if job == 'chief':
            job, index = 'worker', 0 if index is None else index
        jobs = dict(jobs, chief=[], worker=workers)
    if ps is not None:
        jobs = dict(jobs, ps=ps)
    if task is None and index is None and job is None and workers is None and jobs['worker']:
        raise ClusterError('TF_CONFIG has a cluster and no task: add "task": {"type": "worker", '
                           '"index": 0} for this process.')
    if index is None and task is not None and job in (None, task[0]):
        index = task[1]
    job = job or (task[0] if task is not None else 'worker')
    if task is None and not jobs['chief'] and not jobs['worker'] or index is not None and (
            isinstance(index, bool) or not isinstance(index, int)):
        return job, index or 0  # no cluster at all, or no number: `Cluster` says what is wrong
    if index is None:
        if job != 'evaluator' and len(jobs[job]) > 1:
            raise ClusterError(
                'the cluster has %d tasks of the job %s, and nothing says which of them this '
                'process is: give a rank, from 0, or an "index" in the "task" of TF_CONFIG.' % (
                    len(jobs[job]), job))
        index = 0
    if job != 'evaluator' and not 0 <= index < len(jobs[job]):
        raise ClusterError('%s is %s %d, and its cluster has %d of them: %s.' % (
            said_by, job, index, len(jobs[job]), 'number the tasks of each job from 0'
            if jobs[job] else "name one under '%s'%s, or give this process another job" % (
                job, " (of kind='ps')" if job == 'ps' else '')))
    return ('worker', 0) if job == 'chief' else (
        job, index + (len(jobs['chief']) if job == 'worker' else 0))


def _parse_jobs(text, cluster):
    """A dict from each of `JOBS` to a list of addresses."""
    if 'master' in cluster:  # of TensorFlow's estimators before 1.4, and of services since
        if 'chief' in cluster:
            raise ClusterError("TF_CONFIG's cluster has a chief and a master, which are two "
                               'words for one: leave one out.')
        cluster = dict(cluster, chief=cluster['master'])
        del cluster['master']
    unknown = sorted(set(cluster) - set(JOBS))
    if unknown:
        raise ClusterError("TF_CONFIG's cluster has a job %r: expected some of %s." % (
            unknown[0], ', '.join(JOBS)))
    jobs = {job: _parse_addresses(text, job, cluster.get(job)) for job in JOBS}
    if len(jobs['chief']) > 1:
        raise ClusterError("TF_CONFIG's cluster has %d chiefs, and one worker is the chief: leave "
                           'one, and put the others under "worker".' % len(jobs['chief']))
    return jobs


def _parse_addresses(text, job, entries):
    if isinstance(entries, dict):  # TF's sparse form, {"0": "host:port"}
        numbers = {_parse_index(text, number): address for number, address in entries.items()}
        if sorted(numbers) != list(range(len(entries))):
            raise ClusterError("TF_CONFIG's tasks %s leave a number out: number them from 0." %
                               ', '.join(map(str, sorted(numbers))))
        return [numbers[number] for number in range(len(entries))]
    if entries is not None and not isinstance(entries, list):
        raise _unreadable(text, '%r of "%s" is no list' % (entries, job))
    return list(entries or ())


def _parse_index(text, index):
    """The number of a task, an int; None stays None."""
    if isinstance(index, str) and index.isdigit() and index.isascii():
        return int(index)
    # A bool or a float would be made into the number of another task by int().
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise _unreadable(text, 'the index %.40r is no whole number' % (index,))
    return index


def _object(text, what, value):
    """The dict that a value is; an empty one of None, but for the whole."""
    if value is None and what != 'it':
        return {}
    if not isinstance(value, dict):
        raise _unreadable(text, '%s is no object {…}' % what)
    return value


def _unreadable(text, why):
    shown = repr(text) if len(text) <= _SHOWN else repr(text[:_SHOWN]) + '…'
    return ClusterError('TF_CONFIG=%s cannot be read (%s): expected %s.' % (shown, why, _FORM))
