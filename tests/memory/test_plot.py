"""draw_memory: what it draws, told by a stand-in for matplotlib, which CI does not have."""

import sys
import types

import pytest

import towers
from towers.memory.account import DeviceAccount, MemoryAccount


def account(batch_size, parameters, activations, copies=0):
    kinds = {'parameters': parameters, 'activations': activations}
    if copies:
        kinds['copies'] = copies
    device = DeviceAccount('/device:CPU:0', kinds, 'loss', [])
    return MemoryAccount(batch_size, [device], device._replace(device=''), [], [], False, False)


class Axes:
    """Records the calls of `matplotlib.axes.Axes` by the name of the method."""

    def __init__(self):
        self.calls = {}
        self.xaxis = types.SimpleNamespace(set_major_formatter=lambda formatter: None)
        self.spines = {side: types.SimpleNamespace(set_visible=lambda visible: None)
                       for side in ('top', 'right')}

    def __getattr__(self, name):
        def call(*args, **keywords):
            self.calls.setdefault(name, []).append((args, keywords))
            return ([], []) if name == 'get_legend_handles_labels' else None
        return call


@pytest.fixture
def axes(monkeypatch):
    drawn = Axes()
    figure = types.SimpleNamespace(
        add_subplot=lambda place: drawn,
        savefig=lambda opened, **keywords: opened.write(b'the picture'))
    names = {'matplotlib': {}, 'matplotlib.ticker': {'FormatStrFormatter': lambda form: form},
             'matplotlib.backends': {}, 'matplotlib.figure': {'Figure': lambda **size: figure},
             'matplotlib.backends.backend_agg': {'FigureCanvasAgg': lambda figure: None}}
    for name, has in names.items():
        module = types.ModuleType(name)
        vars(module).update(has)
        monkeypatch.setitem(sys.modules, name, module)
    for name in list(names)[1:]:  # as an import leaves them
        above, _, last = name.rpartition('.')
        setattr(sys.modules[above], last, sys.modules[name])
    return drawn


def test_kinds_are_stacked_measurements_are_points_and_the_limit_is_a_line(axes, tmp_path):
    path = tmp_path / 'memory.png'
    towers.draw_memory([account(32, 10 ** 6, 8 * 10 ** 6), account(8, 10 ** 6, 2 * 10 ** 6)],
                       str(path), [(8, 4 * 10 ** 6)], 12 * 10 ** 6)
    assert path.read_bytes() == b'the picture'
    (batches, rows), keywords = axes.calls['stackplot'][0]
    assert batches == [8, 32] and rows == [[1., 1.], [2., 8.]]
    assert keywords['labels'] == ['parameters', 'activations']
    (predicted, of_predicted), (points, of_points) = axes.calls['plot']
    assert predicted == ([8, 32], [3., 9.]) and of_predicted['label'] == 'predicted'
    assert points == ([8], [4.], 'o') and of_points['label'] == 'measured'
    (height,), keywords = axes.calls['axhline'][0]
    assert height == 12. and keywords['label'] == 'limit, 12 MB'
    assert axes.calls['set_ylim'] == [((0, 12. * 1.08), {})]
    assert axes.calls['set_title'][0][0] == ('memory of a step',)


def test_a_limit_far_above_is_said_and_not_drawn(axes, tmp_path):
    towers.draw_memory([account(8, 10 ** 9, 2 * 10 ** 9, copies=10 ** 6)], str(tmp_path / 'a.png'),
                       limit=80 * 10 ** 9)
    assert 'axhline' not in axes.calls
    assert axes.calls['set_title'][0][0] == (
        'memory of a step (the limit, 80 GB, is far above)',)
    bars = [(args[1], keywords['bottom'], keywords['label'])
            for args, keywords in axes.calls['bar']]
    assert bars == [([1.], 0., 'parameters'), ([2.], 1., 'activations')]  # no 0.001 of copies


def test_without_matplotlib_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(towers.MissingPackageError, match=r'\(the extra plots\)'):
        towers.draw_memory([account(8, 1, 1)], str(tmp_path / 'a.png'))
    assert not (tmp_path / 'a.png').exists()
