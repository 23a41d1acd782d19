"""Optimizers that combine gradients, or weights, over machines themselves.

`build_towers(cluster=…)` does so already. Twice is wrong without a word: `DistributedOptimizer`
averages each machine's gradient over all machines, whatever the size of its batch, and the average
would be weighted and added up once more; gradients that `SyncReplicasOptimizer` adds up are lost
where the chief alone makes the update.
"""

import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError

_PACKAGES = frozenset(['horovod', 'byteps', 'kungfu', 'bluefog', 'smdistributed'])
"""Packages whose optimizers, of whatever name, are around another one and combine."""

_CLASSES = frozenset(['SyncReplicasOptimizer', 'CrossShardOptimizer', 'ElasticAverageOptimizer',
                      'ModelAverageOptimizer', 'AGNOptimizer'])
"""Names of TensorFlow's own, and those of contrib; subclasses count."""


def combiner_of(optimizer):
    """The optimizer that combines: the given one, or one that it wraps, however deep; or None.

    Nothing is imported: classes are told by the names of themselves and of their modules.

    Args:
      optimizer: what is given to `build_towers`. What an optimizer wraps is in some attribute of
        its own, or in a list or dict there.
    """
    stack, seen = [optimizer], {}  # the objects are kept, so that no other one gets their ids
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if any(kind.__name__ in _CLASSES or kind.__module__.partition('.')[0] in _PACKAGES
               for kind in type(each).__mro__):
            return each
        stack.extend(reversed(_wrapped(each)))
    return None


def name_of(combiner):
    """The class of a combiner as its users know it, such as `'horovod.DistributedOptimizer'`."""
    kind = next(kind for kind in type(combiner).__mro__ if kind.__name__ in _CLASSES
                or kind.__module__.partition('.')[0] in _PACKAGES)
    package, name = kind.__module__.partition('.')[0], kind.__name__.lstrip('_')
    return name if kind.__name__ in _CLASSES else '%s.%s' % (package, name)


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
    found = []
    for value in list(getattr(optimizer, '__dict__', {}).values()):
        members = (list(value.values()) if isinstance(value, dict) else
                   value if isinstance(value, (list, tuple)) else [value])
        found += [each for each in members if _is_optimizer(each)]
    # `TowerOptimizer` may have a function that makes it.
    made = getattr(type(optimizer), '_optimizer', None)
    if isinstance(optimizer, tf.train.Optimizer) and callable(made):
        found.append(made(optimizer))
    return found


def _is_optimizer(value):
    return not isinstance(value, type) and (isinstance(value, tf.train.Optimizer) or (
        callable(getattr(value, 'compute_gradients', None))
        and callable(getattr(value, 'apply_gradients', None))))
