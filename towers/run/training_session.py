"""`training_session`: a session that goes on from the newest checkpoint of a directory.

While it lasts, no other run can use the directory (`hold_directory`).
"""

import contextlib
import errno
import functools
import os
import socket
import time
import typing
import warnings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (
    check_flag,
    check_function,
    check_instance,
    check_step_variable,
    checked_path,
    listed_hooks,
)
from towers.checkpoint.files import first_line
from towers.checkpoint.match import InitialValues, check_fits, difference, some
from towers.checkpoint.newest import Newest, describe_safe, newest_checkpoint
from towers.checkpoint.tidy import tidy_directory
from towers.errors import CheckpointError, InvalidArgumentError, RunLockedError, shown
from towers.memory.out_of_memory import out_of_memory_explained
from towers.nonfinite import explained
from towers.placement.session_config import config_of_towers
from towers.run.checkpoint_hook import CheckpointHook
from towers.safe_files import regular

# Errors of flock on file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@contextlib.contextmanager
def training_session(directory: str, global_step: tf.Variable,
                     hooks: typing.Iterable, config: typing.Optional[tf.ConfigProto] = None, *,
                     last_hooks: typing.Iterable = (), save_steps: int = 500,
                     keep: int = 5, saver: typing.Optional[tf.train.Saver] = None,
                     listeners: typing.Sequence = (), recover: bool = False,
                     initial_values: typing.Any = None,
                     check: typing.Optional[typing.Callable] = None, built: typing.Any = None,
                     memory_limit: typing.Optional[float] = None, member: typing.Any = None,
                     say: typing.Callable = print) -> typing.Iterator:
    """A `tf.train.MonitoredSession` for a run that can be killed at any moment and started again.

    In this order: locks the directory for this process; finds the newest checkpoint and reads all
    of it; compares it with the graph's variables; removes what a killed writer left; and only then
    makes the session, with a `CheckpointHook` after `hooks` and before `last_hooks`.

    Args:
      directory: the directory of the checkpoints.
      global_step: the variable that counts steps.
      hooks: list of `SessionRunHook`s. They come before the `CheckpointHook`, so that one that
        raises for a bad step keeps this step from being saved.
      config: `tf.ConfigProto`, see `session_config`. None: the config of the towers in the default
        graph, if it has any.
      last_hooks: hooks that come after the `CheckpointHook`: `StopOnSignalHook`, whose handlers
        then are still installed during the last save.
      save_steps, keep, saver, listeners: see `CheckpointHook`.
      recover: whether to go on from the checkpoint before the newest, if that is damaged.
      initial_values: what `init_from` returned, to start from where the directory has no
        checkpoint; or None.
      check: function that compares more than the variables when a run goes on; or None. It is
        called as `check(newest, missing, dropped)` before the directory is changed: `newest` is
        what `newest_checkpoint` returned; `missing` says which variables of the graph are not in
        the checkpoint, and `dropped` which ones of the checkpoint are not in the graph, each a text
        or None. It returns lines to show, or raises.
      built: the result of `build_towers`, for the advice when a step runs out of memory; or None.
      memory_limit: bytes that a device has, for the same advice; None: what the device reports.
      member: `Member`, if this process is the chief of a cluster; or None.
      say: called with each line about what was found in the directory.

    Yields:
      The session.

    Raises:
      InvalidArgumentError: an argument of another kind, or a saver that keeps a variable under
        another name than its own; before the directory is touched.
      RunLockedError: another process has the directory.
      CheckpointError: the newest checkpoint is damaged, or is of another model; or, during the run,
        a checkpoint could not be written.
      OutOfMemoryError: a step ran out of memory (with `built`).
      NonFiniteError: a step found a NaN or an infinity (`Numerics(check_numerics=True)`).
    """
    directory = checked_path('directory', directory)
    check_step_variable(global_step)
    hooks_before = listed_hooks('hooks', hooks)
    hooks_after = listed_hooks('last_hooks', last_hooks)
    if config is None:
        config = config_of_towers()
    else:
        check_instance('config', config, tf.ConfigProto, 'a tf.ConfigProto, see session_config')
    check_flag('recover', recover)
    _check_optional(check, member, initial_values)
    check_function('say', say, 1, 'a function of a line of text, such as print')
    if member is not None:
        listeners = list(listeners) + member.listeners
    checkpoints = CheckpointHook(
        directory, global_step, save_steps, keep=keep, saver=saver, listeners=listeners)
    _check_names_of(saver)
    with contextlib.ExitStack() as stack:
        if built is not None:
            stack.enter_context(out_of_memory_explained(built, directory, memory_limit))
        stack.enter_context(hold_directory(directory))
        newest = _checked_newest(directory, recover, check, say)
        init_fn = _init_fn(initial_values, newest, say)
        scaffold = tf.train.Scaffold(saver=saver, init_fn=init_fn)
        newest_again = functools.partial(_newest_again, directory, recover, say)
        if member is None:
            # The master '' is this process.
            creator = _NewestCheckpoint(newest, newest_again, scaffold, master='', config=config)
        else:
            creator_of_chief = _NewestCheckpoint(
                newest, newest_again, scaffold, master=member.target, config=member.config)
            creator = member.session_creator(creator_of_chief, scaffold)
            hooks_before = member.hooks + hooks_before
        steps_done = _StepsDone(global_step)
        stack.enter_context(_non_finite_explained(steps_done))
        all_hooks = [steps_done] + hooks_before + [checkpoints] + hooks_after
        with tf.train.MonitoredSession(creator, all_hooks) as session:
            yield session


