"""A session that goes on where the newest checkpoint of a directory left off."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_count, check_flag, check_function, check_instance,
                              check_step_variable, directory_name, listed_hooks)
from towers.build.built import BuiltTowers
from towers.checkpoint.files import newest_checkpoint
from towers.checkpoint.match import InitialValues, check_fits, difference, some
from towers.checkpoint.tidy import tidy_directory
from towers.errors import InvalidArgumentError
from towers.memory.out_of_memory import out_of_memory_explained
from towers.nonfinite import explained
from towers.placement.devices import config_of_towers
from towers.run.checkpoint_hook import CheckpointHook
from towers.run.run_lock import hold_directory
from towers.run.run_settings import STATE, RunSettings
from towers.run.step_loop import LoopSession, OccasionalHook


@contextlib.contextmanager
def training_session(directory: str, global_step: typing.Optional[tf.Variable],
                     hooks: typing.Iterable, config: typing.Optional[tf.ConfigProto] = None,
                     save_steps: typing.Optional[int] = 500, keep: int = 5, recover: bool = False,
                     initial_values: typing.Any = None, listeners: typing.Sequence = (),
                     saver: typing.Optional[tf.train.Saver] = None, say: typing.Callable = print,
                     last_hooks: typing.Iterable = (), settings: typing.Optional[dict] = None,
                     built: typing.Any = None, memory_limit: typing.Optional[int] = None,
                     member: typing.Any = None) -> typing.Iterator:
    """A `LoopSession` for a run that can be killed at any moment and started again.

    In this order: takes the directory for this process alone; finds the newest checkpoint and
    reads it wholly; removes what a killed writer left; compares the checkpoint with the graph's
    variables; and only then makes the session, with `CheckpointHook` after the hooks given.

    Args:
      directory: of the checkpoints.
      global_step: the variable that counts steps.
      hooks: list of `SessionRunHook`s. They come before the one that saves, so that one that
        raises for a bad step keeps it from being saved.
      config: `tf.ConfigProto`, see `session_config`. None: that of the towers in the default graph,
        if it has any.
      save_steps, keep: see `CheckpointHook`.
      recover: go on from the checkpoint before a damaged newest one.
      initial_values: `InitialValues` to start from where the directory has no checkpoint; or None.
      listeners: `CheckpointSaverListener`s.
      saver: a `tf.train.Saver`; None for one of all variables.
      say: called with each line about what was found.
      last_hooks: hooks that come after the one that saves: `StopOnSignalHook`, which then still
        keeps a signal from cutting the last save short.
      settings: `RunSettings` that the program was started with, or None. They are written beside
        the checkpoints when the run begins or does the first step of this start; a run that goes on
        says which are others than before, and is refused where that would drop state that the
        newest checkpoint holds. Without them, such state is said.
      built: what `build_towers` returned, for what is said when memory runs out; or None.
      memory_limit: bytes that a device has, for the same; None: what it says itself.
      member: `Member`, the chief of a cluster, in which the session then is; or None.

    Yields:
      The session, a `tf.train.MonitoredSession` that has `run_steps` as well, see `step_loop`.

    Raises:
      InvalidArgumentError: an argument of another kind, before anything is touched.
      RunLockedError: another process has the directory.
      CheckpointError: the newest checkpoint is damaged, or is of another model, or has state that
        would be dropped; or, while it runs, a checkpoint could not be written.
      LogFileError: the settings cannot be written.
      OutOfMemoryError: a step ran out of memory (with `built`).
      NonFiniteError: a step found a NaN or an infinity (`build_towers(check_numerics=True)`).
    """
    directory = directory_name('directory', directory)
    check_step_variable(global_step)
    hooks, last_hooks = listed_hooks('hooks', hooks), listed_hooks('last_hooks', last_hooks)
    if config is None:
        config = config_of_towers()
    else:
        check_instance('config', config, tf.ConfigProto, 'a tf.ConfigProto, see session_config')
    check_flag('recover', recover)
    if built is not None:
        check_instance('built', built, BuiltTowers, 'what build_towers returned, or None')
    if memory_limit is not None:
        check_count('memory_limit', memory_limit)
    if settings is not None:
        check_instance('settings', settings, RunSettings, 'a RunSettings, or None')
    if member is not None and not hasattr(member, 'session_creator'):  # its room is above this one
        raise InvalidArgumentError('member=%.80r: expected what towers.join gives, or None.'
                                   % (member,))
    check_function('say', say, 1, 'a function of a line of text, such as print')
    if initial_values is not None:
        check_instance('initial_values', initial_values, InitialValues, 'what init_from returned')
    # What is wrong with the arguments of this hook shows before the directory is touched.
    CheckpointHook(directory, global_step, save_steps, keep=keep, saver=saver, listeners=listeners)
    with hold_directory(directory):
        newest = newest_checkpoint(directory, recover)
        told, differences = [], []
        if newest is not None:
            told, differences = _check_state(directory, newest, settings)
            for damaged in newest.skipped:
                say('passed over %s' % (damaged,))  # a tuple itself
            say('going on from %s' % newest.prefix)
        for line in told + tidy_directory(directory, newest):
            say(line)
        init_fn = None
        if newest is None and initial_values is not None:
            say(str(initial_values))

            def init_fn(unused_scaffold, session):
                initial_values.restore(session)
        elif initial_values is not None:
            say('initial values are not taken: the run has a checkpoint, from which it goes on')
        saver = saver or tf.train.Saver(save_relative_paths=True)
        checkpoints = CheckpointHook(directory, global_step, save_steps, keep=keep, saver=saver,
                                     listeners=listeners)
        scaffold, target = tf.train.Scaffold(saver=saver, init_fn=init_fn), ''
        if member is not None:
            config, target = member.config, member.target
        creator = _NewestCheckpoint(directory, newest, scaffold, config, target)
        steps = _StepsDone(global_step)
        first = [steps] if settings is None else [
            steps, _WriteSettings(settings, directory, newest, differences, say)]
        if member is not None:
            creator = member.session_creator(creator, scaffold)
            hooks = member.hooks + hooks
        try:
            with contextlib.ExitStack() as stack:
                if built is not None:
                    stack.enter_context(out_of_memory_explained(built, directory, memory_limit))
                yield stack.enter_context(LoopSession(
                    creator, first + hooks + [checkpoints] + last_hooks))
        except tf.errors.InvalidArgumentError as error:
            reason = explained(error, steps.number + 1)
            if reason is None:
                raise
            raise reason from None


def _check_state(directory, newest, settings):
    """Compares the newest checkpoint with the graph, and the settings with those of the run.

    Returns:
      (lines to be shown, list of the settings' `Difference`s).

    Raises:
      CheckpointError: going on would drop state, or state is missing.
    """
    differences, problem = [], None
    if settings is not None:
        differences, problem = settings.compare(directory)
    text, dropped = difference(newest.prefix)
    if text is not None:
        if any(each.kind == STATE for each in differences):
            raise settings.refusal(directory, differences, text)
        check_fits(newest.prefix)  # raises
    lines = []
    if dropped:
        text = 'the checkpoint %s holds state that the checkpoints to come would be without: %s' % (
            newest.prefix, some(dropped))
        if settings is not None:
            raise settings.refusal(directory, differences, text)
        lines.append(text)
    if settings is not None:
        lines += [problem] if problem else [str(each) for each in differences]
    return lines, differences


class _NewestCheckpoint(tf.train.SessionCreator):
    """Makes sessions from the newest checkpoint; the first one from that which was checked.

    A session that is lost (`AbortedError`, `UnavailableError`) is made anew by `MonitoredSession`,
    and by then the run has saved others.
    """

    def __init__(self, directory, newest, scaffold, config, target):
        self._target = target
        self._directory, self._newest, self._is_first = directory, newest, True
        self._scaffold, self._config = scaffold, config

    def create_session(self):
        newest = self._newest if self._is_first else newest_checkpoint(self._directory)
        self._is_first = False
        return tf.train.ChiefSessionCreator(
            self._scaffold, self._target, config=self._config,
            checkpoint_filename_with_path=newest.prefix if newest else None).create_session()


class _WriteSettings(OccasionalHook):
    """Writes the settings of a run when it really begins, or really goes on.

    A new run's, once there is a session and before the first checkpoint is saved; those of a run
    that goes on, before its first step. So a start that ends earlier, or that finds no step left to
    do, leaves none behind.
    """

    def __init__(self, settings, directory, newest, differences, say):
        self._settings, self._directory, self._newest = settings, directory, newest
        self._differences, self._say = differences, say
        self._written = False

    def after_create_session(self, session, coord):
        if self._newest is None:
            self._write(lambda: self._settings.begin(self._directory))

    def before_run(self, run_context):
        self._write(lambda: self._settings.record(self._directory, self._newest.step,
                                                  self._differences))

    def is_due(self):
        return not self._written

    def _write(self, write):
        if not self._written:
            for line in write():
                self._say(line)
            self._written = True


class _StepsDone(OccasionalHook):
    """Knows the number of the last step that went well, also when the session is gone."""

    def __init__(self, global_step):
        self.number = 0
        self._global_step = global_step

    def after_create_session(self, session, coord):
        self.number = int(session.run(self._global_step))

    def after_run(self, run_context, run_values):
        self.number += 1

    def is_due(self):
        return False

    def step_done(self, fetched):
        self.number += 1
