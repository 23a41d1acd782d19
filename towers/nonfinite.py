"""NaN and Inf, stopped where they first appear: which tower, which variable, which step."""

import re

import tensorflow.compat.v1 as tf

from towers.errors import TowersError


class NonFiniteError(TowersError):
    """A loss or a gradient is NaN or infinite."""


_MARK = 'towers-nonfinite'
_OF_TOWER = re.compile('(' + _MARK + r'\[[^]]* tower )\d+\]')
_FOUND = re.compile(_MARK + r'\[(.*?)\] : Tensor had (NaN|Inf|\S+)')


def checked_loss(loss, tower):
    """The loss, which fails the step when it is not finite (`tf.debugging.check_numerics`)."""
    return tf.debugging.check_numerics(loss, '%s[the loss of tower %d]' % (_MARK, tower))


def checked_gradients(gradients, loss, tower):
    """The gradients, each of which fails the step, before any update of its variable, when it is
    not finite. They are looked at after the loss, so that a bad loss is named first.

    Args:
      gradients: list of `(gradient, variable)`; dense, `IndexedSlices` or None.
      loss: the tower's `checked_loss`.
      tower: the tower's number.

    Returns:
      The same list with checked gradients.
    """
    checked = []
    with tf.control_dependencies([loss]):
        for gradient, variable in gradients:
            message = '%s[the gradient of %s in tower %d]' % (_MARK, variable.op.name, tower)
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(tf.debugging.check_numerics(gradient.values, message),
                                            gradient.indices, gradient.dense_shape)
            elif gradient is not None:
                gradient = tf.debugging.check_numerics(gradient, message)
            checked.append((gradient, variable))
    return checked


def message_of_tower(message, tower):
    """The message of a check that was made for one tower, as it is for another one.

    Any text with such a message in it, as TensorFlow makes for the gradient of a check.
    """
    return _OF_TOWER.sub(lambda found: '%s%d]' % (found.group(1), tower), message)


def checked_at_least_scale(gradients, scaled_losses):
    """An operation for a step that is skipped: fails it where no smaller loss scale is to be had.

    Args:
      gradients: list of combined `(gradient, variable)`, dense or `IndexedSlices`.
      scaled_losses: `ScaledLosses`.
    """
    def check():
        checks = []
        for gradient, variable in gradients:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            checks.append(tf.debugging.check_numerics(
                values, '%s[the gradient of %s, at the least loss scale,]' % (
                    _MARK, variable.op.name)))
        with tf.control_dependencies(checks):
            return tf.constant(True)
    return tf.cond(scaled_losses.at_least(), check, lambda: tf.constant(False))


def explained(error, step):
    """The `NonFiniteError` that says what a failed step found, or None if it was something else.

    Args:
      error: what `session.run` raised.
      step: the number of the step that failed.
    """
    found = _FOUND.search(str(error))
    if found is None:
        return None
    return NonFiniteError(
        '%s is %s in step %d. Nothing of it was saved. Look at the learning rate, at the inputs '
        'of that step, and at logarithms, divisions and square roots of 0 in the model.'
        % (found.group(1), found.group(2), step))