def _check_optional(check: typing.Any, member: typing.Any, initial_values: typing.Any) -> None:
    """Raises `InvalidArgumentError` for one of these optional arguments of `training_session` that
    is of another kind."""
    if check is not None:
        check_function('check', check, 3, 'a function of a checkpoint and two texts, or None')
    # By its method: the class `Member` is in `cluster/`, from which this room must not import.
    if member is not None and not hasattr(member, 'session_creator'):
        raise InvalidArgumentError('member=%.80r: expected what towers.join gives, or None.'
                                   % (member,))
    if initial_values is not None:
        check_instance('initial_values', initial_values, InitialValues, 'what init_from returned')


def _check_names_of(saver: typing.Optional[tf.train.Saver]) -> None:
    """Raises `InvalidArgumentError` for a saver that keeps a variable under a name that no variable
    of the graph has: a run that goes on would not find the variable.

    Args:
      saver: the saver of the session; None for the one in the collection `SAVERS`, if there is one.
    """
    savers = [saver] if saver is not None else tf.get_collection(tf.GraphKeys.SAVERS)
    own_names = {compat.saved_as(variable)[0] for variable in tf.global_variables()}
    for each in savers:
        for name, variable in compat.names_given_to(each).items():
            # Under the name of a table or the like there may be tensors of other names.
            is_variable = isinstance(variable, compat.VARIABLE_TYPES)
            if is_variable and name not in own_names:
                raise InvalidArgumentError(
                    'the saver of this session keeps variable %s under the name %r, where a run '
                    'that goes on does not look: make the tf.train.Saver without names; '
                    'towers.init_from takes a checkpoint with other names.' % (
                        variable.op.name, name))


def _init_fn(initial_values: typing.Optional[InitialValues], newest: typing.Optional[Newest],
             say: typing.Callable) -> typing.Optional[typing.Callable]:
    """The `init_fn` of a `Scaffold`, which restores the initial values; None if they are not used.

    Args:
      initial_values: what `init_from` returned, or None.
      newest: the checkpoint from which the run goes on, or None.
      say: called with a line about the initial values.
    """
    if initial_values is None:
        return None
    if newest is not None:
        say('initial values are not taken: the run has a checkpoint, from which it goes on')
        return None
    say(str(initial_values))

    def restore(unused_scaffold: typing.Any, session: tf.Session) -> None:
        """Sets the variables that are taken to their values in the checkpoint."""
        initial_values.restore(session)
    return restore


