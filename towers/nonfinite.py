"""Checks that the losses and gradients of all towers are finite, and the error where one is not."""

import re
import typing

import tensorflow.compat.v1 as tf

from towers.errors import NonFiniteError

_MARK = 'towers-nonfinite'
_OF_TOWER = re.compile('(' + _MARK + r'\[[^]]* tower )\d+(?:, micro-batch \d+ of (\d+))?\]')
_FOUND = re.compile(_MARK + r'\[(.*?)\] : Tensor had (NaN|Inf|\S+)')


def checked_loss(loss: tf.Tensor, part: int, micro_batches: int = 1) -> tf.Tensor:
    """The loss, by a `tf.debugging.check_numerics` that fails the step if it is not finite.

    Args:
      loss: scalar.
      part: the index of the part of the batch among those of all towers.
      micro_batches: how many parts each tower has.
    """
    return tf.debugging.check_numerics(loss, '%s[the loss of tower %s]' % (
        _MARK, _place(part, micro_batches)))


def _place(part: int, micro_batches: int) -> str:
    """The tower of a part of the batch, and its micro-batch where it has several, in words."""
    tower, micro_batch = divmod(part, micro_batches)
    if micro_batches == 1:
        return '%d' % tower
    return '%d, micro-batch %d of %d' % (tower, micro_batch, micro_batches)


def checked_gradients(gradients: list, loss: tf.Tensor, part: int, micro_batches: int = 1) -> list:
    """The `(gradient, variable)` pairs, each by a `check_numerics`, which runs before the update.

    Args:
      gradients: the pairs.
      loss: a `checked_loss`; the gradients are checked after it, so that the error names a bad loss
        first.
      part: the index of the part of the batch among those of all towers.
      micro_batches: how many parts each tower has.
    """
    checked = []
    with tf.control_dependencies([loss]):
        for gradient, variable in gradients:
            if gradient is not None:
                gradient = _checked_gradient(gradient, '%s[the gradient of %s in tower %s]' % (
                    _MARK, variable.op.name, _place(part, micro_batches)))
            checked.append((gradient, variable))
    return checked


def _checked_gradient(gradient: typing.Any, message: str) -> typing.Any:
    """A gradient, dense or sparse, by a check of its values that fails with the message."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.debugging.check_numerics(gradient.values, message),
                                gradient.indices, gradient.dense_shape)
    return tf.debugging.check_numerics(gradient, message)


def message_of_tower(message: str, part: int) -> str:
    """The message of a check, or of its gradient's, for another part of the batch."""
    def of_part(found):
        micro_batches = int(found.group(2) or 1)
        return '%s%s]' % (found.group(1), _place(part, micro_batches))
    return _OF_TOWER.sub(of_part, message)


def explained(error: Exception, step: typing.Optional[int] = None
              ) -> typing.Optional[NonFiniteError]:
    """The `NonFiniteError` that says what a failed step found, or None if it was something else.

    Args:
      error: what `session.run` raised.
      step: the number of the step that failed; None where it is not known.
    """
    found = _FOUND.search(str(error))
    if found is None:
        return None
    in_step = '' if step is None else ' in step %d' % step
    return NonFiniteError(
        '%s is %s%s. Nothing of it was saved. Look at the learning rate, at the inputs '
        'of that step, and at logarithms, divisions and square roots of 0 in the model.'
        % (found.group(1), found.group(2), in_step))
