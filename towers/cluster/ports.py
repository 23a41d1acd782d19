"""Addresses: ports that are free, and tasks that answer."""

import errno
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from towers.arguments import check_count
from towers.errors import ClusterError, InvalidArgumentError

FIRST, AGAIN = 5., 30.  # seconds to the first line about a wait, and from one line to the next
_PAUSE = 0.2  # seconds between two tries


def free_ports(count: int, host: str = '127.0.0.1') -> list:
    """Numbers of ports that nobody uses at the moment.

    The ports are drawn from a range that the system gives to no outgoing connection: else a
    connection that some process opens before the ports are bound could take one of them.

    Args:
      count: how many ports.
      host: the address of this machine on which the ports are to be free.

    Returns:
      List of ints, all different.

    Raises:
      ClusterError: `host` is no address of this machine, or there are not so many ports.
      InvalidArgumentError: a count below 1; a host that is no string.
    """
    check_count('count', count)
    if not isinstance(host, str) or not host:
        raise InvalidArgumentError("host=%.80r: expected the address of this machine, such as "
                                   "'127.0.0.1'." % (host,))
    sockets, lasting = [], _lasting_ports()
    try:
        for _ in range(count):
            try:
                sockets.append(socket.socket())
            except OSError as error:
                raise ClusterError('count=%d, and this process gets %d: %s.' % (
                    count, len(sockets), error)) from None
            _bind_to_one(sockets[-1], host, lasting)
        return [each.getsockname()[1] for each in sockets]
    except (OSError, UnicodeError) as error:
        raise ClusterError('%s is no address of this machine: %s. Name one that is, such as '
                           '127.0.0.1.' % (host, error)) from None
    finally:
        for each in sockets:
            each.close()


