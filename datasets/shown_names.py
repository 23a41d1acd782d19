"""Names of files in texts, as one line that any output and any file takes.

A name is bytes to a file system. Those that are no UTF-8, as of archives from before it, are lone
surrogates in Python's texts, which cannot be encoded; and a name may hold line breaks.
"""

import re

_UNSHOWN = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')


def shown(text):
    """A text with what cannot be shown on a line escaped: a byte that is no UTF-8 as `\\xe9`."""
    return _UNSHOWN.sub(_escaped, text)


def _escaped(match):
    code = ord(match.group())
    return '\\x%02x' % (code - 0xdc00) if 0xdc80 <= code <= 0xdcff else repr(match.group())[1:-1]
