"""Ends a run in good order on SIGTERM, SIGINT and SIGHUP."""

import contextlib
import os
import signal
import sys
import threading
import time
import typing
import weakref

from towers.errors import InvalidArgumentError
from towers.run.step_loop import OccasionalHook


class StopOnSignalHook(OccasionalHook):
    """Finishes the step, and lets the session end and save, when the process is told to stop.

    The first SIGTERM, SIGINT (Ctrl-C) or SIGHUP (the terminal is closed, the connection lost) asks
    the session to stop after the current step; its other hooks then save as at any end. A SIGHUP
    that the process was started to ignore, as by `nohup`, stays ignored.

    A second one ends the process at once, with exit status 128 plus the signal's number; also in
    the middle of a step, where Python's own handlers would wait for the end of it. The same signal
    again within half a second is still the first one: `timeout` and `make` pass on what the whole
    process group has got already.

    The handlers are installed when the session starts, which has to be in the main thread, and the
    former ones are put back when it ends: so put this hook after those that save, for a signal that
    comes while they do (`training_session(last_hooks=…)`). Processes forked meanwhile have the
    former ones.

    Attributes:
      received: the number of the signal that stopped the run, or None. A program that ends
        because of it exits with 128 + `received`, by convention.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT) + (
        (signal.SIGHUP,) if hasattr(signal, 'SIGHUP') else ())  # there is none on Windows
    _ECHO_SECONDS = 0.5

    def __init__(self, stream: typing.Any = None):
        """
        Args:
          stream: where the one line about the signal goes; None for standard error.
        """
        if stream is not None and not hasattr(stream, 'write'):
            raise InvalidArgumentError('stream=%.80r: expected a text stream.' % (stream,))
        self.received = None
        self._since = None
        self._stream = stream
        self._former = {}
        self._watcher = self._pipe_end = self._former_fd = self._coordinator = None

    def after_create_session(self, session, coord):
        """Installs the handlers, once.

        Raises:
          InvalidArgumentError: this is not the main thread, or the session has another such hook.
        """
        self._coordinator = coord
        if self._former:
            return
        other = getattr(signal.getsignal(signal.SIGTERM), '__self__', None)
        if isinstance(other, StopOnSignalHook) and other._coordinator is coord:
            raise InvalidArgumentError('the session has two StopOnSignalHooks, and each would put '
                                       'back what it found: give one.')
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError('StopOnSignalHook: Python has signal handlers in the main '
                                       'thread only. Make the session there, or leave this out.')
        self._former = {number: signal.signal(number, self._handle) for number in self._SIGNALS
                        if not _is_left_ignored(number)}
        if hasattr(os, 'register_at_fork'):  # there is none on Windows
            self._watch()

    def stop(self, number):
        """Does what the first signal of that number does, for a program that has another reason,
        such as output that nobody reads any more (SIGPIPE)."""
        if self.received is None:
            self.received, self._since = number, time.monotonic()

    def after_run(self, run_context, run_values):
        """Asks the session to stop after a signal."""
        if self.received is not None:
            run_context.request_stop()

    def is_due(self):
        """Never: `step_done` can end the session as well."""
        return False

    def step_done(self, fetched):
        """Asks the session to stop after a signal."""
        if self.received is not None:
            self._coordinator.request_stop()

    def end(self, session):
        """Puts the former handlers back."""
        self.restore()

    def restore(self):
        """Puts the former handlers back; for a run that ended in an error, where no `end` is."""
        for number, former in self._former.items():
            signal.signal(number, former)
        if self._watcher is not None:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._pipe_end)  # at which the watcher ends, when it has said what came in
            self._watcher.join(5.)
            self._watcher = None
        self._former = {}

    def _handle(self, number, unused_frame):
        """Runs in the main thread, once the step that is in TensorFlow has ended."""
        if self.received is None:
            self.stop(number)
        elif not self._is_echo(number, self.received, self._since):
            os._exit(128 + number)

    def _is_echo(self, number, first, since):
        return number == first and time.monotonic() - since < self._ECHO_SECONDS

    def _watch(self):
        """Starts a thread that hears of signals at once, through a pipe that C's handler fills."""
        read_end, self._pipe_end = os.pipe()
        os.set_blocking(self._pipe_end, False)
        self._watcher = threading.Thread(target=self._wait_for_signals, args=(read_end,),
                                         daemon=True)
        self._watcher.start()
        self._former_fd = signal.set_wakeup_fd(self._pipe_end)
        # A forked process would fill the same pipe with its signals. Python never forgets what it
        # is to call after a fork, and drops it only when it ends, too late to close what a hook
        # still holds (3.7 crashes there): so that call must not keep this one alive.
        restore = weakref.WeakMethod(self.restore)
        os.register_at_fork(after_in_child=lambda: (restore() or _nothing)())

    def _wait_for_signals(self, read_end):
        first, since = None, None
        with open(read_end, 'rb', buffering=0) as pipe:
            for byte in iter(lambda: pipe.read(1), b''):
                number = byte[0]
                if number not in self._former:
                    continue
                if first is None:
                    first, since = number, time.monotonic()
                    self._say(number)
                elif not self._is_echo(number, first, since):
                    os._exit(128 + number)

    def _say(self, number):
        stream = self._stream or sys.stderr
        try:
            stream.write('\n%s: finishing this step and saving; once more to stop at once\n'
                         % signal.Signals(number).name)
            stream.flush()
        except (OSError, ValueError):
            pass  # whoever read it is gone; the run still has to end in good order


@contextlib.contextmanager
def interruptible():
    """Makes Ctrl-C a `KeyboardInterrupt`, as it is in Python, unless it is to be ignored."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _is_left_ignored(number):
    """Whether this is the SIGHUP of a process that `nohup` started."""
    return (number == getattr(signal, 'SIGHUP', None)
            and signal.getsignal(number) is signal.SIG_IGN)


def _nothing():
    """What is left to do after a fork when the hook is gone."""
