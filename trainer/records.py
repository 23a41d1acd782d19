"""What a run has measured before it began, in files beside its checkpoints.

A run that goes on keeps to it, whatever would be measured today: with other placements or stages
sums may be rounded otherwise, and the run would not be the same to the last bit.
"""

import json
import os

from datasets.atomic_file import written_whole
import towers
from towers.placement.devices import short_name
from towers.tower.auto_stages import check_seconds

CHOICE = 'variable_device.json'
TIMES = 'operation_times.json'


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
        record = _read(path, _checked_choice, 'choose anew, or name a variable_device')
        if record is not None and record['devices'] == list(devices):
            return record['variable_device'], 'variables on %s: as this run began, see %s' % (
                short_name(record['variable_device']), path)
        choice = choose()
        _write(path, {'variable_device': choice.variable_device, 'devices': list(devices),
                      'reason': choice.reason, 'timings': [timing._asdict() for timing
                                                           in choice.timings]})
    return choice.variable_device, str(choice)


def recorded_times(directory, about, measure):
    """The `OperationTimes` of the run in a directory: those that it began with, else new ones.

    Args:
      directory: of the checkpoints; made if need be, and held while this runs.
      about: dict of what the times depend on; where the record has another, it is made anew.
      measure: called without arguments where there is nothing to go by; returns `OperationTimes`.

    Returns:
      `(OperationTimes, text)`: text is to be shown.

    Raises:
      RunLockedError, CheckpointError, LogFileError: as for `recorded_choice`.
    """
    path = os.path.join(directory, TIMES)
    with towers.hold_directory(directory):
        record = _read(path, _checked_times, 'measure anew')
        if record is not None and record[0] == about:
            times, text = record[1], 'as this run began, see %s' % path
        else:
            times, text = measure(), 'measured now'
            _write(path, {'about': about, 'times': times._asdict()})
    return times, 'times of operations: %.1f ms a step, %s' % (1e3 * times.seconds, text)


def _checked_choice(record):
    if not (isinstance(record['variable_device'], str) and isinstance(record['devices'], list)):
        raise ValueError('it names no placement')
    return record


def _checked_times(record):
    times = towers.OperationTimes(**record['times'])
    check_seconds(times)
    return record['about'], times


def _read(path, checked, purpose):
    """What `checked` makes of the object in a file; None if there is no such file.

    Raises:
      CheckpointError: it cannot be read, or is no record; it may be deleted to this purpose.
    """
    if not os.path.exists(path):
        return None
    try:
        with open(path) as opened:
            return checked(json.load(opened))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise towers.CheckpointError('%s cannot be read (%s): delete it to %s.' % (
            path, error, purpose)) from error


def _write(path, record):
    with written_whole(path) as opened:
        json.dump(record, opened, indent=1)
