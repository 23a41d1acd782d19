"""Typed errors: each text says what was given, what was expected, and what to do.

Every error of this package is a `TowersError`. Most are also the built-in error that legacy code
already catches (`ValueError`, `TypeError`), so that swapping a tower loop for `build_towers` does
not change a program's `except` clauses.
"""

import contextlib
import re
import typing

import tensorflow.compat.v1 as tf

# Characters that move a cursor or begin a line.
_UNSHOWN = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


def shown(text: str) -> str:
    """A text that fits on one line of any terminal or file: other characters are escaped.

    Names and contents of files may have characters that move a cursor or begin a line. A byte of a
    name that is no UTF-8, which Python reads as a lone surrogate, becomes `\\xe9`.
    """
    return _UNSHOWN.sub(_escaped, text)


def _escaped(match: typing.Match) -> str:
    """The escape of a matched character."""
    code = ord(match.group())
    is_lone_byte = 0xdc80 <= code <= 0xdcff  # the codes of Python's `surrogateescape`
    if is_lone_byte:
        return '\\x%02x' % (code - 0xdc00)
    return repr(match.group())[1:-1]


def counted(number: int, noun: str) -> str:
    """A number with a noun in the singular or plural: `'1 example'`, `'3,594 examples'`."""
    return '{:,d} {}{}'.format(number, noun, '' if number == 1 else 's')


class TowersError(Exception):
    """Base class of every error that this package raises on purpose; its text is one line."""

    def __init__(self, text: typing.Any = '', *more: typing.Any):
        """Makes one line of `text`; `more` are further arguments of the exception."""
        # The text shows what was given, which may have several lines, as an array has.
        super().__init__(shown(re.sub(r'\s*\n\s*', ' ', str(text))), *more)


class InvalidArgumentError(TowersError, ValueError):
    """An argument that makes no sense, or two that contradict each other."""


class DeviceError(TowersError, ValueError):
    """A device that does not exist, is named twice, or cannot be parsed."""


class InputError(TowersError, ValueError):
    """Inputs that cannot be cut into a shard per tower."""


class ModelFunctionError(TowersError, TypeError):
    """A model function that returned something other than a loss or a structure with one."""


class SharedVariableError(TowersError, ValueError):
    """A variable that the towers cannot share; names the variable, the tower and the fix."""


class NameScopeError(TowersError, ValueError):
    """A name scope of the towers that the graph already has."""


class FailedBuildError(TowersError, ValueError):
    """A build in a graph in which an earlier build has failed."""


class CloneError(TowersError, ValueError):
    """An operation of the model that cannot be copied for the other towers; says why not."""


class GradientError(TowersError, ValueError):
    """Gradients that cannot be combined, or no gradient at all."""


class PrecisionError(TowersError):
    """A precision for which TensorFlow has no graph rewrite here, or one that changes nothing."""


class AuditError(TowersError):
    """The finished graph, or the runtime's placement of it, breaks a promise of the plan."""


class CheckpointError(TowersError):
    """A checkpoint that cannot be used, found, or written."""


class RunLockedError(TowersError):
    """A directory that another run is using."""


class LogFileError(TowersError):
    """A file about a run, such as metrics.jsonl, that cannot be read or written."""


class BadFileError(CheckpointError, LogFileError):
    """A file of a run that is no regular file, or holds something else than it should."""


class ClusterError(TowersError):
    """A cluster that cannot be joined, or an option that does not go with one."""


class WorkerLostError(ClusterError):
    """Another worker has ended, or does not answer any more, and this one needs it; names it."""


class MissingPackageError(TowersError, ImportError):
    """An optional package that is not installed; names the extra that brings it."""


class NonFiniteError(TowersError):
    """A loss or a gradient is NaN or infinite."""


class MeasurementError(TowersError):
    """Memory that cannot be measured, since TensorFlow's allocator does not count it here."""


