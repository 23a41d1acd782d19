"""`--profile_steps`: a trace for Chrome with a row a tower, and TensorBoard's profile."""

import glob
import json
import os

import pytest

from towers import compat
from trainer.flags import profiled_steps


def test_traces_of_a_run(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--train_steps=8', '--profile_steps=4,6', '--log_every=1'])
    folder = str(tmp_path / 'run' / 'profile')
    assert 'trace          %s/timeline-4.json\n' % folder in run.stdout
    traces = [name for name in os.listdir(folder) if name.startswith('timeline-')]
    assert traces == ['timeline-4.json']
    with open(os.path.join(folder, traces[0])) as opened:
        events = json.load(opened)['traceEvents']
    rows = {event['args']['name']: event['pid'] for event in events if event['name'] ==
            'process_name'}
    for tower in range(2):
        row, = [pid for name, pid in rows.items() if 'CPU:%d Compute' % tower in name]
        kinds = {event['name'] for event in events if event['pid'] == row}
        assert any('Conv2DBackpropFilter' in kind for kind in kinds)  # by oneDNN as _MklNative…
    profiles = glob.glob(os.path.join(folder, 'plugins', 'profile', '*', '*.xplane.pb'))
    if compat.TF_VERSION < (2, 2):
        assert profiles == [] and 'no profile     for TensorBoard' in run.stdout
    else:
        assert len(profiles) == 1 or compat.TF_VERSION < (2, 4)
        assert 'profile        tensorboard --logdir=%s\n' % folder in run.stdout


@pytest.mark.parametrize('text', ['', '100', '1,5', '5,5', '7,5', '2,3,4', '-2,3', '2.5,3', '2,x',
                                  '2,' + '9' * 13])
def test_what_is_no_pair_of_steps(text):
    assert profiled_steps(text) is None
    assert profiled_steps('2,3') == (2, 3)
