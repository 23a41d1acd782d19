"""trainer.records: a run keeps to what it has measured before it began."""

import json
import os
import shutil

import pytest

import towers
from towers.errors import CheckpointError, LogFileError, RunLockedError
from towers.run.choose_placement import PlacementChoice, Timing
from towers.run.run_lock import hold_directory
from trainer.records import recorded_choice

CPUS = ('/device:CPU:0', '/device:CPU:1')


def chosen(name):
    return lambda: PlacementChoice(name, 'the fastest', [Timing(name, [0.5], None)])


def never():
    raise AssertionError('timed again')


def test_a_run_that_goes_on_stays_where_it_began(tmp_path):
    folder = str(tmp_path / 'run')
    device, text = recorded_choice(folder, CPUS, chosen('balanced'))
    assert device == 'balanced'
    assert text == ('variables on balanced: the fastest\n'
                    '  balanced           500.00 ms a step (500.00 to 500.00)')
    assert recorded_choice(folder, CPUS, never) == (
        'balanced',
        'variables on balanced: as this run began, see %s/variable_device.json' % folder)
    with open(os.path.join(folder, 'variable_device.json')) as record:
        assert json.load(record) == {
            'variable_device': 'balanced', 'devices': list(CPUS), 'reason': 'the fastest',
            'timings': [{'variable_device': 'balanced', 'seconds': [0.5], 'problem': None}]}


def test_with_other_towers_the_choice_is_made_anew(tmp_path):
    recorded_choice(str(tmp_path), CPUS, chosen('balanced'))
    assert recorded_choice(str(tmp_path), CPUS[:1], chosen('/device:CPU:0'))[0] == '/device:CPU:0'
    assert recorded_choice(str(tmp_path), CPUS[:1], never)[0] == '/device:CPU:0'


@pytest.mark.parametrize('content', ['', '{', '[]', '{"variable_device": 3, "devices": []}'])
def test_a_record_that_cannot_be_read(tmp_path, content):
    (tmp_path / 'variable_device.json').write_text(content)
    with pytest.raises(CheckpointError) as caught:
        recorded_choice(str(tmp_path), CPUS, never)
    assert 'variable_device.json cannot be read (' in str(caught.value)
    assert str(caught.value).endswith('delete it to choose anew, or name a variable_device.')


def test_a_directory_that_another_run_holds_is_not_touched(tmp_path):
    with hold_directory(str(tmp_path)):
        with pytest.raises(RunLockedError):
            recorded_choice(str(tmp_path), CPUS, never)
    assert not (tmp_path / 'variable_device.json').exists()


def test_an_interrupted_choice_leaves_no_record(tmp_path):
    def interrupted():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        recorded_choice(str(tmp_path), CPUS, interrupted)
    assert recorded_choice(str(tmp_path), CPUS, chosen('balanced'))[0] == 'balanced'


def test_a_record_that_cannot_be_written(tmp_path):
    def chosen_while_it_goes():
        shutil.rmtree(str(tmp_path))
        return chosen('balanced')()
    with pytest.raises(LogFileError, match='variable_device.json cannot be written: No such file'):
        recorded_choice(str(tmp_path), CPUS, chosen_while_it_goes)
