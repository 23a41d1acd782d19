"""What is known of optimizers by their class: slots, the effect of a factor, and which of them
combine gradients over machines themselves."""

import collections
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError

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
