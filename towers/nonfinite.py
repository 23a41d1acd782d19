"""Checks that the losses and gradients of all towers are finite, and the error where one is not.

The message of each check names the loss or the variable, and the tower; TensorFlow's error holds
it, and `explained` reads it there. Its test is tests/test_errors.py.
"""

import re
import typing

import tensorflow.compat.v1 as tf

from towers.errors import NonFiniteError

_MARK = 'towers-nonfinite'
# The message of a check: up to the tower, and the number of micro-batches, if it says so.
_OF_TOWER = re.compile('(' + _MARK + r'\[[^]]* tower )\d+(?:, micro-batch \d+ of (\d+))?\]')
# The message in TensorFlow's error, and what was found.
_FOUND = re.compile(_MARK + r'\[(.*?)\] : Tensor had (NaN|Inf|\S+)')


def checked_loss(loss: tf.Tensor, part: int, micro_batches: int = 1) -> tf.Tensor:
    """The loss, through a `tf.debugging.check_numerics` that fails the step if it is not finite.

    Args:
      loss: a scalar.
      part: the index of the part of the batch among those of all towers.
      micro_batches: how many parts each tower has.
    """
    return tf.debugging.check_numerics(loss, '%s[the loss of tower %s]' % (
        _MARK, _place(part, micro_batches)))


def _place(part: int, micro_batches: int) -> str:
    """The tower of a part of the batch, and its micro-batch if there are several: `'1'`, `'1,
    micro-batch 0 of 2'`.

    Args:
      part: the index of the part among those of all towers.
      micro_batches: how many parts each tower has.
    """
    tower, micro_batch = divmod(part, micro_batches)
    if micro_batches == 1:
        return '%d' % tower
    return '%d, micro-batch %d of %d' % (tower, micro_batch, micro_batches)


def checked_gradients(gradients: list, loss: tf.Tensor, part: int, micro_batches: int = 1) -> list:
    """The `(gradient, variable)` pairs, with each gradient through a `check_numerics`.

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
    """A gradient, dense or sparse, through a check of its values that fails with the message."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.debugging.check_numerics(gradient.values, message),
                                gradient.indices, gradient.dense_shape)
    return tf.debugging.check_numerics(gradient, message)


def message_of_tower(message: str, part: int) -> str:
    """The message of a check in a copy of tower 0: it names the tower of the copy.

    Args:
      message: the message of the check, or of the check of its gradient, in tower 0.
      part: the index of the copy's part of the batch among those of all towers.
    """
    def with_tower_of_part(found: typing.Match) -> str:
        """The text in the place of a match of `_OF_TOWER`, which names another tower."""
        beginning, micro_batches = found.groups()
        # The message says the number of micro-batches only where there are several.
        return '%s%s]' % (beginning, _place(part, int(micro_batches or 1)))
    return _OF_TOWER.sub(with_tower_of_part, message)


def explained(error: Exception, step: typing.Optional[int] = None
              ) -> typing.Optional[NonFiniteError]:
    """The `NonFiniteError` for a step that failed in one of these checks; None for other errors.

    Args:
      error: the error that `session.run` raised.
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
