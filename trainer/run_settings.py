"""The settings of a run, in a file beside its checkpoints, compared at each later start."""

import collections
import itertools
import json
import os
import typing

import tensorflow.compat.v1 as tf

import datasets
from towers.checkpoint.files import newest_prefix
from towers.errors import BadFileError, CheckpointError, shown
from towers.safe_files import SCALAR, moved_aside, read_json, written_whole
from trainer.flags import (
    CHANGES,
    FLAGS,
    HARMLESS,
    ONCE,
    OPTIONS_BY_NAME,
    SETTINGS,
    STATE,
    decays_until_the_end,
    train_dir,
)

FILE = 'settings.json'

_CLASSES = 'names of classes'
_MOST_BYTES = 2 ** 26  # of the file, which may name a million classes


class Difference(typing.NamedTuple):
    """A setting with another value than when the run was last started.

    Attributes:
      name: the setting's name.
      was: its value at the former start.
      now: its value at this start.
      kind: `HARMLESS`: the numbers stay those of a run that was never stopped; `CHANGES`: they are
        others from here on; or `STATE`: where the variables of graph and checkpoint differ, too,
        this is said as the reason.
    """
    name: str
    was: typing.Any
    now: typing.Any
    kind: str

    @property
    def text(self) -> str:
        """Such as `'--seed=2, was 1'`."""
        former = "''" if self.was == '' else _shown(self.was)
        return '%s, was %s' % (_given(self.name, self.now), former)

    def __str__(self):
        consequence = 'changes the run from here on'
        if self.kind == HARMLESS:
            consequence = 'no change to the run'
        return '%s: %s' % (self.text, consequence)


class RunSettings(tf.train.SessionRunHook):
    """The values of the settings that a program was started with; a hook that writes them.

    The file `settings.json` in the directory of the checkpoints has the settings of the latest
    start. It is written when the session has been made, and before the first checkpoint is saved:
    so a start that fails earlier writes nothing. A run that goes on says each difference in a line.
    """

    def __init__(self, values: dict, kinds: typing.Dict[str, str], directory: str):
        """
        Args:
          values: {name of a setting: value}. The name is a flag's; or, of what is no flag, words
            with a space, such as 'number of workers'.
          kinds: {name of a setting: kind}, see `Difference.kind`; a setting without one is
            `CHANGES`.
          directory: the directory of the checkpoints.
        """
        self.values = values
        self._kinds = kinds
        self._path = os.path.join(directory, FILE)
        self._directory = directory
        self._goes_on = False
        self._is_written = False

    def compare(self) -> typing.Optional[typing.List[Difference]]:
        """Compares these settings with those of the latest start; None where the file is missing.
        """
        former = _read(self._directory)
        if former is None:
            return None
        differences = []
        for name, value in self.values.items():
            if name in former and not _same(former[name], value):
                kind = self._kinds.get(name, CHANGES)
                differences.append(Difference(name, former[name], value, kind))
        return differences

    def check(self, newest: typing.Any, missing: typing.Optional[str],
              dropped: typing.Optional[str]) -> typing.List[str]:
        """Compares the settings of a run that goes on, see `training_session(check=…)`.

        Raises:
          CheckpointError: the checkpoint has other variables than the graph, and the change of a
            setting is the reason; or it has state that would be dropped.
        """
        self._goes_on = True
        differences = self.compare()
        guilty = [each for each in differences or [] if each.kind == STATE]
        if missing is not None and guilty:
            raise self._error(guilty, missing)
        if missing is None and dropped is not None:
            raise self._error(guilty, dropped)
        if differences is None:
            return ['%s is missing (an older run, perhaps): whether settings have changed cannot '
                    'be told' % self._path]
        return [str(each) for each in differences]

    def _error(self, guilty: typing.List[Difference], text: str):
        """The `CheckpointError` of a text, with the settings that are its reason, if any."""
        reasons = ''
        advice = ''
        if guilty:
            reasons = ', '.join(each.text for each in guilty) + ': '
            former = ' '.join(_given(each.name, each.was) for each in guilty)
            advice = 'Go on with %s. ' % former
        return CheckpointError(
            '%s%s. Nothing was changed. %sOr begin another run in another --train_dir, which '
            '--init_from=%s starts with what fits of the weights.' % (
                reasons, text, advice, self._directory))

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator):
        """Writes the settings, once; of a new run, an older file is renamed."""
        if not self._is_written:
            self._is_written = True
            self.write()

    def write(self) -> None:
        """Writes the file."""
        if os.path.lexists(self._path) and not self._goes_on:
            print('%s was that of an earlier run, whose checkpoints are gone: renamed to %s'
                  % (self._path, moved_aside(self._path)))
        with written_whole(self._path, advice='Make room or make the directory writable.') as file:
            json.dump({'settings': self.values}, file, indent=1)
            file.write('\n')