def _checked_newest(directory: str, recover: bool, check: typing.Optional[typing.Callable],
                    say: typing.Callable) -> typing.Optional[Newest]:
    """Finds the newest checkpoint, compares it with the graph, and tidies the directory.

    Args:
      directory: the directory of the checkpoints.
      recover: whether to go on from the checkpoint before the newest, if that is damaged.
      check: function that compares more than the variables, see `training_session`; or None.
      say: called with each line about what was found in the directory.

    Returns:
      What `newest_checkpoint` returned; None for a directory without a checkpoint.
    """
    newest = newest_checkpoint(directory, recover)
    lines = []
    if newest is not None:
        lines = _compared_with_graph(newest, check)
        for damaged in newest.skipped:
            say('passed over %s' % (damaged,))  # `damaged` is a tuple
        say('going on from %s' % newest.prefix)
    for line in lines + tidy_directory(directory, newest):
        say(line)
    return newest


def _newest_again(directory: str, recover: bool, say: typing.Callable) -> typing.Optional[Newest]:
    """Finds the newest checkpoint once more, after a session was lost, and tidies the directory.

    The arguments are those of `_checked_newest`, which has compared the graph with a checkpoint
    before the first session: that is not done again.
    """
    newest = newest_checkpoint(directory, recover)
    for line in tidy_directory(directory, newest):
        say(line)
    return newest


def _compared_with_graph(newest: Newest, check: typing.Optional[typing.Callable]
                         ) -> typing.List[str]:
    """Compares a checkpoint with the variables of the graph, and returns lines to show about it.

    Args:
      newest: the checkpoint.
      check: function that compares more than the variables, see `training_session`; or None.

    Raises:
      CheckpointError: a variable of the graph is not in the checkpoint.
    """
    comparison = difference(newest.prefix)
    names_only_in_checkpoint = comparison.only_there
    text_on_missing = comparison.text  # on variables of the graph that the checkpoint has not
    text_on_dropped = None  # on variables of the checkpoint that the graph has not
    lines = []
    if names_only_in_checkpoint:
        text_on_dropped = ('the checkpoint %s holds state that the checkpoints to come would be '
                           'without: %s' % (newest.prefix, some(names_only_in_checkpoint)))
        lines.append(text_on_dropped)
    # `check` comes first: it may know why a variable is missing, and raise an error that says it.
    if check is not None:
        lines += check(newest, text_on_missing, text_on_dropped)
    if text_on_missing is not None:
        check_fits(newest.prefix)  # raises the error
    return lines


class _NewestCheckpoint(tf.train.SessionCreator):
    """Makes sessions with the variables of the newest checkpoint.

    The first session is made from the checkpoint that was checked. When a session is lost,
    `MonitoredSession` makes another one, and by then there may be later checkpoints.
    """

    def __init__(self, newest: typing.Optional[Newest], newest_again: typing.Callable,
                 scaffold: tf.train.Scaffold, master: str, config: tf.ConfigProto):
        """
        Args:
          newest: the checkpoint that was checked, or None.
          newest_again: function that returns the newest checkpoint after a session was lost.
          scaffold, master, config: as for `tf.train.ChiefSessionCreator`.
        """
        self._newest = newest
        self._newest_again = newest_again
        self._scaffold = scaffold
        self._master = master
        self._config = config
        self._is_first = True

    def create_session(self) -> tf.Session:
        """A `tf.Session` whose variables are restored, or without a checkpoint initialized."""
        newest = self._newest
        if not self._is_first:
            newest = self._newest_again()
        self._is_first = False
        prefix = None if newest is None else newest.prefix
        creator = tf.train.ChiefSessionCreator(
            self._scaffold, self._master, self._config, checkpoint_filename_with_path=prefix)
        return creator.create_session()


