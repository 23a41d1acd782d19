"""The benchmark of a pipeline: what its contenders train, and its table."""

import pytest

from benchmarks import pipeline_use


def result(label='2 stages', losses=(2., 1.), **given):
    return dict(dict(
        label=label, micro_batches=1, failure=None, losses=list(losses), use=[0.4, 0.5],
        predicted=0.5, milliseconds=dict(median=20, least=10, most=30),
        to_one_device=dict(median=1.5, least=1, most=2), to_whole_batch=None, steps=[]), **given)


def test_contenders_that_train_something_else_are_an_error():
    pipeline_use.check_losses(
        [result(), result(losses=(2.0001, 1.)), result('bad', (), failure='x')])
    with pytest.raises(ValueError, match=r'other has the losses \[2.0, 1.1\], 2 stages has'):
        pipeline_use.check_losses([result(), result('other', (2., 1.1))])


@pytest.mark.slow
def test_contenders_run_and_their_traces_have_two_stages(monkeypatch):
    monkeypatch.setattr(pipeline_use, '_MICRO_BATCHES', (4,))
    monkeypatch.setattr(pipeline_use, '_SCHEDULES', ('all_forward',))
    results = pipeline_use.measure('small_conv', rounds=1, turn_seconds=0.01)
    assert [each['failure'] for each in results] == [None] * 3
    pipeline_use.check_losses(results)
    assert [each['predicted'] for each in results] == [None, 1 / 2, 4 / 5]
    one_device, whole, micro = results
    assert one_device['use'] is None and one_device['to_one_device']['median'] == 1
    for each in (whole, micro):
        assert len(each['use']) == 2 and all(0 < use < 1 for use in each['use'])
        assert {row[:1] + row[1:2] for row in map(tuple, each['steps'][0]['rows'])} == {
            (device, what) for device in ('CPU:0', 'CPU:1') for what in ('forward', 'backward')}
