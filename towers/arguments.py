"""Checks of arguments that several calls share; what is known of optimizers by their class."""

import collections
import inspect
import numbers
import os
import re

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError, InvalidArgumentError


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


# ---- optimizers, by their class ------------------------------------------------------------------

Known = collections.namedtuple('Known', 'slots effect')
"""What is known of an optimizer's class.

Fields:
  slots: how many variables it keeps for each one that it trains.
  effect: of a factor of the gradient: the step `'scales'`; the factor is `'ignored'` (nearly),
    since the step is divided by the gradient's size; or None.
"""

_KNOWN = {
    'AdadeltaOptimizer': Known(2, 'ignored'), 'AdagradOptimizer': Known(1, 'ignored'),
    'AdagradDAOptimizer': Known(2, None), 'AdamOptimizer': Known(2, 'ignored'),
    'AdamWeightDecayOptimizer': Known(2, 'ignored'), 'FtrlOptimizer': Known(2, None),
    'GradientDescentOptimizer': Known(0, 'scales'), 'LAMBOptimizer': Known(2, 'ignored'),
    'MomentumOptimizer': Known(1, 'scales'), 'ProximalAdagradOptimizer': Known(1, None),
    'ProximalGradientDescentOptimizer': Known(0, None), 'RMSPropOptimizer': Known(2, 'ignored')}


def number_of_slots(optimizer):
    """How many slots an optimizer makes for a variable; 1 for one that is not known here."""
    known = [_KNOWN[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _KNOWN]
    inner = compat.wrapped_optimizer(optimizer)
    return known[0].slots if known else 1 if inner is None else number_of_slots(inner)


def effect_of_factor(optimizer):
    """What a factor of the gradient does to the step, see `Known`; None where it is not known."""
    known = _KNOWN.get(type(optimizer).__name__)
    return None if known is None else known.effect


def is_repeatable(optimizer):
    """Whether an optimizer does to a replica exactly what it does to its variable.

    TensorFlow's own go by the gradient and the slots of each variable alone; but for
    `AdagradDAOptimizer`, which goes by the global step, too. A subclass may do more.
    """
    name = type(optimizer).__name__
    return type(optimizer) is getattr(tf.train, name, None) and (
        name in _KNOWN and name != 'AdagradDAOptimizer')


_PACKAGES = frozenset(['horovod', 'byteps', 'kungfu', 'bluefog', 'smdistributed'])
"""Packages whose optimizers, of whatever name, are around another one and combine."""

_CLASSES = frozenset(['SyncReplicasOptimizer', 'CrossShardOptimizer', 'ElasticAverageOptimizer',
                      'ModelAverageOptimizer', 'AGNOptimizer'])
"""Names of TensorFlow's own, and those of contrib; subclasses count."""


def combiner_of(optimizer):
    """The optimizer that combines gradients over machines: the given one, or one that it wraps,
    however deep; or None. `build_towers(cluster=…)` combines, too: numbers would be wrong.

    Nothing is imported: classes are told by the names of themselves and of their modules. What an
    optimizer wraps is in some attribute of its own, or in a list or dict there.
    """
    stack, seen = [optimizer], {}  # the objects are kept, so that no other one gets their ids
    while stack:
        each = stack.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            if _combining_class(each) is not None:
                return each
            stack.extend(reversed(_wrapped(each)))
    return None


def name_of(combiner):
    """The class of a combiner as its users know it, such as `'horovod.DistributedOptimizer'`."""
    kind = _combining_class(combiner)
    return kind.__name__ if kind.__name__ in _CLASSES else '%s.%s' % (
        kind.__module__.partition('.')[0], kind.__name__.lstrip('_'))


def _combining_class(optimizer):
    """The first class of an optimizer, or of its bases, that combines; or None."""
    return next((kind for kind in type(optimizer).__mro__ if kind.__name__ in _CLASSES
                 or kind.__module__.partition('.')[0] in _PACKAGES), None)


def check_alone(optimizers=(), leaves_servers=True, variables=()):
    """Raises `ClusterError` for a program of TensorFlow's parameter servers without `cluster=`."""
    found = leaves_servers and re.search('/job:ps(/task:[0-9]+)?', ' '.join(
        [compat.devices_of_new_variables()] + [each.device for each in variables]))
    names = [name_of(each) for each in map(combiner_of, optimizers) if each is not None]
    if found or 'SyncReplicasOptimizer' in names:
        raise ClusterError(
            'this program is one for parameter servers (%s), and without cluster= the towers would '
            'leave them: pass cluster=towers.Cluster(…) and the optimizer alone to build_towers, '
            'and train within towers.join(cluster, built), see docs/migration.md.' % (
                'a variable on ' + found.group() if found else 'a SyncReplicasOptimizer'))


def _wrapped(optimizer):
    """List of the optimizers that are attributes of an optimizer, or members of such."""
    return [each for value in list(getattr(optimizer, '__dict__', {}).values())
            for each in (list(value.values()) if isinstance(value, dict) else
                         value if isinstance(value, (list, tuple)) else [value])
            if _is_optimizer(each)]


def _is_optimizer(value):
    return not isinstance(value, type) and (isinstance(value, tf.train.Optimizer) or (
        callable(getattr(value, 'compute_gradients', None))
        and callable(getattr(value, 'apply_gradients', None))))
