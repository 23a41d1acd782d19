"""Says that a step takes long, while it does, and whether it waits for its input."""

import threading
import time
import typing

from towers.arguments import check_instance, check_number, check_say
from towers.run.input_watch import InputWatch
from towers.run.step_loop import OccasionalHook


class LongStepHook(OccasionalHook):
    """Writes a line when a step takes more than some seconds, and again after as many more.

        waiting        this step has taken 30 s so far: its input has not come

    A pipeline that is blocked, by a lock, a network or a mistake, would otherwise stop a run
    without a word. A thread looks at the clock, and reads two variables of the `InputWatch` beside
    the step; the step itself is left alone.
    """

    def __init__(self, watch: typing.Any, seconds: float = 30., say: typing.Callable = print):
        """
        Args:
          watch: `InputWatch` of the train op, such as `InputWatchHook(...).watch`; initialized by
            its hook.
          seconds: from the beginning of the step to the first line, and from line to line.
          say: called with each line, in the thread.

        Raises:
          InvalidArgumentError: an argument makes no sense.
        """
        check_instance('watch', watch, InputWatch, 'an InputWatch')
        check_number('seconds', seconds, above=0, expected='a number above 0')
        check_say(say)
        self._watch, self._seconds, self._say = watch, float(seconds), say
        self._since, self._ended = None, threading.Event()

    def after_create_session(self, session, coord):
        """Starts the thread; anew with each new session."""
        self._ended.set()
        self._since, self._ended = None, threading.Event()
        threading.Thread(target=self._look, args=(session, self._ended), daemon=True,
                         name='towers-long-steps').start()

    def is_due(self):
        """Never; it is asked before each step."""
        self._since = time.time()
        return False

    def before_run(self, run_context):
        """A step begins."""
        self._since = time.time()

    def after_run(self, run_context, run_values):
        """The step is over."""
        self._since = None

    def step_done(self, fetched):
        """The step is over."""
        self._since = None

    def end(self, session):
        """Ends the thread."""
        self._ended.set()

    def _look(self, session, ended):
        spoken_of, lines = None, 0
        while not ended.wait(self._seconds / 5.):
            since = self._since
            if since != spoken_of:
                spoken_of, lines = since, 0
            if since is None or time.time() - since < self._seconds * (lines + 1):
                continue
            try:
                begun, read = self._watch.read_marks(session)
            except Exception:  # of any kind: the session has ended, by an error of the step as well
                return
            if self._since == since and not ended.is_set():
                lines += 1
                self._say('waiting        this step has taken %.0f s so far: %s' % (
                    time.time() - since, self._reason(begun >= since, read >= since)))

    def _reason(self, is_begun, is_read):
        if not is_begun:
            return 'TensorFlow prepares its operations'
        if not self._watch.reads:
            return 'its operations have begun'
        return 'its input is there, its operations work' if is_read else 'its input has not come'
