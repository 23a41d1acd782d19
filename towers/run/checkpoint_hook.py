"""`CheckpointHook`, which saves checkpoints during a session."""

import contextlib
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import (
    MOST_INT32,
    check_count,
    check_instance,
    check_step_variable,
    checked_path,
)
from towers.checkpoint.files import (
    STATE_FILE,
    files_of,
    first_line,
    list_checkpoints,
    names_in,
    state_checkpoints,
    step_of,
)
from towers.checkpoint.newest import newest_named, safe_checkpoint
from towers.checkpoint.tidy import remove_leftovers
from towers.errors import CheckpointError


class CheckpointHook(tf.train.SessionRunHook):
    """Saves when the session starts, at regular steps, and at the end of a run without an error.

    It takes the place of `tf.train.CheckpointSaverHook`, which saves the restored step again,
    writes the graph with each checkpoint, does not delete the checkpoints of earlier runs where the
    session is restored from a file name, and on a full disk ends with a traceback of graph code.

    * After an exception nothing is saved, since MonitoredSession then calls no `end`. A hook that
      raises for a bad step has to come before this one in the list of hooks.
    * A process that is killed while it saves leaves the former checkpoint as the newest. TF calls
      no fsync, so a loss of power can leave one that is not whole, as `newest_checkpoint` notices.

    The session's creator restores; this hook only saves. It needs a directory that no other process
    writes to (`hold_directory`).
    """

    def __init__(self, directory: str, global_step: tf.Variable,
                 save_steps: int = 500, *, keep: typing.Optional[int] = 5,
                 saver: typing.Optional[tf.train.Saver] = None, listeners: typing.Sequence = ()):
        """
        Args:
          directory: the directory of the checkpoints; made if it is missing.
          global_step: the variable that counts steps.
          save_steps: saves at the multiples of so many steps, the same ones whether or not the run
            was interrupted. Where one `session.run` does several steps, the checkpoint may come
            one `session.run` later.
          keep: how many of the newest checkpoints to keep, earlier runs' included; None
            keeps all. It is set in the saver's `saver_def`.
          saver: a `tf.train.Saver`. None for the one in the collection `SAVERS`; if there is none,
            one for all variables that exist at `begin`, which is put into that collection, so that
            a `Scaffold` without a saver takes it too.
          listeners: list of `tf.train.CheckpointSaverListener`: their `before_save` and
            `after_save(session, step)` surround each save; one that returns True from `after_save`
            stops the run. While an attribute `wants_save` of one is true, the next step is saved.

        Raises:
          InvalidArgumentError: an argument of another kind.
          CheckpointError: raised by the methods, not here: a save failed, or the directory cannot
            be made, or holds a later step than the session starts from.
        """
        check_count('save_steps', save_steps)
        if keep is not None:
            check_count('keep', keep, most=MOST_INT32)
        check_step_variable(global_step)
        if saver is not None:
            check_instance('saver', saver, tf.train.Saver, 'a tf.train.Saver')
        check_instance('listeners', listeners, (list, tuple), 'a list of listeners')
        for listener in listeners:
            check_instance('a listener among listeners', listener,
                           tf.train.CheckpointSaverListener, 'a tf.train.CheckpointSaverListener')
        self._directory = checked_path('directory', directory)
        self._global_step = global_step
        self._save_steps = save_steps
        self._keep = keep
        self._saver: typing.Any = saver  # None until `begin`
        self._listeners = list(listeners)
        self._saved_step = -1  # the newest step that is saved; -1 for none
        # Checkpoints of earlier runs beyond `keep`, which the next save removes.
        self._surplus: typing.List[str] = []

    def begin(self) -> None:
        """Makes the directory and, if there is none, the saver."""
        names_in(self._directory)  # raises for a file, which makedirs of TF 1.15 accepts
        try:
            tf.io.gfile.makedirs(self._directory)
        except tf.errors.OpError as error:
            raise CheckpointError('%s cannot be made a directory for checkpoints: %s. Nothing was '
                                  'written. Give another one.' % (self._directory,
                                                                  first_line(error)))
        if self._saver is None:
            # Paths in the state file are relative, so that the directory can be moved. The saver
            # is not sharded: so TF writes the index, too, under another name first.
            self._saver = tf.train.Scaffold.get_or_default(
                'saver', tf.GraphKeys.SAVERS, lambda: tf.train.Saver(save_relative_paths=True))
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Takes over the checkpoints of earlier runs; saves this step if it is not among them."""
        step = int(session.run(self._global_step))
        earlier = self._earlier_checkpoints(step)
        num_surplus = 0
        if self._keep is not None:
            num_surplus = max(0, len(earlier) - self._keep)
        # The surplus is not left to `Saver`, which deletes one old checkpoint per save: it would
        # never come down to `keep`. The others `Saver` deletes when they are too old.
        self._surplus = earlier[:num_surplus]
        self._saver.recover_last_checkpoints(earlier[num_surplus:])
        self._saver.saver_def.max_to_keep = self._keep or 0  # to `Saver` 0 means all
        self._saved_step = step
        is_on_disk = bool(earlier) and step_of(earlier[-1]) == step
        if not is_on_disk and self._save(session, step):
            coord.request_stop()

    def before_run(self, run_context: tf.train.SessionRunContext
                   ) -> typing.Optional[tf.train.SessionRunArgs]:
        """Fetches the global step with the run; whether before or after its update is not defined.
        """
        return tf.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Saves if the run has come to a step at which a checkpoint is due."""
        # The step was fetched together with the update, which may have come after the fetch: the
        # run is at the fetched step or at the next one. The later of the two is asked first, since
        # it is due whenever the earlier one is. Only then the true step is read, which costs
        # another `session.run`.
        latest_possible_step = int(run_values.results) + 1
        if not self._is_time(latest_possible_step):
            return
        step = int(run_context.session.run(self._global_step))
        if self._is_time(step) and self._save(run_context.session, step):
            run_context.request_stop()

    def end(self, session: tf.Session) -> None:
        """Saves the last step, unless it is saved already."""
        step = int(session.run(self._global_step))
        if step != self._saved_step:
            self._save(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _is_time(self, step: int) -> bool:
        """Whether a checkpoint is due at this step."""
        if step == self._saved_step:
            return False
        if any(getattr(listener, 'wants_save', False) for listener in self._listeners):
            return True
        # Whether a multiple of `save_steps` has come since the last save. The step itself may be
        # none: one `session.run` may do several steps.
        return step // self._save_steps > self._saved_step // self._save_steps

    def _save(self, session: tf.Session, step: int) -> bool:
        """Saves this step; returns whether a listener asks the run to stop."""
        for listener in self._listeners:
            listener.before_save(session, step)
        path = os.path.join(self._directory, 'model.ckpt')
        try:
            # Without the graph, which the program makes anew: it would be written at each save.
            self._saver.save(session, path, global_step=step, write_meta_graph=False)
            self._remove_surplus()
        except (tf.errors.AbortedError, tf.errors.UnavailableError):
            raise  # a lost machine, which MonitoredSession recovers from
        except (tf.errors.OpError, OSError, ValueError) as error:
            # Converted also because a file-size limit is an OutOfRangeError for TF, at which
            # MonitoredSession would end as if the data had ended.
            raise CheckpointError(self._failure(step, error))
        self._saved_step = step
        # A list: every listener is called, also after one that wants to stop.
        return any([listener.after_save(session, step) for listener in self._listeners])

    def _remove_surplus(self) -> None:
        """Removes the checkpoints of earlier runs beyond `keep`.

        The first save does it, since the state file has listed them until then.
        """
        surplus = self._surplus
        self._surplus = []  # the saves that follow find nothing to remove
        for prefix in surplus:
            for name in files_of(prefix):
                tf.io.gfile.remove(name)

    def _failure(self, step: int, error: Exception) -> str:
        """Removes the half-written files of a save that failed, and describes the failure.

        Returns:
          One line: the error, which checkpoint is safe, and what to do.
        """
        text = 'step %d could not be saved in %s: %s.' % (step, self._directory, first_line(error))
        with contextlib.suppress(tf.errors.OpError):  # then half-written files stay
            remove_leftovers(self._directory)
        safe = safe_checkpoint(self._directory)
        advice = 'Make room or make the directory writable, and start again'
        if safe.is_found:
            return '%s %s The steps since then are lost. %s: the run goes on from there.' % (
                text, safe.text, advice)
        return '%s %s %s.' % (text, safe.text, advice)

    def _earlier_checkpoints(self, step: int) -> typing.List[str]:
        """The prefixes of the checkpoints that the directory's state file lists, the newest last.

        Without a state file it is the only checkpoint of the directory, if there is one.

        Raises:
          CheckpointError: the state file is damaged, or lists a later step than `step`, from which
            the session starts.
        """
        on_disk = list_checkpoints(self._directory)
        newest, fault = newest_named(self._directory, on_disk)
        if fault is not None:
            raise CheckpointError(
                '%s %s. Nothing was written. Call towers.newest_checkpoint, to choose one, and '
                'towers.tidy_directory before the session is made, or give another directory.'
                % (os.path.join(self._directory, STATE_FILE), fault))
        if newest is None:
            return []
        newest_step = step_of(newest)
        if newest_step is not None and newest_step > step:
            raise CheckpointError(
                'the newest checkpoint in %s is of step %d, but the session starts from step %d: '
                'it was not restored. Nothing was written. Restore it (towers.newest_checkpoint '
                'finds it), or give another directory.' % (self._directory, newest_step, step))
        # The state file names the newest one by itself, and need not list it last.
        listed = state_checkpoints(self._directory, on_disk)
        return [prefix for prefix in listed if prefix != newest] + [newest]
