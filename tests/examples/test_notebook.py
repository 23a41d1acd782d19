"""examples/first_steps.ipynb: its cells run from top to bottom, and say what their texts promise."""

import json
import os

import pytest

import pages


def cells(kind):
    path = os.path.join(pages.ROOT, 'examples', 'first_steps.ipynb')
    with open(path, encoding='utf-8') as notebook:
        return [''.join(cell['source']) for cell in json.load(notebook)['cells']
                if cell['cell_type'] == kind]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(runner, tmp_path):
    printed = runner.source('\n'.join(cells('code')), tmp_path).stdout
    assert 'one device       proven: the loss is a mean over the examples' in printed
    assert "not proven: 'MatMul" in printed
    assert 'report of a step of' in printed and 'step.html' in printed
    first, last = printed.split('loss of step 1: ')[1].split(', of step 200: ')
    assert float(last.split()[0]) < 0.3 < 1.5 < float(first)
