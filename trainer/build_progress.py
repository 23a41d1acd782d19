"""Shows that a long build goes on: `building 1,000 towers, 20 s`."""

import threading
import time

from trainer.output_stream import OutputStream, progress_stream


class BuildProgress:
    """A context that shows how long a build has taken, on a line of its own now and then.

    On a terminal it is one line that is overwritten, from the third second of the build on.
    """

    def __init__(self, what, stream=None, patience=None):
        """
        Args:
          what: the words for what is built, such as '4 towers'.
          stream: text stream to write to; None: `progress_stream()`.
          patience: seconds to the first line, and between lines; None: 3 on a terminal, else 10.
        """
        self._stream = OutputStream(progress_stream() if stream is None else stream,
                                    on_lost=lambda error: None)
        self._what, self._done, self._width = what, threading.Event(), 0
        self._patience = patience or (3. if self._stream.isatty() else 10.)

    def __enter__(self):
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._done.set()
        self._thread.join()
        if self._width:
            self._stream.write('\r%s\r' % (' ' * self._width))
            self._stream.flush()

    def _show(self):
        while not self._done.wait(self._patience):
            text = 'building %s, %.0f s' % (self._what, time.monotonic() - self._begin)
            if self._stream.isatty():
                self._stream.write('\r' + text.ljust(self._width))
                self._width = len(text)
            else:
                self._stream.write(text + '\n')
            self._stream.flush()
