"""The settings of a run, in a file beside its checkpoints, compared at each later start."""

import collections
import json
import os
import time

from towers.errors import CheckpointError, shown
from towers.run.step_loop import OccasionalHook
from towers.safe_files import SCALAR, moved_aside, read_json, written_whole

FILE = 'settings.json'

HARMLESS = 'harmless'
CHANGES = 'changes the run'
STATE = 'state'

_FORM = '--%s=%s'  # of a flag and its value
_MOST_BYTES = 2 ** 26  # of the file, which may name a million classes


class Difference(collections.namedtuple('Difference', 'name was now kind text effect')):
    """A setting with another value than when the run was last started.

    Attributes:
      name: of the setting.
      was, now: its values.
      kind: `HARMLESS`, `CHANGES` or `STATE`.
      text: such as `'--seed=2, was 1'`.
      effect: what that means for the run; '': what the kind says.
    """
    __slots__ = ()

    def __str__(self):
        return '%s: %s' % (self.text, self.effect or (
            'no change to the run' if self.kind == HARMLESS else 'changes the run from here on'))


Difference.__new__.__defaults__ = ('',)


class RunSettings:
    """The settings of a program that trains.

        settings = RunSettings({'seed': 1, 'log_every': 100, 'optimizer': 'adam'},
                               {'seed': CHANGES, 'log_every': HARMLESS, 'optimizer': STATE})

    The file `settings.json` in the directory of the checkpoints has the settings of the latest
    start, and each change of a setting, with its step. A run that goes on says each difference in a
    line, by the setting's kind:

    * `HARMLESS`: the numbers stay those of a run that was never stopped: how often to log.
    * `CHANGES`: the numbers are others from here on: seed, rate, batch, number of towers.
    * `STATE`: as `CHANGES`; and where the variables of the graph and of the checkpoint differ, the
      error names these settings as the reason: optimizer, model.
    """

    def __init__(self, values, kinds, advice='', effects=None):
        """
        Args:
          values: list of pairs of a name and a number, string, boolean or None. A name with a space
            is in plain words; any other one is a flag's.
          kinds: dict from each of these names to `HARMLESS`, `CHANGES` or `STATE`.
          advice: end of the error of a refused run: how to begin another one; `'{directory}'` in it
            is replaced by the directory of the refused one.
          effects: dict from names to what another value means, a text for the lines of a run that
            goes on; of the other names the kind is said. Or None.
        """
        self._values, self._kinds = collections.OrderedDict(values), kinds
        self._advice, self._effects = advice, effects or {}

    def begin(self, directory):
        """Writes the file of a new run. An older file is renamed.

        Returns:
          List of lines to be shown.

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
          `(differences, problem)`: a list of `Difference`, and None; or, where the file is
          missing, `[]` and a line that says so.

        Raises:
          BadFileError: the file holds something else, or cannot be read.
        """
        found = _read(directory)
        if found is None:
            return [], ('%s is missing (an older run, perhaps): whether settings have changed '
                        'cannot be told' % os.path.join(directory, FILE))
        former = found['settings']
        return [Difference(name, former[name], value, self._kinds[name], '%s, was %s' % (
            ('%s: %s' if ' ' in name else _FORM) % (name, _shown(value)),
            _shown(former[name], quoted=True)), self._effects.get(name, ''))
                for name, value in self._values.items()
                if name in former and not _same(former[name], value)], None

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

    def refusal(self, directory, differences, reason):
        """The `CheckpointError` for a run that cannot go on with these settings.

        Args:
          directory: of the run.
          differences: what `compare` found.
          reason: what would be lost, a sentence without its full stop.
        """
        guilty = [each for each in differences if each.kind == STATE]
        advice = self._advice.replace('{directory}', directory)
        if not guilty:
            return CheckpointError('%s. Nothing was changed.%s' % (reason, ' ' + advice))
        return CheckpointError('%s: %s. Nothing was changed. Go on with %s. %s' % (
            ', '.join(each.text for each in guilty), reason,
            ' '.join(_FORM % (each.name, _shown(each.was)) for each in guilty), advice))

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
        self._differences, problem = self._settings.compare(self._directory)
        of_state = any(each.kind == STATE for each in self._differences)
        if missing is not None and of_state or missing is None and dropped is not None:
            raise self._settings.refusal(self._directory, self._differences, missing or dropped)
        return [problem] if problem else [str(each) for each in self._differences]

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
