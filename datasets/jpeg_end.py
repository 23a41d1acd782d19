"""Whether a JPEG has its end: the decoder of a part of an image does not see that it lacks.

A file that was not copied to its end is the commonest damage. Decoded whole, such an image is an
error; of its upper part nothing is wrong, so that it would depend on the crop whether it is good.
"""

import re

_BEGIN, _END = b'\xff\xd8\xff', b'\xff\xd9'
_MARKER = re.compile(b'\xff+([^\x00\xff])')
_END_OF_IMAGE, _SCAN = 0xd9, 0xda
_WITHOUT_LENGTH = {0x01, 0xd8}.union(range(0xd0, 0xd8))


def is_cut_off(encoded):
    """Whether bytes are a JPEG that ends before its end marker.

    What comes after the marker does not matter, as it does not to the decoder: zeros that fill a
    block, a maker's notes, a second picture. A marker in the header does not count, such as that
    of the thumbnail which cameras put there. It takes a tenth of a microsecond, and of a JPEG that
    goes on after its end as long as it takes to look through its bytes.
    """
    if not encoded.startswith(_BEGIN) or encoded.endswith(_END):
        return False
    if encoded.endswith(b'\0') and encoded.rstrip(b'\0').endswith(_END):
        return False
    # In the compressed data a byte ff is followed by 00 or the number of a restart.
    return encoded.find(_END, _scan(encoded)) < 0


def _scan(encoded):
    """Where the compressed data of a JPEG begin; its length if it ends before."""
    place = len(_BEGIN) - 1
    while True:
        marker = _MARKER.search(encoded, place)
        if marker is None:
            return len(encoded)
        code = marker.group(1)[0]
        if code == _END_OF_IMAGE:  # no image at all: the decoder says so
            return marker.start()
        place = marker.end()
        if code not in _WITHOUT_LENGTH:
            place += int.from_bytes(encoded[place:place + 2], 'big')
            if code == _SCAN:
                return place
