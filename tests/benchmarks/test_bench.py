"""The parts of `make bench`: what one cell takes over from another."""

import pytest

from benchmarks import bench
from benchmarks.results import Results


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A `Bench` with results of ResNet-50 on 1, 2 and 4 towers, and of the dense net: 2 cores."""
    monkeypatch.setattr(bench.os, 'cpu_count', lambda: 2)
    results = Results(str(tmp_path / 'results.json'))
    for name, count, threads in (('resnet50', 1, 0), ('resnet50', 4, 4), ('resnet50', 2, 1),
                                 ('dense', 2, 1)):
        results.put(['steps', name, str(count)], {'threads': {'recipe': threads}})
    return bench.Bench(results, False, None, None, float('inf'))


@pytest.mark.parametrize('name, count, found', [
    ('resnet50', 8, {'recipe': 1}), ('resnet50', 4, {'recipe': 1}),
    # As many towers as cores, and fewer, are looked at for themselves; so is what starts quickly.
    ('resnet50', 2, None), ('resnet50', 1, None), ('dense', 4, None),
    ('inception_resnet', 4, None)])
def test_thread_settings_of_fewer_towers(parts, name, count, found):
    assert parts._threads_of_fewer(name, count) == found
