"""Addresses of a cluster's processes: `TF_CONFIG`, ports that are free, and tasks that answer."""

import contextlib
import errno
import json
import os
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from towers.arguments import check_cases, check_count
from towers.errors import ClusterError

FIRST, AGAIN = 5., 30.  # seconds to the first line about a wait, and from one line to the next
_PATIENCE = 2.  # seconds for an answer
REFUSED = os.strerror(errno.ECONNREFUSED)  # nobody listens at the port

JOBS = ('chief', 'worker', 'ps', 'evaluator')
_FORM = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'


def parse_tf_config(text):
    """The fields `workers`, `ps`, `job` and `rank` of `Cluster` that a `TF_CONFIG` says: a dict."""
    cluster, task = _read(text)
    # "master" is the chief of TensorFlow's estimators before 1.4, and of services since.
    jobs = {}
    for job, addresses in cluster.items():
        jobs.setdefault('chief' if job == 'master' else job, []).extend(addresses or ())
    job = task.get('type', 'worker')
    job, index = 'chief' if job == 'master' else job, task.get('index')
    unknown = [each for each in sorted(jobs) + [job] if each not in JOBS]
    workers = jobs.get('chief', []) + jobs.get('worker', [])
    count = len(jobs.get(job, ())) if not unknown else 0
    check_cases(ClusterError, [
        (unknown, 'TF_CONFIG has a job %r: expected some of %s' % (
            unknown[0] if unknown else '', ', '.join(JOBS))),
        (len(jobs.get('chief', ())) > 1, 'TF_CONFIG has several chiefs, and one worker is the '
         'chief: leave one, and put the others under "worker"'),
        (workers and not task, 'TF_CONFIG has a cluster and no task: add "task": {"type": '
         '"worker", "index": 0} for this process'),
        (workers and job != 'evaluator' and index is None and count > 1,
         'TF_CONFIG has %d tasks of the job %s, and nothing says which of them this process is: '
         'give an "index" in the "task"' % (count, job)),
        (workers and job != 'evaluator' and not 0 <= (index or 0) < count,
         'TF_CONFIG gives this process the task %s %s, and its cluster has %d of them: number the '
         'tasks of each job from 0' % (job, index or 0, count))])
    index = (index or 0) + (len(jobs.get('chief', ())) if job == 'worker' else 0)
    return {'workers': workers, 'ps': jobs.get('ps', []),
            'job': 'worker' if job == 'chief' else job, 'rank': index}


def _read(text):
    """The dicts `cluster` and `task` of a `TF_CONFIG`; the index in the task is an int or None."""
    try:
        config = json.loads(text if text.strip() else '{}')
        cluster, task = config.get('cluster') or {}, dict(config.get('task') or {})
        lists = all(each is None or isinstance(each, list) for each in cluster.values())
    except (AttributeError, RecursionError, TypeError, ValueError):
        cluster, task, lists = {}, {}, None
    index = task.get('index')
    if isinstance(index, str) and index.isdigit() and index.isascii():
        task['index'] = index = int(index)
    for is_wrong, why in (
            (lists is None, 'no such objects'), (lists is False, 'a job is no list of addresses'),
            # A bool or a float would be made into the number of another task by int().
            (type(index) not in (int, type(None)), 'the index %.40r is no whole number' % (index,)),
            (task and 'type' not in task, '"task" has no "type"')):
        if is_wrong:
            raise ClusterError('TF_CONFIG=%s cannot be read (%s): expected %s.' % (
                repr(text[:80]) + '…' * (len(text) > 80), why, _FORM))
    return cluster, task


_LASTING = range(20000, 32768)  # the system gives these ports to no outgoing connection
_ADDRESS = re.compile(r'(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5})')


