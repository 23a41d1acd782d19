"""What `make bench` makes of what it measures: overlap, aims, report, results; its command line."""

import json

import pytest

from benchmarks import aims, bench, overlap
from benchmarks.report import report

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
