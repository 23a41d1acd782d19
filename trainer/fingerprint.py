"""Checksums that show whether two runs began with the same weights and saw the same examples."""

import hashlib

import numpy as np
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.run.step_loop import OccasionalHook

_PRIME = 2 ** 31 - 1  # products of two remainders fit into an int64
_BASE = 1000003
_PIXEL_BASE = 69621
_MOST_PIXELS = 1024  # of an image that are summed; all of them would cost as much as a layer


def weights_checksum(values):
    """SHA-256 over names, types, shapes and bytes of the values: its first 16 hexadecimal digits.

    Args:
      values: dict from variable names to arrays.
    """
    digest = hashlib.sha256()
    for name in sorted(values):
        array = np.ascontiguousarray(values[name])
        digest.update(('%s %s %s\n' % (name, array.dtype.name, array.shape)).encode('utf-8'))
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


class ExamplesChecksum:
    """A checksum of the stream of examples that a run has seen, whatever its batch size.

        checksum(e_1 .. e_n) = sum_i d(e_i) B^(n - i)  mod p        p = 2^31 - 1, B = 1,000,003

    where d(e) is the same sum over an example's pixels, in units of 1/16,384, and its label. (Of an
    image with more than 1,024 numbers it takes at most 1,024, evenly spaced.) It depends on the
    examples and their order alone, so batches of 25 and of 100 with the same examples in the same
    order give the same number. Two different streams have the same checksum with a probability of
    about 1 in 10^9. It is kept in a variable, so that a run that is resumed goes on with it.

    Attributes:
      variable: int64 scalar, saved with the run.
    """

    def __init__(self):
        self.variable = tf.get_variable('examples_checksum', [], tf.int64, tf.zeros_initializer(),
                                        trainable=False)

    def update(self, images, labels):
        """Takes one batch in, once a step.

        Args:
          images: [batch, height, width, channels] of known shape, of any numeric type.
          labels: [batch] of an integer type.

        Returns:
          The checksum with this batch in it, an int64 scalar; computing it updates `variable`.

        Raises:
          InvalidArgumentError: a shape that is not known.
        """
        if not images.shape.is_fully_defined():
            raise InvalidArgumentError('images of shape %s cannot be checksummed: expected one '
                                       'that is known.' % images.shape)
        batch, size = images.shape.as_list()[0], images.shape[1:].num_elements()
        stride = -(-size // _MOST_PIXELS)
        pixels = tf.reshape(images, [batch, size])[:, ::stride]
        pixels = tf.cast(tf.cast(pixels, tf.float32) * 16384, tf.int64)
        digests = _weighted_sum(tf.floormod(pixels, _PRIME), _PIXEL_BASE, axis=1)
        digests = tf.floormod(digests * _BASE + tf.cast(labels, tf.int64) + 1, _PRIME)
        of_batch = _weighted_sum(digests, _BASE, axis=0)
        shifted = self.variable * pow(_BASE, batch, _PRIME)
        new = tf.floormod(shifted + of_batch, _PRIME)
        with tf.control_dependencies([tf.assign(self.variable, new).op]):
            return tf.identity(new)


class FingerprintHook(OccasionalHook):
    """Writes the checksum of a new run's initial weights into the line of step 0 of its log.

    In a run that is resumed it does nothing: the line is in the file already.
    """

    def __init__(self, variables, global_step, log):
        """
        Args:
          variables: list of the variables of the checksum.
          global_step: the variable that counts steps.
          log: the `MetricsLog` of a `MetricsHook`, which comes before this hook in the list.
        """
        self._variables = {variable.op.name: variable for variable in variables}
        self._global_step = global_step
        self._log = log

    def after_create_session(self, session, coord):
        """Writes the checksum if the run is at step 0."""
        if int(session.run(self._global_step)) == 0:
            checksum = weights_checksum(session.run(self._variables))
            self._log.add(0, {'examples': 0, 'initial_weights': checksum})

    def is_due(self):
        """Never: there is nothing to do around a step."""
        return False


def _weighted_sum(numbers, base, axis):
    """sum_i numbers_i base^(n - 1 - i) mod p along an axis, of numbers in [0, p)."""
    count = numbers.shape.as_list()[axis]
    powers, power = [], 1
    for _ in range(count):
        powers.append(power)
        power = power * base % _PRIME
    weighted = tf.floormod(numbers * tf.constant(powers[::-1], tf.int64), _PRIME)
    return tf.floormod(tf.reduce_sum(weighted, axis), _PRIME)
