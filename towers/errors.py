"""Typed errors: each text says what was given, what was expected, and what to do.

Every error of this package is a `TowersError`. Most are also the built-in error that legacy code
already catches (`ValueError`, `TypeError`), so that swapping a tower loop for `build_towers` does
not change a program's `except` clauses.
"""

import re


_UNSHOWN = re.compile('[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


def shown(text):
    """A text with what does not go onto a line of any terminal or file escaped.

    That is what moves a cursor or begins a line, as names of files and what files hold may do; and
    a byte of a name that is no UTF-8, a lone surrogate to Python, as `\\xe9`.
    """
    return _UNSHOWN.sub(_escaped, text)


def _escaped(match):
    code = ord(match.group())
    return '\\x%02x' % (code - 0xdc00) if 0xdc80 <= code <= 0xdcff else repr(match.group())[1:-1]


class TowersError(Exception):
    """Base class of every error that this package raises on purpose; its text is one line."""

    def __init__(self, text='', *more):
        # What was given may be shown in several lines: an array, say.
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
    """An operation of the model that further towers cannot have a copy of; says why not."""


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
    """A step that does not fit into memory; says who wanted what, what takes most, what helps."""
