"""Cells, table and CSV of the speed benchmark; and one real cell."""

import os

import pytest

from benchmarks.tower_speed import __main__ as speed
from benchmarks.tower_speed import report
from benchmarks.tower_speed.trace_split import PARTS


def cell(batch_size, *seconds):
    return {'towers': 1, 'batch_size': batch_size, 'build_seconds': 1.5,
            'first_step_seconds': 2.5, 'step_seconds': list(seconds), 'traced_step': 0.6,
            'covered': dict(zip(PARTS, [0.1, 0.4, 0.05, 0.025, 0.])),
            'exposed': dict(zip(PARTS, [0.1, 0.4, 0.02, 0.025, 0.])),
            'not_overlapped': 0.145}


ROWS = [('batch a tower', cell(8, 0.5, 0.4, 1.), 1, 8, ''),
        ('batch a tower', cell(16, 0.5, 0.5, 0.5), 2, 16, ''),
        ('batch in all', None, 1, 16, 'out of memory'),
        ('batch in all', cell(16, 0.5, 0.5, 0.5), 2, 16, '')]


def test_table():
    lines = [line.split('  ') for line in report.table(ROWS).splitlines()]
    cells = [[text.strip() for text in line if text.strip()] for line in lines]
    assert cells[1] == ['batch a tower', '1', '8', '16 (8-20)', '1.00',
                        '500.0', '1.5', '2.5', '100.0', '400.0', '50.0', '25.0', '0.0', '145.0']
    assert cells[2][3:5] == ['32 (32-32)', '2.00']
    assert cells[3] == ['batch in all', '1', '16', 'FAILED: out of memory']
    assert cells[4][3:5] == ['32 (32-32)', '-']


@pytest.mark.slow
def test_a_cell_is_measured_once_and_a_failure_is_told(tmp_path, capsys):
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
    status, out = go('--train_flags=--optimizer=none')
    assert status == 1
    assert 'FAILED: train.py: flag --optimizer=none: value should be one of' in out