class _StepsDone(tf.train.SessionRunHook):
    """Counts the steps that have succeeded, for an error that is raised after the session's end.

    Attributes:
      count: the number of steps, those before the session included.
    """

    def __init__(self, global_step: tf.Variable):
        """`global_step` is the variable that counts steps."""
        self.count = 0
        self._global_step = global_step

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Begins with the step from which the session goes on."""
        self.count = int(session.run(self._global_step))

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Counts a step that has succeeded."""
        self.count += 1


@contextlib.contextmanager
def _non_finite_explained(steps_done: _StepsDone) -> typing.Iterator[None]:
    """A context in which an error of a session's step about a NaN or an infinity becomes a
    `NonFiniteError`, which names the step; any other error stays as it is."""
    try:
        yield
    except tf.errors.OpError as error:
        failed_step = steps_done.count + 1
        non_finite_error = explained(error, failed_step)
        if non_finite_error is None:
            raise
        raise non_finite_error from None


# ---- The lock of the directory -------------------------------------------------------------------

@contextlib.contextmanager
def hold_directory(directory: str) -> typing.Iterator[bool]:
    """Keeps other runs out of a directory while the `with` block lasts.

        with towers.hold_directory(train_dir):
            newest = towers.newest_checkpoint(train_dir)
            ...

    It takes the kernel's lock (`flock`) on the file `run.lock` in the directory. The kernel
    releases it when the process ends, also by SIGKILL; so a file that is left over does no harm.
    Where there is no flock (some network file systems; paths such as gs://…; Windows) it goes on
    without a lock, and warns by a `RuntimeWarning`.

    Args:
      directory: the directory; made if it is missing.

    Yields:
      Whether the directory is locked: False where there is no flock.

    Raises:
      RunLockedError: another run has the directory. The text says which process, on which machine,
        and since when.
      CheckpointError: `directory` is a file, or cannot be made or written to.
      BadFileError: `run.lock` in it is no regular file.
    """
    directory = checked_path('directory', directory)
    with contextlib.ExitStack() as stack:
        try:
            tf.io.gfile.makedirs(directory)
            why_not_locked: typing.Optional[str] = 'there are no file locks for it'
            is_local = '://' not in directory
            if fcntl is not None and is_local:
                # It is locked as long as it is open, until the stack closes it. Unbuffered, so that
                # a full disk is an error of the write.
                lock_file = stack.enter_context(open(
                    os.path.join(directory, 'run.lock'), 'a+b', buffering=0, opener=regular))
                why_not_locked = _lock(directory, lock_file)
        except (OSError, tf.errors.OpError) as error:
            why = getattr(error, 'strerror', None) or first_line(error)
            raise CheckpointError(
                '%s cannot be written to: %s. Nothing was written. %s Give a directory that can be '
                'made and written to.' % (directory, why, describe_safe(directory)))
        is_locked = why_not_locked is None
        if not is_locked:
            warnings.warn('%s is not locked, as %s: see to it yourself that no other run uses it.'
                          % (directory, why_not_locked), RuntimeWarning,
                          stacklevel=3)  # the line of the `with` statement, past contextlib
        yield is_locked


def _lock(directory: str, lock_file: typing.Any) -> typing.Optional[str]:
    """Locks the file `run.lock` of a directory, and writes into it which process holds it.

    Returns:
      None; or the reason, where the file system has no locks.

    Raises:
      RunLockedError: another process holds the lock.
    """
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.seek(0)
        holder = lock_file.read(200).decode('utf-8', 'replace').strip()
        raise RunLockedError(
            '%s is in use by %s. Two runs in one directory would overwrite and delete each '
            "other's checkpoints; nothing was written. Wait for that run, end it, or give this "
            'one another directory.' % (directory, shown(holder) or 'another process, which has '
                                        'not said yet which one it is')) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return 'its file system has no file locks (%s)' % error.strerror
    lock_file.truncate(0)
    lock_file.write(('process %d on %s, since %s\n' % (
        os.getpid(), socket.gethostname(), time.strftime('%Y-%m-%d %H:%M:%S'))).encode())
    return None
