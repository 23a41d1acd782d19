"""Errors of TensorFlow's runtime: the reason of a failed step, and NaN and Inf by their place."""

import contextlib
import re

import tensorflow.compat.v1 as tf

from towers.errors import NonFiniteError, StepError

_ROOT = re.compile(r'\(0\) [\w ]+: *(.+)')  # the first of several causes
# Where it was: a function of the graph, a step of a data set.
_PLACE = re.compile(r'^(\{\{function_node \S+\}\} *|'
                    r'Error in user-defined function passed to .*? with iterator: \S+: +)+')
# Lines around each cause that a session of a cluster was told of by a task.
_TASK = re.compile(r'^(?:[A-Z_]+: )?From /job:\S+:$|^=+$')
_MOST = 300


def reason_of(error):
    """The line of an error's text that says why; without the place where the operation was made."""
    text = getattr(error, 'message', None) or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not _TASK.match(line)] or lines
    if len(lines) > 1 and lines[0].startswith('Graph execution error'):
        # Under it: the stacks of the operations, their names, and then the reason.
        names = [at for at, line in enumerate(lines) if line.startswith('Node: ')]
        lines = (lines[names[-1] + 1:] if names else
                 [line for line in lines[1:] if not line.startswith(('Detected at', 'File '))]
                 ) or lines
    if len(lines) > 1 and 'root error(s) found' in lines[0]:
        lines = [found.group(1) for found in map(_ROOT.match, lines) if found] or lines
    return _PLACE.sub('', lines[0]) or lines[0] if lines else repr(error)


# The node that failed, or that called the function in which one did; not `IteratorGetNext/_3`,
# which is a copy of a batch that was made.
_OF_INPUT = re.compile(r'\[\[(?:\{\{)?(?:node )?[^\s\]]*IteratorGetNext\w*(?![\w/])')


def is_of_input(error):
    """Whether `session.run` raised this error since an iterator could not give its batch."""
    return isinstance(error, tf.errors.OpError) and not isinstance(
        error, tf.errors.ResourceExhaustedError) and _OF_INPUT.search(str(error)) is not None


@contextlib.contextmanager
def failing_on(where):
    """A context that turns an error of TensorFlow's runtime into a `StepError`, as its cause.

    Args:
      where: where the step ran, for the text: `'on one device'`.
    """
    try:
        yield
    except tf.errors.OpError as error:
        op = getattr(error, 'op', None)
        raise StepError('the model failed %s%s: %s' % (
            where, '' if op is None else ' in %s' % op.name, reason_of(error)[:_MOST])) from error


# ---- NaN and Inf ---------------------------------------------------------------------------------

_MARK = 'towers-nonfinite'
_OF_TOWER = re.compile('(' + _MARK + r'\[[^]]* tower )\d+(?:, micro-batch \d+ of (\d+))?\]')
_FOUND = re.compile(_MARK + r'\[(.*?)\] : Tensor had (NaN|Inf|\S+)')


def checked_loss(loss, part, micro_batches=1):
    """The loss, by a `tf.debugging.check_numerics` that fails the step if it is not finite.

    Args:
      loss: scalar.
      part: the number of the part of the batch, a tower's; or, where each tower has several
        micro-batches, a micro-batch's among those of all towers.
      micro_batches: how many each tower has.
    """
    return tf.debugging.check_numerics(loss, '%s[the loss of tower %s]' % (
        _MARK, _place(part, micro_batches)))


def _place(part, micro_batches):
    tower, micro_batch = divmod(part, micro_batches)
    return '%d%s' % (tower, '' if micro_batches == 1 else ', micro-batch %d of %d' % (
        micro_batch, micro_batches))


def checked_gradients(gradients, loss, part, micro_batches=1):
    """The `(gradient, variable)` pairs, each by a `check_numerics`, which runs before the update.

    It runs after the check of `loss`, a `checked_loss`, so that the error names a bad loss first.
    """
    def checked(gradient, variable):
        message = '%s[the gradient of %s in tower %s]' % (
            _MARK, variable.op.name, _place(part, micro_batches))
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(tf.debugging.check_numerics(gradient.values, message),
                                    gradient.indices, gradient.dense_shape)
        return None if gradient is None else tf.debugging.check_numerics(gradient, message)
    with tf.control_dependencies([loss]):
        return [(checked(*pair), pair[1]) for pair in gradients]


def message_of_tower(message, part):
    """The message of a check, or a text that contains one, for another part of the batch.

    TensorFlow makes such a text for the gradient of a check.
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
