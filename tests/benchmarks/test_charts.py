"""The charts' helpers, and the picture of a set of runs."""

import builtins

import pytest

from benchmarks import charts
from benchmarks.batch_scaling import plots
from scaling_samples import result


def test_names_of_lines_keep_apart():
    assert charts._apart([0.1, 0.5, 0.9], 0.2) == pytest.approx([0.1, 0.5, 0.9])
    assert charts._apart([0.5, 0.5, 0.5], 0.2) == pytest.approx([0.3, 0.5, 0.7])
    heights = charts._apart([0.1, 0.12, 0.2, 0.9], 0.1)
    assert heights == pytest.approx([0.04, 0.14, 0.24, 0.9])


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.split('.')[0] == 'matplotlib':
            raise ImportError(name)
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', missing)
    with pytest.raises(SystemExit, match=r'pip install matplotlib \(the extra plots\)'):
        charts.pyplot()


@pytest.mark.slow
def test_picture_of_a_set(tmp_path, monkeypatch):
    pyplot = pytest.importorskip('matplotlib.pyplot')
    found = [result(name, seed, [0.1, 0.6, 0.8 + 0.01 * seed], [9., 1., 0.3])
             for name in ('one', 'sqrt', 'same', 'linear', 'big') for seed in (1, 2)]
    found[3] = result('sqrt', 2, [0.2], [8.], 'failed', 'NaN')
    found.append(result('same', 3, [], [], 'not run yet'))
    drawn = []
    monkeypatch.setattr(pyplot, 'close', drawn.append)
    plots.draw(found, str(tmp_path / 'set.png'), 'made up')
    size = (tmp_path / 'set.png').stat().st_size
    assert 10000 < size < 150000
    figure = drawn[-1]  # older versions close all before they begin
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    # No arm is left out, and the one that failed says so.
    assert texts == ['1 x 25 at 0.001 (one tower)',
                     '4 x 25 at 0.002 (the claim), not all finished',
                     '4 x 25 at 0.001 (unscaled), not all finished',
                     '4 x 25 at 0.004 (linear)', '1 x 100 at 0.002 (no towers)']
    accuracy = figure.axes[0]
    assert list(accuracy.lines[0].get_xdata()) == [200, 400, 600]
    assert list(accuracy.lines[0].get_ydata()) == pytest.approx([0.1, 0.6, 0.815])
    assert list(figure.axes[1].lines[0].get_xdata()) == [0.5, 1., 1.5]
    assert figure.axes[2].get_yscale() == 'log'