class StepError(TowersError):
    """A step of a check that TensorFlow could not run; says on which devices, and the reason."""


class OutOfMemoryError(TowersError):
    """A step that does not fit into memory; says which operation needed how much on which device,
    which tensors take the most, and what helps."""


# ---- errors of TensorFlow's runtime --------------------------------------------------------------

# The first of several causes, such as '(0) INVALID_ARGUMENT: Incompatible shapes'.
_ROOT = re.compile(r'\(0\) [\w ]+: *(.+)')
# The place of the operation, in front of a cause: a function of the graph, a step of a data set.
_PLACE = re.compile(r'^(\{\{function_node \S+\}\} *|'
                    r'Error in user-defined function passed to .*? with iterator: \S+: +)+')
# Lines that a session of a cluster puts around each cause that a task has reported.
_TASK = re.compile(r'^(?:[A-Z_]+: )?From /job:\S+:$|^=+$')
_MOST = 300  # letters of a reason


def reason_of(error: BaseException) -> str:
    """The line of an error's text that gives its reason, without the place of the operation.

    Three things are taken off: what a cluster writes around a task's error, the stacks of
    operations, and the place in front of the reason. Where that would leave nothing, it stays.
    """
    text = getattr(error, 'message', None) or str(error)
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        return repr(error)
    lines = _without_tasks(lines) or lines
    lines = _after_stacks(lines) or lines
    reason = _first_root(lines) or lines[0]
    return _PLACE.sub('', reason) or reason


def _without_tasks(lines: typing.List[str]) -> typing.List[str]:
    """The lines of an error's text without those that name a task of a cluster."""
    return [line for line in lines if not _TASK.match(line)]


def _after_stacks(lines: typing.List[str]) -> typing.List[str]:
    """The lines of an error's text that come after the stacks of operations.

    TensorFlow 2 puts the stacks in front of the reason:

        Graph execution error:
        Detected at node 'div' defined at (most recent call last):
        File "train.py", line 3, in <module>
        Node: 'div'
        Incompatible shapes: [2] vs. [3]

    Some versions leave the line `Node:` out.
    """
    if not lines[0].startswith('Graph execution error'):
        return lines
    for position in reversed(range(len(lines))):
        if lines[position].startswith('Node: '):  # the last such line ends the stacks
            return lines[position + 1:]
    return [line for line in lines[1:] if not line.startswith(('Detected at', 'File '))]


def _first_root(lines: typing.List[str]) -> typing.Optional[str]:
    """The first cause in the lines of an error that lists several; None for other errors."""
    if 'root error(s) found' in lines[0]:
        for line in lines[1:]:
            found = _ROOT.match(line)
            if found is not None:
                return found.group(1)
    return None


# An iterator as the node that failed, or that called the function in which one did; but not
# `IteratorGetNext/_3`, which copies a batch to another device.
_OF_INPUT = re.compile(r'\[\[(?:\{\{)?(?:node )?[^\s\]]*IteratorGetNext\w*(?![\w/])')


def is_of_input(error: Exception) -> bool:
    """Whether `session.run` raised this error because an iterator could not give its batch.

    A lack of memory does not count: then the size of the batch is at fault, and not its content.
    """
    if not isinstance(error, tf.errors.OpError):
        return False
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return False
    return _OF_INPUT.search(str(error)) is not None


@contextlib.contextmanager
def failing_on(where: str) -> typing.Iterator[None]:
    """A context in which an error of TensorFlow's runtime becomes the cause of a `StepError`.

    `where` is the text about where the step ran, such as `'on one device'`.
    """
    try:
        yield
    except tf.errors.OpError as error:
        op = getattr(error, 'op', None)
        place = where if op is None else '%s in %s' % (where, op.name)
        reason = reason_of(error)[:_MOST]
        if 'must feed a value for placeholder' in reason:
            reason += '; check_towers takes it in feed={placeholder: value}'
        raise StepError('the model failed %s: %s' % (place, reason)) from error
