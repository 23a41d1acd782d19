"""`towers.cluster.addresses`: `TF_CONFIG`, ports, and what answers at an address."""

import contextlib
import json
import re
import socket

import pytest

import towers
from towers.cluster.addresses import listen, parse_tf_config, split_address, why_silent
from towers.errors import ClusterError
from cluster_runs import NO_WORKER, answering

ONE, TWO, THREE = 'a:1', 'b:2', 'c:3'


def test_all_forms_of_tf_config():
    text = json.dumps({'cluster': {'master': [ONE], 'worker': [TWO, THREE], 'ps': ['d:4'],
                                   'evaluator': None},
                       'task': {'type': 'master', 'index': '0'}, 'environment': 'cloud'})
    assert parse_tf_config(text) == ([ONE, TWO, THREE], ['d:4'], 'worker', 0)
    for text in ('{}', ' \n', '{"task": null, "cluster": null}'):
        assert parse_tf_config(text) == ([], [], 'worker', 0)
    text = json.dumps({'cluster': {'chief': [ONE], 'worker': [TWO]}, 'task': {'type': 'worker'}})
    assert parse_tf_config(text).rank == 1


@pytest.mark.parametrize('text, expected', [
    ('[]', 'no such objects'), ('{"cluster": [1]}', 'no such objects'), ('{"a":' * 100000, 'no'),
    ('{"cluster": {"worker": ["a:1"]}', "no JSON: Expecting ',' delimiter at character 32"),
    ("{'cluster': {}}", 'no JSON: Expecting property name enclosed in double quotes at char'),
    ('{"cluster": {"worker": "a:1"}}', 'a job is no list of addresses'),
    ('{"task": {"type": "worker", "index": "\u0663"}}', 'is no whole number'),
    ('{"task": {"type": "worker", "index": NaN}}', 'the index nan is no whole number')])
def test_what_cannot_be_read_is_said_without_words_of_python(text, expected):
    with pytest.raises(ClusterError) as error:
        parse_tf_config(text)
    found = str(error.value)
    assert 'cannot be read (' in found and expected in found
    assert found.startswith('TF_CONFIG=%r%s cannot' % (text[:80], '…' * (len(text) > 80)))
    assert 'expected {"cluster": {"worker": ["host:port"]}' in found
    assert 'attribute' not in found and 'argument' not in found and len(found) < 300


@pytest.mark.slow
@pytest.mark.parametrize('says, expected', [
    (None, 'takes connections and says nothing: its process is frozen'),
    (NO_WORKER, "is no server of TensorFlow's: another program"),
    (b'', "(is no server of TensorFlow's: another program|does not answer: Connection reset)")])
def test_what_answers_for_a_server_and_is_none(says, expected):
    with answering(says) as address:
        assert re.match(expected, why_silent(address, 0.5))


def test_a_port_in_use_is_a_message():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen(1)
        with pytest.raises(ClusterError, match='Address already in use'):
            listen('127.0.0.1:%d' % taken.getsockname()[1])


def test_host_and_port():
    for address, expected in (('a:1', ('a', 1)), ('10.0.0.1:65535', ('10.0.0.1', 65535)),
                              ('[::1]:2222', ('::1', 2222))):
        assert split_address(address) == expected
    for address in ('a', ':1', 'a:b', 'a:0', 'a:65536', 'a:1.5', None, 'http://a:1', 'a b:5',
                    'a:5\n', 'a:+5', 'a:\u0663\u0663', '::1:5', 'a\x1b:5'):
        with pytest.raises(ClusterError, match="is no address: expected 'host:port', "):
            split_address(address)


def test_no_outgoing_connection_gets_a_free_port():
    ports = towers.free_ports(5)
    assert len(set(ports)) == 5 and all(20000 <= port < 32768 for port in ports)
