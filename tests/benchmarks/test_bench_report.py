"""benchmarks/fits, overlap, scale, start_up, aims, report, results and the command line."""

import json

import numpy as np
import pytest

from benchmarks import aims, bench, fits, machine, overlap, plots, scale, start_up
from benchmarks.report import aim_lines, report
from benchmarks.results import Results

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


def test_slope():
    assert fits.slope([1, 2, 4], [3., 6., 12.]) == pytest.approx(1.)
    assert fits.slope([1, 10, 100], [5., 5., 5.]) == pytest.approx(0.)
    assert fits.slope([1, 2, 4], [1., 4., 16.]) == pytest.approx(2.)


@pytest.mark.parametrize('sizes, costs', [([1], [1.]), ([2, 2], [1., 1.]), ([1, 2], [1.]),
                                          ([1, 2], [1., 0.])])
def test_no_slope(sizes, costs):
    with pytest.raises(ValueError):
        fits.slope(sizes, costs)


def test_large_half():
    assert fits.large_half([1, 2, 4, 8, 16, 32]) == [3, 4, 5]
    assert fits.large_half([1, 2]) == [0, 1]
    assert fits.large_half([8, 1, 2, 4]) == [3, 0]


def test_slopes_leave_out_what_was_not_measured():
    grown = scale.with_slopes([1, 2, 4, 8], [{'build': size, 'peak': 0} for size in (9, 2, 4, 8)])
    assert grown['slopes'] == {'build': pytest.approx(1.)}  # of the larger half
    assert grown['costs']['peak'] == [0, 0, 0, 0]


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


def test_timeline_merges_what_touches_and_tells_towers_from_what_follows():
    times = [overlap.OperationTime(*each) for each in [
        ('tower_1/gradients/a', 1060, 1090), ('tower_0/MatMul', 1000, 1020),
        ('tower_10/MatMul', 1000, 1030), ('tower_0/gradients/b', 1040, 1050),
        ('tower_0/gradients/a', 1020, 1045), ('combine_gradients/AddN', 1090, 1100),
        ('tower_1/MatMul', 1010, 1020), ('tower_1/MatMul_1', 1030, 1060),
        ('Momentum/update_w', 1100, 1120)]]
    assert [(row, kind, np.round(spans, 9).tolist())
            for row, kind, spans in overlap.timeline(times)] == [
        ('tower 0', 'forward', [[0., 0.02]]), ('tower 0', 'backward', [[0.02, 0.05]]),
        ('tower 1', 'forward', [[0.01, 0.02], [0.03, 0.06]]),
        ('tower 1', 'backward', [[0.06, 0.09]]), ('tower 10', 'forward', [[0., 0.03]]),
        ('combination', 'combination', [[0.09, 0.1]]), ('update', 'update', [[0.1, 0.12]])]


def test_a_trace_without_combination_is_an_error():
    with pytest.raises(ValueError, match='0 operations of the combination and 1 of gradients'):
        overlap.overlapped([overlap.OperationTime('tower_0/gradients/a', 0, 1)])


def test_medians_of_starts():
    starts = [{'build': 3., 'total': 9.}, {'build': 1., 'total': 8.}, {'build': 2., 'total': 4.}]
    assert start_up.medians(starts) == {'build': 2., 'total': 8.}
    assert start_up.medians(starts + [{'failure': 'it died'}]) == {'failure': 'it died'}


def test_further_tower():
    starts = {'1': {'build': 10.}, '4': {'build': 13.}}
    assert start_up.further_tower(starts, 4) == pytest.approx(0.1)


def test_an_aim_met_missed_and_not_measured():
    results = results_of(steps={'small_conv': {'4': cell(mirrored_graph=0.79)}})
    met = verdict(results, 'graph, small net')
    assert (met.worst, met.missed) == (0.79, [])
    results['steps']['small_conv']['4'] = cell(mirrored_graph=0.81)
    assert verdict(results, 'graph, small net').missed == ['small_conv, 4 towers']
    assert verdict(results_of(), 'graph, small net').worst is None


def test_the_floor_counts_many_towers_with_shards_of_eight():
    results = results_of(steps={'resnet50': {
        '1': cell(floor=9.), '2': cell(floor=1.01), '4': cell(floor=1.03),
        '8': cell(floor=9., batch=32)}, 'lstm': {'2': cell(floor=9.)}})
    results['steps']['resnet50']['4']['cpu_milliseconds'] = {'towers': spread(6.),
                                                             'floor': spread(5.)}
    found = verdict(results, 'a step over the floor, conv nets')
    assert (found.worst, found.where, found.cells) == (1.03, 'resnet50, 4 towers', 2)
    found = verdict(results, "processor time over the floor's")
    assert (found.worst, found.where, found.cells) == (1.2, 'resnet50, 4 towers', 2)


def test_one_device_counts_where_towers_are_cores():
    results = results_of(steps={'lstm': {'2': cell(one_device=0.9), '4': cell(one_device=1.5)}})
    assert verdict(results, 'never slower').worst == 0.9


