"""The page of the first day with GPUs, rehearsed on virtual CPUs."""

import pytest
import tensorflow.compat.v1 as tf

from benchmarks import gpus
from towers.report.page import report_in


@pytest.mark.slow
def test_a_rehearsal_on_cpus(tmp_path):
    path = gpus.run(gpus.parse([
        '--devices=/cpu:0,/cpu:1', '--network=digits', '--steps=1', '--batch_size=4',
        '--directory=%s' % tmp_path]))
    with open(path, encoding='utf-8') as opened:
        page = opened.read()
    for text in ('audit: every promise kept', 'memory of a step, batch 8, MB at the worst moment',
                 '2          replicated', 'PrecisionError: precision=&#x27;fp16&#x27;', 'sync '):
        assert text in page, page
    assert report_in(str(tmp_path / 'step.html'))['title'] == '2 towers on /cpu:0, /cpu:1, batch 8'


def test_without_gpus_it_says_how_to_rehearse():
    if tf.config.experimental.list_physical_devices('GPU'):
        pytest.skip('there are GPUs')
    with pytest.raises(SystemExit, match='a rehearsal is --devices=/cpu:0,/cpu:1'):
        gpus.devices_of(gpus.parse([]))
