"""JPEGs without their end are told from those that have more after it, as the decoder tells them.
"""

import struct

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from datasets.jpeg_end import is_cut_off
from image_files import jpeg, png

END = b'\xff\xd9'


def noisy(progressive):
    image = np.random.RandomState(3).randint(0, 256, [40, 56, 3]).astype(np.uint8)
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(tf.image.encode_jpeg(image, progressive=progressive))


def with_thumbnail(encoded):
    """With a JPEG of its own in a segment of the header, where cameras put a small picture."""
    inner = jpeg(9)
    return encoded[:2] + b'\xff\xe1' + struct.pack('>H', 2 + len(inner)) + inner + encoded[2:]


@pytest.mark.parametrize('encoded', [jpeg(), jpeg(9, channels=1), noisy(False),
                                     noisy(True), with_thumbnail(jpeg())],
                         ids=['jpeg', 'gray', 'noisy', 'progressive', 'thumbnail'])
def test_what_the_decoder_of_the_whole_takes_is_not_cut_off_and_nothing_else(encoded):
    body = encoded[:-2]
    whole = [encoded, encoded + b'\0', encoded + b'\0' * 99, encoded + b'\n', encoded + b'SEFT' * 9,
             encoded + encoded, encoded + encoded[:50], body + b'\xff' + END, encoded + b'\xff',
             body[:-9] + END]
    cut = [body, body + b'\xff', body + b'\0' * 9, body + b'\xff' + b'\0' * 9, body[:-1],
           body[:len(body) - 40], body + b'\n', body + b'\xff\xff\xff', encoded[:60],
           encoded[:200], encoded[:4]]
    assert [is_cut_off(each) for each in whole] == [False] * 10
    assert [is_cut_off(each) for each in cut] == [True] * 11
    with tf.Graph().as_default(), tf.Session() as session:
        given = tf.placeholder(tf.string, [])
        decoded = session.make_callable(tf.image.decode_jpeg(given).op, [given])
        for each in whole:
            decoded(each)
        for each in cut:
            with pytest.raises(tf.errors.InvalidArgumentError):
                decoded(each)


@pytest.mark.parametrize('encoded', [b'', b'\xff\xd8', b'GIF89a', png(), png()[:60]])
def test_others_are_none(encoded):
    assert not is_cut_off(encoded)


def test_damaged_headers_end_the_search():
    assert is_cut_off(b'\xff\xd8\xff' + b'\xe1\0\0' * 9)
    assert is_cut_off(b'\xff\xd8\xff\xe1\xff\xff' + END * 9 + b'.')
    assert not is_cut_off(b'\xff\xd8\xff\xd8\xff\x01' + END + b'.')
