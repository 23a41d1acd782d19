"""The workers of a ring meet before the first step, and compare what they are about to train.

Worker 0 listens at its own address, before TensorFlow's server takes that port; the others connect
and send digests of their fingerprints. A worker with another one gets worker 0's fingerprint, and
answers what its own differs by: no stranger makes worker 0 read much. One that trains something
else is refused, by name. The connections stay open: `Watch` uses them to know which workers are
alive.
"""

import hashlib
import json
import socket
import time

from towers.cluster.signature import difference
from towers.cluster.json_messages import MOST_OF_WORKER_0, Lines, readable
from towers.cluster.ports import split_address, wait_for
from towers.cluster.wait_notice import REFUSED_WAITS, Waiting
from towers.errors import ClusterError


def check_port(address, say=print):
    """Raises `ClusterError` if another process uses the port of this process's address.

    Args:
      address: of this process.
      say: called with a line if it seems to be the address of another machine.
    """
    listener, doubt = _listener(address)
    listener.close()
    if doubt is not None:
        say(doubt)


def meet(cluster, own, deadline, say=print):
    """Waits until all workers are there and have the same fingerprint.

    Args:
      cluster: `Cluster`.
      own: dict, the fingerprint of this worker, see `fingerprint`.
      deadline: `time.monotonic()` at which to give up.
      say: called with a line about a worker that is refused or waited for, or about the own
        address.

    Returns:
      Dict from ranks to `Lines`: on worker 0 the connections with all other workers, elsewhere the
      connection with worker 0.

    Raises:
      ClusterError: a port in use, a worker that does not come or answer, or another fingerprint.
    """
    if cluster.rank == 0:
        return _receive_all(cluster, own, deadline, say)
    check_port(cluster.workers[cluster.rank], say)
    timeout = deadline - time.monotonic()
    with Waiting(lambda: cluster.who(0), timeout, say):
        lines = Lines(wait_for(cluster.workers[0], cluster.who(0), deadline), MOST_OF_WORKER_0)
    try:
        with Waiting(lambda: 'the other workers, as %s does' % cluster.who(0), timeout, say):
            lines.send({'type': 'hello', 'rank': cluster.rank, 'digest': _digest(own)})
            answer = _answer(cluster, lines, deadline)
            if answer['type'] == 'compare':
                lines.send(_compared(cluster, answer.get('fingerprint'), own))
                answer = _answer(cluster, lines, deadline)
    except (EOFError, OSError):
        raise ClusterError('%s has closed the connection: it is at work already, or was ended. '
                           'A ring starts with all of its workers.' % cluster.who(0)) from None
    if answer['type'] == 'welcome':
        return {0: lines}
    lines.close()
    raise ClusterError('%s refuses %s: %s.' % (cluster.who(0), cluster.who(cluster.rank),
                                               answer.get('why')))


def _digest(fingerprint):
    text = json.dumps(fingerprint, sort_keys=True)
    return hashlib.sha256(text.encode('utf-8')).hexdigest()


def _compared(cluster, theirs, own):
    """The answer to worker 0's fingerprint."""
    try:
        why = difference(theirs, own)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        why = 'worker 0 sends no fingerprint of a worker'
    return {'type': 'compared', 'rank': cluster.rank, 'digest': _digest(theirs), 'why': why or ''}


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
        raise ClusterError('%s waits for other workers, or is frozen, and start_timeout is over: '
                           'see what it says, start them, or give a longer one.' % cluster.who(0))
    return answer


def _receive_all(cluster, own, deadline, say):
    listener, doubt = _listener(cluster.workers[0])
    if doubt is not None:
        say(doubt)
    welcome, unknown = {}, []
    missing = _Missing(cluster, welcome)
    try:
        with listener, Waiting(missing.look, deadline - time.monotonic(), say):
            while len(welcome) < cluster.num_workers - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise missing.error(doubt)
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
                        lines.later = messages[1:]
                        if not _judge(cluster, own, messages[0], lines, welcome, say,
                                      missing.refused):
                            unknown.remove(lines)
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


def _judge(cluster, own, message, lines, welcome, say, refused=None):
    """Answers a message of one that is no member yet; whether another message is to come."""
    rank, kind, digest = message.get('rank'), message['type'], _digest(own)
    if kind == 'who':  # of a worker 0 that has another list of workers
        _refuse(lines, 'worker 0 is here')
        return False
    if kind not in ('hello', 'compared') or rank is None:
        lines.close()
        return False
    why = message.get('why')
    if not 0 < rank < cluster.num_workers:
        why = 'its rank is %d, and the ring has %d workers' % (rank, cluster.num_workers)
    elif rank in welcome:
        why = 'worker %d is here already: two processes have the same place in the cluster' % rank
    elif message.get('digest') != digest:
        if kind == 'hello':
            return _sent(lines, {'type': 'compare', 'fingerprint': own})
        why = 'it has compared something else'
    if why:
        say('refused        worker %d: %s' % (rank, why))
        if refused is not None:
            refused[rank] = why
        _refuse(lines, why)
        return False
    welcome[rank] = lines
    if refused is not None:
        refused.pop(rank, None)
    return False


