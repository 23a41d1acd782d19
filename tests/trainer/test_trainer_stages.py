"""`train.py` with towers of several devices."""

import re

import pytest

from train_runs import names_that_differ, values_of

FLAGS = ['--devices=/cpu:0+/cpu:1', '--micro_batches=2', '--batch_size=100', '--log_every=4',
         '--summary_steps=0']


@pytest.mark.slow
def test_a_tower_of_two_devices_has_two_stages(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--plan_only', '--devices=/cpu:0+/cpu:1'])
    shares = re.search(r'/cpu:0 (\d+)%.* /cpu:1 (\d+)%', run.stdout, re.S)
    assert shares and all(20 < int(share) < 80 for share in shares.groups()), run.stdout
    assert 'no stage' not in run.stdout


@pytest.mark.slow
def test_a_run_goes_on_in_the_stages_that_it_began_with(runner, tmp_path):
    whole = runner.run(tmp_path / 'whole', FLAGS + ['--train_steps=8', '--save_steps=4'])
    parts = tmp_path / 'parts'
    for steps in (4, 8):
        runner.run(parts, FLAGS + ['--train_steps=%d' % steps])
    assert names_that_differ(values_of(whole.train_dir, 8), values_of(parts, 8)) == []
