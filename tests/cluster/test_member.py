"""How a worker that cannot be in the cluster is told, and tells the others."""

import contextlib
import socket
import sys
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import addresses as addresses_module, coordinator
from towers.cluster.addresses import connect
from towers.cluster.connection import START_AGAIN, Connection
from towers.cluster.messages import Lines, digest_of
from towers.cluster.servers import start_server
from towers.errors import ClusterError
from one_process import addresses, halving, together
from test_coordinator import SAME, Member

slow = pytest.mark.slow


def failures(workers, start_timeout=20.):
    """The errors with which two workers of a ring end that join it."""
    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = halving(cluster)
            with pytest.raises(ClusterError) as raised:
                with towers.join(cluster, built, start_timeout=start_timeout, dead_after=20.,
                                 say=lambda line: None, on_lost=lambda error: None) as member, \
                        member.session():
                    pass
            return str(raised.value)
    return together(work, 2)


@slow
def test_a_host_name_by_which_a_worker_is_not_reached_is_named_on_all():
    first, second = addresses(2)
    wrong = second.replace('127.0.0.1', 'no-such-host.invalid')
    of_0, of_1 = failures([first, wrong], 3.)
    expected = 'worker 1 (%s) is not reached by this address from worker 0 (%s): it does not answer' % (
        wrong, first)
    assert of_0.startswith(expected) and 'correct its address' in of_0
    assert expected in of_1 and of_1.count(START_AGAIN) == 1


@slow
def test_a_worker_whose_port_is_taken_tells_worker_0():
    workers = addresses(2)
    with socket.socket() as taken:
        taken.bind(('', int(workers[1].rpartition(':')[2])))
        taken.listen(1)
        of_0, of_1 = failures(workers)
    why = '%s cannot be listened at: Address already in use' % workers[1]
    assert of_1.startswith(why)
    assert of_0.startswith('worker 0 (%s) does not take worker 1 (%s) in: %s' % (
        workers[0], workers[1], why))


@slow
def test_a_line_about_a_wait_is_in_a_log_at_once(graph, monkeypatch, tmp_path):
    monkeypatch.setattr(addresses_module, 'FIRST_LINE_AFTER', .1)
    workers, log = addresses(2), tmp_path / 'log'
    with open(str(log), 'w') as opened:
        monkeypatch.setattr(sys, 'stdout', opened)
        cluster = towers.Cluster('ring', workers, rank=1)
        with pytest.raises(ClusterError), towers.join(cluster, halving(cluster), start_timeout=1.):
            pass
        assert log.read_text().startswith('waiting        worker 0 (%s)' % workers[0])


def test_a_second_worker_is_told_so_by_the_server_of_a_run_that_has_begun():
    workers = addresses(2)
    cluster = towers.Cluster('ring', workers)
    server = start_server(cluster, cluster.session_config(tf.ConfigProto()))
    with pytest.raises(ClusterError, match='does not take worker 1 .* its run has begun, so that '
                                           'worker 1 is here already: two processes'):
        Member(workers, 1, SAME)
    del server


def test_a_passed_on_loss_says_once_what_to_do():
    own, other = socket.socketpair()
    with own, other:
        connection = Connection(towers.Cluster('ring', ['a:1', 'b:2']), SAME, own, 600., print,
                                print)
        connection.lose(1, 'it has ended: b is lost. %s.' % START_AGAIN)
        text = str(connection.error())
        connection.close()
    assert text == 'worker 1 (b:2) is lost: it has ended: b is lost. %s.' % START_AGAIN


@pytest.mark.slow
def test_a_worker_that_was_frozen_is_not_told_to_wait_for_itself(monkeypatch):
    """It says nothing any more, which worker 0 is told."""
    monkeypatch.setattr(coordinator, 'FIRST_LINE_AFTER', .1)
    workers, said = addresses(2), []

    def work(rank):
        if rank == 0:
            member = Member(workers, 0, dead_after=2., said=said)
            member.lost()
            return None
        cluster = towers.Cluster('ring', workers, rank=1)
        lines = Lines(connect(workers[0], cluster.who(0), time.monotonic() + 60., print))
        lines.send({'type': 'hello', 'rank': 1, 'digest': digest_of(SAME)})
        lines.send({'type': 'alive', 'in_step': False})
        received = []
        with contextlib.suppress(OSError):
            while not any(message['type'] == 'lost' for message in received):
                received += lines.take()
        lines.close()
        return received
    _, received = together(work, 2)
    assert any('for worker 1' in line for line in said)
    assert not any(message['type'] == 'waiting' for message in received)
