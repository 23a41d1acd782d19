"""The checksum of a variable's value, by which workers compare their variables.

A large variable is read in pieces. Reading it as a whole makes up to three copies of it, which take
several times as long as the checksum.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import bytes_of

NUM_CHECKSUMS = 1 << 52  # they are compared as JSON, whose larger numbers may be inexact

# A piece of this size stays in a processor's cache; for each piece of 1 MB, memory is asked for
# anew.
_BYTES_OF_PIECE = 1 << 18
# Numbers of a piece that count. A piece may be one large row, and `serialize_tensor` takes 2 GB.
_MOST_NUMBERS = 1 << 26


def checksum(variable: tf.Variable, bytes_of_piece: int = _BYTES_OF_PIECE) -> tf.Tensor:
    """A number that is the same for values of equal bits, and almost never for other values.

    Args:
      variable: of numbers.
      bytes_of_piece: a larger variable is read in pieces of this many bytes, or of one row where a
        row is larger.

    Returns:
      int64 scalar, at least 0 and less than `NUM_CHECKSUMS`.
    """
    size = bytes_of(variable)  # 0 where the shape is not known
    is_scalar = variable.get_shape().ndims == 0  # which has no rows to cut
    if size <= bytes_of_piece or is_scalar:
        return _hash(variable.read_value())
    num_rows = variable.get_shape().as_list()[0]
    rows_of_piece = max(1, bytes_of_piece * num_rows // size)

    def add_piece(begin: tf.Tensor, total: tf.Tensor) -> typing.Tuple[tf.Tensor, tf.Tensor]:
        """The beginning of the next piece, and the checksum of all pieces up to here."""
        end = tf.minimum(begin + rows_of_piece, num_rows)
        rows = tf.gather(variable, tf.range(begin, end))
        return end, _joined(total, _hash(rows))
    first_row = tf.constant(0)
    nothing = tf.constant(0, tf.int64)  # the checksum of no piece
    _, total = tf.while_loop(lambda begin, total: begin < num_rows, add_piece, [first_row, nothing],
                             parallel_iterations=1, back_prop=False)  # a piece at a time in memory
    return total


def _hash(value: tf.Tensor) -> tf.Tensor:
    """The checksum of a tensor."""
    numbers = tf.reshape(value, [-1])[:_MOST_NUMBERS]
    return tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(numbers), NUM_CHECKSUMS)


def _joined(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The checksum of two checksums, in their order."""
    text = tf.strings.join([tf.as_string(one), tf.as_string(other)], ' ')
    return tf.strings.to_hash_bucket_fast(text, NUM_CHECKSUMS)
