"""`RunSettings`: the settings of a run, in a file beside its checkpoints. Each later start of the
run compares its own settings with the file."""

import collections
import itertools
import json
import os
import typing

import tensorflow.compat.v1 as tf

import datasets
from towers.checkpoint.newest import newest_prefix
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
_MOST_BYTES = 2 ** 26  # a larger file is refused; this one may name a million classes


class Difference(typing.NamedTuple):
    """A setting with another value than when the run was last started.

    Attributes:
      name: the setting's name.
      was: its value at the former start.
      now: its value at this start.
      kind: `HARMLESS`: the run computes the same numbers as without the change; `CHANGES`: it
        computes other numbers from here on; `STATE`: it may also have other variables than the
        checkpoint, and an error about such variables names the setting as the reason.
    """
    name: str
    was: typing.Any
    now: typing.Any
    kind: str

    @property
    def text(self) -> str:
        """The setting with both values, such as `'--seed=2, was 1'`."""
        former = "''" if self.was == '' else _shown(self.was)
        return '%s, was %s' % (_given(self.name, self.now), former)

    def __str__(self):
        """A line about the setting, both values, and the consequence."""
        consequence = 'changes the run from here on'
        if self.kind == HARMLESS:
            consequence = 'no change to the run'
        return '%s: %s' % (self.text, consequence)


class RunSettings(tf.train.SessionRunHook):
    """The settings that a program was started with, and the hook that writes them to a file.

    The file `settings.json` in the directory of the checkpoints has the settings of the latest
    start. It is written after the session is made, and before the first checkpoint is saved: so a
    start that fails earlier writes nothing. A run that goes on says each difference in a line.

    Attributes:
      values: the settings, by name.
    """

    def __init__(self, values: dict, kinds: typing.Dict[str, str], directory: str):
        """
        Args:
          values: {name of a setting: value}. A flag has its own name. The name of a value that is
            no flag has a space in it, such as 'number of workers'.
          kinds: {name of a setting: kind}, see `Difference.kind`; the default is `CHANGES`.
          directory: the directory of the checkpoints.
        """
        self.values = values
        self._kinds = kinds
        self._path = os.path.join(directory, FILE)
        self._directory = directory
        self._goes_on = False  # whether the run goes on from a checkpoint, and does not begin
        self._is_written = False

    def compare(self) -> typing.Optional[typing.List[Difference]]:
        """The differences between these settings and the settings of the latest start; None if the
        file is missing."""
        former = _read(self._directory)
        if former is None:
            return None
        differences = []
        for name, value in self.values.items():
            # A setting that is not in the file is newer than the program that wrote it.
            if name in former and not _same(former[name], value):
                kind = self._kinds.get(name, CHANGES)
                differences.append(Difference(name, former[name], value, kind))
        return differences

    def check(self, newest: typing.Any, missing: typing.Optional[str],
              dropped: typing.Optional[str]) -> typing.List[str]:
        """Compares the settings of a run that goes on. It is the `check` of `training_session`.

        Args:
          newest: the newest checkpoint.
          missing: text about variables of the graph that the checkpoint does not have; or None.
          dropped: text about variables of the checkpoint that the graph does not have; or None.

        Returns:
          A line for each difference.

        Raises:
          CheckpointError: the checkpoint has other variables than the graph, and the change of a
            setting is the reason; or it has variables that would be dropped.
        """
        self._goes_on = True  # `training_session` calls `check` only where there is a checkpoint
        compared = self.compare()
        differences = compared or []
        self._check_variables(missing, dropped, differences)
        if compared is None:
            return ['%s is missing (an older run, perhaps): whether settings have changed cannot '
                    'be told' % self._path]
        return list(map(str, differences))

    def _check_variables(self, missing: typing.Optional[str], dropped: typing.Optional[str],
                         differences: typing.Iterable[Difference]) -> None:
        """Raises `CheckpointError` where the checkpoint has other variables than the graph, and
        `training_session` does not raise it itself.

        Args:
          missing, dropped: as for `check`.
          differences: the settings that have changed.
        """
        changes_of_state = [difference for difference in differences if difference.kind == STATE]
        if missing is not None and not changes_of_state:
            return  # `training_session` refuses this when `check` has returned
        if missing is not None:
            raise self._error(changes_of_state, missing)
        if dropped is not None:  # `training_session` would only say so, in a line
            raise self._error(changes_of_state, dropped)

    def _error(self, changes_of_state: typing.List[Difference], text: str) -> CheckpointError:
        """The error about variables that differ.

            --optimizer=sgd, was adam: <text>. Nothing was changed. Go on with --optimizer=adam. …

        Args:
          changes_of_state: the differences of settings that are the reason; or [].
          text: what differs between graph and checkpoint.
        """
        reasons = ''
        advice = ''
        if changes_of_state:
            reasons = ', '.join(change.text for change in changes_of_state) + ': '
            former_settings = [_given(change.name, change.was) for change in changes_of_state]
            advice = 'Go on with %s. ' % ' '.join(former_settings)
        return CheckpointError(
            '%s%s. Nothing was changed. %sOr begin another run in another --train_dir, which '
            '--init_from=%s starts with what fits of the weights.' % (
                reasons, text, advice, self._directory))

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator):
        """Writes the settings, once; see `write`."""
        if not self._is_written:
            self._is_written = True
            self.write()

    def write(self) -> None:
        """Writes the file; a run that begins renames a file that is there already."""
        if os.path.lexists(self._path) and not self._goes_on:
            print('%s was that of an earlier run, whose checkpoints are gone: renamed to %s'
                  % (self._path, moved_aside(self._path)))
        with written_whole(self._path, advice='Make room or make the directory writable.') as file:
            json.dump({'settings': self.values}, file, indent=1)
            file.write('\n')


