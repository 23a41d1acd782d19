"""`towers.cluster.messages` and `connection`: messages over a socket, and what a worker answers to a
signature.
What the two sides say to each other is in `test_coordinator.py`."""

import contextlib
import json
import socket

import pytest

from towers.cluster.connection import _answer_to_signature
from towers.cluster.messages import Lines

SAME = {'values': {'kind of cluster': 'ring', 'every': 2}, 'settings': {'--seed': 1}, 'builds': [{
    'values': {}, 'variables': {'w': 'float32 (2,)'}, 'gradients': {'w': 'dense float32'},
    'state': {}, 'shapes': [], 'loss': [], 'update': []}]}


@pytest.mark.parametrize('change', [
    {'builds': [[]]}, {'builds': [3]}, {'settings': [1]}, {'builds': [{'gradients': 1}]},
    {'servers': 7}])
def test_a_signature_of_any_other_form_is_refused(change):
    assert _answer_to_signature(dict(SAME, **change), SAME)['why'] == (
        'worker 0 sends no signature of a worker')


def test_a_message_may_come_in_pieces_and_several_at_once():
    messages = [{'type': 'lost', 'rank': rank} for rank in (1, 2, 3)]
    first, second, third = [json.dumps(each).encode() + b'\n' for each in messages]
    sender, other = socket.socketpair()
    with contextlib.closing(sender), contextlib.closing(Lines(other)) as receiver:
        sender.sendall(first + second + third[:5])
        assert receiver.take() == messages[:2]
        sender.sendall(third[5:9])
        assert receiver.take() == []
        sender.sendall(third[9:] + first + second)
        assert receiver.take() == messages[2:] + messages[:2]
        for _ in range(2):  # the same data twice, at the beginning of a message and within one
            sender.sendall(first)
            assert receiver.take() == messages[:1]
        sender.sendall(first[:-1])
        assert receiver.take() == []
        sender.sendall(first[-1:] + first)
        assert receiver.take() == [messages[0], messages[0]]