def test_aims_with_a_least_value():
    shares = {'2 towers': {'share': spread(0.85)}, '4 towers': {'share': spread(0.7)}}
    found = verdict(results_of(combination={'dense': shares}), "share of the memory's")
    assert (found.worst, found.missed) == (0.7, ['4 towers'])


def test_memory_and_start_up_and_python():
    results = results_of(
        memory={'dense': {'4': {'peaks': {'towers': {'allocator': 60, 'resident': 7},
                                          'recipe': {'allocator': 100, 'resident': 10}}}}},
        start_up={'net': {'clone': {'starts': {'1': {'total': 10.}, '8': {'total': 25.}},
                                   'further': {'8': 0.1}}}},
        overhead={"train.py's loop": dict(spread(65.), above=spread(45.))})
    assert verdict(results, 'allocator').worst == pytest.approx(0.6)
    assert verdict(results, 'whole process').missed
    assert verdict(results, '8 towers over 1').worst == 2.5
    assert verdict(results, 'further tower').missed == []
    assert verdict(results, 'Python a step').worst == pytest.approx(45.)


def test_aim_lines():
    lines = aim_lines(aims.judge(results_of(steps={'small_conv': {
        '4': cell(mirrored_graph=0.9, floor=1.01)}})))
    line = [each for each in lines if 'graph, small net' in each][0]
    assert line.split() == ('MirroredStrategy, graph, small net, 4 towers at most 0.8 0.9 '
                            'MISSED in 1 of 1 (in: small_conv, 4 towers)').split()
    assert any('conv nets' in each and each.rstrip().endswith(
        'met in 1, not measured in 11 (in: small_conv, 4 towers)') for each in lines)
    assert any('parameter-heavy' in each and 'not measured' in each for each in lines)


def test_report_says_ratios_failures_and_noise():
    text = report(results_of(
        machine=dict(MACHINE, load=3.),
        steps={'digits': {'2': cell(recipe=0.5, failures={'slim': 'DIFFERS from recipe: loss'})}},
        left_out={'steps, lstm, 8 towers': 'the time given was over'}))
    assert '0.50 (0.45..0.55)' in text
    assert 'digits, 2 towers: slim: *** DIFFERS from recipe: loss ***' in text
    assert 'WARNING: the load average was above 0.5' in text
    assert 'left out: steps, lstm, 8 towers: the time given was over' in text


def test_a_quiet_machine_is_not_warned_of():
    assert len(machine.lines(MACHINE)) == 1
    assert 'oneDNN as TF chooses' in machine.lines(MACHINE)[0]
    assert 'oneDNN on' in machine.lines(dict(MACHINE, onednn='1'))[0]
    described = machine.describe()
    assert described['cores'] > 0 and described['memory_gb'] > 0


def test_results_merge_cell_by_cell(tmp_path):
    path = str(tmp_path / 'deep' / 'bench.json')
    first = Results(path)
    first.begin(MACHINE, '--only=steps')
    first.put(['steps', 'digits', '2'], 1)
    first.leave_out('steps, digits, 4 towers', 'time')
    again = Results(path)
    again.put(['steps', 'digits', '4'], 2)
    again.take_back_in('steps, digits, 4 towers')
    again.begin(MACHINE, '')
    with open(path) as text:
        values = json.load(text)
    assert values['steps'] == {'digits': {'2': 1, '4': 2}} and values['left_out'] == {}
    assert [run['arguments'] for run in values['runs']] == ['--only=steps', 'everything']


@pytest.mark.parametrize('runs, judged', [
    (['--only=steps', ''], True), (['--quick'], False),
    (['--only=steps', '--quick --towers=2'], False)])
def test_a_quick_run_judges_no_aim(runs, judged):
    text = report(results_of(steps={'small_conv': {'4': cell(mirrored_graph=0.9)}}, runs=[
        {'arguments': each, 'when': 'today', 'load': 3.} for each in runs]))
    line, = [each for each in text.split('\n') if each.startswith('MirroredStrategy, graph, small')]
    assert ' '.join(line.split()).endswith('at most 0.8 0.9 %s (in: small_conv, 4 towers)' % (
        'MISSED in 1 of 1' if judged else 'not judged'))
    assert ('MISSED' in text) == judged
    assert ('This was a quick run.' in text and 'cannot' in text) == (not judged)


def test_pictures_of_growth_have_labels_on_both_axes(tmp_path, monkeypatch):
    pyplot = pytest.importorskip('matplotlib.pyplot')
    drawn = []
    monkeypatch.setattr(pyplot, 'close', drawn.append)
    sizes = [1, 2, 4, 8, 16, 32]
    plots.draw_growth('towers', {
        'sizes': sizes, 'slopes': {'build seconds': 0.7, 'peak bytes': 0.8, 'graph nodes': 1.},
        'costs': {'build seconds': [0.08, 0.1, 0.08, 0.13, 0.15, 0.37],
                  'peak bytes': [8448, 12288, 16128, 26624, 44032, 81920],
                  'graph nodes': [96, 143, 215, 359, 647, 1223]}}, str(tmp_path / 'growth.png'))
    figure = drawn[-1]
    figure.canvas.draw()
    for axis, unit in zip(figure.axes, (' ms', ' kB', '')):
        assert [text.get_text() for text in axis.get_xticklabels()] == list(map(str, sizes))
        low, high = axis.get_ylim()
        shown = [text.get_text() for text in axis.get_yticklabels()
                 if low <= text.get_position()[1] <= high]
        assert len(shown) >= 3 and all(unit in text for text in shown)
    assert (tmp_path / 'growth.png').stat().st_size > 5000


