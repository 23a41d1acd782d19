"""`make bench`: its command line; wrong peers are found."""

import json

import pytest
import tensorflow.compat.v1 as tf

from benchmarks import bench, contest, graph_peers, programs, same_work, turns
from benchmarks.workloads import WORKLOADS


@pytest.mark.slow
def test_quick_run_of_the_tiniest_workload(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.contest, 'PEERS', ('towers', 'one_device'))
    path = str(tmp_path / 'bench.json')
    bench.main(['--quick', '--only=steps', '--workloads=tiny', '--results=' + path])
    with open(path) as text:
        values = json.load(text)
    cell_of_two = values['steps']['tiny']['2']
    assert cell_of_two['failures'] == {}
    assert sorted(cell_of_two['ratios']) == ['one_device']
    assert all(len(each) == 3 for each in cell_of_two['seconds'].values())
    assert 'a step of towers over the other' in capsys.readouterr().out


# ---- benchmarks/same_work and the comparison in benchmarks/contest: wrong peers are found --------

RIGHT = {'losses': [2., 1.9, 1.8], 'checksum': {'change': 3., 'projection': -1.}}


def changed(**values):
    return dict(RIGHT, **values)


@pytest.mark.parametrize('other, text', [
    (changed(losses=[2., 1.9, 1.7]), 'loss of step 3 is 1.7, not 1.8'),
    (changed(losses=[2., float('nan'), 1.8]), 'loss of step 2 is nan, not 1.9'),
    (changed(losses=[2., 1.9]), 'only 2 of 3 losses'),
    (changed(checksum={'change': 3., 'projection': 1.}), 'projection of the weights is 1, not -1'),
])
def test_what_differs_is_named(other, text):
    assert same_work.difference(RIGHT, other) == text


def contender(label, record):
    made = turns.Contender(label, [{}])
    made.losses, made.checksum = record['losses'], record['checksum']
    return made


def test_a_wrong_peer_is_taken_out_loudly():
    wrong = contender('slim', changed(checksum={'change': 6., 'projection': -2.}))
    others = [contender('one_device@0', RIGHT), contender('towers', RIGHT)]
    contest.compare(others + [wrong], WORKLOADS['small_conv'])
    assert wrong.failure == ('DIFFERS from one_device@0: change of the weights is 6, not 3')
    assert [each.failure for each in others] == [None, None]


def program_of(peer, workload=WORKLOADS['tiny'], num_towers=2, **options):
    tf.get_variable_scope().set_use_resource(True)
    parts = graph_peers.BUILDERS[peer](workload, workload.arrays(16), num_towers, **options)
    return programs.GraphProgram(parts)


def record_of(program):
    try:
        return {'losses': [program.step() for _ in range(3)],
                'checksum': programs.checksum(program.trainable_weights())}
    finally:
        program.close()


@pytest.fixture
def one_device():
    with tf.Graph().as_default():
        return record_of(program_of('one_device', num_towers=1))


@pytest.mark.slow
@pytest.mark.parametrize('peer', ['towers', 'recipe', 'chain', 'slim', 'add_n'])
def test_the_graph_peers_do_what_one_device_does(peer, one_device):
    assert same_work.difference(one_device, record_of(program_of(peer))) is None
