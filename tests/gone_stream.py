"""A stream whose reader has gone."""

import errno
import io
import os


class Gone(io.StringIO):
    """Fails from the second write on."""

    def __init__(self, number=errno.EPIPE):
        super(Gone, self).__init__()
        self.number, self.writes = number, 0

    def write(self, text):
        self.writes += 1
        if self.writes > 1:
            raise OSError(self.number, os.strerror(self.number))
        return super(Gone, self).write(text)
