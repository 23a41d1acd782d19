"""Ends a run in good order on SIGTERM and SIGINT."""

import signal
import sys

import tensorflow.compat.v1 as tf


class StopOnSignalHook(tf.train.SessionRunHook):
    """Finishes the step, and lets the session end and save, when the process is told to stop.

    The first SIGTERM or SIGINT (Ctrl-C) asks the session to stop after the current step; its other
    hooks then save as at any end. From then on both signals have their default effect again, so a
    second one ends the process at once. The handlers are installed when the session starts, which
    has to be in the main thread, and the former ones are put back when it ends.

    Attributes:
      received: the number of the signal that stopped the run, or None. A program that ends
        because of it exits with 128 + `received`, by convention.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, stream=None):
        """
        Args:
          stream: where the one line about the signal goes; None for standard error.
        """
        self.received = None
        self._stream = stream
        self._former = {}

    def after_create_session(self, session, coord):
        """Installs the handlers, once."""
        if not self._former:
            self._former = {number: signal.signal(number, self._handle)
                            for number in self._SIGNALS}

    def after_run(self, run_context, run_values):
        """Asks the session to stop after a signal."""
        if self.received is not None:
            run_context.request_stop()

    def end(self, session):
        """Puts the former handlers back, unless a signal has given up on them already."""
        if self.received is None:
            self.restore()

    def restore(self):
        """Puts the former handlers back; for a run that ended in an error, where no `end` is."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _handle(self, number, unused_frame):
        self.received = number
        for each in self._SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        (self._stream or sys.stderr).write(
            '\n%s: finishing this step and saving; once more to stop at once\n'
            % signal.Signals(number).name)
