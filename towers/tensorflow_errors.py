"""TensorFlow's reason why it could not run a step, in one line."""

import contextlib
import re

import tensorflow.compat.v1 as tf

from towers.errors import StepError

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
    """Whether a step failed since an iterator could not give its batch.

    Args:
      error: what `session.run` raised.
    """
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
