"""Stops a run after the current step on SIGTERM, SIGINT and SIGHUP, so that it can save."""

import os
import signal
import sys
import threading
import time
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count
from towers.errors import InvalidArgumentError


class StopOnSignalHook(tf.train.SessionRunHook):
    """Stops the session after the current step when the process receives a signal.

    The first SIGTERM, SIGINT (Ctrl-C) or SIGHUP (closed terminal, lost connection) asks the session
    to stop after the current step; the other hooks then save as at any end. A SIGHUP that the
    process was started to ignore, as by `nohup`, stays ignored.

    A second signal ends the process at once, with exit status 128 plus the signal's number; also in
    the middle of a step, where a Python handler would run only at the step's end. The same signal
    within half a second does not count as a second one: `timeout` and `make` pass on a signal that
    the whole process group has received already.

    The handlers are installed when the session is made, which has to be in the main thread. The
    former handlers are put back at the end of the session, and in forked processes. So this hook
    has to come after the hooks that save, in case a signal comes while they save
    (`training_session(last_hooks=…)`).

    Attributes:
      received: the number of the signal that stopped the run; or None. By convention such a
        program exits with status 128 + `received`.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT) + (
        (signal.SIGHUP,) if hasattr(signal, 'SIGHUP') else ())  # there is none on Windows
    _ECHO_SECONDS = 0.5

    def __init__(self, stream: typing.Any = None):
        """
        Args:
          stream: the text stream for the line about the signal; None for standard error.

        Raises:
          InvalidArgumentError: it is no stream.
        """
        if stream is not None and not hasattr(stream, 'write'):
            raise InvalidArgumentError('stream=%.80r: expected a text stream.' % (stream,))
        self.received: typing.Optional[int] = None
        self._stream = stream
        # {number of a signal: the handler that this hook has replaced}
        self._former: typing.Dict[int, typing.Any] = {}
        self._coordinator: typing.Optional[tf.train.Coordinator] = None
        self._watcher: typing.Optional[threading.Thread] = None
        # The end of a pipe to which Python writes signals, for the watcher.
        self._write_end: typing.Any = None
        # The file descriptor to which Python wrote them before.
        self._former_fd: typing.Any = None

    @property
    def stopping_signal(self) -> typing.Optional[int]:
        """The signal that stops the run, or None: the one that this process received; for a
        `StopTogetherHook` the one that any worker received."""
        return self.received

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Installs the handlers, once.

        Raises:
          InvalidArgumentError: this is not the main thread, or the session has another such hook.
        """
        self._coordinator = coord
        if self._former:
            return  # installed already: `MonitoredSession` has lost a session, and made another
        # Another such hook is found as the owner of the method that handles SIGTERM. It is of this
        # session if it has the same coordinator, of which each session has one.
        handler = signal.getsignal(signal.SIGTERM)
        owner = getattr(handler, '__self__', None)
        if isinstance(owner, StopOnSignalHook) and owner._coordinator is coord:
            raise InvalidArgumentError('the session has two StopOnSignalHooks, and each would put '
                                       'back what it found: give one.')
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError('StopOnSignalHook: Python has signal handlers in the main '
                                       'thread only. Make the session there, or leave this out.')
        self._former = {number: signal.signal(number, self.stop) for number in self.handled()}
        can_watch = hasattr(os, 'register_at_fork')  # which is not on Windows; `_watch` needs it
        if can_watch:
            self._watch()

    @classmethod
    def handled(cls) -> list:
        """The numbers of the signals that stop a run; without SIGHUP if the process ignores it."""
        always = (signal.SIGTERM, signal.SIGINT)
        return [number for number in cls._SIGNALS
                if number in always or signal.getsignal(number) is not signal.SIG_IGN]

    def stop(self, number: int, unused_frame: typing.Any = None) -> None:
        """Stops the session after the current step, as the signal of that number does.

        It is also the handler of the signals, which Python calls in the main thread when TensorFlow
        has returned from a step.

        Raises:
          InvalidArgumentError: `number` is not the number of a signal.
        """
        check_count('number', number, most=signal.NSIG - 1)
        if self.received is None:
            self.received = number

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Asks the session to stop after a signal."""
        if self.received is not None:
            run_context.request_stop()

    def end(self, session: tf.Session) -> None:
        """Puts the former handlers back."""
        self.restore()

    def restore(self) -> None:
        """Puts the former handlers back; to be called after an error, when no `end` is called."""
        for number, former in self._former.items():
            signal.signal(number, former)
        if self._watcher is not None:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._write_end)  # the watcher reads what is left in the pipe, and ends
            self._watcher.join(5.)
            self._watcher = None
        self._former = {}

    def _watch(self) -> None:
        """Starts the watcher, a thread that reads each signal at once from a pipe.

        Python's C handler writes the number of a signal to the pipe, also in the middle of a step.
        """
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)  # as `set_wakeup_fd` demands
        self._watcher = threading.Thread(target=self._wait_for_signals, args=(read_end,),
                                         daemon=True)
        self._watcher.start()
        self._former_fd = signal.set_wakeup_fd(self._write_end)
        # A forked process would write its signals to the same pipe.
        os.register_at_fork(after_in_child=self.restore)

    def _wait_for_signals(self, read_end: int) -> None:
        """Runs in the watcher: says the first signal in a line, and ends the process at a second.

        `read_end` is the end of the pipe from which it reads the signals.
        """
        first = None
        first_time = 0.
        with open(read_end, 'rb', buffering=0) as pipe:
            # `read` returns b'' when `restore` has closed the other end.
            for byte in iter(lambda: pipe.read(1), b''):
                number = byte[0]
                if number not in self._former:
                    continue  # a signal that the program itself handles
                if first is None:
                    first = number
                    first_time = time.monotonic()
                    self._say(number)
                    continue
                seconds = time.monotonic() - first_time
                is_echo = number == first and seconds < self._ECHO_SECONDS  # see the class
                if not is_echo:
                    os._exit(128 + number)

    def _say(self, number: int) -> None:
        """Writes a line about the signal of that number."""
        stream = self._stream or sys.stderr
        try:
            stream.write('\n%s: finishing this step and saving; once more to stop at once\n'
                         % signal.Signals(number).name)
            stream.flush()
        except (OSError, ValueError):
            pass  # the stream cannot be written; the run still has to end in good order
