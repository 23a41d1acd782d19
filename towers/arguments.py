"""Checks of arguments that several calls share."""

import collections
import contextlib
import inspect
import numbers
import os
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError

MOST_COUNT = 2 ** 63 - 1
"""The largest count: TensorFlow counts in int64."""

MOST_INT32 = 2 ** 31 - 1
"""The largest count of a field of TensorFlow's protocol buffers."""

MOST_NUMBER = float(np.finfo(np.float32).max)
"""The largest number that TensorFlow can compute with in float32."""


def check_number(name: str, value: typing.Any, least: typing.Optional[float] = None,
                 above: typing.Optional[float] = None, most: float = MOST_NUMBER,
                 expected: str = 'a number') -> None:
    """Raises `InvalidArgumentError` unless a value is a number within the bounds; NaN never is.

    Args:
      name: the name of the argument.
      value: the value that was given.
      least: the least number that is allowed; or None.
      above: a bound that the number has to exceed, also when it is rounded to float32, in which
        TensorFlow computes with it: 1e-50 does not exceed 0; or None.
      most: the largest number that is allowed.
      expected: the error's text about what was expected.
    """
    if not _is_number(value) or not _is_within(value, least, above, most):
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))


def _is_number(value: typing.Any) -> bool:
    """Whether a value is a real number; True and False, which Python counts as numbers, are none.
    """
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _is_within(value: typing.Any, least: typing.Optional[float], above: typing.Optional[float],
               most: float) -> bool:
    """Whether a number is within the bounds of `check_number`; no comparison with NaN is true."""
    if not -MOST_NUMBER <= value <= most:
        return False
    if least is not None and value < least:
        return False
    return above is None or bool(np.float32(value) > above)


def check_count(name: str, value: typing.Any, least: int = 1, most: int = MOST_COUNT) -> None:
    """Raises `InvalidArgumentError` unless `value` is a whole number from `least` to `most`."""
    if not is_whole_number(value) or value < least:
        raise InvalidArgumentError('%s=%.80r: expected a whole number of at least %d.'
                                   % (name, value, least))
    if value > most:
        raise InvalidArgumentError('%s=%.80r: expected a whole number of at most %d.'
                                   % (name, value, most))


def is_whole_number(value: typing.Any) -> bool:
    """Whether a value is a whole number; True and False, which Python counts as such, are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_graph_mode(what: str) -> None:
    """Raises `InvalidArgumentError` while TensorFlow executes eagerly.

    `what` is the error's text about the part of a graph that is to be made.
    """
    if tf.executing_eagerly():
        raise InvalidArgumentError(
            '%s is a part of a graph, and TensorFlow is executing eagerly: make it under '
            '`with tf.Graph().as_default():`, or call tf.disable_eager_execution() first.' % what)


def check_flag(name: str, value: typing.Any, expected: str = 'True or False') -> None:
    """Raises `InvalidArgumentError` unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))


def check_function(name: str, value: typing.Any, arguments: int, expected: str) -> None:
    """Raises `InvalidArgumentError` unless `value` can be called with so many `arguments`.

    A class counts as no function.
    """
    is_function = callable(value) and not isinstance(value, type)
    if not is_function or not _takes(value, arguments):
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))


