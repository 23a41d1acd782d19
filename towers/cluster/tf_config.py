"""`TF_CONFIG`: what it says about the cluster, and which place in it this process has."""

import json

from towers.errors import ClusterError

JOBS = ('chief', 'worker', 'ps', 'evaluator')
_FORM = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'


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
