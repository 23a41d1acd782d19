"""How long a step waits for its batch: a pair of times around the reading of it."""

import tensorflow.compat.v1 as tf


def timed_batch(iterator):
    """Reads the next batch of an iterator, and measures how long a step waits for it.

        waited = time when the batch is there - time when the step has begun to ask for it

    The share of a step's time that is waiting is the share by which a faster input could shorten
    it. Which device is busy meanwhile, the trace of `--profile_steps` shows.

    Args:
      iterator: of `tf.data`.

    Returns:
      `(batch, waited)`: as `iterator.get_next()`, and a float64 scalar, the seconds.
    """
    asked = tf.timestamp(name='asked_for_input')
    with tf.control_dependencies([asked]):
        batch = iterator.get_next()
    parts = tf.nest.flatten(batch, expand_composites=True)
    with tf.control_dependencies(parts):
        there = tf.timestamp(name='input_is_there')
    # The towers take what has passed the second time: else their work, which takes all threads,
    # could begin before it.
    with tf.control_dependencies([there]):
        passed = [tf.identity(part) for part in parts]
    return tf.nest.pack_sequence_as(batch, passed, expand_composites=True), there - asked