def _sent(lines, message):
    """Whether a message could be sent."""
    try:
        lines.send(message)
        return True
    except OSError:  # it is gone already, or takes nothing
        lines.close()
        return False


def _refuse(lines, why):
    _sent(lines, {'type': 'refused', 'why': why})
    lines.close()


class _Missing:
    """The workers that have not come to worker 0, and what is known of them.

    Attributes:
      refused: dict from ranks to why a worker was refused that said that it had this rank, and
        has not come again as it should.
    """

    def __init__(self, cluster, welcome):
        self.refused = {}
        self._cluster, self._welcome = cluster, welcome
        self._seen = {}

    def look(self):
        """Looks at their addresses, which may take seconds; the workers in words."""
        for rank in self._ranks():
            self._seen[rank] = _what_is_at(self._cluster.workers[rank])
        return self._named(self._ranks())

    def error(self, doubt):
        """`ClusterError` about them.

        Args:
          doubt: what `_listener` says of the address of worker 0, where they look for it; or None.
        """
        silent = [rank for rank in self._ranks() if rank not in self.refused]
        clauses = [] if doubt is None or self._welcome else [doubt.split(None, 1)[1]]
        if silent:
            clauses.append('%shere is no word of %s within start_timeout: start %s, correct the '
                           'address, or give a longer one' % (
                               'T' if clauses else 't', self._named(silent),
                               'it' if len(silent) == 1 else 'them'))
        for rank in sorted(self.refused)[:8]:
            clauses.append('worker %d was refused: %s' % (rank, self.refused[rank]))
        return ClusterError('. '.join(clause.rstrip('.') for clause in clauses) + '.')

    def _ranks(self):
        return [rank for rank in range(1, self._cluster.num_workers) if rank not in self._welcome]

    def _named(self, ranks):
        return ', '.join(self._cluster.who(rank) + (
            REFUSED_WAITS if rank in self.refused else self._seen.get(rank, '')) for rank in ranks)


def _what_is_at(address):
    """What can be said of the address of a worker that does not come, to be added to its name.

    A worker that has a rank connects to worker 0, and does not listen before the start, but for the
    moment in which it looks whether its port is free: what closes the connection says nothing.
    """
    try:
        with socket.create_connection(split_address(address), timeout=2.) as connection:
            lines = Lines(connection)
            try:
                lines.send({'type': 'who'}, timeout=2.)
                answer = lines.receive(time.monotonic() + 2.)
            except ClusterError:
                return _OTHER % 'answers'
            except (EOFError, OSError):
                return _OTHER % 'answers' if lines.has_received else ''
    except socket.gaierror as error:
        return ' (the name of its host is not known here: %s)' % error.strerror
    except OSError:
        return ''
    if answer is None:
        return _OTHER % ('answers' if lines.has_received else 'takes connections')
    if answer.get('type') != 'refused':
        return ''
    return (' (a worker 0 answers there: the lists of workers are not the same on all machines, or '
            'two processes have the number 0)')


_OTHER = ' (something else %s there: another program, or a worker of an earlier start)'


def _listener(address):
    """Listens at an address; on all interfaces if none of them has that address.

    Returns:
      `(socket, line)`: a line that says so in that case, else None.

    Raises:
      ClusterError: another process uses the port, or the address makes no sense.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    doubt = None
    for name in (host, ''):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((name, port))
            listener.listen(64)
            return listener, doubt
        except OSError as error:
            listener.close()
            # A name that stands for this machine without being an address of it: a service of
            # Kubernetes, a machine behind NAT. Or the address of another machine, by mistake.
            if name and error.errno in _NOT_OURS:
                doubt = ('address        %s cannot be listened at: %s. Unless it leads to this '
                         'machine from elsewhere, the host is not this machine: give this task '
                         'another address' % (address, error.strerror or error))
                continue
            raise ClusterError('%s cannot be listened at: %s. Another process uses the port, or '
                               'the host is not this machine: give this task another address.' % (
                                   address, error.strerror or error)) from None
    raise ClusterError('%s cannot be listened at.' % address)


_NOT_OURS = (99, 49, -2, -3, 8)  # EADDRNOTAVAIL on Linux and macOS; a name that is not known here
