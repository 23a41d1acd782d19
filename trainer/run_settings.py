"""The settings of a run, in a file beside its checkpoints, compared at each later start."""

import collections
import itertools
import json
import os

import tensorflow.compat.v1 as tf

import datasets
from towers.checkpoint.files import newest_prefix
from towers.errors import BadFileError, CheckpointError, shown
from towers.safe_files import SCALAR, moved_aside, read_json, written_whole
from trainer.flags import (CHANGES, FLAGS, HARMLESS, ONCE, OPTIONS_BY_NAME, SETTINGS, STATE,
                           train_dir)

FILE = 'settings.json'

_CLASSES = 'names of classes'
_MOST_BYTES = 2 ** 26  # of the file, which may name a million classes


class Difference(collections.namedtuple('Difference', 'name was now kind')):
    """A setting with another value than when the run was last started; its kind is `HARMLESS`: the
    numbers stay those of a run that was never stopped; `CHANGES`: they are others from here on; or
    `STATE`: where the variables of graph and checkpoint differ, too, this is said as the reason."""
    __slots__ = ()

    @property
    def text(self):
        """Such as `'--seed=2, was 1'`."""
        return '%s, was %s' % (_given(self.name, self.now),
                               "''" if self.was == '' else _shown(self.was))

    def __str__(self):
        return '%s: %s' % (self.text, 'no change to the run' if self.kind == HARMLESS else
                           'changes the run from here on')


class RunSettings(tf.train.SessionRunHook):
    """The values of the settings that a program was started with; a hook that writes them.

    The file `settings.json` in the directory of the checkpoints has the settings of the latest
    start. It is written when the session has been made, and before the first checkpoint is saved:
    so a start that fails earlier writes nothing. A run that goes on says each difference in a line.
    """

    def __init__(self, values, kinds, directory):
        """`values` by names, in plain words where they have a space, else of flags; `kinds` by
        names, `CHANGES` of those that are missing; the directory of the checkpoints."""
        self.values, self._kinds = values, kinds
        self._path, self._directory = os.path.join(directory, FILE), directory
        self._goes_on = self._is_written = False

    def compare(self):
        """Compares these settings with those of the latest start: a list of `Difference`; None
        where the file is missing."""
        former = _read(self._directory)
        if former is None:
            return None
        return [Difference(name, former[name], value, self._kinds.get(name, CHANGES))
                for name, value in self.values.items()
                if name in former and not _same(former[name], value)]

    def check(self, newest, missing, dropped):
        """Compares the settings of a run that goes on, see `training_session(check=…)`.

        Raises:
          CheckpointError: the checkpoint has other variables than the graph, and the change of a
            setting is the reason; or it has state that would be dropped.
        """
        self._goes_on = True
        differences = self.compare()
        guilty = [each for each in differences or [] if each.kind == STATE]
        if missing is not None and guilty or missing is None and dropped is not None:
            raise CheckpointError(
                '%s%s. Nothing was changed. %sOr begin another run in another --train_dir, which '
                '--init_from=%s starts with what fits of the weights.' % (
                    ', '.join(each.text for each in guilty) + ': ' * bool(guilty),
                    missing or dropped, 'Go on with %s. ' % ' '.join(
                        _given(each.name, each.was) for each in guilty) * bool(guilty),
                    self._directory))
        return [str(each) for each in differences] if differences is not None else [
            '%s is missing (an older run, perhaps): whether settings have changed cannot be told'
            % self._path]

    def after_create_session(self, session, coord):
        """Writes the settings, once; of a new run, an older file is renamed."""
        if not self._is_written:
            self._is_written = True
            self.write()

    def write(self):
        """Writes the file."""
        if os.path.lexists(self._path) and not self._goes_on:
            print('%s was that of an earlier run, whose checkpoints are gone: renamed to %s'
                  % (self._path, moved_aside(self._path)))
        with written_whole(self._path, advice='Make room or make the directory writable.') as file:
            json.dump({'settings': self.values}, file, indent=1)
            file.write('\n')


def run_settings(batch_size, dataset=None, workers=1):
    """The `RunSettings` of the flags, with the batch size in place of an 'auto'; of a data set its
    number of examples, and its names of classes and files, are settings, too."""
    kinds = {name: setting.kind for name, setting in SETTINGS.items() if setting.kind != ONCE}
    values = collections.OrderedDict((name, FLAGS[name].value) for name in kinds)
    values.update({'batch_size': batch_size, 'number of workers': workers})
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:  # the rate falls until the last step
        kinds.update(train_steps=CHANGES, train_epochs=CHANGES)
    if dataset is not None:
        if getattr(dataset, 'classes', None) is not None:  # which have names
            values[_CLASSES] = '\n'.join(dataset.classes)
        values['number of training examples'] = int(dataset.num_examples['train'])
        if hasattr(dataset, 'names_digest'):  # files, and they number the examples by their names
            values['digest of the names of training files'] = dataset.names_digest('train')
    return RunSettings(values, kinds, train_dir())


def recorded_setting(name):
    """The value of a setting at the latest start of the run; None if it is not recorded."""
    return (_read(train_dir()) or {}).get(name)


def _read(directory):
    """The settings in the file, a dict; None without a file.

    Raises:
      BadFileError: it holds something else, or cannot be read.
    """
    values = {str: SCALAR + ([SCALAR],)}
    found = read_json(os.path.join(directory, FILE), {'settings': values, str: [values]},
                      'move it away, to go on without a look at what has changed', _MOST_BYTES)
    return found and found['settings']


def _same(former, value):
    """Whether two values are equal, where 1 and 1.0 are, and 1 and True are not; or both are none,
    in the way of this version and of an older one."""
    if not former and not value:
        return True
    return former == value and isinstance(former, bool) == isinstance(value, bool)


def _shown(value):
    return shown('%.300s' % (value,))


def _given(name, value):
    """A setting and its value, as it is given: '--seed=1', 'keep=5 of --config'."""
    return ('%s: %s' if ' ' in name else '%s=%s of --config' if name in OPTIONS_BY_NAME else
            '--%s=%s') % (name, _shown(value))


def check_classes(dataset):
    """Raises `DatasetError` for classes that are not those which the run's network was trained on.

    A class folder that came, went or got another name moves the numbers of those after it, and
    every label would mean another output of the network.
    """
    recorded, found = recorded_setting(_CLASSES), getattr(dataset, 'classes', None)
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
