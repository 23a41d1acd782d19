"""The settings of a run, in a file beside its checkpoints, compared at each later start."""

import collections
import itertools
import json
import os
import time

import datasets
from towers.checkpoint.files import newest_prefix
from towers.errors import BadFileError, CheckpointError, shown
from towers.run.step_loop import OccasionalHook
from towers.safe_files import SCALAR, moved_aside, read_json, written_whole
from trainer.flags import (CHANGES, FLAGS, HARMLESS, ONCE, OPTIONS_BY_NAME, SETTINGS, STATE,
                           train_dir)

FILE = 'settings.json'

_CLASSES = 'names of classes'
_MOST_BYTES = 2 ** 26  # of the file, which may name a million classes


class Difference(collections.namedtuple('Difference', 'name was now kind text')):
    """A setting with another value than when the run was last started.

    Attributes:
      name: of the setting.
      was, now: its values.
      kind: `HARMLESS`: the numbers stay those of a run that was never stopped. `CHANGES`: they are
        others from here on. `STATE`: as `CHANGES`; and where the variables of graph and checkpoint
        differ, this is said as the reason.
      text: such as `'--seed=2, was 1'`.
    """
    __slots__ = ()

    def __str__(self):
        return '%s: %s' % (self.text, 'no change to the run' if self.kind == HARMLESS else
                           'changes the run from here on')


class RunSettings:
    """The values of a program's settings, and what another value of each means for a run.

    The file `settings.json` in the directory of the checkpoints has the settings of the latest
    start, and each change of a setting, with its step. A run that goes on says each difference in a
    line, by the setting's kind.
    """

    def __init__(self, values, kinds):
        """
        Args:
          values: list of pairs of a name and a number, string, boolean or None. A name with a space
            is in plain words; any other one is a flag's.
          kinds: dict from names to the kind of a `Difference`; `CHANGES` of those that are missing.
        """
        self._values, self._kinds = collections.OrderedDict(values), kinds

    def begin(self, directory):
        """Writes the file of a new run. An older file is renamed, and a line about that returned.

        Raises:
          LogFileError: the file cannot be written.
        """
        path, lines = os.path.join(directory, FILE), []
        if os.path.lexists(path):
            lines.append('%s was that of an earlier run, whose checkpoints are gone: renamed to %s'
                         % (path, moved_aside(path)))
        self._write(path, [])
        return lines

    def compare(self, directory):
        """Compares these settings with those of the latest start in a directory; writes nothing.

        Returns:
          List of `Difference`; None where the file is missing.

        Raises:
          BadFileError: the file holds something else, or cannot be read.
        """
        found = _read(directory)
        if found is None:
            return None
        former = found['settings']
        return [Difference(name, former[name], value, self._kinds.get(name, CHANGES), '%s, was %s'
                           % (_given(name, value), _shown(former[name], quoted=True)))
                for name, value in self._values.items()
                if name in former and not _same(former[name], value)]

    def record(self, directory, step, differences):
        """Writes these settings and their differences into the file of a run that goes on.

        Args:
          directory: of the run.
          step: that it goes on from.
          differences: list of `Difference` from `compare`.

        Raises:
          BadFileError, LogFileError: the file cannot be read, or not be written.
        """
        changes = (_read(directory) or {'changes': []})['changes']
        now = time.strftime('%Y-%m-%d %H:%M:%S')
        changes += [collections.OrderedDict([
            ('step', step), ('time', now), ('setting', each.name), ('from', each.was),
            ('to', each.now)]) for each in differences]
        self._write(os.path.join(directory, FILE), changes)

    def _write(self, path, changes):
        with written_whole(path, advice='Make room or make the directory writable.') as opened:
            json.dump(collections.OrderedDict([('settings', self._values), ('changes', changes)]),
                      opened, indent=1)
            opened.write('\n')


class SettingsHook(OccasionalHook):
    """Compares the settings of a run with those of its last start, and writes them.

        settings = SettingsHook(RunSettings(…), directory)
        with training_session(directory, global_step, [settings] + hooks, check=settings.check):

    They are written once for each start of the program: for a new run when the session has been
    made, before the first checkpoint is saved; for a run that goes on before its first step. So a
    start that fails earlier, or has no step left to do, writes nothing.
    """

    def __init__(self, settings, directory, say=print):
        """
        Args:
          settings: `RunSettings` that the program was started with.
          directory: of the checkpoints.
          say: called with each line about a file that was renamed.
        """
        self._settings, self._directory, self._say = settings, directory, say
        self._newest, self._differences, self._written = None, [], False

    def check(self, newest, missing, dropped):
        """Compares the settings of a run that goes on, see `training_session(check=…)`.

        Raises:
          CheckpointError: the checkpoint has other variables than the graph, and the change of a
            setting is the reason; or it has state that would be dropped.
        """
        self._newest = newest
        differences = self._settings.compare(self._directory)
        self._differences = differences or []
        guilty = [each for each in self._differences if each.kind == STATE]
        if missing is not None and guilty or missing is None and dropped is not None:
            raise CheckpointError(
                '%s%s. Nothing was changed. %sOr begin another run in another --train_dir, which '
                '--init_from=%s starts with what fits of the weights.' % (
                    ', '.join(each.text for each in guilty) + ': ' * bool(guilty),
                    missing or dropped, 'Go on with %s. ' % ' '.join(
                        _given(each.name, each.was) for each in guilty) * bool(guilty),
                    self._directory))
        return [str(each) for each in self._differences] if differences is not None else [
            '%s is missing (an older run, perhaps): whether settings have changed cannot be told'
            % os.path.join(self._directory, FILE)]

    def after_create_session(self, session, coord):
        """Writes the settings of a new run."""
        if self._newest is None:
            self._write(lambda: self._settings.begin(self._directory))

    def before_run(self, run_context):
        """Adds what has changed to the settings of a run that goes on."""
        self._write(lambda: self._settings.record(self._directory, self._newest.step,
                                                  self._differences))

    def is_due(self):
        """Whether the settings are still to be written."""
        return not self._written

    def _write(self, write):
        if not self._written:
            for line in write() or []:
                self._say(line)
            self._written = True


