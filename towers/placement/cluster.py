"""Which jobs and tasks the devices of a program may be of, as far as can be told before a session.
"""

import json
import os

import tensorflow.compat.v1 as tf

from towers.errors import DeviceError


def check_job(name, says_how=True):
    """Raises `DeviceError` for a device of a job or task that this program has no session of.

    Without a cluster, TensorFlow has one job, `localhost`, with one task. The cluster is read from
    `TF_CONFIG` in the environment; one that the program makes itself cannot be seen from here.

    Args:
      name: a device, as `canonical_device` gives it.
    """
    spec = tf.DeviceSpec.from_string(name)
    if spec.job is None and not spec.task and not spec.replica:
        return
    cluster = _cluster()
    if cluster is None:
        problem = 'this program has no cluster (TF_CONFIG is not set), so its one job is localhost'
        instead = tf.DeviceSpec(device_type=spec.device_type, device_index=spec.device_index)
        advice = 'Name %s' % instead.to_string().replace('/device:', '/').lower()
    else:
        if not spec.replica and (spec.job is None or (spec.task or 0) in cluster.get(spec.job, ())):
            return
        problem = "TF_CONFIG's cluster has %s" % ', '.join(
            '%d task%s of job %r' % (len(tasks), '' if len(tasks) == 1 else 's', job)
            for job, tasks in sorted(cluster.items()))
        advice = 'Name a device of one of them'
    raise DeviceError(
        '%s does not exist: %s. %s%s.' % (
            name.replace('/device:GPU:', '/gpu:').replace('/device:CPU:', '/cpu:'), problem, advice,
            ', or pass resolve_devices(…, check=False) to build the graph for a session '
            'that has it'
            if says_how else ''))


def _cluster():
    """{job: numbers of its tasks} of `TF_CONFIG`, or None."""
    try:
        jobs = json.loads(os.environ.get('TF_CONFIG') or '{}')['cluster']
        return {job: [int(task) for task in tasks] if isinstance(tasks, dict)
                else range(len(tasks)) for job, tasks in jobs.items()} or None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
