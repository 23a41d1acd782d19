"""NaN and Inf, stopped where they first appear: which tower, which variable, which step."""

import re

import tensorflow.compat.v1 as tf

from towers.errors import TowersError


class NonFiniteError(TowersError):
    """A loss or a gradient is NaN or infinite."""


_MARK = 'towers-nonfinite'
_OF_TOWER = re.compile('(' + _MARK + r'\[[^]]* tower )\d+(?:, micro-batch \d+ of (\d+))?\]')
_FOUND = re.compile(_MARK + r'\[(.*?)\] : Tensor had (NaN|Inf|\S+)')


def checked_loss(loss, part, micro_batches=1):
    """The loss, by a `tf.debugging.check_numerics` that fails the step if it is not finite.

    Args:
      loss: scalar.
      part: the number of the part of the batch that it is of: that of its tower; or, where each
        tower has several micro-batches, of its micro-batch among those of all towers.
      micro_batches: how many each tower has.
    """
    return tf.debugging.check_numerics(loss, '%s[the loss of tower %s]' % (
        _MARK, _place(part, micro_batches)))


def _place(part, micro_batches):
    tower, micro_batch = divmod(part, micro_batches)
    return '%d%s' % (tower, '' if micro_batches == 1 else ', micro-batch %d of %d' % (
        micro_batch, micro_batches))


def checked_gradients(gradients, loss, part, micro_batches=1):
    """The gradients, each by a `check_numerics` that fails the step if it is not finite.

    The check runs before the variable is updated, and after the loss was checked, so that the error
    names a bad loss first.

    Args:
      gradients: list of `(gradient, variable)`; dense, `IndexedSlices` or None.
      loss: the tower's `checked_loss`.
      part, micro_batches: as for `checked_loss`.

    Returns:
      The same list with checked gradients.
    """
    checked = []
    with tf.control_dependencies([loss]):
        for gradient, variable in gradients:
            message = '%s[the gradient of %s in tower %s]' % (
                _MARK, variable.op.name, _place(part, micro_batches))
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(tf.debugging.check_numerics(gradient.values, message),
                                            gradient.indices, gradient.dense_shape)
            elif gradient is not None:
                gradient = tf.debugging.check_numerics(gradient, message)
            checked.append((gradient, variable))
    return checked


def message_of_tower(message, part):
    """Exchanges the tower's number in the message of a check, and the micro-batch's.

    Args:
      message: the message of a check, or a text that contains one: TensorFlow makes such a text for
        the gradient of a check.
      part: the number to put in, as for `checked_loss`.

    Returns:
      The text with the other number.
    """
    return _OF_TOWER.sub(lambda found: '%s%s]' % (
        found.group(1), _place(part, int(found.group(2) or 1))), message)


def explained(error, step=None):
    """The `NonFiniteError` that says what a failed step found, or None if it was something else.

    Args:
      error: what `session.run` raised.
      step: the number of the step that failed; None where it is not known.
    """
    found = _FOUND.search(str(error))
    if found is None:
        return None
    return NonFiniteError(
        '%s is %s%s. Nothing of it was saved. Look at the learning rate, at the inputs '
        'of that step, and at logarithms, divisions and square roots of 0 in the model.'
        % (found.group(1), found.group(2), '' if step is None else ' in step %d' % step))