def run_settings(batch_size: int, dataset: typing.Any = None, workers: int = 1) -> RunSettings:
    """The settings of the flags, and of a data set.

    Args:
      batch_size: examples a step, since the flag may be 'auto'.
      dataset: the data set, or None; its number of examples, and its names of classes and files,
        are settings as well.
      workers: the number of workers.
    """
    # A setting of the kind `ONCE` is of one start, not of the run.
    kinds = {name: setting.kind for name, setting in SETTINGS.items() if setting.kind != ONCE}
    values: dict = collections.OrderedDict((name, FLAGS[name].value) for name in kinds)
    values['batch_size'] = batch_size
    if decays_until_the_end():  # then the length of the run changes the learning rate
        kinds['train_steps'] = CHANGES
        kinds['train_epochs'] = CHANGES
    # A value that is no flag has no kind in the table, and so is of the kind `CHANGES`.
    values['number of workers'] = workers
    if dataset is not None:
        values.update(_settings_of(dataset))
    return RunSettings(values, kinds, train_dir())


def _settings_of(dataset: typing.Any) -> typing.Dict[str, typing.Any]:
    """The facts about a data set that are compared, by name."""
    values: dict = collections.OrderedDict()
    if getattr(dataset, 'classes', None) is not None:
        values[_CLASSES] = '\n'.join(dataset.classes)
    values['number of training examples'] = int(dataset.num_examples['train'])
    if hasattr(dataset, 'names_digest'):  # files, whose names say the order of the examples
        values['digest of the names of training files'] = dataset.names_digest('train')
    return values


def recorded_setting(name: str) -> typing.Any:
    """The value of a setting at the latest start of the run; None if it is not recorded."""
    settings = _read(train_dir())
    return None if settings is None else settings.get(name)


def _read(directory: str) -> typing.Optional[dict]:
    """The settings in the file in a directory; None if there is no file.

    Raises:
      BadFileError: the file has something else, or cannot be read.
    """
    # The forms that `read_json` checks: `{str: form}` is an object whose values have a form, and a
    # tuple gives several forms to choose from. A setting is a scalar, or a list of scalars.
    form_of_setting = SCALAR + ([SCALAR],)
    form_of_settings = {str: form_of_setting}
    # Older files have a list of changes beside the settings, which nobody reads any more.
    form = {'settings': form_of_settings, str: [form_of_settings]}
    content = read_json(os.path.join(directory, FILE), form,
                        'move it away, to go on without a look at what has changed', _MOST_BYTES)
    return None if content is None else content['settings']


def _same(former: typing.Any, value: typing.Any) -> bool:
    """Whether two values of a setting are the same.

    '', 0, False, None and [] are the same, since each stands for 'none'. 1 and 1.0 are the same; 1
    and True are not, though Python takes them for equal.
    """
    if not former and not value:
        return True
    return former == value and isinstance(former, bool) == isinstance(value, bool)


def _shown(value: typing.Any) -> str:
    """The first 300 characters of a value, as text that a terminal can show."""
    return shown('%.300s' % (value,))


def _given(name: str, value: typing.Any) -> str:
    """A setting as a user gives it: '--seed=1', 'keep=5 of --config'."""
    if ' ' in name:
        return '%s: %s' % (name, _shown(value))
    if name in OPTIONS_BY_NAME:
        return '%s=%s of --config' % (name, _shown(value))
    return '--%s=%s' % (name, _shown(value))


def check_classes(dataset: typing.Any) -> None:
    """Raises `DatasetError` if the classes are not those on which the run's network was trained.

    After a class folder is added, removed or renamed, the classes after it have other numbers, and
    a label would mean another output of the network.
    """
    recorded = recorded_setting(_CLASSES)
    classes = getattr(dataset, 'classes', None)
    if classes is None or recorded is None:  # a data set without names of classes
        return
    is_trained = newest_prefix(train_dir()) is not None
    if not is_trained:
        return
    if not isinstance(recorded, str):
        raise BadFileError('%s/settings.json is not as train.py wrote it: %s is %.80r. Move it '
                           'away.' % (train_dir(), _CLASSES, recorded))
    # The file has the names with line breaks between them. A name that has a line break in it falls
    # apart here. So the current names are joined and split in the same way.
    trained = recorded.split('\n')
    current = '\n'.join(classes).split('\n')
    for number, (now, was) in enumerate(itertools.zip_longest(current, trained)):
        if now != was:
            raise datasets.DatasetError(
                'the %d classes of --data_dir=%s are not the %d that the run in %s was trained on: '
                'class %d is %s, and was %s. Give the folders their old names, or begin another '
                'run in another --train_dir.' % (
                    len(current), FLAGS.data_dir, len(trained), train_dir(), number,
                    _class_name(now), _class_name(was)))


def _class_name(name: typing.Optional[str]) -> str:
    """The name of a class in quotes; 'none' for None."""
    return 'none' if name is None else repr(name)
