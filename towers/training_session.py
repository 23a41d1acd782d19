"""A session that goes on where the newest checkpoint of a directory left off."""

import contextlib

import tensorflow.compat.v1 as tf

from towers.checkpoint_files import newest_checkpoint
from towers.checkpoint_hook import CheckpointHook
from towers.checkpoint_match import check_fits
from towers.checkpoint_tidy import tidy_directory
from towers.nonfinite import explained
from towers.run_lock import hold_directory
from towers.step_loop import LoopSession, OccasionalHook


@contextlib.contextmanager
def training_session(directory, global_step, hooks, config=None, save_steps=500, keep=5,
                     recover=False, initial_values=None, listeners=(), saver=None, say=print,
                     last_hooks=()):
    """A `LoopSession` for a run that can be killed at any moment and started again.

    In this order: takes the directory for this process alone; finds the newest checkpoint and
    reads it wholly; removes what a killed writer left; compares the checkpoint with the graph's
    variables; and only then makes the session, with `CheckpointHook` after the hooks given.

    Args:
      directory: of the checkpoints.
      global_step: the variable that counts steps.
      hooks: list of `SessionRunHook`s. They come before the one that saves, so that one that
        raises for a bad step keeps it from being saved.
      config: `tf.ConfigProto`, see `session_config`.
      save_steps, keep: see `CheckpointHook`.
      recover: go on from the checkpoint before a damaged newest one.
      initial_values: `InitialValues` to start from where the directory has no checkpoint; or None.
      listeners: `CheckpointSaverListener`s.
      saver: a `tf.train.Saver`; None for one of all variables.
      say: called with each line about what was found.
      last_hooks: hooks that come after the one that saves: `StopOnSignalHook`, which then still
        keeps a signal from cutting the last save short.

    Yields:
      The session, a `tf.train.MonitoredSession` that has `run_steps` as well, see `step_loop`.

    Raises:
      RunLockedError: another process has the directory.
      CheckpointError: the newest checkpoint is damaged, or is of another model; or, while it runs,
        a checkpoint could not be written.
      NonFiniteError: a step found a NaN or an infinity (`build_towers(check_numerics=True)`).
    """
    with hold_directory(directory):
        newest = newest_checkpoint(directory, recover)
        if newest is not None:
            check_fits(newest.prefix)
            for damaged in newest.skipped:
                say('passed over %s' % (damaged,))  # a tuple itself
            say('going on from %s' % newest.prefix)
        for line in tidy_directory(directory, newest):
            say(line)
        init_fn = None
        if newest is None and initial_values is not None:
            say(str(initial_values))

            def init_fn(unused_scaffold, session):
                initial_values.restore(session)
        saver = saver or tf.train.Saver(save_relative_paths=True)
        checkpoints = CheckpointHook(directory, global_step, save_steps, keep=keep, saver=saver,
                                     listeners=listeners)
        creator = _NewestCheckpoint(directory, newest, tf.train.Scaffold(
            saver=saver, init_fn=init_fn), config)
        steps = _StepsDone(global_step)
        try:
            with LoopSession(
                    creator, [steps] + list(hooks) + [checkpoints] + list(last_hooks)) as session:
                yield session
        except tf.errors.InvalidArgumentError as error:
            reason = explained(error, steps.number + 1)
            if reason is None:
                raise
            raise reason from None


class _NewestCheckpoint(tf.train.SessionCreator):
    """Makes sessions from the newest checkpoint; the first one from that which was checked.

    A session that is lost (`AbortedError`, `UnavailableError`) is made anew by `MonitoredSession`,
    and by then the run has saved others.
    """

    def __init__(self, directory, newest, scaffold, config):
        self._directory, self._newest, self._is_first = directory, newest, True
        self._scaffold, self._config = scaffold, config

    def create_session(self):
        newest = self._newest if self._is_first else newest_checkpoint(self._directory)
        self._is_first = False
        return tf.train.ChiefSessionCreator(
            self._scaffold, config=self._config,
            checkpoint_filename_with_path=newest.prefix if newest else None).create_session()


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
