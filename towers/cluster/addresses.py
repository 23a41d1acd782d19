"""Addresses of a cluster's processes: `TF_CONFIG`, ports that are free, and tasks that answer."""

import contextlib
import errno
import json
import os
import random
import re
import socket
import time
import typing
from concurrent.futures import ThreadPoolExecutor

from towers.arguments import check_count
from towers.errors import ClusterError

FIRST_LINE_AFTER = 5.  # seconds to the first line about a wait
NEXT_LINE_AFTER = 30.  # seconds from one such line to the next
_PATIENCE = 2.  # seconds that a process has to answer
NOBODY_LISTENS = os.strerror(errno.ECONNREFUSED)  # the system's words for a port without a process

JOBS = ('chief', 'worker', 'ps', 'evaluator')
_FORM = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'


class Task(typing.NamedTuple):
    """What a `TF_CONFIG` says of a cluster and of this process: fields of `Cluster`."""
    workers: typing.List[str]  # addresses, the chief's first
    ps: typing.List[str]  # addresses of parameter servers
    job: str  # 'worker', 'ps' or 'evaluator'
    rank: int  # the number of this process in its job


def parse_tf_config(text: str) -> Task:
    """The `Task` that the text of a `TF_CONFIG` describes; raises `ClusterError` for a text that
    cannot be read, or that contradicts itself."""
    config = _read(text)
    addresses = _addresses_of_jobs(config.cluster)
    job = _job_named(config.task.get('type', 'worker'))
    _check_jobs(sorted(addresses) + [job])
    chiefs = addresses.get('chief', [])
    if len(chiefs) > 1:
        raise ClusterError('TF_CONFIG has several chiefs, and one worker is the chief: leave one, '
                           'and put the others under "worker".')
    workers = chiefs + addresses.get('worker', [])
    servers = addresses.get('ps', [])
    if workers and not config.task:
        raise ClusterError('TF_CONFIG has a cluster and no task: add "task": {"type": "worker", '
                           '"index": 0} for this process.')
    is_outside = job == 'evaluator'  # no task of the cluster: it may have any index
    if workers and not is_outside:  # without workers there is no cluster: `Cluster` refuses that
        _check_index(job, config.task_index, len(addresses.get(job, [])))
    rank = config.task_index or 0  # the only task of a job needs no index
    if job == 'worker':  # the chief, if there is one, is worker 0
        rank += len(chiefs)
    if job == 'chief':
        job = 'worker'
    return Task(workers, servers, job, rank)


def _check_jobs(jobs: typing.Iterable[str]) -> None:
    """Raises `ClusterError` for a job that is not known."""
    for name in jobs:
        if name not in JOBS:
            raise ClusterError('TF_CONFIG has a job %.80r: expected some of %s.' % (
                name, ', '.join(JOBS)))


def _addresses_of_jobs(cluster: dict) -> typing.Dict[str, typing.List[str]]:
    """The addresses of each job of the object `cluster` of a `TF_CONFIG`."""
    jobs: typing.Dict[str, typing.List[str]] = {}
    for name, addresses in cluster.items():
        jobs.setdefault(_job_named(name), []).extend(addresses or ())
    return jobs


def _job_named(name: str) -> str:
    """The job with this name in a `TF_CONFIG`. The chief is also called "master": in TensorFlow's
    estimators before 1.4, and in services since."""
    return 'chief' if name == 'master' else name


def _check_index(job: str, index: typing.Optional[int], count: int) -> None:
    """Raises `ClusterError` unless `index` is the number of one of the `count` tasks of a job. None
    counts as 0 where the job has one task."""
    if index is None and count > 1:
        raise ClusterError(
            'TF_CONFIG has %d tasks of the job %s, and nothing says which of them this process is: '
            'give an "index" in the "task".' % (count, job))
    if not 0 <= (index or 0) < count:
        raise ClusterError(
            'TF_CONFIG gives this process the task %s %s, and its cluster has %d of them: number '
            'the tasks of each job from 0.' % (job, index or 0, count))


