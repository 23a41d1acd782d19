"""Messages over a socket: in pieces, several at once, and what is none."""

import contextlib
import socket

import pytest

from towers.cluster import json_messages as messages
from towers.cluster.json_messages import Lines
from towers.errors import ClusterError


@contextlib.contextmanager
def connected():
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        yield one, Lines(other)


def test_a_message_may_come_in_pieces_and_several_at_once():
    with connected() as (sender, receiver):
        sender.sendall(b'{"number": 1}\n{"number": 2}\n{"num')
        assert receiver.take() == [{'number': 1}, {'number': 2}]
        sender.sendall(b'ber": ')
        assert receiver.take() == []
        sender.sendall(b'3}\n')
        assert receiver.take() == [{'number': 3}]
        Lines(sender).send({'number': 4})
        assert receiver.take() == [{'number': 4}]


@pytest.mark.parametrize('line', [b'[1]', b'{', b'\xff'])
def test_a_line_that_is_no_object(line):
    with connected() as (sender, receiver), pytest.raises(ClusterError, match='is no message'):
        sender.sendall(line + b'\n')
        receiver.take()