def free_ports(count: int) -> list:
    """Different numbers of ports that nobody uses, of a range that no outgoing connection gets.

    Raises:
      ClusterError: there are not so many ports.
    """
    check_count('count', count)
    # Not the module's generator: programs that seed it alike would all draw the same ports.
    drawn, found = random.SystemRandom().sample(_LASTING, len(_LASTING)), []
    with contextlib.ExitStack() as stack:
        while len(found) < count and drawn:
            port = drawn.pop()
            with contextlib.suppress(OSError):  # in use; or this process has too many sockets
                stack.enter_context(contextlib.closing(socket.socket())).bind(('127.0.0.1', port))
                found.append(port)
    if len(found) < count:
        raise ClusterError('count=%d: %d ports are free for this process.' % (count, len(found)))
    return found


def split_address(address):
    """`('host', port)` of `'host:port'`; `ClusterError` for what is no address."""
    found = _ADDRESS.fullmatch(str(address))
    if found is None or not found.group(1).isprintable() or not 0 < int(found.group(2)) < 65536:
        raise ClusterError("%.200r is no address: expected 'host:port', such as '10.0.0.1:2222' or "
                           "'[::1]:2222'." % (address,))
    return found.group(1).strip('[]'), int(found.group(2))


def listen(address):
    """A socket that listens on the port of an address, on all interfaces: the host may be a name
    that leads here from elsewhere alone, such as a service of Kubernetes."""
    host, port = split_address(address)
    listener = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(('', port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ClusterError('%s cannot be listened at: %s. Another process uses the port: give this '
                           'task another one.' % (address, error.strerror)) from None
    return listener


# HTTP/2, which gRPC speaks: the preface, an empty frame of settings, and the type of the answer's.
_HTTP2, _SETTINGS = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\x04\0\0\0\0\0', b'\x04'


def why_silent(address, timeout=_PATIENCE):
    """Why what is at an address is no server of TensorFlow's at work, in words; '' if it is one. It
    is asked as gRPC asks: the system takes connections for a frozen process, too."""
    received, data = b'', b'-'
    try:
        with socket.create_connection(split_address(address), timeout=timeout) as connection:
            connection.sendall(_HTTP2)
            while data and len(received) < 4:
                data = connection.recv(64)
                received += data
    except socket.timeout:
        return 'takes connections and says nothing: its process is frozen, or its machine is off'
    except (OSError, ValueError) as error:
        return 'does not answer: %s' % (getattr(error, 'strerror', None) or error)
    return '' if received[3:4] == _SETTINGS else (
        "is no server of TensorFlow's: another program uses the port, or the address is wrong")


def silent_servers(cluster):
    """The parameter servers that do not work, in words, with the reason; '' if all do."""
    with ThreadPoolExecutor(16) as pool:  # a look at a machine that is off takes seconds
        reasons = list(pool.map(why_silent, cluster.ps))
    return '; '.join('%s %s' % (cluster.who(rank, 'ps'), why)
                     for rank, why in enumerate(reasons) if why)


def connect(address, who, deadline, say):
    """A socket that is connected with the task `who` at an address; `ClusterError` when there is
    none at the deadline, by `time.monotonic()`."""
    place = split_address(address)

    def attempt():
        try:
            return socket.create_connection(place, timeout=_PATIENCE), ''
        except (OSError, ValueError) as error:  # of a host that is no name
            return None, '%s does not answer: %s' % (who, getattr(error, 'strerror', None) or error)
    return wait_until(attempt, deadline, say)


def wait_until(attempt, deadline, say):
    """What `attempt()` gives, `(result, '')`, tried again while it gives `(None, why not)`."""
    timeout = deadline - time.monotonic()
    say_at = deadline - timeout + FIRST
    while True:
        result, why = attempt()
        if not why:
            return result
        now = time.monotonic()
        if now > deadline:
            raise ClusterError('%s. Start it, correct its address, or give a longer start_timeout.'
                               % why)
        if now > say_at:
            say_at = now + AGAIN
            say('waiting        %s, start_timeout is %.3g s' % (why, timeout))
        time.sleep(0.2)