class _Config(typing.NamedTuple):
    """The JSON objects of a `TF_CONFIG`; an object that it does not have is {}."""
    cluster: dict  # {job: list of addresses, or None}
    task: dict  # with a `type`, if it is not empty
    task_index: typing.Optional[int]  # None if the task has no index


def _read(text: str) -> _Config:
    """The `_Config` of the text of a `TF_CONFIG`; raises `ClusterError` for a text that is no JSON,
    or whose JSON does not have the form `_FORM`."""
    if not isinstance(text, str):
        raise ClusterError('TF_CONFIG=%.80r of type %s: expected a text, %s.' % (
            text, type(text).__name__, _FORM))
    config = _object_of_json(text) if text.strip() else {}
    cluster = _object_in(config, 'cluster', text)
    task = _object_in(config, 'task', text)
    for addresses in cluster.values():
        if addresses is not None and not isinstance(addresses, list):
            raise _unreadable(text, 'a job is no list of addresses')
    index = _number_of_task(task.get('index'), text)
    if task and 'type' not in task:
        raise _unreadable(text, '"task" has no "type"')
    return _Config(cluster, task, index)


def _object_in(config: dict, key: str, text: str) -> dict:
    """The JSON object under a `key` of a `TF_CONFIG`; {} where the key is missing, or its value is
    null. Raises `ClusterError`, which quotes `text`, for a value that is no object."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise _unreadable(text, 'no such objects')
    return value


def _object_of_json(text: str) -> dict:
    """The JSON object in the text of a `TF_CONFIG`; raises `ClusterError` if it has none."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        reason = 'no JSON: %s at character %d' % (error.msg, error.pos + 1)
        raise _unreadable(text, reason) from None
    except (RecursionError, ValueError):
        # JSON that Python does not read: nested too deep, or a number of thousands of digits.
        raise _unreadable(text, 'no such objects') from None
    if not isinstance(config, dict):
        raise _unreadable(text, 'no such objects')
    return config


def _number_of_task(index: typing.Any, text: str) -> typing.Optional[int]:
    """The index of a task as an int; None if the task has no index. Some services write the index
    as a text, `"0"`.

    Raises `ClusterError` for another value in the `text` of a `TF_CONFIG`: `int()` would make a
    bool or a float into the number of another task.
    """
    if isinstance(index, str) and index.isdigit() and index.isascii():
        return int(index)
    if index is not None and type(index) is not int:
        raise _unreadable(text, 'the index %.40r is no whole number' % (index,))
    return index


def _unreadable(text: str, reason: str) -> ClusterError:
    """The error about a text that is no `TF_CONFIG`."""
    shown = repr(text[:80]) + ('…' if len(text) > 80 else '')
    return ClusterError('TF_CONFIG=%s cannot be read (%s): expected %s.' % (shown, reason, _FORM))


_PORTS = range(20000, 32768)  # the system gives these ports to no outgoing connection
_ADDRESS = re.compile(r'(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5})')


def free_ports(count: int) -> list:
    """List of `count` different ports that nobody uses, of a range that no outgoing connection
    gets.

    Raises:
      ClusterError: fewer than `count` ports are free.
    """
    check_count('count', count)
    # Not the module's generator: programs that seed it alike would all draw the same ports.
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    ports: typing.List[int] = []
    with contextlib.ExitStack() as stack:  # each port is held until all are found
        while len(ports) < count and candidates:
            port = candidates.pop()
            with contextlib.suppress(OSError):  # in use; or this process has too many sockets
                holder = stack.enter_context(contextlib.closing(socket.socket()))
                holder.bind(('127.0.0.1', port))
                ports.append(port)
    if len(ports) < count:
        raise ClusterError('count=%d: %d ports are free for this process.' % (count, len(ports)))
    return ports


def split_address(address: typing.Any) -> typing.Tuple[str, int]:
    """`('host', port)` of `'host:port'`; raises `ClusterError` for any other value."""
    match = _ADDRESS.fullmatch(str(address))
    if match is not None:
        host, digits = match.groups()
        port = int(digits)
        is_port = 0 < port < 65536
        if is_port and host.isprintable():  # so that an error can show the host in one line
            return host.strip('[]'), port  # an address of IPv6 is in brackets
    raise ClusterError("%.200r is no address: expected 'host:port', such as '10.0.0.1:2222' or "
                       "'[::1]:2222'." % (address,))


