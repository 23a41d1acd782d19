"""The charts' helpers, and the picture of a set of runs."""

import builtins

import pytest

from benchmarks import charts


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.split('.')[0] == 'matplotlib':
            raise ImportError(name)
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', missing)
    with pytest.raises(SystemExit, match=r'pip install matplotlib \(the extra plots\)'):
        charts.pyplot()