def _lasting_ports(range_file='/proc/sys/net/ipv4/ip_local_port_range'):
    """The ports from 20,000 on that the system gives to no outgoing connection, a `range`; empty
    where it gives out all of them."""
    try:
        with open(range_file) as lines:
            first = int(lines.read().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768  # Linux' default; on macOS and Windows that range begins at 49152
    return range(20000, min(first, 65536))


def _bind_to_one(free_socket, host, ports):
    """Binds a socket to one of `ports` at random, or to any where twenty of them are taken."""
    # Not the module's generator: programs that seed it alike would all draw the same ports.
    draw = random.SystemRandom()
    for _ in range(20 if ports else 0):
        try:
            free_socket.bind((host, draw.choice(ports)))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    free_socket.bind((host, 0))


def split_address(address):
    """`('host', port)` of `'host:port'`.

    Raises:
      ClusterError: the address has no port, or one that is not from 1 to 65535.
    """
    host, _, port = str(address).rpartition(':')
    # int() takes digits of all scripts, and TensorFlow's servers take those of ASCII.
    if (not host or '/' in host or not host.isprintable() or any(map(str.isspace, host))
            or not re.fullmatch('[0-9]{1,5}', port) or not 0 < int(port) < 65536):
        raise ClusterError("%.200r is no address: expected 'host:port', such as '10.0.0.1:2222'."
                           % (address,))
    bare = host[1:-1] if host[0] == '[' and host[-1] == ']' else host
    if '[' in bare or ']' in bare or ':' in bare and bare == host:
        raise ClusterError("%.200r is no address: expected 'host:port', and brackets around an "
                           "IPv6 address, such as '[::1]:2222'." % (address,))
    return bare, int(port)


def why_silent(address, timeout=2.):
    """Why what is at an address is no server of TensorFlow's at work, in words; '' if it is one.

    The system takes connections for a process that is frozen, but does not speak for it: it is
    asked as gRPC asks.
    """
    received = b''
    try:
        with socket.create_connection(split_address(address), timeout=timeout) as connection:
            connection.sendall(_HTTP2)
            while len(received) < 4:
                data = connection.recv(64)
                if not data:
                    break
                received += data
    except socket.timeout:
        return 'takes connections and says nothing: its process is frozen, or its machine is off'
    except socket.gaierror as error:
        return 'does not answer: the name of its host is not known here (%s)' % error.strerror
    except OSError as error:
        return 'does not answer: %s' % (error.strerror or error)
    return '' if received[3:4] == _SETTINGS else (
        "is no server of TensorFlow's: another program uses the port, or the address is wrong")


# The preface of a connection of HTTP/2, which gRPC speaks, and an empty frame of settings.
_HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\x04\0\0\0\0\0'
_SETTINGS = b'\x04'  # the type of the frame that a server answers with
_MOST_LOOKS = 16  # at servers at a time: that of a machine that is off takes seconds


def silent_servers(cluster):
    """The parameter servers that do not work, in words, with the reason; '' if all do."""
    with ThreadPoolExecutor(min(max(len(cluster.ps), 1), _MOST_LOOKS)) as pool:
        reasons = list(pool.map(why_silent, cluster.ps))
    return '; '.join('%s %s' % (cluster.who(rank, 'ps'), why)
                     for rank, why in enumerate(reasons) if why)


class Notice:
    """Says for whom a wait is: a line when it takes long, and every 30 seconds from then on."""

    def __init__(self, say, timeout):
        """
        Args:
          say: called with the line.
          timeout: seconds after which the wait ends; half of them pass at most before the line.
        """
        self._say, self._timeout = say, timeout
        self._due = time.monotonic() + min(FIRST, timeout / 2.)

    def look(self, what):
        """Says it, if it is time."""
        if time.monotonic() > self._due:
            self._due = time.monotonic() + AGAIN
            self._say('waiting        %s, start_timeout is %.3g s' % (what, self._timeout))


def wait_for(address, who, deadline, say):
    """A connection to an address, tried again until somebody answers.

    Args:
      address: `'host:port'`.
      who: the task at that address, in words.
      deadline: `time.monotonic()` at which to give up.
      say: called with lines about the wait.

    Returns:
      A connected `socket.socket`.

    Raises:
      ClusterError: nothing answered in time.
    """
    place, begin, reason = split_address(address), time.monotonic(), 'no time was left'
    notice = Notice(say, deadline - begin)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ClusterError(
                '%s does not answer at %s: %s, after %.0f seconds. Start it, correct its address, '
                'or give a longer start_timeout.' % (who, address, reason,
                                                    time.monotonic() - begin))
        try:
            return socket.create_connection(place, timeout=min(left, 5.))
        except socket.gaierror as error:
            reason = 'the name of its host is not known here (%s)' % error.strerror
        except OSError as error:
            reason = error.strerror or str(error)
        notice.look('for ' + who)
        time.sleep(min(_PAUSE, max(0., deadline - time.monotonic())))


def wait_for_servers(cluster, deadline, say):
    """Waits until all parameter servers work.

    Raises:
      ClusterError: one does not in time; says why.
    """
    notice = Notice(say, deadline - time.monotonic())
    while True:
        silent = silent_servers(cluster)
        if not silent:
            return
        if time.monotonic() > deadline:
            raise ClusterError('%s. Start it, correct its address, or give a longer start_timeout.'
                               % silent)
        notice.look(silent)
        time.sleep(_PAUSE)


def check_port(address, say=print):
    """Raises `ClusterError` if another process uses the port of this process's address.

    Args:
      address: of this process.
      say: called with a line if it seems to be the address of another machine.
    """
    listen(address, say).close()


def listen(address, say):
    """A socket that listens at an address; on all interfaces if none of them has that address.

    Args:
      address: `'host:port'`.
      say: called with a line that says so in that case.

    Raises:
      ClusterError: another process uses the port, or the address makes no sense.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    for name in (host, ''):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((name, port))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            # A name that stands for this machine without being an address of it: a service of
            # Kubernetes, a machine behind NAT. Or the address of another machine, by mistake.
            if name and error.errno in _NOT_OURS:
                say('address        %s cannot be listened at: %s. Unless it leads to this '
                    'machine from elsewhere, the host is not this machine: give this task '
                    'another address' % (address, error.strerror or error))
                continue
            raise ClusterError('%s cannot be listened at: %s. Another process uses the port, or '
                               'the host is not this machine: give this task another address.' % (
                                   address, error.strerror or error)) from None
    raise ClusterError('%s cannot be listened at.' % address)


_NOT_OURS = (99, 49, -2, -3, 8)  # EADDRNOTAVAIL on Linux and macOS; a name that is not known here