def listen(address: str) -> socket.socket:
    """A socket that listens on the port of an address, on all interfaces. The host of the address
    may be no interface of this machine, but a name that leads here from other machines, such as a
    service of Kubernetes."""
    host, port = split_address(address)
    listener = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    # Without this option the system keeps a port for a minute when its process has ended.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(('', port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ClusterError('%s cannot be listened at: %s. Another process uses the port: give this '
                           'task another one.' % (address, error.strerror)) from None
    return listener


# gRPC speaks HTTP/2: a client begins with the preface and a frame of settings, which is empty here.
# The server answers with a frame of its own settings. Byte 3 of a frame is its type.
_HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\x04\0\0\0\0\0'
_TYPE_OF_SETTINGS = b'\x04'


def why_silent(address: str, timeout: float = _PATIENCE) -> str:
    """Why no server of TensorFlow's is at work at an address, in words; '' if one is. The server
    has to answer as gRPC does. That the address takes a connection proves nothing: the system takes
    connections for a frozen process, too."""
    received = b''
    try:
        with socket.create_connection(split_address(address), timeout=timeout) as connection:
            connection.sendall(_HTTP2)
            while len(received) < 4:  # up to the type of the first frame
                data = connection.recv(64)
                if not data:
                    break
                received += data
    except socket.timeout:
        return 'takes connections and says nothing: its process is frozen, or its machine is off'
    except (OSError, ValueError) as error:  # `ValueError`: the host is no name of a host
        return _not_answering(error)
    type_of_first_frame = received[3:4]
    if type_of_first_frame == _TYPE_OF_SETTINGS:
        return ''
    return "is no server of TensorFlow's: another program uses the port, or the address is wrong"


def _not_answering(error: Exception) -> str:
    """What to say of a task whose connection failed: `'does not answer: Connection refused'`."""
    return 'does not answer: %s' % (getattr(error, 'strerror', None) or error)


def silent_servers(cluster: typing.Any) -> str:
    """The parameter servers that do not work, in words, each with the reason; '' if all
    work."""
    with ThreadPoolExecutor(16) as pool:  # a look at a machine that is off takes seconds
        reasons = list(pool.map(why_silent, cluster.ps))
    return '; '.join('%s %s' % (cluster.who(rank, 'ps'), reason)
                     for rank, reason in enumerate(reasons) if reason)


def connect(address: str, who: str, deadline: float, say: typing.Callable) -> socket.socket:
    """A socket that is connected with a task.

    Args:
      address: of the task.
      who: the task in words.
      deadline: the time, by `time.monotonic()`, after which this raises `ClusterError`.
      say: called with lines about the wait.
    """
    host_and_port = split_address(address)

    def attempt() -> typing.Tuple[typing.Optional[socket.socket], str]:
        """An attempt for `wait_until`."""
        try:
            return socket.create_connection(host_and_port, timeout=_PATIENCE), ''
        except (OSError, ValueError) as error:  # `ValueError`: the host is no name of a host
            return None, '%s %s' % (who, _not_answering(error))
    return wait_until(attempt, deadline, say)


def wait_until(attempt: typing.Callable, deadline: float, say: typing.Callable) -> typing.Any:
    """The result of `attempt()`, which is called again until nothing is wrong.

    Args:
      attempt: function that gives `(result, '')`, or `(None, reason)` if something is wrong.
      deadline: the time, by `time.monotonic()`, after which this raises `ClusterError` with the
        reason.
      say: called with lines about the wait.
    """
    started = time.monotonic()
    start_timeout = deadline - started  # the argument of `join` by which the deadline was set
    say_at = started + FIRST_LINE_AFTER
    while True:
        result, reason = attempt()
        if not reason:
            return result
        now = time.monotonic()
        if now > deadline:
            raise ClusterError('%s. Start it, correct its address, or give a longer start_timeout.'
                               % reason)
        if now > say_at:
            say_at = now + NEXT_LINE_AFTER
            say('waiting        %s, start_timeout is %.3g s' % (reason, start_timeout))
        time.sleep(0.2)
