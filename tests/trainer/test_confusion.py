"""trainer.confusion: counts, accuracies by class, and what is written; a run of --mode=eval."""

import csv
import re

import numpy as np
import pytest

from trainer.confusion import ConfusionMatrix
from train_runs import metrics


def matrix_of(names=('cat', 'dog', 'owl')):
    matrix = ConfusionMatrix(3, names)
    matrix.add(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]))
    matrix.add(np.array([0, 1, 1]), np.array([0, 1, 0]))
    return matrix


def test_counts_and_accuracies():
    matrix = matrix_of()
    assert matrix.counts.tolist() == [[2, 1, 0], [1, 3, 0], [0, 0, 0]]
    assert matrix.accuracies[:2].tolist() == [2 / 3, 3 / 4] and np.isnan(matrix.accuracies[2])


def test_the_text():
    assert str(matrix_of()).splitlines() == [
        'accuracy by class',
        '  cat  0.6667 of 3', '  dog  0.7500 of 4', '  owl  nan of 0',
        'examples by label (row) and predicted class (column)',
        '       cat  dog  owl', '  cat    2    1    .', '  dog    1    3    .',
        '  owl    .    .    .',
        'most frequent mistakes',
        '  cat taken for dog: 1 of 3', '  dog taken for cat: 1 of 4']


def test_of_many_classes_those_that_are_taken_for_others():
    matrix = ConfusionMatrix(30)
    matrix.add(np.arange(30), np.where(np.arange(30) == 7, 8, np.arange(30)))
    lines = str(matrix).splitlines()
    assert lines[:2] == ['accuracy of the 20 classes with the smallest', '  7   0.0000 of 1']
    assert lines[-2:] == ['most frequent mistakes', '  7 taken for 8: 1 of 1'] and len(lines) == 23


def test_a_table_and_a_picture(tmp_path):
    matrix_of().write(str(tmp_path / 'm.csv'))
    assert (tmp_path / 'm.csv').read_text().split() == [
        'label,cat,dog,owl', 'cat,2,1,0', 'dog,1,3,0', 'owl,0,0,0']
    pytest.importorskip('matplotlib')
    matrix_of().write(str(tmp_path / 'm.png'))
    assert (tmp_path / 'm.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_the_matrix_of_a_run_has_its_accuracy(runner, reference, tmp_path):
    path = tmp_path / 'm.csv'
    run = runner.run(reference.train_dir, ['--mode=eval', '--config={"confusion": "%s"}' % path])
    with open(str(path), newline='') as table:
        counts = np.array([row[1:] for row in csv.reader(table)][1:], int)
    assert counts.sum() == 360
    assert np.trace(counts) / 360 == pytest.approx(metrics(reference.train_dir)[-1]['test_accuracy'])
    assert re.search('^accuracy by class\n  0  ', run.stdout, re.MULTILINE)
