"""What is read from a run's folder, the table, and the CSV, written and read back."""

import json

from benchmarks.batch_scaling import report, results
from benchmarks.batch_scaling.arms import Run, make_arms
from scaling_samples import result, settings


def run_in(folder, lines, tail=''):
    folder.mkdir()
    with open(str(folder / 'metrics.jsonl'), 'w') as log:
        log.write(''.join(json.dumps(line) + '\n' for line in lines) + tail)
    arm, = make_arms(settings(), ['sqrt'])
    return Run(arm, 1, str(folder), [])


def test_a_run_is_read(tmp_path):
    run = run_in(tmp_path / 'run', [
        {'step': 0, 'examples': 0},
        {'step': 1, 'examples': 100, 'images_per_second': None},
        {'step': 2, 'examples': 200, 'images_per_second': 50., 'test_accuracy': 0.5,
         'test_loss': 1.5},
        {'step': 3, 'examples': 300, 'images_per_second': 25.},
        {'step': 4, 'examples': 400, 'images_per_second': None,
         'test_accuracy': 0.75, 'test_loss': 1.}], tail='{"step": 5, "exam')
    found = results.run_result(run, 'finished', '')
    # A line without a speed is as fast as the next one, or as the one before where there is none.
    assert found.points == [results.Point(200, 4., 1.5, 0.5), results.Point(400, 12., 1., 0.75)]
    assert found.images_per_second == round(400 / 12., 3)


SET = [result('one', 1, [0.5, 0.9, 0.91], [1., 0.4, 0.35]),
       result('one', 2, [0.5, 0.8, 0.95], [1., 0.6, 0.25]),
       result('sqrt', 1, [0.4, 0.6, 0.85], [1.1, 0.9, 0.5]),
       result('sqrt', 2, [0.4], [1.1], 'failed', 'exit status 1: NaN, "here"'),
       result('big', 1, [], [], 'not run yet')]


def test_csv_comes_back_as_it_was(tmp_path):
    path = str(tmp_path / 'all.csv')
    results.write_csv(path, SET)
    assert results.read_csv(path) == SET
    with open(path) as opened:
        lines = opened.read().splitlines()
    assert len(lines) == 1 + 3 + 3 + 3 + 1 + 1
    assert lines[1] == 'one,1,25,none,0.001,0.0,1,finished,,8,200,0.5,1.0,0.5,400.0,1,shard'


def test_table_shows_what_failed():
    lines = report.table(SET, 0.9).splitlines()
    assert '4 x 25 at 0.002, seed 2: FAILED, exit status 1: NaN, "here"' in lines
    assert '1 x 100 at 0.002, seed 1: NOT RUN YET' in lines
