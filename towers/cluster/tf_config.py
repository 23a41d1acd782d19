"""`TF_CONFIG`: what it says about the cluster, and which place in it this process has."""

import json

from towers.errors import ClusterError

JOBS = ('chief', 'worker', 'ps', 'evaluator')
_SHOWN = 80  # characters of TF_CONFIG in an error
_FORM = ('{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}')


def parse_tf_config(text):
    """What a `TF_CONFIG` says, in the words of `Cluster`, for which a chief is worker 0.

    Args:
      text: JSON; of nothing but spaces: as if there was none.

    Returns:
      Dict of the fields `workers`, `ps`, `job` and `rank` of `Cluster`.

    Raises:
      ClusterError: it is another text, contradicts itself, or does not say which of several tasks
        this process is.
    """
    try:
        config = json.loads(text if text.strip() else '{}')
    except RecursionError:
        raise _unreadable(text, 'it is nested too deeply') from None
    except ValueError as error:
        raise _unreadable(text, error) from None
    config = _object(text, 'it', config)
    jobs = _parse_jobs(text, _object(text, '"cluster"', config.get('cluster')))
    workers = jobs['chief'] + jobs['worker']
    if any(jobs.values()) and not workers:
        raise ClusterError('TF_CONFIG names no worker: its "cluster" has %s alone. Add "worker": '
                           '["host:port", …] to it.' % ' and '.join(
                               '"%s"' % name for name in sorted(jobs) if jobs[name]))
    if config.get('task') is None and workers:
        raise ClusterError('TF_CONFIG has a cluster and no task: add "task": {"type": "worker", '
                           '"index": 0} for this process.')
    job, index = _parse_task(text, _object(text, '"task"', config.get('task')))
    if workers and job != 'evaluator':
        count = len(jobs[job])
        if index is None and count > 1:
            raise ClusterError(
                'the cluster has %d tasks of the job %s, and nothing says which of them this '
                'process is: give an "index" in the "task" of TF_CONFIG.' % (count, job))
        if not 0 <= (index or 0) < count:
            raise ClusterError("TF_CONFIG's task is %s %d, and its cluster has %d of them: %s." % (
                job, index or 0, count, 'number the tasks of each job from 0' if count else
                "name one under '%s', or give this process another job" % job))
    index = (index or 0) + (len(jobs['chief']) if job == 'worker' else 0)
    return {'workers': workers, 'ps': jobs['ps'], 'job': 'worker' if job == 'chief' else job,
            'rank': index}


def _parse_task(text, task):
    """`(job, index)`, with None for an index that is not there."""
    if task and 'type' not in task:
        raise _unreadable(text, '"task" has no "type"')
    job = task.get('type', 'worker')
    job = 'chief' if job == 'master' else job
    if job not in JOBS:
        raise ClusterError("TF_CONFIG's task is of type %r: expected one of %s." % (
            job, ', '.join(JOBS)))
    return job, _parse_index(text, task.get('index'))


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
