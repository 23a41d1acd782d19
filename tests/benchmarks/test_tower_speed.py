"""A real cell of the speed benchmark."""

import os

import pytest

from benchmarks.tower_speed import __main__ as speed


@pytest.mark.slow
def test_a_cell_is_measured_once(tmp_path, capsys):
    def go(*argv):
        status = speed.main(speed.parse([
            '--quick', '--noplots', '--towers=2', '--directory=%s' % tmp_path] + list(argv)))
        return status, capsys.readouterr().out

    done = go()
    assert not done[0], done
    names = [name for name in os.listdir(str(tmp_path)) if name.endswith('.json')]
    assert names == ['2-towers-batch-64.json']  # both kinds, measured once
    first = os.stat(str(tmp_path / names[0])).st_mtime_ns
    assert go() == done
    assert os.stat(str(tmp_path / names[0])).st_mtime_ns == first