def recorded_setting(directory, name):
    """The value of a setting at the latest start in a directory; None if it is not recorded.

    Raises:
      BadFileError: the file of settings holds something else, or cannot be read.
    """
    return (_read(directory) or {'settings': {}})['settings'].get(name)


def _read(directory):
    """The object in the file of settings, with `settings` and `changes`; None without a file.

    Raises:
      BadFileError: it holds something else, or cannot be read.
    """
    values = {str: SCALAR + ([SCALAR],)}
    return read_json(os.path.join(directory, FILE), {'settings': values, 'changes': [values]},
                     'move it away, to go on without a look at what has changed', _MOST_BYTES)


def _same(former, value):
    """Whether two values are equal, where 1 and 1.0 are, and 1 and True are not."""
    return former == value and isinstance(former, bool) == isinstance(value, bool)


def _shown(value, quoted=False):
    """A value as text; the empty string, if `quoted`, as two quotes."""
    return "''" if quoted and value == '' else shown('%.300s' % (value,))


def _given(name, value):
    """A setting and its value, as it is given: '--seed=1', 'keep=5 of --config'."""
    return ('%s: %s' if ' ' in name else '%s=%s of --config' if name in OPTIONS_BY_NAME else
            '--%s=%s') % (name, _shown(value))


# ---- The settings of train.py --------------------------------------------------------------------

def run_settings(batch_size, dataset=None, workers=1):
    """The `RunSettings` of the flags, with the batch size in place of an 'auto'.

    Args:
      batch_size: an int.
      dataset: whose number of examples, and names of classes and files, are settings, too; or None.
      workers: number of workers, of one machine 1.
    """
    kinds = {name: setting.kind for name, setting in SETTINGS.items() if setting.kind != ONCE}
    values = [(name, batch_size if name == 'batch_size' else FLAGS[name].value) for name in kinds]
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:  # the rate falls until the last step
        kinds.update(train_steps=CHANGES, train_epochs=CHANGES)
    return RunSettings(values + [('number of workers', workers)] + (
        [] if dataset is None else _settings_of_data(dataset)), kinds)


def _settings_of_data(dataset):
    """The settings of a run that its data are: a list of pairs."""
    found = [] if _names_of_classes(dataset) is None else [
        (_CLASSES, '\n'.join(_names_of_classes(dataset)))]
    found.append(('number of training examples', int(dataset.num_examples['train'])))
    if hasattr(dataset, 'names_digest'):  # files, and they number the examples by their names
        found.append(('digest of the names of training files', dataset.names_digest('train')))
    return found


def _names_of_classes(dataset):
    """Those of image folders; None where classes have no names."""
    return getattr(dataset, 'classes', None)


def check_classes(dataset):
    """Raises `DatasetError` for classes that are not those which the run's network was trained on.

    A class folder that came, went or got another name moves the numbers of those after it, and
    every label would mean another output of the network.
    """
    recorded, found = recorded_setting(train_dir(), _CLASSES), _names_of_classes(dataset)
    if found is None or recorded is None or not newest_prefix(train_dir()):
        return
    if not isinstance(recorded, str):
        raise BadFileError('%s/settings.json is not as train.py wrote it: %s is %.80r. Move it '
                           'away.' % (train_dir(), _CLASSES, recorded))
    # Both split, since a name may have a line break in it.
    trained, found = recorded.split('\n'), '\n'.join(found).split('\n')
    if trained != found:
        place = next(place for place, pair in enumerate(itertools.zip_longest(trained, found))
                     if pair[0] != pair[1])
        raise datasets.DatasetError(
            'the %d classes of --data_dir=%s are not the %d that the run in %s was trained on: '
            'class %d is %s, and was %s. Give the folders their old names, or begin another run in '
            'another --train_dir.' % (
                len(found), FLAGS.data_dir, len(trained), train_dir(), place,
                *('%r' % names[place] if place < len(names) else 'none'
                  for names in (found, trained))))
