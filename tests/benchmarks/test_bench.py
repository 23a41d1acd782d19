"""What `make bench` makes of what it measures: overlap, aims, report, results; its command line."""

import json

import pytest
import tensorflow.compat.v1 as tf

from benchmarks import (aims, bench, contest, graph_peers, overlap, programs, same_work, turns)
from benchmarks.report import report
from benchmarks.workloads import WORKLOADS

MACHINE = {'cpu': 'a processor', 'cores': 2, 'instructions': ['avx2'], 'memory_gb': 8.,
           'tensorflow': '2.21.0', 'python': '3.11.7', 'load': 0.1}


def spread(value):
    return {'median': value, 'least': 0.9 * value, 'most': 1.1 * value}


def cell(batch=64, failures=None, **ratios):
    milliseconds = {'towers': spread(10.)}
    milliseconds.update({peer: spread(10. / ratio) for peer, ratio in ratios.items()})
    return {'batch': batch, 'ratios': {peer: spread(ratio) for peer, ratio in ratios.items()},
            'milliseconds': milliseconds, 'cpu_milliseconds': milliseconds,
            'failures': failures or {}, 'threads': {'one_device': 1}}


def results_of(**parts):
    return dict({'machine': MACHINE}, **parts)


def verdict(results, text):
    found = [each for each in aims.judge(results) if text in each.text]
    assert len(found) == 1
    return found[0]


def test_overlap_counts_what_ran_before_the_last_gradient():
    times = [overlap.OperationTime(*each) for each in [
        ('tower_0/MatMul', 0, 5), ('tower_0/gradients/a', 5, 30), ('tower_1/gradients/a', 5, 40),
        ('tower_0/gradients/b', 30, 60), ('tower_1/gradients/b', 40, 100),
        ('combine_gradients/AddN', 50, 70),     # before
        ('combine_gradients/AddN_1', 90, 110),  # half before
        ('combine_gradients/AddN_2', 100, 140)]]
    found = overlap.overlapped(times)
    assert found['share'] == pytest.approx(30. / 80)
    assert found['combination'] == pytest.approx(0.08) and found['backward'] == pytest.approx(0.1)
    assert found['operations'] == 3


def test_an_aim_met_missed_and_not_measured():
    results = results_of(steps={'small_conv': {'4': cell(mirrored_graph=0.79)}})
    met = verdict(results, 'graph, small net')
    assert (met.worst, met.missed) == (0.79, [])
    results['steps']['small_conv']['4'] = cell(mirrored_graph=0.81)
    assert verdict(results, 'graph, small net').missed == ['small_conv, 4 towers']
    assert verdict(results_of(), 'graph, small net').worst is None


def test_report_says_ratios_failures_and_noise():
    text = report(results_of(
        machine=dict(MACHINE, load=3.),
        steps={'digits': {'2': cell(recipe=0.5, failures={'slim': 'DIFFERS from recipe: loss'})}},
        left_out={'steps, lstm, 8 towers': 'the time given was over'}))
    assert '0.50 (0.45..0.55)' in text
    assert 'digits, 2 towers: slim: *** DIFFERS from recipe: loss ***' in text
    assert 'WARNING: the load average was above 0.5' in text
    assert 'left out: steps, lstm, 8 towers: the time given was over' in text


@pytest.mark.slow
def test_quick_run_of_the_tiniest_workload(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.contest, 'PEERS', ('towers', 'one_device'))
    path = str(tmp_path / 'bench.json')
    bench.main(['--quick', '--only=steps,overlap', '--workloads=tiny', '--results=' + path])
    with open(path) as text:
        values = json.load(text)
    cell_of_two = values['steps']['tiny']['2']
    assert cell_of_two['failures'] == {}
    assert sorted(cell_of_two['ratios']) == ['one_device']
    assert all(len(each) == 3 for each in cell_of_two['seconds'].values())
    assert 0 <= values['overlap']['tiny']['2']['share'] <= 1
    assert 'a step of towers over the other' in capsys.readouterr().out


# ---- benchmarks/same_work and the comparison in benchmarks/contest: wrong peers are found --------

RIGHT = {'losses': [2., 1.9, 1.8], 'checksum': {'change': 3., 'projection': -1.}}


def changed(**values):
    return dict(RIGHT, **values)


@pytest.mark.parametrize('other, text', [
    (changed(losses=[2., 1.9, 1.7]), 'loss of step 3 is 1.7, not 1.8'),
    (changed(losses=[2., float('nan'), 1.8]), 'loss of step 2 is nan, not 1.9'),
    (changed(losses=[2., 1.9]), 'only 2 of 3 losses'),
    (changed(checksum={'change': 6., 'projection': -1.}), 'change of the weights is 6, not 3'),
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


@pytest.mark.parametrize('peer', ['towers', 'recipe', 'chain'] + [
    pytest.param(peer, marks=pytest.mark.slow) for peer in ('slim', 'add_n')])
@pytest.mark.slow
def test_the_graph_peers_do_what_one_device_does(peer, one_device):
    assert same_work.difference(one_device, record_of(program_of(peer))) is None


# ---- benchmarks/turns: spread, ratios, and the turns of contenders that need no process ----------

class Pretender(turns.Contender):
    """A contender that answers at once: so many seconds a step, and dies after so many turns."""

    def __init__(self, label, seconds, journal, dies_at=None):
        super(Pretender, self).__init__(label, [{}])
        self._a_step, self._journal, self._dies_at = seconds, journal, dies_at

    def run(self, count):
        self._journal.append((self.label, count))
        if self._dies_at is not None and len(self._journal) >= self._dies_at:
            raise turns.ContenderError('it died')
        return self._a_step, 2 * self._a_step, [[1.] * count]


def test_turns_alternate_and_take_equally_long():
    journal = []
    fast, slow = Pretender('fast', 0.01, journal), Pretender('slow', 0.1, journal)
    assert turns.take_turns([fast, slow], 2, 1.) == {'fast': 100, 'slow': 10}
    assert journal[4:] == [('fast', 100), ('slow', 10), ('slow', 10), ('fast', 100)]
    assert fast.seconds == [0.01, 0.01] and slow.cpu_seconds == [0.2, 0.2]


def test_one_that_dies_is_out_and_the_others_go_on():
    journal = []
    dies, stays = Pretender('dies', 0.1, journal, dies_at=6), Pretender('stays', 0.1, journal)
    turns.take_turns([stays, dies], 3, 0.1)
    assert dies.failure == 'it died'
    assert len(stays.seconds) == 3
