"""The checksum of a variable's value, by which workers compare their variables.

The value of a large variable is cut into pieces, each of which has a checksum. Most variables are
read as a whole: the value that TensorFlow gives is the variable's memory, and a piece of it is no
copy. A resource variable whose rows are accessed in place is read by pieces, since TensorFlow would
copy the whole of it, which takes longer than the checksum. Other variables are never read by
pieces: from the first access to rows on, TensorFlow would copy them in each step. The checksum is
the same in either way.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import bytes_of
from towers.graph.variable_access import Writes, is_reference

NUM_CHECKSUMS = 1 << 52  # they are compared as JSON, whose larger numbers may be inexact

# A piece of this size stays in a processor's cache; for each piece of 1 MB, memory is asked for
# anew.
_BYTES_OF_PIECE = 1 << 19
# By which checksums of pieces are joined: an odd number of 64 bits, half of them ones.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


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
        return _in_range(_hashes(variable.read_value(), 1)[0])
    num_rows = variable.get_shape().as_list()[0]
    rows_of_piece = max(1, bytes_of_piece * num_rows // size)
    is_read_by_pieces = not is_reference(variable) and Writes(
        variable.graph).has_rows_accessed(variable.op)
    if not is_read_by_pieces:
        hashes = _hashes_of_pieces(variable.read_value(), num_rows, rows_of_piece)
        return _in_range(tf.reduce_sum(hashes * _factors(hashes.shape.as_list()[0])))

    def add_piece(begin: tf.Tensor, total: tf.Tensor) -> typing.Tuple[tf.Tensor, tf.Tensor]:
        """The beginning of the next piece, and the sum of the hashes of all pieces up to here, each
        with its factor."""
        end = tf.minimum(begin + rows_of_piece, num_rows)
        rows = tf.gather(variable, tf.range(begin, end))
        return end, total * _FACTOR + _hashes(rows, 1)[0]
    first_row = tf.constant(0)
    of_no_piece = tf.constant(0, tf.int64)
    _, total = tf.while_loop(lambda begin, total: begin < num_rows, add_piece,
                             [first_row, of_no_piece], parallel_iterations=1,
                             back_prop=False)  # a piece at a time in memory
    return _in_range(total)


def _hashes(value: tf.Tensor, num_items: int) -> tf.Tensor:
    """The hashes of a tensor that is cut into items of equal size, int64 [`num_items`]."""
    items = tf.reshape(value, [num_items, -1])
    return tf.bitcast(tf.raw_ops.Fingerprint(data=items, method='farmhash64'), tf.int64)


def _hashes_of_pieces(value: tf.Tensor, num_rows: int, rows_of_piece: int) -> tf.Tensor:
    """The hashes of the pieces of a value, the last of which may have fewer rows."""
    num_whole, num_rest = divmod(num_rows, rows_of_piece)
    hashes = _hashes(value[:num_rows - num_rest], num_whole)
    if num_rest:
        hashes = tf.concat([hashes, _hashes(value[num_rows - num_rest:], 1)], 0)
    return hashes


def _factors(num_pieces: int) -> np.ndarray:
    """The factors of the hashes of so many pieces: powers of `_FACTOR`, that of the last one is 1.
    They are int64, and the powers overflow, as in TensorFlow."""
    powers = [1]
    for _ in range(num_pieces - 1):
        powers.append(powers[-1] * _FACTOR % (1 << 64))
    return np.array(powers[::-1], np.uint64).astype(np.int64)


def _in_range(number: tf.Tensor) -> tf.Tensor:
    """The low bits of an int64, as many as a checksum has."""
    return tf.bitwise.bitwise_and(number, NUM_CHECKSUMS - 1)
