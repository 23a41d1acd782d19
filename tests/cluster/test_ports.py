"""Addresses."""

import contextlib
import socket
import threading
import time

import pytest

import towers
from towers.cluster.ports import _lasting_ports, check_server, split_address
from towers.errors import ClusterError


@pytest.mark.parametrize('address, expected', [
    ('a:1', ('a', 1)), ('10.0.0.1:65535', ('10.0.0.1', 65535)), ('[::1]:2222', ('::1', 2222))])
def test_host_and_port(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize('address', [
    'a', ':1', 'a:b', 'a:0', 'a:65536', 'a:1.5', None, 'http://a:1', 'a b:5', 'a:5\n', 'a:+5',
    'a:\u0663\u0663'])
def test_what_is_no_address(address):
    with pytest.raises(ClusterError, match="is no address: expected 'host:port', such as"):
        split_address(address)


def test_an_ipv6_address_stands_in_brackets():
    with pytest.raises(ClusterError, match=r"is no address: .* such as '\[::1\]:2222'"):
        split_address('::1:5')


def test_no_outgoing_connection_gets_a_free_port():
    ports = towers.free_ports(5)
    assert len(set(ports)) == 5
    if _lasting_ports():
        assert all(port in _lasting_ports() for port in ports)


@pytest.mark.parametrize('says, expected', [
    (None, 'takes connections and does not answer: its process is frozen'),
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', "is no server of TensorFlow's: another program"),
    (b'', "is no server of TensorFlow's: another program")])
def test_what_answers_for_a_server_and_is_none(says, expected):
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)

        def answer():
            connection, _ = listener.accept()
            with contextlib.closing(connection):
                connection.recv(100)
                if says is None:
                    time.sleep(1.)
                else:
                    connection.sendall(says)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = '127.0.0.1:%d' % listener.getsockname()[1]
        with pytest.raises(ClusterError, match=expected) as error:
            check_server(address, 'ps 0', time.monotonic() + 0.5)
        assert address in str(error.value) and 'ps 0' in str(error.value)
        thread.join()
