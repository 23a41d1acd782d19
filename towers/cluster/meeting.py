"""The workers of a ring meet before the first step, and compare what they are about to train.

Worker 0 listens at its own address, before TensorFlow's server takes that port; the others connect
and send their fingerprints. A worker with another fingerprint is refused, by name. The connections
stay open: `Watch` uses them to know which workers are alive.
"""

import socket
import time

from towers.cluster.fingerprint import difference
from towers.cluster.lines import Lines, readable
from towers.cluster.ports import split_address, wait_for
from towers.errors import ClusterError


def check_port(address):
    """Raises `ClusterError` if another process uses the port of this process's address."""
    _listener(address).close()


def meet(cluster, own, deadline, say=print):
    """Waits until all workers are there and have the same fingerprint.

    Args:
      cluster: `Cluster`.
      own: dict, the fingerprint of this worker, see `fingerprint`.
      deadline: `time.monotonic()` at which to give up.
      say: called with a line about a worker that is refused.

    Returns:
      Dict from ranks to `Lines`: on worker 0 the connections with all other workers, elsewhere the
      connection with worker 0.

    Raises:
      ClusterError: a port in use, a worker that does not come or answer, or another fingerprint.
    """
    if cluster.rank == 0:
        return _receive_all(cluster, own, deadline, say)
    check_port(cluster.workers[cluster.rank])
    lines = Lines(wait_for(cluster.workers[0], cluster.who(0), deadline))
    try:
        lines.send({'type': 'hello', 'rank': cluster.rank, 'fingerprint': own})
        answer = _answer(cluster, lines, deadline)
    except (EOFError, OSError):
        raise ClusterError('%s has closed the connection: it is at work already, or was ended. '
                           'A ring starts with all of its workers.' % cluster.who(0)) from None
    if answer['type'] == 'welcome':
        return {0: lines}
    lines.close()
    raise ClusterError('%s refuses %s: %s.' % (cluster.who(0), cluster.who(cluster.rank),
                                               answer.get('why')))


def all_ready(cluster, connections, deadline):
    """Waits until every worker's server is up; a worker calls this when its own server is.

    Raises:
      ClusterError: a worker has ended, or its server is not up in time.
    """
    try:
        if cluster.rank != 0:
            connections[0].send({'type': 'ready'})
            _answer(cluster, connections[0], deadline)
            return
        for rank in sorted(connections):
            try:
                message = connections[rank].receive(deadline)
            except (EOFError, OSError):
                raise ClusterError('%s has ended before the first step: see what it says.'
                                   % cluster.who(rank)) from None
            if message is None:
                raise ClusterError('%s has not started its server in time: give a longer '
                                   'start_timeout.' % cluster.who(rank))
        for lines in connections.values():
            lines.send({'type': 'go'})
    except (EOFError, OSError):
        raise ClusterError('a worker has ended before the first step: see what it says.') from None


def _answer(cluster, lines, deadline):
    try:
        answer = lines.receive(deadline)
    except ClusterError as error:
        raise ClusterError('what answers at the address of %s is no worker: %s. Another program '
                           'uses the port, or the address is wrong.' % (
                               cluster.who(0), error)) from None
    if answer is None:
        raise ClusterError('%s waits for other workers, and start_timeout is over: start them, or '
                           'give a longer one.' % cluster.who(0))
    return answer


def _receive_all(cluster, own, deadline, say):
    listener = _listener(cluster.workers[0])
    welcome, unknown = {}, []
    try:
        with listener:
            while len(welcome) < cluster.num_workers - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ClusterError(
                        'there %s no word of %s within start_timeout: start %s, correct the '
                        'address, or give a longer one.' % _missing(cluster, welcome))
                sockets = [listener] + [lines.socket for lines in unknown]
                for ready in readable(sockets, min(0.5, left)):
                    if ready is listener:
                        unknown.append(Lines(listener.accept()[0]))
                        continue
                    lines = next(each for each in unknown if each.socket is ready)
                    try:
                        messages = lines.take()
                    except (EOFError, OSError, ClusterError):  # no worker, but a stranger
                        unknown.remove(lines)
                        lines.close()
                        continue
                    if messages:
                        unknown.remove(lines)
                        _judge(cluster, own, messages[0], lines, welcome, say)
        for lines in welcome.values():
            lines.send({'type': 'welcome'})
    except OSError:
        raise ClusterError('a worker has ended before the first step: see what it says.') from None
    except ClusterError:
        for lines in welcome.values():
            _refuse(lines, 'it gave up waiting for others')
        raise
    finally:
        for lines in unknown:
            lines.close()
    return welcome


def _judge(cluster, own, message, lines, welcome, say):
    rank, other = message.get('rank'), message.get('fingerprint')
    if message.get('type') != 'hello' or not isinstance(other, dict):
        lines.close()
        return
    why = difference(own, other)
    if why is None and not (isinstance(rank, int) and 0 < rank < cluster.num_workers):
        why = 'its rank is %r, and the ring has %d workers' % (rank, cluster.num_workers)
    if why is None and rank in welcome:
        why = 'worker %d is here already: two processes have the same place in the cluster' % rank
    if why is None:
        welcome[rank] = lines
    else:
        say('refused        worker %s: %s' % (rank, why))
        _refuse(lines, why)


def _refuse(lines, why):
    try:
        lines.send({'type': 'refused', 'why': why})
    except OSError:
        pass  # it is gone already
    lines.close()


def _missing(cluster, welcome):
    missing = [rank for rank in range(1, cluster.num_workers) if rank not in welcome]
    return ('is', ', '.join(cluster.who(rank) for rank in missing),
            'it' if len(missing) == 1 else 'them')


def _listener(address):
    """A socket that listens at an address; on all interfaces if none of them has that address."""
    host, port = split_address(address)
    listener = None
    for name in (host, ''):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((name, port))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            # A name that stands for this machine without being an address of it: a service of
            # Kubernetes, a machine behind NAT.
            if name and error.errno in _NOT_OURS:
                continue
            raise ClusterError('%s cannot be listened at: %s. Another process uses the port, or '
                               'the host is not this machine: give this task another address.' % (
                                   address, error.strerror or error)) from None
    raise ClusterError('%s cannot be listened at.' % address)


_NOT_OURS = (99, 49, -2, -3, 8)  # EADDRNOTAVAIL on Linux and macOS; a name that is not known here
