"""Checks of arguments that several calls share."""

import collections
import contextlib
import inspect
import numbers
import os

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError


def check_number(name, value, least=None, above=None, most=None, expected='a number'):
    """Raises `InvalidArgumentError` unless `value` is a number within the bounds; NaN never is."""
    if (isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real) or value != value
            or (least is not None and value < least) or (above is not None and value <= above)
            or (most is not None and value > most)):
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))


def check_count(name, value, least=1):
    """Raises `InvalidArgumentError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InvalidArgumentError('%s=%.80r: expected a whole number of at least %d.'
                                   % (name, value, least))


def check_graph_mode(what):
    """Raises `InvalidArgumentError` while TensorFlow executes eagerly."""
    if tf.executing_eagerly():
        raise InvalidArgumentError(
            '%s is a part of a graph, and TensorFlow is executing eagerly: make it under '
            '`with tf.Graph().as_default():`, or call tf.disable_eager_execution() first.' % what)


def check_flag(name, value, expected='True or False'):
    """Raises `InvalidArgumentError` unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))


def check_function(name, value, arguments, expected):
    """Raises `InvalidArgumentError` unless `value` can be called with so many `arguments`.

    A class counts as no function. Built-in functions whose signature Python does not know pass.
    """
    fits = callable(value) and not isinstance(value, type)
    if fits:
        try:
            inspect.signature(value).bind(*[None] * arguments)
        except TypeError:
            fits = False
        except ValueError:
            pass
    if not fits:
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))


def check_say(say, optional=False):
    """Raises `InvalidArgumentError` unless `say` takes one text, or is None where `optional`."""
    if say is not None or not optional:
        check_function('say', say, 1, 'a function of one text, such as print'
                       + (', or None' if optional else ''))


def safe_say(say):
    """A function like `say` that never raises: nobody may read, or the disk may be full."""
    def safely(line):
        with contextlib.suppress(OSError, ValueError):
            say(line)
    return safely


def check_config(config):
    """Raises `InvalidArgumentError` unless `config` is a `tf.ConfigProto` or None."""
    if config is not None:
        check_instance('config', config, tf.ConfigProto, 'a tf.ConfigProto, as session_config '
                       'makes it, or None')


def check_session(session, graph):
    """Raises `InvalidArgumentError` unless `session` is a session of `graph`."""
    if not hasattr(session, 'run') or not hasattr(session, 'graph'):
        raise InvalidArgumentError('session=%.80r of type %s: expected a tf.Session.' % (
            session, type(session).__name__))
    if session.graph is not graph:
        raise InvalidArgumentError('session=%.80r is of another graph than what it is to run: make '
                                   'it under the same tf.Graph().' % (session,))


def check_feed(feed_dict):
    """Raises `InvalidArgumentError` unless `session.run` takes this `feed_dict`, a dict or None."""
    if feed_dict is None:
        return
    check_instance('feed_dict', feed_dict, dict, 'a dict from placeholders to values, or None')
    for key in feed_dict:
        if not hasattr(key, 'dtype'):
            raise InvalidArgumentError('feed_dict has the key %.80r of type %s: expected tensors, '
                                       'such as placeholders.' % (key, type(key).__name__))


def check_choice(name, value, choices):
    """Raises `InvalidArgumentError` unless `value` is one of the strings `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError('%s=%.80r: expected one of %s.' % (
            name, value, ', '.join(map(repr, choices))))


def check_instance(name, value, kind, expected):
    """Raises `InvalidArgumentError` unless `value` is of the class `kind`, or of one of several."""
    if not isinstance(value, kind):
        raise InvalidArgumentError('%s=%.80r of type %s: expected %s%s.' % (
            name, value, type(value).__name__, expected,
            ', not the class' if isinstance(value, type) else ''))


def directory_name(name, value, expected='the name of a directory'):
    """A string or an `os.PathLike` as a string; raises `InvalidArgumentError` for anything else."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (name, value, expected))
    return path


def check_step_variable(global_step, name='global_step'):
    """Raises `InvalidArgumentError` unless `global_step` is a scalar variable of this graph."""
    check_instance(name, global_step, compat.VARIABLE_TYPES, 'a variable, such as '
                   'tf.train.get_or_create_global_step()')
    check_graph_mode('a training')
    if global_step.shape.ndims not in (0, None) or not (
            global_step.dtype.is_integer or global_step.dtype.is_floating):
        raise InvalidArgumentError('%s is the variable %r of shape %s and type %s: expected one '
                                   'number.' % (name, global_step.op.name, global_step.shape,
                                                global_step.dtype.base_dtype.name))
    # A variable that was made eagerly has no graph.
    if getattr(global_step, 'graph', None) is not tf.get_default_graph():
        raise InvalidArgumentError('%s is the variable %r of another graph than the default one.'
                                   % (name, global_step.name))


def listed_hooks(name, hooks):
    """The hooks as a list; raises `InvalidArgumentError` unless it is one of `SessionRunHook`s."""
    check_instance(name, hooks, (list, tuple), 'a list of hooks, even for one: [hook]')
    for hook in hooks:
        check_instance('a hook among ' + name, hook, tf.train.SessionRunHook,
                       'a tf.train.SessionRunHook')
    return list(hooks)


def scalar_tensors(name, values):
    """A dict, or a list of pairs, from names to scalar tensors or variables as an `OrderedDict`.

    Raises:
      InvalidArgumentError: something else, a tensor that is known to be no scalar, or a tensor
        that holds no number (a string).
    """
    try:
        named = collections.OrderedDict(values if isinstance(values, (dict, list, tuple)) else None)
    except (TypeError, ValueError):
        raise InvalidArgumentError('%s=%.80r: expected a dict from names to scalar tensors.'
                                   % (name, values)) from None
    for key, value in named.items():
        check_instance('a name in ' + name, key, str, 'a string')
        check_instance('%s[%r]' % (name, key), value, (tf.Tensor,) + compat.VARIABLE_TYPES,
                       'a scalar tensor, which is fetched with a step')
        check_graph_mode('a training')
        kind = value.dtype.base_dtype
        for is_wrong, text in (
                (getattr(value, 'graph', None) is not tf.get_default_graph(),
                 'is of another graph than the default one'),
                (value.shape.ndims not in (0, None),
                 'has the shape %s: expected a scalar, such as its tf.reduce_mean' % value.shape),
                (not (kind.is_floating or kind.is_integer or kind.is_bool),
                 'is of type %s: expected a number' % kind.name)):
            if is_wrong:
                raise InvalidArgumentError('%s[%r] %s.' % (name, key, text))
    return named