def run_settings(batch_size: int, dataset: typing.Any = None, workers: int = 1) -> RunSettings:
    """The settings of the flags, and of a data set.

    Args:
      batch_size: in the place of an 'auto'.
      dataset: its number of examples, and its names of classes and files, are settings, too; or
        None.
      workers: how many there are.
    """
    kinds = {name: setting.kind for name, setting in SETTINGS.items() if setting.kind != ONCE}
    values: dict = collections.OrderedDict((name, FLAGS[name].value) for name in kinds)
    values['batch_size'] = batch_size
    values['number of workers'] = workers
    if decays_until_the_end():
        kinds['train_steps'] = CHANGES
        kinds['train_epochs'] = CHANGES
    if dataset is not None:
        values.update(_settings_of(dataset))
    return RunSettings(values, kinds, train_dir())


def _settings_of(dataset: typing.Any):
    """What is compared of a data set, by name."""
    values: dict = collections.OrderedDict()
    if getattr(dataset, 'classes', None) is not None:  # which have names
        values[_CLASSES] = '\n'.join(dataset.classes)
    values['number of training examples'] = int(dataset.num_examples['train'])
    if hasattr(dataset, 'names_digest'):  # files, and they number the examples by their names
        values['digest of the names of training files'] = dataset.names_digest('train')
    return values


def recorded_setting(name: str) -> typing.Any:
    """The value of a setting at the latest start of the run; None if it is not recorded."""
    settings = _read(train_dir())
    return None if settings is None else settings.get(name)


def _read(directory):
    """The settings in the file of a directory, a dict; None without a file.

    Raises:
      BadFileError: it holds something else, or cannot be read.
    """
    values = {str: SCALAR + ([SCALAR],)}
    found = read_json(os.path.join(directory, FILE), {'settings': values, str: [values]},
                      'move it away, to go on without a look at what has changed', _MOST_BYTES)
    return None if found is None else found['settings']


def _same(former, value):
    """Whether a former value and a value are equal, or both are none in some way ('', 0, None).

    1 and 1.0 are equal, 1 and True are not.
    """
    if not former and not value:
        return True
    return former == value and isinstance(former, bool) == isinstance(value, bool)


def _shown(value):
    """A value as it is shown."""
    return shown('%.300s' % (value,))


def _given(name, value):
    """The setting of a name, and a value, as it is given: '--seed=1', 'keep=5 of --config'."""
    if ' ' in name:
        return '%s: %s' % (name, _shown(value))
    if name in OPTIONS_BY_NAME:
        return '%s=%s of --config' % (name, _shown(value))
    return '--%s=%s' % (name, _shown(value))


def check_classes(dataset: typing.Any) -> None:
    """Raises `DatasetError` for classes that are not those which the run's network was trained on.

    A class folder that came, went or got another name moves the numbers of those after it, and
    every label would mean another output of the network.
    """
    recorded = recorded_setting(_CLASSES)
    classes = getattr(dataset, 'classes', None)
    if classes is None or recorded is None or not newest_prefix(train_dir()):
        return
    if not isinstance(recorded, str):
        raise BadFileError('%s/settings.json is not as train.py wrote it: %s is %.80r. Move it '
                           'away.' % (train_dir(), _CLASSES, recorded))
    # Both split, since a name may have a line break in it.
    trained = recorded.split('\n')
    found = '\n'.join(classes).split('\n')
    for number, (now, was) in enumerate(itertools.zip_longest(found, trained)):
        if now != was:
            raise datasets.DatasetError(
                'the %d classes of --data_dir=%s are not the %d that the run in %s was trained on: '
                'class %d is %s, and was %s. Give the folders their old names, or begin another '
                'run in another --train_dir.' % (
                    len(found), FLAGS.data_dir, len(trained), train_dir(), number,
                    _class_name(now), _class_name(was)))


def _class_name(name):
    """The name of a class as it is shown; 'none' for None."""
    return 'none' if name is None else repr(name)