def _takes(function: typing.Callable, arguments: int) -> bool:
    """Whether a function can be called with so many `arguments`; True where that is not known."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some built-in functions Python does not know the signature
        return True
    except TypeError:  # no function that Python knows
        return False
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def check_say(say: typing.Any, optional: bool = False) -> None:
    """Raises `InvalidArgumentError` unless `say` takes one text, or is None where `optional`."""
    if optional and say is None:
        return
    expected = 'a function of one text, such as print'
    if optional:
        expected += ', or None'
    check_function('say', say, 1, expected)


def safe_say(say: typing.Callable) -> typing.Callable:
    """A function like `say` that never raises: nobody may read, or the disk may be full. What `say`
    prints is in a log at once, also where this process hangs, or is killed."""
    def safely(line):
        with contextlib.suppress(OSError, ValueError):
            say(line)
            print(end='', flush=True)
    return safely


def check_config(config: typing.Any) -> None:
    """Raises `InvalidArgumentError` unless `config` is a `tf.ConfigProto` or None."""
    if config is not None:
        check_instance('config', config, tf.ConfigProto, 'a tf.ConfigProto, as session_config '
                       'makes it, or None')


def check_session(session: typing.Any, graph: tf.Graph) -> None:
    """Raises `InvalidArgumentError` unless `session` is a session of `graph`."""
    # A session may be one of TensorFlow's wrappers, which have no common base: it is known by what
    # is used of it. A class and an operation have these attributes, too.
    looks_like_session = hasattr(session, 'run') and hasattr(session, 'graph')
    if not looks_like_session or isinstance(session, (type, tf.Operation)):
        raise InvalidArgumentError('session=%.80r of type %s: expected a tf.Session.' % (
            session, type(session).__name__))
    if session.graph is not graph:
        raise InvalidArgumentError('session=%.80r is of another graph than what it is to run: make '
                                   'it under the same tf.Graph().' % (session,))


def check_feed(feed_dict: typing.Any) -> None:
    """Raises `InvalidArgumentError` unless `feed_dict` is None or a dict whose keys are tensors.

    Names of tensors, which `session.run` takes, too, are refused: of a misspelled name one would
    hear only in the step.
    """
    if feed_dict is None:
        return
    check_instance('feed_dict', feed_dict, dict, 'a dict from placeholders to values, or None')
    for key in feed_dict:
        is_tensor = hasattr(key, 'dtype')  # also a sparse or ragged one, or a Keras input
        if not is_tensor:
            raise InvalidArgumentError('feed_dict has the key %.80r of type %s: expected tensors, '
                                       'such as placeholders.' % (key, type(key).__name__))


def check_choice(name: str, value: typing.Any, choices: typing.Iterable[str]) -> None:
    """Raises `InvalidArgumentError` unless `value` is one of the strings `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError('%s=%.80r: expected one of %s.' % (
            name, value, ', '.join(map(repr, choices))))


def check_instance(name: str, value: typing.Any, kind: typing.Any, expected: str) -> None:
    """Raises `InvalidArgumentError` unless `value` is an instance of `kind`, a class or a tuple of
    classes."""
    if isinstance(value, kind):
        return
    if isinstance(value, type):
        expected += ', not the class'
    raise InvalidArgumentError('%s=%.80r of type %s: expected %s.' % (
        name, value, type(value).__name__, expected))


# The bounds of Linux and macOS.
_MOST_BYTES_OF_A_NAME = 255
_MOST_BYTES_OF_A_PATH = 4095


def checked_path(name: str, value: typing.Any, expected: str = 'the name of a directory') -> str:
    """The path of a directory or a file as a string that TensorFlow and the system can open.

    Args:
      name: the name of the argument.
      value: a string or an `os.PathLike`.
      expected: the error's text about what was expected.

    Raises:
      InvalidArgumentError: `value` is something else; it has no UTF-8 (a lone surrogate) or has a
        NUL; or it is too long.
    """
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))
    # A lone surrogate, by which Python reads a byte that is no UTF-8, is kept by the one way of
    # encoding, and replaced by '?' by the other.
    encoded = path.encode('utf-8', 'surrogatepass')
    is_utf_8 = encoded == path.encode('utf-8', 'replace')
    if not is_utf_8 or b'\0' in encoded:
        raise InvalidArgumentError('%s=%.80r: expected %s, in UTF-8 and without a NUL: TensorFlow '
                                   'opens no other.' % (name, value, expected))
    is_on_this_system = '://' not in path  # and in no store, which has other bounds
    longest_name = max(map(len, encoded.split(b'/')))
    if is_on_this_system and longest_name > _MOST_BYTES_OF_A_NAME:
        raise InvalidArgumentError('%s=%.80r: expected %s, of at most %d bytes from one / to the '
                                   'next, and one part has %d.' % (
                                       name, value, expected, _MOST_BYTES_OF_A_NAME, longest_name))
    if len(encoded) > _MOST_BYTES_OF_A_PATH:
        raise InvalidArgumentError('%s=%.80r: expected %s, of at most %d bytes in all, and this '
                                   'has %d.' % (
                                       name, value, expected, _MOST_BYTES_OF_A_PATH, len(encoded)))
    return path


def check_step_variable(global_step: typing.Any, name: str = 'global_step') -> None:
    """Raises `InvalidArgumentError` unless `global_step` is a scalar variable of this graph."""
    check_instance(name, global_step, compat.VARIABLE_TYPES, 'a variable, such as '
                   'tf.train.get_or_create_global_step()')
    check_graph_mode('a training')
    is_number = global_step.dtype.is_integer or global_step.dtype.is_floating
    if global_step.shape.ndims not in (0, None) or not is_number:
        raise InvalidArgumentError('%s is the variable %r of shape %s and type %s: expected one '
                                   'number.' % (name, global_step.op.name, global_step.shape,
                                                global_step.dtype.base_dtype.name))
    # A variable that was made eagerly has no graph.
    if getattr(global_step, 'graph', None) is not tf.get_default_graph():
        raise InvalidArgumentError('%s is the variable %r of another graph than the default one.'
                                   % (name, global_step.name))


def listed_hooks(name: str, hooks: typing.Any) -> list:
    """The hooks that were given for an argument, as a list; raises `InvalidArgumentError` for what
    is no list of `SessionRunHook`s."""
    check_instance(name, hooks, (list, tuple), 'a list of hooks, even for one: [hook]')
    for hook in hooks:
        check_instance('a hook among ' + name, hook, tf.train.SessionRunHook,
                       'a tf.train.SessionRunHook')
    return list(hooks)


def listed_variables(name: str, variables: typing.Any) -> list:
    """A list of variables, checked; for a variable of Keras it has the TensorFlow variable inside.

    Raises:
      InvalidArgumentError: `variables` is no list, has something else than variables, a variable
        of another graph, or one twice.
    """
    check_instance(name, variables, (list, tuple), 'a list of variables')
    tf_variables = [compat.keras_variable_value(variable) for variable in variables]
    names = set()
    for variable in tf_variables:
        if not isinstance(variable, compat.VARIABLE_TYPES):
            raise InvalidArgumentError('%s holds %.80r of type %s: expected variables.'
                                       % (name, variable, type(variable).__name__))
        # A variable that was made eagerly has no graph.
        if getattr(variable, 'graph', None) is not tf.get_default_graph():
            raise InvalidArgumentError('%s holds %r, which belongs to another graph.'
                                       % (name, variable.name.partition(':')[0]))
        if variable.name in names:
            raise InvalidArgumentError('%s holds %r twice: expected each variable once.'
                                       % (name, variable.op.name))
        names.add(variable.name)
    return tf_variables


def scalar_tensors(name: str, values: typing.Any) -> 'collections.OrderedDict':
    """Scalar tensors or variables by their names, checked.

    Args:
      name: the name of the argument.
      values: a dict from names to scalar tensors or variables, or a list of such pairs.

    Returns:
      An `OrderedDict`.

    Raises:
      InvalidArgumentError: `values` is something else; a tensor is known to be no scalar, or has no
        number (a string).
    """
    try:
        if not isinstance(values, (dict, list, tuple)):
            raise TypeError
        named = collections.OrderedDict(values)  # raises for a list of what are no pairs
    except (TypeError, ValueError):
        raise InvalidArgumentError('%s=%.80r: expected a dict from names to scalar tensors.'
                                   % (name, values)) from None
    for key, value in named.items():
        check_instance('a name in ' + name, key, str, 'a string')
        _check_scalar('%s[%r]' % (name, key), value)
    return named


def _check_scalar(name: str, value: typing.Any) -> None:
    """Raises `InvalidArgumentError` unless `value` is a scalar of numbers in the default graph. A
    value whose rank is not static passes."""
    check_instance(name, value, (tf.Tensor,) + compat.VARIABLE_TYPES,
                   'a scalar tensor, which is fetched with a step')
    check_graph_mode('a training')
    if getattr(value, 'graph', None) is not tf.get_default_graph():
        raise InvalidArgumentError('%s is of another graph than the default one.' % name)
    if value.shape.ndims not in (0, None):
        raise InvalidArgumentError('%s has the shape %s: expected a scalar, such as its '
                                   'tf.reduce_mean.' % (name, value.shape))
    dtype = value.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise InvalidArgumentError('%s is of type %s: expected a number.' % (name, dtype.name))
