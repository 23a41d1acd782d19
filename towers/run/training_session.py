"""A session that goes on where the newest checkpoint of a directory left off."""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (check_count, check_flag, check_function, check_instance,
                              check_step_variable, directory_name, listed_hooks)
from towers.api.built import BuiltTowers
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
from towers.tower import staged_guard


@contextlib.contextmanager
def training_session(directory: str, global_step: typing.Optional[tf.Variable],
                     hooks: typing.Iterable, config: typing.Optional[tf.ConfigProto] = None, *,
                     last_hooks: typing.Iterable = (), save_steps: typing.Optional[int] = 500,
                     keep: int = 5, saver: typing.Optional[tf.train.Saver] = None,
                     listeners: typing.Sequence = (), recover: bool = False,
                     initial_values: typing.Any = None,
                     settings: typing.Optional[RunSettings] = None, built: typing.Any = None,
                     memory_limit: typing.Optional[int] = None, member: typing.Any = None,
                     say: typing.Callable = print) -> typing.Iterator:
    """A `LoopSession` for a run that can be killed at any moment and started again.

    In this order: locks the directory for this process; finds the newest checkpoint and reads all
    of it; removes what a killed writer left; compares the checkpoint with the graph's variables;
    and only then makes the session, with a `CheckpointHook` after `hooks` and before `last_hooks`.

    Args:
      directory: of the checkpoints.
      global_step: the variable that counts steps.
      hooks: list of `SessionRunHook`s. They come before the `CheckpointHook`, so that one that
        raises for a bad step keeps this step from being saved.
      config: `tf.ConfigProto`, see `session_config`. None: the config of the towers in the default
        graph, if it has any.
      last_hooks: hooks that come after the `CheckpointHook`: `StopOnSignalHook`, whose handlers
        then are still installed during the last save.
      save_steps, keep, saver, listeners: see `CheckpointHook`; without `saver` it is one of all
        variables.
      recover: where the newest checkpoint is damaged, whether to go on from the one before it.
      initial_values: what `init_from` returned, to start from where the directory has no
        checkpoint; or None.
      settings: `RunSettings` that the program was started with, or None. They are written beside
        the checkpoints when the run begins, and again with the first step of each start. A run that
        goes on says which of them have changed, and is refused where the change would drop state
        that the newest checkpoint holds. Without `settings` such state is said, and dropped.
      built: what `build_towers` returned, for the advice when a step runs out of memory; or None.
      memory_limit: bytes that a device has, for the same advice; None: what the device reports.
      member: `Member`, if this process is the chief of a cluster; or None.
      say: called with each line about what was found in the directory.

    Yields:
      The `LoopSession`: a `tf.train.MonitoredSession` with `run_steps`.

    Raises:
      InvalidArgumentError: an argument of another kind, before the directory is touched.
      RunLockedError: another process has the directory.
      CheckpointError: the newest checkpoint is damaged, or is of another model, or has state that
        would be dropped; or, during the run, a checkpoint could not be written.
      LogFileError: the settings cannot be written.
      OutOfMemoryError: a step ran out of memory (with `built`).
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
      InputError: a run with `stage_inputs` also reads another batch than the staged one, or
        feeds all towers; or the state of its iterator is saved.
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
    # Made for its checks alone: an error about its arguments comes before the directory is touched.
    CheckpointHook(directory, global_step, save_steps, keep=keep, saver=saver, listeners=listeners)
    with hold_directory(directory):
        newest, differences = _checked_newest(directory, recover, settings, say)
        init_fn = _init_fn(initial_values, newest, say)
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
        except (tf.errors.OpError, ValueError) as error:
            reason = staged_guard.explained(error)
            if reason is None and isinstance(error, tf.errors.OpError):
                reason = explained(error, steps.number + 1)
            if reason is None:
                raise
            raise reason from None


def _checked_newest(directory, recover, settings, say):
    """Finds the newest checkpoint, compares it with the graph, and tidies the directory.

    Returns:
      `(newest, differences)`: what `newest_checkpoint` returned, and the list of `Difference`s
      between `settings` and the settings of the last start.

    Raises:
      CheckpointError: the newest checkpoint is damaged, is of another model, or has state that
        would be dropped.
    """
    newest = newest_checkpoint(directory, recover)
    told, differences = [], []
    if newest is not None:
        told, differences = _check_state(directory, newest, settings)
        for damaged in newest.skipped:
            say('passed over %s' % (damaged,))  # `damaged` is a tuple
        say('going on from %s' % newest.prefix)
    for line in told + tidy_directory(directory, newest):
        say(line)
    return newest, differences


def _init_fn(initial_values, newest, say):
    """The `init_fn` of the session's `Scaffold`: restores the `InitialValues` of a new run.

    None where there are none, or where the run goes on from a checkpoint.
    """
    if initial_values is None:
        return None
    if newest is not None:
        say('initial values are not taken: the run has a checkpoint, from which it goes on')
        return None
    say(str(initial_values))
    return lambda unused_scaffold, session: initial_values.restore(session)


def _check_state(directory, newest, settings):
    """Compares the newest checkpoint with the graph, and the settings with the last start's.

    Returns:
      `(lines, differences)`: lines to be shown, and the list of the settings' `Difference`s.

    Raises:
      CheckpointError: a variable of the graph is not in the checkpoint; or, with `settings`, state
        in the checkpoint is not in the graph.
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
    """Makes sessions from the newest checkpoint.

    The first session is restored from the checkpoint that was checked. When a session is lost
    (`AbortedError`, `UnavailableError`), `MonitoredSession` makes another one, and by then the run
    has saved later checkpoints.
    """

    def __init__(self, directory, newest, scaffold, config, target):
        self._target = target
        self._directory, self._newest, self._is_first = directory, newest, True
        self._scaffold, self._config = scaffold, config

    def create_session(self):
        """A `tf.Session` with the restored (or initialised) variables."""
        newest = self._newest if self._is_first else newest_checkpoint(self._directory)
        self._is_first = False
        return tf.train.ChiefSessionCreator(
            self._scaffold, self._target, config=self._config,
            checkpoint_filename_with_path=newest.prefix if newest else None).create_session()


class _WriteSettings(OccasionalHook):
    """Writes the settings beside the checkpoints, once for each start of the program.

    For a new run when the session has been made, before the first checkpoint is saved; for a run
    that goes on before its first step. So a start that fails earlier, or has no step left to do,
    writes nothing.
    """

    def __init__(self, settings, directory, newest, differences, say):
        self._settings, self._directory, self._newest = settings, directory, newest
        self._differences, self._say = differences, say
        self._written = False

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
            for line in write():
                self._say(line)
            self._written = True


class _StepsDone(OccasionalHook):
    """Counts the steps that have succeeded, for an error that is raised when the session is closed.

    Attributes:
      number: of the last step that succeeded.
    """

    def __init__(self, global_step):
        self.number = 0
        self._global_step = global_step

    def after_create_session(self, session, coord):
        """Takes the step from the session's variables."""
        self.number = int(session.run(self._global_step))

    def after_run(self, run_context, run_values):
        """Counts a step."""
        self.number += 1

    def is_due(self):
        """Never: `step_done` counts as well."""
        return False

    def step_done(self, fetched):
        """Counts a step."""
        self.number += 1
