"""`train.py` with towers of several devices."""

import re

import pytest


@pytest.mark.slow
def test_a_tower_of_two_devices_has_two_stages(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--plan_only', '--devices=/cpu:0+/cpu:1'])
    shares = re.search(r'/cpu:0 (\d+)%.* /cpu:1 (\d+)%', run.stdout, re.S)
    assert shares and all(20 < int(share) < 80 for share in shares.groups()), run.stdout
    assert 'no stage' not in run.stdout
