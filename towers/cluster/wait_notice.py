"""Says whom a process waits for before it trains, when that takes long."""

import threading

FIRST, AGAIN = 5., 30.  # seconds to the first line, and from one line to the next

REFUSED_WAITS = ' (which was refused: it joins when it is started again as worker 0 is)'
"""Behind the name of a worker that is waited for still, since it may come again."""


class Waiting:
    """Writes `waiting  for worker 1 (…), start_timeout is 120 s`; `with Waiting(…):`."""

    def __init__(self, whom, timeout, say):
        """
        Args:
          whom: function without arguments that returns whom the block waits for, a text; called in
            a thread of its own, since it may look for addresses.
          timeout: seconds after which the block gives up; None: it never does.
          say: called with the line, in that thread.
        """
        self._whom, self._timeout, self._say = whom, timeout, say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-waiting')

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *unused):
        self._stop.set()  # not joined: a look for an address may take seconds

    def _run(self):
        pause, limit = FIRST, ''
        if self._timeout is not None:
            pause = min(FIRST, self._timeout / 2.)  # one look is done before the block gives up
            limit = ', start_timeout is %.3g s' % self._timeout
        while not self._stop.wait(pause):
            whom = self._whom()
            if not self._stop.is_set():
                self._say('waiting        for %s%s' % (whom, limit))
            pause = AGAIN