def test_picture_of_a_step_says_what_is_outside_of_towers(tmp_path, monkeypatch):
    pyplot = pytest.importorskip('matplotlib.pyplot')
    drawn = []
    monkeypatch.setattr(pyplot, 'close', drawn.append)
    plots.draw_timeline('a step', [['tower 0', 'forward', [[0.1, 1.]]],
                                   ['tower 0', 'backward', [[1., 2.]]],
                                   ['combination', 'combination', [[2., 3.]]],
                                   ['update', 'update', [[0., 0.1], [3., 4.]]]],
                        str(tmp_path / 'step.png'))
    axes, = drawn[-1].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        'tower 0', 'combination', 'outside of towers']
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        'forward', 'backward', 'combination', 'cutting the batch, loss, update']
    colours = np.array([patch.get_facecolor()[:3] for patch in legend.get_patches()])
    apart = [np.abs(one - other).sum() for i, one in enumerate(colours) for other in colours[:i]]
    assert min(apart) > 0.5


def test_picture_of_peers_has_a_point_for_each_step_and_a_bar_for_each_memory(
        tmp_path, monkeypatch):
    pyplot = pytest.importorskip('matplotlib.pyplot')
    drawn = []
    monkeypatch.setattr(pyplot, 'close', drawn.append)
    results = Results(str(tmp_path / 'bench.json'))
    results.values = results_of(
        steps={'lstm': {'2': cell(recipe=0.7), '4': cell(recipe=0.5, one_device=1.25)}},
        memory={'dense': {'4': {'peaks': {'towers': {'allocator': 4e8},
                                          'recipe': {'allocator': 1.7e9},
                                          'floor': {'failure': 'no memory'}}}}})
    bench.draw_peers(results)
    left, right = drawn[-1].axes
    points = {line.get_label(): list(line.get_xdata()) for line in left.lines}
    assert points['tower loop written by hand'] == [2.]
    assert points['one device, the whole batch'] == [0.8]
    assert points["slim's model_deploy"] == []
    assert [bar.get_width() for bar in right.patches] == [400., 0., 1700., 0., 0., 0.]
    assert (tmp_path / 'bench-peers.png').stat().st_size > 5000


@pytest.mark.parametrize('arguments, text', [
    (['--only=stepps'], "there is no 'stepps': expected steps, "),
    (['--workloads=mnist'], "there is no 'mnist'"),
    (['--towers=2,x'], "'2,x': expected numbers"),
    (['report', '--results=/nowhere/x.json'], 'nothing has been measured')])
def test_bad_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.version_independent
def test_quick_run_of_the_tiniest_workload(tmp_path, capsys):
    path = str(tmp_path / 'bench.json')
    bench.main(['--quick', '--only=steps,overlap', '--workloads=tiny', '--results=' + path])
    with open(path) as text:
        values = json.load(text)
    cell_of_two = values['steps']['tiny']['2']
    assert cell_of_two['failures'] == {}
    assert sorted(cell_of_two['ratios']) == ['floor', 'mirrored_function', 'mirrored_graph',
                                             'one_device', 'recipe', 'slim']
    assert all(len(each) == 3 for each in cell_of_two['seconds'].values())
    assert 0 <= values['overlap']['tiny']['2']['share'] <= 1
    assert 'a step of towers over the other' in capsys.readouterr().out


def test_thread_settings_of_a_deep_network_are_found_once(tmp_path, monkeypatch):
    started = {}

    def hold(contenders, workload, *unused):
        labels = [each.label for each in contenders if each.label.startswith('recipe')]
        started.setdefault(workload.name, []).append(labels)
        return {'threads': {'recipe': 1}}
    monkeypatch.setattr(bench.contest, 'hold', hold)
    monkeypatch.setattr(bench.os, 'cpu_count', lambda: 2)
    bench.Bench(Results(str(tmp_path / 'bench.json')), False, ['resnet50', 'dense'], [1, 2, 4],
                90.).steps()
    both = ['recipe@0', 'recipe@1']
    assert started == {'resnet50': [both, both, [], ['recipe@1'], []], 'dense': [both, both, both]}


def test_variants_are_over_the_first_round_by_round():
    """The medians, 10 over 20, would say 2: the first one was slow in other rounds."""
    placements = cell(balanced=0.5)
    placements['ratios']['balanced'] = spread(0.8)
    text = report(results_of(placements={'dense': {'2': placements}}))
    line, = [line for line in text.split('\n') if ' balanced ' in line]
    assert line.split()[-2:] == ['1.25', '20.00']
