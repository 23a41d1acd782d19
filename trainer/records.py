"""What a run has measured before it began, in files beside its checkpoints.

A run that goes on keeps to it, whatever would be measured today: with other placements or stages
sums may be rounded otherwise, and the run would not be the same to the last bit.
"""

import json
import os

import towers
from towers.errors import shown
from towers.placement.devices import short_name
from towers.safe_files import read_json, written_whole

CHOICE = 'variable_device.json'

_CHOICE_FORM = {'variable_device': str, 'devices': [str], 'reason': str, 'timings': list}


def recorded_choice(directory, devices, choose):
    """The placement of the run in a directory: the recorded one; for a new run, and for towers on
    other devices, a new choice.

    Args:
      directory: of the checkpoints; made if it is missing, and locked meanwhile.
      devices: the towers' devices.
      choose: function without arguments that makes a new `PlacementChoice`.

    Returns:
      `(variable_device, text)`, of which the text is to be shown.

    Raises:
      RunLockedError: another process has the directory.
      CheckpointError: the record cannot be read.
      LogFileError: the record cannot be written.
    """
    path = os.path.join(directory, CHOICE)
    with towers.hold_directory(directory):
        record = read_json(path, _CHOICE_FORM,
                           'delete it to choose anew, or name a variable_device')
        if record is not None and record['devices'] == list(devices):
            return record['variable_device'], 'variables on %s: as this run began, see %s' % (
                shown(short_name(record['variable_device'])), path)
        choice = choose()
        _write(path, {'variable_device': choice.variable_device, 'devices': list(devices),
                      'reason': choice.reason, 'timings': [timing._asdict() for timing
                                                           in choice.timings]})
    return choice.variable_device, str(choice)


def _write(path, record):
    with written_whole(path) as opened:
        json.dump(record, opened, indent=1)
