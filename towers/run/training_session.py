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
from towers.errors import InvalidArgumentError, explained
from towers.memory.fit import out_of_memory_explained
from towers.placement.devices import config_of_towers
from towers.run.checkpoint_hook import CheckpointHook
from towers.run.run_lock import hold_directory


@contextlib.contextmanager
def training_session(directory: str, global_step: typing.Optional[tf.Variable],
                     hooks: typing.Iterable, config: typing.Optional[tf.ConfigProto] = None, *,
                     last_hooks: typing.Iterable = (), save_steps: int = 500,
                     keep: int = 5, saver: typing.Optional[tf.train.Saver] = None,
                     listeners: typing.Sequence = (), recover: bool = False,
                     initial_values: typing.Any = None,
                     check: typing.Optional[typing.Callable] = None, built: typing.Any = None,
                     memory_limit: typing.Optional[int] = None, member: typing.Any = None,
                     say: typing.Callable = print) -> typing.Iterator:
    """A `tf.train.MonitoredSession` for a run that can be killed at any moment and started again.

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
      check: function of a program that has more to compare when a run goes on, called as
        `check(newest, missing, dropped)` before anything in the directory is changed: with what
        `newest_checkpoint` returned, and what the checkpoint lacks of the graph's variables, and
        the graph of the checkpoint's, each a text or None. It returns lines to be shown, or raises
        to refuse the run. Or None.
      built: what `build_towers` returned, for the advice when a step runs out of memory; or None.
      memory_limit: bytes that a device has, for the same advice; None: what the device reports.
      member: `Member`, if this process is the chief of a cluster; or None.
      say: called with each line about what was found in the directory.

    Yields:
      The session.

    Raises:
      InvalidArgumentError: an argument of another kind, before the directory is touched.
      RunLockedError: another process has the directory.
      CheckpointError: the newest checkpoint is damaged, or is of another model; or, during the run,
        a checkpoint could not be written.
      OutOfMemoryError: a step ran out of memory (with `built`).
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
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
    if check is not None:
        check_function('check', check, 3, 'a function of a checkpoint and two texts, or None')
    if member is not None and not hasattr(member, 'session_creator'):  # its room is above this one
        raise InvalidArgumentError('member=%.80r: expected what towers.join gives, or None.'
                                   % (member,))
    check_function('say', say, 1, 'a function of a line of text, such as print')
    if initial_values is not None:
        check_instance('initial_values', initial_values, InitialValues, 'what init_from returned')
    # Made for its checks alone: an error about its arguments comes before the directory is touched.
    CheckpointHook(directory, global_step, save_steps, keep=keep, saver=saver, listeners=listeners)
    with hold_directory(directory):
        newest = _checked_newest(directory, recover, check, say)
        init_fn = None
        if initial_values is not None and newest is not None:
            say('initial values are not taken: the run has a checkpoint, from which it goes on')
        elif initial_values is not None:
            say(str(initial_values))
            init_fn = lambda unused_scaffold, session: initial_values.restore(session)  # noqa: E731
        saver = saver or tf.train.Saver(save_relative_paths=True)
        checkpoints = CheckpointHook(
            directory, global_step, save_steps, keep=keep, saver=saver,
            listeners=list(listeners) + ([] if member is None else member.listeners))
        scaffold, target = tf.train.Scaffold(saver=saver, init_fn=init_fn), ''
        if member is not None:
            config, target = member.config, member.target
        creator = _NewestCheckpoint(directory, newest, scaffold, config, target)
        steps = _StepsDone(global_step)
        if member is not None:
            creator = member.session_creator(creator, scaffold)
            hooks = member.hooks + hooks
        try:
            with contextlib.ExitStack() as stack:
                if built is not None:
                    stack.enter_context(out_of_memory_explained(built, directory, memory_limit))
                yield stack.enter_context(tf.train.MonitoredSession(
                    creator, [steps] + hooks + [checkpoints] + last_hooks))
        except tf.errors.OpError as error:
            reason = explained(error, steps.number + 1)
            if reason is None:
                raise
            raise reason from None


def _checked_newest(directory, recover, check, say):
    """Finds the newest checkpoint, compares it with the graph, and tidies the directory.

    Returns:
      What `newest_checkpoint` returned.

    Raises:
      CheckpointError: the newest checkpoint is damaged, or a variable of the graph is not in it; or
        what `check` raises.
    """
    newest, told = newest_checkpoint(directory, recover), []
    if newest is not None:
        missing, dropped = difference(newest.prefix)
        lost = None
        if dropped:
            lost = 'the checkpoint %s holds state that the checkpoints to come would be without: %s'
            lost %= (newest.prefix, some(dropped))
            told.append(lost)
        told += [] if check is None else check(newest, missing, lost)
        if missing is not None:
            check_fits(newest.prefix)  # raises
        for damaged in newest.skipped:
            say('passed over %s' % (damaged,))  # `damaged` is a tuple
        say('going on from %s' % newest.prefix)
    for line in told + tidy_directory(directory, newest):
        say(line)
    return newest


class _NewestCheckpoint(tf.train.SessionCreator):
    """Makes sessions from the newest checkpoint: the first one from that which was checked. When a
    session is lost (`AbortedError`, `UnavailableError`), `MonitoredSession` makes another one, and
    by then the run has saved later checkpoints."""

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


class _StepsDone(tf.train.SessionRunHook):
    """Counts the steps that have succeeded, for an error that is raised when the session is closed.
    """

    def __init__(self, global_step):
        self.number, self._global_step = 0, global_step

    def after_create_session(self, session, coord):
        """Takes the step from the session's variables."""
        self.number = int(session.run(self._global_step))

    def after_run(self, run_context, run_values):
        """Counts a step."""
        self.number += 1
